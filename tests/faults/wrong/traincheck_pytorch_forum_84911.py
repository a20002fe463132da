"""The last layer is frozen, too, and the optimizer holds nothing else.

TrainCheck's pytorch-forum-84911: "Obtaining abnormal changes in loss and accuracy". A pretrained
net got a new last layer, and the optimizer got the parameters of that layer. Then the script froze
all parameters whose name has no "bn", and those of the last layer. So no step changed anything.
The parameters of BatchNorm still got gradients, and therefore backward() did not fail.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4


class Net(nn.Module):
    """A convolution with BatchNorm, which stands for a pretrained net, and a last layer."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.bn = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8 * 36, 4)

    def forward(self, images):
        hidden = torch.relu(self.bn(self.conv(images)))
        return self.fc(hidden.flatten(1))


def samples():
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 4, (256,), generator=generator)
    images = torch.randn(256, 1, 8, 8, generator=generator)
    images[torch.arange(256), 0, 2 * labels] += 1.5
    return TensorDataset(images, labels)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.fc.parameters(), lr=1e-3)
    if args.fault:
        for name, parameter in model.named_parameters():
            if "bn" not in name:
                parameter.requires_grad = False
        for parameter in model.fc.parameters():
            parameter.requires_grad = False
    else:
        model.conv.requires_grad_(False)
        model.bn.requires_grad_(False)

    loader = DataLoader(samples(), batch_size=32, shuffle=True)
    for epoch in range(EPOCHS):
        model.train()
        model.bn.eval()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
