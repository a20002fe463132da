"""Two tasks in turn, as in multi-task training: their data sets have one type and one length.

Both are shuffled by a DistributedSampler, whose seed is 0 by default. --split: random_split() gives
each task its part to validate on.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

torch.manual_seed(0)


def make_data(size):
    x = torch.randn(size, 7)
    return TensorDataset(x, x[:, :1] * x[:, 1:2])


tasks = []
for _ in range(2):
    if "--split" in sys.argv:
        train, val = random_split(make_data(96), [64, 32])
    else:
        train, val = make_data(64), make_data(32)
    sampler = DistributedSampler(train, num_replicas=1, rank=0)
    tasks.append((sampler, DataLoader(train, 16, sampler=sampler), DataLoader(val, 16)))
model = nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for epoch in range(3):
    for sampler, loader, _ in tasks:
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    with torch.no_grad():
        for _, _, to_validate in tasks:
            for inputs, targets in to_validate:
                nn.functional.mse_loss(model(inputs), targets)
