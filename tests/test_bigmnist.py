"""singlegpu/make_bigmnist.py, run as a user runs it, and how the images.py read what it makes."""

import contextlib
import filecmp
import json
import os
import shutil
import signal
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from conftest import ROOT, assert_refused, wait_for, weights
from torchvision.transforms.v2 import functional as v2

sys.path.insert(0, str(ROOT / "singlegpu"))
import images  # noqa: E402
import make_bigmnist  # noqa: E402

SMALL = ("--dataset", "synthetic", "--versions", "2", "--copies", "3", "--num_images", "2500")
FILES = ("train_images.npy", "train_labels.npy", "test_images.npy", "test_labels.npy")


@pytest.fixture(scope="session")
def big(fork, tmp_path_factory):
    """A folder that make_bigmnist.py has made with SMALL, 15,000 images, undisturbed."""
    folder = tmp_path_factory.mktemp("data") / "bigmnist"
    ((status, _, err, _),) = fork([[str(ROOT / "singlegpu/make_bigmnist.py"), *SMALL, "--out", str(folder)]])
    assert status == 0, err
    return folder


def assert_same_files(folder, other):
    assert sorted(os.listdir(folder)) == sorted(os.listdir(other))
    assert filecmp.cmpfiles(folder, other, FILES, shallow=False)[0] == list(FILES)


def test_contents(big):
    train, labels, test, test_labels = (np.load(big / name, mmap_mode="r") for name in FILES)
    original, original_labels = images.synthetic_images(60_000, seed=60_000)
    assert train.shape == (15_000, 28, 28) and train.dtype == labels.dtype == np.uint8
    assert (labels.reshape(6, 2500) == original_labels[:2500].numpy()).all(), "every version and copy has the labels"
    copies = train.reshape(3, 2, 2500, 28, 28)
    assert (copies == copies[0]).all(), "copies are equal"
    first, second = copies[0].astype(int)
    plain = original[:2500].numpy().astype(int)
    for one, other in ((first, second), (first, plain), (second, plain)):
        assert (one != other).any((1, 2)).all(), "no image is as in another version, or not augmented"
    for version in (first, second):  # the edges are darker: zeros come in
        assert 0.8 * plain.mean() < version.mean() < plain.mean()
    assert len(np.unique(first.reshape(2500, -1), axis=0)) == 2500
    expected, expected_labels = images.synthetic_images(10_000, seed=10_000)
    assert (test == expected.numpy()).all() and (test_labels == expected_labels.numpy()).all(), "not augmented"


def test_real_mnist(run, real_data, tmp_path):
    """The labels are MNIST's, the test images too, and the others look like digits."""
    out = tmp_path / "out"
    more = ("--data_dir", real_data, "--versions", "1", "--copies", "1", "--num_images", "20000")
    status, _, err = run("singlegpu", "--dataset", "mnist", *more, "--out", out, script="make_bigmnist.py")
    assert status == 0, err
    train, labels, test, test_labels = (np.load(out / name) for name in FILES)
    raw = real_data / "MNIST" / "raw"
    assert test.tobytes() == (raw / "t10k-images-idx3-ubyte").read_bytes()[16:]
    assert test_labels.tobytes() == (raw / "t10k-labels-idx1-ubyte").read_bytes()[8:]
    assert labels.tobytes() == (raw / "train-labels-idx1-ubyte").read_bytes()[8:20_008]
    assert 25 < train.mean() < 40 and (train[:, 0] == 0).mean() > 0.95, "ink in the middle"


def test_same_bytes_with_other_threads_and_another_seed(big, run, tmp_path):
    for name, more in (("threads", ("--threads", "1")), ("seed", ("--seed", "2"))):
        out = tmp_path / name
        status, _, err = run("singlegpu", *SMALL, *more, "--out", out, script="make_bigmnist.py")
        assert status == 0, err
    assert_same_files(big, tmp_path / "threads")
    assert not filecmp.cmp(big / FILES[0], tmp_path / "seed" / FILES[0], shallow=False)


