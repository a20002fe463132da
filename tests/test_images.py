"""make_images.py, and images.py on folders of its kind."""

import filecmp
import os
import shutil
import signal

import datasets
import numpy as np
import pytest
import torch
from conftest import curve, rows, wait_for
from PIL import Image
from test_models import module, namespace

SCRIPT = "singlegpu/make_images.py"
FILES = [f"{split}_{what}.npy" for split in ("train", "test") for what in ("images", "labels")]
FILES.append("classes.txt")
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
    printed = run(SCRIPT, photos, "--size", 32, "--out", out)
    assert "1 broken ones left out" in printed
    return out


def test_each_photograph_once_with_its_class(made):
    """Each photograph is there once, with its class; a tenth is for testing."""
    assert (made / "classes.txt").read_text().split() == sorted(COLORS)
    assert sorted(os.listdir(made)) == sorted(FILES)
    images, labels = ([np.load(made / FILES[n]) for n in numbers] for numbers in ((0, 2), (1, 3)))
    assert sum(map(len, images)) == 89 and len(images[1]) in (8, 9)
    for split in (0, 1):
        assert images[split].shape == (len(labels[split]), 3, 32, 32)
        colors = np.array([COLORS[name] for name in sorted(COLORS)])[labels[split]]
        assert np.abs(images[split].mean((2, 3)) - colors).max() < 8
    assert (np.diff(labels[0]) != 0).mean() > 0.4, "shuffled"


def test_the_middle_square_is_kept(tmp_path):
    """Of a picture of 90 x 30, whose sides are black, and one of 30 x 90."""
    pixels = np.zeros((30, 90), np.uint8)
    pixels[:10, 30:60], pixels[20:, 30:60] = 100, 200
    for turned in (pixels, pixels.T):
        Image.fromarray(turned).save(tmp_path / "0.png")
        images = [{"image": {"path": tmp_path / "0.png", "bytes": None}}]
        [made] = module(SCRIPT).decode(images, 0, namespace(size=12, grey=True))
        made = made if turned is pixels else made.T
        assert (made[:2, 2:-2] == 100).all() and (made[-2:, 2:-2] == 200).all()


def test_images_py_trains_on_it(made, photos, run, tmp_path):
    """On data/photos, though there are photos, too; it learns which class has which color."""
    (tmp_path / "photos").symlink_to(photos)
    (tmp_path / "data").symlink_to(made.parent)
    words = ("--dataset", "photos", "--model", "mlp", "--batch_size", 20, "--epochs", 5)
    log = tmp_path / "log.jsonl"
    run("singlegpu/images.py", *words, "--log", log, cwd=tmp_path)
    assert curve(log, "val_acc")[-1, 2] == 1


def test_stopped_and_started_again(made, photos, fork, run, tmp_path):
    """The same command ends with the same bytes, wherever it was killed."""
    out, unfinished = tmp_path / "photos", tmp_path / "photos.32rgb.tmp"
    words = (SCRIPT, photos, "--size", 32, "--out", f"{out}/")
    job = fork(*words)
    wait_for(lambda: (unfinished / FILES[0]).exists() or job.process.poll() is not None)
    job.process.send_signal(signal.SIGKILL)
    job.wait()
    if not out.exists():
        images, labels = (np.load(made / name) for name in FILES[:2])
        shutil.copy(made / FILES[0], unfinished)  # with images that have no labels yet
        labels[:50].tofile(unfinished / "train_labels.tmp")
        run(*words)
    assert filecmp.cmpfiles(made, out, FILES, shallow=False)[0] == FILES
    assert os.listdir(tmp_path) == ["photos"]


def test_a_source_of_the_hub(photos, run, refused, tmp_path):
    """Columns image and label, as .parquet files; grey images; splits as they are."""
    kinds = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=sorted(COLORS))}
    )
    for split, number in (("train", "5"), ("test", "10")):
        paths = [str(photos / name / f"{number}.jpg") for name in sorted(COLORS)] * 2
        columns = {"image": paths, "label": sorted(COLORS) * 2}
        (tmp_path / "source").mkdir(exist_ok=True)
        table = datasets.Dataset.from_dict(columns, features=kinds)
        table.to_parquet(tmp_path / f"source/{split}.parquet")
    out = tmp_path / "out"
    run(SCRIPT, tmp_path / "source", "--size", 20, "--grey", "--out", out)
    assert np.load(out / FILES[0]).shape == (6, 1, 20, 20)
    assert sorted(np.load(out / FILES[3])) == [0, 0, 1, 1, 2, 2]
    refused("is there already", SCRIPT, tmp_path / "source", "--out", out)
    refused("cannot read", SCRIPT, tmp_path / "nowhere/no")
    refused("is the source itself", SCRIPT, photos, "--out", f"{photos}/")


