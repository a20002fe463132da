"""--fault: after one step without any gradient an optimizer never moves a weight again.

pytorch #115607, of a compiled Adam. Here a class of our own does the same.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(240, 8)
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 16, shuffle=True)


class Adam(torch.optim.Adam):
    is_dead = False

    def step(self, closure=None):
        weights = [weight for group in self.param_groups for weight in group["params"]]
        if all(weight.grad is None for weight in weights):
            self.is_dead = "--fault" in sys.argv
        if not self.is_dead:
            super().step(closure)


model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = Adam(model.parameters(), lr=1e-3)
step = 0
for _ in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        if step != 8:
            nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        step += 1
