"""images.py, and make_bigmnist.py, which makes data for it."""

import os

import numpy as np
import pytest
import torch
from conftest import load, rows
from PIL import Image
from test_models import module, namespace

BIG, KILL = "singlegpu/make_bigmnist.py", "os.kill(os.getpid(), signal.SIGUSR2)"
images = module("singlegpu/images.py")
FILES = [f"{split}_{what}.npy" for split in ("train", "test") for what in ("images", "labels")]


def test_labels_copies_and_augmented_versions(attempt, changed, data, run, tmp_path):
    """Labels are those of the originals, copies are equal, and each version is augmented.

    Stopped in between: status 75 says, run me again; what is half written is written anew.
    """
    words = ("--data_dir", data, *"--versions 2 --copies 3 --num_images 1100 --out big".split())
    comment, unfinished = "# 75: go on here", tmp_path / "big.1100x2x3.tmp"
    kill = f"{comment}\n            if number == 1:\n                {KILL}"
    assert attempt(changed(BIG, {comment: kill}), *words, cwd=tmp_path)[0] == os.EX_TEMPFAIL
    begun = (unfinished / FILES[0]).read_bytes()
    os.truncate(unfinished / FILES[0], len(begun) * 3 // 4)
    run(BIG, *words, cwd=tmp_path)
    assert not unfinished.exists()
    train, labels, test, test_labels = (np.load(tmp_path / "big" / name) for name in FILES)
    assert train[:2200].tobytes() == begun[128:]
    assert train.shape == (6_600, 28, 28) and train.dtype == labels.dtype == np.uint8
    assert test.shape == (401, 28, 28) and sorted({*test_labels}) == [*range(10)]
    content = np.fromfile(data / "MNIST/raw/train-labels-idx1-ubyte", "u1")[8:]
    assert (labels.reshape(6, 1100) == content[:1100]).all()
    copies = train.reshape(3, 2, 1100, 28, 28)
    assert (copies == copies[0]).all()
    assert len(np.unique(copies[0].reshape(2200, -1), axis=0)) == 2200
    assert copies[0, :, :, 0].min(axis=(1, 2)).tolist() == [0, 0], "zeros come in at the edges"


def write(folder, shape, counts, num_classes=4):
    """Write random images and labels of both splits; labels have another byte order."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    for split, count in zip(("train", "test"), counts):
        pixels = generator.integers(0, 255, (count, *shape), np.uint8)
        np.save(folder / f"{split}_images.npy", pixels)
        np.save(folder / f"{split}_labels.npy", (np.arange(count) % num_classes).astype(">u2"))
    return folder


@pytest.mark.parametrize("model", "mlp cnn autoencoder vgg11 resnet18".split())
def test_models_take_images_of_any_size(model):
    """They take the channels, height and width of the data, and have as many classes.

    Small images are enlarged for networks that want more pixels.
    """
    for shape in ((1, 28, 28), (3, 20, 36)):
        data = images.StackDataset(np.zeros((4, *shape), np.uint8), np.arange(4))
        data.classes = range(4)
        with torch.device("meta"):  # shapes without numbers
            network = images.create_model(namespace(model=model, pretrained=False), data).eval()
            outputs = network(torch.zeros(1, *shape))
        assert outputs.shape == ((1, *shape) if model == "autoencoder" else (1, 4))


def test_photographs(logged, tmp_path, monkeypatch):
    """They are shown upright, and cut to --image_size. The snapshot has the names of classes.

    Each process and each worker draws crops of its own.
    """
    for number in range(24):
        name = f"{('train', 'val')[number % 2]}/{('cat', 'dog')[number % 4 // 2]}/{number}.jpg"
        (path := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (10 * number, 0, 0)).save(path)
    exif = Image.Exif()
    exif[0x0112] = 6  # shown after a turn by 90 degrees clockwise
    upright = np.repeat(np.uint8([[50], [200]]), 16, 1).repeat(4, 0)  # dark above
    Image.fromarray(np.rot90(upright)).save(path, exif=exif)
    assert abs(np.asarray(images.read_photo(path))[..., 0].astype(int) - upright).max() < 60
    words = ["--dataset", str(tmp_path), "--image_size", "8"]
    monkeypatch.setattr("sys.argv", ["images.py", *words])
    train_data, val_data = images.read_data(images.parse_args())
    assert train_data[0][0].shape == val_data[0][0].shape == (3, 8, 8)
    more = ("--model", "mlp", "--batch_size", 12, "--epochs", 2, "--snapshot", tmp_path / "s.pt")
    log = logged("multigpu/images.py", *words, *more, "--num_workers", 2, processes=2)
    assert load(tmp_path / "s.pt")["classes"] == ["cat", "dog"] and len(rows(log)) == 4


PARALLEL = [("multigpu/images.py", 3, ""), ("hybrid/images.py", 2, "--num_stages 4")]


@pytest.mark.parametrize(("script", "processes", "more"), PARALLEL)
def test_validation_is_of_what_is_saved(logged, tmp_path, script, processes, more):
    """With BatchNorm, too, whose statistics differ between the processes while they train."""
    folder = write(tmp_path / "small", (16, 16), (48, 20))  # without channels
    words = ("--dataset", folder, "--model", "resnet18", "--batch_size", 24, "--epochs", 1)
    words = (*words, *more.split(), "--snapshot", snapshot := tmp_path / "s.pt")
    log = logged(script, *words, processes=processes)
    args = namespace(model="resnet18", dataset=str(folder), data_dir="data", pretrained=False)
    _, val_data = images.read_data(args)
    model = images.create_model(args, val_data)
    model.load_state_dict(load(snapshot)["model"])
    batch = next(iter(images.create_loader(val_data, [[*range(20)]], namespace(num_workers=0))))
    loss, _ = images.batch_loss(model.eval(), batch, args)
    assert rows(log)[-1]["val_loss"] == pytest.approx(loss.item(), rel=1e-4)


def test_weights_to_start_from(run, tmp_path):
    """--init_from takes what fits, and names the rest. Resumed, a snapshot counts more."""
    old, new = tmp_path / "old.pt", tmp_path / "new.pt"
    words = ["--model", "mlp", "--batch_size", 12, "--learning_rate", 0]
    first = write(tmp_path / "first", (8, 8), (48, 12))
    second = write(tmp_path / "second", (8, 8), (48, 12), num_classes=5)
    run("singlegpu/images.py", *words, "--dataset", first, "--max_steps", 1, "--snapshot", old)
    words += ["--dataset", second, "--init_from", old, "--snapshot", new, "--max_steps"]
    out = run("multinode/images.py", *words, 1, processes=2)
    assert out.count("2 of 6 weights start anew: 6.weight, 6.bias\n") == 1
    before, after = load(old)["model"], load(new)["model"]
    changed = [name for name in after if not torch.equal(before[name], after[name])]
    assert changed == ["6.weight", "6.bias"]
    out = run("multinode/images.py", *words, 2, processes=2)
    assert "anew" not in out and load(new)["step"] == 2


@pytest.mark.parametrize(("folder", "processes"), [("singlegpu", 1), ("multinode", 2)])
def test_weights_of_which_none_fits(refused, run, tmp_path, folder, processes):
    """The run ends, and says with which flags the file was made."""
    words = [
        "--batch_size",
        12,
        "--max_steps",
        1,
        "--dataset",
        write(tmp_path / "x", (8, 8), (48, 12)),
    ]
    run("singlegpu/images.py", *words, "--model", "mlp", "--snapshot", old := tmp_path / "old.pt")
    more = ("--model", "autoencoder", "--init_from", old)
    err = refused("no weight of ", f"{folder}/images.py", *words, *more, processes=processes)
    assert "'model': 'mlp'" in err and err.count("no weight of") == 1


def test_other_classes_to_validate_on(refused, tmp_path):
    """The folders of train and val are numbered apart. Where one lacks a class, labels shift."""
    for name in ("train/cat", "train/dog", "val/dog"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (40, 30)).save(tmp_path / name / "1.jpg")
    words = ("--dataset", tmp_path, "--image_size", 8, "--model", "mlp", "--batch_size", 1)
    refused("val has other classes than train", "singlegpu/images.py", *words)


def test_a_broken_photograph_is_named(attempt, tmp_path):
    for number in range(8):
        name = f"{('train', 'val')[number % 2]}/cat/{number}.jpg"
        (path := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30)).save(path)
    content = (tmp_path / "train/cat/2.jpg").read_bytes()
    (tmp_path / "train/cat/2.jpg").write_bytes(content[:-200])
    words = ("--dataset", tmp_path, "--image_size", 8, "--model", "mlp", "--batch_size", 4)
    status, _, err = attempt("singlegpu/images.py", *words, "--epochs", 1)
    assert status == 1 and "cannot read" in err and "train/cat/2.jpg" in err


@pytest.mark.parametrize(
    ("name", "dtype"), [("a.tiff", "uint16"), ("a.png", "uint16"), ("b.tiff", "float32")]
)
def test_a_photograph_of_more_than_8_bits_is_refused(tmp_path, name, dtype):
    """Pillow would make all values above 255 white, as of a microscope's images, without a word."""
    Image.fromarray(np.full((9, 9), 1000, dtype)).save(tmp_path / name)
    with pytest.raises(OSError, match=f"{name}: it has more than 8 bits a pixel"):
        images.read_photo(tmp_path / name)
    Image.fromarray(np.full((9, 9), 200, "uint8")).save(tmp_path / "grey.tiff")
    assert images.read_photo(tmp_path / "grey.tiff").getpixel((0, 0)) == (200, 200, 200)


def test_pieces_of_a_large_file_are_shuffled():
    """600 MiB, in pieces of two images: each image once, and few beside their neighbors."""
    data = images.StackDataset(np.broadcast_to(np.uint8(0), (600, 1, 1024, 1024)), np.arange(600))
    order = images.training_order(data, np.random.default_rng(0))
    assert sorted(order) == [*range(600)] and (np.diff(order) == 1).mean() < 0.1


def test_an_epochs_order_leaves_the_seeds_of_gpus(monkeypatch):
    """They are those of its step, whose dropout they draw. torch.manual_seed() sets them, too."""
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    next(images.training_batches(range(12), 0, namespace(grad_accum_steps=1)))
    torch.manual_seed(3)
    assert seeds == [3]


def test_a_file_larger_than_memory_is_mapped(tmp_path):
    """Twice as large, and sparse: it takes no space on the disk."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    count = 2 * memory // (3 << 20)
    for split in ("train", "test"):
        path = tmp_path / f"{split}_images.npy"
        np.lib.format.open_memmap(path, "w+", np.uint8, (count, 3, 1024, 1024))
        np.save(tmp_path / f"{split}_labels.npy", np.zeros(count, np.uint8))
    data, _ = images.read_data(namespace(dataset=str(tmp_path), data_dir=""))
    pixels, _ = next(iter(images.create_loader(data, [[0, count - 1]], namespace(num_workers=0))))
    assert pixels.shape == (2, 3, 1024, 1024) and not pixels.any()
