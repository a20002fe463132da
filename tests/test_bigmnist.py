"""make_bigmnist.py, and training on what it wrote."""

import filecmp
import os
import signal

import numpy as np
import pytest
import torch
from conftest import wait_for
from test_models import module, namespace
from torchvision.transforms.v2 import functional as v2

SCRIPT = "singlegpu/make_bigmnist.py"
NAME = "synthetic2500x2x15"  # of these
SMALL = "--dataset synthetic --versions 2 --copies 15 --num_images 2500".split()
FILES = [f"{split}_{what}.npy" for split in ("train", "test") for what in ("images", "labels")]


@pytest.fixture(scope="module")
def big(run, tmp_path_factory):
    """A folder of 75,000 images."""
    folder = tmp_path_factory.mktemp("data") / "bigmnist"
    run(SCRIPT, *SMALL, "--out", folder)
    return folder


def test_labels_copies_and_augmented_versions(big):
    """Labels are those of the originals, copies are equal, and each version is augmented."""
    train, labels, test, test_labels = (np.load(big / name, mmap_mode="r") for name in FILES)
    assert train.shape == (75_000, 28, 28) and train.dtype == labels.dtype == np.uint8
    assert (labels.reshape(30, 2500) == labels[:2500]).all()
    copies = train.reshape(15, 2, 2500, 28, 28)
    assert (copies == copies[0]).all()
    first, second = copies[0].astype(int)
    assert (first != second).any((1, 2)).all() and len(np.unique(first, axis=0)) == 2500
    for version in (first, second):  # zeros come in at the edges
        assert version[:, 0].min() == 0 and version.mean() < test.mean()
    assert test.shape == (10_000, 28, 28) and sorted(set(test_labels)) == list(range(10))


def test_images_of_mnist(data, run, tmp_path):
    words = ("--dataset", "mnist", "--data_dir", data, "--num_images", 50, "--versions", 1)
    run(SCRIPT, *words, "--copies", 2, "--out", tmp_path / "big")
    train, labels, test, _ = (np.load(tmp_path / "big" / name) for name in FILES)
    content = np.fromfile(data / "MNIST/raw/train-labels-idx1-ubyte", "u1")[8:]
    assert len(train) == 100 and len(test) == 401 and (labels[50:] == content[:50]).all()


class Numbers:
    """In place of a random generator: gives these strengths (6, B) and then the noise."""

    def __init__(self, *arrays):
        self.arrays = list(arrays)

    def uniform(self, low, high, shape):
        return self.arrays.pop(0)


# What a strength of 1 does to an image, each alone: angle, shear, scale, flip, shifts.
AFFINE = {"angle": 0.0, "shear": [0.0, 0.0], "scale": 1.0, "translate": [0.0, 0.0]}
EFFECTS = ({"angle": 15.0}, {"shear": [10.0, 0.0]}, {"scale": 1.1}, {}, {"translate": [-2.0, 0.0]},
           {"translate": [0.0, -2.0]})  # fmt: skip


def test_augmentation_is_torchvisions(monkeypatch):
    """Each change alone is that of v2's functions, up to rounding."""
    make, generator = module(SCRIPT), np.random.default_rng(0)
    image = generator.integers(0, 256, (28, 28), np.uint8)
    images, tensor = np.repeat(image[None], 7, 0), torch.from_numpy(image)[None]
    noise = np.zeros((7, 2, 28, 28))
    noise[6] = generator.uniform(-1, 1, (2, 28, 28))  # the last image is bent
    strengths = np.concatenate((np.eye(6), np.zeros((6, 1))), 1)
    strengths[3] = [1, 1, 1, -1, 1, 1, 1]  # the fourth one is flipped
    monkeypatch.setattr(make.np.random, "default_rng", lambda seed: Numbers(strengths, noise))
    found = torch.from_numpy(make.augment(images, 0, torch.device("cpu")).astype(int))
    bilinear = {"interpolation": v2.InterpolationMode.BILINEAR}
    expected = [v2.affine(tensor, **AFFINE | effect, **bilinear)[0] for effect in EFFECTS]
    expected[3] = v2.hflip(tensor)[0]
    shift = v2.gaussian_blur(torch.from_numpy(noise[6]), [41, 41], [5.0, 5.0]) * 50 / 28
    expected.append(v2.elastic(tensor, shift.permute(1, 2, 0)[None].float())[0])
    for number, (one, other) in enumerate(zip(found, expected)):
        assert (one - other).abs().max() <= 1, number
        assert (one != torch.from_numpy(image)).float().mean() > 0.3, number


def test_stopped_and_started_again(big, fork, run, tmp_path):
    """Status 75 says: run me again. The same command ends with the same bytes."""
    out = tmp_path / "bigmnist"
    job = fork(SCRIPT, *SMALL, "--out", out)
    unfinished = tmp_path / f"bigmnist.{NAME}.tmp" / FILES[0]
    size = lambda: unfinished.exists() and unfinished.stat().st_size  # noqa: E731
    a_version = 2500 * 28 * 28
    wait_for(lambda: size() > 1.5 * a_version or job.process.poll() is not None)
    job.process.send_signal(signal.SIGUSR2)
    status, _, err = job.wait()
    assert status == (0 if out.exists() else os.EX_TEMPFAIL), err
    if not out.exists():
        os.truncate(unfinished, a_version // 2)
        run(SCRIPT, *SMALL, "--out", f"{out}/")
    assert filecmp.cmpfiles(big, out, FILES, shallow=False)[0] == FILES
    assert sorted(os.listdir(tmp_path)) == ["bigmnist"]


def test_each_index_once_in_blocks():
    """Each index once; blocks of 2 MiB in random order, shuffled within pools; epochs differ."""
    images, size = module("singlegpu/images.py"), 13  # images of 3 x 224 x 224 in a block
    count = 5000 * size + 5
    shape = (count, 3, 224, 224)
    data = images.Images(
        torch.zeros(1, dtype=torch.uint8).expand(shape), torch.zeros(1).expand(count)
    )
    orders = [images.training_order(data, namespace(), epoch) for epoch in (0, 1)]
    assert (orders[0] != orders[1]).mean() > 0.9
    for order in orders:
        assert np.array_equal(np.sort(order), np.arange(count))
        assert (abs(np.diff(order)) > size).mean() > 0.9, "shuffled within pools"
        for start in range(0, count - 200 * size, 500):
            blocks = np.unique(order[start : start + 200 * size] // size)
            assert len(blocks) <= 3 * 200, "a block is read within a short time"
            assert np.ptp(blocks) > 4000, "blocks come in random order"
