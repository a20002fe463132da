"""The parts of text.py, translation.py and gpt.py that have a right answer."""

import argparse
import importlib.util
import itertools
import math

import numpy as np
import pytest
import torch
from conftest import ROOT, curve


def module(script):
    """The script as a module."""
    name = script.replace("/", "_").removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, ROOT / script)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


gpt, text, translation = (module(f"singlegpu/{name}.py") for name in ("gpt", "text", "translation"))


def namespace(**changes):
    """The arguments that the functions below read."""
    found = {"seed": 1, "batch_size": 12, "seq_len": 16, "vocab_size": 64, "d_model": 32}
    found |= {"n_heads": 4, "num_layers": 2, "dropout": 0.0, "dataset": "imdb", "max_steps": None}
    found |= {"model": "transformer", "size": "small", "precision": "fp32"}
    return argparse.Namespace(**found | changes)


def test_gpt_parameters_and_initial_loss():
    """V D + T D + L (12 D^2 + 4 D) + 2 D parameters; at first all tokens are equally likely."""
    sizes = {"vocab_size": 50257, "d_model": 768, "n_heads": 12, "num_layers": 12}
    with torch.device("meta"):
        model = gpt.create_model(namespace(**sizes, seq_len=1024))
    count = 50257 * 768 + 1024 * 768 + 12 * (12 * 768**2 + 4 * 768) + 2 * 768
    assert sum(parameter.numel() for parameter in model.parameters()) == count == 124_356_864
    torch.manual_seed(0)
    model = gpt.create_model(namespace(vocab_size=512, d_model=128, seq_len=64))
    tokens = torch.randint(512, (8, 65))
    assert model(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(math.log(512), rel=0.01)


def test_gpt_is_causal():
    """A later token does not change an earlier logit, and does change the later ones."""
    torch.manual_seed(0)
    model = gpt.create_model(namespace()).eval()
    tokens = torch.randint(64, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 64
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(2).all()


def test_gpt_learning_rate():
    """Up to 1 at the end of the warm-up, down to 0.1 at the last step."""
    factors = [gpt.lr_factor(step, 1000) for step in range(1000)]
    assert factors[0] == pytest.approx(1 / 50) and factors[49] == factors[50] == 1
    assert factors[524] == pytest.approx(0.55, abs=0.002)
    assert factors[999] == pytest.approx(0.1)
    assert all(a < b for a, b in itertools.pairwise(factors[:50]))
    assert all(a > b for a, b in itertools.pairwise(factors[50:]))


def test_gpt_token_files(run, attempt, tmp_path):
    """Token ids as nanoGPT writes them give a perplexity; an id beyond the vocabulary ends it."""
    ids = np.random.default_rng(0).integers(0, 300, 8000).astype(np.uint16)
    for name, part in (("train", ids[:7000]), ("val", ids[7000:])):
        (tmp_path / f"{name}.bin").write_bytes(part.tobytes())
    words = "--d_model 32 --n_heads 2 --num_layers 2 --seq_len 32 --batch_size 24".split()
    words += ["--max_steps", 3, "--dataset", tmp_path]
    out = run("singlegpu/gpt.py", *words, "--sample", 5, "--log", tmp_path / "log.csv")
    losses = curve(tmp_path / "log.csv", "val_ppl")[0]
    assert losses[2] == pytest.approx(math.exp(losses[1])) and "7,000 + " in out
    words += ["--vocab_size", 200]
    for folder in ("singlegpu", "multigpu"):
        status, _, err = attempt(f"{folder}/gpt.py", *words, processes=2)
        assert status and "vocab_size" in err, err


@pytest.mark.parametrize("model", ["nbow", "transformer"])
def test_text_padding_changes_nothing(model):
    """A text's logits do not depend on its batch mates, however long; every word counts."""
    torch.manual_seed(0)
    model = text.create_model(namespace(model=model, seq_len=64), 100).eval()
    lengths = torch.tensor([3, 60, 17])
    tokens = torch.randint(2, 100, (3, 60)) * (torch.arange(60) < lengths[:, None])
    together = model(tokens, lengths)
    for row, length in enumerate(lengths.tolist()):
        words, count = tokens[row : row + 1, :length], lengths[row : row + 1]
        alone = model(words, count)
        torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-6)
        changed = words.clone()
        changed[0, -1] = 2 if changed[0, -1] != 2 else 3
        assert not torch.allclose(model(changed, count), alone, rtol=1e-5, atol=1e-6)


def test_text_batches_of_similar_length():
    """An epoch takes each text once; a batch needs little padding; epochs differ."""
    lengths = np.random.default_rng(0).integers(5, 300, 2501)
    ends = np.concatenate(([0], lengths.cumsum()))
    first, second = (text.similar_batches(ends, namespace(seq_len=64), epoch) for epoch in (0, 1))
    for batches in (first, second):
        assert batches.shape == (208, 12) and len(np.unique(batches)) == 208 * 12
        seen = np.minimum(lengths[batches], 64)
        assert seen.sum() > 0.95 * (seen.max(1) * 12).sum()
    assert (np.sort(first, 1)[0] != np.sort(second, 1)[0]).any()


@pytest.mark.parametrize("model", ["lstm", "transformer"])
def test_translation_padding_and_order(model):
    """A pair's loss does not depend on its batch mates, nor a word on those after it."""
    torch.manual_seed(0)
    args = namespace(model=model, seq_len=20)
    model = translation.create_model(args, 30, 40).eval()
    source, target = torch.randint(4, 30, (3, 12)), torch.randint(4, 40, (3, 10))
    lengths = torch.tensor([12, 3, 7])
    source[torch.arange(12) >= lengths[:, None]] = translation.PAD
    target[1, 4:], target[2, 8:] = translation.PAD, translation.PAD
    together = translation.translation_loss(model, source, lengths, target, 1, args)[1]
    alone = torch.zeros(2, dtype=torch.float64)
    for row, (columns, words) in enumerate(((12, 10), (3, 4), (7, 8))):
        each = slice(row, row + 1)
        part = source[each, :columns], lengths[each], target[each, :words]
        alone += translation.translation_loss(model, *part, 1, args)[1]
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=0)
    assert together[1] == 9 + 3 + 7
    changed = target.clone()
    changed[0, 5] = 4 if changed[0, 5] != 4 else 5
    before, after = (model(source, lengths, words)[0] for words in (target, changed))
    torch.testing.assert_close(before[:5], after[:5], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(before[5:], after[5:])


@pytest.mark.parametrize("model", ["lstm", "transformer"])
def test_translation_does_not_depend_on_the_batches(model):
    """Greedy decoding gives the same words however the sentences are batched and shared out."""
    torch.manual_seed(0)
    args, generator = namespace(model=model, seq_len=20), np.random.default_rng(0)
    ends = np.concatenate(([0], generator.integers(3, 15, 30).cumsum()))
    split = [[generator.integers(4, 30, ends[-1]), ends]] * 2
    model, words = translation.create_model(args, 30, 30), list(map(str, range(30)))
    found = []
    for size, ranks in ((128, 1), (1, 1), (7, 3)):
        translations = {}
        for rank in range(ranks):
            share = np.arange(rank, 30, ranks)
            batches = [(share[start : start + size], 1) for start in range(0, len(share), size)]
            cpu = torch.device("cpu")
            translations |= translation.translate(model, split, batches, words, args, cpu)
        assert sorted(translations) == list(range(30))
        found.append(translations)
    assert found[0] == found[1] == found[2]
