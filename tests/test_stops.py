"""Runs that are stopped, killed, suspended or cut off from their terminal, and started again."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ENVIRONMENT, ROOT, TIMEOUT, assert_same_weights, curve
from conftest import load, rows, wait_for, wait_for_saves


@pytest.fixture
def base(data):
    words = ("--model", "mlp", "--dropout", 0.5, "--dataset", "mnist", "--data_dir", data)
    return (*words, "--batch_size", 48)  # an epoch has 25 steps


def asked_to_stop(where):
    """A change: after a step, the process for which that holds, and no other, gets SIGTERM."""
    kill = f"        if {where}:\n            os.kill(os.getpid(), signal.SIGTERM)\n"
    return {UPDATE: UPDATE + kill}


UPDATE = "        bar.update()\n"


def test_other_numbers_of_processes_carry_on(attempt, run, base, changed, tmp_path):
    """One of three, not rank 0, is asked to stop in mid-epoch. In all folders the run goes on."""
    begun, whole = tmp_path / "begun.pt", tmp_path / "whole"
    words = (*base, "--dropout", 0, "--max_steps", 75, "--eval_every", 37)
    run("multigpu/images.py", *words, "--snapshot", whole, "--log", f"{whole}.jsonl", processes=3)
    words = (*words, "--snapshot")
    copy = changed("multinode/images.py", asked_to_stop("step == 28 and rank == 2"))
    status, out, err = attempt(copy, *words, begun, processes=3)
    step = load(begun)["step"]
    assert status == 75 and 28 <= step <= 37 and f"stopped at step {step} of 75" in out, (out, err)
    moves = ("singlegpu", 1), ("multigpu", 3), ("multinode", (2, 2)), ("hybrid", 2)
    for folder, processes in moves:
        snapshot, log = tmp_path / f"{folder}.pt", tmp_path / f"{folder}.jsonl"
        shutil.copy(begun, snapshot)
        run(f"{folder}/images.py", *words, snapshot, "--log", log, processes=processes)
        np.testing.assert_allclose(curve(log), curve(f"{whole}.jsonl"), rtol=1e-4)
    assert_same_weights(tmp_path / "multigpu.pt", whole, rounding=1e-5)


def test_a_run_stopped_after_its_last_step(attempt, run, base, changed, tmp_path):
    """The same command validates once. Typed again, it does nothing."""
    words = [*base, "--max_steps", 4, "--log", tmp_path / "log", "--snapshot", tmp_path / "s.pt"]
    copy = changed("multinode/images.py", asked_to_stop("step == 4 and rank == 1"))
    assert attempt(copy, *words, processes=3)[0] == 75
    run("multinode/images.py", *words, processes=3)
    validated = [row for row in rows(tmp_path / "log") if "val_loss" in row]
    assert [row["step"] for row in validated] == [4] * 3
    before = (tmp_path / "log").read_text()
    run("multinode/images.py", *words, processes=3)
    assert (tmp_path / "log").read_text() == before


def test_a_run_that_saves_nothing_is_not_to_be_run_again(attempt, start, base, changed, tmp_path):
    """Status 143, without --snapshot and before the first step."""
    copy = changed("singlegpu/images.py", asked_to_stop("step == 2"))
    status, out, _ = attempt(copy, *base)
    assert status == 143 and "saved nothing" in out
    job = start("multigpu/images.py", *base, "--snapshot", tmp_path / "s.pt", processes=3)
    wait_for(lambda: len(job.workers()) == 3)
    job.process.send_signal(signal.SIGTERM)  # while they import torch
    status, out, err = job.wait()
    assert status == 143 and not (tmp_path / "s.pt").exists(), (out, err)
    wait_for(lambda: not job.processes())


def test_killed_in_validation(fork, attempt, run, base, changed, tmp_path):
    """The run has saved before, and repeats the validation alone.

    Asked to stop before that, it ends with 143, as it took no step.
    """
    cut, log = tmp_path / "cut.pt", tmp_path / "log.jsonl"
    words = (*base, "--max_steps", 20, "--snapshot", cut)
    slow = (ROOT / "tests/helpers/slow.py", "eval", 0, TIMEOUT)
    job = fork("singlegpu/images.py", *words, before=slow)
    wait_for_saves(job, cut, 1)
    job.process.send_signal(signal.SIGKILL)
    job.wait()
    start = '    mark("start")\n'
    copy = changed("singlegpu/images.py", {start: f"    signal.raise_signal(15)\n{start}"})
    status, out, _ = attempt(copy, *words)
    assert status == 143 and "stopped at step 20 of 20" in out
    run("singlegpu/images.py", *words, "--log", log)
    assert rows(log)[0]["steps"] == 0 and rows(log)[0]["eval"] > 0 and len(curve(log)) == 1


@pytest.mark.parametrize(("folder", "processes"), [("singlegpu", 1), ("multigpu", 3)])
def test_a_killed_parent_leaves_nobody(fork, base, tmp_path, folder, processes):
    """Neither ranks nor workers."""
    more = ("--epochs", 10_000, "--num_workers", 1, "--snapshot", tmp_path / "s.pt")
    job = fork(f"{folder}/images.py", *base, *more, processes=processes)
    wait_for_saves(job, tmp_path / "s.pt", 2)
    assert len(job.processes()) >= 2 * processes
    job.process.send_signal(signal.SIGKILL)
    job.wait()
    wait_for(lambda: not job.processes(), seconds=120)
    load(tmp_path / "s.pt")


ORDER = "    if not isinstance(data, Images):\n"


@pytest.mark.parametrize("folder", ("singlegpu", "multigpu"))
def test_a_second_ctrl_c_ends_a_hung_run(fork, base, changed, tmp_path, folder):
    """The first one waits for a step, which does not come: the order of the data is not found."""
    hang = f"""    if hasattr(training_order, "called"):  # by the fingerprint
        open("hung", "w"), time.sleep(1000)
    training_order.called = True
{ORDER}"""
    job = fork(changed(f"{folder}/images.py", {ORDER: hang}), *base, processes=3)
    wait_for((tmp_path / "hung").exists)
    time.sleep(0.5)
    for _ in range(2):
        os.killpg(job.process.pid, signal.SIGINT)
        time.sleep(0.5)
    status, _, err = job.wait(60)
    assert status not in (0, 75), err
    wait_for(lambda: not job.processes())


GUARD = 'if __name__ == "__main__":\n'
SIGNALLED = """def signal_often():
    for _ in range(500):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.001)


