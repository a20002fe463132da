"""The frozen stages of a backbone are frozen by train() only, and nobody calls it at the start.

TrainCheck's mmpretrain-702, open-mmlab/mmpretrain#702. A backbone with frozen_stages=1 froze its
first stage in its own train(). Its constructor did not. A new module is in training mode already,
so a script need not call train() before the first epoch. Then that epoch trains the frozen stage.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4


class Backbone(nn.Module):
    """Two stages, of which the first may be frozen."""

    def __init__(self, frozen_stages):
        super().__init__()
        self.frozen_stages = frozen_stages
        first = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        second = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.stages = nn.ModuleList([first, second])

    def freeze_stages(self):
        for stage in self.stages[: self.frozen_stages]:
            stage.eval()
            stage.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        if mode:
            self.freeze_stages()
        return self

    def forward(self, images):
        for stage in self.stages:
            images = stage(images)
        return images.flatten(1)


def samples(number, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (number,), generator=generator)
    images = torch.randn(number, 1, 8, 8, generator=generator)
    images[torch.arange(number), 0, 2 * labels] += 1.0
    return TensorDataset(images, labels)


def validate(model, loader):
    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in loader:
            right += int((model(images).argmax(1) == labels).sum())
    model.train()
    return right / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(Backbone(frozen_stages=1), nn.Linear(128, 4))
    if not args.fault:
        model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(samples(256, seed=1), 32, shuffle=True)
    valid_loader = DataLoader(samples(64, seed=2), 32)
    for epoch in range(EPOCHS):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f} right {validate(model, valid_loader):.3f}")


if __name__ == "__main__":
    main()
