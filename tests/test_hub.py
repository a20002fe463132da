"""From a data set in the format of the Hub to tokens, a GPT, and a folder that others load."""

import argparse
import json
import os
import pickle
import re
import subprocess
import sys

import datasets
import numpy as np
import pytest
import torch
from conftest import ENVIRONMENT, ROOT, SCRIPTS, call, load, module, rows, wait_for
from tokenizers import Tokenizer
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM, AutoTokenizer

TO_HF = "examples/to_hf.py"
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


def assert_same_logits(script, snapshot, out):
    """transformers computes from a folder what the script's model computes from the snapshot."""
    settings = argparse.Namespace(**snapshot["settings"])
    model = module(script).create_model(settings, None).eval()
    model.load_state_dict(snapshot["model"])
    theirs = AutoModelForCausalLM.from_pretrained(out).eval()
    torch.manual_seed(0)
    tokens = torch.randint(settings.vocab_size, (3, settings.seq_len))
    with torch.no_grad():
        expected, found = model(tokens), theirs(tokens).logits
    assert expected.std() > 0.05, "the logits differ from token to token"
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    return AutoTokenizer.from_pretrained(out)


def merged(path):
    """Returns a snapshot of shards as PyTorch's own command merges them."""
    if path.is_dir():
        [newest] = path.glob("step-*")
        dcp_to_torch_save(newest, f"{path}.pt")
        path = f"{path}.pt"
    return load(path)


SCRIPTS_OF_GPT = [name for name in SCRIPTS if re.search(r"(?<!quantize)/gpt", name)]


@pytest.mark.parametrize("script", SCRIPTS_OF_GPT)
def test_from_tokens_to_transformers(logged, run, texts, tmp_path, script):
    """All scripts train on the tokens, with their vocabulary, whatever --vocab_size says.

    transformers has the logits and the tokenizer of the snapshot.
    """
    flags = ("--column", "content", "--vocab_size", 300, "--out", tmp_path / "tokens")
    run(TOKENS, texts, *flags)
    snapshot, out = tmp_path / "snapshot", tmp_path / "out"
    more = ("--dataset", tmp_path / "tokens", "--vocab_size", 5, "--snapshot", snapshot)
    processes = 1 if script.startswith("singlegpu") else 2
    row = rows(logged(script, *GPT, *more, processes=processes))[-1]
    assert row["vocab_size"] == 300 and row["step"] == 8
    assert row["train_loss"] == pytest.approx(np.log(300), rel=0.2)

    done = call(module(TO_HF), snapshot, out)
    assert done.returncode == 0, done.stderr
    tokenizer = assert_same_logits(script, merged(snapshot), out)
    ids = np.load(tmp_path / "tokens/val.npy")[:60].tolist()
    assert tokenizer.encode(tokenizer.decode(ids)) == ids, "ends of texts, too"
    assert tokenizer.eos_token == END and tokenizer.eos_token_id in ids
    assert tokenizer.model_max_length == 16


def test_bytes_to_transformers(run, data, tmp_path):
    """Of a GPT on the bytes of a text, a token is a byte."""
    words = ("--dataset", data / "text.txt", "--snapshot", tmp_path / "gpt.pt")
    run("singlegpu/gpt.py", *GPT, *words)
    done = call(module(TO_HF), tmp_path / "gpt.pt", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    tokenizer = assert_same_logits("singlegpu/gpt.py", load(tmp_path / "gpt.pt"), tmp_path / "out")
    text = "def é(x):\n\treturn  x\x00\x7f  \U0001f600"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_what_to_hf_refuses(tmp_path):
    """A snapshot of another model, tokens that have moved, and shards that would run code."""
    to_hf, path, out = module(TO_HF), tmp_path / "a.pt", tmp_path / "out"
    sizes = {"vocab_size": 300, "seq_len": 8, "dataset": "moved", "dropout": 0.0}
    torch.save({"model": {"fc.weight": torch.ones(2)}, "settings": {}}, path)
    assert "is no snapshot of a GPT" in call(to_hf, path, out).stderr
    torch.save({"model": {"positions.weight": torch.ones(8, 2)}, "settings": sizes}, path)
    assert "--tokens must name the folder" in call(to_hf, path, out).stderr
    assert "has no complete snapshot" in call(to_hf, tmp_path, out).stderr
    (tmp_path / "settings.json").write_text("{}")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(os.system))
    with pytest.raises(pickle.UnpicklingError, match="and should not"):
        to_hf.read_snapshot(tmp_path)
    # From protocol 4 on, a name may have dots: a module of the list that imports os has os.system.
    names = [b"torch.distributed.checkpoint.metadata", b"os.system"]
    by_dots = b"\x80\x04" + b"".join(b"\x8c%c%b" % (len(name), name) for name in names) + b"\x93."
    assert pickle.loads(by_dots) is os.system
    (tmp_path / ".metadata").write_bytes(by_dots)
    with pytest.raises(pickle.UnpicklingError, match="and should not"):
        to_hf.read_snapshot(tmp_path)


PAGE = (ROOT / "examples/README.md").read_text()


def python_blocks(title):
    """Returns the blocks of Python in a section of the page."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)


def test_a_trace_of_kernels(run, changed, data, tmp_path):
    """The lines of the page record two steps of each process."""
    above, below = python_blocks("Which kernels take the time")
    loop, bar = "    for step in range(start_step + 1, num_steps + 1):\n", "        bar.update()\n"
    copy = changed("multigpu/gpt.py", {loop: above + loop, bar: bar + below})
    run(copy, *GPT, "--dataset", data / "text.txt", processes=2, cwd=tmp_path)
    traces = [json.loads(path.read_text()) for path in tmp_path.glob("trace_*.json")]
    assert len(traces) == 2
    for trace in traces:
        names = [event.get("name") for event in trace["traceEvents"]]
        assert names.count("aten::embedding") == 2 * 1, "positions are no call"
