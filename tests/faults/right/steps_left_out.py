"""A step whose gradient is too large is left out, in all ranks, as in many recipes for speech.

Here more than half of the steps are. Their gradients are thrown away on purpose.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(1)
x = torch.randn(640, 7)
x[::9] *= 40
data = TensorDataset(x, x[:, :1] * 2)
model = nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 1))
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 20)
sampler = DistributedSampler(data)
loader = DataLoader(data, 8 // world, sampler=sampler)
left_out = 0
for inputs, targets in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    if nn.utils.clip_grad_norm_(model.parameters(), 10.0) > 60:
        left_out += 1
        continue
    optimizer.step()
    schedule.step()
print("left out:", left_out)
dist.destroy_process_group()
