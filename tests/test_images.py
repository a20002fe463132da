"""The three images.py, run as a user runs them."""

import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import ENVIRONMENT, LAUNCHES, ROOT, assert_refused, assert_same_weights, rows, wait_for

PHASES = ("data", "forward", "backward", "comm", "optimizer", "eval", "save")


def tiny_arguments(tiny, *more):
    return ["--dataset", "bigmnist", "--data_dir", tiny, "--threads", "1", "--batch_size", "24", *more]


@pytest.mark.parametrize("model", ["cnn", "mlp"])
def test_one_loss_curve(run, tiny, tmp_path, model):
    """Any number of processes, with and without accumulation: the same losses to rounding.

    A small learning rate: at 1e-3 Adam makes 1.3e-5 of a rounding difference within 40 steps.
    """
    curves = {}
    for folder, processes, parts in [*LAUNCHES, ("singlegpu", 1, 4)]:
        log = tmp_path / f"{folder}{processes}{parts}.csv"
        status, out, err = run(
            folder,
            *tiny_arguments(
                tiny,
                "--model",
                model,
                "--epochs",
                "2",
                "--max_steps",
                "20",
                "--grad_accum_steps",
                parts,
                "--log",
                log,
                "--learning_rate",
                "3e-4",
            ),
            processes=processes,
        )
        assert status == 0, err
        count = processes[0] * processes[1] if isinstance(processes, tuple) else processes
        logged = rows(log)
        assert sorted((row["epoch"], row["rank"]) for row in logged) == [(e, r) for e in range(2) for r in range(count)]
        assert f"= {24 // count // parts} x {count} process" in out
        curves[folder, processes, parts] = [
            [row[name] for name in ("train_loss", "val_loss", "val_acc", "train_acc")]
            for row in logged
            if row["rank"] == 0
        ]
    reference = curves.pop(("singlegpu", 1, 1))
    assert reference[1][0] < reference[0][0] and reference[1][2] > 0.5, "it learns"
    for name, curve in curves.items():
        np.testing.assert_allclose(curve, reference, rtol=1e-5, err_msg=str(name))


def long_arguments(tiny, snapshot):
    """About 200 steps with dropout, a snapshot every 5."""
    return tiny_arguments(tiny, "--epochs", "4", "--dropout", "0.5", "--snapshot", snapshot, "--snapshot_every", "5")


@pytest.mark.parametrize("folder, processes", [("singlegpu", 1), ("multigpu", 2), ("multinode", 2)])
def test_resume_is_bit_identical(start, run, tiny, tmp_path, folder, processes):
    """Killed, stopped and started again, a run ends with the weights of the undisturbed one."""
    undisturbed, disturbed, log = tmp_path / "whole.pt", tmp_path / "cut.pt", tmp_path / "cut.csv"
    status, _, err = run(folder, *long_arguments(tiny, undisturbed), processes=processes)
    assert status == 0, err
    command = [*long_arguments(tiny, disturbed), "--log", log]
    seed = random.randrange(1000)
    print("seed", seed)
    delay = random.Random(seed)

    job = start(folder, *command, processes=processes)
    wait_for(disturbed.exists)
    time.sleep(delay.uniform(0, 0.7))
    os.kill(job.workers()[-1] if processes > 1 else job.process.pid, signal.SIGKILL)
    status, _, err = job.wait(60)
    assert status not in (0, 2)
    if folder == "multigpu":
        assert "was ended by SIGKILL" in err
    wait_for(lambda: not job.processes(), 10)

    saved_at = disturbed.stat().st_mtime_ns
    job = start(folder, *command, processes=processes)
    wait_for(lambda: disturbed.stat().st_mtime_ns != saved_at)
    time.sleep(delay.uniform(0, 0.3))
    os.kill(job.process.pid, signal.SIGTERM)
    status, out, err = job.wait(60)
    assert "stopped by a signal" in out, err
    assert status == (143 if folder != "multinode" else 1) or folder == "multinode" and status != 0
    stopped_at = torch.load(disturbed, weights_only=True)["state"]
    assert (stopped_at["epoch"], stopped_at["step"]) < (4, 0)

    status, out, err = run(folder, *command, processes=processes)
    assert status == 0, err
    assert f"epoch {stopped_at['epoch']}, step {stopped_at['step']}" in out
    assert_same_weights(undisturbed, disturbed)
    logged = [(row["epoch"], row["rank"]) for row in rows(log)]
    assert sorted(logged) == [(e, r) for e in range(4) for r in range(processes)]
    assert not list(tmp_path.glob("*.tmp"))

    status, out, _ = run(folder, *command, processes=processes)  # nothing is left to do
    assert status == 0
    assert_same_weights(undisturbed, disturbed)


