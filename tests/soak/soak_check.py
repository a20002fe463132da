"""tools/check.py by real commands: faults, split models, unlike machines, emulated GPUs."""

import re
import sys

import faults
import pytest
import test_check
import torch
from test_check import TORCHRUN, problems


@pytest.mark.parametrize("name", faults.FAULTS)
def test_a_fault_is_named_by_the_command(name, tmp_path):
    test_check.test_a_fault_is_named(name, tmp_path, faults.check)


def torchrun(processes, name, *flags):
    return [*TORCHRUN, processes, faults.FOLDER / name, *flags]


@pytest.mark.parametrize("processes, name", [(2, "tensor_parallel.py"), (4, "sharded.py")])
def test_copies_of_a_model_that_is_split(processes, name, tmp_path):
    """Of a split model, what is whole in several ranks has the same bits there; parts differ."""
    status, lines, before = faults.check(torchrun(processes, name), tmp_path, "--steps 8")
    assert status == 0 and problems(lines) == [], (lines, before[-2000:])
    status, lines, _ = faults.check(torchrun(processes, name, "--fault"), tmp_path, "--steps 8")
    assert status == 1 and any("tensors differ after step" in line for line in lines), lines


def test_copies_of_a_stage(tmp_path):
    """Of two pipelines, ranks 1 and 3 have the same stage: here nothing averages it."""
    averages = "dist.all_reduce(gradients, group=copies, async_op=True)"
    edits = [
        (averages, averages.replace("gradients,", "gradients * 1 if rank % 2 else gradients,"))
    ]
    path = faults.write("hybrid/gpt_pipeline.py", edits, tmp_path)
    sizes = "--num_layers 2 --d_model 32 --n_heads 2 --seq_len 32 --batch_size 16 --num_stages 2"
    words = torchrun(4, path, *sizes.split(), "--num_microbatches", 2)
    status, lines, before = faults.check(words, tmp_path, "--steps 6")
    assert status == 1, (lines, before[-2000:])
    assert any(re.match("ERROR +weights +11 of 11 .* ranks 1 and 3", line) for line in lines), lines


def test_shards_are_compared_with_one_process(tmp_path):
    against = f"--steps 8 --against '{sys.executable} {faults.FOLDER}/sharded.py'"
    status, lines, before = faults.check(torchrun(2, "sharded.py"), tmp_path, against)
    assert status == 0, (lines, before[-2000:])
    assert any("the same weights in 8 steps" in line for line in lines), lines


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="no other kernels")
def test_machines_that_round_differently(tmp_path):
    """Kernels of another processor round differently: a warning."""
    rank = '            os.environ["RANK"] = str(rank)\n'
    other = rank + "            os.environ |= {'ATEN_CPU_CAPABILITY': 'default'} if rank else {}\n"
    sgd = "torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)"
    edits = [(rank, other), (sgd, "torch.optim.AdamW(ddp.parameters(), lr=0.01, fused=True)")]
    fault = faults.FAULTS["no_averaging"]._replace(edits=edits)
    status, lines, before = faults.run(fault, tmp_path)
    assert status == 0 and "rounding" in lines[0], (lines, before[-2000:])


@pytest.mark.usefixtures("emulator")
def test_on_the_emulated_accelerator(tmp_path, monkeypatch):
    """A right training has no finding; a fault is named."""
    monkeypatch.setenv("PYTHONPATH", str(faults.ROOT / "tests/emulator"))
    monkeypatch.setenv("EMU_DEVICES", "4")
    fault = faults.FAULTS["images_same_masks"]
    for processes in (2, 3):
        flags = f"{fault.flags} --batch_size 30 --num_gpus {processes}".split()
        words = [sys.executable, faults.ROOT / "multigpu/images.py", *flags]
        status, lines, before = faults.check(words, tmp_path, "--steps 8")
        assert status == 0 and problems(lines) == [], (lines, before[-2000:])
    status, lines, _ = faults.run(fault, tmp_path)
    assert faults.is_found(fault, lines), lines
