"""The trained weights are counted, then clipped. --fault: they are a generator, which is used up.

clip_grad_norm_ is given no tensor, and clips nothing. --filter: they are a filter.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(240, 8)
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 16, shuffle=True)

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
trained = (weight for weight in model.parameters() if weight.requires_grad)
if "--filter" in sys.argv:
    trained = filter(lambda weight: weight.requires_grad, model.parameters())
if "--fault" not in sys.argv:
    trained = list(trained)
print(sum(weight.numel() for weight in trained), "weights")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        nn.utils.clip_grad_norm_(trained, 0.1)
        optimizer.step()
