"""optimizer.zero_grad() is missing, so each gradient is the sum of all before.

TrainCheck's stackoverflow-60335387: "PyTorch MNIST example not converge". The loop of a beginner
called backward() and step() for each batch, and never zero_grad(). With a small learning rate,
the loss still falls.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4


def digits(number, seed):
    """Return images of ten kinds, which are told by the place of a bright spot."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (number,), generator=generator)
    images = 0.3 * torch.randn(number, 1, 10, 10, generator=generator)
    images[torch.arange(number), 0, labels] += 1.0
    return TensorDataset(images, labels)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(200, 10)]
    model = nn.Sequential(*layers)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(digits(256, seed=1), batch_size=32, shuffle=True)
    for epoch in range(EPOCHS):
        model.train()
        for data, label in loader:
            if not args.fault:
                optimizer.zero_grad()
            loss = criterion(model(data), label)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
