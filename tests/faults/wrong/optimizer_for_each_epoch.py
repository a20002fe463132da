"""A function trains for an epoch. --fault: it makes an optimizer, which forgets the last epoch's.

What Adam knows of the gradients is lost, and its first steps are too large.
alan-turing-institute/deepsensor #47, pytorch/tutorials #61.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(96, 8)
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 16, shuffle=True)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))


def create_optimizer():
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def train_epoch(optimizer):
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


one_for_all = create_optimizer()
for _ in range(6):
    train_epoch(create_optimizer() if "--fault" in sys.argv else one_for_all)
