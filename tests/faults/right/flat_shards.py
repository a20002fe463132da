"""Each rank's optimizer holds a flat part of all weights, and sends it to the others after a step.

After ZeRO-1 of deepspeedai/DeepSpeed: no module knows the flat part.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(96, 8)
data = TensorDataset(x, x.sum(1, keepdim=True).sin())
model = nn.Sequential(nn.Linear(8, 15), nn.ReLU(), nn.Linear(15, 1))
weights = [*model.parameters()]


def flat(tensors):
    numbers = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return nn.functional.pad(numbers, (0, -len(numbers) % world))


own = flat(weights).chunk(world)[rank].clone().requires_grad_()
optimizer = torch.optim.Adam([own], lr=0.01)
sampler = DistributedSampler(data)
loader = DataLoader(data, 16 // world, sampler=sampler)
for epoch in range(5):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        nn.functional.mse_loss(model(inputs), targets).backward()
        gradient = flat([weight.grad for weight in weights])
        dist.all_reduce(gradient)
        own.grad = (gradient / world).chunk(world)[rank].clone()
        model.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        parts = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(parts, own.detach())
        sizes = [weight.numel() for weight in weights]
        whole = torch.cat(parts)[: sum(sizes)].split(sizes)
        for weight, numbers in zip(weights, whole):
            weight.data.copy_(numbers.view_as(weight))
dist.destroy_process_group()
