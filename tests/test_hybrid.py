"""Stages of a model, on devices or in pipelines, and shards. One loss curve: test_training.py."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import CONSTANT, ROOT, assert_same_weights, curve, load, rows
from fork_server import run_all
from test_training import FSDP, PIPELINE

IMAGES = "hybrid/images.py"
MNIST = "--dataset mnist --batch_size 24 --learning_rate 3e-4"
GPT = "--d_model 32 --n_heads 2 --num_layers 4 --seq_len 32 --batch_size 48 --learning_rate 3e-4"
CREATED = "    optimizer = create_optimizer(model, args)\n"
STEP = "        scaler.step(optimizer)\n"


@pytest.fixture
def images(data):
    return [*MNIST.split(), "--data_dir", data]


@pytest.fixture
def words(data):
    return [*GPT.split(), "--dataset", data / "text.txt"]


def test_batch_norm_in_stages(logged, images, tmp_path):
    """The losses and the weights are those of whole models; the statistics are rank 0's."""
    base = [*images, "--model", "resnet18", "--max_steps", 4, "--eval_every", 2, "--snapshot"]
    one = logged("multinode/images.py", *base, tmp_path / "one.pt", processes=2)
    log = logged(IMAGES, *base, tmp_path / "parts.pt", "--num_stages", 4, processes=2)
    np.testing.assert_allclose(curve(log, "val_acc"), curve(one, "val_acc"), rtol=1e-4)
    assert_same_weights(tmp_path / "one.pt", tmp_path / "parts.pt", rounding=1e-4)
    assert {len(row["stages"]) for row in rows(log)} == {4}


def as_file(folder):
    """Returns the file that PyTorch's own command makes of a folder of shards."""
    [newest] = folder.glob("step-*")
    words = f"-m torch.distributed.checkpoint.format_utils dcp_to_torch {newest} {folder}.file"
    [(status, _, err)] = run_all([words.split()], [{}], folder.parent)
    assert status == 0, err
    return Path(f"{folder}.file")


MOVES = [("multinode/gpt.py", 3), (PIPELINE, 4), ("singlegpu/gpt.py", 1)]


def test_gpt_snapshots_move(logged, words, changed, tmp_path):
    """Each of three scripts goes on where another has stopped, with the losses of one that did all.

    That shards move, also to other numbers of processes, is proven by test_emulator.py.
    """
    base, moved = [*words, "--eval_every", 3, "--snapshot", tmp_path / "s.pt", "--max_steps"], []
    for number, (script, processes) in enumerate(MOVES, start=1):
        copy = changed(script, CONSTANT)
        moved.append(curve(logged(copy, *base, 3 * number, processes=processes))[-1])
    (tmp_path / "s.pt").unlink()
    stayed = curve(logged(changed("singlegpu/gpt.py", CONSTANT), *base, 9))
    np.testing.assert_allclose(moved, stayed, rtol=1e-5)


def test_the_file_of_shards(logged, run, words, tmp_path):
    """PyTorch's command makes it, all scripts start from it, and it is quantized."""
    log = logged(FSDP, *words, "--max_steps", 2, "--snapshot", tmp_path / "shards", processes=2)
    loss, path = curve(log)[-1, 1], as_file(tmp_path / "shards")
    start = (*words, "--learning_rate", 0, "--max_steps", 1, "--init_from", path)
    for script, processes in ("singlegpu/gpt.py", 1), (FSDP, 2), (PIPELINE, 2):
        log = logged(script, *start, processes=processes)
        assert curve(log)[0, 1] == pytest.approx(loss, rel=1e-5)
    out = run("quantize/gpt.py", "--snapshot", path, *"--row fp32 --eager --rounds 1".split())
    perplexity = re.search(r"fp32 \| eager \| [\d.]+ \| ([\d.]+)", out)[1]
    assert float(perplexity) == pytest.approx(np.exp(loss), rel=1e-3)


def created(path):
    """The change that saves the weights of the start."""
    return {CREATED: f"{CREATED}    rank == 0 and torch.save(model.state_dict(), {str(path)!r})\n"}


