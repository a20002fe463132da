"""DDP and both ways of torch.utils.checkpoint, with dropout: activations are computed twice.

After the documentation of torch.utils.checkpoint. It is saved at each step, and resumed.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SNAPSHOT, EPOCH = sys.argv[1], 20


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 1)
        self.a = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.3))
        self.b = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.3))

    def forward(self, x):
        x = checkpoint(self.a, self.first(x), use_reentrant=True)
        return self.last(checkpoint(self.b, x, use_reentrant=False))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(6)
x = torch.randn(16 * EPOCH, 8)
data = TensorDataset(x, x.sum(1, keepdim=True).sin())
model = Net()
ddp = DistributedDataParallel(model, static_graph=True)
optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
sampler = DistributedSampler(data)
loader = DataLoader(data, 16 // world, sampler=sampler)
done = 0
if os.path.exists(SNAPSHOT):
    saved = torch.load(SNAPSHOT)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    done = saved["done"]
for epoch in range(done // EPOCH, 4):
    sampler.set_epoch(epoch)
    for number, (inputs, targets) in enumerate(loader):
        if epoch * EPOCH + number < done:
            continue
        torch.manual_seed(1000 * done + rank)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(inputs), targets).backward()
        optimizer.step()
        done += 1
        if rank == 0:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(saved | {"done": done}, SNAPSHOT + ".new")
            os.replace(SNAPSHOT + ".new", SNAPSHOT)
dist.destroy_process_group()
