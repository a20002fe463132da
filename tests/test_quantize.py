"""The scripts of quantize, on small models that the training scripts trained."""

import argparse
import functools
import io
import math
import os
import re
import shutil
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, curve
from test_models import gpt, module, namespace, translation
from torch import nn

TRAIN = {  # what the training scripts are given
    "gpt": "gpt.py --d_model 64 --n_heads 2 --num_layers 2 --seq_len 32 --batch_size 24 --epochs 2 "
    "--learning_rate 3e-3 --dataset {data}/words.txt",
    "text": "text.py --model transformer --seq_len 32 --epochs 1 --max_steps 8 "
    "--dataset {data}/tables",
    "lstm": "translation.py --model lstm --seq_len 8 --epochs 1 --max_steps 25 --batch_size 48 "
    "--learning_rate 3e-3",
    "transformer": "translation.py --seq_len 8 --epochs 1 --max_steps 150 --batch_size 48 "
    "--learning_rate 3e-3",
}
QUALITIES = {"gpt": "val_ppl", "text": "val_acc", "lstm": "BLEU", "transformer": "BLEU"}


@pytest.fixture(scope="module")
def trained(run, data, tmp_path_factory):
    """trained(model) is the script, a snapshot and the log."""
    folder = tmp_path_factory.mktemp("trained")

    @functools.cache
    def trained(model):
        script, *words = TRAIN[model].format(data=data).split()
        snapshot, log = folder / f"{model}.pt", folder / f"{model}.jsonl"
        run(f"singlegpu/{script}", *words, "--snapshot", snapshot, "--log", log)
        return f"quantize/{script}", snapshot, log

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


@pytest.fixture
def load_saved(attempt, tmp_path):
    """load_saved(script, file, expected): what the lines of its docstring print of such a file."""

    def load_saved(script, file, expected):
        (folder := tmp_path / "used").mkdir()
        (folder / Path(script).name).symlink_to(ROOT / script)
        (folder / "int8.pt").symlink_to(file)
        lines = re.search(r"^    import .*?^$", (ROOT / script).read_text(), re.M | re.S)[0]
        (folder / "lines.py").write_text(textwrap.dedent(lines))
        status, out, err = attempt(folder / "lines.py", cwd=folder)
        assert status == 0 and re.fullmatch(expected, out.splitlines()[-1]), (out, err)

    return load_saved


@pytest.mark.parametrize("model", ("gpt", "text"))  # all four: tests/soak
def test_int8_is_smaller_and_as_good(run, trained, load_saved, tmp_path, model):
    """fp32 has the quality that the training reported; int8 keeps it in less memory."""
    script, snapshot, log = trained(model)
    words = ("--snapshot", snapshot, "--rounds", 1, "--eager", "--row", "int8-torch.ao")
    rows = table(run(script, *words, "--out", tmp_path / "saved.pt"))
    assert [row["row"] for row in rows] == ["fp32", "int8-torch.ao"]
    before = assert_as_good(rows, QUALITIES[model])
    if model == "gpt":
        assert before == pytest.approx(math.exp(curve(log)[-1, 1]), rel=0.01) and before < 12
        assert float(rows[1]["same %"]) > 95
    else:
        assert before == pytest.approx(curve(log, "val_acc")[-1, 2], abs=1e-4) and before > 0.6
    expected = r"b[\'\"].+" if model == "gpt" else r"tensor.* tensor.*"
    load_saved(script, tmp_path / "saved.pt", expected)


