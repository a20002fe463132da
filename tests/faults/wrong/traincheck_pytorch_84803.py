"""A copy from one device to the other arrives as zeros, now and then.

TrainCheck's pytorch-84803, pytorch/pytorch#84803. Between two GPUs whose direct connection did not
work, Tensor.to() gave zeros in place of the data. A model that is divided over two devices trains
on with them. TrainCheck rebuilds it by a `to` that loses some transfers, and so does this program.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4


class Link:
    """The way from the first device to the second. With a fault, each seventh copy is lost."""

    def __init__(self, fault):
        self.fault = fault
        self.copies = 0

    def copy(self, tensor):
        self.copies += 1
        if self.fault and self.copies % 7 == 0:
            lost = torch.zeros_like(tensor)
            return tensor + (lost - tensor).detach()
        return tensor.clone()


class Divided(nn.Module):
    """A model whose first half is on one device, and whose second half on another."""

    def __init__(self, link):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32))
        self.second = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
        self.link = link

    def forward(self, inputs):
        return self.second(self.link.copy(self.first(inputs)))


def samples():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(256, 16, generator=generator)
    labels = (inputs[:, :4].sum(1) > 0).long()
    return TensorDataset(inputs, labels)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = Divided(Link(args.fault))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(samples(), 32, shuffle=True)
    for epoch in range(EPOCHS):
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
