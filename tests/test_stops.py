"""Runs that are stopped, cut off from their terminal, and started again elsewhere."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ROOT, assert_same_weights, curve
from conftest import load, rows, wait_for, wait_for_saves


def signalled(where, name="SIGTERM", at="        bar.update()\n"):
    """A change: where this holds, a process gets this signal after a step, or `at` this line."""
    [indent] = re.findall("^ *", at)
    send = f"{indent}if {where}:\n{indent}    os.kill(os.getpid(), signal.{name})\n"
    return {at: at + send}


def test_other_numbers_of_processes_carry_on(attempt, logged, base, changed, tmp_path):
    """One of three, not rank 0, is asked to stop in mid-epoch. In all folders the run goes on."""
    begun, whole = tmp_path / "begun.pt", tmp_path / "whole"
    words = (*base, "--dropout", 0, "--max_steps", 60, "--eval_every", 37, "--snapshot")
    expected = curve(logged("multigpu/images.py", *words, whole, processes=3))
    copy = changed("multinode/images.py", signalled("step == 28 and rank == 2"))
    status, out, err = attempt(copy, *words, begun, processes=3)
    step = load(begun)["step"]
    assert status == 75 and 28 <= step <= 37 and f"stopped at step {step} of 60" in out, (out, err)
    moves = ("singlegpu", 1), ("multigpu", 3), ("multinode", (2, 2)), ("hybrid", 2)
    for folder, processes in moves:
        snapshot = shutil.copy(begun, tmp_path / f"{folder}.pt")
        log = logged(f"{folder}/images.py", *words, snapshot, processes=processes)
        np.testing.assert_allclose(curve(log), expected, rtol=1e-4)
    assert_same_weights(tmp_path / "multigpu.pt", whole, rounding=1e-5)


def test_stopped_when_only_validation_is_left(attempt, run, base, changed, tmp_path):
    """Killed in it, asked to stop before it: it follows, once. Typed again, nothing is done.

    A stop ends with status 143 where no step was taken since the start.
    """
    words = [*base, "--max_steps", 4, "--log", tmp_path / "log", "--snapshot", tmp_path / "s.pt"]
    change = signalled("True", "SIGKILL", at="    model.eval()\n")
    assert attempt(changed("singlegpu/images.py", change), *words)[0] == signal.SIGKILL
    is_one = "os.environ.get('RANK', '1') == '1'"  # of all processes
    change = signalled(is_one, at="        signal.signal(signum, note_stop)\n")
    for folder, processes in ("singlegpu", 1), ("multinode", 3):
        copy = changed(f"{folder}/images.py", change)
        status, out, _ = attempt(copy, *words, processes=processes)
        assert status == 143 and "stopped at step 4 of 4" in out
    for _ in range(2):
        run("multinode/images.py", *words, processes=3)
        is_validated = ["val_loss" in line for line in open(tmp_path / "log")]
        assert is_validated == [False] * 4 + [True] * 3


def test_a_run_that_saves_nothing_is_not_to_be_run_again(attempt, start, base, changed, tmp_path):
    """Status 143, without --snapshot and before the first step."""
    copy = changed("singlegpu/images.py", signalled("step == 2"))
    status, out, _ = attempt(copy, *base)
    assert status == 143 and "saved nothing" in out
    job = start("multigpu/images.py", *base, "--snapshot", tmp_path / "s.pt", processes=2)
    wait_for(lambda: len(job.workers()) == 2)
    job.process.send_signal(signal.SIGTERM)  # while they import torch
    status, out, err = job.wait()
    assert status == 143 and not (tmp_path / "s.pt").exists(), (out, err)
    wait_for(lambda: not job.processes())


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
    for _ in range(2):
        time.sleep(0.5)
        os.killpg(job.process.pid, signal.SIGINT)
    status, _, err = job.wait(60)
    assert status not in (0, 75), err
    wait_for(lambda: not job.processes())


GUARD = 'if __name__ == "__main__":\n'
CLOSED = f"""{GUARD}    read, write = os.pipe()
    os.close(read), os.dup2(write, 1), os.dup2(write, 2)
"""
SIGNALLED = """def signal_often():
    for _ in range(500):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.001)


thread = lambda: __import__("threading").Thread(target=signal_often, daemon=True)
os.register_at_fork(after_in_child=lambda: thread().start())


"""


@pytest.mark.parametrize(("folder", "more"), [("singlegpu", SIGNALLED), ("multigpu", "")])
def test_a_reader_of_the_output_that_ends(fork, base, changed, tmp_path, folder, more):
    """As in `2>&1 | head`: the run goes on. As in `2>&1 | tee` at Ctrl-C: it saves.

    Signals to the whole job reach workers, too, and end none: not even in its first moments.
    """
    log, snapshot = tmp_path / "log.jsonl", tmp_path / "s.pt"
    words = [*base, "--epochs", 10_000, "--eval_every", 20, "--num_workers", 2]
    copy = changed(f"{folder}/images.py", {GUARD: more + CLOSED})
    job = fork(copy, *words, "--snapshot", snapshot, "--log", log, processes=2)
    wait_for_saves(job, snapshot, 3)
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.wait()[0] == 75
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
    words = ("--max_steps", 140, "--eval_every", 140)
    out = run(changed("multigpu/images.py", changes), *base, *words, processes=2)
    waits = [int(steps) for steps in re.findall(r"\d+", re.search(r"waits (.*)", out)[1])]
    waits = [steps for steps in waits if steps > 0]  # none in validation
    assert sum(waits) == 140 and max(waits) <= 60, waits  # 50 steps take a second
    assert all(later <= 2 * steps for steps, later in zip(waits, waits[1:])), waits


@pytest.mark.parametrize("folder", ("singlegpu", "multigpu"))
def test_memory_is_that_of_the_process(folder):
    """What the process that has started it held before does not count."""
    code = f"""import numpy, os, sys
if len(sys.argv) > 1:
    numpy.ones(10**9, "u1"), os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
sys.path.insert(0, "{folder}")
import argparse, images
print(images.take_marks(argparse.Namespace(batch_size=1))["peak_MB"])"""
    words = [sys.executable, "-c", code, code]
    assert 50 < float(subprocess.run(words, cwd=ROOT, stdout=-1, check=True).stdout) < 900
