"""Flags are tested by their effect, as probe.py sees it. A flag of a section is proven once."""

import json
import re

import numpy as np
import pytest
from conftest import ROOT, curve, rows
from PIL import Image


@pytest.fixture
def seen(run, data, tmp_path):
    """seen(script, flags, processes) is what probe.py saw of each process, and the curve."""

    def seen(script, flags, processes=1):
        for path in tmp_path.glob("*.json*"):
            path.unlink()
        task = ["--dataset", "mnist", "--data_dir", data, "--model", "mlp", "--batch_size", 24]
        if "gpt" in script:
            words = "--d_model 32 --n_heads 2 --num_layers 2 --seq_len 32 --batch_size 24"
            task = ["--dataset", data / "words.txt", *words.split()]
        words = [*task, *flags.split(), "--log", tmp_path / "log.jsonl"]
        words += [] if re.search("max_steps|epochs", flags) else ["--max_steps", 3]
        before = (ROOT / "tests/probe.py", tmp_path)
        run(script, *words, processes=processes, before=before)
        found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("?.json"))]
        return found, curve(tmp_path / "log.jsonl")

    return seen


PRECISIONS = [
    ("singlegpu/images.py", 1, "fp32 bf16 fp16"),
    ("hybrid/images.py", 1, "bf16"),
    ("hybrid/gpt_fsdp.py", 2, "bf16"),
]
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@pytest.mark.parametrize(("script", "processes", "precisions"), PRECISIONS)
def test_precision(seen, script, processes, precisions):
    """The types in which layers compute. That of tf32 is a GPU's own."""
    for name in precisions.split():
        found, losses = seen(script, f"--precision {name}", processes)
        assert [step["dtypes"] for each in found for step in each] == [[DTYPES[name]]] * (
            3 * processes
        )
        assert np.isfinite(losses).all()


@pytest.mark.parametrize("script", ("multigpu/images.py", "hybrid/images.py"))
def test_comm_hook(seen, script):
    """Half the bytes are sent."""
    sent = {}
    for hook in ("none", "bf16", "fp16"):
        found, _ = seen(script, f"--comm_hook {hook}", 2)
        sent[hook] = sum(size for _, _, size in found[1][1]["sent"] if size > 1000)
    assert sent["bf16"] == sent["fp16"] == sent["none"] / 2 > 1e6


@pytest.mark.parametrize("script", ("multigpu/images.py", "hybrid/images.py"))
def test_grad_accum_steps(seen, script):
    """With three micro-batches, gradients are sent as often as with one; layers run thrice."""
    counts = []
    for parts in (1, 3):
        found, losses = seen(script, f"--grad_accum_steps {parts}", 2)
        sent = [name for name, _, size in found[0][1]["sent"] if size > 1000]
        counts.append((sent.count("all_reduce"), found[0][1]["calls"]))
    assert counts[0][0] == counts[1][0] > 0 and counts[1][1] == 3 * counts[0][1]


@pytest.mark.parametrize(("script", "processes"), [("multigpu/images.py", 2)])
def test_num_workers(seen, script, processes):
    """So many processes load data for each that trains, and the losses stay the same."""
    curves = []
    for count in (0, 2):
        found, losses = seen(script, f"--num_workers {count} --max_steps 2", processes)
        curves.append(losses)
        assert {each[0]["workers"] for each in found} == {count}
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("script", "processes"),
    [("singlegpu/images.py", 1), ("hybrid/gpt_fsdp.py", 2)],
)
def test_rate_and_norm(seen, script, processes):
    """The optimizer gets that rate (gpt scales it, from 0 up and down), and no longer gradient."""
    found, _ = seen(script, "--learning_rate 0.25", processes)
    free = [step["norm"] for step in found[0]]
    share = 1.0 if "images" in script else pytest.approx(1.05 - 2 / 3)  # after 2/3 of the steps
    assert found[0][1]["rate"] / 0.25 == share
    found, _ = seen(script, "--learning_rate 0.25 --max_grad_norm 0.01", processes)
    clipped = [step["norm"] for step in found[0]]
    assert min(free) > 0.02 and max(clipped) < 0.0101
    assert max(clipped) > 0.0099


def test_seed(run, data, tmp_path):
    """The same losses, or others."""
    curves = []
    for number, seed in enumerate((1, 1, 2)):
        log = tmp_path / f"{number}.jsonl"
        words = ("--dataset", "mnist", "--data_dir", data, "--model", "mlp", "--max_steps", 2)
        run("singlegpu/images.py", *words, "--seed", seed, "--log", log)
        curves.append(curve(log))
    assert (curves[0] == curves[1]).all() and (curves[0] != curves[2]).all()


def test_steps_and_rows(seen, tmp_path):
    """1,200 images are 50 steps of 24. --max_steps is the total, and ends an epoch."""
    for flags, at in (
        ("--epochs 2", [50, 100]),
        ("--epochs 1 --eval_every 20", [20, 40, 50]),
        ("--epochs 2 --max_steps 5", [5]),
        ("--max_steps 7 --eval_every 3", [3, 6, 7]),
    ):
        found, _ = seen("singlegpu/images.py", flags)
        assert len(found[0]) == at[-1]
        assert [row["step"] for row in rows(tmp_path / "log.jsonl")] == at


@pytest.mark.parametrize("task", ("images.py", "gpt.py", "text.py --model transformer"))
def test_dropout(run, tmp_path, task):
    """This share of values becomes zero."""
    script, *more = task.split()
    more += ["--model", "mlp"] if script == "images.py" else []
    more += ["--seq_len", 32, "--dataset", ROOT / "report.py"] if script == "gpt.py" else []
    words = (*more, "--dropout", 0.3, "--batch_size", 24, "--max_steps", 1)
    run(f"singlegpu/{script}", *words, before=(ROOT / "tests/probe.py", tmp_path))
    [step] = json.loads((tmp_path / "0.json").read_text())
    assert len(step["dropped"]) > 0
    assert np.mean(step["dropped"]) == pytest.approx(0.3, abs=0.03)


def test_image_size(run, tmp_path):
    """Photos are cut to that height and width."""
    for number in range(8):
        path = tmp_path / f"photos/{('val', 'train')[number % 2]}/{number // 4}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (50, 40), (number, 0, 0)).save(path)
    words = ("--dataset", tmp_path / "photos", "--image_size", 20, "--model", "cnn")
    more = ("--batch_size", 4, "--max_steps", 1, "--num_workers", 0)
    run("singlegpu/images.py", *words, *more, before=(ROOT / "tests/probe.py", tmp_path))
    [step] = json.loads((tmp_path / "0.json").read_text())
    assert step["shape"] == [4, 3, 20, 20]


def test_reconstructions(run, data, tmp_path):
    """16 images of 28 pixels, 2 pixels around each, above their reconstructions."""
    path = tmp_path / "drawn.png"
    words = ("--dataset", "mnist", "--data_dir", data, "--max_steps", 1)
    run("singlegpu/autoencoder.py", *words, "--reconstructions", path)
    assert Image.open(path).size == (16 * 30 + 2, 2 * 30 + 2)
