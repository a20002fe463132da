"""images.py, and the scripts that make data for it: make_images.py and make_bigmnist.py."""

import filecmp
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


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of three class folders of 30 photographs, one of them broken, each of its color."""
    folder = tmp_path_factory.mktemp("photos")
    for name, color in COLORS.items():
        (folder / name).mkdir()
        for number in range(30):
            image = Image.new("RGB", (60 + number, 50), color)
            image.save(folder / name / f"{number}.{'png' if number % 5 else 'jpg'}")
    os.truncate(folder / "red/7.png", 50)
    return folder


@pytest.fixture(scope="module")
def made(run, photos, tmp_path_factory):
    """What make_images.py makes of the photographs."""
    out = tmp_path_factory.mktemp("data") / "photos"
    assert "1 broken ones left out" in run(MAKE, photos, "--size", 32, "--out", out)
    return out


def arrays(out, split):
    return [np.load(out / f"{split}_{name}.npy") for name in ("images", "labels")]


def test_each_photograph_once_with_its_class(made):
    """A tenth of each class is for testing."""
    assert (made / "classes.txt").read_text().split() == sorted(COLORS)
    assert sorted(os.listdir(made)) == sorted([*FILES, "classes.txt"])
    (train, labels), (test, test_labels) = arrays(made, "train"), arrays(made, "test")
    assert len(train) + len(test) == 89 and len(test) in (8, 9)
    assert np.bincount(labels).min() >= 26 and np.bincount(test_labels).min() >= 2
    for pixels, numbers in (train, labels), (test, test_labels):
        assert pixels.shape == (len(numbers), 3, 32, 32)
        colors = np.array([COLORS[name] for name in sorted(COLORS)])[numbers]
        assert np.abs(pixels.mean((2, 3)) - colors).max() < 8
    assert (np.diff(labels) != 0).mean() > 0.4, "shuffled"


def test_images_py_trains_on_it(made, photos, run, tmp_path):
    """On data/photos, though there are photos, too; it learns which class has which color."""
    (tmp_path / "photos").symlink_to(photos)
    (tmp_path / "data").symlink_to(made.parent)
    words = ("--dataset", "photos", "--model", "mlp", "--batch_size", 20, "--epochs", 5)
    run("singlegpu/images.py", *words, "--log", tmp_path / "log.jsonl", cwd=tmp_path)
    assert curve(tmp_path / "log.jsonl", "val_acc")[-1, 2] == 1


def decode(path, size, grey=False):
    """The picture in a file, as make_images.py writes it."""
    rows = [{"image": {"path": str(path), "bytes": None}}]
    return make.decode(rows, 0, namespace(size=size, grey=grey))


def test_the_middle_square_is_kept(tmp_path):
    """Of a picture of 90 x 30, whose sides are black, and one of 30 x 90."""
    pixels = np.zeros((30, 90), np.uint8)
    pixels[:10, 30:60], pixels[20:, 30:60] = 100, 200
    for turned in (pixels, pixels.T):
        Image.fromarray(turned).save(tmp_path / "0.png")
        [found] = decode(tmp_path / "0.png", 12, grey=True)
        found = found if turned is pixels else found.T
        assert (found[:2, 2:-2] == 100).all() and (found[-2:, 2:-2] == 200).all()


@pytest.mark.parametrize("suffix,dtype", [("png", "<u2"), ("tif", ">u2")])
def test_pictures_of_16_bits_are_scaled(tmp_path, suffix, dtype):
    path = tmp_path / f"0.{suffix}"
    Image.fromarray(np.full((8, 8), 40_000, dtype)).save(path)
    assert (decode(path, 8, grey=True) == 40_000 // 256).all()
    with pytest.raises(ValueError, match="has more than 8 bits a channel. make_images.py scales"):
        images.read_photo(path)


TRANSPARENT = {"RGBA": (9, 9, 9, 0), "LA": (9, 0), "P": 0}


def test_photographs(tmp_path, monkeypatch):
    """Both scripts read them upright, and on white where they are transparent.

    images.py cuts them to --image_size. There, a worker for each thread loads them.
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


def level(label):
    """The brightness of an image tells its label."""
    return {"cat": 50, "dog": 200, 0: 50, 1: 200}.get(label, 120)


def write_split(folder, split, labels, names=("cat", "dog")):
    """Write a .parquet file of images with these labels, numbers of classes or words."""
    folder.mkdir(exist_ok=True)
    kind = datasets.ClassLabel(names=[*names]) if names else datasets.Value("string")
    pictures = [Image.new("L", (8, 8), level(label)) for label in labels]
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


def refuse(message, source, out):
    """It ends with this message before it has written an image."""
    with pytest.raises(SystemExit, match=re.escape(message)):
        make.main(namespace(source=str(source), size=8, grey=False, out=str(out)))
    assert not out.exists()


