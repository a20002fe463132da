"""The scripts of quantize, on small models that the training scripts trained."""

import functools
import math
import re

import pytest
import torch
from conftest import curve
from test_models import gpt, module, namespace

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
    assert max(map(len, lines)) <= 100
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return [dict(zip(head, row)) for row in rows]


def assert_as_good(rows, quality, smaller=True):
    """The other precisions have the quality of fp32, in less memory; all have speeds."""
    before = float(rows[0][quality])
    tolerance = {"val_ppl": 0.01 * before, "val_acc": 0.005, "BLEU": 0.5}[quality]
    for row in rows[1:]:
        assert float(row[quality]) == pytest.approx(before, abs=tolerance), row
        assert float(row["MB"]) < float(rows[0]["MB"]) or not smaller
        assert [cell for cell in row.values() if cell.endswith("x")]
    assert rows[-1]["precision"] == "int8"
    return before


@pytest.mark.parametrize("model", QUALITIES)
def test_int8_is_smaller_and_as_good(run, trained, model):
    """fp32 has the quality that the training reported; int8 keeps it in less memory."""
    script, snapshot, log, printed = trained(model)
    rows = table(run(script, "--snapshot", snapshot, "--rounds", 1))
    before = assert_as_good(rows, QUALITIES[model])
    if model == "gpt":
        assert before == pytest.approx(math.exp(curve(log)[-1, 1]), rel=0.01) and before < 12
    elif model == "text":
        assert before == pytest.approx(curve(log, "val_acc")[-1, 2], abs=1e-4) and before > 0.6
    else:
        bleu = float(re.search(r"BLEU ([\d.]+)", printed)[1])
        assert before == pytest.approx(bleu, abs=0.1) and before > 2


def test_cached_keys_change_nothing(trained):
    """Token by token, generation gives what the training script's model finds likeliest."""
    quantize, snapshot = module("quantize/gpt.py"), torch.load(trained("gpt")[1], weights_only=True)
    args = namespace(**snapshot["settings"])
    model, _ = quantize.create_trained(args, snapshot["model"])
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


def test_snapshots_that_do_not_fit_are_refused(attempt, trained, tmp_path):
    """Missing, truncated or of another task: a line of error."""
    whole = trained("gpt")[1].read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    for path in (tmp_path / "none.pt", tmp_path / "cut.pt", trained("text")[1]):
        status, _, err = attempt("quantize/gpt.py", "--snapshot", path)
        assert status == 1 and path.name in err and "Traceback" not in err, err
