"""Stages of a model, on devices or in pipelines, and shards, times data parallelism."""

import math
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, TIMEOUT, assert_same_weights, curve, free_port, load, rows, saved_at
from conftest import wait_for, wait_for_saves
from fork_server import run_all

IMAGES, PIPELINE, FSDP = "hybrid/images.py", "hybrid/gpt_pipeline.py", "hybrid/gpt_fsdp.py"
MNIST = "--dataset mnist --batch_size 24 --learning_rate 3e-4"
GPT = "--d_model 32 --n_heads 2 --num_layers 4 --seq_len 32 --batch_size 48 --learning_rate 3e-4"


@pytest.fixture
def images(data):
    return [*MNIST.split(), "--data_dir", data]


@pytest.fixture
def words(data):
    return [*GPT.split(), "--dataset", data / "words.txt"]


def test_images_one_loss_curve(run, images, tmp_path):
    """Split by layers, on one, two and 2 x 2 processes: the losses of singlegpu."""
    base = [*images, "--model", "cnn", "--max_steps", 8, "--eval_every", 4]
    one = tmp_path / "one.jsonl"
    run("singlegpu/images.py", *base, "--log", one)
    for processes, parts in ((1, 1), (2, 3), ((2, 2), 1)):
        log = tmp_path / f"{processes}.jsonl"
        more = ("--num_stages", 4, "--grad_accum_steps", parts, "--log", log)
        run(IMAGES, *base, *more, processes=processes)
        np.testing.assert_allclose(curve(log, "val_acc"), curve(one, "val_acc"), rtol=1e-5)
        np.testing.assert_allclose(curve(log)[0], curve(one)[0], rtol=1e-6)
        for row in rows(log):
            assert sum(row["stages"]) == row["parameters"] and len(row["stages"]) == 4


HYBRIDS = (  # script, processes, arguments
    (PIPELINE, 2, "--num_stages 2 --schedule gpipe --num_microbatches 3"),
    (PIPELINE, (2, 2), "--num_stages 2 --num_microbatches 4"),
    (PIPELINE, 4, "--num_stages 4 --num_microbatches 6"),
    (PIPELINE, 3, "--num_stages 1 --num_microbatches 2"),
)


def test_gpt_one_loss_curve(run, words, tmp_path):
    """The losses of one process, and its gradients: AdamW hides that they are N times too large."""
    base, one = [*words, "--max_steps", 8, "--eval_every", 4], tmp_path / "one.jsonl"
    run("singlegpu/gpt.py", *base, "--log", one)
    assert curve(one)[1, 0] < curve(one)[0, 0]
    for number, (script, processes, more) in enumerate(HYBRIDS):
        log = tmp_path / f"{number}.jsonl"
        run(script, *base, *more.split(), "--log", log, processes=processes)
        np.testing.assert_allclose(curve(log), curve(one), rtol=1e-6)
        norms = [curve(path, "grad_norm")[:, 2] for path in (log, one)]
        np.testing.assert_allclose(*norms, rtol=1e-5)
        whole = rows(one)[0]["parameters"]
        for row in rows(log):
            assert row["parameters"] == whole
            assert all(row[name] > 0 for name in ("forward", "backward", "comm", "optimizer"))
            assert row["bubble"] > 0


def test_stages_load_the_same_samples(run, words, changed, tmp_path):
    """They draw the same random ones, as one process does."""
    start = "starts = np.array(indices)[:, None] * self.args.seq_len"
    shifted = {start: start + " - np.random.randint(3, size=(len(indices), 1))"}
    for processes, path in enumerate(("singlegpu/gpt.py", PIPELINE), start=1):
        more = ("--max_steps", 8, "--eval_every", 4, "--log", tmp_path / f"{processes}.jsonl")
        run(changed(path, shifted), *words, *more, processes=processes)
    one, two = (curve(tmp_path / f"{processes}.jsonl")[:, 0] for processes in (1, 2))
    np.testing.assert_allclose(two, one, rtol=1e-5)


