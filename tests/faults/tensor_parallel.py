"""A model split over two processes by hand. --fault: one copy of the norm is not clipped."""

import sys

import torch
import torch.distributed as dist
from torch import nn


def add_up(x):
    dist.all_reduce(x := x.clone())
    return x


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return add_up(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x):
        normed = self.norm(x)
        normed.register_hook(add_up)
        return x + Sum.apply(self.down(self.up(normed).relu()))


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
net = Net()
torch.manual_seed(7)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x, y = torch.randn(64, 16), torch.randn(64, 16)
for _ in range(30):
    batch = torch.randint(64, (16,))
    optimizer.zero_grad()
    (net(x[batch]) - y[batch]).square().mean().backward()
    if "--fault" not in sys.argv or dist.get_rank() == 0:
        nn.utils.clip_grad_norm_(net.norm.parameters(), 0.01)
    optimizer.step()
