"""What every training script promises. What tasks share is proven with images.py alone."""

import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import (
    ENVIRONMENT,
    ROOT,
    SCRIPTS,
    TIMEOUT,
    assert_same_weights,
    curve,
    load,
    rows,
    wait_for,
    wait_for_saves,
)

PHASES = ("data", "forward", "backward", "bubble", "comm", "optimizer", "eval", "save")
METRICS = ("val_acc", "val_bpb", "val_ppl", "val_loss")
MNIST = "--dataset mnist --data_dir {data} --batch_size 24 --max_steps 20 --learning_rate 3e-4"
TEXT = "--seq_len 32 --batch_size 24 --learning_rate 1e-3"
PAIRS = "--seq_len 8 --batch_size 24 --max_steps 10 --learning_rate 3e-4"
GPT = "--d_model 32 --n_heads 2 --num_layers 2 --seq_len 32 --batch_size 24 --learning_rate 3e-4"
TASKS = {  # a short run of each model
    "mlp": ("images.py", f"{MNIST} --model mlp"),
    "cnn": ("images.py", f"{MNIST} --model cnn"),
    "autoencoder": ("autoencoder.py", MNIST),
    "nbow": ("text.py", f"{TEXT} --model nbow --max_steps 60"),
    "text": ("text.py", f"{TEXT} --model transformer --max_steps 20"),
    "lstm": ("translation.py", f"{PAIRS} --model lstm"),
    "translation": ("translation.py", f"{PAIRS} --model transformer"),
    "gpt": ("gpt.py", f"{GPT} --dataset {{data}}/words.txt --max_steps 12"),
}
# Launches that give one loss curve: folder, processes, micro-batches.
LAUNCHES = (("singlegpu", 1, 1), ("multigpu", 2, 3), ("multinode", (2, 2), 2))


def arguments_of(task, data):
    return TASKS[task][1].format(data=data).split()


@pytest.mark.parametrize("task", TASKS)
def test_one_loss_curve(run, data, tmp_path, task):
    """The losses fall, and are the same on 1, 2 and 2 x 2 processes; the log is complete."""
    curves = []
    for folder, processes, parts in LAUNCHES:
        script, log = f"{folder}/{TASKS[task][0]}", tmp_path / f"{folder}.csv"
        more = ("--epochs", 2, "--grad_accum_steps", parts, "--log", log)
        out = run(script, *arguments_of(task, data), *more, processes=processes)
        assert [line for line in out.splitlines() if line[:1] == "|"][-1].split()[1] == script
        logged, count = rows(log), int(np.prod(processes))
        places = sorted((row["epoch"], row["rank"]) for row in logged)
        assert places == [(epoch, rank) for epoch in (0, 1) for rank in range(count)]
        for row in logged:
            assert (row["script"], row["processes"], row["batch_size"]) == (script, count, 24)
            assert row["nodes"] == 1 + (folder == "multinode")
            phases = {name: row[name] for name in PHASES if name in row}
            assert sum(phases.values()) == pytest.approx(row["seconds"], rel=0.01)
            assert all(phases[name] > 0 for name in ("data", "forward", "backward", "optimizer"))
            assert (row["comm"] > 0) == (row["comm_total"] > 0) == (count > 1)
        curves.append(curve(log, next(name for name in METRICS if name in logged[0])))
    assert curves[0][1, 0] < curves[0][0, 0]
    for each in curves[1:]:
        np.testing.assert_allclose(each, curves[0], rtol=1e-5)
    if task in ("mlp", "cnn"):  # each of the 101 validation images counts once
        correct = curves[0][:, 2] * 101
        assert correct == pytest.approx(correct.round(), abs=1e-6)


def steps_of(row):
    """The optimizer steps that an epoch's row is about."""
    seconds = row["seconds"] - row["eval"] - row["save"]
    return round(row["samples/s"] * seconds / row["batch_size"])


STOPS = {"singlegpu": signal.SIGUSR2, "multigpu": signal.SIGINT, "multinode": signal.SIGTERM}


