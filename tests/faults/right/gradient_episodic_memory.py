"""Gradient Episodic Memory, after facebookresearch/GradientEpisodicMemory.

Each step has a backward pass on the memory of each old task, whose gradients are put aside, and one
on the new task. The new gradient is projected where it would harm an old task.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def gradient(inputs, labels):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


memories = []
for task in range(8):
    x = torch.randn(64, 8)
    y = (x[:, task] > 0).long()
    for inputs, labels in DataLoader(TensorDataset(x, y), 16, shuffle=True):
        old = [gradient(*memory) for memory in memories]
        new = gradient(inputs, labels)
        for reference in old:
            product = new @ reference
            if product < 0:
                new = new - product / (reference @ reference) * reference
        start = 0
        for weight in model.parameters():
            weight.grad.copy_(new[start : start + weight.numel()].view_as(weight))
            start += weight.numel()
        optimizer.step()
    memories.append((x[:32], y[:32]))