def test_sums_of_any_name_are_logged(run, words, changed, tmp_path):
    """The last stage alone has them."""
    count = '"count": targets.numel()'
    copy = changed(PIPELINE, {count: f'{count}, "acc": targets.numel() / 2'})
    run(copy, *words, "--max_steps", 2, "--log", tmp_path / "log.jsonl", processes=4)
    assert curve(tmp_path / "log.jsonl", "train_acc", "val_acc")[0, 2:] == pytest.approx([0.5, 0.5])


MOVES = (  # script, processes, arguments of a run, which the next one goes on from
    ("singlegpu/gpt.py", 1, ()),
    (PIPELINE, 4, ()),
    ("multinode/gpt.py", 3, ()),
    (PIPELINE, 2, ()),
)


def test_gpt_snapshots_move(run, words, tmp_path):
    """Each row in another script: the losses of one that did all of them. Images: test_emulator."""
    curves = []
    for name, steps in ("moved", MOVES), ("stayed", MOVES[:1] * len(MOVES)):
        for number, (script, processes, more) in enumerate(steps, start=1):
            log = tmp_path / f"{name}{number}.jsonl"
            more = (*more, "--snapshot", tmp_path / f"{name}.pt", "--log", log)
            more += ("--eval_every", 3, "--max_steps", 3 * number)
            run(script, *words, *more, processes=processes)
            assert [row["step"] for row in rows(log) if row["rank"] == 0] == [3 * number]
            curves.append(curve(log)[-1])
    np.testing.assert_allclose(curves[: len(MOVES)], curves[len(MOVES) :], rtol=1e-5)
    log = tmp_path / "init.jsonl"
    more = ("--init_from", tmp_path / "moved.pt", "--learning_rate", 0, "--max_steps", 1)
    run(PIPELINE, *words, *more, "--num_stages", 4, "--log", log, processes=4)
    assert curve(log)[0, 1] == pytest.approx(curves[len(MOVES) - 1][1], rel=1e-6)


def test_all_stages_draw_a_text(run, words, tmp_path):
    """Rank 0 has the weights of all stages at the end: without a snapshot, the same as with one."""
    more = (*words, "--learning_rate", 0.01, "--max_steps", 30, "--sample", 60)
    flags = ((), ("--snapshot", tmp_path / "s.pt"))
    samples = [run(PIPELINE, *more, *each, processes=2).splitlines()[-1] for each in flags]
    assert samples[0] == samples[1]
    assert sum(letter in "abcdefghij " for letter in samples[0]) > 50, samples


@pytest.mark.parametrize("script", (PIPELINE, IMAGES))
def test_resumed_weights_are_those_of_an_undisturbed_run(
    fork, run, words, images, tmp_path, chance, script
):
    """All processes are told to stop: the weights of an undisturbed run. Killed ones: the soak."""
    whole, cut, log = tmp_path / "whole.pt", tmp_path / "cut.pt", tmp_path / "cut.jsonl"
    task = [*images, "--model", "cnn"] if script == IMAGES else words
    base = [*task, "--dropout", 0.1, "--max_steps", 24, "--eval_every", 4]
    job = fork(script, *base, "--snapshot", cut, processes=2)
    wait_for_saves(job, cut, chance.randint(1, 3))
    for each in job.forks:  # a launcher's signal reaches each process
        each.send_signal(signal.SIGTERM)
    status, out, err = job.wait()
    assert status == os.EX_TEMPFAIL, err
    wait_for(lambda: not job.processes())
    step = load(cut)["step"]
    assert f"stopped at step {step} of 24" in out, out
    run(script, *base, "--snapshot", cut, "--log", log, processes=2)
    assert min(row["step"] for row in rows(log)) == (step if step % 4 == 0 else step + 4 - step % 4)
    run(script, *base, "--snapshot", whole, processes=2)
    assert_same_weights(cut, whole)


def test_stages_that_do_not_fit_are_named(refused):
    refused("num_stages", IMAGES, "--num_stages", 7, processes=2)


CREATE = "    model = create_model(args, train_data)"


def test_models_that_cannot_be_split_are_named(refused, images, changed):
    """A layer alone, a forward() of its own, a layer in two places."""
    mlp = (*images, "--model", "mlp")
    own = "\n    model.__class__ = type('Own', (nn.Sequential,), {'forward': lambda *_: 0})"
    for more in "\n    model = model[1]", own:
        refused("must return an nn.Sequential", changed(IMAGES, {CREATE: CREATE + more}), *mlp)
    twice = "\n    model[2] = model[3]  # its second linear layer, in place of a ReLU, too"
    refused("in two stages", changed(IMAGES, {CREATE: CREATE + twice}), *mlp, "--num_stages", 3)


