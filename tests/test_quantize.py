"""quantize/gpt.py, on a small model that gpt.py has trained. quantize/mnist.py: test_mnist."""

import math
import re
import textwrap

import pytest
import torch
from conftest import ROOT, curve, load
from test_launchers import Bomb
from test_models import gpt, module, namespace
from torch import nn
from torchao.utils import should_reduce_range

SCRIPT = "quantize/gpt.py"
ROWS = ["fp32", "int8-torch.ao", "int8-dynamic", "int8-weights", "int4-weights-g32"]
ABSENT = ("bf16", "float8-dynamic")  # a CPU may lack instructions for bf16, and has no float8


@pytest.fixture(scope="module")
def trained(run, data, tmp_path_factory):
    """A snapshot, where its text is now, and the log of its training."""
    folder = tmp_path_factory.mktemp("trained")
    snapshot, text, log = (folder / name for name in ("s.pt", "moved.txt", "log.jsonl"))
    (folder / "words.txt").write_bytes((data / "words.txt").read_bytes())
    words = "--d_model 64 --n_heads 2 --num_layers 2 --seq_len 32 --batch_size 24 --epochs 8"
    words = ("singlegpu/gpt.py", *words.split(), "--learning_rate", 3e-3)
    run(*words, "--dataset", folder / "words.txt", "--snapshot", snapshot, "--log", log)
    (folder / "words.txt").rename(text)
    return snapshot, text, log


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
    absent = {(row["row"], row["mode"]) for row in left_out} - {("int8-torch.ao", "compiled")}
    assert {name for name, _ in absent} <= {*ABSENT}
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


def test_all_rows(run, changed, trained):
    """What this machine can have is measured; what it cannot has a row with the reason.

    fp32 has the quality that the training reported. int8-weights is slow here, and one text is a
    dash, as on GPUs for int8-dynamic.
    """
    snapshot, text, log = trained
    changes = {'("int8-dynamic", "cuda")': '("int8-weights", "cpu")'}
    start = "start = time.perf_counter()"
    changes[start] = f'{start}\n        time.sleep(0.3 * (row == "int8-weights"))'
    words = ("--snapshot", snapshot, "--dataset", text, "--rounds", 1, "--eager")
    rows = table(run(changed(SCRIPT, changes), *words))
    before = assert_as_good(rows)
    assert before == pytest.approx(math.exp(curve(log)[-1, 1]), rel=0.01) and before < 12
    rows = {row["row"]: row for row in rows}
    assert [row for row in rows if row not in ABSENT] == ROWS
    assert "capability" in rows["float8-dynamic"]["MB"]
    assert "left out" not in rows["bf16"]["MB"] or "this CPU" in rows["bf16"]["MB"]
    slow = rows["int8-weights"]
    assert slow["one text"] == "-" and "-" not in rows["int8-dynamic"]["one text"]
    assert max(float(slow[name].split()[1][:-1]) for name in ("prompts", "texts")) < 1
    same = [float(rows[row]["same %"]) for row in ROWS]
    assert same[0] == 100 and 90 < min(same) < 100


def test_a_saved_row(run, attempt, trained, tmp_path):
    """The lines of the script's docstring load what --out has saved, and write a text."""
    snapshot, text, _ = trained
    words = ("--snapshot", snapshot, "--dataset", text, "--row", "int8-torch.ao", "--rounds", 1)
    words = (*words, "--eager", "--batch_size", 1, "--num_samples", 8)
    rows = table(run(SCRIPT, *words, "--out", tmp_path / "int8.pt"))
    assert [row["row"] for row in rows] == ["fp32", "int8-torch.ao"]
    (tmp_path / "gpt.py").symlink_to(ROOT / SCRIPT)
    lines = re.search(r"^    import .*?^$", (ROOT / SCRIPT).read_text(), re.M | re.S)[0]
    (tmp_path / "lines.py").write_text(textwrap.dedent(lines))
    status, out, err = attempt(tmp_path / "lines.py", cwd=tmp_path)
    assert status == 0 and re.fullmatch(r"b[\'\"].+", out.splitlines()[-1]), (out, err)


def test_generation_and_saved_models(trained, tmp_path):
    """Token by token, the cache gives what the training script's model finds likeliest.

    What each row that this machine has saves gives the same as before, bit for bit.
    """
    quantize, (snapshot, text, _) = module(SCRIPT), trained
    args = namespace(**load(snapshot)["settings"])
    vars(args).update(snapshot=str(snapshot), dataset=str(text))
    model, _ = quantize.load_trained(args)
    plain = gpt.GPT(args).eval()
    plain.load_state_dict(load(snapshot)["model"])
    tokens = torch.randint(97, 107, (3, 6), generator=torch.Generator().manual_seed(0))
    found = quantize.generate(model, tokens, 27)  # as many as there are positions for
    for _ in range(27):
        with torch.no_grad():
            logits = plain(tokens[:, -32:])  # (B, T, V)
        tokens = torch.cat((tokens, logits[:, -1:].argmax(2)), 1)
    assert torch.equal(found, tokens[:, 6:]) and len(found.unique()) > 4
    with pytest.raises(ValueError, match="do not fit in --seq_len"):
        quantize.generate(model, tokens[:, :6], 28)
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
    for load_it in tool.load_quantized, lambda path: tool.load_trained(namespace(snapshot=path)):
        with pytest.raises(Exception, match="Weights only load failed"):
            load_it(snapshot)
    assert not bomb.exists()
