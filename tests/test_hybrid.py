"""Stages of a model, on devices or in pipelines, and shards. One loss curve: test_training.py."""

import itertools
import re

import numpy as np
import pytest
import torch
from conftest import curve, load, module, rows
from fork_server import run_all
from test_training import FSDP, PIPELINE

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
    last = '        (folder / "settings.json").write_text('
    kill = "        folder.name.endswith('8') and os.kill(os.getpid(), 9)\n"
    copy = changed(FSDP, {last: kill + last})
    status, *_ = attempt(copy, *base, "--snapshot", folder, processes=2)
    assert status and {path.name[-2:] for path in folder.iterdir()} == {"04", "08"}
    more = ("--snapshot", folder, "--log", tmp_path / "log")
    status, *_ = attempt(FSDP, *base, *more, processes=3)  # PyTorch warns
    assert status == 0 and [row["step"] for row in rows(tmp_path / "log")[::3]] == [8, 12]
    assert [path.name for path in folder.iterdir()] == ["step-000000012"]
