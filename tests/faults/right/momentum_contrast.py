"""Momentum contrast, after facebookresearch/moco: a slow copy of the encoder, a queue of keys."""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
rank, world = dist.get_rank(), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)


class MoCo(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", nn.functional.normalize(torch.randn(64, 4), dim=1))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, first, second):
        query = nn.functional.normalize(self.query(first), dim=1)
        with torch.no_grad():
            for slow, fast in zip(self.key.parameters(), self.query.parameters()):
                slow.mul_(0.99).add_(fast, alpha=0.01)
            key = nn.functional.normalize(self.key(second), dim=1)
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone().T], 1)
        with torch.no_grad():
            parts = [torch.zeros_like(key) for _ in range(world)]
            dist.all_gather(parts, key)
            start, count = int(self.place), world * len(key)
            self.queue[start : start + count] = torch.cat(parts)
            self.place[0] = (start + count) % 64
        return logits / 0.07


data = torch.randn(240, 8)
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler)
model = DistributedDataParallel(MoCo())
trained = [weight for weight in model.parameters() if weight.requires_grad]
optimizer = torch.optim.SGD(trained, lr=0.03, momentum=0.9, weight_decay=1e-4)
torch.manual_seed(100 + rank)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x in loader:
        logits = model(x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x))
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long)).backward()
        optimizer.step()
dist.destroy_process_group()
