"""Gradients are clipped. --fault: after the step, when they are no longer of use."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(240, 8)
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 16, shuffle=True)

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        if "--fault" not in sys.argv:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if "--fault" in sys.argv:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
