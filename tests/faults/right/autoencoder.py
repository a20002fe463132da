"""A denoising autoencoder, whose targets are its inputs, with LBFGS's closure as --lbfgs.

After the documentation of torch.optim.Optimizer.step(closure).
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 16))
loader = DataLoader(torch.randn(240, 16), 16, shuffle=True)
if "--lbfgs" in sys.argv:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
else:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(3):
    for x in loader:

        def closure():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), x)  # noqa: B023 (it is called at once)
            loss.backward()
            return loss

        optimizer.step(closure)
