"""The validation counts the samples twice that pad the shares of the processes.

roboflow/rf-detr#1507. DistributedSampler repeats the first samples where the number of samples is
not divisible by the number of processes. The metric put the predictions of all processes together,
and kept the repeated ones. So 21 images were validated as 22.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 4


def samples(number, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(number, 16, generator=generator)
    labels = (images[:, :4].sum(1) > 0).long()
    return TensorDataset(torch.arange(number), images, labels)


def validate(model, loader, counts_twice):
    """Return the share of the images of all processes whose prediction is right."""
    model.eval()
    mine = []
    with torch.no_grad():
        for numbers, images, labels in loader:
            right = model(images).argmax(1) == labels
            mine += zip(numbers.tolist(), right.tolist())
    model.train()
    shares = [None] * dist.get_world_size()
    dist.all_gather_object(shares, mine)
    results = [pair for share in shares for pair in share]
    if not counts_twice:
        results = list(dict(results).items())
    return sum(right for _, right in results) / len(results)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
    model = DistributedDataParallel(net)
    training = samples(192, seed=1)
    validation = samples(21, seed=2)
    sampler = DistributedSampler(training)
    loader = DataLoader(training, 16, sampler=sampler)
    valid_loader = DataLoader(validation, 4, sampler=DistributedSampler(validation, shuffle=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for _, images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        right = validate(net, valid_loader, args.fault)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} right {right:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
