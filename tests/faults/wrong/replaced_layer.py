"""A new last layer, for other classes. --fault: it is put in after the optimizer was made.

The optimizer still has the old layer, and the new one never trains.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(240, 8)
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 16, shuffle=True)

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 10))
if "--fault" not in sys.argv:
    model[2] = nn.Linear(32, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if "--fault" in sys.argv:
    model[2] = nn.Linear(32, 2)
for _ in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
