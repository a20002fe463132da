"""The parts of the scripts that have a right answer."""

import argparse
import importlib.util
import math

import numpy as np
import pytest
import torch
from conftest import ROOT, curve

CPU = torch.device("cpu")


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
    found |= {"n_heads": 4, "num_layers": 2, "dropout": 0.0, "grad_accum_steps": 1}
    found |= {"model": "transformer", "size": "small", "precision": "fp32", "dataset": "words"}
    return argparse.Namespace(**found | changes)


def test_gpt_parameters_and_initial_loss():
    """V D + T D + L (12 D^2 + 4 D) + 2 D parameters; at first all tokens are equally likely."""
    sizes = {"vocab_size": 50257, "d_model": 768, "n_heads": 12, "num_layers": 12}
    with torch.device("meta"):
        model = gpt.GPT(namespace(**sizes, seq_len=1024))
    count = 50257 * 768 + 1024 * 768 + 12 * (12 * 768**2 + 4 * 768) + 2 * 768
    assert sum(p.numel() for p in model.parameters()) == count == 124_356_864
    torch.manual_seed(0)
    model = gpt.GPT(namespace(vocab_size=512, d_model=128, seq_len=64))
    tokens = torch.randint(512, (8, 65))
    assert model(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(math.log(512), rel=0.01)


def test_gpt_is_causal():
    """A later token does not change an earlier logit, and does change the later ones."""
    torch.manual_seed(0)
    model, tokens = gpt.GPT(namespace()).eval(), torch.randint(64, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 64
    before, after = (model(each).unflatten(0, (2, 16)) for each in (tokens, changed))
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(2).all()


def test_gpt_batches():
    """An epoch's sequences do not overlap; the next one has other cuts; a resumed one goes on."""
    tokens, args = (
        np.arange(4000, dtype=np.uint16),
        namespace(vocab_size=4000),
    )
    found = []
    for epoch, first in ((0, 0), (1, 0), (0, 7)):
        loader = gpt.batches(tokens, args, epoch, range(first, 20), CPU)
        found.append(torch.stack([torch.stack(micro_batch) for (micro_batch,) in loader]))
    assert found[0].shape == (20, 2, 12, 16) and torch.equal(found[2], found[0][7:])
    assert torch.equal(found[0][:, 0] + 1, found[0][:, 1]), "the target is the next token"
    for epoch in found[:2]:
        assert len(epoch[:, 0].unique()) == 20 * 12 * 16
    assert (found[0] != found[1]).float().mean() > 0.9


def test_gpt_token_files(run, tmp_path):
    """Token ids as nanoGPT writes them give a perplexity."""
    ids = np.random.default_rng(0).integers(0, 300, 8000).astype(np.uint16)
    for name, part in (("train", ids[:7000]), ("val", ids[7000:])):
        (tmp_path / f"{name}.bin").write_bytes(part.tobytes())
    words = "--d_model 32 --n_heads 2 --num_layers 2 --seq_len 32 --batch_size 24 --sample 5"
    words = (*words.split(), "--max_steps", 3, "--vocab_size", 512, "--dataset", tmp_path)
    run("singlegpu/gpt.py", *words, "--log", tmp_path / "log.jsonl")
    _, val_loss, val_ppl = curve(tmp_path / "log.jsonl", "val_ppl")[0]
    assert val_ppl == pytest.approx(math.exp(val_loss)) and 300 < val_ppl < 520


@pytest.mark.parametrize("model", ["nbow", "transformer"])
def test_text_padding_changes_nothing(model):
    """A text's logits do not depend on its batch mates, however long; every word counts."""
    torch.manual_seed(0)
    model = text.create_model(namespace(model=model, seq_len=64), 4).eval()
    lengths = torch.tensor([3, 60, 17])
    tokens = torch.randint(2, 100, (3, 60)) * (torch.arange(60) < lengths[:, None])
    together = model(tokens)
    for row, length in enumerate(lengths.tolist()):
        words = tokens[row : row + 1, :length]
        alone, changed = model(words), words.clone()
        torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-6)
        changed[0, -1] = 2 if changed[0, -1] != 2 else 3
        assert not torch.allclose(model(changed), alone, rtol=1e-5, atol=1e-6)


def test_text_batches():
    """An epoch takes each text once; a batch needs little padding; epochs differ."""
    lengths = torch.from_numpy(np.sort(np.random.default_rng(0).integers(5, 65, 2501)))
    numbers = torch.arange(2501)
    tokens = (numbers[:, None] + 1) * (torch.arange(64) < lengths[:, None])
    found = []
    for epoch in (0, 1):
        loader = text.batches((tokens, lengths, numbers), namespace(), epoch, range(208))
        parts = [micro_batch for (micro_batch,) in loader]
        found.append(torch.stack([classes for _, classes in parts]))
        assert len(found[-1].unique()) == 208 * 12
        for words, classes in parts:
            assert ((words > 0).sum(1) == lengths[classes]).all(), "no word is cut off"
        real = sum((words > 0).sum().item() for words, _ in parts)
        assert real > 0.95 * sum(words.numel() for words, _ in parts)
    assert (found[0].sort(1)[0] != found[1].sort(1)[0]).any()


def pairs_of(generator, count):
    """Sources (B, S), targets (B, T) and source lengths (B,), the longest first."""
    lengths = np.sort(generator.integers(3, 15, (count, 2)), axis=0)[::-1]
    sources, targets = (torch.from_numpy(generator.integers(4, 30, (count, 15))) for _ in "ab")
    for row, (source, target) in enumerate(lengths):
        sources[row, source:], targets[row, target:] = translation.PAD, translation.PAD
    return sources[:, : lengths[0, 0]], targets[:, : lengths[:, 1].max()], lengths[:, 0]


@pytest.mark.parametrize("model", ["lstm", "transformer"])
def test_translation_padding_and_order(model):
    """A pair's loss does not depend on its batch mates, nor a word on those after it."""
    torch.manual_seed(0)
    args, generator = namespace(model=model, seq_len=20), np.random.default_rng(0)
    model = translation.create_model(args, 30, 30).eval()
    sources, targets, lengths = pairs_of(generator, 5)
    lengths = torch.from_numpy(lengths.copy())
    together = translation.translation_loss(model, sources, lengths, targets, args)[1]
    alone = torch.zeros(2, dtype=torch.float64)
    for row in range(5):
        each = slice(row, row + 1)
        words = targets[each, : (targets[row] != translation.PAD).sum()]
        part = sources[each, : lengths[row]], lengths[each], words
        alone += translation.translation_loss(model, *part, args)[1]
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=0)
    changed = targets.clone()
    changed[0, 5] = 4 if changed[0, 5] != 4 else 5
    before, after = (model(sources, lengths, words)[0] for words in (targets, changed))
    torch.testing.assert_close(before[:5], after[:5], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(before[5:], after[5:])


@pytest.mark.parametrize("script", ["images", "text", "translation", "gpt"])
def test_shares(monkeypatch, script):
    """Of each batch two processes have a half each, and together all of it."""
    numbers, args = np.arange(600), namespace(grad_accum_steps=2, vocab_size=1000)
    ids = np.repeat(numbers.astype(np.int16)[:, None] + 1, 16, 1)
    lengths = {"source_length": np.full(600, 16), "target_length": np.full(600, 16)}
    tensors = torch.from_numpy(ids), torch.full((600,), 16), torch.from_numpy(numbers)
    pairs = lengths | {"sources": ids, "targets": ids}
    images, tokens = (ids[:, :, None, None], numbers), np.arange(1000)
    split = {"images": images, "text": tensors, "translation": pairs, "gpt": tokens}[script]

    def batch_of(script):
        more = [] if "text" in script else [CPU]
        loader = module(script).batches(split, args, 0, range(3, 4), *more)
        batch = next(micro_batches for micro_batches in loader if micro_batches is not None)
        return sorted(row for part in batch for row in part[0].flatten(1).tolist())

    whole, halves = batch_of(f"singlegpu/{script}.py"), []
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    for rank in (0, 1):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        halves.append(batch_of(f"multigpu/{script}.py"))
    assert len(halves[0]) == len(halves[1]) == 6 and sorted(sum(halves, [])) == whole


class Words:
    """In place of a tokenizer: the ids themselves."""

    def decode(self, ids, skip_special_tokens):
        return " ".join("[END]" if number == translation.END else str(number) for number in ids)


@pytest.mark.parametrize("model", ["lstm", "transformer"])
def test_translation_does_not_depend_on_the_batches(model):
    """Greedy decoding gives the same words however the sentences are batched."""
    torch.manual_seed(0)
    args, found = namespace(model=model, seq_len=20), []
    model = translation.create_model(args, 30, 12)
    for name, parameter in model.named_parameters():  # untrained, they hardly ever end a sentence
        if parameter.dim() == 2 and name not in ("source.weight", "target.weight"):
            parameter.data *= 6
    sources, targets, lengths = pairs_of(np.random.default_rng(0), 30)
    for size in (30, 1, 7):
        loader = []
        for start in range(0, 30, size):
            each = slice(start, start + size)
            part = torch.from_numpy(lengths[each].copy())
            loader.append((sources[each, : part.max()], part, targets[each]))
        found.append(translation.translate(model, loader, Words(), args))
    assert len(found[0]) == 30 and found[0] == found[1] == found[2]
    assert len({len(text.split()) for text in found[0]}) > 4


def test_token_files(run, attempt, tmp_path):
    """Files of 16 and of 32 bits; others, and ids beyond the vocabulary, end the run in a line."""
    ids = np.random.default_rng(0).integers(0, 100_000, 2_000)
    for name, array in (("wide", ids.astype(np.uint32)), ("signed", ids)):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "train.npy", array)
        np.save(tmp_path / name / "val.npy", array[:200])
    (tmp_path / "narrow").mkdir()
    for split in ("train", "val"):
        (ids % 50_000).astype(np.uint16).tofile(tmp_path / f"narrow/{split}.bin")
    words = (
        "--d_model 16 --n_heads 2 --num_layers 1 --seq_len 8 --batch_size 4 --max_steps 2".split()
    )
    wide = (*words, "--dataset", tmp_path / "wide")
    run("singlegpu/gpt.py", *wide, "--vocab_size", 100_000)
    run("singlegpu/gpt.py", *words, "--dataset", tmp_path / "narrow")
    status, _, err = attempt("multigpu/gpt.py", *wide, processes=2)
    assert status and "is not below --vocab_size 50304" in err, err
    status, _, err = attempt("singlegpu/gpt.py", *words, "--dataset", tmp_path / "signed")
    assert status and "int64" in err and "Traceback" not in err, err


def test_the_schedule_follows(run, data, tmp_path):
    """With other epochs, the learning rate of a run that goes on jumps, and a line says so."""
    words = (
        "--d_model 16 --n_heads 2 --num_layers 1 --seq_len 8 --batch_size 4 --max_steps 2".split()
    )
    words += ["--dataset", data / "words.txt", "--snapshot", tmp_path / "s.pt"]
    assert "learning rate" not in run("singlegpu/gpt.py", *words)
    assert "learning rate" not in run("singlegpu/gpt.py", *words)
    assert "the learning rate jumps" in run("multigpu/gpt.py", *words, "--epochs", 2, processes=2)


def test_splitting_into_stages():
    """Of 100 layers, too, each stage has its tenth; a stage without weights is not one."""
    hybrid = module("hybrid/images.py")
    layers = [torch.nn.Flatten()]
    for _ in range(100):
        layers += [torch.nn.ReLU(), torch.nn.Linear(4, 4)]
    stages = list(hybrid.split_model(torch.nn.Sequential(*layers), [CPU] * 10))
    assert [layer for stage in stages for layer in stage] == layers
    assert [hybrid.num_weights(stage) for stage in stages] == [10 * 20] * 10
