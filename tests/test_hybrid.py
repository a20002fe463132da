"""Stages of a model, on devices or in pipelines, and shards, times data parallelism."""

import math
import os
import re
import signal

import numpy as np
import pytest
import torch
from conftest import CONSTANT, ROOT, assert_same_weights, curve, load, rows, saved_at
from conftest import wait_for, wait_for_saves
from fork_server import run_all

IMAGES, PIPELINE, FSDP = "hybrid/images.py", "hybrid/gpt_pipeline.py", "hybrid/gpt_fsdp.py"
MNIST = "--dataset mnist --batch_size 24 --learning_rate 3e-4"
GPT = "--d_model 32 --n_heads 2 --num_layers 4 --seq_len 32 --batch_size 48 --learning_rate 3e-4"
CREATE = "    model = create_model(args, train_data)"
STEP = "        scaler.step(optimizer)\n"
END = "    bar.close()\n"


@pytest.fixture
def images(data):
    return [*MNIST.split(), "--data_dir", data]


@pytest.fixture
def words(data):
    return [*GPT.split(), "--dataset", data / "words.txt"]


@pytest.fixture
def logged(run, tmp_path):
    """logged(script, *arguments, processes=1) runs it, and returns the path of its log."""

    def logged(script, *arguments, processes=1):
        log = tmp_path / f"log{len([*tmp_path.glob('log*')])}.jsonl"
        run(script, *arguments, "--log", log, processes=processes)
        return log

    return logged


def test_images_one_loss_curve(logged, images):
    """Split by layers, on two and on 2 x 2 processes: the losses of singlegpu."""
    base = [*images, "--model", "cnn", "--max_steps", 6, "--eval_every", 3]
    one = logged("singlegpu/images.py", *base)
    for processes, parts in ((2, 3), ((2, 2), 1)):
        more = ("--num_stages", 4, "--grad_accum_steps", parts)
        log = logged(IMAGES, *base, *more, processes=processes)
        np.testing.assert_allclose(curve(log, "val_acc"), curve(one, "val_acc"), rtol=1e-5)
        for row in rows(log):
            assert sum(row["stages"]) == row["parameters"] and len(row["stages"]) == 4


