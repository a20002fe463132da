"""fp16 with a schedule, after PyTorch's "Automatic Mixed Precision examples".

The scale starts at its default. The summed loss overflows, so nine of the first steps are skipped.
--lagged: the schedule waits for steps that are taken. --mild: a scale that skips fewer steps.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(4)
x = 3 * torch.randn(960, 8)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
if world > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (11 if "--mild" in sys.argv else 16))
data = TensorDataset(x, x.sum(1, keepdim=True))
sampler = DistributedSampler(data, num_replicas=world, rank=rank)
for inputs, targets in DataLoader(data, 16 // world, sampler=sampler):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.mse_loss(model(inputs), targets, reduction="sum")
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if "--lagged" not in sys.argv or scaler.get_scale() >= scale:
        schedule.step()
if world > 1:
    dist.destroy_process_group()