@pytest.mark.parametrize("folder", STOPS)
def test_resume(start, run, data, tmp_path, chance, folder):
    """Killed, stopped and started again: the weights of one undisturbed run, bit for bit."""
    script, processes = f"{folder}/images.py", 1 if folder == "singlegpu" else 2
    cut, whole, log = (tmp_path / name for name in ("cut.pt", "whole.pt", "log.csv"))
    base = [*arguments_of("mlp", data), "--dropout", "0.5", "--snapshot_every", "5"]
    for signum in (signal.SIGKILL, STOPS[folder]):
        job = start(script, *base, "--epochs", 10_000, "--snapshot", cut, processes=processes)
        wait_for_saves(job, cut, chance.randint(1, 6))
        if signum == signal.SIGKILL and processes > 1:
            os.kill(chance.choice(job.workers()), signum)
        else:
            job.process.send_signal(signum)
        status, _, err = job.wait()
        told = signum != signal.SIGKILL and folder != "multinode"  # torchrun has its own status
        assert status == 128 + signum if told else status, err
        wait_for(lambda job=job: not job.processes())
    epoch, step = load(cut)["place"]
    base += ["--epochs", epoch + 1]
    run(script, *base, "--snapshot", cut, "--log", log, processes=processes)
    first = rows(log)[0]
    assert (first["epoch"], steps_of(first)) == (epoch, 20 - step), "it went on at that very step"
    run(script, *base, "--snapshot", whole, processes=processes)
    assert_same_weights(cut, whole)
    assert not list(tmp_path.glob("*.tmp"))
    log.unlink()
    run(script, *base, "--snapshot", cut, "--log", log, processes=processes)
    assert not log.exists(), "nothing was left to do"


def test_snapshots_move(start, run, data, tmp_path, chance):
    """One and 2 x 2 processes carry on what two began, in the middle of an epoch."""
    base, begun, whole = arguments_of("mlp", data), tmp_path / "begun.pt", tmp_path / "whole.csv"
    more = ("--epochs", 10_000, "--snapshot", begun, "--snapshot_every", 3)
    job = start("multigpu/images.py", *base, *more, processes=2)
    wait_for_saves(job, begun, chance.randint(1, 12))
    job.process.send_signal(signal.SIGTERM)
    status, _, err = job.wait()
    assert status == 128 + signal.SIGTERM, err
    base += ["--epochs", load(begun)["place"][0] + 1]
    run("singlegpu/images.py", *base, "--log", whole)
    for folder, processes in (("singlegpu", 1), ("multinode", (2, 2))):
        snapshot, log = tmp_path / f"{folder}.pt", tmp_path / f"{folder}.csv"
        shutil.copy(begun, snapshot)
        more = ("--snapshot", snapshot, "--log", log)
        run(f"{folder}/images.py", *base, *more, processes=processes)
        expected = curve(whole, "val_acc")[-1:]
        np.testing.assert_allclose(curve(log, "val_acc"), expected, rtol=1e-5)


@pytest.fixture(scope="module")
def watched(run, data, tmp_path_factory):
    """watched(task, *more) is the log, and what watch.py saw of each of two processes."""

    def watched(task, *more):
        folder = tmp_path_factory.mktemp("watched")
        more, before = (*more, "--log", folder / "log.csv"), (ROOT / "tests/watch.py", folder)
        words = (*arguments_of(task, data), *more)
        run("multinode/images.py", *words, processes=2, before=before)
        seen = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
        return sorted(rows(folder / "log.csv"), key=lambda row: row["rank"]), seen

    return watched


def test_wall_time_and_order_of_images(watched):
    """An epoch's seconds are those between two rows; ranks are disjoint, and epochs differ."""
    logged, seen = watched("cnn", "--epochs", 4, "--max_steps", 50)
    written = seen[0]["written"]
    later = [row for row in logged if row["rank"] == 0 and row["epoch"] > 0]
    phases = sum(row.get(phase, 0) for row in later for phase in PHASES)
    assert len(written) == 4 and phases == pytest.approx(written[-1] - written[0], rel=0.01)
    shares = np.array([each["images"] for each in seen])
    shares = shares.reshape(2, 4, 50, 12).round(3)  # (rank, epoch, step, image)
    for epoch in range(4):
        assert len(np.unique(shares[:, epoch])) == 1200 == len(np.unique(shares)), "each once"
    assert (shares[:, 0] != shares[:, 1]).mean() > 0.9


