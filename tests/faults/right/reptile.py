"""Reptile, after openai/supervised-reptile's sinusoids: an optimizer is made anew in each round."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
x = torch.linspace(-5, 5, 50)[:, None]
for _ in range(30):
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    phase, height = torch.rand(2).tolist()
    y = torch.sin(x + 2 * math.pi * phase) * (0.1 + 4.9 * height)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for inputs, targets in DataLoader(TensorDataset(x, y), 10, shuffle=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    after = model.state_dict()
    mixed = {name: old + 0.1 * (after[name] - old) for name, old in before.items()}
    model.load_state_dict(mixed)
