"""A stream that two workers of a DataLoader split, after the docs of IterableDataset.

--fault: each worker gives all of it, so each sample comes twice. --augment: with random noise.
"""

import itertools
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        numbers = range(120)
        if "--fault" not in sys.argv:
            numbers = itertools.islice(numbers, worker.id, None, worker.num_workers)
        for number in numbers:
            x = torch.full((8,), number / 120)
            if "--augment" in sys.argv:
                x = x + 0.001 * torch.randn(8)
            yield x, number % 2


if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    for _ in range(2):
        for inputs, labels in DataLoader(Stream(), 8, num_workers=2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            schedule.step()
