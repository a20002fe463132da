"""What trainings of two sizes hold, and what tools/memory.py tells of them."""

import json
import os
import subprocess
import sys

from conftest import ROOT, free_port, module

# glibc then gives back what is freed, so that the most memory is the most that was in use.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
SMALL = "--d_model 64 --num_layers 2 --batch_size 4"
LARGE = {  # most of what it takes
    "activations": "--d_model 256 --num_layers 4 --batch_size 64",
    "weights": "--d_model 768 --num_layers 8 --batch_size 4",
}


def measured(script, words, folder):
    """Returns the most MB that a process of a training on two CPU processes has held."""
    log = folder / f"{len([*folder.glob('*.jsonl')])}.jsonl"
    command = [sys.executable, ROOT / script, "--num_gpus", "2"]
    if not script.startswith("multigpu"):
        torchrun = f"-m torch.distributed.run --nproc_per_node=2 --master_port={free_port()} --"
        command = [sys.executable, *torchrun.split(), ROOT / script]
    command = [*command, *words, "--log", log]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | GIVE_BACK)
    assert done.returncode == 0, done.stderr
    return max(json.loads(line)["peak_MB"] for line in log.read_text().splitlines())


def predicted(words, is_fsdp=False, checkpoints=False):
    """Returns the MB that tools/memory.py tells of such a process."""
    tool, script = module("tools/memory.py"), module("multigpu/gpt.py")
    row = tool.count(script, words, 2, checkpoints)
    row = tool.divided(row, 2) if is_fsdp else row
    return row["total"] / 1e6


def ratio(script, large, text, folder, more=(), both=(), **how):
    """Returns the difference of two sizes as predicted, over that measured.

    The training gets the flags `more`; it and the prediction get `both`.
    """
    base = [*f"--dataset {text} --max_steps 3 --n_heads 4".split(), *both]
    sizes = [[*base, *words.split()] for words in (SMALL, large)]
    small, large = (measured(script, [*words, *more], folder) for words in sizes)
    assert large - small > 150, "more than what is uncertain"
    told = predicted(sizes[1], **how) - predicted(sizes[0], **how)
    return told / (large - small)
