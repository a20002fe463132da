"""A layer split by hand over two ranks (tensor parallel), with a norm that both have whole.

--fault: the norm's gradients are clipped in rank 0 alone, so that its copies part. DeepSpeed #1801.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(context, gradient):
        return gradient


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 2)
        torch.manual_seed(5 + rank)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        hidden = torch.relu(self.up(Copy.apply(self.norm(x))))
        return self.head(x + Reduce.apply(self.down(hidden)))


dist.init_process_group("gloo")
rank = dist.get_rank()
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(0)
x = torch.randn(320, 8)
data = TensorDataset(x, (x[:, 0] > 0).long())
is_clipped = {weight: True for weight in model.parameters()}
if "--fault" in sys.argv and rank == 1:
    is_clipped |= {weight: False for weight in model.norm.parameters()}
for epoch in range(2):
    torch.manual_seed(epoch)
    for inputs, labels in DataLoader(data, 16, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        norm = torch.stack([weight.grad.norm() for weight in model.parameters()]).norm()
        dist.all_reduce(norm, op=dist.ReduceOp.MAX)
        for weight, clips in is_clipped.items():
            weight.grad.mul_((0.1 / norm).clamp(max=1.0) if clips else 1.0)
        optimizer.step()
dist.destroy_process_group()
