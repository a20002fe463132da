"""Keeps the weights with the best validation loss, which is that of all ranks.

--fault: it is that of rank 0's own share of the data. modelscope/ms-swift #10088.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SNAPSHOT = sys.argv[1]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(11)
x = torch.randn(160, 6)
y = x[:, :1].sin() + (torch.arange(160) % 2)[:, None] * 2.0
train, val = TensorDataset(x[:128], y[:128]), TensorDataset(x[128:], y[128:])
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
sampler = DistributedSampler(train)
loader = DataLoader(train, 32 // world, sampler=sampler)
val_loader = DataLoader(val, 8, sampler=range(rank, 32, world))
best = float("inf")
for epoch in range(12):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(inputs), targets).backward()
        optimizer.step()
    model.eval()
    sums = torch.zeros(2)
    with torch.no_grad():
        for inputs, targets in val_loader:
            squares = (model(inputs) - targets).square().sum()
            sums += torch.tensor([squares, len(inputs)])
    model.train()
    if "--fault" not in sys.argv:
        dist.all_reduce(sums)
    loss = (sums[0] / sums[1]).item()
    if rank == 0 and loss < best:
        best = loss
        torch.save(model.state_dict(), SNAPSHOT + ".new")
        os.replace(SNAPSHOT + ".new", SNAPSHOT)
dist.destroy_process_group()
