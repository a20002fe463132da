"""The parts of the scripts that have a right answer."""

import argparse
import json
import math
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from conftest import curve, module

SMALL_GPT = "--d_model 16 --n_heads 2 --num_layers 1 --seq_len 8 --batch_size 4 --max_steps 2"
gpt, text, translation = (module(f"singlegpu/{name}.py") for name in ("gpt", "text", "translation"))
VOCAB_SIZES = {"source": 30, "target": 12}
WORDS = [f"w{number}" for number in range(30)]
TOKENIZERS = {  # the first four ids are not words
    side: translation.train_tokenizer(2 * WORDS[4:size], 70) for side, size in VOCAB_SIZES.items()
}


def namespace(**changes):
    """The arguments that the functions below read."""
    found = {"seed": 1, "batch_size": 12, "seq_len": 16, "vocab_size": 64, "d_model": 32}
    found |= {"n_heads": 4, "num_layers": 2, "dropout": 0.0, "grad_accum_steps": 1, "epochs": 1}
    found |= {"model": "transformer", "size": "small", "precision": "fp32", "dataset": "words"}
    return argparse.Namespace(**found | changes)


def test_gpt():
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
    data = gpt.Tokens(np.arange(512, dtype=np.uint16), namespace(vocab_size=512))
    tokens, targets = data.__getitems__(range(len(data)))
    assert tokens.shape == (31, 16) and torch.equal(tokens + 1, targets)
    assert len(tokens.unique()) == 31 * 16
    assert model(tokens, targets).item() == pytest.approx(math.log(512), rel=0.01)
    changed = tokens.clone()
    changed[:, 9] = 0
    before, after = (model(each).unflatten(0, (31, 16)) for each in (tokens, changed))
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(2).all()


def test_gpt_token_files(run, changed, tmp_path):
    """Files of 16 and of 32 bits; floats, and ids beyond the vocabulary, end the run."""
    ids = np.random.default_rng(0).integers(0, 300, 2_000)
    for name, array in (("wide", (300 * ids).astype(np.uint32)), ("floats", ids / 2)):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "train.npy", array)
        np.save(tmp_path / name / "val.npy", array[:200])
    for split in ("train", "val"):  # as nanoGPT writes them
        ids.astype(np.uint16).tofile(tmp_path / f"{split}.bin")
    words, log = (*SMALL_GPT.split(), "--vocab_size", 512, "--sample", 40), tmp_path / "log.jsonl"
    out = run("singlegpu/gpt.py", *words, "--dataset", tmp_path, "--log", log)
    assert 300 < math.exp(curve(log)[0, 1]) < 520
    assert len(drawn := json.loads(out.splitlines()[-1])) == 40 and 300 < max(drawn) < 512
    # Of a text, each sampled token is a byte. Untrained ones are no UTF-8, nor can this print it.
    (tmp_path / "a.txt").write_bytes(b"text " * 999)
    guard = 'if __name__ == "__main__":'
    narrow = {guard: f'sys.stdout.reconfigure(encoding="ascii")\n{guard}'}
    copy = changed("singlegpu/gpt.py", narrow)
    assert "?" in run(copy, *words, "--dataset", tmp_path / "a.txt")

    def read(name, vocab_size):
        data, _ = gpt.read_data(namespace(dataset=str(tmp_path / name), vocab_size=vocab_size))
        return data.__getitems__(range(len(data)))

    assert read("wide", 90_000)[0].max() == 300 * ids.max()
    with pytest.raises(ValueError, match="is not below --vocab_size 50304"):
        read("wide", 50_304)
    with pytest.raises(TypeError, match="Cannot cast array data"):
        read("floats", 512)


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
    """An epoch takes each text at most once, in batches of little padding; epochs differ."""
    lengths = np.random.default_rng(0).integers(5, 65, 2501)
    if script is text:  # each text has its length as its class
        tokens = np.arange(64) < lengths[:, None]
        data = text.Texts(tokens.astype(np.int16), lengths, range(65))
    else:
        texts = datasets.Dataset.from_dict(dict.fromkeys(TOKENIZERS, ["w4 " * n for n in lengths]))
        data = translation.Pairs(texts, TOKENIZERS)
        found = [words.count("w4") + 2 for words in data.texts["target"]]  # [START] and [END]
        assert found == data.lengths["source"].tolist() == sorted(lengths + 2)[::-1]
    orders = [script.training_order(data, namespace(), epoch) for epoch in (0, 1)]
    assert set(orders[0][:12]) != set(orders[1][:12])
    for order in orders:
        assert len(set(order)) == len(order) == 208 * 12
        num_words = num_tokens = 0
        for batch in order.reshape(208, 12):
            assert script is text or (np.diff(batch) > 0).all(), "processes get similar lengths"
            words, lengths, *targets = data.__getitems__(batch)
            for tokens in (words, *targets):
                assert ((tokens > 0).sum(1) == torch.as_tensor(lengths)).all(), "none is cut off"
                num_words += sum(lengths)
                num_tokens += tokens.numel()
        assert num_words > 0.95 * num_tokens