thread = lambda: __import__("threading").Thread(target=signal_often, daemon=True)
os.register_at_fork(after_in_child=lambda: thread().start())


"""


def test_signals_while_workers_start(run, base, changed, tmp_path):
    """Signals to the whole job reach them, too, and end none: not even in its first moments."""
    words = (*base, "--max_steps", 4, "--eval_every", 2, "--num_workers", 2)
    copy = changed("singlegpu/images.py", {GUARD: SIGNALLED + GUARD})
    run(copy, *words, "--log", tmp_path / "log")
    assert len(curve(tmp_path / "log")) == 2


@pytest.mark.parametrize("folder", ("singlegpu", "multigpu"))
def test_a_reader_of_the_output_that_ends(base, tmp_path, folder):
    """As in `2>&1 | head`: the run goes on. As in `2>&1 | tee` at Ctrl-C: it saves and says so."""
    read, write = os.pipe()
    log, snapshot = tmp_path / "log.jsonl", tmp_path / "s.pt"
    words = [*base, "--epochs", 10_000, "--eval_every", 20, "--num_workers", 1]
    words += ["--snapshot", snapshot, "--log", log]
    command = list(map(str, [sys.executable, ROOT / f"{folder}/images.py", *words]))
    where = {"cwd": tmp_path, "env": ENVIRONMENT, "start_new_session": True}
    process = subprocess.Popen(command, stdout=write, stderr=write, **where)
    try:
        os.close(write)
        wait_for(log.exists)
        os.close(read)
        enough = log.stat().st_size + 12_000  # some rows
        wait_for(lambda: log.stat().st_size > enough or process.poll() is not None)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(TIMEOUT) == 75
    finally:
        process.kill()
    assert rows(log)[-1]["step"] == load(snapshot)["step"] and "val_loss" not in rows(log)[-1]


LOSS = "    loss = nn.functional.cross_entropy(logits, labels)\n"
QUEUED = """class Queued(torch.Tensor):
    queue, waits = [], []

    def __float__(self):  # as a GPU: Python is ahead by so many steps, which take so long
        time.sleep(0.02 * len(self.queue))
        self.waits.append(len(self.queue))
        self.queue.clear()
        return super().__float__()


"""


def test_looks_follow_a_device_that_is_behind(run, base, changed):
    """About once a second, though Python starts a thousand steps in this time.

    A few quick steps, as where data comes in bursts, put off the next look by as many again.
    """
    changes = {
        LOSS: f"{LOSS}    Queued.queue += [0] * model.training\n",
        'loss * len(labels), "acc"': '(loss * len(labels)).as_subclass(Queued), "acc"',
        "def create_optimizer": f"{QUEUED}def create_optimizer",
        '    """Draws --reconstructions': '    print("waits", Queued.waits)\n    """',
    }
    script, words = (
        changed("multigpu/images.py", changes),
        ("--max_steps", 250, "--eval_every", 250),
    )
    out = run(script, *base, *words, processes=2)
    waits = [int(steps) for steps in re.findall(r"\d+", re.search(r"waits (.*)", out)[1])]
    waits = [steps for steps in waits if steps > 0]  # none in validation
    assert sum(waits) == 250 and max(waits) <= 60, waits  # 50 steps take a second
    assert all(later <= 2 * steps for steps, later in zip(waits, waits[1:])), waits
