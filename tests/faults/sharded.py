"""FSDP2 on two processes, HSDP on four, or one process alone. --fault: a replica is changed."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
rank, world = 0, 1
if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    shape, names = ((2, 2), ("replicate", "shard")) if world == 4 else ((world,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(1)
x = torch.randn(512, 16, generator=generator)
y = torch.randint(4, (512,), generator=generator)
for step in range(30):
    batch = torch.randperm(512, generator=generator)[:32][rank::world]
    nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
    optimizer.step()
    optimizer.zero_grad()
    if "--fault" in sys.argv and step == 4 and rank == 2:
        net[0].weight.to_local().data.add_(0.01)
if world > 1:
    dist.destroy_process_group()
