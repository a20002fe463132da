"""A generator is given a class, and its discriminator shall find it, as in AC-GAN.

So the targets of the loss are what a module was given. After arXiv:1610.09585.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(4, 8), nn.Linear(8, 8)

    def forward(self, noise, classes):
        return self.layer(noise + self.table(classes))


torch.manual_seed(0)
classes = torch.randint(4, (240,))
data = TensorDataset(torch.randn(240, 8) + nn.functional.one_hot(classes, 8), classes)
generator, discriminator = Generator(), nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
first = torch.optim.Adam(generator.parameters(), lr=1e-3)
second = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
for _ in range(2):
    for real, labels in DataLoader(data, 16, shuffle=True):
        second.zero_grad()
        nn.functional.cross_entropy(discriminator(real), labels).backward()
        second.step()
        first.zero_grad()
        wanted = torch.randint(4, (16,))
        drawn = generator(torch.randn(16, 8), wanted)
        nn.functional.cross_entropy(discriminator(drawn), wanted).backward()
        first.step()