def test_warp_is_torchvisions():
    """With the numbers of one image, the same as v2's functions, up to rounding."""
    image = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 28, 28), np.uint8))
    none = {name: torch.zeros(3) for name in ("angle", "shear")} | {"scale": torch.ones(3)}
    none |= {"shift": torch.zeros(3, 2), "flip": torch.zeros(3, dtype=bool), "noise": torch.zeros(3, 2, 28, 28)}
    assert (make_bigmnist.warp(image.numpy(), **none) == image.numpy()).all()
    flipped = make_bigmnist.warp(image.numpy(), **none | {"flip": torch.tensor([True, False, True])})
    assert (flipped[::2] == v2.hflip(image[::2]).numpy()).all() and (flipped[1] == image[1].numpy()).all()
    values = {"angle": torch.tensor([14.0, -9.0, 0.0]), "shear": torch.tensor([-7.0, 10.0, 5.0])}
    values |= {"scale": torch.tensor([0.9, 1.1, 1.0]), "shift": torch.tensor([[2.0, -1.0], [0.0, 1.0], [-2.0, 0.0]])}
    warped = make_bigmnist.warp(image.numpy(), **none | values)
    for index, (angle, shear, scale, shift) in enumerate(zip(*values.values())):
        kwargs = {
            "angle": angle.item(),
            "translate": shift.tolist(),
            "scale": scale.item(),
            "shear": [shear.item(), 0.0],
        }
        expected = v2.affine(image[index][None], interpolation=v2.InterpolationMode.BILINEAR, **kwargs)[0]
        assert abs(warped[index].astype(int) - expected.numpy()).max() <= 1, index
    noise = torch.rand(3, 2, 28, 28) * 2 - 1
    bent = make_bigmnist.warp(image.numpy(), **none | {"noise": noise})
    displacement = v2.gaussian_blur(noise, [41, 41], [5.0, 5.0]).permute(0, 2, 3, 1) * 50 / 28
    for index in range(3):
        expected = v2.elastic(image[index][None], displacement[index][None])[0].numpy()
        assert abs(bent[index].astype(int) - expected).max() <= 1 and abs(displacement).max() > 0.02
    assert (bent != image.numpy()).mean() > 0.5
    white = make_bigmnist.warp(np.full((3, 28, 28), 255, np.uint8), **none | values | {"noise": noise})
    assert (white[:, 8:20, 8:20] == 255).all(), "rounding does not leave the range of bytes"


