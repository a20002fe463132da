"""A critic is linear, and the loss is the mean of its scores: WGAN, arXiv 1701.07875.

All rows of a weight have one gradient, and so have all numbers of the bias. --fault: zero_grad() is
left out, so that these gradients add up.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 16) + 1, torch.randn(96, 16))
loader = DataLoader(data, 16, shuffle=True)
to_validate = DataLoader(TensorDataset(torch.randn(32, 16)), 16)
critic = nn.Linear(16, 16)
optimizer = torch.optim.RMSprop(critic.parameters(), lr=0.001)
for _ in range(4):
    for real, fake in loader:
        if "--fault" not in sys.argv:
            optimizer.zero_grad()
        critic(torch.cat([real, 2 * fake])).sum(1).mean().backward()
        optimizer.step()
    with torch.no_grad():
        print(sum(critic(images).sum().item() for (images,) in to_validate))
