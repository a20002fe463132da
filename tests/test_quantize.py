"""The scripts of quantize, on small models that the training scripts trained."""

import functools
import math
import re

import pytest
import torch
from conftest import curve
from test_models import gpt, module, namespace

TRAIN = {
    "gpt": "--d_model 64 --n_heads 2 --num_layers 2 --seq_len 32 --batch_size 24 --epochs 4 "
    "--learning_rate 3e-3",
    "text": "--model transformer --seq_len 32 --epochs 1 --max_steps 60",
    "translation": "--model lstm --seq_len 8 --epochs 1 --max_steps 25 --batch_size 48 "
    "--learning_rate 3e-3",
}


@pytest.fixture(scope="module")
def trained(run, data, tmp_path_factory):
    """trained(script) is a snapshot, the log and what the training printed."""
    folder = tmp_path_factory.mktemp("trained")

    @functools.cache
    def trained(script):
        snapshot, log = folder / f"{script}.pt", folder / f"{script}.csv"
        words = [*TRAIN[script].split(), "--snapshot", snapshot, "--log", log]
        words += ["--dataset", data / "words.txt"] if script == "gpt" else []
        return snapshot, log, run(f"singlegpu/{script}.py", *words)

    return trained


def table(out):
    """{precision: {column: value}} of the printed table that has a precision in each row."""
    head, found = [], {}
    for line in out.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if "precision" in cells:
            head = cells
        elif head and len(cells) == len(head) and "---" not in cells[0]:
            row = dict(zip(head, cells))
            found[row["precision"]] = row
    return found


QUALITIES = {"gpt": "ppl", "text": "acc", "translation": "BLEU"}


@pytest.mark.parametrize("script", QUALITIES)
def test_int8_is_smaller_and_as_good(run, trained, script):
    """fp32 has the quality that the training reported; int8 keeps it in less memory."""
    snapshot, log, printed = trained(script)
    more = ("--precisions", "fp32", "int8", "--rounds", 1)
    rows = table(run(f"quantize/{script}.py", "--snapshot", snapshot, *more))
    column = next(name for name in rows["fp32"] if QUALITIES[script] in name)
    before, after = (float(rows[name][column]) for name in ("fp32", "int8"))
    if script == "gpt":
        assert before == pytest.approx(math.exp(curve(log)[-1, 1]), rel=0.01)
        assert before < 12 and after == pytest.approx(before, rel=0.01)
    elif script == "text":
        assert before == pytest.approx(curve(log, "val_acc")[-1, 2], abs=1e-4)
        assert before > 0.6 and after == pytest.approx(before, abs=0.005)
    else:
        assert before == pytest.approx(float(re.search(r"BLEU ([\d.]+)", printed)[1]), abs=0.1)
        assert before > 2 and after == pytest.approx(before, abs=0.5)
    assert float(rows["int8"]["MB"]) < float(rows["fp32"]["MB"])
    assert all(float(value) > 0 for name, value in rows["int8"].items() if name.endswith("/s"))


def test_cached_keys_change_nothing(trained):
    """Token by token, generation gives what the training script's model finds likeliest."""
    quantize, snapshot = module("quantize/gpt.py"), torch.load(trained("gpt")[0], weights_only=True)
    sizes = snapshot.get("settings", snapshot.get("args"))
    args = namespace(**sizes | {"load": None, "backend": "torch.ao", "snapshot": ""})
    model, _ = quantize.create_model(args, snapshot["model"], "fp32", torch.device("cpu"))
    plain = gpt.GPT(args).eval()
    plain.load_state_dict(snapshot["model"])
    prompts = torch.randint(97, 107, (3, 12), generator=torch.Generator().manual_seed(0))
    found, *_ = quantize.generate(model, prompts, 20)
    tokens = prompts
    with torch.no_grad():
        for _ in range(20):
            logits = plain(tokens).unflatten(0, tokens.shape)  # (B, T, V)
            tokens = torch.cat((tokens, logits[:, -1:].argmax(2)), 1)
    assert torch.equal(found, tokens[:, 12:])


def test_snapshots_that_do_not_fit(attempt, trained, tmp_path):
    """Missing, truncated or of another task: a line of error."""
    whole = trained("gpt")[0].read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    for path in (tmp_path / "none.pt", tmp_path / "cut.pt", trained("text")[0]):
        status, _, err = attempt("quantize/gpt.py", "--snapshot", path)
        assert status in (1, 2) and path.name in err and "Traceback" not in err, err