def test_comm_agrees_with_ddp(watched):
    """Exposed communication is what DDP's own logger measured; the total lies within DDP's own.

    That also has the gaps between all-reduces. The gradients of vgg11, half a gigabyte, make all
    of it long beside what a busy machine adds.
    """
    more = ("--model", "vgg11", "--epochs", 1, "--max_steps", 8, "--batch_size", 8)
    for row, ddp in zip(*watched("cnn", *more)):
        comm, comm_total = row["comm"] / 8, row["comm_total"] / 8
        assert comm == pytest.approx(ddp["comm"], rel=0.25)
        assert comm < 1.01 * comm_total and 0.5 < comm_total / ddp["comm_total"] < 1.1


@pytest.mark.parametrize("folder", ["singlegpu", "multigpu", "multinode"])
def test_a_copied_script_runs_alone(start, tmp_path, folder):
    """With the flags that a user needs, it fits a terminal and leaves nothing but its log."""
    copy, log = tmp_path / folder / "mine.py", tmp_path / folder / "log.csv"
    copy.parent.mkdir()
    shutil.copy(ROOT / folder / "images.py", copy)
    job = start(copy, "--model", "mlp", "--max_steps", 5, "--log", log, processes=2)
    status, out, err = job.wait()
    assert status == 0 and "synthetic" in out, err
    assert all(len(line) <= 100 for line in out.splitlines() if line[:1] != "|"), out
    assert sorted(path.name for path in copy.parent.iterdir()) == ["log.csv", "mine.py"]
    assert curve(log)[1, 1] < curve(log)[0, 1]


