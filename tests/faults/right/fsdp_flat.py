"""FSDP1, after PyTorch's tutorial "Getting Started with Fully Sharded Data Parallel".

Each rank holds other parts of one flat weight. With --use_orig_params some parts are empty.
"""

import functools
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.hidden = nn.Linear(4 * 13 * 13, 32)
        self.out = nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2).flatten(1)
        return F.log_softmax(self.out(F.relu(self.hidden(x))), 1)


dist.init_process_group("gloo")
torch.manual_seed(1)
x = torch.randn(384, 1, 28, 28)
data = TensorDataset(x, x.flatten(1)[:, :10].argmax(1))
sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler)
model = FullyShardedDataParallel(
    Net(),
    auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=1000),
    use_orig_params="--use_orig_params" in sys.argv,
    device_id=torch.device("cpu"),
)
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
for epoch in range(3):
    sampler.set_epoch(epoch)
    sums = torch.zeros(2)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels, reduction="sum")
        loss.backward()
        optimizer.step()
        sums += torch.tensor([loss.item(), len(images)])
    dist.all_reduce(sums)
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {sums[0] / sums[1]:.4f}", flush=True)
    schedule.step()
dist.destroy_process_group()
