"""The three text.py, run as a user runs them, and the parts of singlegpu/text.py that have a right answer."""

import argparse
import csv
import json
import math
import os
import random
import signal
import sys
import time

import numpy as np
import pytest
import torch
from conftest import LAUNCHES, ROOT, assert_refused, assert_same_weights, rows, wait_for

sys.path.insert(0, str(ROOT / "singlegpu"))
import text  # noqa: E402

SMALL = ("--seq_len", "64", "--threads", "1", "--batch_size", "24")
GOOD, BAD = "good fine lovely superb".split(), "bad awful dull boring".split()


def write_texts(folder, split, num_texts, label=lambda number: number % 2, seed=0, more=()):
    """A csv of texts whose label the words tell; `more` are rows as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(seed)
    with open(folder / f"{split}.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for number in range(num_texts):
            words = generator.choices("the a film plot actor scene".split(), k=generator.randint(3, 40))
            words += generator.choices(GOOD if number % 2 else BAD, k=2)
            generator.shuffle(words)
            writer.writerow([" ".join(words), label(number)])
        writer.writerows(more)


@pytest.fixture(scope="session")
def reviews(tmp_path_factory):
    """A --data_dir whose `imdb` holds 480 training and 101 test texts, one of them empty, some of unknown words."""
    folder = tmp_path_factory.mktemp("reviews")
    write_texts(folder / "imdb", "train", 479, more=[["", 1]])
    write_texts(folder / "imdb", "test", 99, seed=1, more=[["", 0], ["zebra " * 5, 1]])
    return folder


def namespace(**changes):
    defaults = {"seed": 1, "batch_size": 12, "seq_len": 64, "max_steps": None, "model": "transformer", "size": "small"}
    return argparse.Namespace(**{**defaults, "dataset": "imdb", "dropout": 0.0, **changes})


@pytest.mark.parametrize("model", ["nbow", "transformer"])
def test_one_loss_curve(run, reviews, tmp_path, model):
    """Any number of processes and of accumulated parts: the same losses to rounding."""
    pytest.importorskip("datasets")
    curves = []
    for folder, processes, parts in LAUNCHES:
        log = tmp_path / f"{folder}{processes}{parts}.csv"
        arguments = [*SMALL, "--model", model, "--dataset", "imdb", "--data_dir", reviews, "--epochs", "2"]
        status, out, err = run(
            folder, *arguments, "--learning_rate", "1e-4", "--grad_accum_steps", parts, "--log", log,
            processes=processes, script="text.py",
        )  # fmt: skip
        assert status == 0, err
        count = math.prod(processes) if isinstance(processes, tuple) else processes
        assert f"= {24 // count // parts} x {count} process" in out and "480 + 101 texts" in out
        logged = rows(log)
        assert sorted((row["epoch"], row["rank"]) for row in logged) == [(e, r) for e in range(2) for r in range(count)]
        names = ("train_loss", "train_acc", "val_loss", "val_acc", "best_acc", "best_epoch")
        curves.append([[row[name] for name in names] for row in logged if row["rank"] == 0])
    for curve in curves[1:]:
        np.testing.assert_allclose(curve, curves[0], rtol=1e-5)


@pytest.mark.parametrize("folder, processes", [("singlegpu", 1)])
def test_resume_is_bit_identical(start, run, reviews, tmp_path, folder, processes):
    """Stopped at a random step and started again, a run ends with the weights of the undisturbed one."""
    whole, cut = tmp_path / "whole.pt", tmp_path / "cut.pt"
    pytest.importorskip("datasets")
    command = [*SMALL, "--model", "transformer", "--dataset", "imdb", "--data_dir", reviews, "--epochs", "4"]
    command += ["--dropout", "0.2", "--snapshot_every", "5"]
    status, _, err = run(folder, *command, "--snapshot", whole, processes=processes, script="text.py")
    assert status == 0, err
    job = start(folder, *command, "--snapshot", cut, processes=processes, script="text.py")
    wait_for(cut.exists)
    time.sleep(random.uniform(0, 0.5))
    os.kill(job.process.pid, signal.SIGTERM)
    _, out, err = job.wait(60)
    assert "stopped by a signal" in out, err
    state = torch.load(cut, weights_only=True)["state"]
    status, out, err = run(folder, *command, "--snapshot", cut, processes=processes, script="text.py")
    assert status == 0 and f"epoch {state['epoch']}, step {state['step']}" in out, err
    assert_same_weights(whole, cut)
    best = [torch.load(file, weights_only=True)["state"]["best"] for file in (whole, cut)]
    assert best[0] == best[1] and best[0][0] > 0.25


def test_sizes():
    """The parameters of both sizes, with the whole vocabulary: the studies name about 2 and 10 million."""
    for size, d_model, feedforward, layers, millions in (("small", 128, 512, 2, 3), ("large", 256, 1024, 4, 8)):
        model = text.create_model(namespace(size=size, seq_len=256), text.VOCAB_SIZE)
        block = 4 * d_model**2 + 2 * d_model * feedforward + 4 * d_model
        count = (text.VOCAB_SIZE + 256) * d_model + layers * block + 2 * d_model + 2 * d_model + 2
        assert sum(parameter.numel() for parameter in model.parameters()) == count
        assert round(count / 1e6) == millions


@pytest.mark.parametrize("model", ["nbow", "transformer"])
def test_padding_changes_nothing(model):
    """A text's logits do not depend on its batch mates, however long those are; every token of its own counts."""
    torch.manual_seed(0)
    model = text.create_model(namespace(model=model), 100).eval()
    lengths = torch.tensor([3, 60, 17])
    tokens = torch.randint(2, 100, (3, 60)) * (torch.arange(60) < lengths[:, None])
    together = model(tokens, lengths)
    for row, length in enumerate(lengths.tolist()):
        alone = model(tokens[row : row + 1, :length], lengths[row : row + 1])
        torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-6)
        changed = tokens[row : row + 1, :length].clone()
        changed[0, -1] = 2 if changed[0, -1] != 2 else 3
        assert not torch.allclose(model(changed, lengths[row : row + 1]), alone, rtol=1e-5, atol=1e-6)


