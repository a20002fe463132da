"""The validation images are augmented at random, as those of training are.

udacity/deep-learning-v2-pytorch#132. The notebook made one data set with the random transforms of
training, and split it into training and validation afterwards. So the validation images were
rotated and flipped at random, too, and the score of the same weights was another at each time.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

EPOCHS = 4


class Pictures(Dataset):
    """Small pictures of two kinds, which may be shifted and flipped at random."""

    def __init__(self, augments):
        generator = torch.Generator().manual_seed(1)
        self.labels = torch.randint(0, 2, (128,), generator=generator)
        self.images = torch.randn(128, 1, 8, 8, generator=generator)
        self.images[self.labels == 1, :, 2:6, 2:6] += 1.0
        self.augments = augments

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if self.augments:
            shift = int(torch.randint(-2, 3, (1,)))
            image = torch.roll(image, shift, dims=2)
            if torch.rand(1) < 0.5:
                image = image.flip(2)
        return image, self.labels[index]


def validate(model, loader):
    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in loader:
            right += int((model(images).argmax(1) == labels).sum())
    return right / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    order = torch.randperm(128).tolist()
    training = Subset(Pictures(augments=True), order[:96])
    validation = Subset(Pictures(augments=args.fault), order[96:])
    train_loader = DataLoader(training, 16, shuffle=True)
    valid_loader = DataLoader(validation, 16)

    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(EPOCHS):
        model.train()
        for images, labels in train_loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f} right {validate(model, valid_loader):.3f}")


if __name__ == "__main__":
    main()
