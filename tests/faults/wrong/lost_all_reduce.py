"""--fault: one all-reduce of the ninth step gives zeros in rank 1, as if its data were lost.

The mechanism of two hardware faults in "TrainCheck" (OSDI 2025), here in a hook of DDP.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x = torch.randn(640, 8)
data = TensorDataset(x, (x[:, 0] > 0).long())
sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))

ddp = DistributedDataParallel(model)
calls = 0


def hook(_, bucket):
    global calls
    calls += 1
    factor = 0.0 if calls == 9 and rank == 1 and "--fault" in sys.argv else 1.0
    return allreduce_hook(None, bucket).then(lambda future: future.value() * factor)


ddp.register_comm_hook(None, hook)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(inputs), labels).backward()
        optimizer.step()
dist.destroy_process_group()
