"""Break running jobs at random moments, start them again, and see that nothing is lost."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import Job, assert_same_weights, commands_of, curve
from conftest import rows, wait_for, wait_for_saves

KILLS = int(os.environ.get("SOAK_KILLS", 5))  # of each shape
IMAGES = "--dataset mnist --batch_size 24 --epochs 4 --dropout 0.5"
GPT = "--d_model 64 --n_heads 2 --num_layers 4 --seq_len 32 --batch_size 16 --max_steps 180"
SHAPES = {  # of jobs: script, processes (of each agent), arguments
    "singlegpu": ("singlegpu/images.py", 1, IMAGES),
    "multigpu": ("multigpu/images.py", 2, IMAGES),
    "multinode": ("multinode/images.py", 2, IMAGES),
    "two nodes": ("multinode/images.py", (2, 1), IMAGES),
    "stages": ("hybrid/images.py", 2, f"{IMAGES} --num_stages 2"),
    "pipeline": ("hybrid/gpt_pipeline.py", 2, f"{GPT} --num_stages 2"),
    "shards": ("hybrid/gpt_fsdp.py", 2, GPT),
}


@pytest.fixture
def shape(request, data, tmp_path):
    """Script, processes and arguments of a job that saves every 5 steps to job.pt."""
    script, processes, words = SHAPES[request.param]
    source = ("--dataset", data / "words.txt") if "gpt" in script else ("--data_dir", data)
    log = tmp_path / "a.jsonl"
    files = ("--snapshot", tmp_path / "job.pt", "--eval_every", 5, "--log", log)
    more = ("--timeout", 30) if processes != 1 else ()
    return script, processes, [*words.split(), *source, *files, *more]


def finish(run, shape, tmp_path):
    """Start the job a last time: it ends with the weights and the losses of an undisturbed one."""
    script, processes, words = shape
    run(script, *words, processes=processes)
    other = ("--snapshot", tmp_path / "whole.pt", "--log", tmp_path / "whole.jsonl")
    run(script, *words, *other, processes=processes)
    assert_same_weights(tmp_path / "job.pt", tmp_path / "whole.pt")
    ended, whole = curve(tmp_path / "a.jsonl"), curve(tmp_path / "whole.jsonl")
    assert (ended[:, 1] == whole[:, 1]).all(), "losses of validation"
    np.testing.assert_allclose(ended, whole, rtol=1e-6)  # train_loss: float32 from look to look
    assert not set(os.listdir(tmp_path)) - {"job.pt", "a.jsonl", "whole.pt", "whole.jsonl"}


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


def end_all(jobs):
    """Returns when all processes have ended: --timeout ends those whose torchrun was killed."""
    with contextlib.suppress(AssertionError):
        wait_for(lambda: not any(each.processes() for each in jobs), 120)
    left = [command for each in jobs for command in each.processes().values()]
    assert not left, left


@pytest.mark.parametrize("shape", SHAPES, indirect=True)
def test_killed_jobs_end_with_undisturbed_weights(start, run, tmp_path, chance, shape):
    """SIGKILL or SIGTERM for a process or for what launched it."""
    script, processes, words = shape
    for _ in range(KILLS):
        started = start(script, *words, processes=processes)
        jobs = started if isinstance(started, list) else [started]
        moment = chance.choice(("start", "step", "save"))
        wait_for_moment(jobs[0], tmp_path, moment, chance)
        job, signum = chance.choice(jobs), chance.choice((signal.SIGKILL, signal.SIGTERM))
        victims = job.workers() if len(jobs) > 1 else [*job.workers(), job.process.pid]
        with contextlib.suppress(ProcessLookupError):
            if job.process.poll() is None and victims:
                os.kill(chance.choice(victims), signum)
        print(moment, signum.name, [each.wait()[0] for each in jobs])
        end_all(jobs)
    finish(run, shape, tmp_path)


@pytest.mark.parametrize(
    "shape", ["multigpu", "multinode", "stages", "pipeline", "shards"], indirect=True
)
def test_a_hung_process_ends_the_job(start, run, tmp_path, chance, shape):
    """A process hangs: the others time out, and the job ends by itself with a non-zero status."""
    script, processes, words = shape
    job = start(script, *words, "--timeout", 5, processes=processes)
    wait_for_saves(job, tmp_path / "job.pt", 2)
    os.kill(chance.choice(job.workers()[:processes]), signal.SIGSTOP)  # what loads starts later
    begin = time.monotonic()
    status, _, err = job.wait(180)
    print(f"status {status} after {time.monotonic() - begin:.0f} s")
    assert status, err
    wait_for(lambda: not job.processes(), 60)
    finish(run, shape, tmp_path)


@pytest.mark.parametrize("script", ["multigpu/images.py", "multinode/images.py"])
def test_jobs_at_once(script, data, tmp_path):
    """Of 24 short jobs, eight at the same moment, none meets another: each ends well and alike."""
    words = "--max_steps 2 --batch_size 24 --data_dir {data} --dataset mnist --model mlp"
    log = tmp_path / "log.jsonl"
    for _ in range(3):
        more = [*words.format(data=data).split(), "--log", log]
        commands = [commands_of(script, more, 2)[0] for _ in range(8)]
        for job in [Job([sys.executable, *command], tmp_path) for command in commands]:
            status, _, err = job.wait()
            assert status == 0 and "terminate called" not in err and "leaked" not in err, err
    losses = {row["train_loss"] for row in rows(log)}
    assert len(rows(log)) == 48 and len(losses) == 1, losses


ON_LOOPBACK = ["multigpu", "multinode", "stages", "pipeline", "shards"]


@pytest.mark.parametrize("shape", ON_LOOPBACK, indirect=True)
def test_listens_on_loopback_alone(start, tmp_path, shape):
    """The processes that train, on a single node; torchrun's own store does not."""
    script, processes, words = shape
    job = start(script, *words, "--epochs", 1000, processes=processes)
    wait_for_saves(job, tmp_path / "job.pt", 1)
    own = set(map(str, job.processes() if "multigpu" in script else job.workers()))
    lines = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True).stdout.splitlines()
    found = {line.split()[3] for line in lines if set(re.findall(r"pid=(\d+)", line)) & own}
    assert found and all(place.startswith(("127.", "[::1]")) for place in found), found