# The bytes of all tensors of a process: weights and two moments of 4 bytes; gradients are gone.
HELD = f"""{END}    import gc
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter)]
    storages = {{x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}}
    print("held", sum(storages.values()) / sum(p.numel() for p in model.parameters()))
"""
LAUNCHES = {  # processes, more arguments, and the bytes that FSDP holds for each parameter
    PIPELINE: (
        (2, "--num_stages 2 --schedule gpipe --num_microbatches 3", None),
        ((2, 2), "--num_stages 2 --num_microbatches 4", None),
        (4, "--num_stages 4 --num_microbatches 6", None),
    ),
    FSDP: (
        (4, "--checkpoint_activations --grad_accum_steps 3", 12 / 4),
        ((2, 2), "--shard_size 2 --num_workers 1", 12 / 2),
        (3, "", 12 / 3),
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
        np.testing.assert_allclose(*norms, rtol=1e-5)
        for row in rows(log):
            assert row["parameters"] == rows(one)[0]["parameters"]
            assert all(row[name] > 0 for name in ("forward", "backward", "optimizer"))
            assert row.get("bubble", 1) > 0 and row["comm_total"] > 0
        held = [float(bytes) for bytes in re.findall(r"^held ([\d.]+)", out, re.M)]
        assert held == pytest.approx([size] * np.prod(processes) if size else [], rel=0.1)


def test_what_a_section_of_a_pipeline_may_do(logged, words, changed):
    """Data draws random numbers, the same in all stages. Sums have any name."""
    start, count = (
        "starts = np.array(indices)[:, None] * self.args.seq_len",
        '"count": targets.numel()',
    )
    changes = {
        start: start + " - np.random.randint(3, size=(len(indices), 1))",
        count: f'{count}, "acc": targets.numel() / 2',
    }
    more = ("--max_steps", 8, "--eval_every", 4)
    one, two = (
        curve(logged(changed(script, changes), *words, *more, processes=n), "train_acc", "val_acc")
        for n, script in enumerate(("singlegpu/gpt.py", PIPELINE), start=1)
    )
    np.testing.assert_allclose(two[:, 0], one[:, 0], rtol=1e-5)
    assert (two[:, 2:] == 0.5).all()


MOVES = (("singlegpu/gpt.py", 1), (PIPELINE, 4), ("multinode/gpt.py", 3))


def test_gpt_snapshots_move(logged, words, changed, tmp_path):
    """Each of three scripts goes on where another has stopped: the losses of one that did it all.

    Then a pipeline takes the weights alone.
    """
    more = ("--eval_every", 3, "--snapshot", tmp_path / "moved.pt", "--max_steps")
    moved = [
        curve(logged(changed(script, CONSTANT), *words, *more, 3 * number, processes=processes))
        for number, (script, processes) in enumerate(MOVES, start=1)
    ]
    more = ("--eval_every", 3, "--max_steps", 9)
    stayed = curve(logged(changed(MOVES[0][0], CONSTANT), *words, *more))
    np.testing.assert_allclose(np.concatenate(moved), stayed, rtol=1e-5)
    more = ("--init_from", tmp_path / "moved.pt", "--learning_rate", 0, "--max_steps", 1)
    log = logged(PIPELINE, *words, *more, "--num_stages", 4, processes=4)
    assert curve(log)[0, 1] == pytest.approx(stayed[-1, 1], rel=1e-6)


def test_all_stages_draw_a_text(run, words, tmp_path):
    """Rank 0 has the weights of all stages at the end: without a snapshot, the same as with one."""
    more = (*words, "--learning_rate", 0.01, "--max_steps", 30, "--sample", 60)
    flags = ((), ("--snapshot", tmp_path / "s.pt"))
    samples = [run(PIPELINE, *more, *each, processes=2).splitlines()[-1] for each in flags]
    assert samples[0] == samples[1]
    assert sum(letter in "abcdefghij " for letter in samples[0]) > 50, samples


@pytest.fixture
def as_file(tmp_path):
    """as_file(snapshot): itself or, of a folder, a file that PyTorch's own command makes of it."""

    def as_file(snapshot):
        if snapshot.is_file():
            return snapshot
        (newest,) = snapshot.glob("step-*")
        path = tmp_path / f"{snapshot.name}.file"
        convert = "-m torch.distributed.checkpoint.format_utils dcp_to_torch".split()
        [(status, _, err)] = run_all([[*convert, newest, path]], [{}], tmp_path)
        assert status == 0, err
        return path

    return as_file


@pytest.mark.parametrize("script", (PIPELINE, IMAGES, FSDP))
def test_resumed_weights_are_those_of_an_undisturbed_run(
    fork, run, words, images, as_file, tmp_path, chance, script
):
    """All processes are told to stop: the weights of an undisturbed run, and the scale of fp16."""
    whole, cut, log = (tmp_path / name for name in ("whole.pt", "cut.pt", "cut.jsonl"))
    task = [*images, "--model", "mlp"] if script == IMAGES else [*words, "--num_layers", 2]
    base = [*task, "--dropout", 0.1, "--precision", "fp16", "--max_steps", 12, "--eval_every", 2]
    job = fork(script, *base, "--snapshot", cut, processes=2)
    wait_for_saves(job, cut, chance.randint(1, 3) + (script == FSDP))  # whose folder comes first
    for each in job.forks:  # a launcher's signal reaches each process
        each.send_signal(signal.SIGTERM)
    status, out, err = job.wait()
    assert status == os.EX_TEMPFAIL, err
    wait_for(lambda: not job.processes())
    step = int(re.search(r"stopped at step (\d+) of 12, saved", out)[1])
    for _ in range(2):
        out = run(script, *base, "--snapshot", cut, "--log", log, processes=2)
    assert "steps 12 to 12" in out, "the second time, nothing is left to do"
    assert [row["step"] for row in rows(log)[::2]] == [*range(step + step % 2, 13, 2)]
    run(script, *base, "--snapshot", whole, processes=2)
    assert_same_weights(as_file(cut), as_file(whole))
    files = [next(path.glob("step-*/run.pt")) if path.is_dir() else path for path in (cut, whole)]
    assert load(files[0])["scaler"] == load(files[1])["scaler"] and load(files[0])["step"] == 12


MATRICES = "[parameter for parameter in model.parameters() if parameter.dim() >= 2]"


def test_parameters_in_another_order(run, words, changed, tmp_path):
    """An optimizer's parameters that came from a set: after a resume, their moments are theirs."""
    turned = f"{MATRICES}[:: -1 if os.path.exists(args.snapshot) else 1]"
    copy = changed(PIPELINE, {**CONSTANT, MATRICES: turned})
    halves, whole = tmp_path / "halves.pt", tmp_path / "whole.pt"
    for path, steps in ((halves, 4), (halves, 8), (whole, 8)):
        run(copy, *words, "--snapshot", path, "--max_steps", steps, processes=2)
    assert_same_weights(halves, whole)


def test_models_that_cannot_be_split_are_named(refused, images, changed):
    """A layer alone, a forward() of its own, a layer in two places."""
    mlp = (*images, "--model", "mlp")
    own = "\n    model.__class__ = type('Own', (nn.Sequential,), {'forward': lambda *_: 0})"
    for more in "\n    model = model[1]", own:
        refused("must return an nn.Sequential", changed(IMAGES, {CREATE: CREATE + more}), *mlp)
    twice = "\n    model[2] = model[3]  # its second linear layer, in place of a ReLU, too"
    refused("in two stages", changed(IMAGES, {CREATE: CREATE + twice}), *mlp, "--num_stages", 3)


FROZEN = {  # parts of the model: a whole stage; a block in the middle of one; and their names
    IMAGES: ("(model[:3].eval(),)", ("1.",)),
    PIPELINE: (
        "(model.blocks[0], model.blocks[-1], model.positions)",
        ("blocks.0.", "blocks.3.", "positions"),
    ),
}


@pytest.mark.parametrize("script", FROZEN)
def test_frozen_layers(run, words, images, changed, tmp_path, script):
    """They stay as they are, and all others learn."""
    parts, names = FROZEN[script]
    freeze = f"{CREATE}\n    for part in {parts}:\n        part.requires_grad_(False)"
    copy, models = changed(script, {CREATE: freeze}), []
    task = [*images, "--model", "mlp"] if script == IMAGES else words
    for steps in (1, 4):
        path = tmp_path / f"{steps}.pt"
        run(copy, *task, "--max_steps", steps, "--snapshot", path, processes=2)
        models.append(load(path)["model"])
    kept = {name for name, weight in models[0].items() if torch.equal(weight, models[1][name])}
    assert kept == {name for name in models[0] if name.startswith(names)}


DRIFTS = {  # script, processes, flags; a parameter, and where it drifts: copies of a stage, of a
    # shard; the ends of two pipelines; the embedding, which both ends of one pipeline have
    "stage": (IMAGES, 2, "--model mlp", "model[-1].bias", "rank", "6.bias is not"),
    "shard": (FSDP, 4, "--shard_size 2", "model.norm.bias.to_local()", "rank // 2", "norm.bias is"),
    "pipelines": (
        PIPELINE,
        4,
        "",
        "stage.get_parameter('norm.bias')",
        "(rank == 3)",
        "norm.bias is",
    ),
    "ends": (PIPELINE, 2, "", "stage.embedding.weight", "rank", "embedding.weight is not"),
}


@pytest.mark.parametrize("name", DRIFTS)
def test_copies_that_differ_are_named(attempt, words, images, changed, name):
    script, processes, flags, parameter, ranks, told = DRIFTS[name]
    drift = f"        if {ranks}:\n            {parameter}.data.add_(1e-7)\n"
    task = [*(images if script == IMAGES else words), *flags.split(), "--max_steps", 2]
    status, _, err = attempt(changed(script, {STEP: STEP + drift}), *task, processes=processes)
    assert status and f"step 2: {told}" in err, err


def test_batch_norm_in_stages(run, images, tmp_path):
    """The losses of multinode, and the snapshot: statistics are those of rank 0."""
    words = (*images, "--model", "resnet18", "--max_steps", 2)
    for script, more in ("multinode/images.py", ()), (IMAGES, ("--num_stages", 4)):
        name = tmp_path / str(len(more))
        more = (*more, "--log", f"{name}.jsonl", "--snapshot", f"{name}.pt")
        run(script, *words, *more, processes=2)
    curves = [curve(tmp_path / f"{count}.jsonl") for count in (0, 2)]
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-4)
    assert_same_weights(tmp_path / "0.pt", tmp_path / "2.pt", rounding=1e-4)


def test_weights_of_a_stage_that_are_not_finite(run, refused, words, changed, tmp_path):
    """They never replace the file, though rank 0 has others."""
    base = (*words, "--snapshot", tmp_path / "s.pt", "--max_steps")
    run(PIPELINE, *base, 2, processes=2)
    before = saved_at(tmp_path / "s.pt")
    spoil = "        if rank == 1:\n            stage.norm.bias.data[0] = math.nan\n"
    copy = changed(PIPELINE, {STEP: STEP + spoil})
    refused("the weights are not finite at step 3", copy, *base, 3, processes=2)
    assert saved_at(tmp_path / "s.pt") == before


def test_an_optimizer_may_draw_numbers(run, words, changed):
    """All copies of a stage draw the same ones, and so do both ends of a pipeline."""
    noise = "        [p.grad.add_(1e-3 * torch.randn_like(p)) for p in stage.parameters()]\n"
    copy = changed(PIPELINE, {STEP: noise + STEP})
    run(copy, *words, "--max_steps", 4, "--eval_every", 2, "--dropout", 0.1, processes=4)


def test_a_step_that_one_stage_skips_is_skipped_by_all(run, words, changed, tmp_path):
    """With fp16, gradients may overflow in one stage. The weights then stay as they are."""
    overflow = "        if rank == 1:\n            gradients[-1] = math.inf\n"
    reducing = "        reducing.wait()\n"
    copy = changed(PIPELINE, {reducing: reducing + overflow})
    models = []
    for steps in (1, 2):
        path = tmp_path / f"{steps}.pt"
        more = ("--precision", "fp16", "--max_steps", steps, "--snapshot", path)
        run(copy, *words, *more, processes=2)
        models.append(load(path))
    assert [each["scaler"]["scale"] for each in models] == [2.0**15, 2.0**14]
    assert all(torch.equal(x, models[1]["model"][name]) for name, x in models[0]["model"].items())


def test_the_slowest_stage_is_named(run, words, tmp_path):
    """That of the pipeline that comes last; sending, waiting and R are those of the log."""
    log, before = tmp_path / "log.jsonl", (ROOT / "tests/helpers/slow.py", "step", 1, 0.2)
    out = run(PIPELINE, *words, "--max_steps", 13, "--log", log, processes=4, before=before)
    totals = [row["comm_total"] for row in rows(log)]
    sending = min(np.mean(totals[:2]), np.mean(totals[2:]))
    waiting = f"waiting {np.mean(totals) - sending:.3f} s for rank 1 on "
    assert f"\nsending {sending:.3f} s, {waiting}" in out, (totals, out)
    phases = ("forward", "backward", "bubble", "optimizer")
    compute = sum(row[name] for row in rows(log) for name in phases)
    assert f"\nR = compute / sending = {compute / 4 / sending:.1f}, " in out, out


def test_pipelines_validate_different_numbers_of_batches(logged, tmp_path):
    """49 sequences to validate on, in batches of 24 of two pipelines: 2 batches and 1."""
    np.save(tmp_path / "train.npy", np.resize(np.arange(200, dtype=np.uint16), 32 * 480 + 1))
    np.save(tmp_path / "val.npy", np.resize(np.arange(190, dtype=np.uint16), 32 * 49 + 1))
    base = [*GPT.split(), "--dataset", tmp_path, "--vocab_size", 256, "--max_steps", 3]
    one, four = logged("singlegpu/gpt.py", *base), logged(PIPELINE, *base, processes=(2, 2))
    np.testing.assert_allclose(curve(four), curve(one), rtol=1e-6)


def test_shards_send_gradients_as_comm_hook_says(logged, words):
    """Half the bytes, and the loss changes a little. Weights are sent as they are."""
    sent, losses = {}, []
    for hook in ("none", "bf16", "fp16"):
        log = logged(FSDP, *words, "--max_steps", 5, "--comm_hook", hook, processes=2)
        for name in ("all-gather", "reduce-scatter"):
            step = rows(log)[-1]["last_step"]
            sent[name, hook] = sum(size for event, *_, size in step if event == name)
        losses.append(curve(log)[0, 0])
    whole = sent["reduce-scatter", "none"]
    assert sent["reduce-scatter", "bf16"] == sent["reduce-scatter", "fp16"] == whole / 2 > 50_000
    assert sent["all-gather", "bf16"] == sent["all-gather", "none"]
    assert len({*losses}) == 3 and losses == pytest.approx([losses[0]] * 3, rel=0.02)


def test_shards_as_a_file(run, logged, words, as_file, changed, tmp_path):
    """Another script goes on with it. This one starts from it, and quantize/gpt.py measures it."""
    folder, more = tmp_path / "trained", ("--eval_every", 4, "--max_steps")
    logged(changed(FSDP, CONSTANT), *words, *more, 4, "--snapshot", folder, processes=3)
    more_of_it = ("--snapshot", file := as_file(folder))
    log = logged(changed("multinode/gpt.py", CONSTANT), *words, *more, 8, *more_of_it, processes=2)
    one = logged(changed("singlegpu/gpt.py", CONSTANT), *words, *more, 8)
    np.testing.assert_allclose(curve(log)[-1], curve(one)[-1], rtol=1e-5)
    loss = curve(log)[-1, 1]
    more = ("--init_from", file, "--learning_rate", 0, "--max_steps", 1)
    log = logged(FSDP, *words, *more, processes=2)
    assert curve(log)[0, 1] == pytest.approx(loss, rel=1e-6)
    out = run("quantize/gpt.py", "--snapshot", file, "--eager", "--row", "fp32", "--rounds", 1)
    row = r"\| fp32 \| eager \| [\d.]+ \|(?: [\d.]+ \|)? ([\d.]+) "
    assert float(re.search(row, out)[1]) == pytest.approx(math.exp(loss), rel=1e-3)


def test_a_half_written_snapshot_is_not_resumed(run, attempt, words, changed, tmp_path):
    """A process is killed while all write: the run goes on from the snapshot before."""
    folder, base = tmp_path / "half", [*words, "--max_steps", 12, "--eval_every", 4]
    start = "    return dcp.async_save("
    kill = (
        "    if dist.get_rank() == 1 and progress['step'] == 8:\n        os.kill(os.getpid(), 9)\n"
    )
    copy = changed(FSDP, {start: kill + start})
    status, _, _ = attempt(copy, *base, "--snapshot", folder, processes=2)
    assert status
    complete, half = sorted(folder.iterdir())
    assert (complete / ".metadata").exists() and half.name == "step-000000008"
    assert not (half / ".metadata").exists() and (half / "run.pt").exists()
    (folder / "step-8-of-mine").mkdir()
    out = run(FSDP, *base, "--snapshot", folder, "--log", tmp_path / "log", processes=3)
    assert "steps 4 to 12" in out
    assert {row["step"] for row in rows(tmp_path / "log")} == {4, 8, 12}  # 4 is validated again
    assert {path.name for path in folder.iterdir()} == {"step-000000012", "step-8-of-mine"}


def test_a_disk_that_is_not_shared(refused, words, changed, tmp_path):
    """Where rank 0 writes, nobody else finds it: nobody could load such a snapshot."""
    copy = changed(FSDP, {'"run.tmp", folder / "run.pt"': '"run.tmp", folder / "0.pt"'})
    flags = ("--max_steps", 1, "--snapshot", tmp_path / "own")
    refused("own must be on a disk that all machines share", copy, *words, *flags, processes=2)


def test_a_snapshot_is_data(run, attempt, words, tmp_path):
    """A pickle that would call something is refused, before it does."""
    folder, base = tmp_path / "foreign", [*words, "--max_steps", 4]
    run(FSDP, *base, "--snapshot", folder, processes=1)
    call = b"cos\nmkdir\n(V" + str(tmp_path / "called").encode() + b"\ntR."
    (folder / "step-000000004/.metadata").write_bytes(call)
    status, _, err = attempt(FSDP, *base, "--snapshot", folder, processes=1)
    assert status and "os.mkdir is not of a snapshot" in err, err
    assert not (tmp_path / "called").exists()


MISFITS = (  # what is said, script, processes, flags
    ("--num_stages", IMAGES, 2, "--num_stages 7"),
    ("--num_stages", PIPELINE, 1, "--num_stages 2"),
    ("--num_microbatches", PIPELINE, 1, "--num_stages 1 --num_microbatches 0"),
    ("--batch_size", PIPELINE, 1, "--num_stages 1 --batch_size 6"),
    ("--shard_size must divide", FSDP, 2, "--shard_size 3"),
    ("in the type of --comm_hook", FSDP, 1, "--comm_hook bf16 --grad_accum_steps 2"),
    ("was made with --num_layers 4, not 2", FSDP, 1, "--snapshot folder --num_layers 2"),
    ("cannot write", FSDP, 1, "--snapshot file"),
)


def test_what_does_not_fit_is_named(run, refused, words, tmp_path):
    """Also other settings than those of a snapshot, and a file where a folder must be."""
    run(FSDP, *words, "--max_steps", 1, "--snapshot", tmp_path / "folder", processes=2)
    (tmp_path / "file").write_text("")
    for told, script, processes, flags in MISFITS:
        task = () if script == IMAGES else words
        refused(told, script, *task, *flags.split(), processes=processes, cwd=tmp_path)
