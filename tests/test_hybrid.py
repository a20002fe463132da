"""Stages of a model, shards, and split layers. One loss curve: test_training.py."""

import itertools
import re

import numpy as np
import pytest
import torch
from conftest import CONSTANT, assert_same_weights, curve, load, module, rows
from fork_server import run_all
from test_launchers import WALL
from test_training import FSDP, PIPELINE, TENSOR

GPT = "--d_model 32 --n_heads 2 --num_layers 4 --seq_len 32 --batch_size 48 --learning_rate 3e-4"


@pytest.fixture
def words(data):
    return [*GPT.split(), "--dataset", data / "text.txt"]


def test_the_file_of_shards(logged, run, words, tmp_path):
    """PyTorch's command makes it, all scripts start from it, and it is quantized."""
    log = logged(FSDP, *words, "--max_steps", 2, "--snapshot", tmp_path / "shards", processes=2)
    loss, path = curve(log)[-1, 1], tmp_path / "file"
    [newest] = tmp_path.glob("shards/step-*")
    tool = f"-m torch.distributed.checkpoint.format_utils dcp_to_torch {newest} {path}"
    [(status, _, err)] = run_all([tool.split()], [{}], tmp_path)
    assert status == 0, err
    start = (*words, "--learning_rate", 0, "--max_steps", 1, "--init_from", path)
    for script, processes in ("singlegpu/gpt.py", 1), (FSDP, 2), (PIPELINE, 2):
        log = logged(script, *start, processes=processes)
        assert curve(log)[0, 1] == pytest.approx(loss, rel=1e-5)
    out = run("quantize/gpt.py", "--snapshot", path, *"--row fp32 --eager --rounds 1".split())
    perplexity = re.search(r"fp32 \| eager \| [\d.]+ \| ([\d.]+)", out)[1]
    assert float(perplexity) == pytest.approx(np.exp(loss), rel=1e-3)


def test_the_largest_stage_is_as_small_as_possible():
    """As found by trying all splits, of layers of random sizes, some of which have no weights."""
    images, generator = module("hybrid/images.py"), np.random.default_rng(0)
    for _ in range(20):
        sizes = generator.integers(1, 9, 7)
        layers = [torch.nn.Linear(1, size, bias=False) for size in sizes]
        layers.insert(generator.integers(1, 7), torch.nn.ReLU())
        stages = images.split_model(torch.nn.Sequential(*layers), ["cpu"] * 3)
        found = [sum(weight.numel() for weight in stage.parameters()) for stage in stages]
        splits = [np.split(sizes, ends) for ends in itertools.combinations(range(1, 7), 2)]
        best = min(max(part.sum() for part in split) for split in splits)
        assert max(found) == best and sum(found) == sizes.sum() and min(found) > 0


CREATED = "    optimizer = create_optimizer(model, args)"
REDUCED, LOADED = "        reducing.wait()\n", '        mark("data")\n'


def test_the_stages_of_a_pipeline_load_the_same_samples(run, words, changed):
    """Also of data that draw random numbers. Those of two pipelines differ, and of each step."""
    spy = '        print(f"drawn {rank // 2} {step} {torch.rand(())}\\n", end="")\n'
    copy = changed(PIPELINE, {LOADED: spy + LOADED})
    drawn = re.findall("^drawn .*", run(copy, *words, "--max_steps", 3, processes=4), re.M)
    assert len(drawn) == 2 * len({*drawn}) == 2 * len({each.split()[-1] for each in drawn}) == 12


def test_a_step_that_one_stage_skips_is_skipped_by_all(run, words, changed, tmp_path):
    """With fp16, gradients may overflow in one stage. The weights then stay as they are."""
    save = f"    rank == 0 and torch.save(model.state_dict(), '{tmp_path}/first.pt')\n"
    overflow = "        if rank == 1:\n            gradients[-1] = math.inf\n"
    copy = changed(PIPELINE, {CREATED: save + CREATED, REDUCED: REDUCED + overflow})
    more = ("--precision", "fp16", "--max_steps", 2, "--snapshot", tmp_path / "s.pt")
    run(copy, *words, *more, processes=2)
    first, snapshot = torch.load(tmp_path / "first.pt"), load(tmp_path / "s.pt")
    assert snapshot["scaler"]["scale"] == 2.0**14
    assert all(torch.equal(x, snapshot["model"][name]) for name, x in first.items())


