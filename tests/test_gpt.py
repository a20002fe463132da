"""The three gpt.py, run as a user runs them, and the parts of singlegpu/gpt.py that have a right answer."""

import argparse
import itertools
import math
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import LAUNCHES, ROOT, assert_refused, assert_same_weights, rows, wait_for

sys.path.insert(0, str(ROOT / "singlegpu"))
import gpt  # noqa: E402

SMALL = ("--d_model", "32", "--n_heads", "2", "--num_layers", "2", "--seq_len", "32", "--threads", "1")
SMALL += ("--batch_size", "24")


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A file of 40,000 bytes of random words: 1,124 sequences of 32 to train on, 124 to validate."""
    path = tmp_path_factory.mktemp("text") / "words.txt"
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghij", k=generator.randint(2, 7))) for _ in range(40)]
    path.write_text(" ".join(generator.choices(words, k=10_000))[:40_000])
    return path


def namespace(**changes):
    """The arguments that the functions below read."""
    defaults = {"seed": 1, "batch_size": 12, "seq_len": 16, "vocab_size": 64, "d_model": 32, "n_heads": 4}
    return argparse.Namespace(**{**defaults, "num_layers": 2, "dropout": 0.0, "dataset": "none", **changes})


def test_one_loss_curve(run, text, tmp_path):
    """Any number of processes and of accumulated parts: the same losses to rounding."""
    curves = []
    for folder, processes, parts in [*LAUNCHES, ("singlegpu", 1, 4)]:
        log = tmp_path / f"{folder}{processes}{parts}.csv"
        arguments = [*SMALL, "--dataset", text, "--epochs", "2", "--max_steps", "12", "--learning_rate", "3e-4"]
        status, out, err = run(
            folder, *arguments, "--grad_accum_steps", parts, "--log", log, processes=processes, script="gpt.py"
        )
        assert status == 0, err
        count = math.prod(processes) if isinstance(processes, tuple) else processes
        assert f"= {24 // count // parts} x {count} process" in out
        logged = rows(log)
        assert sorted((row["epoch"], row["rank"]) for row in logged) == [(e, r) for e in range(2) for r in range(count)]
        curves.append([[row["train_loss"], row["val_loss"]] for row in logged if row["rank"] == 0])
    assert curves[0][1][0] < curves[0][0][0], "it learns"
    for curve in curves[1:]:
        np.testing.assert_allclose(curve, curves[0], rtol=1e-5)


@pytest.mark.parametrize("folder, processes", [("multigpu", 2)])
def test_resume_is_bit_identical(start, run, text, tmp_path, folder, processes):
    """Stopped at a random step and started again, a run ends with the weights of the undisturbed one."""
    whole, cut = tmp_path / "whole.pt", tmp_path / "cut.pt"
    command = [*SMALL, "--dataset", text, "--epochs", "6", "--dropout", "0.2", "--snapshot_every", "5"]
    status, _, err = run(folder, *command, "--snapshot", whole, processes=processes, script="gpt.py")
    assert status == 0, err
    job = start(folder, *command, "--snapshot", cut, processes=processes, script="gpt.py")
    wait_for(cut.exists)
    time.sleep(random.uniform(0, 0.5))
    os.kill(job.process.pid, signal.SIGTERM)
    _, out, err = job.wait(60)
    assert "stopped by a signal" in out, err
    state = torch.load(cut, weights_only=True)["state"]
    status, out, err = run(folder, *command, "--snapshot", cut, "--sample", "20", processes=processes, script="gpt.py")
    assert status == 0 and f"epoch {state['epoch']}, step {state['step']}" in out, err
    assert_same_weights(whole, cut)
    assert len(out.split("|\n")[-1]) >= 20, "the sample"


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
@pytest.mark.parametrize("folder", ["multigpu", "multinode"])
def test_late_threads_do_not_abort_the_end(start, text, tmp_path, folder):
    """On a busy machine one of gloo's threads may still free the last tensors when the process ends."""
    library = tmp_path / "late_threads.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, ROOT / "tests/late_threads.cpp", "-ldl"], check=True)
    command = [*SMALL, "--dataset", text, "--max_steps", "3"]
    job = start(folder, *command, processes=2, script="gpt.py", env={"LD_PRELOAD": str(library)})
    status, _, err = job.wait(120)
    assert status == 0 and "terminate called" not in err and "leaked" not in err, err


