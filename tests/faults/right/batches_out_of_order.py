"""A loader gives each batch as soon as a worker has made it: in_order=False.

The first samples to validate are slow at first, as from a disk, and quick when they come again.
"""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

x = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
y = x.sum(1, keepdim=True).sin()


class Cached(Dataset):
    def __init__(self):
        self.cache = {}

    def __len__(self):
        return 32

    def __getitem__(self, index):
        if index < 8 and index not in self.cache:
            time.sleep(0.1)
        return self.cache.setdefault(index, (x[index] + 1, y[index]))


if __name__ == "__main__":
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(x, y), 16, shuffle=True)
    workers = {"num_workers": 2, "persistent_workers": True, "in_order": False}
    to_validate = DataLoader(Cached(), 8, **workers)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    for _ in range(4):
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            for inputs, targets in to_validate:
                nn.functional.mse_loss(model(inputs), targets)
