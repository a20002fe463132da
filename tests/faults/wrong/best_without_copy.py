"""The weights of the best epoch are kept, and saved at the end. --fault: without a copy.

state_dict() gives the weights themselves, so the best are the last. PyTorch's docs say so.
"""

import copy
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(240, 8)
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 16, shuffle=True)

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
val = DataLoader(TensorDataset(x[:64], (x[:64, 0] > 0).long()), 16)
best, kept = float("inf"), None
for _ in range(4):
    model.train()
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        loss = sum(nn.functional.cross_entropy(model(a), b).item() for a, b in val)
    if loss < best:
        best, kept = loss, model.state_dict()
        if "--fault" not in sys.argv:
            kept = copy.deepcopy(kept)
