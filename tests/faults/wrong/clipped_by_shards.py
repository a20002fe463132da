"""FSDP2, clipped by the norm of the whole gradient.

--fault: each rank clips by the norm of its own shards. sgl-project/SpecForge #663.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(4)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
x, y = torch.randn(40, 16, 8), torch.randn(40, 16, 4) * torch.tensor([9.0, 1, 1, 1])
fully_shard(model, mesh=dist.init_device_mesh("cpu", (world,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, targets in zip(x, y):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs[rank::world]), targets[rank::world]).backward()
    if "--fault" in sys.argv:
        parts = [weight.grad.to_local() for weight in model.parameters()]
        norm = torch.stack([part.norm() for part in parts]).norm()
        for part in parts:
            part.mul_((0.3 / (norm + 1e-6)).clamp(max=1.0))
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
dist.destroy_process_group()
