"""The parts of gpt.py, text.py and translation.py that have a right answer."""

import argparse
import json
import math
import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import curve, module

gpt, text, translation = (module(f"singlegpu/{name}.py") for name in ("gpt", "text", "translation"))
tokenizer = SimpleNamespace(get_vocab_size=lambda: 30)
KNOWN = SimpleNamespace(classes=range(4), tokenizers=[tokenizer] * 2)  # what a model asks of data


def namespace(**changes):
    """The arguments that the functions below read."""
    found = {"seed": 1, "batch_size": 12, "seq_len": 16, "vocab_size": 64, "d_model": 32}
    found |= {"n_heads": 4, "num_layers": 2, "dropout": 0.0, "epochs": 1, "num_workers": 0}
    found |= {"model": "transformer", "size": "small", "precision": "fp32", "dataset": "words"}
    return argparse.Namespace(**found | changes)


def test_gpt(tmp_path):
    """It has the parameters of GPT-2, and finds at first all tokens equally likely.

    Sequences of a text do not overlap; a target is the next token.
    """
    sizes = {"vocab_size": 50257, "d_model": 768, "n_heads": 12, "num_layers": 12}
    with torch.device("meta"):
        model = gpt.GPT(namespace(**sizes, seq_len=1024))
    assert sum(p.numel() for p in model.parameters()) == 124_356_864  # GPT-2 has biases, too
    torch.manual_seed(0)
    model = gpt.GPT(namespace(vocab_size=512, d_model=128)).eval()
    for name in ("train", "val"):
        np.save(tmp_path / f"{name}.npy", np.arange(512, dtype=np.uint16))
    data, _ = gpt.read_data(namespace(dataset=str(tmp_path)))
    [[ids]] = gpt.create_loader(data, [[*range(len(data))]], namespace())
    tokens, targets = ids.long()[:, :-1], ids.long()[:, 1:]
    assert tokens.shape == (31, 16) and torch.equal(tokens + 1, targets)
    assert len(tokens.unique()) == 31 * 16
    assert model(tokens, targets).item() == pytest.approx(math.log(512), rel=0.01)