def test_images_without_label_are_left_out(run, refused, tmp_path):
    """They are counted. A class may be named NA. Validation takes the place of a secret test."""
    labels = np.random.default_rng(0).integers(0, 2, 300).tolist()
    labels[::30] = [-1, None] * 5
    source = write_split(tmp_path / "some", "train", labels)
    write_split(source, "test", [-1] * 10)
    refuse("test has no labels", source, out := tmp_path / "out")
    write_split(source, "validation", [0, 1] * 5)
    told = run(MAKE, source, "--size", 8, "--out", out)
    assert "10 of 300 rows of train have no label" in told
    assert "10 of 10 rows of test have no label" in told
    for split, count in ("train", 290), ("test", 10):
        pixels, labels = arrays(out, split)
        assert pixels.shape == (count, 3, 8, 8)
        assert (pixels[:, 0, 0, 0] == np.where(labels == 1, 200, 50)).all()
    refused("is there already", MAKE, source, "--out", out)
    refused("is the source itself", MAKE, source, "--out", f"{source}/")
    words = ["cat", "NA", "null", " ", "", None] * 5
    source = write_split(tmp_path / "words", "train", words, names=None)
    run(MAKE, source, "--size", 8, "--grey", "--out", out := tmp_path / "grey")
    assert (out / "classes.txt").read_text() == "NA\ncat\nnull\n"
    assert arrays(out, "train")[0].shape == (12, 1, 8, 8) and len(arrays(out, "test")[1]) == 3


SPLITS = {  # the message, and {split: labels}
    "test has classes that train has not: ['cat']": {"train": [0, 2, 0], "test": [0, 1]},
    "all labels of train are the same, bird": {"train": [0] * 9},
    "no split train": {"test": [0, 1] * 9},
}


def test_splits_that_do_not_serve(tmp_path):
    names = ["bird", "cat", "dog"]
    for number, (message, splits) in enumerate(SPLITS.items()):
        for split, labels in splits.items():
            write_split(tmp_path / str(number), split, labels, names)
        refuse(message, tmp_path / str(number), tmp_path / "out")
    source = write_split(tmp_path / "apart", "train", [0, 1] * 9)
    write_split(source, "test", [1, 2], names)
    refuse("differ in classes: ['bird']", source, tmp_path / "out")


def test_pictures_that_have_no_range_are_refused(tmp_path):
    """Floats, and whatever becomes (nearly) one level of 256."""
    source = write_folders(tmp_path / "float", (0.1, 0.9), dtype="f4", suffix="tif")
    refuse("none of the first 4 images", source, tmp_path / "out")
    source = write_folders(tmp_path / "12 bits", (900, 4000), dtype="<u2")
    refuse("between 3 and 15", source, tmp_path / "out2")


def test_folders_of_splits(run, tmp_path):
    """Train numbers the classes, and those that differ are named. A split is no class."""
    photos = tmp_path / "photos"
    write_folders(photos / "train", (50, 120, 200))
    write_folders(photos / "valid")
    (photos / "valid/class1").rename(photos / "valid/class2")
    (photos / "test").mkdir()  # as in a contest, whose labels are secret
    told = run(MAKE, photos, "--size", 8, "--out", out := tmp_path / "out")
    assert "test has no folders of images: left out" in told
    assert "valid has no image of ['class1']" in told
    pixels, labels = arrays(out, "test")
    assert (pixels[:, 0, 0, 0] == np.where(labels == 2, 200, 50)).all() and len(labels) == 40
    assert len(arrays(out, "train")[1]) == 60
    (photos / "valid/class2").rename(photos / "valid/kiwi")
    refuse("valid has classes that train has not: ['kiwi']", photos, tmp_path / "no")
    (photos / "test").rmdir()
    (photos / "train").rename(photos / "Train")
    (photos / "valid").rename(photos / "Val")
    refuse("in small letters", photos, tmp_path / "no")


def test_files_of_another_source_are_not_gone_on_with(run, tmp_path):
    """An earlier run's files are gone on with only if its labels are those of the source."""
    source = write_folders(tmp_path / "photos")
    whole, out, unfinished = (tmp_path / name for name in ("whole", "out", "out.8rgb.tmp"))
    run(MAKE, source, "--size", 8, "--out", whole)
    pixels, labels = arrays(whole, "train")
    unfinished.mkdir()
    shutil.copy(whole / "train_images.npy", unfinished)
    (1 - labels).tofile(unfinished / "train_labels.tmp")
    refuse("remove their folder", source, out)
    labels.tofile(unfinished / "train_labels.tmp")
    os.truncate(unfinished / "train_images.npy", 1000)  # fewer images than labels
    refuse("remove their folder", source, out)
    shutil.copy(whole / "train_images.npy", unfinished)
    (unfinished / "train_labels.tmp").write_bytes(labels[:9].tobytes() + b"torn")
    run(MAKE, source, "--size", 8, "--out", out)
    for found, expected in zip(arrays(out, "train"), (pixels, labels)):
        assert np.array_equal(found, expected)


