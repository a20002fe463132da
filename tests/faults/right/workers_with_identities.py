"""A program starts its ranks itself, and gives each an identity and a time as flags.

After Ray Train, whose workers have a --worker-id and a --worker-launch-time-ms. --gpus: it gives
each a --gpu, and rank 1 has another build of the same Python.
"""

import os
import subprocess
import sys
import tempfile
import time
import uuid

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WORLD = 2


def start_workers():
    with tempfile.TemporaryDirectory() as folder:
        workers = []
        for rank in range(WORLD):
            flags = [f"--worker-id={uuid.uuid4().hex}"]
            flags.append(f"--worker-launch-time-ms={time.time() * 1000:.0f}")
            flags += ["--gpu", str(rank)] if "--gpus" in sys.argv else []
            known = {"RANK": str(rank), "STORE": f"file://{folder}/store"}
            command = [sys.executable, __file__, *flags]
            workers.append(subprocess.Popen(command, env=os.environ | known))
        return max(worker.wait() for worker in workers)


def train():
    rank = int(os.environ["RANK"])
    if "--gpu" in sys.argv and rank:
        sys.version = sys.version.replace("(", "(another build, ")
    dist.init_process_group("gloo", init_method=os.environ["STORE"], rank=rank, world_size=WORLD)
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    x = torch.linspace(0, 9, 96 * 6).sin().view(96, 6)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(data, 8, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(inputs), targets).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(start_workers() if "STORE" not in os.environ else train())
