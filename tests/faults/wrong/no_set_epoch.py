"""A DistributedSampler that is told each epoch. --fault: it is not, so epochs have one order.

The commonest fault of all: pytorch/pytorch #48950 asks for a warning. --loss_module: the loss is an
nn.Module, whose inputs are no samples. --augment: samples differ by random noise in each epoch.
"""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Data(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        x = torch.full((8,), index / 40)
        if "--augment" in sys.argv:
            x = x + 0.001 * torch.randn(8)
        return x, index % 2


torch.manual_seed(0)
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
data = Data()
sampler = DistributedSampler(data, num_replicas=world, rank=rank)
loader = DataLoader(data, 8, sampler=sampler)
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.functional.cross_entropy
if "--loss_module" in sys.argv:
    criterion = nn.CrossEntropyLoss()
for epoch in range(5):
    if "--fault" not in sys.argv:
        sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        criterion(model(inputs), labels).backward()
        optimizer.step()
