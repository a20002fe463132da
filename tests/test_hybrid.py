"""The hybrids, run as a user runs them: stages of a model on devices, times data parallelism."""

import importlib.util
import itertools
import random

import numpy as np
import pytest
from conftest import ROOT, assert_refused, rows, weights


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
    environment = {
        "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_MAX_RESTARTS": "0", "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    }  # fmt: skip
    cases = {
        ("--num_stages", "4"): "--num_stages 4 is too many: 3 layers have parameters",
        ("--num_stages", "0"): "--num_stages 0 is out of range",
        ("--balance", "luck"): "invalid choice",
        ("--batch_size", "0"): "--batch_size 0 is out of range",
    }
    results = run_many("hybrid/images.py", cases, **environment)
    assert_refused(results, cases)
    assert_refused(run_many("hybrid/images.py", [()]), {(): "start it with torchrun"})
