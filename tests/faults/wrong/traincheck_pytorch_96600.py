"""One process receives zeros in place of the averaged gradients, now and then.

TrainCheck's pytorch-96600, pytorch/pytorch#96600. Data parallel training on several cards of a
kind whose direct connection did not work lost data that was sent between them. TrainCheck rebuilds
it by collectives whose result is zeroed at some calls, and so does this program.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 6


def samples():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(256, 16, generator=generator)
    labels = (inputs[:, :4].sum(1) > 0).long()
    return TensorDataset(inputs, labels)


def average_gradients(model, loses):
    """Average the gradients of all processes. Where the link loses them, zeros arrive."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
        if loses:
            parameter.grad.zero_()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = samples()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler)
    is_bad_card = args.fault and dist.get_rank() == 1
    step = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            step += 1
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model, is_bad_card and step % 7 == 0)
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
