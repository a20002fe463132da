"""The rate starts at 0. Rank 0 validates alone, on all data, without DDP; the others wait.

After pytorch/examples and the documentation of LambdaLR. The last batch of an epoch is short.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
x = torch.randn(150, 7)
y = x[:, :1].cos()
train, val = TensorDataset(x[:120], y[:120]), TensorDataset(x[120:], y[120:])
model = nn.Sequential(
    nn.Linear(7, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1)
)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 5))
sampler = DistributedSampler(train)
loader = DataLoader(train, 16 // world, sampler=sampler)
torch.manual_seed(100 + rank)
for epoch in range(4):
    sampler.set_epoch(epoch)
    ddp.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(inputs), targets).backward()
        optimizer.step()
        schedule.step()
    if rank == 0:
        model.eval()
        with torch.no_grad():
            losses = [nn.functional.mse_loss(model(a), b) for a, b in DataLoader(val, 8)]
        print(f"epoch {epoch}: {torch.stack(losses).mean():.4f}", flush=True)
    dist.barrier()
dist.destroy_process_group()
