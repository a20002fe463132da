"""Texts and tables as they come: what is wrong is said, and what is right is not spoiled."""

import json
import re
import shutil
import unicodedata

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from PIL import Image
from test_examples import network  # noqa: F401 - a fixture
from test_models import gpt, module, namespace, text, translation
from tokenizers import Tokenizer


@pytest.fixture
def example(paste):
    """example(name, folder="singlegpu") is the path of images.py with this section in its place."""
    return lambda name, *folder: paste((ROOT / f"examples/{name}.py").read_text(), *folder)


def refuse(message, read, **flags):
    """To read data with these flags is an error with this message."""
    with pytest.raises((SystemExit, ValueError, Warning), match=re.escape(message)):
        read(namespace(**flags))


def test_table(run, example, tmp_path):
    """A constant column, targets that are not there, row numbers. A line of names is no row."""
    numbers = np.random.default_rng(0).standard_normal((300, 3))
    seconds = 1.7e9 + numbers[:, 0]  # more digits than float32 has
    lines = [f"{t:.6f},0.1,{b},{b + c}" for t, (_, b, c) in zip(seconds, numbers)]
    for row, blank in zip(range(0, 300, 30), ["", "NA"] * 5):
        lines[row] = f"{lines[row].rpartition(',')[0]},{blank}"
    path, names = tmp_path / "table.csv", "time,constant,b,target"
    path.write_text("\n".join([names, *lines]))
    out = run(example("table", "multigpu"), "--table", path, "--epochs", 3, processes=2)
    assert out.count("10 of 300 rows have no target") == 1  # not by each process
    losses = [float(loss) for loss in re.findall(r"val_loss ([\d.]+)  val_mae", out)]
    assert len(losses) == 3 and losses[-1] < 0.9, out
    read_data = module(example("table")).read_data
    pd.DataFrame(numbers).to_csv(path)  # with row numbers, which are no feature
    assert len(read_data(namespace(table=path))[0][0][0]) == 2
    lines = "\n".join(f"{row},{row**2},{row**3}" for row in range(20))
    for content in f"a,b,\n{lines}", f"a,b,c,\n{lines}\n".replace("\n", ",\n").replace(",,", ","):
        path.write_text(content)  # a target without a name; a comma at the end of each line
        assert len(read_data(namespace(table=path))[0][0][0]) == 2
    for wrong, message in {
        "0.5,1.5\n2.5,3.5": "numbers, not names",
        f"{names}\n1,2,3,4\n1,word,1,1": "no number in constant",
        "a;b\n0,12;0,3\n1,5;2,5": "Length of header",  # another separator
    }.items():
        path.write_text(wrong)
        refuse(message, read_data, table=path)


def test_series(example, tmp_path):
    """Row numbers are no series, a constant column is zeros, a gap is named."""
    path, script = tmp_path / "series.csv", module(example("forecast"))
    table = pd.DataFrame({"constant": 20.0, "wave": np.sin(np.arange(300) / 4)})
    table.to_csv(path)  # with row numbers
    sizes = {"series": path, "skip": [], "window": 24, "horizon": 6}
    (windows,) = script.read_data(namespace(**sizes))[0].tensors
    assert windows.shape[1:] == (2, 30) and (windows[:, 0] == 0).all() and windows.isfinite().all()
    table.loc[7, "wave"] = None
    table.to_csv(path)
    refuse("no number in wave", script.read_data, **sizes)


