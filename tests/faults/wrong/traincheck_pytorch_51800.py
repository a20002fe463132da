"""A model with spectral_norm is validated before its first forward in training mode.

TrainCheck's pytorch-51800, pytorch/pytorch#51800. nn.utils.spectral_norm divides a weight by its
largest singular value, which it learns by one step of an iteration at each forward in training
mode. Before the first such forward, eval() divides by a random number. So a validation at the
start shows another model than the one that is trained.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4


def samples(number, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (number,), generator=generator)
    images = 0.5 * torch.randn(number, 1, 8, 8, generator=generator)
    images[torch.arange(number), 0, 2 * labels] += 1.0
    return TensorDataset(images, labels)


def net():
    convolution = nn.utils.spectral_norm(nn.Conv2d(1, 8, 3, padding=1))
    hidden = nn.utils.spectral_norm(nn.Linear(128, 32))
    last = nn.utils.spectral_norm(nn.Linear(32, 4))
    layers = [convolution, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), hidden, nn.ReLU(), last]
    return nn.Sequential(*layers)


def validate(model, loader):
    model.eval()
    loss = 0.0
    with torch.no_grad():
        for images, labels in loader:
            loss += nn.functional.cross_entropy(model(images), labels, reduction="sum").item()
    print(f"valid {loss / len(loader.dataset):.4f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(samples(256, seed=1), 32, shuffle=True)
    valid_loader = DataLoader(samples(64, seed=2), 32)
    if not args.fault:
        model.train()
        with torch.no_grad():
            model(torch.rand(1, 1, 8, 8))
    validate(model, valid_loader)
    for epoch in range(EPOCHS):
        model.train()
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")
        validate(model, valid_loader)


if __name__ == "__main__":
    main()
