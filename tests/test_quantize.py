"""The scripts of quantize, on small models that the training scripts trained."""

import argparse
import functools
import math
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from conftest import ENVIRONMENT, ROOT, curve
from test_models import gpt, module, namespace
from torch import nn

TRAIN = {  # what the training scripts are given
    "gpt": "gpt.py --d_model 64 --n_heads 2 --num_layers 2 --seq_len 32 --batch_size 24 --epochs 4 "
    "--learning_rate 3e-3",
    "text": "text.py --model transformer --seq_len 32 --epochs 1 --max_steps 40",
    "lstm": "translation.py --model lstm --seq_len 8 --epochs 1 --max_steps 25 --batch_size 48 "
    "--learning_rate 3e-3",
    "transformer": "translation.py --seq_len 8 --epochs 1 --max_steps 150 --batch_size 48 "
    "--learning_rate 3e-3",
}
QUALITIES = {"gpt": "val_ppl", "text": "val_acc", "lstm": "BLEU", "transformer": "BLEU"}


@pytest.fixture(scope="module")
def trained(run, data, tmp_path_factory):
    """trained(model) is the script, a snapshot, the log and what the training printed."""
    folder = tmp_path_factory.mktemp("trained")

    @functools.cache
    def trained(model):
        script, *words = TRAIN[model].split()
        snapshot, log = folder / f"{model}.pt", folder / f"{model}.jsonl"
        words += ["--dataset", data / "words.txt"] if model == "gpt" else []
        printed = run(f"singlegpu/{script}", *words, "--snapshot", snapshot, "--log", log)
        return f"quantize/{script}", snapshot, log, printed

    return trained


def table(out):
    """The rows of the printed table, {column: value} each."""
    lines = [line for line in out.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return [dict(zip(head, row)) for row in rows]


def assert_as_good(rows, quality, smaller=True):
    """All precisions have speeds, and the quality of fp32 in less memory.

    A CPU may lack instructions for bf16, and has no float8; torch.compile takes neither
    torch.ao nor the lstm, whose vocabulary may not fit the kernels. All other rows must be there.
    fp32 is the measure of the other speeds.
    """
    left_out = [row for row in rows if "left out" in row["MB"]]
    absent = [(name, mode) for name in ("bf16", "float8-dynamic") for mode in ("eager", "compiled")]
    absent.append(("int8-torch.ao" if smaller else "fp32", "compiled"))
    if not smaller:
        lacks = "no linear layer has sizes that are multiples of 32"
        absent += [("int4-weights-g32", row["mode"]) for row in left_out if lacks in row["MB"]]
    missing = [[*row.values()] for row in left_out if (row["row"], row["mode"]) not in absent]
    assert not missing, "\n".join(map(str, missing))
    rows = [row for row in rows if row not in left_out]
    before = float(rows[0][quality].split()[0])
    tolerance = {"val_ppl": 0.01 * before, "val_acc": 0.0051, "BLEU": 0.5}[quality]
    for row in rows:
        value, difference = map(float, row[quality].split())
        four_bits = quality == "BLEU" and row["row"].startswith("int4")  # a small model loses 1.7
        assert value == pytest.approx(before, abs=2 if four_bits else tolerance), row
        assert difference == pytest.approx(value - before, rel=0.05, abs=0.001 * before), row
        assert float(row["MB"]) < float(rows[0]["MB"]) or not smaller or row["row"] == "fp32"
        ratios = [cell.split()[1] for cell in row.values() if cell.endswith("x")]
        assert ratios and ({*ratios} == {"1.00x"} or row["row"] != "fp32"), row
    return before


@pytest.mark.parametrize("model", ("gpt", "text", "lstm"))  # all four: tests/soak
def test_int8_is_smaller_and_as_good(run, attempt, trained, tmp_path, model):
    """fp32 has the quality that the training reported; int8 keeps it in less memory.

    The lines of the docstring load what --out saved, and give what the model gave before.
    """
    script, snapshot, log, printed = trained(model)
    saved = tmp_path / "int8.pt"
    words = ("--snapshot", snapshot, "--rounds", 1, "--eager", "--row", "int8-torch.ao")
    if model == "lstm":  # loading it would run code
        status, out, err = attempt(script, *words, "--num_samples", 8, "--out", saved)
        assert status == 1 and not saved.exists(), err
        assert re.search(r"int8-torch.ao \| eager \| left out: Weights only load failed", out), out
    words = words if model == "lstm" else (*words, "--out", saved)
    rows = table(run(script, *words))
    assert [row["row"] for row in rows] == ["fp32", "int8-torch.ao"]
    before = assert_as_good(rows, QUALITIES[model])
    if model == "gpt":
        assert before == pytest.approx(math.exp(curve(log)[-1, 1]), rel=0.01) and before < 12
        assert float(rows[1]["same %"]) > 95
    elif model == "text":
        assert before == pytest.approx(curve(log, "val_acc")[-1, 2], abs=1e-4) and before > 0.6
    else:
        bleu = float(re.search(r"BLEU ([\d.]+)", printed)[1])
        assert before == pytest.approx(bleu, abs=0.1) and before > 2
    if model == "lstm":
        few = ("--num_samples", 8, "--eager", "--row", "int8-weights", "--out", saved)
        run(script, *words[:4], *few)
    lines = re.search(r"^    import .*?^$", (ROOT / script).read_text(), re.M | re.S)[0]
    lines = textwrap.dedent(lines).strip().replace("int8.pt", str(saved))
    assert len(lines.splitlines()) <= 5
    env = ENVIRONMENT | {"PYTHONPATH": str(ROOT / "quantize")}
    found = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, env=env)
    assert found.returncode == 0, found.stderr
    expected = {"gpt": r"b[\'\"].+", "text": r"tensor.* tensor.*", "lstm": r"\[.*\]"}[model]
    assert re.fullmatch(expected, found.stdout.strip()), found.stdout


