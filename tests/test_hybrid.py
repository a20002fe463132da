"""Stages of a model, on devices or in pipelines, and shards, times data parallelism."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import CONSTANT, ROOT, assert_same_weights, curve, load, rows
from fork_server import run_all
from test_stops import signalled

IMAGES, PIPELINE, FSDP = "hybrid/images.py", "hybrid/gpt_pipeline.py", "hybrid/gpt_fsdp.py"
MNIST = "--dataset mnist --batch_size 24 --learning_rate 3e-4"
GPT = "--d_model 32 --n_heads 2 --num_layers 4 --seq_len 32 --batch_size 48 --learning_rate 3e-4"
CREATED = "    optimizer = create_optimizer(model, args)\n"
STEP = "        scaler.step(optimizer)\n"
END = "    bar.close()\n"


@pytest.fixture
def images(data):
    return [*MNIST.split(), "--data_dir", data]


@pytest.fixture(scope="module")
def words(data, tmp_path_factory):
    """A text with 97 sequences to validate on: of two pipelines, one has a batch more."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text((data / "words.txt").read_text()[:31_050])
    return [*GPT.split(), "--dataset", path]


STAGED = [  # model, a script without stages, the processes of both, more flags of the other
    ("cnn", "singlegpu/images.py", (1, 3), ("--grad_accum_steps", 2)),
    ("resnet18", "multinode/images.py", (2, 2), ()),
]


@pytest.mark.parametrize(("model", "script", "processes", "more"), STAGED)
def test_images_one_loss_curve(logged, images, tmp_path, model, script, processes, more):
    """Split by layers, with the losses of whole ones. BatchNorm's statistics are rank 0's."""
    base = [*images, "--model", model, "--max_steps", 4, "--eval_every", 2, "--snapshot"]
    one = logged(script, *base, tmp_path / "one.pt", processes=processes[0])
    more = (*base, tmp_path / "parts.pt", "--num_stages", 4, *more)
    log = logged(IMAGES, *more, processes=processes[1])
    np.testing.assert_allclose(curve(log, "val_acc"), curve(one, "val_acc"), rtol=1e-4)
    for row in rows(log):
        assert sum(row["stages"]) == row["parameters"] and len(row["stages"]) == 4
    if model == "resnet18":
        assert_same_weights(tmp_path / "one.pt", tmp_path / "parts.pt", rounding=1e-4)


# The bytes of all tensors of a process: weights and two moments of 4 bytes; gradients are gone.
HELD = f"""{END}    import gc
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter)]
    storages = {{x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}}
    print("held", sum(storages.values()) / sum(p.numel() for p in model.parameters()))
"""
LAUNCHES = {  # processes, more arguments, and the bytes that FSDP holds for each parameter
    PIPELINE: (
        ((2, 2), "--num_stages 2 --schedule gpipe --num_microbatches 3", None),
        (4, "--num_stages 4 --num_microbatches 6", None),
    ),
    FSDP: (
        (4, "--checkpoint_activations --grad_accum_steps 3", 12 / 4),
        ((2, 2), "--shard_size 2 --num_workers 1", 12 / 2),
    ),
}


@pytest.mark.parametrize("script", LAUNCHES)
def test_gpt_one_loss_curve(attempt, logged, words, changed, tmp_path, script):
    """The losses of one process, and its gradients: AdamW hides that they are N times too large.

    With FSDP, a process holds its share of weights and moments, and no more.
    """
    base = [*words, "--max_steps", 8, "--eval_every", 4]
    one = logged("singlegpu/gpt.py", *base)
    copy = changed(script, {END: HELD} if script == FSDP else {})
    for number, (processes, more, size) in enumerate(LAUNCHES[script]):
        log = tmp_path / f"{number}.jsonl"
        more = [*more.split(), "--log", log]
        status, out, err = attempt(copy, *base, *more, processes=processes)
        assert status == 0, err
        np.testing.assert_allclose(curve(log), curve(one), rtol=1e-6)
        norms = [curve(path, "grad_norm")[:, 2] for path in (log, one)]
        np.testing.assert_allclose(*norms, rtol=1e-4)
        for row in rows(log):
            assert row["parameters"] == rows(one)[0]["parameters"]
            assert all(row[name] > 0 for name in ("forward", "backward", "optimizer"))
            assert row["comm_total"] > 0 and row.get("bubble", 1) > 0
            assert ("bubble" in row) == (script == PIPELINE)
        held = [float(bytes) for bytes in re.findall(r"^held ([\d.]+)", out, re.M)]
        assert held == pytest.approx([size] * np.prod(processes) if size else [], rel=0.1)


