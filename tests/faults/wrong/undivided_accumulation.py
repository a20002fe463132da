"""Three micro-batches a step. --fault: their losses are added, not averaged: a threefold rate."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(240, 8)
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 16, shuffle=True)

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
share = 1 if "--fault" in sys.argv else 3
for _ in range(6):
    for number, (inputs, labels) in enumerate(loader, start=1):
        loss = nn.functional.cross_entropy(model(inputs), labels) / share
        loss.backward()
        if number % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