def test_masks(run, example, tmp_path):
    """255 is no label, and no part of the mean. What does not fit is named; masks are counted."""
    for split in ("train", "val"):
        for folder in ("images", "masks"):
            (tmp_path / split / folder).mkdir(parents=True)
        for number in range(12):
            image = Image.new("RGB", (10, 10), (20 * number,) * 3)
            image.save(tmp_path / f"{split}/images/{number}.jpg")
            mask = np.full((10, 10), 255, np.uint8)
            mask[0] = number % 2
            Image.fromarray(mask).save(tmp_path / f"{split}/masks/{number}.{'Pp'[number % 2]}ng")
        (tmp_path / f"{split}/masks/.DS_Store").touch()
        (tmp_path / f"{split}/masks/0.Png").unlink()
    path = example("segmentation")
    words = (path, "--photos", tmp_path, "--image_size", 8, "--batch_size", 6)
    out = run(*words, "--epochs", 1)
    assert f"11 of 12 images in {tmp_path}/train have a mask" in out
    loss = float(re.search(r"train_loss ([\d.]+)", out)[1])
    assert 0.5 < loss < 2, "about log 3 for three classes, however few pixels have a label"
    script, flags = module(path), {"photos": tmp_path, "image_size": 8, "num_classes": 3}
    sideways = Image.Exif()
    sideways[0x0112] = 6  # shown after a turn by 90 degrees clockwise; its mask was drawn before
    Image.new("RGB", (8, 16)).save(tmp_path / "train/images/3.jpg", exif=sideways)
    Image.fromarray(np.zeros((16, 8), np.uint8)).save(tmp_path / "train/masks/3.png")
    refuse("3.png and its image differ in height or width", script.read_data, **flags)
    shutil.copy(tmp_path / "train/images/5.jpg", tmp_path / "train/images/4.png")
    refuse("have not one image: ['4.Png']", script.read_data, **flags)
    (tmp_path / "train/images/4.png").unlink()
    Image.new("RGB", (10, 10)).save(tmp_path / "train/images/3.jpg")
    for mask in tmp_path.glob("*/masks/[!.]*"):
        Image.fromarray(np.resize(np.uint8([0, 255]), (10, 10))).save(mask)
    refuse("all labelled pixels of the first masks are of one class", script.read_data, **flags)


def write_texts(folder, train, test):
    """Make the folder a data set of these lines, a text and a label each."""
    folder.mkdir(exist_ok=True)
    for split, lines in (("train", train), ("test", test)):
        (folder / f"{split}.csv").write_text("\n".join(["text,label", *lines]))
    return folder


@pytest.mark.parametrize("names", (["1", "2", "3"], ["bird", "sand", "wood"]), ids="nw")
def test_labels_of_huggingface_py(network, example, tmp_path, capsys, names):  # noqa: F811
    """Labels from 1, or words; some are not there. A text may be empty, or a number."""
    lines = [f"{letters},{name}" for letters, name in zip(("a b", "c d", "1"), names)] * 20
    lines += [f",{names[0]}"] * 3 + ["a b,"] * 4
    script = module(example("huggingface"))
    flags = {"network": network, "texts": str(write_texts(tmp_path / "texts", lines, lines))}
    train_data, _ = script.read_data(args := namespace(**flags, seq_len=4))
    assert "63 of 67 rows of train have a label other than -1" in capsys.readouterr().out
    assert train_data["labels"][:].tolist() == [0, 1, 2] * 20 + [0] * 3
    loss, _ = script.batch_loss(script.create_model(args, train_data), train_data[:6], args)
    assert loss.isfinite()
    if names[0] == "bird":
        write_texts(tmp_path / "texts", lines, ["a b,bird", "c,stone"])
        refuse("test has labels that train has not: ['stone']", script.read_data, **flags)


def test_labels_of_text_py(run, refused, tmp_path, capsys):
    """Digits are text, which no vocabulary may cover; labels have gaps, and are those of train.

    quantize/text.py refuses a snapshot when the training texts, and so the words' ids, are others.
    """
    lines = [f"{number},{2 * (number % 2) + 1}" for number in range(1000, 1100)]
    lines += [f"1000,{missing}" for missing in ("-1", "", "NA")]
    lines += ["1000,-2"]  # -1 alone is the hub's mark
    write_texts(tmp_path / "texts", lines, lines[:20])
    words = ("--data_dir", tmp_path, "--dataset", "texts", "--batch_size", 10, "--max_steps", 1)
    saved = ("--snapshot", tmp_path / "s.pt")
    out = run("singlegpu/text.py", *words, *saved)
    assert "101 of 104 rows of train have a label other than -1: [-2.0, 1.0, 3.0]" in out
    assert re.search(r"\d\d% of all tokens of train are \[UNK\]", out), out
    write_texts(tmp_path / "texts", lines[1:], lines[:20])
    words = ("--data_dir", tmp_path, "--eager")
    refused("is not what it was in training", "quantize/text.py", *words, *saved)
    flags = {"data_dir": str(tmp_path), "dataset": "words"}
    write_texts(tmp_path / "words", lines := ["a b,bird", "c d,stone"] * 10, ["c d,fish", "e,ant"])
    refuse("test has labels that train has not: ['ant', 'fish']", text.read_data, **flags)
    write_texts(tmp_path / "words", lines, ["a b [PAD] a b,stone", ",stone"])
    _, data = text.read_data(namespace(**flags))
    assert "2 of 2 rows of test have a label other than -1: ['stone']" in capsys.readouterr().out
    assert data.classes == ["bird", "stone"] and data.targets.tolist() == [1, 1]
    assert data.lengths.tolist() == [1, 7], "[PAD] in a text is text; an empty text is one word"
    assert data.tokens.dtype == np.int16
    text.read_data(namespace(**flags, seq_len=2))
    assert "100% of the texts of train fill --seq_len" in capsys.readouterr().out


