"""Snapshots of one name, in a folder for each epoch and rank, saved by pathlib.Path.

A Path has a `.name`, as an open file has: its last part. No file is written twice.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(0)
model = nn.Linear(8, 2)
if world > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
generator = torch.Generator().manual_seed(rank)
for epoch in range(8):
    for _ in range(4):
        x = torch.randn(8, 8, generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
        optimizer.step()
    folder = Path(sys.argv[1]) / f"epoch{epoch}" / f"rank{rank}"
    folder.mkdir(parents=True)
    torch.save({"optimizer": optimizer.state_dict()}, folder / "state.pt")
if world > 1:
    dist.destroy_process_group()
