"""Validation with dropout on, to see how sure a model is, after Gal and Ghahramani (2016).

The model is in eval() but for its Dropout layers.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(320, 8)
data = TensorDataset(x[:240], (x[:240, 0] > 0).long())
val = DataLoader(TensorDataset(x[240:]), 16)
model = nn.Sequential(
    nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 2)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model.train()
    for inputs, labels in DataLoader(data, 16, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    model.eval()
    model[3].train()
    with torch.no_grad():
        votes = [torch.stack([model(batch) for _ in range(4)]).std(0).mean() for (batch,) in val]
