"""The three autoencoder.py, run as a user runs them."""

import os
import random
import signal
import sys
import time

import numpy as np
import pytest
import torch
from conftest import LAUNCHES, ROOT, assert_refused, assert_same_weights, rows, wait_for
from PIL import Image

sys.path.insert(0, str(ROOT / "singlegpu"))
import autoencoder  # noqa: E402

SMALL = ("--dataset", "bigmnist", "--threads", "1", "--batch_size", "24")


def test_one_loss_curve(run, tiny, tmp_path):
    """Any number of processes and of accumulated parts: the same losses to rounding."""
    curves = []
    for folder, processes, parts in LAUNCHES:
        log = tmp_path / f"{folder}{processes}{parts}.csv"
        status, out, err = run(
            folder, *SMALL, "--data_dir", tiny, "--max_steps", "20", "--learning_rate", "3e-4",
            "--grad_accum_steps", parts, "--log", log, processes=processes, script="autoencoder.py",
        )  # fmt: skip
        assert status == 0, err
        curves.append([[row["train_loss"], row["val_loss"]] for row in rows(log) if row["rank"] == 0])
    assert curves[0][1][0] < curves[0][0][0], "it learns"
    for curve in curves[1:]:
        np.testing.assert_allclose(curve, curves[0], rtol=1e-5)


@pytest.mark.parametrize("folder, processes", [("multigpu", 2)])
def test_resume_is_bit_identical(start, run, tiny, tmp_path, folder, processes):
    """Stopped at a random step and started again, a run ends with the undisturbed weights, and with the picture."""
    whole, cut, picture = tmp_path / "whole.pt", tmp_path / "cut.pt", tmp_path / "pairs.png"
    command = [*SMALL, "--data_dir", tiny, "--epochs", "4", "--max_steps", "20", "--snapshot_every", "5"]
    status, _, err = run(folder, *command, "--snapshot", whole, processes=processes, script="autoencoder.py")
    assert status == 0, err
    command += ["--snapshot", cut, "--reconstructions", picture]
    job = start(folder, *command, processes=processes, script="autoencoder.py")
    wait_for(cut.exists)
    time.sleep(random.uniform(0, 0.5))
    os.kill(job.process.pid, signal.SIGTERM)
    _, out, err = job.wait(60)
    assert "stopped by a signal" in out and not picture.exists(), err
    status, _, err = run(folder, *command, processes=processes, script="autoencoder.py")
    assert status == 0, err
    assert_same_weights(whole, cut)
    image = np.asarray(Image.open(picture)) / 255
    assert image.shape == (2 * 30 + 2, 16 * 30 + 2, 3)  # 16 pairs of 28 x 28, with 2 pixels between them
    inputs, outputs = image[2:30, 2:30, 0], image[32:60, 2:30, 0]
    first = np.load(tiny / "bigmnist" / "test_images.npy")[0] / 255
    np.testing.assert_allclose(inputs, first, atol=0.01)
    assert 0 < ((inputs - outputs) ** 2).mean() < inputs.var()


@pytest.mark.parametrize("channels, size", [(1, 28), (3, 32)])
def test_bottleneck(channels, size):
    """An eighth of the input, or less, passes; the reconstruction has the input's shape."""
    model, images = autoencoder.create_model(channels), torch.rand(2, channels, size, size)
    passed = []
    model[4].register_forward_hook(lambda layer, inputs, output: passed.append(output))
    out = model(images)
    assert out.shape == images.shape
    assert passed[0][0].numel() * 8 <= images[0].numel()


def test_bad_input(run_many, tmp_path):
    cases = {
        ("--reconstructions", tmp_path): "cannot write",
        ("--reconstructions", tmp_path / "none" / "file.png"): "cannot write",
        ("--dataset", "bigmnist", "--data_dir", tmp_path): "No such file",
        ("--batch_size", "70000"): "60000 training images",
        ("--learning_rate", "0"): "--learning_rate 0",
    }
    assert_refused(run_many("singlegpu/autoencoder.py", cases), cases)


def test_real_mnist(run, real_data, tmp_path):
    """A mean squared error under 0.01 within an epoch."""
    log = tmp_path / "log.csv"
    arguments = ["--dataset", "mnist", "--data_dir", real_data, "--epochs", "1", "--threads", "1", "--log", log]
    status, _, err = run("multigpu", *arguments, processes=2, script="autoencoder.py")
    assert status == 0, err
    assert rows(log)[0]["val_loss"] < 0.01