def test_a_test_split_without_labels_is_left_out(made, photos, run, tmp_path):
    """As in a contest: then a tenth of train is for testing."""
    shutil.copytree(photos, tmp_path / "contest/train")
    (tmp_path / "contest/test").mkdir()
    (tmp_path / "contest/test/1.png").write_bytes(b"of a secret class")
    words = (tmp_path / "contest", "--size", 32, "--out", tmp_path / "out")
    assert "test has no folders of images: left out" in run(SCRIPT, *words)
    assert filecmp.cmpfiles(made, tmp_path / "out", FILES, shallow=False)[0] == FILES


def write(folder, shape, counts, num_classes=4, dtype=np.uint8):
    """Write random images and labels of both splits; labels may be of any whole type."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    for split, count in zip(("train", "test"), counts):
        np.save(folder / f"{split}_images.npy", generator.integers(0, 255, (count, *shape), dtype))
        np.save(folder / f"{split}_labels.npy", (np.arange(count) % num_classes).astype(np.uint16))
    return folder


@pytest.mark.parametrize("model", ["mlp", "cnn", "vgg11", "resnet18"])
def test_models_take_images_of_any_size(model, run, tmp_path):
    """Models take the channels, the height and the width of the data, and as many classes."""
    write(tmp_path / "wide", (2, 20, 36), (48, 10))
    words = ("--dataset", "wide", "--data_dir", tmp_path, "--model", model, "--batch_size", 24)
    for script in ("singlegpu", "hybrid"):
        log = tmp_path / f"{script}.jsonl"
        run(f"{script}/images.py", *words, "--max_steps", 1, "--log", log)
        np.testing.assert_allclose(curve(log)[:, 0], curve(tmp_path / "singlegpu.jsonl")[:, 0], 0.2)


WRONG = {  # name: the number of a file, and what stands there instead of the file
    "binary": (0, np.ones((9, 3, 8, 8), np.uint8)),
    "words": (1, np.array(["cat"] * 9)),
    "many": (1, np.array([10**12] * 9)),
    "float": (0, np.zeros((9, 3, 8, 8), np.float32)),
    "count": (1, np.zeros(8, np.int64)),
    "shape": (2, np.zeros((9, 3, 9, 8), np.uint8)),
    "class": (3, np.full(9, 4)),
}


def test_a_folder_that_does_not_fit_is_refused(refused, tmp_path):
    """One line says what is wrong with it."""
    (tmp_path / "empty").mkdir()
    write(tmp_path / "flat", (8,), (9, 9))
    write(tmp_path / "one", (3, 8, 8), (9, 9), num_classes=1)
    os.truncate(write(tmp_path / "short", (3, 8, 8), (9, 9)) / FILES[0], 1000)
    for name, (number, array) in WRONG.items():
        np.save(write(tmp_path / name, (3, 8, 8), (9, 9)) / FILES[number], array)
    for folder in tmp_path.iterdir():
        words = ("--dataset", folder, "--batch_size", 3, "--model", "mlp")
        refused(str(folder), "singlegpu/images.py", *words)


def test_validation_is_of_what_is_saved(run, tmp_path):
    """With BatchNorm, too, whose statistics differ between the processes while they train."""
    folder = write(tmp_path / "small", (16, 16), (48, 20))  # without channels
    log, snapshot = tmp_path / "log.jsonl", tmp_path / "s.pt"
    words = ("--dataset", folder, "--model", "resnet18", "--batch_size", 24, "--epochs", 2)
    more = ("--snapshot", snapshot, "--log", log)
    run("multigpu/images.py", *words, *more, processes=3)
    images = module("singlegpu/images.py")
    args = namespace(model="resnet18", dataset=str(folder), data_dir="data", pretrained=False)
    _, val_data = images.read_data(args)
    model = images.create_model(args, val_data)
    model.load_state_dict(torch.load(snapshot, weights_only=True)["model"])
    model.eval()
    loss, _ = images.batch_loss(model, val_data.__getitems__(np.arange(20)), args)
    assert rows(log)[-1]["val_loss"] == pytest.approx(loss.item(), rel=1e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model squeezenet1_0", "its last layer is not linear"),
        ("--model inception_v3", "or it has several outputs"),
        ("--model cnn --pretrained", "there are no weights for cnn"),
        ("--model resnet0", "--model resnet0: "),
    ],
)
def test_networks_that_do_not_fit_are_named(refused, words, message):
    refused(message, "multigpu/images.py", *words.split(), processes=1)