def tiny_snapshot(path, **settings):
    """Writes an untrained GPT of four layers."""
    sizes = {"d_model": 64, "n_heads": 4, "num_layers": 4, "seq_len": 16, "vocab_size": 256}
    torch.manual_seed(0)
    weights = gpt.GPT(namespace(**sizes)).state_dict()
    # Large ones in the blocks: else the likeliest next token is the token itself in all rows.
    weights |= {name: 8 * weights[name] for name in weights if name.startswith("blocks")}
    torch.save({"model": weights, "settings": settings | sizes}, path)
    return path


ROWS = ["fp32", "int8-torch.ao", "int8-dynamic", "int8-weights", "int4-weights-g32"]


def test_all_rows(run, tmp_path, data):
    """What this machine can have is measured; what it cannot has a row with the reason.

    On CPUs any number of texts is measured, also with int8-dynamic.
    """
    snapshot = tiny_snapshot(tmp_path / "gpt.pt", dataset=str(data / "words.txt"))
    words = ("--snapshot", snapshot, "--batch_size", 1, "--num_samples", 8, "--rounds", 1)
    out = run("quantize/gpt.py", *words, "--eager")
    rows = table(out)
    left_out = {row["row"]: row["MB"] for row in rows if "left out" in row["MB"]}
    rows = [row for row in rows if row["row"] not in left_out]
    assert [row["row"] for row in rows if row["row"] != "bf16"] == ROWS
    assert {*left_out, "bf16"} == {"float8-dynamic", "bf16"}
    assert "capability" in left_out["float8-dynamic"] and "CPU" in left_out.get("bf16", "CPU")
    for row in rows:
        assert all(float(row[name].split()[0]) > 0 for name in ("one text", "texts"))
    same = [float(row["same %"]) for row in rows]
    assert same[0] == 100 and 30 < min(same) < 100


def test_a_saved_model_is_the_same(tmp_path, data):
    """Each row that this machine has gives the same before and after, bit for bit."""
    quantize = module("quantize/gpt.py")
    snapshot = tiny_snapshot(tmp_path / "gpt.pt", dataset=str(data / "words.txt"))
    args = argparse.Namespace(snapshot=str(snapshot))
    model, _ = quantize.load_trained(args)
    tokens = torch.randint(256, (2, 16))
    for row in ROWS:
        before = quantize.quantize(model, row)
        settings = vars(args) | {"row": row}
        torch.save({"settings": settings, "model": before.state_dict()}, tmp_path / "saved.pt")
        after, _ = quantize.load_quantized(tmp_path / "saved.pt")
        with torch.no_grad():
            logits = [each(tokens, each.new_cache(2, 16), 0, 16) for each in (before, after)]
        assert torch.equal(*logits) and logits[0].float().std() > 0, row


def test_int8_does_not_overflow():
    """On a CPU without VNNI weights and inputs keep one bit free, so that two products fit."""
    from torchao.utils import should_reduce_range

    quantize = module("quantize/gpt.py")
    layers = quantize.quantize(nn.Sequential(nn.Linear(64, 32)), "int8-dynamic")
    weight = layers[0].weight
    largest = weight.qdata.int().abs().max()
    reduced = should_reduce_range(torch.device("cpu"))
    assert largest <= 64 if reduced else largest > 100
    assert weight.act_quant_kwargs.reduce_range == reduced


def test_speeds_of_a_slow_row(run, changed, tmp_path, data):
    """Its ratios are below 1. What it cannot do is a dash, as on GPUs one text of int8-dynamic."""
    changes = {'("int8-dynamic", "cuda")': '("int8-weights", "cpu")'}
    start = "start = time.perf_counter()"
    changes[start] = f'{start}\n        time.sleep(row == "int8-weights")'
    snapshot = tiny_snapshot(tmp_path / "gpt.pt", dataset=str(data / "words.txt"))
    words = ("--snapshot", snapshot, "--num_samples", 8, "--rounds", 1, "--row", "int8-weights")
    fp32, slow = table(run(changed("quantize/gpt.py", changes), *words, "--eager"))
    assert fp32["one text"].endswith(" 1.00x") and slow["one text"] == "-"
    for name in ("prompts", "texts"):
        ratio = float(slow[name].split()[1].removesuffix("x"))
        assert ratio < 1 and fp32[name].endswith(" 1.00x"), (fp32, slow)


