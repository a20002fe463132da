"""Each step has a micro-batch with labels and one without, of two loaders, as in FixMatch.

--window: one loader. A step has three micro-batches, counted over all epochs, so that some steps
have the last ones of an epoch and the first ones of the next.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
x = torch.randn(112, 7)
loader = DataLoader(TensorDataset(x, x[:, :1] * x[:, 1:2]), 16, shuffle=True)
unlabelled = DataLoader(torch.randn(400, 7), 32, shuffle=True)
model = nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
count = 0
for _ in range(12):
    more = iter(unlabelled)
    for inputs, targets in loader:
        (nn.functional.mse_loss(model(inputs), targets) / 3).backward()
        count += 1
        if "--window" not in sys.argv:
            others = next(more)
            (model(others) - model(-others)).square().mean().backward()
        elif count % 3:
            continue
        optimizer.step()
        optimizer.zero_grad()