@pytest.mark.parametrize("model", ["lstm", "transformer"])
def test_translates_as_the_training_script(attempt, changed, data, load_saved, tmp_path, model):
    """Word for word, however the sentences are batched, and after --out.

    So many speeds are measured on batches of that size. To load torch.ao's LSTM would run code.
    """
    flags = {"model": model, "seq_len": 20, "dataset": "tables", "source": "number"}
    flags |= {"target": "name", "dropout": 0.0}
    args, tool = namespace(**flags, data_dir=str(data)), module("quantize/translation.py")
    (pairs,) = translation.read_data(args, ["test"])
    torch.manual_seed(model == "transformer")  # of another seed, hardly any sentence ends
    plain = translation.create_model(args, pairs).eval()
    for name, parameter in plain.named_parameters():  # untrained, they hardly ever end a sentence
        if parameter.dim() == 2 and name not in ("source.weight", "target.weight"):
            parameter.data *= 6
    snapshot, saved = tmp_path / "s.pt", tmp_path / "saved.pt"
    torch.save({"model": plain.state_dict(), "settings": flags}, snapshot)
    stepwise, _ = tool.load_trained(argparse.Namespace(snapshot=snapshot, data_dir=str(data)))
    found, tokenizer = [], pairs.tokenizers["target"]
    for parts in 1, 15, 4:
        batches = [pairs.__getitems__(part) for part in np.array_split(np.arange(0, 120, 8), parts)]
        found += [tool.translate_stepwise(stepwise, batches, pairs, args), []]
        for sources, lengths, _ in batches:
            found[-1] += translation.translate(plain, sources, lengths, tokenizer, args)
    assert len(found[0]) == 15 and all(each == found[0] for each in found)
    assert len({len(words.split()) for words in found[0]}) > 3
    small, sizes = tool.quantize(stepwise, "int8-torch.ao"), []
    assert len(tool.translate_stepwise(small, batches, pairs, args)) == 15
    for each in stepwise, small:
        torch.save(each.state_dict(), file := io.BytesIO())
        sizes.append(file.tell())
    assert sizes[1] < 0.4 * sizes[0]
    words = ("--snapshot", snapshot, "--data_dir", data, "--eager", "--out", saved)
    words = (*words, "--row", "int8-torch.ao", "--batch_size", 4, "--num_samples", 8, "--rounds", 3)
    end = "            for fp32_speed, speed in"
    spy = "            print('seen', [len(batch[0]) for batch in batches], np.shape(rounds))\n"
    status, out, err = attempt(changed("quantize/translation.py", {end: spy + end}), *words)
    if model == "lstm":
        assert status == 1 and not saved.exists(), err
        assert re.search(r"int8-torch.ao \| eager \| left out: Weights only load failed", out), out
    else:
        assert status == 0, err
        assert re.findall("seen (.*)", out) == ["[4, 4] (3, 1, 1)", "[4, 4] (3, 2, 1)"], out
        load_saved("quantize/translation.py", saved, r"\[.*\]")


@pytest.fixture
def tiny(tmp_path, data):
    """The flags that name the snapshot of a tiny GPT, and its text, which has moved."""
    sizes = {"d_model": 64, "n_heads": 4, "num_layers": 4, "seq_len": 16, "vocab_size": 256}
    torch.manual_seed(0)
    weights = gpt.GPT(namespace(**sizes)).state_dict()
    # Large ones in the blocks: else the likeliest next token is the token itself in all rows.
    weights |= {name: 8 * weights[name] for name in weights if name.startswith("blocks")}
    torch.save({"model": weights, "settings": {"dataset": "gone.txt"} | sizes}, tmp_path / "s.pt")
    return "--snapshot", tmp_path / "s.pt", "--dataset", data / "words.txt"


def load_tiny(tiny):
    """quantize/gpt.py as a module, and the trained model and the arguments of these flags."""
    quantize = module("quantize/gpt.py")
    args = argparse.Namespace(snapshot=str(tiny[1]), dataset=str(tiny[3]))
    model, _ = quantize.load_trained(args)
    return quantize, model, args


ROWS = ["fp32", "int8-torch.ao", "int8-dynamic", "int8-weights", "int4-weights-g32"]


def test_all_rows(run, tiny):
    """What this machine can have is measured; what it cannot has a row with the reason.

    On CPUs any number of texts is measured, also with int8-dynamic.
    """
    words = (*tiny, "--batch_size", 1, "--num_samples", 8, "--rounds", 1, "--eager")
    rows = table(run("quantize/gpt.py", *words))
    left_out = {row["row"]: row["MB"] for row in rows if "left out" in row["MB"]}
    rows = [row for row in rows if row["row"] not in left_out]
    assert [row["row"] for row in rows if row["row"] != "bf16"] == ROWS
    assert {*left_out, "bf16"} == {"float8-dynamic", "bf16"}
    assert "capability" in left_out["float8-dynamic"] and "CPU" in left_out.get("bf16", "CPU")
    for row in rows:
        assert all(float(row[name].split()[0]) > 0 for name in ("one text", "texts"))
    same = [float(row["same %"]) for row in rows]
    assert same[0] == 100 and 30 < min(same) < 100