KILL = "os.kill(os.getpid(), signal.SIGUSR2)"


def test_make_images_stopped_and_started_again(attempt, changed, tmp_path):
    """Stopped after each block, 256 images: status 75 says that it has written, and can go on."""
    source, out = write_split(tmp_path / "source", "train", [0, 1] * 200), tmp_path / "out"
    line = "bar.update(len(decoded))"
    words = (changed(MAKE, {line: f"{line}\n            {KILL}"}), source, "--size", 8)
    statuses = [attempt(*words, "--out", out)[0] for _ in range(4)]
    assert statuses == [os.EX_TEMPFAIL] * 3 + [0], "one block of test, two of train"
    pixels, labels = arrays(out, "train")
    assert len(labels) == 360 and (pixels[:, 0, 0, 0] == np.where(labels == 1, 200, 50)).all()


# == make_bigmnist.py ==
SMALL = "--dataset synthetic --versions 2 --copies 15 --num_images 2500".split()


@pytest.fixture(scope="module")
def big(run, tmp_path_factory):
    """A folder of 75,000 images."""
    folder = tmp_path_factory.mktemp("data") / "bigmnist"
    run(BIG, *SMALL, "--out", folder)
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
    strengths = np.array(
        [[1, 0, 0, 0], [-0.5, 0, 0, 0], [1, 0, 0, 0], [1, -1, 1, 1]] + 2 * [[0, 0, 1, 0]]
    )
    draws = iter((strengths, noise))
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


def test_make_bigmnist_stopped_and_started_again(big, attempt, changed, run, tmp_path):
    """Status 75 says: run me again. The same command ends with the same bytes."""
    comment, out = "# 75: run me again", tmp_path / "bigmnist"
    script = changed(
        BIG, {comment: f"{comment}\n            if number == 1:\n                {KILL}"}
    )
    assert attempt(script, *SMALL, "--out", out)[0] == os.EX_TEMPFAIL and not out.exists()
    unfinished = tmp_path / "bigmnist.synthetic2500x2x15.tmp" / FILES[0]
    os.truncate(unfinished, 2500 * 28 * 28 * 3 // 2)
    run(BIG, *SMALL, "--out", f"{out}/")
    assert filecmp.cmpfiles(big, out, FILES, shallow=False)[0] == FILES
    assert not unfinished.parent.exists()


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


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("squeezenet1_0", "its last layer is not linear"),
        ("inception_v3", "or it has several outputs"),
        ("cnn", "there are no pretrained weights of cnn"),
    ],
)
def test_networks_that_do_not_fit_are_named(model, message):
    with pytest.raises(SystemExit, match=message):
        images.create_model(namespace(model=model, pretrained=model == "cnn"), some(4, 3, 32, 32))


WRONG = {  # name: the number of a file, and what stands there instead of the file
    "float": (0, np.zeros((9, 3, 8, 8), np.float32)),
    "count": (1, np.zeros(8, np.int64)),
    "dimensions": (0, np.zeros((9, 8), np.uint8)),
    "class": (3, np.full(9, 4)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_folder_that_does_not_fit_is_refused(tmp_path, name):
    number, array = WRONG[name]
    np.save(write(tmp_path / name, (3, 8, 8), (9, 9)) / FILES[number], array)
    with pytest.raises(SystemExit, match=str(tmp_path / name)):
        images.read_data(namespace(dataset=str(tmp_path / name), data_dir=""))


def test_validation_is_of_what_is_saved(run, tmp_path):
    """With BatchNorm, too, whose statistics differ between the processes while they train."""
    folder = write(tmp_path / "small", (16, 16), (48, 20))  # without channels
    log, snapshot = tmp_path / "log.jsonl", tmp_path / "s.pt"
    words = ("--dataset", folder, "--model", "resnet18", "--batch_size", 24, "--epochs", 1)
    run("multigpu/images.py", *words, "--snapshot", snapshot, "--log", log, processes=3)
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
    more = ("--init_from", old, "--snapshot", new, "--learning_rate", 0)
    out = run("multinode/images.py", *words, 1, *more, processes=2)
    assert f"not in {old}, or in another shape: 6.bias, 6.weight\n" in out
    before, after = load(old)["model"], load(new)["model"]
    changed = [name for name in after if not torch.equal(before[name], after[name])]
    assert changed == ["6.weight", "6.bias"]
    out = run("multinode/images.py", *words, 2, *more, processes=2)
    assert "another shape" not in out, "a snapshot counts more"
    words[3] = "cnn"
    told = f"{old} has no weights of this model"
    refused(told, "singlegpu/images.py", *words, 1, "--init_from", old)


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