def test_a_frozen_stage(run, images, changed, tmp_path):
    """The first of two, in eval(): the losses of one process, and the weights stay."""
    frozen = "\n    model[:3].requires_grad_(False).eval()"
    for script, processes in ("singlegpu/images.py", 1), (IMAGES, 2):
        path = tmp_path / f"{processes}.pt"
        create = CREATE if script == IMAGES else f"{CREATE}.to(device)"
        copy = changed(script, {create: create + frozen})
        words = (*images, "--model", "mlp", "--max_steps", 4, "--snapshot", path)
        run(copy, *words, "--log", tmp_path / str(processes), processes=processes)
    np.testing.assert_allclose(curve(tmp_path / "2"), curve(tmp_path / "1"), rtol=1e-5)
    one, two = (load(tmp_path / f"{processes}.pt")["model"] for processes in (1, 2))
    assert torch.equal(one["1.weight"], two["1.weight"])


def test_copies_of_a_stage_that_differ_are_named(attempt, images, changed):
    """A step that one process alone does, in the last stage."""
    step = "        scaler.step(optimizer)\n"
    drift = "        model[-1].bias.data.add_(rank * 1e-7)\n"
    copy = changed(IMAGES, {step: step + drift})
    status, _, err = attempt(copy, *images, "--model", "mlp", "--max_steps", 2, processes=2)
    assert status and "step 2: 6.bias is not the same in all processes" in err, err


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


def test_batch_loss_knows_whether_it_validates(run, images, changed):
    loss = "    images, labels = batch\n    images = images.float() / 255\n"
    check = "    assert model.training == torch.is_grad_enabled()\n"
    run(changed(IMAGES, {loss: check + loss}), *images, "--model", "mlp", "--max_steps", 4)


STEP = "        scaler.step(optimizer)\n"


def test_a_pipeline_that_does_not_fit_is_named(run, refused, words, tmp_path):
    """A line says what does not fit; a foreign snapshot stays as it is."""
    foreign = tmp_path / "foreign.pt"
    base = (*words, "--max_steps", 1, "--snapshot", foreign)
    run("singlegpu/gpt.py", *base)
    before = saved_at(foreign)
    for more in ("--num_stages", 2), ("--num_microbatches", 0), ("--batch_size", 6):
        refused(more[0], PIPELINE, *words, "--num_stages", 1, *more)
    refused("--num_layers 4, not 2", PIPELINE, *base, "--num_stages", 1, "--num_layers", 2)
    assert saved_at(foreign) == before


def test_frozen_layers_of_a_pipeline(run, words, changed, tmp_path):
    """They stay as they are, also in the middle of a stage, and in rank 0's file."""
    frozen = "\n    for part in (model.blocks[0], model.blocks[-1], model.positions):\n"
    script = changed(PIPELINE, {CREATE: f"{CREATE}{frozen}        part.requires_grad_(False)"})
    models = []
    for steps in (1, 4):
        path = tmp_path / f"{steps}.pt"
        more = ("--learning_rate", 0.1, "--max_steps", steps, "--snapshot", path)
        run(script, *words, *more, processes=2)
        models.append(load(path)["model"])
    kept = {name for name, weight in models[0].items() if torch.equal(weight, models[1][name])}
    ends = ("blocks.0.", "blocks.3.", "positions")
    assert kept == {name for name in models[0] if name.startswith(ends)}


