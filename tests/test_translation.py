"""The three translation.py, run as a user runs them, and the parts of singlegpu/translation.py with a right answer."""

import argparse
import json
import math
import os
import random
import re
import signal
import sys
import time

import numpy as np
import pytest
import torch
from conftest import LAUNCHES, ROOT, assert_refused, assert_same_weights, rows, wait_for, weights

sys.path.insert(0, str(ROOT / "singlegpu"))
import translation  # noqa: E402

SMALL = ("--threads", "1", "--batch_size", "24", "--seq_len", "20")
MODELS = ("lstm", "transformer")


def write_pairs(folder, names=("de", "en"), sizes=(300, 37, 29), more=()):
    """A data set of digits and their names, as csv files; `more` are further rows of the test split."""
    folder.mkdir(parents=True)
    generator = random.Random(0)
    for split, size in zip(translation.SPLITS, sizes):
        lines = [",".join(names)]
        for _ in range(size):
            number = generator.randrange(1000)
            lines.append(f"{' '.join(str(number))},{' '.join(translation.number_words(number))}")
        (folder / f"{split}.csv").write_text("\n".join([*lines, *(more if split == "test" else ())]))
    return folder


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """A --data_dir whose `multi30k` holds 300 + 37 + 32 pairs, one side of one of them empty, one of unknown words."""
    folder = tmp_path_factory.mktemp("pairs")
    write_pairs(folder / "multi30k", more=[",nothing", "x y z,", "1 " * 200 + ",one"])
    return folder


def namespace(**changes):
    defaults = {"model": "transformer", "seq_len": 20, "dropout": 0.0, "precision": "fp32", "seed": 1, "batch_size": 12}
    return argparse.Namespace(**{**defaults, "max_steps": None, **changes})


@pytest.mark.parametrize("model", MODELS)
def test_one_loss_curve(run, pairs, tmp_path, model):
    """Any number of processes and of accumulated parts: the same losses to rounding, and the same translations."""
    pytest.importorskip("datasets")
    curves, ends = [], []
    for folder, processes, parts in LAUNCHES:
        log = tmp_path / f"{folder}{processes}{parts}.csv"
        arguments = [*SMALL, "--model", model, "--dataset", "multi30k", "--data_dir", pairs, "--epochs", "2"]
        status, out, err = run(
            folder, *arguments, "--learning_rate", "3e-4", "--grad_accum_steps", parts, "--log", log,
            processes=processes, script="translation.py",
        )  # fmt: skip
        assert status == 0, err
        curves.append([[row["train_loss"], row["val_loss"]] for row in rows(log) if row["rank"] == 0])
        assert rows(log)[0]["val_ppl"] == pytest.approx(math.exp(rows(log)[0]["val_loss"]))
        ends.append(re.findall(r"^ +-> .*|^ += .*", out, re.M))
    assert len(ends[0]) == 6 and curves[0][1][0] < curves[0][0][0]
    for curve, end in zip(curves[1:], ends[1:]):
        np.testing.assert_allclose(curve, curves[0], rtol=1e-5)
        assert end == ends[0]


@pytest.mark.parametrize("folder, processes, model", [("multigpu", 2, "transformer")])
def test_resume_is_bit_identical(start, run, pairs, tmp_path, folder, processes, model):
    """Stopped at a random step and started again, a run ends with the weights of the undisturbed one."""
    pytest.importorskip("datasets")
    whole, cut = tmp_path / "whole.pt", tmp_path / "cut.pt"
    command = [*SMALL, "--model", model, "--dataset", "multi30k", "--data_dir", pairs, "--epochs", "6"]
    command += ["--dropout", "0.2", "--snapshot_every", "5"]
    status, _, err = run(folder, *command, "--snapshot", whole, processes=processes, script="translation.py")
    assert status == 0, err
    job = start(folder, *command, "--snapshot", cut, processes=processes, script="translation.py")
    wait_for(cut.exists)
    time.sleep(random.uniform(0, 0.5))
    os.kill(job.process.pid, signal.SIGTERM)
    _, out, err = job.wait(60)
    assert "stopped by a signal" in out, err
    status, out, err = run(folder, *command, "--snapshot", cut, processes=processes, script="translation.py")
    assert status == 0, err
    assert_same_weights(whole, cut)


