"""Stages of a model, on devices or in pipelines, times data parallelism."""

import os
import shutil
import signal

import numpy as np
import pytest
from conftest import assert_same_weights, curve, load, rows, saved_at, wait_for, wait_for_saves
from test_launchers import steps_of
from test_training import PHASES, arguments_of

PIPELINE = "hybrid/gpt.py"
GPT = "--d_model 32 --n_heads 2 --num_layers 8 --seq_len 32 --batch_size 48 --learning_rate 3e-4"


@pytest.fixture
def words(data):
    return [*GPT.split(), "--dataset", data / "words.txt"]


@pytest.mark.parametrize("model, num_stages", [("mlp", 2), ("cnn", 4)])
def test_images_one_loss_curve(run, data, tmp_path, model, num_stages):
    """Split by layers, on one, two and 2 x 2 processes: the losses of singlegpu."""
    base, one = [*arguments_of(model, data), "--epochs", 2], tmp_path / "one.csv"
    run("singlegpu/images.py", *base, "--log", one)
    for processes, parts in ((1, 1), (2, 3), ((2, 2), 1)):
        log = tmp_path / f"{processes}.csv"
        more = ("--num_stages", num_stages, "--grad_accum_steps", parts, "--log", log)
        run("hybrid/images.py", *base, *more, processes=processes)
        np.testing.assert_allclose(curve(log, "val_acc"), curve(one, "val_acc"), rtol=1e-5)


def test_images_snapshots_move(run, data, tmp_path):
    """Begun in a folder, carried on in another, in both directions: the losses of one run."""
    base, one = arguments_of("mlp", data), tmp_path / "one.csv"
    run("singlegpu/images.py", *base, "--epochs", 3, "--log", one)
    for folders in (("singlegpu", "hybrid", "singlegpu"), ("hybrid", "multigpu", "hybrid")):
        found, snapshot = [], tmp_path / f"{folders[0]}.pt"
        for epochs, folder in enumerate(folders, start=1):
            log = tmp_path / f"{folders[0]}{epochs}.csv"
            more = ("--epochs", epochs, "--snapshot", snapshot, "--log", log)
            run(f"{folder}/images.py", *base, *more, processes=2)
            found += curve(log).tolist()
        np.testing.assert_allclose(found, curve(one), rtol=1e-5)


def test_gpt_one_loss_curve(run, words, tmp_path):
    """The losses of one process, whatever the schedule; phases and bubble are the wall time."""
    base, one = [*words, "--epochs", 2, "--max_steps", 10], tmp_path / "one.csv"
    run("singlegpu/gpt.py", *base, "--log", one)
    assert curve(one)[1, 0] < curve(one)[0, 0]
    for processes, num_stages, schedule in (((2, 2), 2, "1f1b"), (3, 3, "gpipe"), (4, 4, "1f1b")):
        log = tmp_path / f"{num_stages}.csv"
        more = ("--num_stages", num_stages, "--schedule", schedule, "--num_microbatches", 4)
        more += ("--log", log)
        run(PIPELINE, *base, *more, processes=processes)
        np.testing.assert_allclose(curve(log), curve(one), rtol=1e-5)
        for row in rows(log):
            total = sum(row[phase] for phase in PHASES)
            assert total == pytest.approx(row["seconds"], rel=0.01) and row["bubble"] > 0


def test_gpt_resume_and_move(start, run, words, tmp_path, chance):
    """A stage is killed, then all are told to stop: the weights of an undisturbed run, bit for bit.

    What is left of the run can also be done by multigpu/gpt.py, with the same loss.
    """
    whole, cut, moved = (tmp_path / f"{name}.pt" for name in ("whole", "cut", "moved"))
    base = [*words, "--epochs", 4, "--max_steps", 20, "--snapshot_every", 4]
    for signum in (signal.SIGKILL, signal.SIGTERM):
        more = ("--num_stages", 2, "--snapshot", cut)
        job = start(PIPELINE, *base, *more, processes=4)
        wait_for_saves(job, cut, chance.randint(1, 3))
        if signum == signal.SIGKILL:
            os.kill(chance.choice(job.workers()), signum)
        else:
            job.process.send_signal(signum)
        status, _, err = job.wait()
        assert status, err
        wait_for(lambda job=job: not job.processes())
    shutil.copy(cut, moved)
    epoch, step = load(cut)["place"]
    logs = [tmp_path / f"{name}.csv" for name in ("cut", "moved")]
    run(PIPELINE, *base, "--num_stages", 2, "--snapshot", cut, "--log", logs[0], processes=4)
    first = rows(logs[0])[0]
    assert (first["epoch"], steps_of(first)) == (epoch, 20 - step), "it went on at that very step"
    run(PIPELINE, *base, "--num_stages", 2, "--snapshot", whole, processes=4)
    assert_same_weights(cut, whole)
    run("multigpu/gpt.py", *base, "--snapshot", moved, "--log", logs[1], processes=2)
    np.testing.assert_allclose(curve(logs[1]), curve(logs[0]), rtol=1e-4)


def test_bad_arguments(attempt, words, tmp_path):
    """What does not fit the processes is said; a foreign snapshot stays as it is."""
    for script, flag, value in (("hybrid/images.py", "--num_stages", 9),
                                (PIPELINE, "--num_stages", 3), (PIPELINE, "--num_microbatches", 1)):
        status, _, err = attempt(script, flag, value, processes=2)
        assert status and flag in err, err
    foreign = tmp_path / "foreign.pt"
    run_one = (*words, "--max_steps", 1, "--snapshot", foreign)
    assert attempt("singlegpu/gpt.py", *run_one)[0] == 0
    before = saved_at(foreign)
    status, _, err = attempt(PIPELINE, *run_one, "--num_layers", 4, processes=2)
    assert status and "num_layers" in err and saved_at(foreign) == before, err
