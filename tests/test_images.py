"""make_images.py, and images.py on folders of its kind."""

import os
import shutil

import numpy as np
import pytest
import torch
from conftest import curve, load, rows
from PIL import Image
from test_models import module, namespace
from torchvision import models

images = module("singlegpu/images.py")
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
    """Each photograph is there once, with its class; a tenth of each class is for testing."""
    assert (made / "classes.txt").read_text().split() == sorted(COLORS)
    assert sorted(os.listdir(made)) == sorted(FILES)
    pixels, labels = ([np.load(made / FILES[n]) for n in numbers] for numbers in ((0, 2), (1, 3)))
    assert sum(map(len, pixels)) == 89 and len(pixels[1]) in (8, 9)
    for split in (0, 1):
        assert pixels[split].shape == (len(labels[split]), 3, 32, 32)
        colors = np.array([COLORS[name] for name in sorted(COLORS)])[labels[split]]
        assert np.abs(pixels[split].mean((2, 3)) - colors).max() < 8
    assert (np.diff(labels[0]) != 0).mean() > 0.4, "shuffled"
    assert np.bincount(labels[0]).min() >= 26 and np.bincount(labels[1]).min() >= 2


def test_the_middle_square_is_kept(tmp_path):
    """Of a picture of 90 x 30, whose sides are black, and one of 30 x 90."""
    pixels = np.zeros((30, 90), np.uint8)
    pixels[:10, 30:60], pixels[20:, 30:60] = 100, 200
    for turned in (pixels, pixels.T):
        Image.fromarray(turned).save(tmp_path / "0.png")
        rows = [{"image": {"path": tmp_path / "0.png", "bytes": None}}]
        [made] = module(SCRIPT).decode(rows, 0, namespace(size=12, grey=True))
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


def test_pretrained_weights(monkeypatch, tmp_path):
    """--pretrained: torchvision's but for the last layer; a grey image becomes three channels."""
    weights = models.ResNet18_Weights.DEFAULT.url.split("/")[-1]
    pretrained = models.resnet18().state_dict()
    pretrained["conv1.weight"].fill_(7.0)  # no new network has such weights
    (tmp_path / "hub/checkpoints").mkdir(parents=True)
    torch.save(pretrained, tmp_path / "hub/checkpoints" / weights)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    args = namespace(model="resnet18", pretrained=True)
    model = images.create_model(args, some(4, 1, 40, 40))
    assert (model[-1].conv1.weight == 7).all() and model[-1].fc.out_features == 4
    grey = torch.rand(2, 1, 40, 40)
    assert torch.equal(model[0](grey), grey.expand(2, 3, 40, 40))


@pytest.mark.parametrize(
    ("model", "pretrained", "message"),
    [
        ("squeezenet1_0", False, "its last layer is not linear"),
        ("inception_v3", False, "or it has several outputs"),
        ("cnn", True, "there are no pretrained weights of cnn"),
        ("resnet0", False, "Unknown model resnet0"),
    ],
)
def test_networks_that_do_not_fit_are_named(model, pretrained, message):
    with pytest.raises((SystemExit, ValueError), match=message):
        images.create_model(namespace(model=model, pretrained=pretrained), some(4, 3, 32, 32))


WRONG = {  # name: the number of a file, and what stands there instead of the file
    "float": (0, np.zeros((9, 3, 8, 8), np.float32)),
    "count": (1, np.zeros(8, np.int64)),
    "dimensions": (0, np.zeros((9, 8), np.uint8)),
    "class": (3, np.full(9, 4)),
}


def test_a_folder_that_does_not_fit_is_refused(tmp_path):
    """One line says what is wrong with it."""
    for name, (number, array) in WRONG.items():
        np.save(write(tmp_path / name, (3, 8, 8), (9, 9)) / FILES[number], array)
        with pytest.raises(SystemExit, match=str(tmp_path / name)):
            images.read_data(namespace(dataset=str(tmp_path / name), data_dir=""))


def test_validation_is_of_what_is_saved(run, tmp_path):
    """With BatchNorm, too, whose statistics differ between the processes while they train."""
    folder = write(tmp_path / "small", (16, 16), (48, 20))  # without channels
    log, snapshot = tmp_path / "log.jsonl", tmp_path / "s.pt"
    words = ("--dataset", folder, "--model", "resnet18", "--batch_size", 24, "--epochs", 2)
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
    for num_classes in (4, 5):  # other pixels; another head, too
        shutil.rmtree(tmp_path / "data")
        write(tmp_path / "data", (8, 8), (48, 12), num_classes, seed=1)
        told = f"the training data is not that of {old}. --init_from {old} starts anew"
        refused(told, "multigpu/images.py", *words, 3, "--snapshot", old, processes=2)
    more = ("--init_from", old, "--snapshot", new, "--learning_rate", 0)
    out = run("multinode/images.py", *words, 1, *more, processes=2)
    assert f"not in {old}, or in another shape: 6.bias, 6.weight\n" in out
    before, after = load(old)["model"], load(new)["model"]
    assert [name for name in after if not torch.equal(before[name], after[name])] == [
        "6.weight",
        "6.bias",
    ]
    out = run("multinode/images.py", *words, 2, *more, processes=2)
    assert "another shape" not in out, "a snapshot counts more"
    words[3] = "cnn"
    told = f"{old} has no weights of this model"
    refused(told, "singlegpu/images.py", *words, 1, "--init_from", old)