def test_parameters_and_initial_loss():
    """V D + T D + L (12 D^2 + 4 D) + 2 D parameters; at first all tokens are equally likely."""
    with torch.device("meta"):
        model = gpt.create_model(namespace(vocab_size=50257, d_model=768, n_heads=12, num_layers=12, seq_len=1024))
    count = 50257 * 768 + 1024 * 768 + 12 * (12 * 768**2 + 4 * 768) + 2 * 768
    assert sum(parameter.numel() for parameter in model.parameters()) == count == 124_356_864
    torch.manual_seed(0)
    model = gpt.create_model(namespace(vocab_size=512, d_model=128, seq_len=64))
    tokens = torch.randint(512, (8, 65))
    assert model(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(math.log(512), rel=0.01)
    deviations = {name: parameter.std().item() for name, parameter in model.named_parameters() if parameter.dim() == 2}
    for name, deviation in deviations.items():
        assert deviation == pytest.approx(0.01 if "projection" in name or "down" in name else 0.02, rel=0.05), name


def test_causality():
    """A later token does not change an earlier logit, and does change the later ones."""
    torch.manual_seed(0)
    model = gpt.create_model(namespace()).eval()
    tokens = torch.randint(64, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 64
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(2).all()


def test_learning_rate_at_its_corners():
    """Up to 1 at the end of the warm-up, down to 0.1 at the last step, whatever the number of steps."""
    factors = [gpt.lr_factor(step, 1000) for step in range(1000)]
    assert factors[0] == pytest.approx(1 / 50) and factors[49] == factors[50] == 1
    assert factors[524] == pytest.approx(0.55, abs=0.002) and factors[999] == pytest.approx(0.1)
    assert all(a < b for a, b in itertools.pairwise(factors[:50])), "rises"
    assert all(a > b for a, b in itertools.pairwise(factors[50:])), "falls"
    assert gpt.lr_factor(1999, 10**6) == 1 > gpt.lr_factor(2001, 10**6), "2,000 steps of warm-up at most"
    for steps in (1, 2, 3):
        factors = [gpt.lr_factor(step, steps) for step in range(steps)]
        assert factors[0] == 1 and (steps < 3 or factors[-1] == pytest.approx(0.1))


def test_weight_decay_on_matrices_alone():
    model = gpt.create_model(namespace())
    decayed, rest = gpt.create_optimizer(model, argparse.Namespace(learning_rate=1e-3)).param_groups
    assert {parameter.dim() for parameter in decayed["params"]} == {2} and decayed["weight_decay"] == 0.1
    assert {parameter.dim() for parameter in rest["params"]} == {1} and rest["weight_decay"] == 0
    assert len(decayed["params"]) + len(rest["params"]) == len(list(model.parameters()))


def test_rates():
    """GFLOP/s and utilisation of a case computed by hand: GPT-2 at 1,000 sequences/s on two H100."""
    row = {"parameters": 124_356_864, "seq_len": 1024, "d_model": 768, "num_layers": 12, "samples/s": 1000.0}
    row |= {"device": "NVIDIA H100 80GB HBM3", "processes": 2, "precision": "bf16", "val_loss": math.log(8)}
    flops = 6 * (124_356_864 - 1024 * 768) + 12 * 12 * 768 * 1024  # a token
    done = gpt.with_rates(row | {"bytes": True})
    assert done["tokens/s"] == 1_024_000 and done["GFLOP/s"] == pytest.approx(1_024_000 * flops / 1e9)
    assert done["MFU"] == pytest.approx(1_024_000 * flops / (2 * 989e12))
    assert done["val_bpb"] == pytest.approx(3) and math.isnan(done["val_ppl"])
    assert gpt.with_rates(row | {"bytes": False})["val_ppl"] == pytest.approx(8)
    assert math.isnan(gpt.with_rates(row | {"bytes": True, "device": "CPU"})["MFU"])


@pytest.mark.parametrize("size", [1, 2, 3, 100, 4096, 4097])
def test_permute(size):
    """A permutation, whose parts can be had apart; another seed, another permutation."""
    order = gpt.permute(np.arange(size), size, (1, 0))
    assert sorted(order) == list(range(size))
    assert (gpt.permute(np.arange(size // 2, size), size, (1, 0)) == order[size // 2 :]).all()
    if size >= 100:
        assert (order != gpt.permute(np.arange(size), size, (1, 1))).any()
        assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.3
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.3


def test_epochs_cover_all_sequences_once():
    """The sequences of an epoch do not overlap; ranks share them out; a resumed epoch goes on where it was."""
    args = namespace(batch_size=12)
    epochs = [np.stack(list(gpt.sequence_starts(250, 0, 20, args, epoch))) for epoch in (0, 1)]
    assert epochs[0].shape == (20, 12)
    for starts in epochs:
        ordered = np.sort(starts.ravel())
        assert (np.diff(ordered) >= 16).all() and (np.diff(ordered) % 16 == 0).all()
        assert ordered[0] >= 0 and ordered[-1] + 16 + 1 <= 251 * 16
    assert (epochs[0] != epochs[1]).any()
    resumed = np.stack(list(gpt.sequence_starts(250, 7, 20, args, 0)))
    assert (resumed == epochs[0][7:]).all()


class Bomb:
    """Unpickled, it would leave a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture(scope="session")
def token_folders(tmp_path_factory):
    """The same ids as nanoGPT's scripts write them, and as llm.c's do."""
    root = tmp_path_factory.mktemp("tokens")
    ids = np.random.default_rng(0).integers(0, 300, 8000).astype(np.uint16)
    ids[5000] = 50256
    for folder, names in (("nanogpt", ("train", "val")), ("llmc", ("words_train", "words_val"))):
        (root / folder).mkdir()
        for name, part in zip(names, (ids[:7000], ids[7000:])):
            header = np.zeros(256, np.int32)
            header[:3] = 20240520, 1, len(part)
            content = (header.tobytes() if folder == "llmc" else b"") + part.tobytes()
            (root / folder / f"{name}.bin").write_bytes(content)
    (root / "nanogpt" / "meta.pkl").write_bytes(pickle.dumps(Bomb(root / "exploded")))
    return root


def test_token_folders(run_many, token_folders, tmp_path):
    """Both forms give the same losses; the vocabulary is the largest id's or the flag's; nothing is unpickled."""
    cases = [
        [*SMALL, "--max_steps", "3", "--dataset", token_folders / folder, "--log", tmp_path / f"{folder}.csv", *more]
        for folder, more in (("nanogpt", ["--sample", "5"]), ("llmc", ["--vocab_size", "50304"]))
    ]
    for status, out, err, _ in run_many("singlegpu/gpt.py", cases):
        assert status == 0 and "vocabulary 50304" in out and "7,000 + 992 tokens" in out, err
        sample = out.splitlines()[-1]
        assert sample.startswith("|") or len(sample.split(",")) == 6, sample
    logged = [rows(tmp_path / f"{folder}.csv")[0] for folder in ("nanogpt", "llmc")]
    assert logged[0]["val_loss"] == logged[1]["val_loss"]
    assert logged[0]["val_ppl"] == pytest.approx(math.exp(logged[0]["val_loss"])) and math.isnan(logged[0]["val_bpb"])
    assert not (token_folders / "exploded").exists()


def test_hub_data_set(run_many, tmp_path):
    """A data set with a column `text`, here a local one, is read through `datasets`, as bytes, and kept."""
    pytest.importorskip("datasets")
    folder = tmp_path / "lines"
    folder.mkdir()
    lines = [f'"line {number} of some text"' for number in range(400)]
    (folder / "train.csv").write_text("\n".join(["text", *lines]))
    (folder / "test.csv").write_text("\n".join(["text", *lines[:50]]))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.csv").write_text("words\na\n")
    cache = tmp_path / "cache"
    cases = [[*SMALL, "--max_steps", "3", "--dataset", tmp_path / name] for name in ("lines", "other", "lines")]
    good, bad, again = run_many("singlegpu/gpt.py", cases, HF_HOME=str(cache))
    train, val = (sum(len(line) - 1 for line in part) for part in (lines, lines[:50]))  # a newline for two quotes
    assert good[0] == 0 and f"{train:,} + {(val - 1) // 32 * 32:,} tokens" in good[1], good[2]
    assert bad[0] == 2 and "no column `text` among ['words']" in bad[2] and len(bad[2].splitlines()) == 1, bad[2]
    assert again[0] == 0 and again[1].split(";")[1] == good[1].split(";")[1]
    kept = next(cache.rglob("train_text.bytes")).read_text()
    assert kept == "".join(line.strip('"') + "\n" for line in lines)


def test_memory_does_not_grow_with_the_file(run_many, tmp_path):
    """Four gigabytes of token ids (a file with a hole) take no more memory than eight megabytes."""
    peaks = []
    for size in (1 << 22, 1 << 31):
        folder = tmp_path / str(size)
        folder.mkdir()
        for name, count in (("train", size), ("val", 4096)):
            with open(folder / f"{name}.bin", "wb") as file:
                file.truncate(2 * count)
        ((status, _, err, peak),) = run_many(
            "singlegpu/gpt.py", [[*SMALL, "--max_steps", "200", "--dataset", folder]], timeout=120
        )
        assert status == 0, err
        peaks.append(peak)
    assert peaks[1] < peaks[0] + 40_000, peaks  # KiB


def test_bad_input(run_many, text, token_folders, tmp_path):
    """Each mistake: status 2, one line on stderr that says what is wrong, no traceback."""
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("to be or not to be, that is the question")
    for name in ("empty", "odd", "half", "llama"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.bin").write_bytes(
            {"empty": b"", "odd": bytes(2001), "half": bytes(2000)}.get(
                name, np.array([20240801, 7, 100], np.int32).tobytes() + bytes(4000)
            )
        )
        if name != "half":
            shutil.copy(tmp_path / name / "train.bin", tmp_path / name / "val.bin")
    cases = {
        ("--dataset", tmp_path / "none.txt"): "none.txt",
        ("--dataset", tmp_path / "empty.txt"): "0 bytes are too short",
        ("--dataset", tmp_path / "short.txt"): "too few for --batch_size 24 sequences of --seq_len 32",
        ("--dataset", tmp_path / "empty"): "does not consist of 16-bit token ids",
        ("--dataset", tmp_path / "odd"): "does not consist of 16-bit token ids",
        ("--dataset", tmp_path / "llama"): "does not consist of 16-bit token ids",
        ("--dataset", tmp_path / "half"): "0 files",
        ("--dataset", token_folders / "nanogpt", "--vocab_size", "300"): "is beyond --vocab_size 300",
        ("--vocab_size", "100"): "is beyond --vocab_size 100",
        ("--seq_len", "100000"): "too few",
        ("--batch_size", "1200"): "too few",
        ("--d_model", "30", "--n_heads", "4"): "--d_model 30 does not divide into --n_heads 4",
        ("--n_heads", "0"): "--n_heads 0",
        ("--sample", "-1"): "--sample -1",
        ("--grad_accum_steps", "5"): "take 20 or 25",
    }
    arguments = [*SMALL, "--dataset", text, "--max_steps", "60"]
    results = run_many("singlegpu/gpt.py", [[*arguments, *case] for case in cases], HF_HUB_OFFLINE="1")
    assert_refused(results, cases)


def test_an_id_beyond_the_vocabulary_ends_all_processes(run, token_folders):
    """It is found by the rank that meets it, in the middle of the training."""
    arguments = [*SMALL, "--dataset", token_folders / "nanogpt", "--vocab_size", "300", "--epochs", "3"]
    status, _, err = run("multigpu", *arguments, processes=2, script="gpt.py")
    assert status == 2 and "is beyond --vocab_size 300" in err, err


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_compile_and_bf16(run, text, tmp_path):
    """Neither changes the loss by more than the rounding of bf16."""
    log = tmp_path / "log.csv"
    for more in ([], ["--compile", "--precision", "bf16"]):
        status, _, err = run(
            "singlegpu", *SMALL, "--dataset", text, "--max_steps", "20", "--log", log, *more, script="gpt.py"
        )
        assert status == 0, err
    plain, compiled = (row["val_loss"] for row in rows(log))
    assert plain != compiled and plain == pytest.approx(compiled, rel=0.01)


def test_tiny_shakespeare(run, real_data, tmp_path):
    """After 300 small steps below the 3.35 nats of letters drawn by their frequency alone."""
    log = tmp_path / "log.csv"
    sizes = ("--d_model", "64", "--n_heads", "4", "--num_layers", "2", "--seq_len", "64", "--batch_size", "16")
    status, out, err = run(
        "singlegpu", "--dataset", real_data / "tinyshakespeare/input.txt", *sizes, "--max_steps", "300",
        "--learning_rate", "3e-3", "--log", log, "--sample", "50", script="gpt.py",
    )  # fmt: skip
    assert status == 0 and "1,003,855 + 111,488 tokens" in out, err
    assert rows(log)[0]["val_loss"] < 2.6
