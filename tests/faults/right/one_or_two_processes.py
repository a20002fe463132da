"""One global batch of 16, in one process or in two, after PyTorch's DDP tutorial.

--bf16: with autocast, whose sums round by up to 1%. --loss_module: the loss is an nn.Module.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
if world > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
x = torch.randn(640, 64, generator=torch.Generator().manual_seed(1))
y = x[:, :4].argmax(1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
criterion = nn.functional.cross_entropy
if "--loss_module" in sys.argv:
    criterion = nn.CrossEntropyLoss()
for start in range(0, 640, 16):
    mine = torch.arange(start, start + 16)[rank::world]
    with torch.autocast("cpu", torch.bfloat16, enabled="--bf16" in sys.argv):
        loss = criterion(model(x[mine]), y[mine])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if world > 1:
    dist.destroy_process_group()
