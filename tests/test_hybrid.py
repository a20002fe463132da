"""The hybrids, run as a user runs them: stages of a model on devices or in pipelines, times data parallelism."""

import importlib.util
import itertools
import os
import random
import signal

import numpy as np
import pytest
import torch
from conftest import ROOT, assert_refused, assert_same_weights, rows, wait_for, weights

GPT = (
    "--dataset",
    ROOT / "tests/test_gpt.py",
    "--threads",
    "1",
    "--d_model",
    "32",
    "--n_heads",
    "2",
    "--seq_len",
    "32",
)
GPT += ("--num_layers", "8", "--batch_size", "48", "--learning_rate", "3e-4")
LAUNCH = {
    "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_MAX_RESTARTS": "0", "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
}  # fmt: skip


def arguments(tiny, *more):
    return ("--dataset", "bigmnist", "--data_dir", tiny, "--threads", "1", "--batch_size", "24", *more)


@pytest.mark.parametrize("model, num_stages", [("mlp", 2), ("cnn", 4)])
def test_images_one_loss_curve(run, tiny, tmp_path, model, num_stages):
    """Split by layers, on one, two and 2 x 2 processes: the losses of singlegpu/images.py, and its weights."""
    base = arguments(tiny, "--model", model, "--epochs", "2", "--max_steps", "20", "--learning_rate", "3e-4")
    curves = {}
    for folder, processes, parts in (("singlegpu", 1, 1), ("hybrid", 1, 1), ("hybrid", 2, 3), ("hybrid", (2, 2), 1)):
        log = tmp_path / f"{folder}{processes}.csv"
        more = ("--num_stages", num_stages) if folder == "hybrid" else ()
        status, out, err = run(folder, *base, *more, "--grad_accum_steps", parts, "--log", log, processes=processes)
        assert status == 0, err
        if folder == "hybrid":
            assert out.count("stage ") == num_stages and f"; {num_stages} stages; " in out
        logged = [row for row in rows(log) if row["rank"] == 0]
        curves[folder, processes] = [[row[name] for name in ("train_loss", "val_loss", "val_acc")] for row in logged]
    reference = curves.pop(("singlegpu", 1))
    assert reference[1][0] < reference[0][0]
    for name, curve in curves.items():
        np.testing.assert_allclose(curve, reference, rtol=1e-5, err_msg=str(name))


def test_images_snapshot_moves_between_folders(run, tiny, tmp_path):
    """Begun by one, carried on by the other, in both directions: the weights of a run in one piece."""
    base = arguments(tiny, "--model", "mlp", "--max_steps", "15", "--learning_rate", "3e-4", "--balance", "time")
    whole = tmp_path / "whole.pt"
    single = [word for word in base if word not in ("--balance", "time")]
    status, _, err = run("singlegpu", *single, "--epochs", "3", "--snapshot", whole)
    assert status == 0, err
    for order in (("singlegpu", "hybrid", "singlegpu"), ("hybrid", "multigpu", "hybrid")):
        snapshot = tmp_path / f"{order[0]}.pt"
        for epochs, folder in enumerate(order, start=1):
            command = base if folder == "hybrid" else single
            status, out, err = run(
                folder,
                *command,
                "--epochs",
                epochs,
                "--snapshot",
                snapshot,
                processes=1 if folder == "singlegpu" else 2,
            )
            assert status == 0 and f"epoch {epochs - 1}, step 0" in out, err
        for name, expected in weights(whole).items():
            np.testing.assert_allclose(weights(snapshot)[name], expected, rtol=1e-3, atol=1e-5, err_msg=name)


def test_cut_is_the_best_of_all():
    spec = importlib.util.spec_from_file_location("hybrid_images", ROOT / "hybrid" / "images.py")
    images = importlib.util.module_from_spec(spec)  # not of that name: it is singlegpu/images.py's
    spec.loader.exec_module(images)
    generator = random.Random(0)
    for _ in range(30):
        costs = [generator.randint(0, 50) for _ in range(generator.randint(1, 9))]
        parts = generator.randint(1, len(costs))
        starts = images.cut(tuple(costs), parts)

        def largest(starts, costs=costs):
            return max(sum(costs[a:b]) for a, b in zip(starts, [*starts[1:], len(costs)]))

        every = ((0, *cuts) for cuts in itertools.combinations(range(1, len(costs)), parts - 1))
        assert starts[0] == 0 and len(set(starts)) == parts
        assert largest(starts) == min(map(largest, every))