def test_words_of_all_scripts():
    """Without blanks between words, each character is a token. An umlaut has two spellings.

    A perfect translation has a BLEU of 100, in capitals of Greek, too. An unknown word is one.
    """
    for letters in "狗猫鱼鸟树花", "กขคงจฉ", "\u00e4":
        [state] = text.learn_vocabulary({"text": [letters] * 2})["tokenizer"]
        for tokenizer in Tokenizer.from_str(state), translation.train_tokenizer([letters] * 2, 8):
            assert set(letters) <= tokenizer.get_vocab().keys()
            other = unicodedata.normalize("NFD", letters)
            assert tokenizer.encode(other).ids == tokenizer.encode(letters).ids
    texts = ["ΕΝΑΣ ΑΝΤΡΑΣ ΜΕ ΚΑΠΕΛΟ ΚΑΙ ΕΝΑΣ a\u0308"] * 20
    tokenizer = translation.train_tokenizer(texts, 20)
    tokens = [encoding.ids[1:] for encoding in tokenizer.encode_batch(texts)]
    decoded = tokenizer.decode_batch(tokens, skip_special_tokens=False)
    translations = [text.partition("[END]")[0] for text in decoded]
    assert translation.bleu_score(texts, translations, tokenizer) == pytest.approx(100)
    wrong = [[text.replace("με", word) for text in translations] for word in ("[UNK]", "και")]
    scores = [translation.bleu_score(texts, each, tokenizer) for each in wrong]
    assert scores[0] == pytest.approx(scores[1]) and scores[0] < 90


def test_pairs_of_the_hub(run, tmp_path, capsys):
    """A column of dictionaries; Chinese; digits. What lacks a side or is cut off is counted."""
    words = dict(zip("0123456789", "零一二三四五六七八九"))
    numbers = [str(number) for number in range(100, 160)]
    pairs = [{"en": " ".join(n), "zh": "".join(words[digit] for digit in n)} for n in numbers]
    pairs += [{"en": None, "zh": "一"}, {"en": "1", "zh": ""}]
    (tmp_path / "hub").mkdir()
    (tmp_path / "csv").mkdir()
    for split in ("train", "validation", "test"):
        lines = [json.dumps({"id": 1, "translation": pair}) for pair in pairs]
        (tmp_path / f"hub/{split}.json").write_text("\n".join(lines))
        lines = ["en,zh", *(f"{number},{number}" for number in numbers)]
        (tmp_path / f"csv/{split}.csv").write_text("\n".join(lines))
    flags = ("--data_dir", tmp_path, "--dataset", "hub", "--source", "en", "--target", "zh")
    flags = (*flags, "--seq_len", 8, "--batch_size", 20, "--max_steps", 1)
    out = run("singlegpu/translation.py", *flags)
    assert "60 of 62 train pairs are complete" in out and "[UNK]" not in out, out
    assert re.search(r"^\d \d \d\n    [零一二三四五六七八九]{3}\n", out, re.M), "an example"
    args = namespace(data_dir=tmp_path, dataset="csv", source="en", target="zh")
    translation.read_data(args)
    told = capsys.readouterr().out
    assert re.search(r"\d\d% of all words of train's source are \[UNK\]", told), told
    assert "fill --seq_len" not in out + told
    args.seq_len = 3  # a number, its start and its end
    translation.read_data(args)
    assert "100% of train's targets fill --seq_len" in capsys.readouterr().out


def test_files_that_are_no_text(tmp_path):
    """Text of 16 bits a character, a file of ids in place of its folder, ids of 32 bits."""
    (tmp_path / "text").write_text("to be or not to be " * 99, encoding="utf-16")
    ids = np.arange(2000, dtype=np.uint32) % 256
    (ids + 1).astype(np.uint16).tofile(tmp_path / "ids.bin")
    wide = {"": ids, "few": ids[:200], "large": ids * 256 + ids % 3 * 65536}
    for name, array in wide.items():
        (tmp_path / name).mkdir(exist_ok=True)
        for split in ("train", "val"):
            array.tofile(tmp_path / name / f"{split}.bin")
    for name in "text", "ids.bin":
        refuse("bytes of 0", gpt.read_data, dataset=str(tmp_path / name))
    for name in wide:
        refuse("more than 16 bits", gpt.read_data, dataset=str(tmp_path / name))