def as_file(snapshot):
    """Returns it or, of a folder, a file that PyTorch's own command makes of it."""
    if snapshot.is_file():
        return snapshot
    [newest] = snapshot.glob("step-*")
    words = f"-m torch.distributed.checkpoint.format_utils dcp_to_torch {newest} {snapshot}.file"
    [(status, _, err)] = run_all([words.split()], [{}], snapshot.parent)
    assert status == 0, err
    return Path(f"{snapshot}.file")


MOVES = [("multinode/gpt.py", 3), (PIPELINE, 4), ("singlegpu/gpt.py", 1)]


def test_gpt_snapshots_move(logged, words, changed, tmp_path):
    """Each of three scripts goes on where another has stopped; shards, on other numbers of them.

    The losses are those of one that did it all. All start from the file of shards.
    """
    base, moved = [*words, "--eval_every", 3], []
    for moves, path in (MOVES, "moved.pt"), ([(FSDP, 3), (FSDP, 4), (FSDP, 2)], "moved"):
        for number, (script, processes) in enumerate(moves, start=1):
            more = ("--snapshot", tmp_path / path, "--max_steps", 3 * number)
            copy = changed(script, CONSTANT)
            moved.append(curve(logged(copy, *base, *more, processes=processes))[-1])
    stayed = curve(logged(changed("singlegpu/gpt.py", CONSTANT), *base, "--max_steps", 9))
    np.testing.assert_allclose(moved, [*stayed, *stayed], rtol=1e-5)
    start = (*words, "--learning_rate", 0, "--max_steps", 1, "--init_from")
    for script, processes in ("singlegpu/gpt.py", 1), (FSDP, 2), (PIPELINE, 2):
        log = logged(script, *start, as_file(tmp_path / "moved"), processes=processes)
        assert curve(log)[0, 1] == pytest.approx(moved[-1][1], rel=1e-5)


def test_shards_are_quantized(logged, run, words, tmp_path):
    """In the file that PyTorch's command makes of them."""
    log = logged(FSDP, *words, "--max_steps", 2, "--snapshot", tmp_path / "shards", processes=2)
    more = "--row int8-torch.ao --eager --rounds 1".split()
    out = run("quantize/gpt.py", "--snapshot", as_file(tmp_path / "shards"), *more)
    perplexity = re.search(r"fp32 \| eager \| [\d.]+ \| ([\d.]+)", out)[1]
    assert float(perplexity) == pytest.approx(np.exp(curve(log)[-1, 1]), rel=1e-3)


def created(path):
    """The change that saves the weights of the start."""
    return {CREATED: f"{CREATED}    rank == 0 and torch.save(model.state_dict(), {str(path)!r})\n"}


@pytest.mark.parametrize("script", (IMAGES, PIPELINE, FSDP))
def test_resumed_weights_are_those_of_an_undisturbed_run(
    attempt, run, words, images, changed, tmp_path, chance, script
):
    """All processes are told to stop: the weights of an undisturbed run, and the scale of fp16."""
    whole, cut, log = (tmp_path / name for name in ("whole.pt", "cut.pt", "cut.jsonl"))
    task = [*images, "--model", "mlp"] if script == IMAGES else [*words]
    task += ["--precision", "bf16" if script == FSDP else "fp16"]
    base = [*task, "--dropout", 0.1, "--max_steps", 12, "--eval_every", 2]
    copy = changed(script, signalled(f"step == {chance.randint(2, 9)}"))  # each, as a launcher does
    status, out, err = attempt(copy, *base, "--snapshot", cut, processes=2)
    assert status == os.EX_TEMPFAIL, err
    run(script, *base, "--snapshot", cut, "--log", log, processes=2)
    assert rows(log)[-1]["step"] == 12 and rows(log)[0]["step"] > 2, "it went on"
    run(script, *base, "--snapshot", whole, processes=2)
    assert_same_weights(as_file(cut), as_file(whole))
    assert script == FSDP or load(cut)["scaler"] == load(whole)["scaler"]


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
