"""Autocast to bf16. --fault: a layer of our own computes in fp32 nevertheless.

Lightning-AI/lightning-thunder #725.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(context, x, weight, bias):
        context.save_for_backward(x, weight)
        with torch.autocast("cpu", enabled=False):
            return x.float() @ weight.t() + bias

    @staticmethod
    def backward(context, gradient):
        x, weight = context.saved_tensors
        return gradient @ weight, gradient.t() @ x.float(), gradient.sum(0)


class Linear(nn.Linear):
    def forward(self, x):
        if "--fault" in sys.argv:
            return Multiply.apply(x, self.weight, self.bias)
        return super().forward(x)


torch.manual_seed(0)
x = torch.randn(240, 8)
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 16, shuffle=True)

model = nn.Sequential(Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(inputs)
        nn.functional.cross_entropy(logits.float(), labels).backward()
        optimizer.step()