@pytest.mark.parametrize("script", ("gpt", "text", "translation"))
def test_a_row_quantizes_something(script):
    """Where no layer fits the kernels there is no row, instead of one called int4 that is bf16."""
    quantize = module(f"quantize/{script}.py").quantize
    with pytest.raises(NotImplementedError, match="no linear layer has .* multiples of 32"):
        quantize(nn.Sequential(nn.Linear(32, 40), nn.LSTM(32, 32)), "int4-weights-g32")
    quantized = quantize(nn.Sequential(nn.Linear(32, 40), nn.Linear(32, 64)), "int4-weights-g32")
    assert [type(layer.weight) is nn.Parameter for layer in quantized] == [True, False]


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_compiled_rows(attempt, trained):
    """They come after the eager ones, beside the fp32 of their own. All rows: tests/soak."""
    script, snapshot, *_ = trained("text")
    row = "int4-weights-g32"
    words = ("--snapshot", snapshot, "--row", row, "--rounds", 1, "--num_samples", 200)
    status, out, err = attempt(script, *words)  # PyTorch warns of torchao's tensors
    assert status == 0, err
    rows = table(out)
    assert [each["row"] for each in rows] == ["fp32", row] * 2
    assert [each["mode"] for each in rows] == ["eager"] * 2 + ["compiled"] * 2
    assert_as_good(rows, "val_acc")


def test_cached_keys_change_nothing(trained):
    """Token by token, generation gives what the training script's model finds likeliest."""
    quantize, args = module("quantize/gpt.py"), argparse.Namespace(snapshot=trained("gpt")[1])
    model, _ = quantize.load_trained(args)
    plain = gpt.GPT(args).eval()
    plain.load_state_dict(torch.load(args.snapshot, weights_only=True)["model"])
    prompts = torch.randint(97, 107, (3, 12), generator=torch.Generator().manual_seed(0))
    found = quantize.generate(model, prompts, 20)
    tokens = prompts
    with torch.no_grad():
        for _ in range(20):
            logits = plain(tokens).unflatten(0, tokens.shape)  # (B, T, V)
            tokens = torch.cat((tokens, logits[:, -1:].argmax(2)), 1)
    assert torch.equal(found, tokens[:, 12:])
    quantize.generate(model, prompts, args.seq_len - 11)  # as many as there are positions for
    with pytest.raises(ValueError, match="do not fit in --seq_len"):
        quantize.generate(model, prompts, args.seq_len - 10)


def test_a_text_that_has_moved(run, attempt, tmp_path):
    """--dataset says where it is."""
    text, moved, snapshot = (tmp_path / name for name in ("a.txt", "b.txt", "s.pt"))
    text.write_text("abcdefghij" * 100)
    words = ("--seq_len", 8, "--d_model", 16, "--num_layers", 1, "--max_steps", 1)
    run("singlegpu/gpt.py", "--dataset", text, *words, "--snapshot", snapshot)
    text.rename(moved)
    words = ("quantize/gpt.py", "--snapshot", snapshot, "--eager", "--row", "fp32", "--rounds", 1)
    status, _, err = attempt(*words)
    assert status and f"No such file or directory: '{text}'" in err, err
    assert len(table(run(*words, "--dataset", moved))) == 1


class Hostile:
    """A pickle of it makes a folder."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return Path.mkdir, (self.folder,)


def test_a_pickle_runs_no_code(attempt, tmp_path):
    """Neither as a snapshot nor as a saved model."""
    path, folder = tmp_path / "hostile.pt", tmp_path / "made"
    torch.save({"model": Hostile(folder), "settings": {}}, path)
    status, _, err = attempt("quantize/gpt.py", "--snapshot", path)
    assert status == 1 and "Weights only load failed" in err, err
    with pytest.raises(Exception, match="[Ww]eights"):
        module("quantize/gpt.py").load_quantized(path)
    assert not folder.exists()


def test_what_cannot_be_saved_is_told(attempt, tmp_path, data):
    snapshot = tiny_snapshot(tmp_path / "gpt.pt", dataset=str(data / "words.txt"))
    words = ("--snapshot", snapshot, "--out", tmp_path / "out.pt")
    status, _, err = attempt("quantize/gpt.py", *words)
    assert status == 2 and err.strip().endswith("--out needs --row")
    more = ("--eager", "--row", "float8-dynamic", "--rounds", 1, "--num_samples", 4)
    status, out, err = attempt("quantize/gpt.py", *words, *more)
    assert status == 1 and "| float8-dynamic | eager | left out: Float8" in out, err
    assert not (tmp_path / "out.pt").exists()
