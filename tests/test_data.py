"""Data as it comes: what is wrong with it is said, and what is right is not spoiled."""

import io
import json
import os
import re
import shutil
import signal
import subprocess

import datasets
import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, wait_for
from PIL import Image
from test_examples import network  # noqa: F401 - a fixture
from test_models import module, namespace
from tokenizers import Tokenizer

SCRIPT = "singlegpu/make_images.py"
CLASSES = datasets.ClassLabel(names=["cat", "dog"])


def picture(level, size=8):
    file = io.BytesIO()
    Image.new("RGB", (size, size), (level, level, level)).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def level(label):
    """The brightness of an image tells its label."""
    return {"cat": 50, "dog": 200, 0: 50, 1: 200}.get(label, 120)


def write_split(folder, split, labels, kind=CLASSES):
    """Write a .parquet file of images with these labels."""
    folder.mkdir(exist_ok=True)
    features = datasets.Features({"image": datasets.Image(), "label": kind})
    columns = {"image": [picture(level(label)) for label in labels], "label": labels}
    table = datasets.Dataset.from_dict(columns, features=features)
    table.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return folder


def arrays(out, split):
    return [np.load(out / f"{split}_{name}.npy") for name in ("images", "labels")]


def make(run, source, out, *more):
    """What the script prints, with its errors: only warnings of libraries go to stderr."""
    return run(SCRIPT, source, "--size", 8, "--out", out, *more)


@pytest.fixture
def refuse(refused, tmp_path):
    """refuse(message, source): the script ends with it before it has written an image."""

    def refuse(message, source, out=tmp_path / "no"):
        refused(message, SCRIPT, source, "--size", 8, "--out", out)
        assert not out.exists()

    return refuse


def test_images_without_label_are_left_out(run, tmp_path):
    """Each label fits its image; what is left out is counted. A class may be named NA."""
    labels = np.random.default_rng(0).integers(0, 2, 300).tolist()
    labels[::30] = [-1, None] * 5
    source = write_split(tmp_path / "some", "train", labels)
    write_split(source, "test", [0, 1] * 20)
    out = tmp_path / "out"
    assert "10 of 300 rows of train have no label" in make(run, source, out)
    images, labels = arrays(out, "train")
    assert len(images) == len(labels) == 290
    assert (images[:, 0, 0, 0] == np.where(labels == 1, 200, 50)).all()
    words = ["cat", "NA", "null", " ", "", None] * 5
    source = write_split(tmp_path / "words", "train", words, datasets.Value("string"))
    out = tmp_path / "grey"
    assert "15 of 30 rows of train have no label" in make(run, source, out, "--grey")
    assert (out / "classes.txt").read_text() == "NA\ncat\nnull\n"
    assert arrays(out, "train")[0].shape == (12, 1, 8, 8) and len(arrays(out, "test")[1]) == 3


def test_splits_that_do_not_serve(run, refuse, refused, tmp_path):
    """The split is named, before an image is decoded. Validation takes the place of test."""
    source = write_split(tmp_path / "secret", "train", [0, 1] * 30)
    write_split(source, "test", [-1] * 10)
    refuse("test has no labels", source)
    write_split(source, "validation", [0, 1] * 5)
    assert "10 of 10 rows of test have no label" in make(run, source, out := tmp_path / "out")
    assert arrays(out, "test")[0].shape == (10, 3, 8, 8)
    refused("is there already", SCRIPT, source, "--out", out)
    refused("is the source itself", SCRIPT, source, "--out", f"{source}/")
    refuse("cannot read", tmp_path / "nowhere/no")
    others = datasets.ClassLabel(names=["bird", "cat", "dog"])
    cases = {
        "test has classes that train has not: ['cat']": {"train": [0, 2, 0], "test": [0, 1]},
        "all labels of train are the same, bird": {"train": [0] * 9},
        "no split train": {"test": [0, 1] * 9},
    }
    for number, (message, splits) in enumerate(cases.items()):
        for split, labels in splits.items():
            source = write_split(tmp_path / f"case{number}", split, labels, others)
        refuse(message, source)
    source = write_split(tmp_path / "apart", "train", [0, 1] * 9)
    write_split(source, "test", [1, 2], others)
    refuse("differ in classes: ['bird']", source)


