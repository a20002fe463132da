"""Layers in a ModuleList. --fault: in a plain list, so that they are in no parameters().

They have gradients, and are in no optimizer. ikostrikov/pytorch-meta-optimizer #11.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Linear(16, 16) for _ in range(2)]
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 2)
        self.layers = layers if "--fault" in sys.argv else nn.ModuleList(layers)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x.tanh())
        return self.last(x)


torch.manual_seed(0)
x = torch.randn(240, 8)
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 16, shuffle=True)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
