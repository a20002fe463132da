"""From a data set in the format of the Hub to tokens, a GPT, and a folder that others load."""

import json
import re
import subprocess
import sys

import datasets
import numpy as np
import pytest
from conftest import ENVIRONMENT, ROOT, SCRIPTS, rows, wait_for
from tokenizers import Tokenizer

TOKENS = "examples/tokens.py"
GPT = "--d_model 16 --n_heads 2 --num_layers 2 --seq_len 16 --batch_size 12 --max_steps 8".split()
END = "<|endoftext|>"


def write_texts(folder, num_rows):
    """Writes a data set as those of the Hub: Parquet files of the splits train and test."""
    generator = np.random.default_rng(0)
    (folder / "data").mkdir(parents=True)
    for split, size in (("train", num_rows), ("test", 50)):
        words = generator.integers(0, 50, (size, 12))
        texts = [" ".join(f"word{word}" for word in row) + " é\n" for row in words]
        texts[3], texts[5] = "", f"{END} is a text's own word"  # an empty row, as wikitext has
        data = datasets.Dataset.from_dict({"content": texts, "id": range(size)})
        data.to_parquet(folder / f"data/{split}-00000-of-00001.parquet")
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("hub") / "texts", 2500)


def texts_in(folder):
    """Returns the texts that are in the tokens of a folder, in order, and the tokens themselves."""
    told = json.loads((folder / "tokens.json").read_text())
    tokens = np.concatenate([np.load(folder / f"{name}.npy") for name in ("train", "val")])
    ends = np.flatnonzero(tokens == told["end_of_text_id"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    parts = np.split(tokens, ends + 1)[:-1]
    return [tokenizer.decode(part[:-1].tolist(), skip_special_tokens=False) for part in parts]


def test_tokens_are_the_texts(run, texts, tmp_path):
    """Of Parquet files in a folder or by name, of save_to_disk(), of JSON and text; all as it was.

    An end-of-text token follows each text. Its name in a text is text.
    """
    train = datasets.load_dataset(str(texts), split="train")
    train.save_to_disk(tmp_path / "saved")
    train.to_json(tmp_path / "rows.jsonl")
    written = [text for text in train["content"] if text]
    (tmp_path / "text.txt").write_text("".join(written), newline="")
    parquet = "texts/data/train-00000-of-00001.parquet"
    (tmp_path / "texts").symlink_to(texts)
    for source in ("texts", "saved", "rows.jsonl", parquet, "text.txt"):
        words = (TOKENS, source, "--column", "content", "--vocab_size", 300, "--out", "out")
        run(*words, cwd=tmp_path)
        expected = ["".join(written)] if source == "text.txt" else written
        assert texts_in(tmp_path / "out") == expected, source
        train = np.load(tmp_path / "out/train.npy", mmap_mode="r")
        told = json.loads((tmp_path / "out/tokens.json").read_text())
        assert train.dtype == np.uint16 and len(train) == told["train_tokens"]
        assert max(train) < told["vocab_size"] == 300 and told["texts"] == len(expected)
        names = {path.name for path in (tmp_path / "out").iterdir()}
        assert names == {"train.npy", "val.npy", "tokenizer.json", "tokens.json"}
        (tmp_path / "out").rename(tmp_path / f"out of {source.replace('/', ' ')}")


def test_tokens_of_two_splits_by_a_tokenizer(run, refused, texts, tmp_path):
    """Of a tokenizer that cuts texts. Its ids need 32 bits. Other flags are then refused."""
    vocab = {"[UNK]": 0} | {f"word{number}": 70_000 + number for number in range(50)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    made = {"version": "1.0", "model": model, "truncation": cut, "pre_tokenizer": {}}
    made["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    words = [TOKENS, texts, "--column", "content", "--val_split", "test", "--tokenizer", tmp_path]
    words += ["--multiple_of", 64, "--out", tmp_path / "out"]
    out = run(*words)
    told = json.loads((tmp_path / "out/tokens.json").read_text())
    assert told["vocab_size"] == 70_080 and told["texts"] == 2499 + 49
    val = np.load(tmp_path / "out/val.npy")
    assert val.dtype == np.uint32 and len(val) == 48 * (12 + 1 + 1) + 6 + 1
    assert run(*words) == out, "it is complete"
    refused("made with other flags", *words, "--multiple_of", 1)


def test_tokens_after_a_kill(start, run, texts, tmp_path):
    """The same command goes on, and the files are those of an undisturbed run."""
    write_texts(tmp_path / "long", 40_000)
    words = [TOKENS, tmp_path / "long", "--column", "content", "--vocab_size", 300, "--out"]
    job = start(*words, tmp_path / "cut")
    progress = tmp_path / "cut/train.progress.json"
    wait_for(lambda: progress.exists() and json.loads(progress.read_text())["lists"] > 4)
    job.end()
    done = json.loads(progress.read_text())["texts"]
    assert 0 < done < 39_999 and not (tmp_path / "cut/tokens.json").exists()
    with open(tmp_path / "cut/train.part", "ab") as file:
        file.write(b"half of a list")
    for folder in ("cut", "whole"):
        run(*words, tmp_path / folder)
    for name in ("train.npy", "val.npy", "tokens.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_what_tokens_refuses(refused, texts, tmp_path):
    """Each has a line: a split, a column, a file, a kind of file."""
    (tmp_path / "a.xyz").write_text("")
    for told, *words in (
        ("cannot load the split other", texts, "--split", "other"),
        ("there is no column text: --column is one of ['content', 'id']", texts),
        ("there is no file none.txt", "none.txt"),
        ("a.xyz is none of: *.txt *.parquet", "a.xyz"),
    ):
        refused(told, TOKENS, *words, cwd=tmp_path)


@pytest.mark.parametrize("words", ["nobody/such_texts", "{texts} --tokenizer nobody/such"])
def test_tokens_without_a_network(texts, tmp_path, words):
    words = f"{words} --column content".format(texts=texts).split()
    env = ENVIRONMENT | {"HF_HUB_OFFLINE": "1"}  # which is read when the library is imported
    command = [sys.executable, ROOT / TOKENS, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "this needs a network" in done.stderr


@pytest.mark.parametrize("script", [name for name in SCRIPTS if re.search(r"\w/gpt", name)])
def test_the_vocabulary_is_that_of_the_tokens(logged, run, texts, tmp_path, script):
    """All scripts of a GPT read it, whatever --vocab_size says, and train on the tokens."""
    if script.startswith("quantize"):
        return
    flags = ("--column", "content", "--vocab_size", 300, "--out", tmp_path / "tokens")
    run(TOKENS, texts, *flags)
    more = (
        "--dataset",
        tmp_path / "tokens",
        "--vocab_size",
        5,
        "--snapshot",
        tmp_path / "snapshot",
    )
    processes = 1 if script.startswith("singlegpu") else 2
    row = rows(logged(script, *GPT, *more, processes=processes))[-1]
    assert row["vocab_size"] == 300 and row["step"] == 8
    assert row["train_loss"] == pytest.approx(np.log(300), rel=0.2)