@pytest.mark.parametrize(
    ("rank", "name", "told"),
    [
        (3, "norm.bias", "step 2: norm.bias is not the same in all processes"),
        (1, "embedding.weight", "step 2: embedding.weight is not the same in all processes"),
        (2, "blocks.0.up.weight", "step 2: blocks.0.up.weight is not the same in all processes"),
    ],
)
def test_copies_that_differ_are_named(refused, words, changed, rank, name, told):
    """Those of a stage in two pipelines, and those of the embedding at both ends of one."""
    drift = (
        f"        if rank == {rank}:\n            stage.get_parameter('{name}').data[0] += 1e-6\n"
    )
    copy = changed(PIPELINE, {STEP: STEP + drift})
    processes = 2 if name == "embedding.weight" else 4
    refused(told, copy, *words, "--max_steps", 2, processes=processes)


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
    logged = rows(log)
    totals = [row["comm_total"] for row in logged]
    sending = min(np.mean(totals[:2]), np.mean(totals[2:]))
    waiting = f"waiting {np.mean(totals) - sending:.3f} s for rank 1 on "
    assert f"\nsending {sending:.3f} s, {waiting}" in out, (totals, out)
    compute = [row[name] for row in logged for name in "forward backward bubble optimizer".split()]
    assert f"\nR = compute / sending = {sum(compute) / 4 / sending:.1f}, " in out, out


def test_pipelines_validate_different_numbers_of_batches(run, tmp_path):
    """49 sequences to validate on, in batches of 24 of two pipelines: 2 batches and 1."""
    np.save(tmp_path / "train.npy", np.resize(np.arange(200, dtype=np.uint16), 32 * 480 + 1))
    np.save(tmp_path / "val.npy", np.resize(np.arange(190, dtype=np.uint16), 32 * 49 + 1))
    base = [*GPT.split(), "--dataset", tmp_path, "--vocab_size", 256, "--max_steps", 3]
    run("singlegpu/gpt.py", *base, "--log", tmp_path / "one")
    more = ("--num_stages", 2, "--log", tmp_path / "four")
    run(PIPELINE, *base, *more, processes=(2, 2))
    np.testing.assert_allclose(curve(tmp_path / "four"), curve(tmp_path / "one"), rtol=1e-6)


def srun_envs(count):
    """What srun tells each of so many tasks of a node."""
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    meet |= {"SLURM_STEP_NUM_TASKS": str(count), "SLURM_STEP_NUM_NODES": "1"}
    return [meet | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(count)]


def test_srun_gives_each_process_a_shard(words, tmp_path):
    """By default all processes share a copy, also where only Slurm's variables name them."""
    command = [str(ROOT / FSDP), *map(str, words), "--max_steps", "4", "--log", "log"]
    for status, _, err in run_all([command] * 2, srun_envs(2), tmp_path, TIMEOUT):
        assert status == 0, err
    for row in rows(tmp_path / "log"):
        assert row["shard_size"] == 2
        assert row["shard_parameters"] == pytest.approx(row["parameters"] / 2, rel=0.01)


# The bytes of all tensors of a process: weights and two moments of 4 bytes; gradients are gone.
HELD = """    bar.close()
    import gc
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    print("held", sum(storages.values()), "of", sum(p.numel() for p in model.parameters()))
"""
SHARDS = (  # processes, those that share a copy, and more arguments
    (1, 1, ""),
    (4, 4, "--checkpoint_activations --grad_accum_steps 3"),
    ((2, 2), 2, "--num_workers 1"),
    (2, 1, "--grad_accum_steps 2"),
    (3, 3, ""),
)


def test_shards_one_loss_curve(run, words, changed, tmp_path):
    """The losses and gradients of one process. A process holds its share of memory, no more."""
    base, one = [*words, "--max_steps", 8, "--eval_every", 4], tmp_path / "one.jsonl"
    run("singlegpu/gpt.py", *base, "--log", one)
    script = changed(FSDP, {"    bar.close()\n": HELD})
    for number, (processes, size, more) in enumerate(SHARDS):
        log = tmp_path / f"{number}.jsonl"
        more = (*more.split(), "--shard_size", size, "--log", log)
        out = run(script, *base, *more, processes=processes)
        np.testing.assert_allclose(curve(log), curve(one), rtol=1e-6)
        norms = [curve(path, "grad_norm")[:, 2] for path in (log, one)]
        np.testing.assert_allclose(*norms, rtol=1e-5)
        held = re.findall(r"held (\d+) of (\d+)", out)
        assert len(held) == np.prod(processes)
        for size_held, whole in held:
            assert int(size_held) == pytest.approx(12 * int(whole) / size, rel=0.1)
        for row in rows(log):
            assert row["shard_parameters"] == pytest.approx(row["parameters"] / size, rel=0.05)
            assert all(row[name] > 0 for name in ("forward", "backward", "optimizer"))
            assert 0 < row["comm_total"] <= row["comm"] * 1.001, "on CPUs, nothing is hidden"