def test_a_half_written_snapshot_is_not_resumed(attempt, words, changed, tmp_path):
    """Rank 0 is killed before its last file: the run goes on from the snapshot before.

    Of four positions on three processes, the last one has none: its shard is empty.
    """
    folder, base = tmp_path / "half", [*words, "--seq_len", 4, "--max_steps", 12, "--eval_every", 4]
    last = '        os.replace(folder / "settings.tmp", '
    kill = "        folder.name.endswith('8') and os.kill(os.getpid(), 9)\n"
    copy = changed(FSDP, {last: kill + last})
    status, *_ = attempt(copy, *base, "--snapshot", folder, processes=2)
    assert status and {path.name[-2:] for path in folder.iterdir()} == {"04", "08"}
    more = ("--snapshot", folder, "--log", tmp_path / "log")
    status, *_ = attempt(FSDP, *base, *more, processes=3)  # PyTorch warns
    assert status == 0 and [row["step"] for row in rows(tmp_path / "log")[::3]] == [8, 12]
    assert [path.name for path in folder.iterdir()] == ["step-000000012"]


HEADS = ("--n_heads", 4, "--num_layers", 2)


@pytest.mark.parametrize(("processes", "size"), [(2, 2), (4, 2), (4, 4)])
def test_what_split_layers_send(logged, words, processes, size):
    """A block sends (B, T, D) four times in each process of a group. The losses are those of one.

    DDP sends the gradients of the process's own weights: half of a block's, if two split it.
    """
    words = (*words, *HEADS, "--max_steps", 6, "--eval_every", 6)
    log = logged(TENSOR, *words, "--tensor_size", size, processes=processes)
    one = logged("singlegpu/gpt.py", *words)
    np.testing.assert_allclose(curve(log, "grad_norm"), curve(one, "grad_norm"), rtol=1e-5)
    for row in rows(log):
        sizes = {"sum": [], "all-reduce": []}
        for name, _, _, num_bytes in row["last_step"]:
            sizes.setdefault(name, []).append(num_bytes)
        batch = 48 // (processes // size)
        assert sizes["sum"] == [batch * 32 * 32 * 4] * 4 * 2  # (B, T, D), in each of two blocks
        of_blocks = 2 * 12 * 32**2  # qkv 3, projection 1, up 4, down 4
        own = row["parameters"] - of_blocks + of_blocks // size
        assert sum(sizes["all-reduce"]) == 4 * own
        assert 0 < row["sum_total"] < row["comm_total"]
        assert row["drift"] == 0


def test_sums_of_parts_count_as_comm(run, changed, words, tmp_path):
    """Neither as forward nor as backward. All phases of a process add up to wall time."""
    send = "    dist.all_reduce(total, group=group)\n"
    copy = changed(TENSOR, WALL | {send: f"{send}    time.sleep(0.03)\n"})
    more = ("--max_steps", 7, "--eval_every", 7, "--log", tmp_path / "log")
    out = run(copy, *words, *more, processes=2)
    logged = rows(tmp_path / "log")
    walls = sorted(map(float, re.findall(r"^wall ([\d.]+)", out, re.M)))
    assert sorted(row["seconds"] for row in logged) == pytest.approx(walls, abs=1e-6)
    for row in logged:
        slept = 4 * 4 * 0.03 * row["steps"]  # in four sums of four blocks
        assert row["steps"] == 4 and slept < row["sum_total"] <= row["comm"]
        assert row["sum_total"] < row["comm_total"]
        names = [name for name, *_ in row["last_step"]]
        assert names.count("sum") == 16