def test_batches_of_similar_length():
    """An epoch takes each text once, whatever the number of processes; a batch needs little padding."""
    lengths = np.random.default_rng(0).integers(5, 300, 2501)
    ends = np.concatenate(([0], lengths.cumsum()))
    epochs = [text.similar_batches(ends, namespace(), epoch) for epoch in (0, 1)]
    for batches in epochs:
        assert batches.shape == (208, 12) and len(np.unique(batches)) == 208 * 12
        seen = np.minimum(lengths[batches], 64)
        assert seen.sum() > 0.95 * (seen.max(1) * 12).sum()
        assert abs(np.corrcoef(seen.mean(1)[1:], seen.mean(1)[:-1])[0, 1]) < 0.3, "long and short ones alternate"
    assert (np.sort(epochs[0], 1)[0] != np.sort(epochs[1], 1)[0]).any()
    assert text.similar_batches(ends, namespace(max_steps=7), 0).shape == (7, 12)


def test_tokens(run_many, tmp_path):
    """The vocabulary is that of the training texts; empty texts are an unknown word; tokens are kept and mapped."""
    pytest.importorskip("datasets")
    data = tmp_path / "data"
    write_texts(data / "imdb", "train", 60, more=[["", 1], ["Unique words occur once", 0]])
    write_texts(data / "imdb", "test", 20, seed=1, more=[["", 0], ["zebra GOOD", 1]])
    arguments = ["--dataset", "imdb", "--data_dir", data, *SMALL, "--max_steps", "2", "--epochs", "1"]
    first, again = run_many("singlegpu/text.py", [arguments, arguments], HF_HOME=str(tmp_path / "cache"))
    assert first[0] == again[0] == 0, first[2] + again[2]
    assert first[1].split("epoch 0")[0] == again[1].split("epoch 0")[0]
    folder = data / "imdb_tokens"
    vocabulary = json.loads((folder / "vocabulary.json").read_text())["model"]["vocab"]
    assert set(vocabulary) == {"[PAD]", "[UNK]", *GOOD, *BAD, *"the a film plot actor scene".split()}
    splits = text.read_texts(namespace(data_dir=str(data)))
    ids, ends, labels = splits[1]
    assert splits[2] == len(vocabulary) and isinstance(ids, np.memmap)
    texts = [ids[start:end].tolist() for start, end in zip(ends[:-1], ends[1:])]
    assert len(texts) == 22 and texts[-2] == [1] and texts[-1] == [1, vocabulary["good"]]
    assert labels.tolist() == [0, 1] * 10 + [0, 1]