def test_resume_on_another_number_of_processes(run, start, tiny, tmp_path):
    """A snapshot of 2 processes goes on with 1 and with 3, to the same losses."""
    command = tiny_arguments(tiny, "--epochs", "3", "--max_steps", "21")
    status, _, err = run("multigpu", *command, "--log", tmp_path / "2.csv", processes=2)
    assert status == 0, err
    first = tmp_path / "2.pt"
    job = start("multigpu", *command, "--snapshot", first, "--snapshot_every", "10", processes=2)
    wait_for(lambda: first.exists() and torch.load(first, weights_only=True)["state"]["epoch"] == 1, pause=0.1)
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.wait(60)[0] == 143
    expected = [
        [row[name] for name in ("train_loss", "val_loss", "val_acc")]
        for row in rows(tmp_path / "2.csv")
        if row["rank"] == 0 and row["epoch"] > 0
    ]
    for folder, processes in (("singlegpu", 1), ("multigpu", 3)):
        snapshot, log = tmp_path / f"{processes}.pt", tmp_path / f"{processes}.csv"
        shutil.copy(first, snapshot)
        status, _, err = run(folder, *command, "--snapshot", snapshot, "--log", log, processes=processes)
        assert status == 0, err
        got = [[row[name] for name in ("train_loss", "val_loss", "val_acc")] for row in rows(log) if row["rank"] == 0]
        np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_phases_add_up(run, tiny, tmp_path):
    """The phases are the epoch's wall time; one process has no communication."""
    for folder, processes in (("singlegpu", 1), ("multigpu", 2)):
        log = tmp_path / f"{folder}.csv"
        status, out, err = run(folder, *tiny_arguments(tiny, "--epochs", "3", "--log", log), processes=processes)
        assert status == 0, err
        for row in rows(log):
            assert sum(row[phase] for phase in PHASES) == pytest.approx(row["time"], rel=0.01)
            assert all(row[phase] > 0 for phase in ("data", "forward", "backward", "optimizer", "eval"))
            assert (row["comm"] > 0) == (row["comm_total"] > 0) == (processes > 1)
            assert row["skew"] >= 0
        summary = [line for line in out.splitlines() if line.startswith("|")][-1]
        head = [line for line in out.splitlines() if line.startswith("|")][-2]
        assert summary.count("|") == head.count("|")
        table = [cell.strip() for cell in head.split("|")]
        assert table in [
            [cell.strip() for cell in line.split("|")] for line in (ROOT / "results.md").read_text().split("\n")
        ]


def test_comm_agrees_with_ddp_logger(tmp_path, tiny):
    """Exposed communication against what DDP's own runtime logger measured in the same steps.

    A model of many gradients: the logger counts the 0.4 ms in which a hook starts its last all-reduce as computation.
    """
    out = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=2",
            "--",
            ROOT / "tests" / "ddp_logger.py",
            *tiny_arguments(tiny, "--model", "vgg11", "--learning_rate", "1e-4"),
            "--epochs",
            "1",
            "--max_steps",
            "8",
            "--log",
            tmp_path / "log.csv",
        ],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert out.returncode == 0, out.stderr
    logged = [json.loads(entry) for entry in re.findall(r"{.*?}", out.stdout)]  # two may share a line
    for entry in logged:
        row = next(row for row in rows(tmp_path / "log.csv") if row["rank"] == entry["rank"])
        assert row["comm"] == pytest.approx(entry["sum"])
        assert entry["ours"] == pytest.approx(entry["logged"], rel=0.1), logged
    assert len(logged) == 2