@pytest.mark.parametrize(
    ("script", "dropout"), [("singlegpu/gpt.py", 0), ("multinode/gpt.py", 0.1)]
)
def test_one_process_alone_has_the_bits_of_one_without_parts(run, words, tmp_path, script, dropout):
    """With clipping. The snapshots have the same optimizer, too."""
    words = (*words, "--dropout", dropout, "--max_steps", 5, "--max_grad_norm", 0.5, "--snapshot")
    run(TENSOR, *words, tmp_path / "split.pt", "--tensor_size", 1)
    run(script, *words, tmp_path / "one.pt")
    assert_same_weights(tmp_path / "split.pt", tmp_path / "one.pt")
    states = [load(tmp_path / name)["optimizer"]["state"] for name in ("split.pt", "one.pt")]
    torch.testing.assert_close(*states, rtol=0, atol=0)


MOVES = [  # script, processes, --tensor_size: two steps each
    (TENSOR, 4, 4),
    ("multinode/gpt.py", 2, None),
    (TENSOR, 4, 2),
    ("singlegpu/gpt.py", 1, None),
    (TENSOR, 2, 2),
]


def test_split_layers_go_on_elsewhere(run, changed, words, tmp_path):
    """In groups of another size, or whole in other scripts, and back: as if one had done it all."""
    words = (*words, *HEADS, "--eval_every", 2)
    snapshot, log = ("--snapshot", tmp_path / "moved.pt"), ("--log", tmp_path / "log")
    for number, (script, processes, size) in enumerate(MOVES, start=1):
        more = ("--tensor_size", size) if size else ()
        copy = changed(script, CONSTANT)
        steps = ("--max_steps", 2 * number)
        run(copy, *words, *more, *steps, *snapshot, *log, processes=processes)
    moved = curve(log[1])
    log[1].unlink()
    whole = ("--snapshot", tmp_path / "whole.pt")
    run(changed("singlegpu/gpt.py", CONSTANT), *words, *steps, *whole, *log)
    np.testing.assert_allclose(moved, curve(log[1]), rtol=1e-6)
    assert len(moved) == 5
    assert_same_weights(tmp_path / "moved.pt", tmp_path / "whole.pt", rounding=2e-5)


@pytest.mark.parametrize("size", (2, 3))
def test_layers_that_cannot_be_split(refused, words, size):
    """Of three processes, two leave one over, and three do not divide two heads."""
    told = "--tensor_size must divide --n_heads and the 3 processes"
    refused(told, TENSOR, *words, "--tensor_size", size, processes=3)


MODEL = "    return GPT(args)\n"
BUFFER = 'model.register_buffer("table", torch.zeros(3), persistent=False)'
BIAS = "model.blocks[0].down.bias = nn.Parameter(torch.zeros(32))"


@pytest.mark.parametrize(
    ("script", "edit", "told"),
    [
        (FSDP, BUFFER, "buffers must be persistent here: table"),
        (PIPELINE, BUFFER, "a stage must have no buffers"),
        (TENSOR, BIAS, "down must have no bias"),
    ],
)
def test_models_that_would_train_wrongly(refused, changed, words, script, edit, told):
    copy = changed(script, {MODEL: f"    model = GPT(args)\n    {edit}\n    return model\n"})
    assert refused(told, copy, *words, "--max_steps", 1, processes=2).count(told) == 1


def test_a_pipeline_leaves_frozen_weights_as_they_are(run, changed, words, tmp_path):
    """One in each stage, a matrix, which the optimizer would let decay."""
    frozen = ("blocks.0.up.weight", "blocks.3.up.weight")
    edit = f"for name in {frozen}:\n        model.get_parameter(name).requires_grad = False"
    copy = changed(PIPELINE, {MODEL: f"    model = GPT(args)\n    {edit}\n    return model\n"})
    states = []
    for steps in (1, 3):
        run(copy, *words, "--max_steps", steps, "--snapshot", tmp_path / "s.pt", processes=2)
        states.append(load(tmp_path / "s.pt")["model"])
    same = {name for name in states[0] if torch.equal(states[0][name], states[1][name])}
    assert same == {*frozen}
