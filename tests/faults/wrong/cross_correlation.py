"""A loss of the cross-correlation over the whole batch, as in Barlow Twins.

--fault: its sum over ranks is dist.all_reduce(), which passes no gradient. lightly #1977.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradient
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(2)
views = torch.randn(30, 2, 32, 10)
model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 6))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
for first, second in views:
    both = torch.cat((first[rank::world], second[rank::world]))
    left, right = ddp(both).chunk(2)
    correlation = left.T @ right / 32
    if "--fault" in sys.argv:
        dist.all_reduce(correlation)
    else:
        correlation = with_gradient.all_reduce(correlation)
    optimizer.zero_grad()
    (correlation - torch.eye(6)).square().sum().backward()
    optimizer.step()
dist.destroy_process_group()
