"""A small, correct training, into which faults.py puts one fault each. By torchrun, or alone."""

import argparse
import os
import random
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--processes", type=int, default=1, help="forked, if torchrun starts none")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--precision", default="fp32")
parser.add_argument("--folder", default=".", help="where the processes meet")
parser.add_argument("--snapshot", default="")
parser.add_argument("--weights", default="", help="a file for the weights after each step")
args = parser.parse_args()
# Another start method would run this script again in each worker.
torch.multiprocessing.set_start_method("fork", force=True)


class Images(Dataset):
    def __init__(self, size, seed, jitter):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(4, (size,), generator=generator)
        self.images = torch.rand(size, 1, 8, 8, generator=generator) + self.labels.view(-1, 1, 1, 1)
        self.jitter = jitter

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = self.images[i]
        if self.jitter:
            image = image + self.jitter * np.random.rand()
        return image.float(), self.labels[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8 * 36, 4)

    def forward(self, x):
        return self.head(self.drop(self.norm(self.conv(x)).relu().flatten(1)))


def seed_worker(worker):
    np.random.seed(torch.initial_seed() % 2**32)
    random.seed(torch.initial_seed())


if "RANK" not in os.environ:
    store = f"file://{os.path.abspath(args.folder)}/store{os.getpid()}"
    os.environ |= {"WORLD_SIZE": str(args.processes), "RANK": "0"}
    children = []
    for rank in range(args.processes):
        if args.processes > 1 and not (child := os.fork()):
            os.environ["RANK"] = str(rank)
            break
        children += [child] if args.processes > 1 else []
    else:
        if children:
            sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
    start = {"init_method": store, "rank": int(os.environ["RANK"]), "world_size": args.processes}
else:
    start = {}
dist.init_process_group("gloo", **start)
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = Net()
ddp = DistributedDataParallel(model)
torch.manual_seed(1 + rank)
np.random.seed(1 + rank)
train_data, val_data = Images(256, 0, 0.01), Images(50, 1, 0)
sampler = DistributedSampler(train_data, drop_last=True)
loader = DataLoader(
    train_data, 32 // world, sampler=sampler, num_workers=args.workers, worker_init_fn=seed_worker
)
val_loader = DataLoader(val_data, 16, sampler=range(rank, len(val_data), world))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
first_epoch = 0
if args.snapshot and os.path.exists(args.snapshot):
    state = torch.load(args.snapshot)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    first_epoch = state["epoch"]
for epoch in range(first_epoch, args.epochs):
    sampler.set_epoch(epoch)
    torch.manual_seed(1000 * epoch + rank)  # so that a resumed run draws the same numbers
    np.random.seed(1000 * epoch + rank)
    ddp.train()
    optimizer.zero_grad()
    for i, (x, y) in enumerate(loader):
        last = (i + 1) % args.accum == 0
        ddp.require_backward_grad_sync = last
        loss = cross_entropy(ddp(x), y) / args.accum
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if args.weights and rank == 0:
                with open(args.weights, "ab") as file:
                    file.write(b"".join(each.detach().numpy() for each in model.parameters()))
    ddp.eval()
    sums = torch.zeros(2)
    with torch.no_grad():
        for x, y in val_loader:
            sums += torch.tensor([(ddp(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(sums)
    if rank == 0:
        accuracy = sums[0] / sums[1]
        print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {accuracy:.3f}", flush=True)
        if args.snapshot:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"scheduler": scheduler.state_dict(), "epoch": epoch + 1}
            torch.save(state, args.snapshot + ".tmp")
            os.replace(args.snapshot + ".tmp", args.snapshot)
del ddp
dist.destroy_process_group()
