"""A loader gives each batch as soon as a worker has made it: in_order=False.

In each validation, another batch is slow, as from a disk that is busy.
"""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

x = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
y = x.sum(1, keepdim=True).sin()


class Photos(Dataset):
    slow = 0  # which batch is slow

    def __len__(self):
        return 32

    def __getitem__(self, index):
        if index == 8 * self.slow:
            time.sleep(0.5)
        return x[index] + 1, y[index]


if __name__ == "__main__":
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(x, y), 16, shuffle=True)
    photos = Photos()
    to_validate = DataLoader(photos, 8, num_workers=2, in_order=False)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    for epoch in range(4):
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            schedule.step()
        model.eval()
        photos.slow = epoch
        with torch.no_grad():
            for inputs, targets in to_validate:
                nn.functional.mse_loss(model(inputs), targets)
