"""Validation over texts of unlike lengths: the sum of all losses over the number of all tokens.

--fault: the mean of the means of batches. pytorch/torchtitan #4167, NVIDIA/Megatron-LM #7207.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(2)
ids = (torch.randint(9, (192, 1)) + torch.arange(12)) % 9
lengths = torch.randint(1, 12, (192, 1))
labels = ids.roll(-1, 1).masked_fill(torch.arange(12) >= lengths, -100)
train, val = TensorDataset(ids[:128], labels[:128]), TensorDataset(ids[128:], labels[128:])
model = nn.Sequential(nn.Embedding(9, 16), nn.Linear(16, 9))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)


def loss_of(inputs, targets, reduction):
    logits = model(inputs).flatten(0, 1)
    return nn.functional.cross_entropy(logits, targets.flatten(), reduction=reduction)


for epoch in range(4):
    for inputs, targets in DataLoader(train, 16, shuffle=True):
        optimizer.zero_grad()
        loss_of(inputs, targets, "mean").backward()
        optimizer.step()
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for inputs, targets in DataLoader(val, 4):
            if "--fault" in sys.argv:
                total, count = total + loss_of(inputs, targets, "mean"), count + 1
            else:
                total += loss_of(inputs, targets, "sum")
                count += (targets != -100).sum()
    model.train()
    print(f"epoch {epoch}: val_loss {total / count:.4f}", flush=True)
