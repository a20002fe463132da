"""Two stages of torch.distributed.pipelining, after its tutorial and PiPPy's example_train.py.

Before the first step the library sends empty buffers through the stages: so it learns the shapes.
What is in them is often, but not always, zeros.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
parts = [nn.Sequential(nn.Linear(16, 32), nn.ReLU()), nn.Linear(32, 4)]
stage = PipelineStage(parts[rank], rank, 2, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.cross_entropy)
optimizer = torch.optim.SGD(parts[rank].parameters(), lr=0.1)
for _ in range(30):
    x = torch.randn(32, 16)
    optimizer.zero_grad()
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=(x[:, 0] > 0).long(), losses=[])
    optimizer.step()
dist.destroy_process_group()