def test_long_texts():
    """A length may be more than 16 bits hold."""
    tokens = np.zeros((2, 40_000), np.int16)
    tokens[0], tokens[1, :3] = 5, 6
    words, labels = text.Texts(tokens, np.array([0, 1]), range(2)).__getitems__([0, 1])
    assert words.shape == (2, 40_000) and labels.tolist() == [1, 0]
    tokenizers = {side: translation.train_tokenizer(["a"] * 2, 40_000) for side in VOCAB_SIZES}
    pairs = datasets.Dataset.from_dict({side: ["a", 40_000 * "a "] for side in VOCAB_SIZES})
    assert translation.Pairs(pairs, tokenizers).lengths["source"].tolist() == [40_000, 3]


@pytest.mark.parametrize("model", ["lstm", "transformer"])
def test_translation_padding_and_order(model):
    """A pair's loss does not depend on its batch mates, nor a word on those after it."""
    torch.manual_seed(0)
    args, generator = namespace(model=model, seq_len=20), np.random.default_rng(0)
    model = translation.create_model(args, SimpleNamespace(tokenizers=TOKENIZERS)).eval()
    lengths, ends = [14, 9, 9, 5, 3], [6, 12, 4, 3, 8]  # of sources, the longest first; of targets
    sources = torch.from_numpy(generator.integers(4, VOCAB_SIZES["source"], (5, 14)))
    targets = torch.from_numpy(generator.integers(4, VOCAB_SIZES["target"], (5, 12)))
    parts = []
    for row, (length, end) in enumerate(zip(lengths, ends)):
        sources[row, length:], targets[row, end:] = translation.PAD, translation.PAD
        part = sources[row : row + 1, :length], [length], targets[row : row + 1, :end]
        parts.append(translation.batch_loss(model, part, args))
    loss, together = translation.batch_loss(model, (sources, lengths, targets), args)
    mean = sum(part for part, _ in parts) / 5  # as over processes: their tokens differ in number
    torch.testing.assert_close(loss, mean, rtol=1e-5, atol=0)
    alone = {name: sum(sums[name] for _, sums in parts) for name in together}
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=0)
    changed = targets.clone()
    changed[0, 5] = 4 if changed[0, 5] != 4 else 5
    before, after = (model(sources, lengths, words)[0] for words in (targets, changed))
    torch.testing.assert_close(before[:5], after[:5], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(before[5:], after[5:])


def test_splitting_into_stages():
    """Of 100 layers, too, each stage has its tenth; a stage without weights is not one."""
    hybrid, layers = module("hybrid/images.py"), [torch.nn.Flatten()]
    for _ in range(100):
        layers += [torch.nn.ReLU(), torch.nn.Linear(4, 4)]
    stages = list(hybrid.split_model(torch.nn.Sequential(*layers), [torch.device("cpu")] * 10))
    assert [layer for stage in stages for layer in stage] == layers
    assert [hybrid.num_weights(stage) for stage in stages] == [10 * 20] * 10
