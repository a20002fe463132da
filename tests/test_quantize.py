"""quantize/gpt.py, on a small model that gpt.py has trained. quantize/mnist.py: test_mnist."""

import argparse
import math
import re
import textwrap

import pytest
import torch
from conftest import ROOT, curve
from test_launchers import Bomb
from test_models import gpt, module, namespace
from torch import nn
from torchao.utils import should_reduce_range

SCRIPT = "quantize/gpt.py"
TRAIN = "--d_model 64 --n_heads 2 --num_layers 2 --seq_len 32 --batch_size 24 --epochs 2"
ABSENT = ("bf16", "float8-dynamic")  # a CPU may lack instructions for bf16, and has no float8


@pytest.fixture(scope="module")
def trained(run, data, tmp_path_factory):
    """A snapshot and the log of its training."""
    snapshot, log = (tmp_path_factory.mktemp("trained") / name for name in ("s.pt", "log.jsonl"))
    words = (*TRAIN.split(), "--learning_rate", 3e-3, "--dataset", data / "words.txt")
    run("singlegpu/gpt.py", *words, "--snapshot", snapshot, "--log", log)
    return snapshot, log


def table(out):
    """The rows of the printed table, {column: value} each."""
    lines = [line for line in out.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return [dict(zip(head, row)) for row in rows]


def assert_as_good(rows):
    """All precisions have speeds, and the quality of fp32 in less memory. Returns that of fp32.

    torch.compile does not take torch.ao. All other rows must be there.
    """
    left_out = [row for row in rows if "left out" in row["MB"]]
    absent = {(row["row"], row["mode"]) for row in left_out}
    modes = ("eager", "compiled")
    assert absent <= {
        *[(row, mode) for row in ABSENT for mode in modes],
        ("int8-torch.ao", modes[1]),
    }
    rows = [row for row in rows if row not in left_out]
    before = float(rows[0]["val_ppl"].split()[0])
    for row in rows:
        value, difference = map(float, row["val_ppl"].split())
        assert value == pytest.approx(before, rel=0.01), row
        assert difference == pytest.approx(value - before, rel=0.05, abs=0.001 * before), row
        assert float(row["MB"]) < float(rows[0]["MB"]) or row["row"] == "fp32"
        ratios = {cell.split()[1] for cell in row.values() if cell.endswith("x")}
        assert ratios and (ratios == {"1.00x"} or row["row"] != "fp32"), row
    return before


def test_int8_is_smaller_and_as_good(run, attempt, trained, tmp_path):
    """fp32 has the quality that the training reported; int8 keeps it in less memory.

    The lines of the script's docstring load what --out has saved, and write a text.
    """
    snapshot, log = trained
    words = ("--snapshot", snapshot, "--rounds", 1, "--eager", "--row", "int8-torch.ao")
    rows = table(run(SCRIPT, *words, "--out", tmp_path / "int8.pt"))
    assert [row["row"] for row in rows] == ["fp32", "int8-torch.ao"]
    before = assert_as_good(rows)
    assert before == pytest.approx(math.exp(curve(log)[-1, 1]), rel=0.01) and before < 12
    assert float(rows[1]["same %"]) > 95
    (tmp_path / "gpt.py").symlink_to(ROOT / SCRIPT)
    lines = re.search(r"^    import .*?^$", (ROOT / SCRIPT).read_text(), re.M | re.S)[0]
    (tmp_path / "lines.py").write_text(textwrap.dedent(lines))
    status, out, err = attempt(tmp_path / "lines.py", cwd=tmp_path)
    assert status == 0 and re.fullmatch(r"b[\'\"].+", out.splitlines()[-1]), (out, err)


@pytest.fixture
def tiny(tmp_path, data):
    """The flags that name the snapshot of a tiny GPT, and its text, which has moved."""
    sizes = {"d_model": 64, "n_heads": 4, "num_layers": 4, "seq_len": 16, "vocab_size": 256}
    torch.manual_seed(0)
    weights = gpt.GPT(namespace(**sizes)).state_dict()
    # Large ones in the blocks: else the likeliest next token is the token itself in all rows.
    weights |= {name: 8 * weights[name] for name in weights if name.startswith("blocks")}
    num_samples = len(gpt.read_data(namespace(dataset=data / "words.txt", **sizes))[0])
    settings = {"dataset": "gone.txt", "num_samples": num_samples} | sizes
    torch.save({"model": weights, "settings": settings}, tmp_path / "s.pt")
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
            logits = plain(tokens[:, -16:])  # (B, T, V)
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


def test_no_row_is_another_and_no_pickle_runs_code(tmp_path):
    """Where no layer fits the kernels there is no row, instead of one called int4 that is bf16.

    On a CPU without VNNI weights and inputs keep one bit free, so that two products fit.
    """
    tool = module(SCRIPT)
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
