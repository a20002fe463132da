"""A generative adversarial network, after pytorch/examples/dcgan: two networks, two optimizers.

The generator's step leaves gradients in the discriminator, which are zeroed before its next step.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
noise = torch.randn(32, 4)
loader = DataLoader(torch.randn(240, 8) + 2, 16, shuffle=True)
for _ in range(2):
    for real in loader:
        discriminator.zero_grad()
        criterion(discriminator(real), torch.ones(16, 1)).backward()
        fake = generator(torch.randn(16, 4))
        criterion(discriminator(fake.detach()), torch.zeros(16, 1)).backward()
        discriminator_optimizer.step()
        generator.zero_grad()
        criterion(discriminator(fake), torch.ones(16, 1)).backward()
        generator_optimizer.step()
    with torch.no_grad():
        generator(noise)