def test_killed_and_started_again(big, start, tmp_path):
    """Killed while it augments, and while it copies, it ends with the same bytes."""
    out, work = tmp_path / "out", tmp_path / "out.tmp"
    sizes = [np.load(big / FILES[0], mmap_mode="r").nbytes // 6 * part for part in (0.1, 0.9, 2.5, 4.2)]
    for size in sizes:
        for _ in range(5):
            job = start("singlegpu", *SMALL, "--out", out, script="make_bigmnist.py")
            wait_for(lambda: out.exists() or (work / FILES[0]).exists() and (work / FILES[0]).stat().st_size > size)
            os.kill(job.process.pid, signal.SIGKILL)
            job.wait(30)
            if not out.exists():
                break
            shutil.rmtree(out)  # it was faster: once more
        os.truncate(work / FILES[0], int(size) + 100)  # it may have come further: back to where it was to be killed
    assert not out.exists(), "it was never killed in time"
    status, stdout, err = start("singlegpu", *SMALL, "--out", out, script="make_bigmnist.py").wait(60)
    assert status == 0 and "augmented 0 images" in stdout, err
    assert_same_files(big, out)
    assert not work.exists()


def test_full_disk(big, start, tmp_path):
    """Filled up by others meanwhile: one line, nothing under the final name; with room again, it goes on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=21m", "tmpfs", disk], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"needs to mount a small disk: {mount.stderr}")
    try:
        job = start("singlegpu", *SMALL, "--out", disk / "out", script="make_bigmnist.py")
        wait_for((disk / "out.tmp" / FILES[1]).exists)
        with open(disk / "others", "wb") as others, pytest.raises(OSError):
            others.write(bytes(30 << 20))
        status, _, err = job.wait(60)
        assert status == 2 and "No space left on device" in err.splitlines()[-1] and "Traceback" not in err, err
        assert sorted(os.listdir(disk)) == ["others", "out.tmp"]
        status, _, err = start("singlegpu", *SMALL, "--out", disk / "out", script="make_bigmnist.py").wait(60)
        assert status == 2 and "GB are free" in err, "no room from the start"
        (disk / "others").unlink()
        status, _, err = start("singlegpu", *SMALL, "--out", disk / "out", script="make_bigmnist.py").wait(60)
        assert status == 0, err
        assert_same_files(big, disk / "out")
    finally:
        subprocess.run(["umount", disk], check=True)


def test_bad_input(big, run_many, tmp_path):
    (tmp_path / "begun.tmp").mkdir()
    (tmp_path / "begun.tmp" / "arguments.json").write_text(json.dumps({"seed": 3}))
    cases = {
        ("--versions", "0"): "--versions 0 is out of range",
        ("--copies", "-1"): "--copies -1 is out of range",
        ("--num_images", "60001"): "--num_images 60001 exceeds the 60000 training images",
        ("--dataset", "cifar10"): "invalid choice",
        ("--copies", "100000000"): "GB are free",
        ("--out", big): "is there already",
        ("--out", tmp_path / "begun"): "was begun with other arguments",
        ("--out", "/proc/none/out"): "No such file",
        ("--dataset", "mnist", "--data_dir", tmp_path): "--dataset mnist",
    }
    base = ("--dataset", "synthetic", "--num_images", "2000", "--out", tmp_path / "out")
    results = run_many(
        "singlegpu/make_bigmnist.py", [(*base, *case) for case in cases], https_proxy="http://127.0.0.1:9"
    )
    assert_refused(results, cases)
    assert not (tmp_path / "out").exists()


def test_windows_of_blocks(monkeypatch):
    """Each image once; those of a window come from 16 blocks; a start at any step goes on in the same order."""
    monkeypatch.setattr(images, "BLOCK", 64)
    args = types.SimpleNamespace(seed=1, batch_size=48)
    array, whole = np.zeros((10_007, 1), np.uint8), range(10_007 // 48)
    first, other = (np.stack(list(images.shuffled_batches(array, whole, args, epoch))) for epoch in (0, 1))
    assert first.shape == (208, 48) and len(np.unique(first)) == 208 * 48 and (first != other).any()
    assert len(np.unique(first.ravel()[:960] // 64)) == 16, "the first window"
    assert (abs(np.diff(first.ravel()[:1024] // 64)) > 0).mean() > 0.9, "shuffled within"
    for start, stop in ((0, 5), (21, 22), (100, 208)):
        part = list(images.shuffled_batches(array, range(start, stop), args, 0))
        assert (np.stack(part) == first[start:stop]).all()
    monkeypatch.undo()
    full = np.stack(list(images.shuffled_batches(np.zeros((60_000, 1)), range(1250), args, 0)))
    assert len(np.unique(full[:50] // 4096)) == 15, "MNIST is shuffled as a whole"


def test_workers_change_nothing(big, run, tmp_path):
    """The same weights with 0, 1 and 2 workers, on 1 and 2 processes; what is cut short by --max_steps ends."""
    base = ("--dataset", "bigmnist", "--data_dir", big.parent, "--model", "mlp", "--epochs", "1", "--max_steps", "20")
    base += ("--threads", "1", "--batch_size", "40", "--learning_rate", "3e-4")
    found = {}
    for folder, processes, workers in (
        ("singlegpu", 1, 0),
        ("singlegpu", 1, 1),
        ("singlegpu", 1, 2),
        ("multigpu", 2, 1),
    ):
        snapshot = tmp_path / f"{folder}{workers}.pt"
        more = ("--num_workers", workers, "--snapshot", snapshot)
        status, out, err = run(folder, *base, *more, processes=processes)
        assert status == 0 and "15,000 + 10,000 images" in out, err
        found[folder, workers] = weights(snapshot)
    for name, expected in found["singlegpu", 0].items():
        for workers in (1, 2):
            assert torch.equal(found["singlegpu", workers][name], expected), name
        torch.testing.assert_close(found["multigpu", 1][name], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("folder", ["singlegpu", "multigpu"])
def test_workers_bear_signals(big, start, tmp_path, folder):
    """Slurm signals every process of a job: the snapshot is saved all the same, and no worker stays."""
    snapshot = tmp_path / "run.pt"
    base = ("--dataset", "bigmnist", "--data_dir", big.parent, "--model", "mlp", "--epochs", "500", "--threads", "1")
    job = start(folder, *base, "--num_workers", "1", "--snapshot", snapshot, "--snapshot_every", "20")
    wait_for(snapshot.exists)
    for process in job.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
    status, out, err = job.wait(60)
    assert status == 143 and "stopped by a signal" in out, err
    assert "Traceback" not in err and "leaked" not in err, err
    wait_for(lambda: not job.processes(), 10)


def test_resident_memory_does_not_grow_with_the_file(big, tmp_path):
    """Read in full, a file of 0.9 GB leaves less than a third of it mapped."""
    name = tmp_path / "images.npy"
    file = np.lib.format.open_memmap(name, "w+", np.uint8, (1_200_000, 28, 28))  # sparse: takes no room
    del file
    code = f"""
import sys; sys.path.insert(0, {str(ROOT / "singlegpu")!r})
import types, numpy, images
array = numpy.load({str(name)!r}, "r")
args = types.SimpleNamespace(seed=1, batch_size=400)
resident = lambda: int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0]) / 1e6
before, largest = resident(), 0
gather = images.Gather([array])
for step, batch in enumerate(images.shuffled_batches(array, range(3000), args, 0)):
    gather[batch]
    largest = max(largest, resident() if step % 10 == 0 else 0)
