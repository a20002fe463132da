"""How the scripts are launched, resumed and misused: with images.py, for all tasks."""

import os
import pickle
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import CONSTANT, ROOT, SCRIPTS, assert_same_weights, forks_of, load, rows
from conftest import wait_for, wait_for_saves
from fork_server import run_all

TASKS = ("images", "text", "translation", "gpt")
STEPS = 60  # between validations, of the runs that get a signal at any moment
STOPS = {  # signals, and who gets them. Only after SIGKILL is the run not asked to save
    "singlegpu": [(signal.SIGUSR2, "parent")],
    "multigpu": [(signal.SIGKILL, "rank"), (signal.SIGTERM, "parent")],
    "multinode": [(signal.SIGTERM, "parent")],
}


@pytest.fixture
def base(data):
    words = ("--model", "mlp", "--dropout", 0.5, "--dataset", "mnist", "--data_dir", data)
    return (*words, "--batch_size", 48)  # an epoch has 25 steps


@pytest.mark.parametrize("folder", STOPS)
def test_resumed_weights_are_those_of_an_undisturbed_run(
    start, fork, run, changed, base, tmp_path, chance, folder
):
    """Killed, suspended, stopped and started again: the same weights, bit for bit.

    A worker loads its data, and none those of the undisturbed run. The snapshot is a link.
    """
    script, processes = changed(f"{folder}/images.py", CONSTANT), 1 if folder == "singlegpu" else 2
    cut, whole, log = (tmp_path / name for name in ("disk/cut.pt", "whole.pt", "log.jsonl"))
    cut.parent.mkdir()
    (link := tmp_path / "link.pt").symlink_to(cut)
    base = (*base, "--eval_every", STEPS)
    for signum, who in STOPS[folder]:
        more = ("--epochs", 10_000, "--num_workers", 1, "--snapshot", link)
        is_real = folder != "singlegpu" and who == "parent"  # the users' launch
        job = (start if is_real else fork)(script, *base, *more, processes=processes)
        wait_for_saves(job, link, 1 + cut.exists())  # a resumed run may begin with one
        time.sleep(chance.uniform(0, 1))
        if folder == "multinode":  # as `scontrol suspend` does
            for suspend in (signal.SIGSTOP, signal.SIGCONT):
                for pid in job.processes():
                    os.kill(pid, suspend)
                time.sleep(1)
        os.kill(job.workers()[-1] if who == "rank" else job.process.pid, signum)
        status, out, err = job.wait()
        if signum == signal.SIGKILL:
            assert status == 128 + signum and "signal SIGKILL" in err, (status, err)
        else:  # torchrun has a status of its own
            assert status == (1 if folder == "multinode" else os.EX_TEMPFAIL), (status, err)
        wait_for(lambda job=job: not job.processes())
    step = load(cut)["step"]
    assert f"stopped at step {step} of" in out and str(link) in out
    end = (step // STEPS + 1) * STEPS  # the next validation
    base = (*base, "--max_steps", end)
    run(script, *base, "--snapshot", link, "--log", log, processes=processes)
    last = rows(log)[-1]
    assert (last["step"], last["steps"]) == (end, max(0, end - step - 3)), "it went on at that step"
    run(script, *base, "--snapshot", whole, processes=processes)
    assert_same_weights(cut, whole)
    assert link.is_symlink() and os.listdir(cut.parent) == ["cut.pt"]


WALL = {  # prints what the clock shows from the first mark to the last one
    '    mark("start")\n': '    mark("start")\n    began = moments[0]\n',
    "    bar.close()\n": '    print(f"wall {moments[0] - began}\\n", end="")\n    bar.close()\n',
}


def test_a_late_process_is_named(run, changed, base, tmp_path):
    """With its host, and the link is not blamed. All phases of a process add up to wall time."""
    before = (ROOT / "tests/helpers/slow.py", "backward", 2, 0.1)
    words = (*base, "--max_steps", 20, "--eval_every", 10, "--log", tmp_path / "log")
    out = run(changed("multinode/images.py", WALL), *words, processes=3, before=before)
    logged = rows(tmp_path / "log")
    walls = sorted(map(float, re.findall(r"^wall ([\d.]+)", out, re.M)))
    seconds = [sum(row["seconds"] for row in logged if row["rank"] == rank) for rank in range(3)]
    assert sorted(seconds) == pytest.approx(walls, abs=1e-6) and min(walls) > 2
    totals = [sum(row["comm_total"] for row in logged[rank::3]) for rank in range(3)]
    waiting = f"waiting {sum(totals) / 3 - min(totals):.3f} s for rank 2 on {os.uname().nodename}\n"
    assert f"\nsending {min(totals):.3f} s, {waiting}" in out, (totals, out)
    compute = sum(row[name] for row in logged for name in ("forward", "backward", "optimizer"))
    ratio = float(re.search(r"^R = compute / sending = ([\d.]+)", out, re.M)[1])
    assert ratio == pytest.approx(compute / 3 / min(totals), abs=0.051)


class Bomb:
    """Pickled, and then unpickled, it would leave a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_snapshots_that_do_not_fit(attempt, refused, run, base, tmp_path):
    """Other settings are named; what is damaged or hostile runs nothing; no file changes."""
    words, good, bomb = (*base, "--max_steps", 2), tmp_path / "good.pt", tmp_path / "exploded"
    run("singlegpu/images.py", *words, "--snapshot", good)
    (tmp_path / "cut.pt").write_bytes(good.read_bytes()[:100_000])
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps(Bomb(bomb)))
    torch.save(torch.load(good, weights_only=True) | {"model": Bomb(bomb)}, tmp_path / "bomb.pt")
    before = {path: path.read_bytes() for path in tmp_path.glob("*.pt")}
    for path in {*before} - {good}:
        for flag in ("--snapshot", "--init_from"):
            status, out, err = attempt("singlegpu/images.py", *words, flag, path)
            assert status == 1 and "steps 0" not in out and not bomb.exists(), (path, out, err)
    for setting in ("--model=cnn", "--learning_rate=1e-4", "--seed=2"):
        name = setting.split("=")[0]
        told = f"{good} was made with {name} "
        err = refused(told, "multigpu/images.py", *words, setting, "--snapshot", good, processes=3)
        assert err.count("\n") == 1, err
    words = (*base, "--max_steps", 4, "--snapshot")
    (one, other), envs = forks_of("multinode/images.py", words, (2, 1))
    answers = run_all([[*one, good], [*other, tmp_path / "none.pt"]], envs, tmp_path)
    told = "the processes have different data or snapshots"
    assert any(status == 1 and told in err for status, _, err in answers), answers
    assert before == {path: path.read_bytes() for path in tmp_path.glob("*.pt")}


def test_data_cannot_run_code(attempt, tmp_path):
    """Neither arrays of pickled objects, nor a data set's own script."""
    bomb = tmp_path / "exploded"
    for name in ("train_images.npy", "train.npy", "val.npy"):
        np.save(tmp_path / name, np.array([Bomb(bomb)], object), allow_pickle=True)
    (tmp_path / f"{tmp_path.name}.py").write_text(f"open({str(bomb)!r}, 'w')")
    for script in ("images", "gpt", "text"):
        assert attempt(f"singlegpu/{script}.py", "--dataset", tmp_path)[0] == 1
    assert not bomb.exists()


def test_what_cannot_work_is_said_in_a_line(refused, base, tmp_path):
    """Before anything long, and by one process."""
    for split in ("train", "test"):
        np.save(tmp_path / f"{split}_images.npy", np.zeros((30, 8, 8), np.uint8))
        np.save(tmp_path / f"{split}_labels.npy", np.arange(30) % 2)
    too_few = ("30 and 30 samples are too few", "--dataset", tmp_path)
    cases = [(f"{folder}/images.py", *too_few) for folder in STOPS]
    cases += [
        ("multinode/images.py", "--batch_size must be", *base, "--grad_accum_steps", 5),
        ("multigpu/images.py", "--batch_size must be", *base, "--batch_size", 49),
        ("multigpu/images.py", "--seed must not be negative", *base, "--seed", -1),
        ("multinode/images.py", "cannot write none/file", *base, "--snapshot", "none/file"),
        ("singlegpu/images.py", f"cannot write {tmp_path}", *base, "--log", tmp_path),
        ("multigpu/images.py", "invalid int value: 'many'", *base, "--batch_size", "many"),
        ("multigpu/allreduce.py", "one process has nobody", "--num_gpus", 1),
        ("multigpu/allreduce.py", "cannot write none/file", "--out", "none/file"),
    ]
    for script, told, *words in cases:
        err = refused(told, script, *words, processes=2)
        is_argparse = told.startswith("invalid") or "allreduce" in script
        assert err.count("\n") == 1 or is_argparse, (script, words, err)


def test_each_script_has_help_and_names_its_launch(tmp_path):
    """Each flag is in --help. Without a launcher, multinode and hybrid say how to start them."""

    def all_ended(names, env):
        commands, envs = [[ROOT / name] for name in names], [env] * len(names)
        return zip(names, run_all(commands, envs, tmp_path, ends_others=False))

    helps = run_all([[ROOT / script, "--help"] for script in SCRIPTS], [{}] * len(SCRIPTS), "/tmp")
    for script, (status, out, err) in zip(SCRIPTS, helps):
        flags = re.findall(r'add(?:_argument)?\("(--\w+)"', (ROOT / script).read_text())
        assert status == 0 and all(f" {flag}" in out for flag in flags), (script, out, err)
    names = [name for name in SCRIPTS if name.startswith(("multinode", "hybrid"))]
    for script, (status, _, err) in all_ended(names, {}):
        assert status in (1, 2) and "torchrun" in err and "Traceback" not in err, (script, err)
    names = [f"{folder}/{task}.py" for folder in ("singlegpu", "multigpu") for task in TASKS]
    tasks = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    names += ["singlegpu/mnist.py", "multigpu/mnist.py"]
    for script, (status, _, err) in all_ended(names, tasks):
        told = f"use slurm/multinode_{Path(script).stem}.slurm"
        assert status in (1, 2) and told in err and "Traceback" not in err, (script, err)
