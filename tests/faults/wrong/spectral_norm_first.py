"""--fault: a model with spectral_norm is evaluated before it was ever trained.

Its vectors are not yet iterated, so the first evaluation is wrong. pytorch #51800.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(240, 8)
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 16, shuffle=True)

layer = nn.utils.spectral_norm(nn.Linear(8, 32))
model = nn.Sequential(layer, nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def validate():
    model.eval()
    with torch.no_grad():
        print((model(x).argmax(1) == (x[:, 0] > 0)).float().mean().item())
    model.train()


if "--fault" in sys.argv:
    validate()
for _ in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    validate()