def write_folders(folder, levels=(50, 200), count=20, dtype=np.uint8, suffix="png"):
    """Write folders of images, one for each level, as an array of this type."""
    for number, value in enumerate(levels):
        path = folder / f"class{number}"
        path.mkdir(parents=True)
        for index in range(count):
            pixels = np.full((8, 8), value, dtype)
            Image.fromarray(pixels).save(path / f"{index}.{suffix}")
    return folder


@pytest.mark.parametrize("suffix,dtype", [("png", "<u2"), ("tif", ">u2")])
def test_pictures_of_16_bits_are_scaled(run, tmp_path, suffix, dtype):
    source = write_folders(tmp_path / "xray", (9000, 40000), dtype=dtype, suffix=suffix)
    make(run, source, tmp_path / "out", "--grey")
    images, labels = arrays(tmp_path / "out", "train")
    assert (images[:, 0, 0, 0] == np.where(labels == 1, 40000 // 256, 9000 // 256)).all()


def test_pictures_that_have_no_range_are_refused(refuse, run, tmp_path):
    """32 bits, floats, and whatever becomes (nearly) one level of 256."""
    source = write_folders(tmp_path / "float", (0.1, 0.9), dtype="f4", suffix="tif")
    refuse("none of the first 4 images", source)
    refuse("between 3 and 15", write_folders(tmp_path / "12 bits", (900, 4000), dtype="<u2"))
    source = write_folders(tmp_path / "some")
    Image.fromarray(np.full((8, 8), 0.5, "f4")).save(source / "class1/0.tif")
    assert "1 broken ones left out" in make(run, source, tmp_path / "out")


def test_folders_of_splits(run, refuse, tmp_path):
    """Train numbers the classes, and those that differ are named. A split is no class."""
    photos = tmp_path / "photos"
    write_folders(photos / "train", (50, 120, 200))
    write_folders(photos / "valid")
    (photos / "valid/class1").rename(photos / "valid/class2")
    (photos / "test").mkdir()  # as in a contest, whose labels are secret
    told = make(run, photos, out := tmp_path / "out")
    assert "test has no folders of images: left out" in told
    assert "valid has no image of ['class1']" in told
    images, labels = arrays(out, "test")
    assert (images[:, 0, 0, 0] == np.where(labels == 2, 200, 50)).all() and len(labels) == 40
    assert len(arrays(out, "train")[1]) == 60
    (photos / "valid/class2").rename(photos / "valid/kiwi")
    refuse("valid has classes that train has not: ['kiwi']", photos)
    (photos / "test").rmdir()
    (photos / "train").rename(photos / "Train")
    (photos / "valid").rename(photos / "Val")
    refuse("in small letters", photos)


def test_photographs(run, attempt, tmp_path):
    """Both scripts read them upright, and on white where they are transparent."""
    photos = tmp_path / "photos"
    for split in ("train", "val"):
        write_folders(photos / split, suffix="jpg")
    turned, clear = photos / "train/class0/0.jpg", photos / "train/class0/1.png"
    exif = Image.Exif()
    exif[0x0112] = 6  # shown after a turn by 90 degrees clockwise
    Image.new("RGB", (8, 16)).save(turned, exif=exif)
    images = module("singlegpu/images.py")
    assert images.read_photo(turned).size == (16, 8)
    for mode, dark, more in (
        ("RGBA", (9, 9, 9, 0), {}),
        ("LA", (9, 0), {}),
        ("P", 0, {"transparency": 0}),
    ):
        Image.new(mode, (8, 8), dark).save(clear, **more)
        assert images.read_photo(clear).getextrema() == ((255, 255),) * 3
        rows = [{"image": {"path": str(clear), "bytes": None}}]
        made = module(SCRIPT).decode(rows, 0, namespace(size=8, grey=False))
        assert (made == 255).all()
    shutil.copy(photos / "train/class0/2.jpg", photos / "train/class0/2b.JFIF")
    args = namespace(dataset=str(photos), data_dir="", image_size=8, num_workers=0)
    assert len(images.read_data(args)[0]) == 42
    assert "42 images, 0 broken" in make(run, photos, tmp_path / "made")
    Image.fromarray(np.full((8, 8), 40_000, np.uint16)).save(photos / "val/class1/1.png")
    words = ("--dataset", photos, "--image_size", 8, "--model", "mlp", "--batch_size", 40)
    status, _, err = attempt("singlegpu/images.py", *words, "--max_steps", 1)
    told = "val/class1/1.png has more than 8 bits a channel. make_images.py scales 16 bits"
    assert status == 1 and told in err, err


def test_files_that_do_not_fit_the_source(refuse, run, tmp_path):
    """An earlier run's files are gone on with only if its labels are those of the source."""
    source = write_folders(tmp_path / "photos")
    whole, out, unfinished = (tmp_path / name for name in ("whole", "out", "out.8rgb.tmp"))
    make(run, source, whole)
    images, labels = arrays(whole, "train")
    unfinished.mkdir()
    shutil.copy(whole / "train_images.npy", unfinished)
    (1 - labels).tofile(unfinished / "train_labels.tmp")
    refuse("remove their folder", source, out)
    labels.tofile(unfinished / "train_labels.tmp")
    os.truncate(unfinished / "train_images.npy", 1000)  # fewer images than labels
    refuse("remove their folder", source, out)
    shutil.copy(whole / "train_images.npy", unfinished)
    (unfinished / "train_labels.tmp").write_bytes(labels[:9].tobytes() + b"torn")
    make(run, source, out)
    for found, expected in zip(arrays(out, "train"), (images, labels)):
        assert np.array_equal(found, expected)


def test_stopped_at_a_time_limit(fork, run, tmp_path):
    """Status 75 says that it has written, and can go on."""
    source, out, fifo = tmp_path / "source", tmp_path / "out", tmp_path / "late.png"
    source.mkdir()
    for split, count in (("train", 600), ("test", 2)):
        images = [picture(level(row % 2)) for row in range(count)]
        if split == "train":  # in the second block, an image that does not come
            row = int(np.random.default_rng(0).permutation(600)[300])
            images[row] = {"bytes": None, "path": str(fifo)}
        table = pd.DataFrame({"image": images, "label": np.arange(count) % 2})
        table.to_parquet(source / f"{split}.parquet")
    os.mkfifo(fifo)
    job = fork(SCRIPT, source, "--size", 8, "--out", out)
    labels = tmp_path / "out.8rgb.tmp/train_labels.tmp"
    wait_for(lambda: (labels.exists() and labels.stat().st_size) or job.process.poll() is not None)
    job.process.send_signal(signal.SIGUSR2)
    wait_for(lambda: write_nothing(fifo) or job.process.poll() is not None)
    status, _, err = job.wait()
    assert status == os.EX_TEMPFAIL and labels.stat().st_size == 256 * 8, err
    fifo.unlink()
    Image.new("RGB", (8, 8), (level(row % 2),) * 3).save(fifo)
    make(run, source, out)
    images, labels = arrays(out, "train")
    assert len(labels) == 600 and (images[:, 0, 0, 0] == np.where(labels == 1, 200, 50)).all()


def write_nothing(fifo):
    """Whether somebody waits for a first byte there, who now gets none."""
    try:
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


@pytest.fixture
def example(paste):
    """example(name, folder="singlegpu") is the path of images.py with this section in its place."""
    return lambda name, *folder: paste((ROOT / f"examples/{name}.py").read_text(), *folder)


def fails(attempt, message, *words):
    status, _, err = attempt(*words)
    assert status == 1 and message in err, err


def test_table(run, attempt, example, tmp_path):
    """A constant column, and targets that are not there; then cells that are not numbers."""
    numbers = np.random.default_rng(0).standard_normal((300, 3))
    seconds = 1.7e9 + numbers[:, 0]  # more digits than float32 has
    lines = [f"{t:.6f},0.1,{b},{b + c}" for t, (_, b, c) in zip(seconds, numbers)]
    lines[::30] = [
        f"{line.rsplit(',', 1)[0]},{blank}" for line, blank in zip(lines, ["", "NA"] * 5)
    ]
    path, names = tmp_path / "table.csv", "time,constant,b,target"
    path.write_text("\n".join([names, *lines]))
    out = run(example("table", "multigpu"), "--table", path, "--epochs", 3, processes=2)
    assert out.count("10 of 300 rows have no target") == 1  # not by each process
    losses = [float(loss) for loss in re.findall(r"val_loss ([\d.]+)  val_mae", out)]
    assert len(losses) == 3 and losses[-1] < 0.9, out
    script = example("table")
    others = {
        "a;b;price\n0,12;0,3;1,2\n1,5;2,5;3,5": "Length of header",  # another separator
        "0.5,1.5\n2.5,3.5": "numbers, not names",
        "a,price\n1,\n2,": "no row with a price",
    }
    for cell in ("", "word", "inf"):
        others["\n".join([names, *lines, f"{cell},0.1,1,1"])] = "in time"
    for text, message in others.items():
        path.write_text(text)
        fails(attempt, message, script, "--table", path)
    curves = []
    for has_numbers in (True, False):  # of its rows, which are no feature
        pd.DataFrame(numbers, columns=["a", "b", "c"]).to_csv(path, index=has_numbers)
        out = run(script, "--table", path, "--max_steps", 3)
        curves.append(re.findall(r"val_loss ([\d.]+)", out))
    assert curves[0] == curves[1]


def test_series(run, attempt, example, tmp_path):
    """A constant column trains; cells that are not numbers are named by their column."""
    path, script = tmp_path / "series.csv", example("forecast")
    waves = np.sin(np.arange(300) / 4)
    lines = ["date,constant,wave", *(f"day {day},20.0,{wave}" for day, wave in enumerate(waves))]
    path.write_text("\n".join(lines))
    words = (script, "--series", path, "--window", 24, "--horizon", 6)
    fails(attempt, "no number in date", *words)
    pd.read_csv(path).to_csv(tmp_path / "numbered.csv")
    args = namespace(series=tmp_path / "numbered.csv", skip=["date"])
    assert module(script).read_series(args).shape == (300, 2), "row numbers are no series"
    out = run(*words, "--skip", "date", "--epochs", 4)
    mae, naive = re.findall(r"val_mae ([\d.]+)\s+val_naive ([\d.]+)", out)[-1]
    assert float(mae) < float(naive) / 2, out
    for line, message in (
        ("day 300,20.0,", "no number in wave"),
        ("day 300,20.0,1,2", "Expected 3 fields"),  # as with decimal commas
    ):
        path.write_text("\n".join([*lines, line]))
        fails(attempt, message, *words, "--skip", "date")


def test_masks(run, attempt, example, tmp_path):
    """255 is no label, and no part of the mean. What does not fit is named."""
    script = example("segmentation")
    for split in ("train", "val"):
        for folder in ("images", "masks"):
            (tmp_path / split / folder).mkdir(parents=True)
        for number in range(12):
            image = Image.new("RGB", (10, 10), (20 * number,) * 3)
            image.save(tmp_path / f"{split}/images/{number}.jpg")
            mask = np.full((10, 10), 255, np.uint8)
            mask[0] = number % 2
            Image.fromarray(mask).save(tmp_path / f"{split}/masks/{number}.png")
    upright = Image.Exif()
    upright[0x0112] = 6  # shown after a turn by 90 degrees clockwise
    Image.new("RGB", (8, 16)).save(tmp_path / "turned.jpg", exif=upright)
    assert module(script).read_photo(tmp_path / "turned.jpg").size == (16, 8), "as its mask"
    words = (script, "--photos", tmp_path, "--image_size", 8, "--batch_size", 6)
    out = run(*words, "--epochs", 1)
    loss = float(re.search(r"train_loss ([\d.]+)", out)[1])
    assert 0.5 < loss < 2, "about log 3 for three classes, however few pixels have a label"
    Image.fromarray(np.full((10, 10), 7, np.uint8)).save(tmp_path / "train/masks/3.png")
    fails(attempt, "masks/3.png is no grey image of 0 to --num_classes - 1", *words)
    shutil.copy(tmp_path / "train/images/4.jpg", tmp_path / "train/images/4.png")
    (tmp_path / "train/images/5.jpg").unlink()
    fails(attempt, "have not one image: ['4.png', '5.png']", *words)
    (tmp_path / "train/images/4.png").rename(tmp_path / "train/images/5.png")
    for mask in tmp_path.glob("*/masks/*"):
        Image.fromarray(np.tile(np.uint8([0, 255]), (10, 5))).save(mask)
    fails(attempt, "all labelled pixels of the first masks are of one class", *words)


@pytest.mark.parametrize("names", (["1", "2", "3"], ["bird", "sand", "wood"]), ids="nw")
def test_labels_of_texts(run, refused, network, example, tmp_path, names):  # noqa: F811
    """Labels from 1, or words; some are not there. A text may be empty, or a number."""
    rows = [f"{letters},{name}" for letters, name in zip(("a b", "c d", "1"), names)] * 20
    rows += [f",{names[0]}"] * 3 + ["a b,"] * 4
    for split in ("train", "test"):
        (tmp_path / f"{split}.csv").write_text("\n".join(["text,label", *rows]))
    script = example("huggingface")
    words = ("--network", network, "--texts", tmp_path, "--seq_len", 4, "--learning_rate", 0.02)
    out = run(script, *words, "--batch_size", 9, "--epochs", 8)
    assert "63 of 67 rows of train have a label other than -1" in out
    assert float(re.findall(r"val_acc ([\d.]+)", out)[-1]) > 0.9, out
    if names[0] == "bird":
        (tmp_path / "test.csv").write_text("text,label\na b,bird\nc,stone")
        refused("test has labels that train has not: ['stone']", script, *words)


TEXT = ("singlegpu/text.py", "--seq_len", 32, "--batch_size", 10, "--learning_rate", 0.02)


def write_texts(folder, train, test):
    folder.mkdir(exist_ok=True)
    for split, lines in (("train", train), ("test", test)):
        (folder / f"{split}.csv").write_text("\n".join(["text,label", *lines]))
    return folder


def test_references_are_written_as_translations_are():
    """A perfect translation has a BLEU of 100, in capitals of Greek, too."""
    script = module("singlegpu/translation.py")
    texts = ["ΕΝΑΣ ΑΝΤΡΑΣ ΜΕ ΚΑΠΕΛΟ ΚΑΙ ΕΝΑΣ ΣΚΥΛΟΣ"] * 20
    tokenizer = script.train_tokenizer(texts, 20)
    tokens = [encoding.ids[1:] for encoding in tokenizer.encode_batch(texts)]
    decoded = tokenizer.decode_batch(tokens, skip_special_tokens=False)
    translations = [text.partition("[END]")[0] for text in decoded]
    assert script.bleu_score(texts, translations, tokenizer) == pytest.approx(100)


@pytest.mark.parametrize("letters", ["狗猫鱼鸟树花", "กขคงจฉ"])
def test_texts_without_blanks_between_words(letters):
    """Each character is a token."""
    for script in ("text", "translation"):
        tokenizer = module(f"singlegpu/{script}.py")
        if script == "text":
            table = tokenizer.learn_vocabulary({"text": [letters] * 2})
            tokenizer = Tokenizer.from_str(table["tokenizer"][0])
        else:
            tokenizer = tokenizer.train_tokenizer([letters] * 2, 6)
        assert set(letters) <= tokenizer.get_vocab().keys()


def test_labels_of_text_py(run, refused, tmp_path):
    """Digits are text, which no vocabulary may cover; labels have gaps, and are those of train."""
    lines = [f"{number},{2 * (number % 2) + 1}" for number in range(1000, 1100)]
    lines += [f"1000,{missing}" for missing in ("-1", "", "NA")]
    lines += ["1000,-2"]  # -1 alone is the hub's mark
    folder = write_texts(tmp_path / "texts", lines, lines[:20])
    out = run(*TEXT, "--dataset", folder, "--max_steps", 1)
    assert "101 of 104 rows of train have a label other than -1: [-2.0, 1.0, 3.0]" in out
    assert re.search(r"\d\d% of all tokens of train are \[UNK\]", out), out
    write_texts(folder, ["a b,bird", "c d,stone"] * 10, ["a b,bird", "c d,fish", "e,ant"])
    refused("test has labels that train has not: ['ant', 'fish']", *TEXT, "--dataset", folder)
    write_texts(folder, ["a b,bird", "c d,stone"] * 10, ["a b,stone"])
    out = run(*TEXT, "--dataset", folder, "--max_steps", 1)
    assert "1 of 1 rows of test have a label other than -1: ['stone']" in out


def test_files_that_are_no_text(refused, tmp_path):
    """Text of 16 bits a character, a file of ids in place of its folder, ids of 32 bits."""
    (tmp_path / "text").write_text("to be or not to be " * 99, encoding="utf-16")
    ids = np.arange(2000, dtype=np.uint32) % 256
    (ids + 1).astype(np.uint16).tofile(tmp_path / "ids.bin")
    wide = {"": ids, "few": ids[:200], "large": ids * 256 + ids % 3 * 65536}
    for name, array in wide.items():
        (tmp_path / name).mkdir(exist_ok=True)
        for split in ("train", "val"):
            array.tofile(tmp_path / name / f"{split}.bin")
    cases = {"text": "bytes of 0", "ids.bin": "bytes of 0"}
    cases |= dict.fromkeys(wide, "more than 16 bits")
    for name, message in cases.items():
        refused(message, "singlegpu/gpt.py", "--dataset", tmp_path / name)


def test_pairs_of_the_hub(run, tmp_path):
    """A column of dictionaries; Chinese; digits; pairs that lack a side are left out."""
    words = dict(zip("0123456789", "零一二三四五六七八九"))
    numbers = [str(number) for number in range(100, 160)]
    pairs = [{"en": " ".join(n), "zh": "".join(words[digit] for digit in n)} for n in numbers]
    pairs += [{"en": None, "zh": "一"}, {"en": "1", "zh": ""}]
    for split in ("train", "validation", "test"):
        lines = [json.dumps({"id": 1, "translation": pair}) for pair in pairs]
        (tmp_path / f"{split}.json").write_text("\n".join(lines))
    words = ("--dataset", tmp_path, "--seq_len", 8, "--batch_size", 20, "--learning_rate", 2e-3)
    script, sides = "singlegpu/translation.py", ("--source", "en", "--target", "zh")
    out = run(script, *words, *sides, "--max_steps", 1)
    assert "60 of 62 train pairs are complete" in out and "[UNK]" not in out, out
    lines = [f"{number},{number}" for number in numbers]
    for split in ("train", "validation", "test"):
        (tmp_path / f"{split}.json").unlink()
        (tmp_path / f"{split}.csv").write_text("\n".join(["en,zh", *lines]))
    out = run(script, *words, *sides, "--max_steps", 1)
    assert re.search(r"\d\d% of all words of train's source are \[UNK\]", out), out


def test_report_of_a_sweep_has_a_job_file():
    """There, its Python is activated as in the others."""
    command = ["bash", ROOT / "slurm/sweep.sh", "--dry_run", "--sbatch", "--account=me", "images"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *_, report, _ = done.stdout.splitlines()
    assert re.search("--account=me .*slurm/report.slurm runs/", report), report
    assert "# EDIT: activate your Python" in (ROOT / "slurm/report.slurm").read_text()