def test_speeds_of_a_slow_row(run, changed, tiny):
    """Its ratios are below 1. What it cannot do is a dash, as on GPUs one text of int8-dynamic."""
    changes = {'("int8-dynamic", "cuda")': '("int8-weights", "cpu")'}
    start = "start = time.perf_counter()"
    changes[start] = f'{start}\n        time.sleep(row == "int8-weights")'
    words = (*tiny, "--num_samples", 8, "--rounds", 1, "--row", "int8-weights", "--eager")
    fp32, slow = table(run(changed("quantize/gpt.py", changes), *words))
    assert fp32["one text"].endswith(" 1.00x") and slow["one text"] == "-"
    for name in ("prompts", "texts"):
        ratio = float(slow[name].split()[1].removesuffix("x"))
        assert ratio < 1 and fp32[name].endswith(" 1.00x"), (fp32, slow)


def test_a_saved_model_is_the_same(tiny, tmp_path):
    """Each row that this machine has gives the same before and after, bit for bit."""
    quantize, model, args = load_tiny(tiny)
    tokens = torch.randint(256, (2, 16))
    for row in ROWS:
        before, settings = quantize.quantize(model, row), vars(args) | {"row": row}
        torch.save({"settings": settings, "model": before.state_dict()}, tmp_path / "saved.pt")
        after, _ = quantize.load_quantized(tmp_path / "saved.pt")
        with torch.no_grad():
            logits = [each(tokens, each.new_cache(2, 16), 0, 16) for each in (before, after)]
        assert torch.equal(*logits) and logits[0].float().std() > 0, row


def test_cached_keys_change_nothing(tiny):
    """Token by token, generation gives what the training script's model finds likeliest."""
    quantize, model, args = load_tiny(tiny)
    plain = gpt.GPT(namespace(**vars(args))).eval()
    plain.load_state_dict(torch.load(args.snapshot, weights_only=True)["model"])
    tokens = torch.randint(256, (3, 6), generator=torch.Generator().manual_seed(0))
    found = quantize.generate(model, tokens, 11)  # as many as there are positions for
    for _ in range(11):
        with torch.no_grad():
            logits = plain(tokens[:, -16:]).unflatten(0, tokens.shape)  # (B, T, V)
        tokens = torch.cat((tokens, logits[:, -1:].argmax(2)), 1)
    assert torch.equal(found, tokens[:, 6:]) and len(found.unique()) > 9
    with pytest.raises(ValueError, match="do not fit in --seq_len"):
        quantize.generate(model, tokens[:, :6], 12)


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
    script, snapshot, _ = trained("text")
    row, size = "int4-weights-g32", 200  # one batch: each other length is compiled anew
    words = ("--row", row, "--rounds", 1, "--num_samples", size, "--batch_size", size)
    status, out, err = attempt(script, "--snapshot", snapshot, *words)  # PyTorch warns of torchao
    assert status == 0, err
    rows = table(out)
    assert [each["row"] for each in rows] == ["fp32", row] * 2
    assert [each["mode"] for each in rows] == ["eager"] * 2 + ["compiled"] * 2
    assert_as_good(rows, "val_acc")


class Hostile:
    """A pickle of it makes a folder."""

    def __reduce__(self):
        return os.mkdir, ("made",)


@pytest.mark.parametrize("script", ("gpt", "text", "translation"))
def test_a_pickle_runs_no_code(tmp_path, monkeypatch, script):
    """Neither as a snapshot nor as a saved model."""
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Hostile(), "settings": {}}, "hostile.pt")
    quantize = module(f"quantize/{script}.py")
    for load in (
        quantize.load_quantized,
        lambda path: quantize.load_trained(namespace(snapshot=path)),
    ):
        with pytest.raises(Exception, match="Weights only load failed"):
            load("hostile.pt")
    assert not os.path.exists("made")
