"""Sharpness-aware minimization, after davda54/sam: two backward passes for each step.

The gradients of the first one only move the weights uphill, and are zeroed.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(240, 8)
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 16, shuffle=True)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(3):
    for inputs, labels in loader:
        nn.functional.cross_entropy(model(inputs), labels).backward()
        with torch.no_grad():
            norm = torch.stack([weight.grad.norm() for weight in model.parameters()]).norm()
            uphill = [weight.grad * 0.05 / norm for weight in model.parameters()]
            for weight, change in zip(model.parameters(), uphill):
                weight.add_(change)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        with torch.no_grad():
            for weight, change in zip(model.parameters(), uphill):
                weight.sub_(change)
        optimizer.step()
        optimizer.zero_grad()
