"""Three micro-batches a step, the first two in no_sync(). --fault: by a number, all three are.

Gradients are never averaged. After nanoGPT's micro_step, counted from 0.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PARTS = 3
dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(480, 8)
data = TensorDataset(x, (x[:, 0] > 0).long())
sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
last = PARTS if "--fault" in sys.argv else PARTS - 1
for epoch in range(6):
    sampler.set_epoch(epoch)
    for number, (inputs, labels) in enumerate(loader):
        model.require_backward_grad_sync = number % PARTS == last
        (nn.functional.cross_entropy(model(inputs), labels) / PARTS).backward()
        if number % PARTS == PARTS - 1:
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