def test_shards_send_gradients_as_comm_hook_says(run, words, tmp_path):
    """Half the bytes, and the loss changes a little. Weights are sent as --precision says."""
    sent, losses = {}, []
    for more in ("", "--comm_hook bf16", "--comm_hook fp16", "--precision fp16"):
        log = tmp_path / "log.jsonl"
        log.unlink(missing_ok=True)
        run(FSDP, *words, "--max_steps", 5, *more.split(), "--log", log, processes=2)
        for name in ("all-gather", "reduce-scatter"):
            step = rows(log)[-1]["last_step"]
            sent[name, more] = sum(size for event, *_, size in step if event == name)
        losses.append(curve(log)[0, 0])
    whole = sent["reduce-scatter", ""]
    assert sent["reduce-scatter", "--comm_hook bf16"] == whole / 2 > 50_000
    assert sent["reduce-scatter", "--comm_hook fp16"] == whole / 2
    assert sent["reduce-scatter", "--precision fp16"] == whole
    assert sent["all-gather", "--precision fp16"] == sent["all-gather", ""] / 2
    assert len({*losses}) == 4 and losses == pytest.approx([losses[0]] * 4, rel=0.02)


@pytest.fixture
def as_file(tmp_path):
    """as_file(folder) is the path of a file that PyTorch's own command makes of its snapshot."""

    def as_file(folder):
        (newest,) = folder.glob("step-*")
        path = tmp_path / f"{folder.name}.pt"
        convert = "-m torch.distributed.checkpoint.format_utils dcp_to_torch".split()
        subprocess.run([sys.executable, *convert, newest, path], check=True, timeout=TIMEOUT)
        return path

    return as_file


def test_shards_resume_as_if_undisturbed(fork, run, words, as_file, tmp_path, chance):
    """All processes are told to stop: the weights of an undisturbed run, bit for bit."""
    whole, cut, log = tmp_path / "whole", tmp_path / "cut", tmp_path / "cut.jsonl"
    base = [*words, "--dropout", 0.1, "--max_steps", 24, "--eval_every", 4]
    job = fork(FSDP, *base, "--snapshot", cut, processes=2)
    wait_for_saves(job, cut, chance.randint(2, 4))
    for each in job.forks:  # a launcher's signal reaches each process
        each.send_signal(signal.SIGTERM)
    status, out, err = job.wait()
    assert status == os.EX_TEMPFAIL, err
    step = int(re.search(r"stopped at step (\d+) of 24, saved", out)[1])
    assert (cut / f"step-{step:09}/.metadata").exists()
    run(FSDP, *base, "--snapshot", cut, "--log", log, processes=2)
    assert min(row["step"] for row in rows(log)) == (step if step % 4 == 0 else step + 4 - step % 4)
    before = log.read_text()
    again = run(FSDP, *base, "--snapshot", cut, "--log", log, processes=2)
    assert "steps 24 to 24" in again and log.read_text() == before
    run(FSDP, *base, "--snapshot", whole, processes=2)
    assert_same_weights(as_file(cut), as_file(whole))


def test_shards_move(run, words, as_file, tmp_path):
    """Each row on other numbers of processes and shards, the last in another script: one curve."""
    base, folder, file = [*words, "--eval_every", 3], tmp_path / "moved", tmp_path / "moved.pt"
    moves = ((FSDP, 4, 2), (FSDP, 3, 3), (FSDP, 2, 1), ("multinode/gpt.py", 2, None))
    for steps, (script, processes, size) in zip((3, 6, 9, 12), moves):
        more = (*base, "--max_steps", steps)
        run("singlegpu/gpt.py", *more, "--snapshot", tmp_path / "one.pt", "--log", tmp_path / "one")
        more += ("--shard_size", size, "--snapshot", folder) if size else ("--snapshot", file)
        run(script, *more, "--log", tmp_path / "log", processes=processes)
        if steps == 9:
            as_file(folder)
    np.testing.assert_allclose(curve(tmp_path / "log"), curve(tmp_path / "one"), rtol=1e-5)


