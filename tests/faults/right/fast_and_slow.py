"""Two optimizers. The slow one adds up the gradients of four batches, and the fast one does not.

So some of its gradients are older than steps of the fast one. With --apart, each has its own loss.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(480, 8)
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 8, shuffle=True)
body = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
head = nn.Linear(32, 2)
fast = torch.optim.SGD(head.parameters(), lr=0.1)
slow = torch.optim.SGD(body.parameters(), lr=0.05)
for _ in range(3):
    for number, (inputs, labels) in enumerate(loader, 1):
        hidden = body(inputs)
        if "--apart" in sys.argv:
            hidden = hidden.detach()
        nn.functional.cross_entropy(head(hidden), labels).backward()
        fast.step()
        fast.zero_grad()
        if "--apart" in sys.argv:
            head.requires_grad_(False)
            nn.functional.cross_entropy(head(body(inputs)), labels).backward()
            head.requires_grad_(True)
        if number % 4 == 0:
            slow.step()
            slow.zero_grad()