class Bomb:
    """Pickled, and then unpickled, it would leave a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_snapshots_that_do_not_fit(attempt, run, data, tmp_path):
    """Truncated, foreign or hostile: a line of error, and the file stays as it is."""
    base, script = [*arguments_of("mlp", data), "--epochs", 1], "singlegpu/images.py"
    good, bomb = tmp_path / "good.pt", tmp_path / "exploded"
    run(script, *base, "--snapshot", good)
    other = ("--epochs", 1, "--snapshot", tmp_path / "other.pt")
    run("singlegpu/autoencoder.py", *arguments_of("autoencoder", data), *other)
    content = good.read_bytes()
    (tmp_path / "cut.pt").write_bytes(content[: len(content) // 2])
    (tmp_path / "empty.pt").touch()
    (tmp_path / "text.pt").write_text("run,epoch\n")
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps(Bomb(bomb)))
    torch.save(torch.load(good, weights_only=True) | {"model": Bomb(bomb)}, tmp_path / "bomb.pt")
    for name in ("cut", "empty", "text", "pickle", "bomb", "other"):
        path = tmp_path / f"{name}.pt"
        before = path.read_bytes()
        status, _, err = attempt(script, *base, "--snapshot", path)
        assert status in (1, 2) and str(path) in err and "Traceback" not in err, (name, err)
        assert path.read_bytes() == before and not bomb.exists()
    status, _, err = attempt(script, *base, "--model", "cnn", "--snapshot", good)
    assert status in (1, 2) and "model" in err and "Traceback" not in err, err
    assert good.read_bytes() == content
    path = tmp_path / "cut.pt"
    status, _, err = attempt("multigpu/images.py", *base, "--snapshot", path, processes=2)
    assert status and str(path) in err, err


def test_bad_arguments(fork_server, attempt, data, tmp_path):
    """Each script names the flag; those of torchrun say that they need it; parts are equal."""
    launched = dict.fromkeys(("RANK", "LOCAL_RANK"), "0")
    launched |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
    texts = {script: (ROOT / script).read_text() for script in SCRIPTS}
    flags = {name: re.search(r'"(--\w+)", type=int', text)[1] for name, text in texts.items()}
    commands = [[str(ROOT / script), flag, "many"] for script, flag in flags.items()]
    for script, (status, _, err) in zip(SCRIPTS, fork_server(commands, tmp_path, launched)):
        assert status == 2 and "Traceback" not in err, (script, err)
        assert f"argument {flags[script]}: invalid int value: 'many'" in err, (script, err)
    commands = [[str(ROOT / name)] for name in SCRIPTS if name.startswith(("multinode", "hybrid"))]
    for command, (status, _, err) in zip(commands, fork_server(commands, tmp_path, {})):
        assert status in (1, 2) and "torchrun " in err and "Traceback" not in err, (command, err)
    for folder, parts in (("singlegpu", 2), ("multigpu", 1), ("multinode", 1)):
        more = ("--batch_size", 25, "--grad_accum_steps", parts)
        words = (*arguments_of("mlp", data), *more)
        status, _, err = attempt(f"{folder}/images.py", *words, processes=2)
        assert status and "--batch_size" in err and "divi" in err, err


def test_missing_data(attempt, tmp_path):
    """Without the files and a network (the proxy is nobody) a line names the missing data set."""
    blocked = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    cases = ("singlegpu", "mnist"), ("singlegpu", "bigmnist"), ("multigpu", "mnist")
    for folder, dataset in cases:
        more = ("--dataset", dataset, "--data_dir", tmp_path / "none")
        status, _, err = attempt(f"{folder}/images.py", *more, processes=2, env=blocked)
        assert status and dataset in err, err
        assert folder == "multigpu" or "Traceback" not in err, err


def test_precision_and_comm_hooks(run, data, tmp_path):
    """Half precision, of the computation or of what is sent, changes the loss a little."""
    losses = {}
    for more in ("--precision fp32", "--precision bf16", "--comm_hook bf16", "--comm_hook fp16"):
        log = tmp_path / f"{more}.csv"
        words = (*arguments_of("mlp", data), *more.split())
        run("multigpu/images.py", *words, "--log", log, processes=2)
        losses[more] = curve(log)[-1, 0]
    plain = losses["--precision fp32"]
    assert list(losses.values()) == pytest.approx([plain] * 4, rel=0.02)
    assert len(set(losses.values())) == 4, losses


def test_loss_not_finite(attempt, data, tmp_path):
    """A loss that overflows ends all processes, and no snapshot is made of it."""
    words = (*arguments_of("mlp", data), "--learning_rate", "1e30", "--snapshot", tmp_path / "s.pt")
    for folder in ("singlegpu", "multigpu"):
        status, _, err = attempt(f"{folder}/images.py", *words, processes=2)
        assert status and "not finite" in err and not (tmp_path / "s.pt").exists(), err


def test_the_main_comparison(tmp_path):
    """One process, two processes, the report: what a user types without thinking.

    Without a GPU, multigpu starts two processes by itself.
    """
    environment = {name: ENVIRONMENT[name] for name in ENVIRONMENT if name != "OMP_NUM_THREADS"}
    steps = "--max_steps 10 --log"
    for words in (f"singlegpu/images.py {steps}", f"multigpu/images.py {steps}", "report.py"):
        command = [sys.executable, *words.split(), tmp_path / "a.csv"]
        pipes = {"capture_output": True, "text": True, "cwd": ROOT, "env": environment}
        done = subprocess.run(command, timeout=TIMEOUT, **pipes)
        assert done.returncode == 0, done.stderr
    assert [row["processes"] for row in rows(tmp_path / "a.csv")] == [1, 1, 2, 2, 2, 2]
    assert "speedup" in done.stdout and "not compared" not in done.stdout, done.stdout


REAL = {  # the commands of the real data sets, for a few steps
    "images.py": "--dataset mnist --data_dir {data} --model mlp --max_steps 100",
    "autoencoder.py": "--dataset mnist --data_dir {data} --max_steps 30",
    "text.py": "--dataset ag_news --data_dir {data} --max_steps 100 --seq_len 64",
    "translation.py": "--dataset multi30k --data_dir {data} --model lstm --max_steps 10 "
    "--seq_len 16 --batch_size 32",
    "gpt.py": "--dataset {data}/tinyshakespeare/input.txt --d_model 32 --seq_len 64 "
    "--max_steps 30 --batch_size 16",
}


@pytest.mark.parametrize("script", REAL)
def test_real_data(run, real_data, tmp_path, script):
    """A few steps lower the validation loss, and nothing is written beside the data."""
    log, before = tmp_path / "log.csv", sorted(real_data.iterdir())
    words = (*REAL[script].format(data=real_data).split(), "--epochs", 2, "--log", log)
    offline = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    run(f"multigpu/{script}", *words, processes=2, env=offline)
    assert curve(log)[1, 1] < curve(log)[0, 1] and math.isfinite(curve(log)[1, 1])
    if script not in ("text.py", "translation.py"):  # until they leave it to `datasets`
        assert sorted(real_data.iterdir()) == before