def test_images_bad_input(run_many, tmp_path):
    cases = {
        ("--num_stages", "4"): "--num_stages 4 is too many: 3 layers have parameters",
        ("--num_stages", "0"): "--num_stages 0 is out of range",
        ("--balance", "luck"): "invalid choice",
        ("--batch_size", "0"): "--batch_size 0 is out of range",
    }
    results = run_many("hybrid/images.py", cases, **LAUNCH)
    assert_refused(results, cases)
    assert_refused(run_many("hybrid/images.py", [()]), {(): "start it with torchrun"})


def gradients(snapshot):
    """Of a run of one step, clipped: AdamW then holds a tenth of them, for its beta1 is 0.9."""
    return [10 * kept["exp_avg"] for kept in torch.load(snapshot, weights_only=True)["optimizer"]["state"].values()]


@pytest.mark.parametrize("pipelines, num_stages", [(1, 2), (2, 2), (1, 4)])
def test_gpt_first_gradients(run, tmp_path, pipelines, num_stages):
    """Whatever the schedule and the number of micro-batches: the gradients of the model in one piece."""
    whole = tmp_path / "whole.pt"
    status, _, err = run("singlegpu", *GPT, "--max_steps", "1", "--snapshot", whole, script="gpt.py")
    assert status == 0, err
    expected = gradients(whole)
    scale = max(gradient.abs().max().item() for gradient in expected)
    for schedule, num_microbatches in (("gpipe", 3), ("1f1b", 6), ("interleaved", 4)):
        snapshot = tmp_path / f"{schedule}.pt"
        more = ("--num_stages", num_stages, "--schedule", schedule, "--num_microbatches", num_microbatches)
        status, out, err = run(
            "hybrid", *GPT, *more, "--max_steps", "1", "--snapshot", snapshot, script="gpt.py",
            processes=pipelines * num_stages,
        )  # fmt: skip
        assert status == 0, err
        assert f"{pipelines} pipeline(s) of {num_stages} processes, {schedule}" in out
        found = gradients(snapshot)
        assert len(found) == len(expected)
        for a, b in zip(found, expected):
            assert a.shape == b.shape and (a - b).abs().max() < 1e-5 * scale


def test_gpt_one_loss_curve(run, tmp_path):
    """As long as the batch is the same, so are the losses, also with bf16 gradients but for their rounding."""
    base = [*GPT, "--epochs", "2", "--max_steps", "10", "--batch_size", "24"]
    curves = []
    for folder, processes, rtol, more in (
        ("singlegpu", 1, 0, ()),
        ("hybrid", (2, 2), 1e-5, ("--num_stages", 2, "--num_microbatches", 3)),
        ("hybrid", 3, 1e-5, ("--num_stages", 3, "--num_microbatches", 2, "--schedule", "gpipe")),
        (
            "hybrid",
            4,
            1e-3,
            ("--num_stages", 2, "--num_microbatches", 2, "--schedule", "interleaved", "--comm_hook", "bf16"),
        ),
    ):
        log = tmp_path / f"{folder}{processes}.csv"
        status, out, err = run(folder, *base, *more, "--log", log, processes=processes, script="gpt.py")
        assert status == 0, err
        logged = rows(log)
        curves.append([[row["train_loss"], row["val_loss"]] for row in logged if row["rank"] == 0])
        np.testing.assert_allclose(curves[-1], curves[0], rtol=rtol, err_msg=str(processes))
        if folder == "hybrid":
            assert out.count("in theory") == more[1] and out.count("stage ") == more[1] * (1 + ("interleaved" in more))
            for row in logged:
                phases = ("data", "forward", "backward", "bubble", "comm", "optimizer", "eval", "save")
                assert sum(row[phase] for phase in phases) == pytest.approx(row["time"], rel=0.01)
                assert row["bubble"] > 0 and row["peak_MB"] > 50
    assert curves[0][1][0] < curves[0][0][0], "it learns"


def test_gpt_snapshot_moves_between_folders(run, tmp_path):
    """Carried from one to the other, in both directions, a run ends with the weights of one that stays."""
    single = ("singlegpu", 1, ())
    moves = {
        "stays": [single] * 4,
        "moves": [
            ("hybrid", 4, ("--num_stages", 2)),
            ("multigpu", 2, ()),
            ("hybrid", 2, ("--num_stages", 2, "--schedule", "interleaved")),
            single,
        ],
    }
    for name, steps in moves.items():
        for epochs, (folder, processes, more) in enumerate(steps, start=1):
            command = [*GPT, "--max_steps", "12", "--epochs", epochs, "--snapshot", tmp_path / f"{name}.pt", *more]
            status, out, err = run(folder, *command, processes=processes, script="gpt.py")
            assert status == 0 and f"epoch {epochs - 1}, step 0" in out, err
    moved = weights(tmp_path / "moves.pt")
    for name, expected in weights(tmp_path / "stays.pt").items():
        np.testing.assert_allclose(moved[name], expected, rtol=1e-3, atol=1e-5, err_msg=name)


