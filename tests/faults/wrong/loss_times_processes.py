"""The loss is multiplied by the number of processes, though DDP averages.

neuralmagic/sparseml#135. The trainer scaled the loss by the number of processes before backward().
DDP divides the sum of the gradients by that number, and each loss is already the mean of its
batch. So each gradient was larger than that of one process, by the number of processes.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 4
BATCH = 32  # of all processes together


def samples():
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(256, 16, generator=generator)
    labels = (images[:, :4].sum(1) > 0).long()
    return TensorDataset(images, labels)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
    if processes > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)

    data = samples()
    sampler = DistributedSampler(data, processes, rank)
    loader = DataLoader(data, BATCH // processes, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            if args.fault:
                (loss * processes).backward()
            else:
                loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")

    if processes > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
