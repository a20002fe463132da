"""make_bigmnist.py, and training on what it wrote."""

import filecmp
import os
import shutil
import signal

import numpy as np
import pytest
import torch
from conftest import assert_same_weights, curve, load, wait_for, wait_for_saves
from test_models import module
from torchvision.transforms.v2 import functional as v2

SCRIPT = "singlegpu/make_bigmnist.py"
SMALL = "--dataset synthetic --versions 2 --copies 15 --num_images 2500".split()
FILES = [f"{split}_{what}.npy" for split in ("train", "test") for what in ("images", "labels")]
TRAIN = "--dataset bigmnist --model mlp --batch_size 1024 --learning_rate 3e-4".split()


@pytest.fixture(scope="module")
def big(run, tmp_path_factory):
    """A folder of 75,000 images, which are two windows of blocks."""
    folder = tmp_path_factory.mktemp("data") / "bigmnist"
    run(SCRIPT, *SMALL, "--out", folder)
    return folder


def test_contents(big):
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


def test_warp_is_torchvisions():
    """With the numbers of an image, the same as by v2's functions, up to rounding."""
    warp = module(SCRIPT).warp
    image = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 28, 28), np.uint8))
    none = {"angle": torch.zeros(3), "shear": torch.zeros(3), "scale": torch.ones(3)}
    none |= {"shift": torch.zeros(3, 2), "flip": torch.zeros(3, dtype=bool)}
    none |= {"noise": torch.zeros(3, 2, 28, 28)}
    assert (warp(image.numpy(), **none) == image.numpy()).all()
    flipped = warp(image.numpy(), **none | {"flip": torch.tensor([True, False, True])})
    assert (flipped[::2] == v2.hflip(image[::2]).numpy()).all()
    values = {"angle": torch.tensor([14.0, -9.0, 0.0]), "shear": torch.tensor([-7.0, 10.0, 5.0])}
    values["scale"] = torch.tensor([0.9, 1.1, 1.0])
    values["shift"] = torch.tensor([[2.0, -1.0], [0.0, 1.0], [-2.0, 0.0]])
    noise = torch.rand(3, 2, 28, 28) * 2 - 1
    warped, bent = (warp(image.numpy(), **none | more) for more in (values, {"noise": noise}))
    shifts = v2.gaussian_blur(noise, [41, 41], [5.0, 5.0]).permute(0, 2, 3, 1) * 50 / 28
    for index in range(3):
        angle, shear, scale, shift = (value[index].tolist() for value in values.values())
        sizes = {"angle": angle, "translate": shift, "scale": scale, "shear": [shear, 0.0]}
        bilinear = v2.InterpolationMode.BILINEAR
        expected = v2.affine(image[index][None], interpolation=bilinear, **sizes)[0].numpy()
        assert abs(warped[index].astype(int) - expected).max() <= 1
        expected = v2.elastic(image[index][None], shifts[index][None])[0].numpy()
        assert abs(bent[index].astype(int) - expected).max() <= 1
    assert (bent != image.numpy()).mean() > 0.5


def test_killed_and_started_again(big, start, run, tmp_path):
    """The same command ends with the same bytes, and a third one does not write them again."""
    out = tmp_path / "bigmnist"
    job = start(SCRIPT, *SMALL, "--out", out)
    written = lambda: sum(path.stat().st_size for path in tmp_path.rglob("*images*"))  # noqa: E731
    wait_for(lambda: written() > 1 << 20 or job.process.poll() is not None)
    job.process.send_signal(signal.SIGKILL)
    job.wait()
    if not out.exists():
        run(SCRIPT, *SMALL, "--out", out)
    assert filecmp.cmpfiles(big, out, FILES, shallow=False)[0] == FILES
    assert sorted(os.listdir(tmp_path)) == ["bigmnist"]


def test_training_on_windows(big, start, run, tmp_path):
    """One loss curve on 1 and 2 processes; killed in the second window, bit for bit as before."""
    base = [*TRAIN, "--data_dir", big.parent, "--epochs", 1]
    one, two, cut, whole = (tmp_path / name for name in ("one.csv", "two.csv", "c.pt", "w.pt"))
    run("singlegpu/images.py", *base, "--snapshot", whole, "--log", one)
    run("multigpu/images.py", *base, "--log", two, processes=2)
    np.testing.assert_allclose(curve(two, "val_acc"), curve(one, "val_acc"), rtol=1e-5)
    base += ["--snapshot", cut, "--snapshot_every", 1]
    job = start("singlegpu/images.py", *base)
    while not cut.exists() or load(cut)["place"] < (0, 66) and job.process.poll() is None:
        wait_for_saves(job, cut, 1)
    job.process.send_signal(signal.SIGKILL)
    job.wait()
    run("singlegpu/images.py", *base)
    assert_same_weights(cut, whole)


def test_a_file_that_is_cut_short(big, attempt, tmp_path):
    shutil.copytree(big, tmp_path / "bigmnist")
    os.truncate(tmp_path / "bigmnist" / FILES[0], 1000)
    status, _, err = attempt("singlegpu/images.py", *TRAIN, "--data_dir", tmp_path)
    assert status in (1, 2) and "bigmnist" in err and "Traceback" not in err, err