def test_gpt_reads_tokens_and_writes_text(run, tmp_path):
    """Of a folder with --vocab_size ids, and of a text, whose last tenth is for validation."""
    ids = np.random.default_rng(0).integers(0, 300, 2_000, np.uint16)
    for name in ("train", "val"):
        np.save(tmp_path / f"{name}.npy", ids)
    words = "--d_model 16 --n_heads 2 --num_layers 1 --seq_len 8 --batch_size 4 --max_steps 5"
    words = (*words.split(), "--vocab_size", 512)
    log = tmp_path / "log.jsonl"
    out = run("singlegpu/gpt.py", *words, "--dataset", tmp_path, "--sample", 40, "--log", log)
    assert 300 < math.exp(curve(log)[0, 1]) < 520
    assert len(drawn := json.loads(out.splitlines()[-1])) == 40 and 300 < max(drawn) < 512
    (tmp_path / "a.txt").write_bytes(b"text " * 999)
    out = run("singlegpu/gpt.py", *words[:-2], "--dataset", tmp_path / "a.txt", "--sample", 40)
    assert re.search(r"\|\n.{20,160}\n$", out, re.S), "after the table"
    train, val = gpt.read_data(namespace(dataset=str(tmp_path / "a.txt"), seq_len=9))
    assert (len(train), len(val)) == ((4996 - 500) // 9, 498 // 9)


TEXTS = [(text, "nbow"), (text, "transformer"), (translation, "lstm"), (translation, "transformer")]


@pytest.mark.parametrize(("script", "model"), TEXTS)
def test_padding_changes_nothing(script, model):
    """The loss of a batch is the mean over its samples alone. Each word counts, and no padding.

    So it is over processes, too, whose words differ in number.
    """
    torch.manual_seed(0)
    lengths = torch.tensor([[14, 9, 9, 5, 3], [6, 12, 4, 3, 8]])  # of sources, and of targets
    tokens = torch.randint(4, 12, (2, 5, 14)) * (torch.arange(14) < lengths[:, :, None])
    batch = [tokens[0], torch.arange(5) % 4]
    if script is translation:
        batch = [tokens[0], lengths[0].tolist(), tokens[1]]
    args = namespace(model=model)
    network = script.create_model(args, KNOWN).eval()
    loss, together = script.batch_loss(network, batch, args)
    losses, sums = [], Counter()
    for row in range(5):
        sample = [side[row : row + 1] for side in batch]
        for place, side in enumerate(sample):
            if torch.is_tensor(side) and side.ndim == 2:
                sample[place] = side[:, : side.count_nonzero()]
        part, alone = script.batch_loss(network, sample, args)
        losses.append(part)
        sums.update(alone)
    torch.testing.assert_close(loss, sum(losses) / 5, rtol=1e-5, atol=0)
    torch.testing.assert_close(together, dict(sums), rtol=1e-5, atol=0)
    tokens[0, 0, 13] = 12
    assert script.batch_loss(network, batch, args)[0] != loss


@pytest.mark.parametrize("model", ["gpt", "lstm", "transformer"])
def test_no_word_sees_those_after_it(model):
    """A later token changes no earlier logit."""
    torch.manual_seed(0)
    args, tokens = namespace(model=model), torch.randint(4, 12, (1, 14))
    network = gpt.GPT(args) if model == "gpt" else translation.create_model(args, KNOWN)
    source = [] if model == "gpt" else [tokens, [14]]
    changed = tokens.clone()
    changed[0, 5] = 12
    before, after = (network.eval()(*source, each)[0] for each in (tokens, changed))  # (T, V)
    torch.testing.assert_close(before[:5], after[:5], rtol=1e-6, atol=1e-6)
    assert (before[5:] != after[5:]).any(1).all()


@pytest.mark.parametrize("script", [text, translation])
def test_batches_of_similar_lengths(data, script):
    """An epoch takes each text once, in batches of little padding, and cuts none off."""
    args = namespace(dataset="tables", data_dir=str(data), source="number", target="name")
    train_data, _ = script.read_data(args)
    order = script.training_order(train_data, np.random.default_rng(0))
    assert sorted(order) == [*range(600)]
    lengths = train_data.tensors[0].count_nonzero(1)[order].view(50, 12)
    assert (lengths.diff(dim=1) < 0).any(), "no process has all the long texts"
    batches = list(script.create_loader(train_data, order.reshape(50, 12).tolist(), namespace()))
    num_words = sum(batch[0].count_nonzero() for batch in batches)
    assert num_words == train_data.tensors[0].count_nonzero()
    assert num_words > 0.95 * sum(batch[0].numel() for batch in batches)


class Oracle:
    """Translates the numbers of translation.py's own texts, in which it takes a word for another.

    Who decodes the first T tokens gets, as the likeliest tokens, those of the translation.
    """

    def __init__(self, tokenizers, wrong):
        self.source, self.target = tokenizers
        self.names = [wrong.get(name, name) for name in translation.DIGITS]

    def encode(self, sources, lengths):
        assert lengths == sources.count_nonzero(1).tolist()
        texts = [text.split() for text in self.source.decode_batch(sources.tolist())]
        texts = [" ".join(self.names[int(digit)] for digit in text) for text in texts]
        return torch.from_numpy(translation.encode(texts, self.target))[:, 1:]  # without [START]

    def decode(self, tokens, target):
        return torch.nn.functional.one_hot(tokens[:, : target.shape[1]].long())  # (B, T, V)

    def head(self, logits):
        return logits


def test_bleu(capsys):
    """A perfect translation has 100; each unknown word counts as one wrong word."""
    args, scores = namespace(dataset="synthetic"), []
    _, val_data = translation.read_data(args)
    for wrong in {}, {"two": "unknown"}, {"two": "three"}:
        translation.finish(Oracle(val_data.tokenizers, wrong), val_data, args, "cpu")
        scores.append(float(re.search(r"^BLEU ([\d.]+)$", capsys.readouterr().out, re.M)[1]))
    assert scores[0] == 100 and scores[1] == pytest.approx(scores[2], abs=2) and scores[1] < 90


def test_labels_and_tables(run, tmp_path):
    """Labels may have gaps. Pairs may be dictionaries."""
    (tmp_path / "texts").mkdir()
    for split in ("train", "test"):
        lines = [f"{number} a,{2 * (number % 2) + 1}" for number in range(60)]
        (tmp_path / f"texts/{split}.csv").write_text("\n".join(["text,label", *lines]))
    words = ("--data_dir", tmp_path, "--seq_len", 8, "--batch_size", 10, "--max_steps", 1)
    run("singlegpu/text.py", *words, "--dataset", "texts")
    (tmp_path / "pairs").mkdir()
    pairs = [{"translation": {"en": f"{n} a", "zh": f"b {n}"}} for n in range(60)]
    for split in ("train", "validation", "test"):
        (tmp_path / f"pairs/{split}.json").write_text("\n".join(map(json.dumps, pairs)))
    more = ("--dataset", "pairs", "--source", "translation.en", "--target", "translation.zh")
    assert "BLEU" in run("multigpu/translation.py", *words, *more, processes=2)
