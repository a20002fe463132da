"""The discriminator steps with gradients that the generator's loss has left in it.

Lightning-AI/pytorch-lightning#591. For each optimizer in turn, the trainer called backward(),
step() and zero_grad(). The generator's loss leaves gradients in the discriminator, too. The
generator's optimizer zeroes only the generator's. The discriminator's own gradients are then added
to them.
The mend zeroes the gradients of an optimizer before backward().
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 8), nn.Tanh())
        self.discriminator = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
        self.criterion = nn.BCEWithLogitsLoss()

    def optimizers(self):
        settings = {"lr": 2e-4, "betas": (0.5, 0.999)}
        return (
            torch.optim.Adam(self.generator.parameters(), **settings),
            torch.optim.Adam(self.discriminator.parameters(), **settings),
        )

    def loss(self, images, number):
        """Return the loss of the generator (number 0) or of the discriminator (1)."""
        noise = torch.randn(len(images), 6)
        real, fake = torch.ones(len(images), 1), torch.zeros(len(images), 1)
        if number == 0:
            return self.criterion(self.discriminator(self.generator(noise)), real)
        of_real = self.criterion(self.discriminator(images), real)
        of_fake = self.criterion(self.discriminator(self.generator(noise).detach()), fake)
        return (of_real + of_fake) / 2


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    images = torch.tanh(torch.randn(320, 8) + torch.arange(8) / 4)
    loader = DataLoader(TensorDataset(images), 16, shuffle=True)
    gan = Gan()
    optimizers = gan.optimizers()
    for epoch in range(2):
        for (batch,) in loader:
            for number, optimizer in enumerate(optimizers):
                loss = gan.loss(batch, number)
                if not args.fault:
                    optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if args.fault:
                    optimizer.zero_grad()
        print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
