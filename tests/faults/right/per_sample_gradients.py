"""An ordinary training that measures the norm of each sample's gradient, by PyTorch's tutorial.

torch.func.vmap() calls the model for all samples at once, with tensors that stand for one of them.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(240, 8)
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 16, shuffle=True)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(weights, sample, label):
    return F.cross_entropy(functional_call(model, weights, (sample[None],)), label[None])


gradients_of = vmap(grad(loss_of), in_dims=(None, 0, 0), randomness="different")
for _ in range(2):
    for inputs, labels in loader:
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        found = gradients_of(weights, inputs, labels)
        print(sum(each.flatten(1).square().sum(1) for each in found.values()).sqrt().mean().item())
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
