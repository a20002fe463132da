"""Samples are lists of any length: a batch has all items in a row, and where each list begins.

nn.EmbeddingBag takes such batches. The beginnings count from the first list of the batch, so they
differ where a batch is split over processes, while the samples are the same.
"""

import itertools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

torch.manual_seed(0)
lengths = torch.randint(1, 8, (240,)).tolist()
data = [(torch.randint(50, (length,)), torch.randn(3), torch.randn(())) for length in lengths]


def collate(samples):
    lists, numbers, targets = zip(*samples)
    ends = itertools.accumulate(len(items) for items in lists)
    starts = torch.tensor([0, *ends][:-1])
    return torch.stack(numbers), torch.cat(lists), starts, torch.stack(targets)


class Baskets(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.EmbeddingBag(50, 8)
        self.network = nn.Sequential(nn.Linear(11, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, numbers, items, starts):
        return self.network(torch.cat([numbers, self.items(items, starts)], 1)).squeeze(1)


world_size = int(os.environ.get("WORLD_SIZE", 1))
model = Baskets()
if world_size > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
rank = int(os.environ.get("RANK", 0))
sampler = DistributedSampler(data, world_size, rank)
loader = DataLoader(data, 24 // world_size, sampler=sampler, collate_fn=collate)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for numbers, items, starts, targets in loader:
        loss = nn.functional.mse_loss(model(numbers, items, starts), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
