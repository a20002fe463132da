"""What a process of hybrid/gpt_fsdp.py holds of a large model, and what tools/memory.py tells."""

import sys

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, call, module
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

SIZES = "--d_model 4096 --n_heads 32 --num_layers 32 --seq_len 128 --batch_size 4"  # of README.md


def test_a_process_holds_its_share(monkeypatch):
    """A quarter of 6.4 billion weights, their gradients and both moments of AdamW, and a block.

    Tensors have shapes and types, but no memory; collectives of 4 processes return at once. A step
    is made as the script makes it.
    """
    script = module("hybrid/gpt_fsdp.py")
    monkeypatch.setattr(sys, "argv", ["gpt_fsdp.py", *SIZES.split()])
    args = script.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    mesh = dist.init_device_mesh("cpu", (1, 4), mesh_dim_names=("copies", "shards"))
    with FakeTensorMode():
        model = script.create_model(args, None).train()
        count = sum(weight.numel() for weight in model.parameters())
        script.shard(model, mesh, args)
        optimizer = script.create_optimizer(model, args)
        tokens = torch.zeros(1, args.seq_len + 1, dtype=torch.uint8)
        loss, _ = script.batch_loss(model, (tokens,), args)
        loss.backward()
        optimizer.step()
        weights = [*model.parameters()]
        moments = [optimizer.state[weight] for weight in weights]
        held = [weights, [weight.grad for weight in weights]]
        held += [[each[name] for each in moments] for name in ("exp_avg", "exp_avg_sq")]
        # Each weight is cut along its first dimension, which 4 divides: all shares are equal.
        assert [sum(x.to_local().nbytes for x in each) for each in held] == [4 * count // 4] * 4
    dist.destroy_process_group()
    block = 4 * sum(weight.numel() for weight in model.blocks[0].parameters())
    assert 6.4e9 < count < 6.5e9
    assert max(4 * size for name, _, _, size in script.sent if name == "all-gather") == block


def test_the_table_of_memory(data):
    """Of the model above: 6.4 billion parameters, 16 bytes each, over 4 processes."""
    words = [ROOT / "multigpu/gpt.py", *SIZES.split(), "--dataset", str(data / "words.txt")]
    done = call(module("tools/memory.py"), "--memory", 40, *words)
    assert done.returncode == 0, done.stderr
    first, _, *lines, _ = done.stdout.splitlines()
    count = int(first.split()[0].replace(",", ""))
    assert 6.4e9 < count < 6.5e9
    rows = {line[:20].strip(): [float(word) for word in line[20:].split()[:6]] for line in lines}
    fits = {line[:20].strip(): line.endswith("  fits") for line in lines}
    weights, gradients, optimizer, gathered, activations, total = rows["DDP"]
    assert weights == gradients == pytest.approx(4e-9 * count, abs=1e-3)
    assert optimizer == pytest.approx(8e-9 * count, abs=1e-3) and gathered == 0
    assert total == pytest.approx(sum(rows["DDP"][:5]), abs=5e-3)
    assert rows["FSDP"][:3] == pytest.approx([x / 4 for x in rows["DDP"][:3]], abs=1e-3)
    assert rows["FSDP"][4] == activations > 3 * rows["FSDP, checkpoints"][4]
    assert fits == {name: name.startswith("FSDP") for name in rows}


def test_memory_in_16_bits(data):
    """With autocast, DDP keeps a copy of each matrix in 16 bits. FSDP's blocks are gathered so."""
    words = "--d_model 768 --num_layers 8 --n_heads 4 --batch_size 4 --precision bf16".split()
    tool, script = module("tools/memory.py"), module("multigpu/gpt.py")
    of_ddp = tool.count(script, [*words, "--dataset", str(data / "words.txt")], 2)
    of_fsdp = tool.divided(of_ddp, 2)
    matrices = 2 * 8 * 12 * 768**2  # bytes
    assert of_ddp["activations"] - of_fsdp["activations"] == pytest.approx(matrices, rel=0.2)
    assert (
        of_fsdp["weights"]
        == of_ddp["weights"] / 2
        == 2 * sum([*of_ddp["blocks"], of_ddp["others"]])
    )


TASKS = [  # scripts whose batches hold more than tensors, or whose models have no list of blocks
    "text.py --model nbow",
    "text.py --model transformer --precision bf16",
    "translation.py --source number --target name --model transformer",
    "translation.py --source number --target name --model transformer --precision bf16",
]


@pytest.mark.parametrize("task", TASKS)
def test_memory_of_texts_and_translations(data, task):
    """A batch of translations holds a list of lengths. AdamW keeps two moments of each weight."""
    script, *flags = task.split()
    words = f"--dataset tables --data_dir {data} --seq_len 5 --batch_size 60".split()
    done = call(module("tools/memory.py"), ROOT / "multigpu" / script, *words, *flags)
    assert done.returncode == 0, done.stderr
    first, _, row = done.stdout.splitlines()
    count = int(first.split()[0].replace(",", ""))
    weights, gradients, optimizer, gathered, activations, _ = map(float, row.split()[1:])
    assert weights == gradients == pytest.approx(4e-9 * count, abs=1e-3) and gathered == 0
    assert optimizer == pytest.approx(8e-9 * count, abs=1e-3) and activations > 0


def test_inputs_that_are_no_tensors_are_not_cast():
    """As the lengths of a translation, which go to the model with its tokens."""
    inputs = (torch.ones(2), [5, 3], torch.ones(2, dtype=torch.int64))
    reals, lengths, tokens = module("tools/memory.py").cast_inputs(torch.bfloat16, None, inputs)
    assert (reals.dtype, lengths, tokens.dtype) == (torch.bfloat16, [5, 3], torch.int64)


def test_memory_of_ones_own_script(data):
    """A script without blocks has no FSDP. What cannot be counted has a line."""
    words = f"{ROOT}/multigpu/images.py --dataset mnist --data_dir {data} --model cnn"
    words = [*words.split(), "--batch_size"]
    done = call(module("tools/memory.py"), *words, 64)
    assert done.returncode == 0 and "FSDP" not in done.stdout, done.stderr
    assert "too small for 4 processes" in call(module("tools/memory.py"), *words, 2).stderr
    assert "there is no script" in call(module("tools/memory.py"), "none.py").stderr
    words = f"{ROOT}/multigpu/translation.py --model lstm --dataset tables --data_dir {data}"
    words = [*words.split(), "--source", "number", "--target", "name"]
    told = call(module("tools/memory.py"), *words).stderr
    assert "here are only shapes: aten._pack_padded_sequence" in told and "\n" not in told
