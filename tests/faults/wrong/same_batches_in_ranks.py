"""Each rank draws batches from a generator of its own. --fault: all of one seed, without the rank.

All ranks get the same samples. After nanoGPT's get_batch() and its seed_offset.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x = torch.randn(640, 8)
y = (x[:, 0] > 0).long()
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(1337 + (0 if "--fault" in sys.argv else rank))
for _ in range(30):
    chosen = torch.randint(640, (16,), generator=generator)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
    optimizer.step()
dist.destroy_process_group()
