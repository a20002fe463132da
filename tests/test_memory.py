"""What a process of hybrid/gpt_fsdp.py holds of a model that is too large for this machine."""

import sys

import torch
import torch.distributed as dist
from conftest import module
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
