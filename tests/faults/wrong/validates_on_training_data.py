"""A validation on data of its own. --fault: on data that it trains on."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(320, 8)
data = TensorDataset(x, (x[:, 0] > 0).long())
train, val = torch.utils.data.random_split(data, (240, 80))
loader = DataLoader(train, 16, shuffle=True)
val_loader = DataLoader(train if "--fault" in sys.argv else val, 16)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model.train()
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(model(a), b).item() for a, b in val_loader]
    print(sum(losses) / len(losses), flush=True)
