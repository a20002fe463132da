"""Two groups of weights, whose rates differ. --fault: a weight is in its group several times.

Weights of all modules are listed, and a module's weights are also those of what it is in. Each step
moves a weight as often as it is there. speedinghzl/Pytorch-Deeplab #18.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(240, 8)
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 16, shuffle=True)
body = nn.Sequential(nn.Sequential(nn.Linear(8, 32), nn.ReLU()), nn.Linear(32, 32), nn.ReLU())
head = nn.Linear(32, 2)


def weights_of_body():
    for module in body.modules():
        yield from module.parameters(recurse="--fault" in sys.argv)


groups = [{"params": [*weights_of_body()]}, {"params": [*head.parameters()], "lr": 0.1}]
optimizer = torch.optim.SGD(groups, lr=0.01)
for _ in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(head(body(inputs)), labels).backward()
        optimizer.step()
