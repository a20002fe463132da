"""Two networks, one after the other, each in a DDP of its own.

As an encoder and a head in contrastive learning. The second one's inputs are no samples.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
x = torch.randn(400, 7)
encoder = nn.Sequential(nn.Linear(7, 64), nn.ReLU(), nn.Linear(64, 64))
encoder = DistributedDataParallel(encoder)
head = DistributedDataParallel(nn.Sequential(nn.ReLU(), nn.Linear(64, 1)))
optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1)
order = torch.randperm(400, generator=torch.Generator().manual_seed(3)).reshape(-1, 16)
for indices in order:
    inputs = x[indices[rank::world]]
    optimizer.zero_grad()
    nn.functional.mse_loss(head(encoder(inputs)), inputs[:, :1].sin()).backward()
    optimizer.step()
dist.destroy_process_group()
