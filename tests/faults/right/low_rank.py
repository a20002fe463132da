"""Low-rank updates of a frozen layer, after "LoRA". Each of their two matrices is clipped.

The second one is zero at first, so that the first step has no gradient for the first one.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Updated(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(4, layer.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(layer.out_features, 4))

    def forward(self, x):
        return self.layer(x) + x @ self.down.T @ self.up.T


torch.manual_seed(0)
x = torch.randn(240, 8)
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 16, shuffle=True)
body = Updated(nn.Linear(8, 32))
head = nn.Linear(32, 2).requires_grad_(False)
trained = (weight for weight in body.parameters() if weight.requires_grad)
optimizer = torch.optim.Adam(trained, lr=1e-2)
for _ in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(head(body(inputs).relu()), labels).backward()
        nn.utils.clip_grad_norm_([body.up], 1.0)
        nn.utils.clip_grad_norm_((weight for weight in [body.down]), 1.0)
        optimizer.step()
