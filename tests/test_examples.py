"""Sections that users paste, on the runs of three folders: they train; mistakes are told."""

import argparse
import json
import re
import shutil
import time

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import ROOT, assert_same_weights, curve, load, replaced, rows
from PIL import Image
from test_models import module
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DistilBertConfig, DistilBertForSequenceClassification
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LAUNCHES = (("singlegpu", 1), ("multigpu", 2), ("multinode", 3))


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """A folder with a tiny network and its tokenizer, as the Hub has them."""
    sizes = {"max_position_embeddings": 16, "dim": 16, "hidden_dim": 32}
    rates = dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), 0.0)
    config = DistilBertConfig(**sizes, **rates, vocab_size=12, n_layers=1, n_heads=2)
    torch.manual_seed(0)  # the weights do not depend on what other tests have drawn
    return save(DistilBertForSequenceClassification(config), tmp_path_factory.mktemp("network"))


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 16}
    config = LlamaConfig(**sizes, vocab_size=12, num_hidden_layers=1, num_attention_heads=2)
    torch.manual_seed(0)
    return save(LlamaForCausalLM(config), tmp_path_factory.mktemp("language_model"))


def save(model, folder):
    """Save it with a tokenizer of the words a to j."""
    vocab = {word: id for id, word in enumerate(["[PAD]", "[UNK]", *"abcdefghij"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder with a data set of texts of five letters; those of class 1 are f to j."""
    folder, generator = tmp_path_factory.mktemp("texts"), np.random.default_rng(0)
    for split, size in (("train", 192), ("test", 48)):
        lines = ["text,label"]
        for label in generator.integers(0, 2, size):
            letters = generator.choice([*("abcde", "fghij")[label]], 5)
            lines.append(f"{' '.join(letters)},{label}")
        (folder / f"{split}.csv").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """A text in which each letter is followed by the next."""
    path = tmp_path_factory.mktemp("letters") / "text.txt"
    path.write_text(" ".join("abcdefghij" * 200))
    return path


EXAMPLES = {  # name: its flags; a word in braces is what the fixture of this name returns
    "table": "--table {table}",
    "huggingface": "--network {network} --texts {texts} --seq_len 8 --learning_rate 1e-2",
    "lora": "--network {language_model} --text {letters} --seq_len 8 --learning_rate 3e-2",
    "segmentation": "--image_size 24",
    "forecast": "--window 48 --horizon 12",
}


def test_each_example_is_tried():
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == EXAMPLES.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_train_with_one_loss_curve(run, request, paste, tmp_path, name):
    """They train on 1, 2 and 3 processes, two workers each, in place of any script's section."""
    band = (ROOT / f"examples/{name}.py").read_text()
    flags = re.sub(
        r"\{(\w+)\}", lambda match: str(request.getfixturevalue(match[1])), EXAMPLES[name]
    )
    words = (*flags.split(), "--num_workers", 2, "--batch_size", 12, "--max_steps", 24)
    curves = []
    for (folder, processes), task in zip(LAUNCHES, ("images", "text", "gpt")):
        log, snapshot = tmp_path / f"{folder}.jsonl", tmp_path / f"{folder}.pt"
        more = ("--eval_every", 8, "--log", log, "--snapshot", snapshot)
        run(paste(band, folder, task), *words, *more, processes=processes)
        assert curve(log)[-1, 1] < curve(log)[0, 1], "it learns"
        assert load(snapshot)["step"] == rows(log)[-1]["step"] == 24
        curves.append(curve(log))
    for each in curves[1:]:
        np.testing.assert_allclose(each, curves[0], rtol=1e-5)


def test_a_checkpoint_of_16_bits_trains_in_float32(run, paste, network, texts, tmp_path):
    """The library would load it as it is saved. A tokenizer without padding gets one."""
    names = {"dtype": torch.float16}
    model = DistilBertForSequenceClassification.from_pretrained(network, **names)
    model.save_pretrained(shutil.copytree(network, tmp_path / "half"))
    settings = tmp_path / "half/tokenizer_config.json"
    loaded = json.loads(settings.read_text())
    del loaded["pad_token"]
    settings.write_text(json.dumps(loaded | {"eos_token": "j"}))
    script = paste((ROOT / "examples/huggingface.py").read_text(), "singlegpu", "images")
    words = ("--network", tmp_path / "half", "--texts", texts, "--seq_len", 8, "--max_steps", 2)
    run(script, *words, "--snapshot", tmp_path / "s.pt")
    assert {value.dtype for value in load(tmp_path / "s.pt")["model"].values()} == {torch.float32}


def test_a_photograph_lies_as_its_mask(paste, tmp_path):
    """Turned upright by its EXIF orientation, as a phone saves it."""
    for kind in ("images", "masks"):
        (tmp_path / kind).mkdir()
    mask = np.zeros((24, 24), np.uint8)
    mask[:6] = 1
    image = Image.fromarray(np.repeat(255 * mask[..., None], 3, 2)).transpose(Image.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # shown after a turn by 90 degrees clockwise
    image.save(tmp_path / "images/a.png", exif=exif)
    Image.fromarray(mask).save(tmp_path / "masks/a.png")
    band = (ROOT / "examples/segmentation.py").read_text()
    script = module(paste(band, "singlegpu", "images"))
    args = argparse.Namespace(image_size=24, num_classes=2)
    [(pixels, classes)] = [script.Photos(tmp_path, args)[0]]
    assert torch.equal(pixels[0] > 0, classes > 0)


def test_row_numbers_are_no_series(paste, tmp_path):
    """Those that pandas writes into a file of its own."""
    pd.DataFrame({"load": np.arange(9.0)}).to_csv(tmp_path / "s.csv")
    script = module(paste((ROOT / "examples/forecast.py").read_text(), "singlegpu", "images"))
    args = argparse.Namespace(series=tmp_path / "s.csv", skip=[])
    assert script.read_series(args).shape == (9, 1)


LOSS = 'return loss, {"loss": loss * len(targets), "mae": errors, "count": len(targets)}'
DATA = "return [Subset(data, part.indices) for part in parts]"
UNREADABLE = """
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return len(data)
        def __getitem__(self, index):
            if index == 77:
                raise OSError("sample 77 cannot be read")
            return data[index]
    return Data(), data"""
AT_LAST = f"""steps = globals().setdefault("steps", [])
    steps.append(loss)
    errors = errors if len(steps) < 20 else math.inf
    {LOSS.replace("loss * len(targets)", "errors")}"""
ORDER = "def training_order(data, args, epoch):\n    return np.arange(100)\n\n\ndef create_model"
NO_COUNT = "batch_loss must return sums, among them loss and count"
SAME_SUMS = "batch_loss must return the same sums each time"
MISTAKES = {  # name: (text of the table's section, what stands there instead, the message)
    "no sums": (LOSS, "return loss", "0-d tensor"),
    "no count": (LOSS, 'return loss, {"loss": loss}', NO_COUNT),
    "three values": (LOSS, LOSS + ", 1", "too many values to unpack"),
    "other sums": (LOSS, LOSS.replace('"mae"', "str(loss)"), SAME_SUMS),
    "vector": (LOSS, LOSS.replace("errors", "targets"), "only one element tensors"),
    "infinite": (LOSS, LOSS.replace("loss * len(targets)", "math.inf"), "not finite at step 1"),
    "infinite at last": (LOSS, AT_LAST, "the loss is not finite at step 20"),
    "short order": ("def create_model", ORDER, "training_order must return 480 indices, not 100"),
    "sample": (DATA, UNREADABLE, "sample 77 cannot be read"),
    "too little": ("[0.8, 0.2]", "[10, 590]", "samples are too few"),
    "no flag": ('("--table", ', '("--tables", ', "no attribute 'table'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_a_band_are_told(attempt, table_band, paste, tmp_path, name):
    """Each ends the run with an error that says what to change, as soon with workers as without."""
    text, mistake, message = MISTAKES[name]
    assert text in table_band
    seconds = []
    for (folder, processes), workers in zip(LAUNCHES[:2], (0, 2)):
        script = paste(table_band.replace(text, mistake), folder)
        words = ("--num_workers", workers, "--snapshot", tmp_path / "s.pt")
        start = time.monotonic()
        status, _, err = attempt(script, *words, processes=processes)
        seconds.append(time.monotonic() - start)
        assert status and message in err and not (tmp_path / "s.pt").exists(), err
    assert seconds[1] < seconds[0] + 25, "workers delay the error"


def test_flags_named_like_results(run, table_band, paste, tmp_path):
    """They are none in the summary and in the tables of report.py."""
    line, log = '    parser.add_argument("--table"', tmp_path / "log.jsonl"
    names = '    parser.add_argument("--val_names", nargs="+", default=["a"])\n'
    part = '    parser.add_argument("--val_part", type=float, default=0.2)\n'
    for folder, processes in LAUNCHES[:2]:
        script = paste(replaced(table_band, {line: names + part + line}), folder)
        out = run(script, "--max_steps", 20, "--log", log, processes=processes)
        assert "| val_loss |" in out and "val_names" not in out and "val_part" not in out
        tables = "".join(re.findall(r"^\|.*", run("report.py", log), re.M))
        assert "val_loss" in tables and "val_part" not in tables
        log.unlink()


def test_batches_in_which_nothing_counts(run, table_band, paste):
    """A run goes on if a process has no labelled sample in a batch, or none at all."""
    nothing = 'return 0 * loss, {"loss": 0 * loss, "mae": 0 * errors, "count": 0}'
    for folder, processes in LAUNCHES[:2]:
        script = paste(replaced(table_band, {LOSS: nothing}), folder)
        out = run(script, "--epochs", 1, processes=processes)
        assert re.search(r"^step 20  seconds", out, re.M), out


def test_a_parameter_without_gradient(attempt, run, table_band, paste, tmp_path):
    """DDP says so. One process trains without it, and so do two with find_unused_parameters."""
    unused = "\n    model.unused = nn.Parameter(torch.ones(1))\n    return model"
    last = "nn.Linear(16, 1))"
    changes = {"return nn.Sequential(": "model = nn.Sequential(", last: last + unused}
    for folder, processes in LAUNCHES[:2]:
        script, log = paste(replaced(table_band, changes), folder), tmp_path / f"{folder}.jsonl"
        status, _, err = attempt(script, "--log", log, processes=processes)
        assert (status != 0) == (processes > 1) == ("find_unused_parameters=True" in err), err
    old = "gradient_as_bucket_view=True"
    new = {old: f"{old}, find_unused_parameters=True"}
    script.write_text(replaced(script.read_text(), new))
    run(script, "--log", log, processes=2)
    np.testing.assert_allclose(curve(log), curve(tmp_path / "singlegpu.jsonl"), rtol=1e-5)


def test_weights_that_are_not_finite(refused, run, table_band, paste, tmp_path):
    """They are not saved over good ones."""
    rate = re.search(r"return .1 \+ math.cos.*", table_band)[0]
    for folder, processes in LAUNCHES[:2]:
        snapshot = tmp_path / f"{folder}.pt"
        run(
            paste(table_band, folder),
            "--max_steps",
            20,
            "--snapshot",
            snapshot,
            processes=processes,
        )
        before = snapshot.read_bytes()
        script = paste(table_band.replace(rate, "return math.inf"), folder)
        words = (script, "--max_steps", 21, "--snapshot", snapshot)
        refused("weights are not finite", *words, processes=processes)
        assert snapshot.read_bytes() == before


AUGMENTED = """
    class Augmented(torch.utils.data.Dataset):
        def __len__(self):
            return len(data)
        def __getitem__(self, index):
            numbers = [np.random.random(), random.random(), torch.rand(()).item()]
            with open(f"FOLDER/{os.getpid()}", "a") as file:
                print(*numbers, file=file)
            return data[index][0] + sum(numbers), data[index][1]
    return Augmented(), data"""


def test_augmentation_differs_and_is_drawn_again(run, table_band, paste, tmp_path):
    """Drawn by any library, it differs between processes, and a resumed run draws the same."""
    band = table_band.replace(DATA, AUGMENTED.replace("FOLDER", str(tmp_path / "drawn")))
    band = re.sub("return .1 .*", "return 1", band)
    order = "def training_order(data, args, epoch):\n    return np.arange(len(data))\n\n\n"
    band = band.replace("def create_model", order + "def create_model")
    (tmp_path / "drawn").mkdir()
    script = paste(band, "multigpu")
    for steps, name in ((10, "whole"), (5, "resumed"), (10, "resumed")):
        words = ("--max_steps", steps, "--snapshot", tmp_path / f"{name}.pt")
        run(script, *words, processes=2)
    assert_same_weights(tmp_path / "whole.pt", tmp_path / "resumed.pt")
    drawn = [set(path.read_text().split()) for path in (tmp_path / "drawn").iterdir()]
    assert len(drawn) == 6 and all(drawn)
    # Three numbers a sample, and those of the one sample that create_model looks at.
    assert len(set.union(*drawn)) == 3 * (2 * 2 * 5 * 12 + 1), "two processes drew the same"
