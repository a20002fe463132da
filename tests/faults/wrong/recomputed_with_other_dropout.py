"""Activations are computed again in the backward pass, with the dropout of the first time.

--fault: with another dropout. --plain: they are kept. allenai/OLMo-core #828, pytorch #190758.
"""

import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(6)
x = torch.randn(40, 16, 8)
body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 32), nn.ReLU())
head = nn.Linear(32, 1)
model = nn.ModuleDict({"body": body, "head": head})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
keeps_state = "--fault" not in sys.argv
for step, inputs in enumerate(x):
    torch.manual_seed(1000 + step)
    if "--plain" in sys.argv:
        hidden = body(inputs)
    else:
        hidden = checkpoint(body, inputs, use_reentrant=False, preserve_rng_state=keeps_state)
    optimizer.zero_grad()
    nn.functional.mse_loss(head(hidden), inputs.sum(1, keepdim=True).sin()).backward()
    optimizer.step()
