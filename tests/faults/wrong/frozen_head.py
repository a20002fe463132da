"""A new head is trained, and all below it is frozen.

--fault: by a condition on names that is turned round, the head is frozen, BatchNorm is not; the
optimizer has the head. discuss.pytorch.org 84911.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(240, 8)
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 16, shuffle=True)

model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
trained = "1." if "--fault" in sys.argv else "3."
for name, weight in model.named_parameters():
    weight.requires_grad = name.startswith(trained)
optimizer = torch.optim.Adam(model[3].parameters(), lr=0.01)
for _ in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