NORM = "stage.get_parameter('norm.bias')"
DRIFTS = {  # script, processes, flags; a parameter, and where it drifts: copies of a stage, of a
    # shard; the ends of two pipelines; the embedding, which both ends of one pipeline have
    "stage": (IMAGES, 2, "--model mlp", "model[-1].bias", "rank", "6.bias"),
    "shard": (FSDP, 4, "--shard_size 2", "model.norm.bias.to_local()", "rank // 2", "norm.bias"),
    "pipelines": (PIPELINE, 4, "", NORM, "(rank == 3)", "norm.bias"),
    "ends": (PIPELINE, 2, "", "stage.embedding.weight", "rank", "embedding.weight"),
}


@pytest.mark.parametrize("name", DRIFTS)
def test_copies_that_differ_are_named(attempt, words, images, changed, name):
    script, processes, flags, parameter, ranks, told = DRIFTS[name]
    step = "        optimizer.step()\n" if script == FSDP else STEP
    drift = f"        if {ranks}:\n            {parameter}.data.add_(1)\n"
    task = [*(images if script == IMAGES else words), *flags.split(), "--max_steps", 2]
    status, _, err = attempt(changed(script, {step: step + drift}), *task, processes=processes)
    assert status == 1 and f"step 2: processes differ in {told}\n" in err, err


def test_a_step_that_one_stage_skips_is_skipped_by_all(run, words, changed, tmp_path):
    """With fp16, gradients may overflow in one stage. The weights then stay as they are."""
    overflow = "        if rank == 1:\n            gradients[-1] = math.inf\n"
    reducing = "        reducing.wait()\n"
    copy = changed(PIPELINE, created(tmp_path / "first.pt") | {reducing: reducing + overflow})
    more = ("--precision", "fp16", "--max_steps", 2, "--snapshot", tmp_path / "s.pt")
    run(copy, *words, *more, processes=2)
    first, snapshot = torch.load(tmp_path / "first.pt"), load(tmp_path / "s.pt")
    assert snapshot["scaler"]["scale"] == 2.0**14
    assert all(torch.equal(x, snapshot["model"][name]) for name, x in first.items())


def test_the_slowest_stage_is_named(run, words, tmp_path):
    """That of the pipeline that comes last; sending, waiting and R are those of the log."""
    log, before = tmp_path / "log.jsonl", (ROOT / "tests/helpers/slow.py", "step", 1, 0.2)
    words = (*words, "--max_steps", 13, "--dropout", 0.1, "--log", log)
    out = run(PIPELINE, *words, processes=4, before=before)
    totals = [row["comm_total"] for row in rows(log)]
    sending = min(np.mean(totals[:2]), np.mean(totals[2:]))
    waiting = f"waiting {np.mean(totals) - sending:.3f} s for rank 1 on "
    assert f"\nsending {sending:.3f} s, {waiting}" in out, (totals, out)
    phases = ("forward", "backward", "bubble", "optimizer")
    compute = sum(row[name] for row in rows(log) for name in phases)
    assert f"\nR = compute / sending = {compute / 4 / sending:.1f}: " in out, out


def test_a_half_written_snapshot_is_not_resumed(attempt, words, changed, tmp_path):
    """Rank 0 is killed before its last file: the run goes on from the snapshot before."""
    folder, base = tmp_path / "half", [*words, "--max_steps", 12, "--eval_every", 4]
    last = '        (folder / "settings.json").write_text('
    kill = "        folder.name.endswith('8') and os.kill(os.getpid(), 9)\n"
    status, *_ = attempt(
        changed(FSDP, {last: kill + last}), *base, "--snapshot", folder, processes=2
    )
    assert status and {path.name[-2:] for path in folder.iterdir()} == {"04", "08"}
    more = ("--snapshot", folder, "--log", tmp_path / "log")
    status, *_ = attempt(FSDP, *base, *more, processes=3)  # PyTorch warns
    assert status == 0 and [row["step"] for row in rows(tmp_path / "log")[::3]] == [8, 12]
    assert [path.name for path in folder.iterdir()] == ["step-000000012"]


MISFITS = (  # what is said, script, flags
    ("--num_stages must divide 1 processes, and", PIPELINE, "--num_stages 2"),
    ("--num_stages must be at most 3, the layers", IMAGES, "--model mlp --num_stages 4"),
    ("--shard_size 2 must divide 1", FSDP, "--shard_size 2"),
    ("cannot write none/folder", FSDP, "--snapshot none/folder"),
)


def test_what_does_not_fit_is_named(refused, images, words):
    for told, script, flags in MISFITS:
        task = images if script == IMAGES else words
        assert refused(told, script, *task, *flags.split()).count("\n") == 1
