"""images.py, and the scripts that make data for it: make_images.py and make_bigmnist.py."""

import os
import re
import shutil

import datasets
import numpy as np
import pytest
import torch
from conftest import curve, load, rows
from PIL import Image
from test_models import module, namespace
from torchvision.transforms.v2 import functional as v2

MAKE, BIG = "singlegpu/make_images.py", "singlegpu/make_bigmnist.py"
images, make = module("singlegpu/images.py"), module(MAKE)
FILES = [f"{split}_{what}.npy" for split in ("train", "test") for what in ("images", "labels")]
COLORS = {"blue": (0, 0, 250), "green": (0, 250, 0), "red": (250, 0, 0)}


def arrays(out, split):
    return [np.load(out / f"{split}_{name}.npy") for name in ("images", "labels")]


def test_each_photograph_once_with_its_class(run, tmp_path):
    """A tenth of each class is for testing; a broken one is left out. images.py trains on them.

    It reads them in place of the photos of the same name, and says so. The middle is kept: the
    sides are black.
    """
    for name, color in COLORS.items():
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(30):
            shape = (60 + 2 * number, 40)[:: -1 if number % 2 else 1]
            image = Image.new("RGB", shape)
            x, y = (length // 2 for length in shape)
            image.paste(color, (x - 20, y - 20, x + 20, y + 20))
            image.save(tmp_path / f"photos/{name}/{number}.{'png' if number % 5 else 'jpg'}")
    os.truncate(tmp_path / "photos/red/7.png", 50)
    assert "1 broken ones left out" in run(MAKE, "photos", "--size", 32, cwd=tmp_path)
    made = tmp_path / "data/photos"
    assert (made / "classes.txt").read_text().split() == sorted(COLORS)
    assert sorted(os.listdir(made)) == sorted([*FILES, "classes.txt"])
    (train, labels), (test, test_labels) = arrays(made, "train"), arrays(made, "test")
    assert len(train) + len(test) == 89 and len(test) in (8, 9)
    assert np.bincount(labels).min() >= 26 and np.bincount(test_labels).min() >= 2
    for pixels, numbers in (train, labels), (test, test_labels):
        assert pixels.shape == (len(numbers), 3, 32, 32)
        colors = np.array([COLORS[name] for name in sorted(COLORS)])[numbers]
        assert np.abs(pixels.mean((2, 3)) - colors).max() < 16
    assert (np.diff(labels) != 0).mean() > 0.4, "shuffled"
    words = ("--dataset", "photos", "--model", "mlp", "--batch_size", 20, "--epochs", 5)
    out = run("singlegpu/images.py", *words, "--log", tmp_path / "log.jsonl", cwd=tmp_path)
    assert "images are those of data/photos/*.npy" in out
    assert curve(tmp_path / "log.jsonl", "val_acc")[-1, 2] == 1


def decode(path, size, grey=False):
    """The picture in a file, as make_images.py writes it."""
    rows = [{"image": {"path": str(path), "bytes": None}}]
    return make.decode(rows, 0, namespace(size=size, grey=grey))


TRANSPARENT = {"RGBA": (9, 9, 9, 0), "LA": (9, 0), "P": 0}


def test_photographs(tmp_path, monkeypatch):
    """Both scripts read them upright, and on white where they are transparent.

    images.py cuts them to --image_size. There, a worker for each thread loads them. Of those of 16
    bits, make_images.py alone knows the range.
    """
    for split in ("train", "val"):
        write_folders(tmp_path / split, suffix="jpg")
    turned, clear = tmp_path / "train/class0/0.jpg", tmp_path / "train/class0/1.png"
    exif = Image.Exif()
    exif[0x0112] = 6  # shown after a turn by 90 degrees clockwise
    upright = np.repeat(np.uint8([[50], [200]]), 16, 1).repeat(4, 0)
    Image.fromarray(np.rot90(upright)).save(turned, exif=exif)
    assert images.read_photo(turned).size == (16, 8)
    assert abs(decode(turned, 8)[0, :, 0].astype(int) - upright[:, 0]).max() < 60
    for mode, dark in TRANSPARENT.items():
        more = {"transparency": 0} if mode == "P" else {}
        Image.new(mode, (8, 8), dark).save(clear, **more)
        assert images.read_photo(clear).getextrema() == ((255, 255),) * 3
        assert (decode(clear, 8) == 255).all()
    shutil.copy(tmp_path / "train/class0/2.jpg", tmp_path / "train/class0/2b.JFIF")
    words = ["images.py", "--dataset", str(tmp_path), "--image_size", "8"]
    monkeypatch.setattr("sys.argv", words)
    train_data, val_data = images.read_data(args := images.parse_args())
    assert len(train_data) == 42 == len(make.read_source(str(tmp_path))[0][0][1])
    assert train_data[0][0].shape == val_data[0][0].shape == (3, 8, 8)
    assert args.num_workers == torch.get_num_threads()
    for suffix, dtype in ("png", "<u2"), ("tif", ">u2"):
        path = tmp_path / f"0.{suffix}"
        Image.fromarray(np.full((8, 8), 40_000, dtype)).save(path)
        assert (decode(path, 8, grey=True) == 40_000 // 256).all()
        told = "has more than 8 bits a channel. make_images.py scales"
        with pytest.raises(ValueError, match=told):
            images.read_photo(path)


def write_split(folder, split, labels, names=("bird", "cat", "dog")):
    """Write a .parquet file of images with these labels, numbers of classes or words.

    The brightness of an image tells its label.
    """
    folder.mkdir(exist_ok=True)
    kind = datasets.ClassLabel(names=[*names]) if names else datasets.Value("string")
    levels = {"cat": 50, 0: 50, "NA": 200, 1: 200}
    pictures = [Image.new("L", (8, 8), levels.get(label, 120)) for label in labels]
    features = datasets.Features({"image": datasets.Image(), "label": kind})
    table = datasets.Dataset.from_dict({"image": pictures, "label": labels}, features=features)
    table.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return folder


def write_folders(folder, levels=(50, 200), dtype=np.uint8, suffix="png"):
    """Write folders of 20 images, one for each level, as an array of this type."""
    for number, value in enumerate(levels):
        (path := folder / f"class{number}").mkdir(parents=True)
        for index in range(20):
            Image.fromarray(np.full((8, 8), value, dtype)).save(path / f"{index}.{suffix}")
    return folder


def test_images_without_label_are_left_out(run, refused, tmp_path):
    """A class may be named NA, and blanks name none. A test split without labels is none."""
    words = ["cat", "NA", "null", " ", "", None] * 5
    source = write_split(tmp_path / "words", "train", words, names=None)
    run(MAKE, source, "--size", 8, "--grey", "--out", out := tmp_path / "grey")
    assert (out / "classes.txt").read_text() == "NA\ncat\nnull\n"
    assert arrays(out, "train")[0].shape == (12, 1, 8, 8) and len(arrays(out, "test")[1]) == 3
    refused("is there already", MAKE, source, "--out", out)
    write_split(source, "test", [None] * 9, names=None)
    refused("test has no labels", MAKE, source, "--out", tmp_path / "out")


def test_sources_that_do_not_serve(run, tmp_path):
    """Each would make a data set of another meaning. What fits is numbered as train has it."""

    def refuse(message, source):
        with pytest.raises(SystemExit, match=re.escape(message)):
            make.main(namespace(source=str(source), size=8, grey=False, out=str(tmp_path / "no")))

    source = write_split(tmp_path / "other", "train", [0, 2, 0])
    refuse("test has classes that train has not: ['cat']", write_split(source, "test", [0, 1]))
    refuse("are the same, bird", write_split(tmp_path / "one", "train", [0] * 9))
    source = write_split(tmp_path / "apart", "train", [0, 1] * 9, names=("cat", "dog"))
    refuse("differ in classes: ['bird']", write_split(source, "test", [1, 2]))
    refuse("between 3 and 15", write_folders(tmp_path / "12 bits", (900, 4000), dtype="<u2"))
    shutil.rmtree(tmp_path / "no.8rgb.tmp")
    source = write_folders(tmp_path / "float", (0.1, 0.9), dtype="f4", suffix="tif")
    refuse("none of the first 4 images", source)
    write_folders((photos := tmp_path / "photos") / "train", (50, 120, 200))
    write_folders(photos / "valid")
    (photos / "valid/class1").rename(photos / "valid/class2")
    run(MAKE, photos, "--size", 8, "--out", out := tmp_path / "out")
    pixels, labels = arrays(out, "test")
    assert (pixels[:, 0, 0, 0] == np.where(labels == 2, 200, 50)).all() and len(labels) == 40
    (photos / "train").rename(photos / "Train")
    (photos / "valid").rename(photos / "Val")
    refuse("in small letters", photos)


KILL = "os.kill(os.getpid(), signal.SIGUSR2)"


def test_make_images_stopped_and_started_again(attempt, refused, changed, tmp_path):
    """Stopped after each block, 256 images: status 75 says that it has written, and can go on.

    What is half written is written anew. Files of another source are not gone on with. Images
    without label are counted; validation takes the place of a secret test.
    """
    labels = np.random.default_rng(0).integers(0, 2, 400).tolist()
    labels[::40] = [-1, None] * 5
    source, out = write_split(tmp_path / "source", "train", labels), tmp_path / "out"
    write_split(source, "test", [-1] * 10)
    write_split(source, "validation", [0, 1] * 5)
    line, words = "bar.update(len(decoded))", (source, "--size", 8, "--out", out)
    copy = changed(MAKE, {line: f"{line}\n            {KILL}"})
    assert [attempt(copy, *words)[0] for _ in range(2)] == [os.EX_TEMPFAIL] * 2, "test, and a half"
    paths = [tmp_path / f"out.8rgb.tmp/train_{name}" for name in ("images.npy", "labels.tmp")]
    begun, done = (path.read_bytes() for path in paths)
    others = (1 - np.frombuffer(done, np.int64)).tobytes()
    for broken in (begun, others), (begun[:1000], done):
        [path.write_bytes(content) for path, content in zip(paths, broken)]
        refused("remove their folder", MAKE, *words)
    [path.write_bytes(content + b"torn") for path, content in zip(paths, (begun, done))]
    (status, told, _), (last, *_) = attempt(copy, *words), attempt(copy, *words)
    assert (status, last) == (os.EX_TEMPFAIL, 0)
    assert "10 of 400 rows of train have no label" in told
    assert "10 of 10 rows of test have no label" in told
    for split, count in ("train", 390), ("test", 10):
        pixels, labels = arrays(out, split)
        assert pixels.shape == (count, 3, 8, 8)
        assert (pixels[:, 0, 0, 0] == np.where(labels == 1, 200, 50)).all()


# == make_bigmnist.py ==
def test_labels_copies_and_augmented_versions(attempt, changed, run, tmp_path):
    """Labels are those of the originals, copies are equal, and each version is augmented.

    Stopped in between: status 75 says, run me again; what is half written is written anew.
    """
    words = "--dataset synthetic --versions 2 --copies 3 --num_images 1500 --out big".split()
    comment, unfinished = "# 75: run me again", tmp_path / "big.synthetic1500x2x3.tmp"
    kill = f"{comment}\n            if number == 1:\n                {KILL}"
    assert attempt(changed(BIG, {comment: kill}), *words, cwd=tmp_path)[0] == os.EX_TEMPFAIL
    begun = (unfinished / FILES[0]).read_bytes()
    assert len(begun) == 128 + 2 * 1500 * 28 * 28 and not (tmp_path / "big").exists()
    os.truncate(unfinished / FILES[0], len(begun) * 3 // 4)
    run(BIG, *words, cwd=tmp_path)
    assert not unfinished.exists()
    train, labels, test, test_labels = (np.load(tmp_path / "big" / name) for name in FILES)
    assert train[:3000].tobytes() == begun[128:]
    assert train.shape == (9_000, 28, 28) and train.dtype == labels.dtype == np.uint8
    assert (labels.reshape(6, 1500) == labels[:1500]).all()
    copies = train.reshape(3, 2, 1500, 28, 28)
    assert (copies == copies[0]).all()
    first, second = copies[0].astype(int)
    assert (first != second).any((1, 2)).all() and len(np.unique(first, axis=0)) == 1500
    for version in (first, second):  # zeros come in at the edges
        assert version[:, 0].min() == 0 and version.mean() < test.mean()
    assert test.shape == (10_000, 28, 28) and sorted(set(test_labels)) == list(range(10))


def test_images_of_mnist(data, run, tmp_path):
    words = ("--dataset", "mnist", "--data_dir", data, "--num_images", 50, "--versions", 1)
    run(BIG, *words, "--copies", 2, "--out", tmp_path / "big")
    train, labels, test, _ = (np.load(tmp_path / "big" / name) for name in FILES)
    content = np.fromfile(data / "MNIST/raw/train-labels-idx1-ubyte", "u1")[8:]
    assert len(train) == 100 and len(test) == 401 and (labels[50:] == content[:50]).all()


def test_augmentation_is_torchvisions(monkeypatch):
    """A turn with shear and scale; a flip; a shift; a bend: those of v2, up to rounding."""
    make, generator = module(BIG), np.random.default_rng(0)
    image, noise = generator.integers(0, 256, (28, 28), np.uint8), np.zeros((4, 2, 28, 28))
    noise[3] = generator.uniform(-1, 1, (2, 28, 28))
    # A row for each: angle, shear, scale, flip if negative, shifts. A column for each image.
    strengths = [[1, 0, 0, 0], [-0.5, 0, 0, 0], [1, 0, 0, 0], [1, -1, 1, 1]] + 2 * [[0, 0, 1, 0]]
    draws = iter((np.array(strengths), noise))
    drawing = namespace(uniform=lambda low, high, shape: next(draws))
    monkeypatch.setattr(make.np.random, "default_rng", lambda seed: drawing)
    found = make.augment(np.repeat(image[None], 4, 0), 0, torch.device("cpu"))
    tensor, bilinear = torch.from_numpy(image)[None], v2.InterpolationMode.BILINEAR
    bend = v2.gaussian_blur(torch.from_numpy(noise[3]), [41, 41], [5.0, 5.0]) * 50 / 28
    expected = [
        v2.affine(tensor, 15.0, [0.0, 0.0], 1.1, [-5.0, 0.0], interpolation=bilinear),
        v2.hflip(tensor),
        v2.affine(tensor, 0.0, [-2.0, -2.0], 1.0, [0.0, 0.0], interpolation=bilinear),
        v2.elastic(tensor, bend.permute(1, 2, 0)[None].float()),
    ]
    for number, (one, [other]) in enumerate(zip(found.astype(int), expected)):
        assert abs(one - other.numpy()).max() <= 1, number
        assert (one != image).mean() > 0.3, number


# == images.py ==
def write(folder, shape, counts, num_classes=4, seed=0):
    """Write random images and labels of both splits; labels have another byte order."""
    folder.mkdir()
    generator = np.random.default_rng(seed)
    for split, count in zip(("train", "test"), counts):
        pixels = generator.integers(0, 255, (count, *shape), np.uint8)
        np.save(folder / f"{split}_images.npy", pixels)
        np.save(folder / f"{split}_labels.npy", (np.arange(count) % num_classes).astype(">u2"))
    return folder


def some(num_images, *shape):
    return images.Images(torch.zeros(num_images, *shape, dtype=torch.uint8), torch.arange(4))


@pytest.mark.parametrize("model", "mlp cnn vgg11 resnet18 alexnet vit_b_32".split())
def test_models_take_images_of_any_size(model):
    """They take the channels, height and width of the data, and have as many classes.

    Small images are enlarged for networks that want more pixels, as AlexNet and transformers do.
    """
    for shape in ((1, 28, 28), (2, 20, 36)):
        args, data = namespace(model=model, pretrained=False), some(4, *shape)
        with torch.device("meta"):  # shapes without numbers
            network = images.create_model(args, data).eval()
            assert network(torch.zeros(1, *shape)).shape == (1, 4)


def test_networks_and_folders_that_do_not_fit_are_named(tmp_path):
    for model, message in {
        "squeezenet1_0": "its last layer is not linear",
        "inception_v3": "or it has several outputs",
        "cnn": "there are no pretrained weights of cnn",
    }.items():
        with pytest.raises(SystemExit, match=message):
            args = namespace(model=model, pretrained=model == "cnn")
            images.create_model(args, some(4, 3, 32, 32))
    for name, wrong in {
        "train_images": np.zeros((9, 3, 8, 8), np.float32),
        "test_images": np.zeros((9, 8), np.uint8),
        "train_labels": np.zeros(8, np.int64),
        "test_labels": np.full(9, 4),  # a class that train has not
    }.items():
        np.save(write(tmp_path / name, (3, 8, 8), (9, 9)) / f"{name}.npy", wrong)
        with pytest.raises(SystemExit, match=f"{tmp_path}/{name}"):
            images.read_data(namespace(dataset=str(tmp_path / name), data_dir=""))


def test_validation_is_of_what_is_saved(logged, tmp_path):
    """With BatchNorm, too, whose statistics differ between the processes while they train."""
    folder = write(tmp_path / "small", (16, 16), (48, 20))  # without channels
    words = ("--dataset", folder, "--model", "resnet18", "--batch_size", 24, "--epochs", 1)
    words = (*words, "--snapshot", snapshot := tmp_path / "s.pt")
    log = logged("multigpu/images.py", *words, processes=3)
    args = namespace(model="resnet18", dataset=str(folder), data_dir="data", pretrained=False)
    _, val_data = images.read_data(args)
    model = images.create_model(args, val_data)
    model.load_state_dict(load(snapshot)["model"])
    loss, _ = images.batch_loss(model.eval(), val_data.__getitems__(np.arange(20)), args)
    assert rows(log)[-1]["val_loss"] == pytest.approx(loss.item(), rel=1e-4)


def test_other_data_and_weights_to_start_from(refused, run, tmp_path):
    """Changed data is no resume. --init_from takes the weights that fit, and names the others."""
    old, new = tmp_path / "old.pt", tmp_path / "new.pt"
    words = ["--dataset", tmp_path / "data", "--model", "mlp", "--batch_size", 12, "--max_steps"]
    write(tmp_path / "data", (8, 8), (48, 12))
    run("singlegpu/images.py", *words, 2, "--snapshot", old)
    shutil.rmtree(tmp_path / "data")
    write(tmp_path / "data", (8, 8), (48, 12), num_classes=5, seed=1)
    told = f"the training data is not that of {old}. --init_from {old} starts anew"
    refused(told, "multigpu/images.py", *words, 3, "--snapshot", old, processes=2)
    snapshot = load(old)
    snapshot["model"]["7.weight"] = torch.ones(1)
    torch.save(snapshot, old)
    more = ("--init_from", old, "--snapshot", new, "--learning_rate", 0)
    out = run("multinode/images.py", *words, 1, *more, processes=2)
    assert f"3 weights do not match {old}: 6.bias, 6.weight, 7.weight\n" in out
    assert f"{old} is of another seed or data: " in out
    before, after = load(old)["model"], load(new)["model"]
    changed = [name for name in after if not torch.equal(before[name], after[name])]
    assert changed == ["6.weight", "6.bias"]
    out = run("multinode/images.py", *words, 2, *more, processes=2)
    assert "do not match" not in out, "a snapshot counts more"
    out = run("multinode/images.py", *words, 1, "--init_from", new, processes=2)
    assert f"of {new}: " not in out and f"{new} is of" not in out, "all fits"
    words[3] = "cnn"
    told = f"{old} has no weights of this model"
    refused(told, "singlegpu/images.py", *words, 1, "--init_from", old)


def test_a_file_larger_than_memory_is_mapped(tmp_path):
    """Twice as large, and sparse: it takes no space on the disk."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    count = 2 * memory // (3 << 20)
    for split in ("train", "test"):
        path = tmp_path / f"{split}_images.npy"
        np.lib.format.open_memmap(path, "w+", np.uint8, (count, 3, 1024, 1024))
        np.save(tmp_path / f"{split}_labels.npy", np.zeros(count, np.uint8))
    args = namespace(dataset=str(tmp_path), data_dir="")
    pixels, _ = images.read_data(args)[0].__getitems__([0, count - 1])
    assert pixels.shape == (2, 3, 1024, 1024) and not pixels.any()


def test_each_index_once_in_blocks():
    """Each index once; blocks of 2 MiB in random order, shuffled within pools; epochs differ."""
    count, size = 65_005, 13  # images of 3 x 224 x 224 in a block
    pixels = torch.zeros(1, dtype=torch.uint8).expand(count, 3, 224, 224)
    data = images.Images(pixels, torch.zeros(1).expand(count))
    orders = [images.training_order(data, namespace(), epoch) for epoch in (0, 1)]
    assert (orders[0] != orders[1]).mean() > 0.9
    for order in orders:
        assert np.array_equal(np.sort(order), np.arange(count))
        assert (abs(np.diff(order)) > size).mean() > 0.9, "shuffled within pools"
        for start in range(0, count - 200 * size, 500):
            blocks = np.unique(order[start : start + 200 * size] // size)
            assert len(blocks) <= 3 * 200, "a block is read within a short time"
            assert np.ptp(blocks) > 4000, "blocks come in random order"