@pytest.mark.parametrize("folder, processes", [("singlegpu", 1), ("multigpu", 2), ("multinode", 2)])
def test_self_contained(tmp_path, folder, processes):
    """A script copied alone into an empty folder runs there."""
    shutil.copy(ROOT / folder / "images.py", tmp_path / "mine.py")
    command = {
        "singlegpu": [sys.executable],
        "multigpu": [sys.executable],
        "multinode": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"],
    }[folder]
    more = ["--num_gpus", "2"] if folder == "multigpu" else []
    done = subprocess.run(
        [*command, "mine.py", *more, "--model", "mlp", "--max_steps", "5", "--epochs", "1"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "synthetic" in done.stdout and [path.name for path in tmp_path.iterdir()] == ["mine.py"]


class Bomb:
    """Pickled into a snapshot, it would leave a file behind if it were run."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_bad_input(run, run_many, tiny, tmp_path):
    """Each mistake: status 2, one line on stderr that says what is wrong, no traceback, nothing overwritten."""
    good = tmp_path / "good.pt"
    arguments = tiny_arguments(tiny, "--model", "mlp", "--epochs", "1", "--max_steps", "9")
    assert run("singlegpu", *arguments, "--snapshot", good)[0] == 0
    content = good.read_bytes()
    snapshots = {
        "truncated": content[: len(content) // 2],
        "empty": b"",
        "flipped": bytearray(content),
        "bomb": pickle.dumps(Bomb(tmp_path / "exploded")),
    }
    snapshots["flipped"][len(content) // 2] ^= 1
    for name, data in snapshots.items():
        (tmp_path / f"{name}.pt").write_bytes(data)
    torch.save({"model": Bomb(tmp_path / "exploded")}, tmp_path / "zipbomb.pt")
    raw = tmp_path / "broken" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, magic, size in (
        ("train-images-idx3-ubyte", 2051, 100),
        ("train-labels-idx1-ubyte", 2049, 100),
        ("t10k-images-idx3-ubyte", 2051, 100),
        ("t10k-labels-idx1-ubyte", 2049, 100),
    ):
        shape = (size, 28, 28) if magic == 2051 else (size,)
        header = b"".join(int(number).to_bytes(4, "big") for number in (magic, *shape))
        (raw / name).write_bytes(header + bytes(int(np.prod(shape)) // 2))
    (tmp_path / "text.csv").write_text("a,b\n1,2\n")
    cases = {
        ("--batch_size", "25", "--grad_accum_steps", "2"): "take 24 or 26",
        ("--batch_size", "1", "--grad_accum_steps", "2"): "take 2",
        ("--batch_size", "-8"): "--batch_size -8",
        ("--batch_size", "many"): "--batch_size",
        ("--batch_size", "5000"): "1200 training images",
        ("--epochs", "0"): "--epochs 0",
        ("--dropout", "1.5"): "--dropout 1.5",
        ("--learning_rate", "nan"): "--learning_rate nan",
        ("--dataset", "imagenet"): "invalid choice",
        ("--nonsense",): "--nonsense",
        ("--precision", "fp16"): "needs a GPU",
        ("--dataset", "mnist", "--data_dir", tmp_path / "broken"): "remove what is damaged",
        ("--dataset", "bigmnist", "--data_dir", tmp_path): "No such file",
        ("--snapshot", tmp_path / "truncated.pt"): "cannot resume from",
        ("--snapshot", tmp_path / "empty.pt"): "cannot resume from",
        ("--snapshot", tmp_path / "flipped.pt"): "cannot resume from",
        ("--snapshot", tmp_path / "bomb.pt"): "cannot resume from",
        ("--snapshot", tmp_path / "zipbomb.pt"): "cannot resume from",
        ("--snapshot", good, "--model", "cnn"): "made with --model mlp, not cnn",
        ("--snapshot", tmp_path / "missing" / "file.pt"): "cannot write",
        ("--snapshot", tmp_path): "cannot write",
        ("--log", tmp_path / "missing" / "file.csv"): "cannot write",
        ("--log", tmp_path / "text.csv"): "not a log",
    }
    assert_refused(run_many("singlegpu/images.py", [[*arguments, *case] for case in cases]), cases)
    assert good.read_bytes() == content
    assert not (tmp_path / "exploded").exists()


def test_bad_input_of_several_processes(run, tiny, tmp_path):
    """The same of multigpu, where the parent or rank 0 alone speaks; multinode names torchrun."""
    (tmp_path / "empty.pt").write_bytes(b"")
    arguments = tiny_arguments(tiny, "--epochs", "1")
    cases = {
        ("--batch_size", "25"): "take 24 or 26",
        ("--snapshot", tmp_path / "empty.pt"): "cannot resume from",
        ("--dataset", "bigmnist", "--data_dir", tmp_path): "No such file",
    }
    for case, message in cases.items():
        status, _, err = run("multigpu", *arguments, *case, processes=2)
        assert status == 2 and message in err, (case, err)
        assert len(err.splitlines()) == 1, (case, err)
    script = ROOT / "multinode" / "images.py"
    done = subprocess.run([sys.executable, script], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 2 and "torchrun --standalone" in done.stderr and len(done.stderr.splitlines()) == 1


def test_more_processes_than_gpus(tmp_path):
    """Where there are GPUs, too few of them is an error (the count is simulated: this runs without any)."""
    code = (
        "import sys, runpy, torch; torch.cuda.is_available = lambda: True; torch.cuda.device_count = lambda: 2; "
        "sys.argv = ['images.py', '--num_gpus', '4']; "
        f"runpy.run_path({str(ROOT / 'multigpu/images.py')!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True)
    assert (
        done.returncode == 2
        and "--num_gpus 4: this machine has 2" in done.stderr
        and len(done.stderr.splitlines()) == 1
    )


def test_data_that_cannot_be_downloaded(run, tmp_path):
    """No network (a proxy that answers nothing): the line names the command for the login node."""
    blocked = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
    for dataset in ("mnist", "cifar10"):
        status, _, err = run("singlegpu", "--dataset", dataset, "--data_dir", tmp_path / "none", env=blocked)
        assert status == 2 and f"--dataset {dataset} --data_dir" in err and "login node" in err, err
        assert len(err.splitlines()) == 1, err


def test_non_finite_loss_keeps_the_snapshot(run, tiny, tmp_path):
    """A loss that overflows stops all processes; the snapshot is the last good one."""
    snapshot = tmp_path / "s.pt"
    arguments = tiny_arguments(
        tiny, "--model", "mlp", "--epochs", "2", "--snapshot", snapshot, "--learning_rate", "1e30"
    )
    for folder, processes in (("singlegpu", 1), ("multigpu", 2)):
        status, _, err = run(folder, *arguments, processes=processes)
        assert status == 1 and "not finite" in err and not snapshot.exists(), err


def test_epochs_differ_and_ranks_are_disjoint():
    """The order of an epoch: a permutation without repetition, another one each epoch, shared out without overlap."""
    sys.path.insert(0, str(ROOT / "singlegpu"))
    import argparse

    import images

    args = argparse.Namespace(seed=1, batch_size=24)
    first, second = (
        np.stack(list(images.shuffled_batches(np.zeros((1201, 1)), range(50), args, epoch))) for epoch in (0, 1)
    )
    assert first.shape == second.shape == (50, 24) and (first != second).any()
    assert len(np.unique(first)) == 1200
    shares = [first[:, rank::3] for rank in range(3)]
    assert sorted(np.concatenate([share.ravel() for share in shares])) == sorted(first.ravel())


def test_comm_hooks_and_compile(run, tiny, tmp_path):
    """With compressed gradients the loss stays close to the plain one, and is not the same; compiled it is the same."""
    log, losses = tmp_path / "log.csv", {}
    variants = [("--comm_hook", "none"), ("--comm_hook", "bf16"), ("--comm_hook", "fp16")]
    variants += [("--compile",)] if shutil.which("g++") else []
    for more in variants:
        arguments = tiny_arguments(tiny, "--model", "mlp", "--epochs", "1", "--log", log)
        status, _, err = run("multigpu", *arguments, *more, processes=2)
        assert status == 0, err
        losses[more[-1]] = rows(log)[-1]["train_loss"]
    plain, compiled = losses.pop("none"), losses.pop("--compile", None)
    np.testing.assert_allclose(list(losses.values()), plain, rtol=0.02)
    assert len({plain, *losses.values()}) == 3
    if compiled is None:
        pytest.skip("torch.compile needs a C++ compiler")
    assert compiled == pytest.approx(plain, rel=1e-3)


def test_powersgd(run, tiny, tmp_path):
    """It starts after 1,000 steps: 21 epochs of 50, and the loss still falls."""
    log = tmp_path / "log.csv"
    arguments = tiny_arguments(tiny, "--model", "mlp", "--epochs", "22", "--log", log, "--comm_hook", "powersgd")
    status, _, err = run("multigpu", *arguments, processes=2)
    assert status == 0, err
    losses = [row["train_loss"] for row in rows(log) if row["rank"] == 0]
    assert losses[-1] < losses[0] / 10


@pytest.mark.parametrize(
    "folder, processes, model, accuracy, epochs, more",
    [
        ("singlegpu", 1, "mlp", 0.975, 3, ["--batch_size", "128"]),
        ("multigpu", 2, "cnn", 0.985, 2, ["--batch_size", "32", "--max_steps", "900"]),  # as one: test_one_loss_curve
    ],
)
def test_real_mnist(run, real_data, tmp_path, folder, processes, model, accuracy, epochs, more):
    """These accuracies, in fewer steps than their 10 and 2 epochs have."""
    log = tmp_path / "log.csv"
    arguments = ["--model", model, "--dataset", "mnist", "--data_dir", real_data, "--epochs", epochs, "--threads", "1"]
    status, _, err = run(folder, *arguments, *more, "--log", log, processes=processes, timeout=400)
    assert status == 0, err
    assert max(row["val_acc"] for row in rows(log)) >= accuracy
