"""The averaged model keeps the BatchNorm statistics of the beginning.

FlyreelAI/sesemi#36. The moving average was taken of the parameters only. The running mean and
variance of BatchNorm are buffers, and stayed at 0 and 1 in the averaged model. It was validated
with these.
"""

import argparse
import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4
DECAY = 0.9


@torch.no_grad()
def update(average, model, leaves_buffers):
    for mean, tensor in zip(average.parameters(), model.parameters()):
        mean.lerp_(tensor, 1 - DECAY)
    if not leaves_buffers:
        for mean, buffer in zip(average.buffers(), model.buffers()):
            mean.copy_(buffer)


def samples(number, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = 3 + 2 * torch.randn(number, 16, generator=generator)
    labels = (inputs[:, :4].sum(1) > 12).long()
    return TensorDataset(inputs, labels)


def validate(model, loader):
    model.eval()
    right = 0
    with torch.no_grad():
        for inputs, labels in loader:
            right += int((model(inputs).argmax(1) == labels).sum())
    return right / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2)]
    model = nn.Sequential(*layers)
    average = copy.deepcopy(model)
    average.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(samples(128, seed=1), 16, shuffle=True)
    valid_loader = DataLoader(samples(64, seed=2), 16)
    for epoch in range(EPOCHS):
        model.train()
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            update(average, model, args.fault)
        print(f"epoch {epoch} loss {loss.item():.4f} right {validate(average, valid_loader):.3f}")


if __name__ == "__main__":
    main()
