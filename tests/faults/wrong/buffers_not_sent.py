"""DDP sends rank 0's BatchNorm statistics to all. --fault: broadcast_buffers=False.

Each rank validates its share of the data with statistics of its own.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(400, 8)
data = TensorDataset(x, (x[:, 0] > 0).long())
train, val = torch.utils.data.random_split(data, (320, 80))
sampler = DistributedSampler(train)
loader = DataLoader(train, 16, sampler=sampler)
val_loader = DataLoader(val, 8, sampler=DistributedSampler(val, shuffle=False))
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
model = DistributedDataParallel(model, broadcast_buffers="--fault" not in sys.argv)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(4):
    sampler.set_epoch(epoch)
    model.train()
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(model(a), b) for a, b in val_loader]
    total = torch.stack(losses).sum()
    dist.all_reduce(total)
dist.destroy_process_group()
