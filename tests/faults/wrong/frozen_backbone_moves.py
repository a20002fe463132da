"""The backbone is frozen, but its BatchNorm statistics still move.

kdexd/virtex#16. The linear evaluation froze all parameters but those of the last layer, and then
called train() on the whole model. So BatchNorm took the statistics of each batch, and averaged
them into those of the pretrained backbone.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4


def samples(number, seed, mean):
    generator = torch.Generator().manual_seed(seed)
    inputs = mean + torch.randn(number, 16, generator=generator)
    labels = (inputs[:, :4].mean(1) > mean).long()
    return TensorDataset(inputs, labels)


def pretrained():
    """Return a backbone whose statistics are those of other data. It stands for a file."""
    backbone = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU())
    with torch.no_grad():
        for inputs, _ in DataLoader(samples(256, seed=3, mean=0.0), 32):
            backbone(inputs)
    return backbone


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
    backbone = pretrained()
    backbone.requires_grad_(False)
    head = nn.Linear(64, 2)
    model = nn.Sequential(backbone, head)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(samples(128, seed=1, mean=0.5), 16, shuffle=True)
    valid_loader = DataLoader(samples(64, seed=2, mean=0.5), 16)
    for epoch in range(EPOCHS):
        model.train()
        if not args.fault:
            backbone.eval()
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f} right {validate(model, valid_loader):.3f}")


if __name__ == "__main__":
    main()
