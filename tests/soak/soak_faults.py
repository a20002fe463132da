"""Break running jobs at random moments, start them again, and see that nothing is lost."""

import contextlib
import os
import re
import signal
import subprocess
import time

import pytest
from conftest import assert_same_weights, rows, wait_for
from test_stops import wait_for_saves

KILLS = int(os.environ.get("SOAK_KILLS", 5))  # of each shape
IMAGES = "--dataset mnist --batch_size 24 --epochs 4 --dropout 0.5"
GPT = "--d_model 64 --n_heads 2 --num_layers 4 --seq_len 32 --batch_size 16 --max_steps 180"
SHAPES = {  # of jobs: script, processes, arguments
    "singlegpu": ("singlegpu/images.py", 1, IMAGES),
    "multigpu": ("multigpu/images.py", 2, IMAGES),
    "multinode": ("multinode/images.py", 2, IMAGES),
    "stages": ("hybrid/images.py", 2, f"{IMAGES} --num_stages 2"),
    "pipeline": ("hybrid/gpt_pipeline.py", 2, f"{GPT} --num_stages 2"),
    "shards": ("hybrid/gpt_fsdp.py", 2, GPT),
    "parts": ("hybrid/gpt_tensor.py", 2, GPT),
}


def wait_for_moment(job, folder, moment, chance):
    """Returns while the job starts, or after a snapshot, or while one is written."""
    if moment == "start":
        time.sleep(chance.uniform(0, 8))
        return
    wait_for_saves(job, folder / "job.pt", chance.randint(1, 5))
    if moment == "save":
        partial = lambda: list(folder.glob("*.tmp"))  # noqa: E731
        wait_for(lambda: partial() or job.process.poll() is not None, pause=0.0005)
    time.sleep(chance.uniform(0, 0.1 if moment == "step" else 0.02))


@pytest.mark.parametrize("shape", SHAPES)
def test_killed_jobs_end_with_undisturbed_weights(start, run, data, tmp_path, chance, shape):
    """SIGKILL or SIGTERM for a process or for what launched it. No process is left.

    While they train, they listen on loopback alone, but for torchrun's own store. Started a last
    time, the job ends with the weights and the losses of an undisturbed one.
    """
    script, processes, words = SHAPES[shape]
    source = ("--dataset", data / "words.txt") if "gpt" in script else ("--data_dir", data)
    files = tmp_path / "job.jsonl", tmp_path / "whole.jsonl"
    words = [*words.split(), *source, "--eval_every", 5]
    whole = ("--snapshot", tmp_path / "whole.pt", "--log", files[1])
    run(script, *words, *whole, processes=processes)
    words += ["--snapshot", tmp_path / "job.pt", "--log", files[0]]
    moments, heard = ("start", "step") if "fsdp" in script else ("start", "step", "save"), set()
    for number in range(KILLS):
        job = start(script, *words, processes=processes)
        moment = chance.choice(moments) if number else "step"
        wait_for_moment(job, tmp_path, moment, chance)
        own = set(map(str, job.processes() if "multigpu" in script else job.workers()))
        lines = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True).stdout.splitlines()
        heard |= {line.split()[3] for line in lines if set(re.findall(r"pid=(\d+)", line)) & own}
        signum = chance.choice((signal.SIGKILL, signal.SIGTERM))
        with contextlib.suppress(ProcessLookupError):
            if job.process.poll() is None:
                os.kill(chance.choice([*job.workers(), job.process.pid]), signum)
        print(moment, signum.name, job.wait()[0])
        wait_for(lambda job=job: not job.processes(), 120)  # torchrun's train on for a while
    assert len(heard) > 0 or processes == 1
    assert all(place.startswith(("127.", "[::1]")) for place in heard), heard
    run(script, *words, processes=processes)
    if "fsdp" not in script:  # whose snapshots are folders of shards
        assert_same_weights(tmp_path / "job.pt", tmp_path / "whole.pt")
    ended, whole = ({row["step"]: row.get("val_loss") for row in rows(log)} for log in files)
    both = [step for step, loss in ended.items() if loss and step % 5 == 0]  # not killed in one
    assert len(both) > 9 and all(ended[step] == whole[step] for step in both)
