"""tools/check by real commands: faults, split models, unlike machines, emulated GPUs."""

import re
import sys

import faults
import pytest
import test_check
import torch
from conftest import ROOT
from test_check import TORCHRUN, problems


@pytest.mark.parametrize("name", faults.FAULTS)
def test_a_fault_is_named_by_the_command(name, tmp_path):
    test_check.test_a_fault_is_named(name, tmp_path, faults.check)


def test_a_command_as_it_is_typed(tmp_path):
    """It starts two processes by spawn."""
    command = [sys.executable, ROOT / "multigpu/mnist.py", "--synthetic", "--num_gpus", 2]
    status, lines, before = faults.check(command, tmp_path, "--steps 6")
    assert status == 0 and problems(lines) == [], (lines, before[-2000:])


@pytest.mark.parametrize("flags", ("", "--fault"))
def test_copies_of_a_model_that_is_split(flags, tmp_path):
    """Of a split model, what is whole in several ranks has the same bits there; parts differ."""
    command = [*TORCHRUN, 2, faults.FOLDER / "tensor_parallel.py", *flags.split()]
    status, lines, before = faults.check(command, tmp_path, "--steps 8")
    assert status == bool(flags) == bool(problems(lines)), (lines, before[-2000:])
    assert not flags or any("tensors differ after step" in line for line in lines), lines


GPT = "--num_layers 2 --d_model 32 --n_heads 2 --seq_len 32 --batch_size 16"
REDUCE, STEP = "dist.all_reduce(gradients, group=copies", "        optimizer.step()\n"
ALONE = "dist.all_reduce(gradients * 1 if rank % 2 else gradients"
BIAS = "model.norm.bias.to_local().data"
ALL, ONE = "11 of 11 .* ranks 1 and 3", "1 of .* ranks 0 and 2.* norm.bias"
SPLIT = {  # script: flags, what is said, and what makes the copies of a part differ
    "gpt_pipeline": ("--num_stages 2", ALL, REDUCE, f"{ALONE}, group=copies"),
    "gpt_fsdp": ("--shard_size 2", ONE, STEP, f"{STEP}        rank == 2 and {BIAS}.add_(0.01)\n"),
}


@pytest.mark.parametrize("script", SPLIT)
def test_copies_of_a_part(script, tmp_path):
    """Ranks 1 and 3 have the same stage, which nothing averages; ranks 0 and 2 the same shard."""
    flags, words, *edit = SPLIT[script]
    path = faults.write(f"hybrid/{script}.py", [edit], tmp_path)
    command = [*TORCHRUN, 4, path, *GPT.split(), *flags.split()]
    status, lines, before = faults.check(command, tmp_path, "--steps 6")
    assert status == 1, (lines, before[-2000:])
    assert any(re.match(f"ERROR +weights +{words}", line) for line in lines), lines


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="no other kernels")
def test_machines_that_round_differently(tmp_path):
    """Kernels of another processor round differently: a warning."""
    rank = '            os.environ["RANK"] = str(rank)\n'
    other = rank + "            os.environ |= {'ATEN_CPU_CAPABILITY': 'default'} if rank else {}\n"
    sgd = "torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)"
    edits = [(rank, other), (sgd, "torch.optim.AdamW(ddp.parameters(), lr=0.01, fused=True)")]
    fault = faults.FAULTS["no_averaging"]._replace(edits=edits)
    status, lines, before = faults.run(fault, tmp_path)
    assert status == 0 and "rounding" in lines[0], (lines, before[-2000:])


@pytest.mark.usefixtures("emulator")
def test_on_the_emulated_accelerator(tmp_path, monkeypatch):
    """A fault is named. For right trainings: test_gpu.py."""
    monkeypatch.setenv("PYTHONPATH", str(faults.ROOT / "tests/emulator"))
    monkeypatch.setenv("EMU_DEVICES", "4")
    fault = faults.FAULTS["images_same_masks"]
    status, lines, _ = faults.run(fault, tmp_path)
    assert faults.is_found(fault, lines), lines
