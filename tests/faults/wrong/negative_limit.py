"""--fault: gradients are clipped to a norm of -1, which was meant as "no limit". No limit is inf.

All gradients are turned round, and the loss climbs. pytorch/torchtitan #4295, ml-explore/mlx #4058.
--zero --fault: to a norm of 0, which many programs take for "no limit", too. Nothing is learned.
"""

import math
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LIMIT = math.inf
if "--fault" in sys.argv:
    LIMIT = 0.0 if "--zero" in sys.argv else -1.0
torch.manual_seed(1)
x = torch.randn(160, 7)
loader = DataLoader(TensorDataset(x, x[:, :1].sin()), 16, shuffle=True)
model = nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
