"""What every training script promises: it learns, with one loss curve, and tells its time."""

import json
import math
import os

import numpy as np
import pytest
from conftest import ROOT, curve, rows

PHASES = ("warmup", "data", "forward", "backward", "bubble", "comm", "optimizer", "eval", "save")
TRAINING = ("data", "forward", "backward", "comm", "optimizer")
MNIST = "--dataset mnist --data_dir {data} --batch_size 24 --learning_rate 3e-4"
MNIST += " --max_steps 40 --eval_every 20"
TABLES = "--dataset tables --data_dir {data} --batch_size 24 --max_steps 40 --eval_every 20"
PAIRS = f"{TABLES} --source number --target name --seq_len 8 --max_steps 8 --eval_every 4"
GPT = "--d_model 32 --n_heads 2 --num_layers 2 --seq_len 32 --batch_size 24 --learning_rate 3e-4"
TASKS = {  # a short run of each model
    "mlp": ("images.py", f"{MNIST} --model mlp"),
    "cnn": ("images.py", f"{MNIST} --model cnn --max_steps 20 --eval_every 10"),
    "autoencoder": ("autoencoder.py", MNIST),
    "nbow": ("text.py", f"{TABLES} --seq_len 32 --model nbow"),
    "text": ("text.py", f"{TABLES} --seq_len 32 --model transformer"),
    "lstm": ("translation.py", f"{PAIRS} --model lstm"),
    "translation": ("translation.py", f"{PAIRS} --model transformer"),
    "gpt": ("gpt.py", f"{GPT} --dataset {{data}}/words.txt --max_steps 24 --eval_every 12"),
}
# Launches that give one loss curve: processes, micro-batches. None has micro-batches of 3 images:
# their kernel rounds otherwise, and 40 steps of Adam make 4e-5 of it for the mlp.
LAUNCHES = {"singlegpu": (1, 1), "multigpu": (2, 3), "multinode": ((2, 2), 1)}
FOLDERS = dict.fromkeys(("cnn", "nbow", "lstm", "translation"), ("singlegpu", "multigpu"))
FOLDERS["text"] = ("singlegpu", "multinode")  # the others: all three


def arguments_of(task, data):
    return TASKS[task][1].format(data=data).split()


@pytest.mark.parametrize("task", TASKS)
def test_one_loss_curve(run, data, tmp_path, task):
    """The losses fall, and are the same on 1, 2 (and 2 x 2) processes; the logs fit together."""
    curves = []
    for folder in FOLDERS.get(task, LAUNCHES):
        processes, parts = LAUNCHES[folder]
        script, log = f"{folder}/{TASKS[task][0]}", tmp_path / f"{folder}.jsonl"
        more = ("--grad_accum_steps", parts, "--log", log)
        out = run(script, *arguments_of(task, data), *more, processes=processes)
        assert [line for line in out.splitlines() if line[:1] == "|"][-1].split()[1] == script
        assert all(len(line) <= 100 for line in out.splitlines() if line[:1] != "|"), out
        logged, count = rows(log), int(np.prod(processes))
        end = logged[-1]["max_steps"]
        places = sorted((row["step"], row["rank"]) for row in logged)
        assert places == [(step, rank) for step in (end // 2, end) for rank in range(count)]
        for row in logged:
            assert (row["script"], row["processes"], row["batch_size"]) == (script, count, 24)
            assert row["nodes"] == 1 + (folder == "multinode")
            assert row["host"] == os.uname().nodename and 50 < row["peak_MB"] < 5000
            assert all(row[name] > 0 for name in ("data", "forward", "backward", "optimizer"))
            is_first = row["step"] < end
            assert (row["warmup"] > 0) == is_first and row["steps"] == end // 2 - 3 * is_first
            assert (row.get("comm", 0) > 0) == (row.get("comm_total", 0) > 0) == (count > 1)
            training = sum(row.get(name, 0) for name in TRAINING)
            assert row["samples/s"] == pytest.approx(24 * row["steps"] / training)
        curves.append(curve(log, *(["val_acc"] if "val_acc" in logged[0] else [])))
    assert curves[0][1, 0] < curves[0][0, 0]
    for each in curves[1:]:
        np.testing.assert_allclose(each[:, :2], curves[0][:, :2], rtol=1e-5)
        np.testing.assert_allclose(each[:, 2:], curves[0][:, 2:], atol=0.01)  # a sample or so
    if task in ("mlp", "cnn"):  # each of the 401 validation images counts once
        correct = curves[0][:, 2] * 401
        assert correct == pytest.approx(correct.round(), abs=1e-6)


@pytest.fixture(scope="module")
def watched(run, data, tmp_path_factory):
    """watched(task, *more) is the log, and what watch.py saw of each of two processes."""

    def watched(task, *more):
        folder = tmp_path_factory.mktemp("watched")
        before = (ROOT / "tests/helpers/watch.py", folder)
        words = (*arguments_of(task, data), *more, "--log", folder / "log.jsonl")
        run("multinode/images.py", *words, processes=2, before=before)
        seen = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
        return sorted(rows(folder / "log.jsonl"), key=lambda row: row["rank"]), seen

    return watched


def test_phases_add_up_to_wall_time(watched):
    """The phases of the later rows add up to the seconds between the rows of the log."""
    logged, seen = watched("cnn", "--max_steps", 150, "--eval_every", 30)
    between = np.diff(seen[0]["written"])
    later = [row for row in logged if row["rank"] == 0][1:]
    phases = [sum(row.get(phase, 0) for phase in PHASES) for row in later]
    assert len(between) == 4 and np.median(phases / between) == pytest.approx(1, abs=0.02)


def test_comm_agrees_with_ddp(watched, tmp_path):
    """Exposed communication is that of DDP's own logger, whose total also has gaps in it.

    A row is a step. In most of them nothing else comes between the two clocks.
    """
    for split, size in (("train", 40), ("test", 4)):
        np.save(tmp_path / f"{split}_images.npy", np.full((size, 28, 28), 9, "u1"))
        np.save(tmp_path / f"{split}_labels.npy", np.arange(size) % 4)
    more = ("--dataset", tmp_path, "--model", "vgg11", "--batch_size", 8)
    more += ("--max_steps", 5, "--eval_every", 1)
    ours, ddps = [], []  # (comm, comm_total) of each process and step
    logged, seen = watched("cnn", *more)
    for rank, ddp in enumerate(seen):
        steps = [row for row in logged if row["rank"] == rank]
        for row, news in list(zip(steps, ddp["all_reduces"], strict=True))[3:]:  # after warmup
            ours.append((row["comm"] - news, row["comm_total"] - news))
        ddps += list(zip(ddp["comm"], ddp["comm_total"], strict=True))[3:]
    comm, comm_total = np.median(np.divide(ours, ddps), axis=0)
    assert comm == pytest.approx(1, abs=0.1) and comm_total < 1.1
    comm, comm_total = np.median(ours, axis=0)
    assert comm < comm_total


def test_real_data_is_learned(run, real_data, tmp_path):
    """A few steps lower the validation loss, and nothing is written beside the data."""
    log, before = tmp_path / "log.jsonl", sorted(real_data.iterdir())
    words = ("--dataset", "ag_news", "--data_dir", real_data, "--seq_len", 64)
    more = ("--max_steps", 60, "--eval_every", 30, "--log", log)
    run("multigpu/text.py", *words, *more, processes=2)
    assert curve(log)[1, 1] < curve(log)[0, 1] and math.isfinite(curve(log)[1, 1])
    assert sorted(real_data.iterdir()) == before
