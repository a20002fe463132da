"""The parts of gpt.py, text.py and translation.py that have a right answer."""

import argparse
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import curve, module

gpt, text, translation = (module(f"singlegpu/{name}.py") for name in ("gpt", "text", "translation"))
VOCAB_SIZES = {"source": 30, "target": 12}


def namespace(**changes):
    """The arguments that the functions below read."""
    found = {"seed": 1, "batch_size": 12, "seq_len": 16, "vocab_size": 64, "d_model": 32}
    found |= {"n_heads": 4, "num_layers": 2, "dropout": 0.0, "epochs": 1, "num_workers": 0}
    found |= {"model": "transformer", "size": "small", "precision": "fp32", "dataset": "words"}
    return argparse.Namespace(**found | changes)


def batches_of(script, data, batches):
    """The batches of these lists of indices."""
    return list(script.create_loader(data, batches, namespace()))


def test_gpt(tmp_path):
    """It has the parameters of GPT-2, and finds at first all tokens equally likely.

    A later token changes no earlier logit. Sequences of a text do not overlap; a target is the
    next token.
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
    [[ids]] = batches_of(gpt, data, [[*range(len(data))]])
    tokens, targets = ids.long()[:, :-1], ids.long()[:, 1:]
    assert tokens.shape == (31, 16) and torch.equal(tokens + 1, targets)
    assert len(tokens.unique()) == 31 * 16
    assert model(tokens, targets).item() == pytest.approx(math.log(512), rel=0.01)
    changed = tokens.clone()
    changed[:, 9] = 0
    before, after = (model(each) for each in (tokens, changed))
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(2).all()


def test_gpt_reads_tokens_and_writes_text(run, tmp_path):
    """Of a folder with --vocab_size ids, and of a text, whose last tenth is for validation."""
    ids = np.random.default_rng(0).integers(0, 300, 2_000, np.uint16)
    for name in ("train", "val"):
        np.save(tmp_path / f"{name}.npy", ids)
    words = "--d_model 16 --n_heads 2 --num_layers 1 --seq_len 8 --batch_size 4 --max_steps 2"
    words = (*words.split(), "--vocab_size", 512)
    log = tmp_path / "log.jsonl"
    out = run("singlegpu/gpt.py", *words, "--dataset", tmp_path, "--sample", 40, "--log", log)
    assert 300 < math.exp(curve(log)[0, 1]) < 520
    assert len(drawn := json.loads(out.splitlines()[-1])) == 40 and 300 < max(drawn) < 512
    (tmp_path / "a.txt").write_bytes(b"text " * 999)
    out = run("singlegpu/gpt.py", *words[:-2], "--dataset", tmp_path / "a.txt", "--sample", 40)
    assert re.search(r"\|\n.{20,40}\n$", out, re.S), "after the table"
    train, val = gpt.read_data(namespace(dataset=str(tmp_path / "a.txt"), seq_len=9))
    assert (len(train), len(val)) == ((4996 - 500) // 9, 498 // 9)


@pytest.mark.parametrize("model", ["nbow", "transformer"])
def test_text_padding_changes_nothing(model):
    """A text's logits do not depend on its batch mates, however long; every word counts."""
    torch.manual_seed(0)
    args = namespace(model=model, seq_len=64)
    model = text.create_model(args, SimpleNamespace(classes=range(4))).eval()
    lengths = torch.tensor([3, 60, 17])
    tokens = torch.randint(2, 100, (3, 60)) * (torch.arange(60) < lengths[:, None])
    together = model(tokens)
    for row, length in enumerate(lengths.tolist()):
        words = tokens[row : row + 1, :length]
        alone, changed = model(words), words.clone()
        torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-6)
        changed[0, -1] = 2 if changed[0, -1] != 2 else 3
        assert not torch.allclose(model(changed), alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("script", [text, translation])
def test_batches_of_similar_lengths(script):
    """An epoch takes each text at most once, in batches of little padding, and cuts none off."""
    lengths = np.random.default_rng(0).integers(5, 65, 2501)
    if script is text:  # each text has its length as its class
        tokens = np.arange(64) < np.sort(lengths)[:, None]
        data = text.Texts(torch.tensor(tokens, dtype=torch.int16), torch.tensor(np.sort(lengths)))
        data.batch_size = 12
    else:
        texts = [["w4 " * length for length in lengths]] * 2
        tokenizers = [translation.train_tokenizer(each, 70) for each in texts]
        data = translation.Pairs(texts, tokenizers, namespace())
        assert data.tensors[0].count_nonzero(1).tolist() == sorted(lengths + 2)  # [START], [END]
    order = script.training_order(data, np.random.default_rng(0))
    assert len(set(order)) == len(order) == 208 * 12
    num_words = num_tokens = 0
    for tokens, others in batches_of(script, data, order.reshape(208, 12).tolist()):
        found = (tokens > 0).sum(1)
        assert (found == (others if script is text else (others > 0).sum(1))).all(), "cut off"
        num_words += found.sum()
        num_tokens += tokens.numel()
    assert num_words > 0.95 * num_tokens


@pytest.mark.parametrize("model", ["lstm", "transformer"])
def test_translation_padding_and_order(model):
    """A pair's loss does not depend on its batch mates, nor a word on those after it."""
    torch.manual_seed(0)
    args, generator = namespace(model=model, seq_len=20), np.random.default_rng(0)
    sizes = [SimpleNamespace(get_vocab_size=lambda n=n: n) for n in VOCAB_SIZES.values()]
    model = translation.create_model(args, SimpleNamespace(tokenizers=sizes)).eval()
    lengths, ends = [14, 9, 9, 5, 3], [6, 12, 4, 3, 8]  # of sources and of targets
    sources = torch.from_numpy(generator.integers(4, VOCAB_SIZES["source"], (5, 14)))
    targets = torch.from_numpy(generator.integers(4, VOCAB_SIZES["target"], (5, 12)))
    parts = []
    for row, (length, end) in enumerate(zip(lengths, ends)):
        sources[row, length:], targets[row, end:] = translation.PAD, translation.PAD
        part = sources[row : row + 1, :length], targets[row : row + 1, :end]
        parts.append(translation.batch_loss(model, part, args))
    loss, together = translation.batch_loss(model, (sources, targets), args)
    mean = sum(part for part, _ in parts) / 5  # as over processes: their tokens differ in number
    torch.testing.assert_close(loss, mean, rtol=1e-5, atol=0)
    alone = {name: sum(sums[name] for _, sums in parts) for name in together}
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=0)
    changed = targets.clone()
    changed[0, 5] = 4 if changed[0, 5] != 4 else 5
    before, after = (model(sources, words)[0] for words in (targets, changed))
    torch.testing.assert_close(before[:5], after[:5], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(before[5:], after[5:])


class Oracle:
    """Translates the numbers of translation.py's own texts, in which it takes a word for another.

    Who decodes the first T tokens gets, as the likeliest tokens, those of the translation.
    """

    def __init__(self, tokenizers, wrong):
        self.source, self.target = tokenizers
        self.names = [wrong.get(name, name) for name in translation.DIGITS]

    def encode(self, sources):
        texts = [text.split() for text in self.source.decode_batch(sources.tolist())]
        texts = [" ".join(self.names[int(digit)] for digit in text) for text in texts]
        return torch.from_numpy(translation.encode(texts, self.target))[:, 1:]  # without [START]

    def decode(self, tokens, target):
        return torch.nn.functional.one_hot(tokens[:, : target.shape[1]].long())  # (B, T, V)


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