def test_gpt_resume_is_bit_identical(start, run, tmp_path):
    """A stage is killed, then all are told to stop: the weights are those of the undisturbed run, with dropout."""
    whole, cut = tmp_path / "whole.pt", tmp_path / "cut.pt"
    base = [
        *GPT,
        "--epochs",
        "3",
        "--max_steps",
        "25",
        "--dropout",
        "0.2",
        "--snapshot_every",
        "4",
        "--num_stages",
        "2",
    ]
    status, _, err = run("hybrid", *base, "--snapshot", whole, processes=4, script="gpt.py")
    assert status == 0, err
    for signum in (signal.SIGKILL, signal.SIGTERM):
        before = cut.stat().st_mtime_ns if cut.exists() else 0
        job = start("hybrid", *base, "--snapshot", cut, processes=4, script="gpt.py")
        wait_for(lambda before=before: cut.exists() and cut.stat().st_mtime_ns > before)
        os.kill(random.choice(job.workers()) if signum == signal.SIGKILL else job.process.pid, signum)
        status, out, err = job.wait(90)
        assert status != 0 and (signum == signal.SIGKILL or "stopped by a signal" in out), err
    state = torch.load(cut, weights_only=True)["state"]
    status, out, err = run("hybrid", *base, "--snapshot", cut, processes=4, script="gpt.py")
    assert status == 0 and f"epoch {state['epoch']}, step {state['step']}" in out, err
    assert_same_weights(whole, cut)


def test_gpt_1f1b_holds_fewer_activations(run, tmp_path):
    """Of 16 micro-batches GPipe's first process holds all, 1F1B's two."""
    base = ["--d_model", "64", "--n_heads", "2", "--num_layers", "2", "--seq_len", "64", "--batch_size", "512"]
    peaks = {}
    for schedule in ("gpipe", "1f1b"):
        log = tmp_path / f"{schedule}.csv"
        more = ("--threads", "1", "--num_microbatches", "16", "--schedule", schedule, "--max_steps", "2", "--log", log)
        status, _, err = run("hybrid", *base, *more, processes=2, script="gpt.py")
        assert status == 0, err
        peaks[schedule] = rows(log)[0]["peak_MB"]
    assert peaks["1f1b"] < peaks["gpipe"] - 50, peaks


def test_gpt_bad_input(run, run_many, tmp_path):
    cases = {
        ("--num_stages", "1"): "--num_stages 1: it must be 2 or more, and divide the number of processes, 4",
        ("--num_stages", "3"): "--num_stages 3: it must be 2 or more, and divide the number of processes, 4",
        ("--num_stages", "0"): "--num_stages 0: it must be 2 or more",
        ("--num_layers", "1"): "--num_stages 2 is too many: 2 parts of a model of --num_layers 1",
        ("--num_layers", "3", "--schedule", "interleaved"): "4 parts of a model of --num_layers 3",
        (
            "--num_microbatches",
            "1",
        ): "--num_microbatches 1: --schedule 1f1b needs at least one for each of the 2 stages",
        ("--num_microbatches", "3", "--schedule", "interleaved"): "needs a multiple of the 2 stages",
        ("--num_microbatches", "0", "--schedule", "gpipe"): "--num_microbatches 0 is out of range",
        ("--batch_size", "60"): "--batch_size 60 does not divide into 8 equal parts: take 56 or 64",
        ("--schedule", "zb"): "invalid choice",
        ("--precision", "fp16"): "invalid choice",
    }
    assert_refused(run_many("hybrid/gpt.py", cases, **LAUNCH | {"WORLD_SIZE": "4"}), cases)
    assert_refused(run_many("hybrid/gpt.py", [()]), {(): "start it with torchrun"})
    # What is found later ends all processes, and nothing is overwritten.
    foreign = tmp_path / "foreign.pt"
    command = [*GPT, "--max_steps", "2", "--snapshot", foreign]
    status, _, err = run("singlegpu", *command, script="gpt.py")
    assert status == 0, err
    before = foreign.read_bytes()
    status, _, err = run("hybrid", *command, "--num_layers", "4", processes=4, script="gpt.py")
    assert status != 0 and "it was made with --num_layers 8, not 4" in err, err
    assert foreign.read_bytes() == before