def test_bad_input(run_many, tmp_path):
    """Each mistake: status 2, one line on stderr that says what is wrong, nothing left behind."""
    pytest.importorskip("datasets")
    write_texts(tmp_path / "labels" / "imdb", "train", 50, label=lambda number: number % 3)
    write_texts(tmp_path / "labels" / "imdb", "test", 50)
    write_texts(tmp_path / "negative" / "imdb", "train", 50)
    write_texts(tmp_path / "negative" / "imdb", "test", 50, label=lambda number: -1)
    write_texts(tmp_path / "named" / "imdb", "train", 50, label=lambda number: "pos")
    write_texts(tmp_path / "named" / "imdb", "test", 50, label=lambda number: "neg")
    write_texts(tmp_path / "single" / "imdb", "train", 50)
    for split in ("train", "test"):
        (tmp_path / "columns" / "imdb").mkdir(parents=True, exist_ok=True)
        (tmp_path / "columns" / "imdb" / f"{split}.csv").write_text("words,class\na,1\n")
    (tmp_path / "empty" / "imdb").mkdir(parents=True)
    damaged = tmp_path / "damaged" / "imdb_tokens"
    damaged.mkdir(parents=True)
    (damaged / "vocabulary.json").write_text("{}")
    cases = {
        ("--data_dir", tmp_path / "labels"): "labels from 0 to 2 instead of 0 to 1",
        ("--data_dir", tmp_path / "negative"): "labels from -1 to -1 instead of 0 to 1",
        ("--data_dir", tmp_path / "named"): "labels are",
        ("--data_dir", tmp_path / "single"): "no columns `text` and `label`",
        ("--data_dir", tmp_path / "columns"): "no columns `text` and `label`",
        ("--data_dir", tmp_path / "empty"): "remove what is damaged",
        ("--data_dir", tmp_path / "none"): "login node",
        ("--data_dir", tmp_path / "damaged"): "remove what is damaged",
        ("--dataset", "sst2"): "invalid choice",
        ("--dataset", "synthetic", "--batch_size", "20001"): "20000 training texts",
        ("--dataset", "synthetic", "--seq_len", "0"): "--seq_len 0",
        ("--dataset", "synthetic", "--grad_accum_steps", "5"): "take 20 or 25",
    }
    results = run_many(
        "singlegpu/text.py",
        [["--dataset", "imdb", *SMALL, *case] for case in cases],
        HF_HOME=str(tmp_path / "cache"),
        HF_HUB_OFFLINE="1",
    )
    assert_refused(results, cases)
    left = sorted(path.name for path in tmp_path.glob("*/*") if path.parent.name != "cache")
    assert left == ["imdb"] * 6 + ["imdb_tokens"]


def test_real_imdb(run, real_data, tmp_path):
    """Two epochs of the bag of words on the real reviews; the second start needs no tokenizer."""
    pytest.importorskip("datasets")
    data, log = tmp_path / "data", tmp_path / "log.csv"
    data.mkdir()
    (data / "imdb").symlink_to(real_data.resolve() / "imdb")
    arguments = ["--dataset", "imdb", "--data_dir", data, "--threads", "1", "--log", log]
    status, _, err = run("multigpu", *arguments, "--epochs", "2", processes=2, script="text.py")
    assert status == 0, err
    assert rows(log)[-1]["val_acc"] > 0.84 and rows(log)[-1]["best_acc"] >= rows(log)[-1]["val_acc"]
    (data / "imdb").unlink()
    status, _, err = run("singlegpu", *arguments, "--epochs", "1", "--max_steps", "5", script="text.py")
    assert status == 0, err