def test_number_words():
    names = {0: "zero", 13: "thirteen", 70: "seventy", 101: "one hundred one", 999: "nine hundred ninety nine"}
    names |= {1000: "one thousand", 20_017: "twenty thousand seventeen", 500_300: "five hundred thousand three hundred"}
    for number, name in names.items():
        assert " ".join(translation.number_words(number)) == name


@pytest.mark.parametrize("model", MODELS)
def test_padding_and_order(model):
    """A pair's loss does not depend on its batch mates; a later word does not change what is said before it."""
    torch.manual_seed(0)
    args = namespace(model=model)
    model = translation.create_model(args, 30, 40).eval()
    source, target = torch.randint(4, 30, (3, 12)), torch.randint(4, 40, (3, 10))
    lengths = torch.tensor([12, 3, 7])
    source[torch.arange(12) >= lengths[:, None]] = translation.PAD
    target[1, 4:], target[2, 8:] = translation.PAD, translation.PAD
    together = translation.translation_loss(model, source, lengths, target, 1, args)[1]
    alone = torch.zeros(2, dtype=torch.float64)
    for row, (columns, words) in enumerate(((12, 10), (3, 4), (7, 8))):
        part = source[row : row + 1, :columns], lengths[row : row + 1], target[row : row + 1, :words]
        alone += translation.translation_loss(model, *part, 1, args)[1]
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=0)
    assert together[1] == 9 + 3 + 7
    changed = target.clone()
    changed[0, 5] = 4 if changed[0, 5] != 4 else 5
    before, after = model(source, lengths, target)[0], model(source, lengths, changed)[0]
    torch.testing.assert_close(before[:5], after[:5], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(before[5:], after[5:])


def test_tokens_of_a_batch():
    """In the mean; of each sentence all but the start, as many as are read."""
    split = (None, None), (None, np.array([0, 4, 6, 31]))
    assert translation.tokens_of_a_batch(split, namespace(batch_size=6, seq_len=20)) == 6 * (3 + 1 + 20) / 3


@pytest.mark.parametrize("model", MODELS)
def test_decoding_does_not_depend_on_the_batches(model):
    """Greedy decoding gives the same words however the sentences are batched and shared out."""
    torch.manual_seed(0)
    args, random_state = namespace(model=model), np.random.default_rng(0)
    lengths = random_state.integers(3, 15, 30)
    ends = np.concatenate(([0], lengths.cumsum()))
    split = [[random_state.integers(4, 30, ends[-1]), ends]] * 2
    model, words = translation.create_model(args, 30, 30), [str(number) for number in range(30)]
    results = []
    for size, ranks in ((128, 1), (1, 1), (7, 3)):
        translations = {}
        for rank in range(ranks):
            share = np.arange(rank, 30, ranks)
            batches = [(share[start : start + size], 1) for start in range(0, len(share), size)]
            translations |= translation.translate(model, split, batches, words, args, torch.device("cpu"))
        assert sorted(translations) == list(range(30))
        results.append(translations)
    assert results[0] == results[1] == results[2]
    assert all(len(text.split()) <= args.seq_len for text in results[0].values())


def test_blocks_are_those_of_the_paper():
    """With the same weights, what torch's own layers give: a target attends to itself first, then to the source."""
    torch.manual_seed(0)
    sizes = dict(dim_feedforward=64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True, bias=False)
    encoder, decoder = (
        torch.nn.TransformerEncoderLayer(32, 4, **sizes),
        torch.nn.TransformerDecoderLayer(32, 4, **sizes),
    )
    block, cross = translation.Block(32, 4, 64, 0.0), translation.CrossBlock(32, 4, 64, 0.0)
    for ours, theirs in ((block, encoder), (cross.block, decoder)):
        theirs.self_attn.in_proj_weight.data = ours.qkv.weight.data
        theirs.self_attn.out_proj.weight.data = ours.projection.weight.data
        theirs.linear1.weight.data, theirs.linear2.weight.data = ours.up.weight.data, ours.down.weight.data
    decoder.multihead_attn.in_proj_weight.data = torch.cat((cross.query.weight, cross.key_value.weight)).data
    decoder.multihead_attn.out_proj.weight.data = cross.projection.weight.data
    x, y = torch.randn(3, 7, 32), torch.randn(3, 5, 32)
    real = torch.arange(7) < torch.tensor([7, 4, 2])[:, None]  # (B, S)
    memory, expected = block(x, real[:, None, None]), encoder(x, src_key_padding_mask=~real)
    torch.testing.assert_close(memory[real], expected[real])
    causal = torch.nn.Transformer.generate_square_subsequent_mask(5)
    expected = decoder(y, memory, tgt_mask=causal, memory_key_padding_mask=~real)
    torch.testing.assert_close(cross(y, memory, real[:, None, None]), expected)


def test_bleu():
    """The references against themselves, case and spacing apart: 100; against each other: little."""
    references = ["A man, in a blue shirt, sits.", "Two dogs run over green grass.", "Nothing like that has happened."]
    same = ["a man , in a blue shirt , sits .", "two dogs run over green grass .", "nothing like that has happened ."]
    assert translation.bleu(dict(enumerate(same)), references) == pytest.approx(100)
    assert translation.bleu(dict(enumerate(same[1:] + same[:1])), references) < 10


def test_tokens(run_many, pairs):
    """Words seen twice make the vocabularies; empty lines and long sentences are kept, and cut where they are read."""
    pytest.importorskip("datasets")
    arguments = ["--dataset", "multi30k", "--data_dir", pairs, *SMALL, "--max_steps", "2", "--epochs", "1"]
    ((status, out, err, _),) = run_many("singlegpu/translation.py", [arguments])
    assert status == 0 and "300 + 37 pairs" in out, err
    folder = pairs / "multi30k_de_en_tokens"
    words = json.loads((folder / "target_words.json").read_text())
    assert words[:4] == ["[PAD]", "[UNK]", "[START]", "[END]"] and "hundred" in words and "nothing" not in words
    ids, ends = (np.load(folder / f"test_source_{name}.npy") for name in ("ids", "ends"))
    assert np.diff(ends)[-3:].tolist() == [2, 5, 202]
    assert ids[ends[-4] : ends[-2]].tolist() == [2, 3, 2, 1, 1, 1, 3]


def test_bad_input(run_many, tmp_path):
    pytest.importorskip("datasets")
    write_pairs(tmp_path / "columns" / "multi30k", names=("fr", "en"))
    write_pairs(tmp_path / "small" / "multi30k", sizes=(20, 5, 5))
    (tmp_path / "damaged" / "multi30k_de_en_tokens").mkdir(parents=True)
    cases = {
        ("--data_dir", tmp_path / "columns"): "no columns `de` and `en`",
        ("--data_dir", tmp_path / "small"): "exceeds the 20 training pairs",
        ("--data_dir", tmp_path / "damaged"): "remove what is damaged",
        ("--data_dir", tmp_path / "none"): "login node",
        ("--dataset", "synthetic", "--grad_accum_steps", "5"): "take 20 or 25",
        ("--dataset", "synthetic", "--seq_len", "0"): "--seq_len 0",
        ("--dataset", "synthetic", "--dropout", "1"): "--dropout 1",
    }
    commands = [["--dataset", "multi30k", *SMALL, *case] for case in cases]
    results = run_many("singlegpu/translation.py", commands, HF_HOME=str(tmp_path / "cache"), HF_HUB_OFFLINE="1")
    assert_refused(results, cases)


def test_more_epochs_than_planned(run, tmp_path):
    """A finished run, whose rate has come down, trains on when it is given another epoch."""
    base = ("--model", "lstm", "--threads", "1", "--batch_size", "16", "--seq_len", "8", "--max_steps", "3")
    found = []
    for epochs in (1, 2):
        status, _, err = run(
            "singlegpu", *base, "--epochs", epochs, "--snapshot", tmp_path / "run.pt", script="translation.py"
        )
        assert status == 0, err
        found.append(weights(tmp_path / "run.pt"))
    assert all((found[0][name] != found[1][name]).any() for name in found[0])


def test_it_learns_numbers(run, tmp_path):
    """The synthetic rule, with the first words of what is printed at the end."""
    log = tmp_path / "log.csv"
    status, out, err = run(
        "multigpu", "--threads", "1", "--epochs", "2", "--batch_size", "32", "--max_steps", "200", "--seq_len", "20",
        "--log", log, processes=2, script="translation.py",
    )  # fmt: skip
    assert status == 0, err
    assert rows(log)[-1]["val_loss"] < 0.7 * rows(log)[0]["val_loss"] < 2 and out.count("    -> ") == 3