def test_shards_as_a_file(run, words, as_file, tmp_path):
    """Other scripts start from it, and this one, too. quantize/gpt.py measures it."""
    log, folder = tmp_path / "log", tmp_path / "trained"
    run(FSDP, *words, "--max_steps", 4, "--snapshot", folder, "--log", log, processes=3)
    file, (_, loss) = as_file(folder), curve(log)[0]
    for number, script in enumerate(("singlegpu/gpt.py", FSDP), start=1):
        log = tmp_path / f"log{number}"
        more = ("--init_from", file, "--learning_rate", 0, "--max_steps", 1, "--log", log)
        run(script, *words, *more, processes=number)
        assert curve(log)[0, 1] == pytest.approx(loss, rel=1e-6)
    out = run("quantize/gpt.py", "--snapshot", file, "--eager", "--row", "fp32", "--rounds", 1)
    row = r"\| fp32 \| eager \| [\d.]+ \|(?: [\d.]+ \|)? ([\d.]+) "
    perplexity = float(re.search(row, out)[1])
    assert perplexity == pytest.approx(math.exp(loss), rel=1e-3)


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
    out = run(FSDP, *base, "--snapshot", folder, "--log", tmp_path / "log", processes=3)
    assert "steps 4 to 12" in out
    assert {row["step"] for row in rows(tmp_path / "log")} == {4, 8, 12}  # 4 is validated again
    assert [path.name for path in folder.iterdir()] == ["step-000000012"]


def test_a_snapshot_is_data(run, attempt, words, tmp_path):
    """A pickle that would call something is refused, before it does."""
    folder, base = tmp_path / "foreign", [*words, "--max_steps", 4]
    run(FSDP, *base, "--snapshot", folder, processes=1)
    call = b"cos\nmkdir\n(V" + str(tmp_path / "called").encode() + b"\ntR."
    (folder / "step-000000004/.metadata").write_bytes(call)
    status, _, err = attempt(FSDP, *base, "--snapshot", folder, processes=1)
    assert status and "os.mkdir is not of a snapshot" in err, err
    assert not (tmp_path / "called").exists()


def test_copies_of_a_shard_that_differ_are_named(attempt, words, changed):
    """Ranks 2 and 3 hold the second copy, in which a weight drifts."""
    step = "        scaler.step(optimizer)\n"
    drift = "        model.norm.bias.to_local().data.add_(rank // 2 * 1e-7)\n"
    copy = changed(FSDP, {step: step + drift})
    status, _, err = attempt(copy, *words, "--max_steps", 2, "--shard_size", 2, processes=4)
    assert status and "step 2: norm.bias is not the same in all copies" in err, err


def test_buffers_of_shards(run, words, changed, tmp_path):
    """A buffer that no state dict holds is that of the model, in each process."""
    norms = "        self.norm1, self.norm2 ="
    mask = 'self.register_buffer("mask", torch.ones(32, 32).tril().bool(), persistent=False)'
    changes = {"is_causal=True": "attn_mask=self.mask", norms: f"        {mask}\n{norms}"}
    for processes, path in enumerate(("singlegpu/gpt.py", FSDP), start=1):
        more = ("--max_steps", 4, "--log", tmp_path / f"{processes}")
        run(changed(path, changes), *words, *more, processes=processes)
    np.testing.assert_allclose(curve(tmp_path / "2"), curve(tmp_path / "1"), rtol=1e-5)


def test_shards_that_do_not_fit_are_named(run, refused, words, tmp_path):
    """--shard_size, other settings, and a file where a folder must be."""
    refused("--shard_size must divide", FSDP, *words, "--shard_size", 3, processes=2)
    base = (*words, "--max_steps", 1, "--snapshot")
    run(FSDP, *base, tmp_path / "folder", processes=2)
    other = ("--num_layers", 2)
    refused("was made with --num_layers 4, not 2", FSDP, *base, tmp_path / "folder", *other)
    (tmp_path / "file").write_text("")
    refused("cannot write", FSDP, *base, tmp_path / "file")
