"""The scripts of quantize, on small models that the training scripts trained."""

import argparse
import functools
import math
import re
import shutil
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, Bomb, curve
from test_models import gpt, module, namespace, translation
from torch import nn
from torchao.utils import should_reduce_range

TRAIN = {  # what the training scripts are given
    "gpt": "gpt.py --d_model 64 --n_heads 2 --num_layers 2 --seq_len 32 --batch_size 24 --epochs 2 "
    "--learning_rate 3e-3 --dataset {data}/words.txt",
    "text": "text.py --model transformer --seq_len 32 --epochs 1 --max_steps 8 --dropout 0.9 "
    "--dataset {data}/tables",
    "nbow": "text.py --model nbow --seq_len 32 --max_steps 8 --dataset {data}/tables "
    "--learning_rate 1e-2",
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
    """
    absent = [(name, mode) for name in ("bf16", "float8-dynamic") for mode in ("eager", "compiled")]
    absent.append(("int8-torch.ao" if smaller else "fp32", "compiled"))
    lacks = "no linear layer has sizes that are multiples of 32"
    left_out = [row for row in rows if "left out" in row["MB"]]
    missing = [row for row in left_out if (row["row"], row["mode"]) not in absent]
    assert all(lacks in row["MB"] and not smaller for row in missing), missing
    rows = [row for row in rows if row not in left_out]
    before = float(rows[0][quality].split()[0])
    tolerance = {"val_ppl": 0.01 * before, "val_acc": 0.0051, "BLEU": 0.5}[quality]
    for row in rows:
        value, difference = map(float, row[quality].split())
        four_bits = quality == "BLEU" and row["row"].startswith("int4")  # a small model loses 1.7
        assert value == pytest.approx(before, abs=2 if four_bits else tolerance), row
        assert difference == pytest.approx(value - before, rel=0.05, abs=0.001 * before), row
        assert float(row["MB"]) < float(rows[0]["MB"]) or not smaller or row["row"] == "fp32"
        ratios = {cell.split()[1] for cell in row.values() if cell.endswith("x")}
        assert ratios and (ratios == {"1.00x"} or row["row"] != "fp32"), row
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
def test_int8_is_smaller_and_as_good(run, refused, trained, load_saved, tmp_path, model):
    """fp32 has the quality that the training reported; int8 keeps it in less memory."""
    script, snapshot, log = trained(model)
    words = ("--snapshot", snapshot, "--rounds", 1, "--eager", "--row", "int8-torch.ao")
    rows = table(run(script, *words, "--out", tmp_path / "saved.pt"))
    assert [row["row"] for row in rows] == ["fp32", "int8-torch.ao"]
    before = assert_as_good(rows, QUALITIES[model])
    if model == "gpt":
        assert before == pytest.approx(math.exp(curve(log)[-1, 1]), rel=0.01) and before < 12
        assert float(rows[1]["same %"]) > 95
        other = ("--dataset", ROOT / "tools/report.py")
        refused("is not what it was in training", script, "--snapshot", snapshot, *other)
    else:
        assert before == pytest.approx(curve(log, "val_acc")[-1, 2], abs=1e-4) and before > 0.6
    expected = r"b[\'\"].+" if model == "gpt" else r"tensor.* tensor.*"
    load_saved(script, tmp_path / "saved.pt", expected)


@pytest.mark.parametrize("model", ["lstm", "transformer"])
def test_translates_as_the_training_script(attempt, changed, data, load_saved, tmp_path, model):
    """Word for word, however the sentences are batched, and after --out.

    So many speeds are measured on batches of that size. To load torch.ao's LSTM would run code. A
    row that torch.compile cannot have is left out, and not measured eagerly.
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
    words = ("--snapshot", snapshot, "--data_dir", data, "--eager", "--out", saved)
    words = (*words, "--row", "int8-torch.ao", "--batch_size", 4, "--num_samples", 8, "--rounds", 3)
    end = "            for fp32_speed, speed in"
    spy = "            print('seen', [len(batch[0]) for batch in batches], np.shape(rounds))\n"
    status, out, err = attempt(changed("quantize/translation.py", {end: spy + end}), *words)
    if model == "lstm":
        assert status == 1 and not saved.exists(), err
        assert re.search(r"int8-torch.ao \| eager \| left out: Weights only load failed", out), out
        words = ("--data_dir", data, "--row", "int8-weights", "--num_samples", 8, "--rounds", 1)
        _, out, err = attempt("quantize/translation.py", "--snapshot", snapshot, *words)
        compiled = [line for line in out.splitlines() if " | compiled | " in line]
        assert len(compiled) == 1 and compiled[0].startswith("| fp32 | compiled | left out: "), err
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


ROWS = ["fp32", "int8-torch.ao", "int8-dynamic", "int8-weights", "int4-weights-g32"]


def test_all_rows(run, changed, tiny):
    """What this machine can have is measured; what it cannot has a row with the reason.

    int8-weights is slow here, and one text is a dash, as on GPUs for int8-dynamic. On CPUs any
    number of texts is measured.
    """
    changes = {'("int8-dynamic", "cuda")': '("int8-weights", "cpu")'}
    start = "start = time.perf_counter()"
    changes[start] = f'{start}\n        time.sleep(0.3 * (row == "int8-weights"))'
    words = (*tiny, "--batch_size", 1, "--num_samples", 8, "--rounds", 1, "--eager")
    rows = table(run(changed("quantize/gpt.py", changes), *words))
    left_out = {row["row"]: row["MB"] for row in rows if "left out" in row["MB"]}
    rows = {row["row"]: row for row in rows if row["row"] not in left_out}
    assert [row for row in rows if row != "bf16"] == ROWS
    assert {*left_out, "bf16"} == {"float8-dynamic", "bf16"}
    assert "capability" in left_out["float8-dynamic"] and "CPU" in left_out.get("bf16", "CPU")
    assert rows["int8-weights"]["one text"] == "-"
    assert all(float(rows[row]["one text"].split()[0]) > 0 for row in rows if row != "int8-weights")
    for name in ("prompts", "texts"):
        assert rows["fp32"][name].endswith(" 1.00x")
        assert float(rows["int8-weights"][name].split()[1].removesuffix("x")) < 1
    (before, _), (after, more) = (map(float, rows[row]["val_ppl"].split()) for row in ROWS[::4])
    assert more == pytest.approx(after - before, rel=0.06, abs=2e-4 * before) != 0
    same = [float(row["same %"]) for row in rows.values()]
    assert same[0] == 100 and 30 < min(same) < 100


def test_generation_and_saved_models(tiny, tmp_path):
    """Token by token, the cache gives what the training script's model finds likeliest.

    What each row that this machine has saves gives the same as before, bit for bit.
    """
    quantize = module("quantize/gpt.py")
    args = argparse.Namespace(snapshot=str(tiny[1]), dataset=str(tiny[3]))
    model, _ = quantize.load_trained(args)
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
    for row in ROWS:
        before, settings = quantize.quantize(model, row), vars(args) | {"row": row}
        torch.save({"settings": settings, "model": before.state_dict()}, tmp_path / "saved.pt")
        after, _ = quantize.load_quantized(tmp_path / "saved.pt")
        with torch.no_grad():
            found, logits = (m(tokens[:, :16], m.new_cache(3, 16), 0, 16) for m in (after, before))
        assert torch.equal(found, logits) and logits.float().std() > 0, row


@pytest.mark.parametrize("script", ("gpt", "text", "translation"))
def test_no_row_is_another_and_no_pickle_runs_code(tmp_path, script):
    """Where no layer fits the kernels there is no row, instead of one called int4 that is bf16.

    On a CPU without VNNI weights and inputs keep one bit free, so that two products fit.
    """
    tool = module(f"quantize/{script}.py")
    with pytest.raises(NotImplementedError, match="no linear layer has .* multiples of 32"):
        tool.quantize(nn.Sequential(nn.Linear(32, 40), nn.LSTM(32, 32)), "int4-weights-g32")
    layers = nn.Sequential(nn.Linear(32, 40), nn.Linear(32, 64))
    quantized = tool.quantize(layers, "int4-weights-g32")
    assert [type(layer.weight) is nn.Parameter for layer in quantized] == [True, False]
    weight = tool.quantize(layers, "int8-dynamic")[1].weight
    reduced = should_reduce_range(torch.device("cpu"))
    assert (weight.qdata.int().abs().max() <= 64) == reduced
    assert weight.act_quant_kwargs.reduce_range == reduced
    snapshot, bomb = tmp_path / "s.pt", tmp_path / "exploded"
    torch.save({"model": Bomb(bomb), "settings": {}}, snapshot)
    for load in tool.load_quantized, lambda path: tool.load_trained(namespace(snapshot=path)):
        with pytest.raises(Exception, match="Weights only load failed"):
            load(snapshot)
    assert not bomb.exists()


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_compiled_rows(attempt, trained, tmp_path):
    """They come after the eager ones, beside the fp32 of their own. All rows: tests/soak."""
    script, snapshot, _ = trained("nbow")
    row, size = "int8-weights", 120  # one batch: each other length is compiled anew
    words = ("--row", row, "--rounds", 1, "--num_samples", size, "--batch_size", size)
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    status, out, err = attempt(script, "--snapshot", snapshot, *words, **cache)
    assert status == 0, err  # PyTorch warns of torchao
    rows = table(out)
    modes = [(each["row"], each["mode"]) for each in rows]
    assert modes == [(each, mode) for mode in ("eager", "compiled") for each in ("fp32", row)]
    assert all(abs(float(each["val_acc"].split()[1])) < 0.01 for each in rows), rows
    assert [*tmp_path.glob("**/*.py")], "of torch.compile"
