"""What every training script promises: it learns, with one loss curve, and tells its time."""

import os
import re

import numpy as np
import pytest
from conftest import curve, rows

TRAINING = ("data", "forward", "backward", "comm", "optimizer")
MNIST = "--dataset mnist --data_dir {data} --batch_size 24 --learning_rate 3e-4"
MNIST += " --max_steps 40 --eval_every 20"
TABLES = "--dataset tables --data_dir {data} --batch_size 24 --max_steps 40 --eval_every 20"
PAIRS = f"{TABLES} --source number --target name --seq_len 8 --max_steps 8 --eval_every 4"
GPT = "--d_model 32 --n_heads 2 --num_layers 2 --seq_len 32 --batch_size 24 --learning_rate 3e-4"
TASKS = {  # a short run of each model
    "mlp": ("images.py", f"{MNIST} --model mlp"),
    "cnn": ("images.py", f"{MNIST} --model cnn --max_steps 20 --eval_every 10"),
    "autoencoder": ("images.py", f"{MNIST} --model autoencoder --max_steps 20 --eval_every 10"),
    "nbow": ("text.py", f"{TABLES} --seq_len 32 --model nbow"),
    "text": ("text.py", f"{TABLES} --seq_len 32 --model transformer"),
    "lstm": ("translation.py", f"{PAIRS} --model lstm"),
    "translation": ("translation.py", f"{PAIRS} --model transformer"),
    "gpt": ("gpt.py", f"{GPT} --dataset {{data}}/words.txt --max_steps 24 --eval_every 12"),
}
# Launches that give one loss curve: processes, micro-batches. None has micro-batches of 3 images:
# their kernel rounds otherwise, and 40 steps of Adam make 4e-5 of it for the mlp.
LAUNCHES = {"singlegpu": (1, 1), "multigpu": (2, 3), "multinode": ((3, 1), 1)}
ALL = ("mlp", "gpt")  # are proven in all three folders, the others in two


def arguments_of(task, data):
    return TASKS[task][1].format(data=data).split()


@pytest.mark.parametrize("task", TASKS)
def test_one_loss_curve(run, data, tmp_path, task):
    """The losses fall, and are the same on 1, 2 (and 3) processes; the logs fit together."""
    curves = []
    for folder in LAUNCHES if task in ALL else ("singlegpu", "multigpu"):
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
            assert (row["host"], row["nodes"]) == (os.uname().nodename, 1) and row["peak_MB"] > 50
            assert all(row[name] > 0 for name in ("data", "forward", "backward", "optimizer"))
            is_first = row["step"] < end
            assert (row["warmup"] > 0) == is_first and row["steps"] == end // 2 - 3 * is_first
            assert (row.get("comm", 0) > 0) == (row.get("comm_total", 0) > 0) == (count > 1)
            training = sum(row.get(name, 0) for name in TRAINING)
            assert row["samples/s"] == pytest.approx(24 * row["steps"] / training)
        more = [name for name in ("val_acc", "grad_norm") if name in logged[0]]
        curves.append(curve(log, *more))
    assert curves[0][1, 0] < curves[0][0, 0]
    for each in curves[1:]:
        np.testing.assert_allclose(each[:, :2], curves[0][:, :2], rtol=1e-5)
        np.testing.assert_allclose(each[:, 2:], curves[0][:, 2:], atol=0.01)  # of 1: a sample or so


def test_draws_and_bar(attempt, data, changed, tmp_path):
    """What is drawn, as by dropout, differs between processes, steps and micro-batches.

    The bar has the loss of the last look. Where there is no terminal, it is hardly drawn again.
    """
    loss, log = "    outputs = model(images)", tmp_path / "log.jsonl"
    spy = "    model.training and print(f'drawn {torch.rand(())}\\n', end='')\n"  # in one write
    words = (*arguments_of("mlp", data), "--grad_accum_steps", 2, "--log", log)
    script = changed("multigpu/images.py", {loss: spy + loss})
    status, out, err = attempt(script, *words, processes=2)
    drawn = re.findall(r"drawn (\S+)", out)
    assert status == 0 and (len(drawn), len({*drawn})) == (160, 160), out
    shown = re.findall(r"(\d+)/40 .*?loss=([\d.]+)", err)
    assert shown[-1][0] == "40" and len(shown) < 4, err
    assert float(shown[-1][1]) == pytest.approx(rows(log)[-1]["train_loss"], rel=0.2)
