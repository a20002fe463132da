"""Goes on in the middle of an epoch, in that epoch's order.

--fault: a new sampler has the order of epoch 0. modelscope/ms-swift #10050, accelerate #4071.
"""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SNAPSHOT = sys.argv[1]
torch.manual_seed(8)
x = torch.randn(96, 5)
data = TensorDataset(x, (x.sum(1) > 0).long())
model = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
epoch, skipped = 0, 0
if os.path.exists(SNAPSHOT):
    saved = torch.load(SNAPSHOT)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    epoch, skipped = saved["place"]
while epoch < 8:
    sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=1)
    if not (skipped and "--fault" in sys.argv):
        sampler.set_epoch(epoch)
    for number, (inputs, labels) in enumerate(DataLoader(data, 16, sampler=sampler)):
        if number < skipped:
            continue
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        place = (epoch, number + 1) if number < 5 else (epoch + 1, 0)
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "place": place}
        torch.save(saved, SNAPSHOT + ".new")
        os.replace(SNAPSHOT + ".new", SNAPSHOT)
    epoch, skipped = epoch + 1, 0