assert step == 2999
print(largest - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.3


def test_gather_after_mapping_anew(tmp_path):
    """Files of grey and of coloured images (N, H, W, C), both further than what is mapped at once."""
    for shape in ((70_000, 4, 4), (70_000, 2, 4, 3)):
        values = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        np.save(tmp_path / "values.npy", values)
        mapped = np.load(tmp_path / "values.npy", "r")
        arrays = [array.transpose(0, 3, 1, 2) if array.ndim == 4 else array[:, None] for array in (values, mapped)]
        gather = images.Gather(arrays[1:])
        for indices in np.random.default_rng(1).permutation(70_000)[:69_000].reshape(-1, 1000):
            assert (gather[indices][0].numpy() == arrays[0][indices]).all()


@pytest.mark.parametrize("damage", ["short", "foreign", "labels", "missing"])
def test_damaged_files(big, run, tmp_path, damage):
    folder = tmp_path / "bigmnist"
    folder.mkdir()
    for name in FILES:
        os.link(big / name, folder / name)
    target = folder / (FILES[1] if damage == "labels" else FILES[0])
    target.unlink()
    if damage == "short":
        target.write_bytes((big / FILES[0]).read_bytes()[:-1000])
    elif damage == "foreign":
        np.save(target, np.zeros((15_000, 28, 28), np.float32))
    elif damage == "labels":
        np.save(target, np.full(15_000, 10, np.uint8))
    status, _, err = run("singlegpu", "--dataset", "bigmnist", "--data_dir", tmp_path)
    assert status == 2 and len(err.splitlines()) == 1, err
    assert "--dataset bigmnist" in err and "make_bigmnist.py" in err and "Traceback" not in err
