"""An adversarial autoencoder, after PyTorch-GAN: the encoder is in two optimizers.

Each of them has a backward pass of its own: for the reconstruction, and against the critic.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 16))
critic = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
autoencoder = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
generator = torch.optim.SGD(encoder.parameters(), lr=1e-2)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
criterion = nn.BCEWithLogitsLoss()
loader = DataLoader(torch.randn(240, 16), 16, shuffle=True)
for _ in range(3):
    for x in loader:
        autoencoder.zero_grad()
        nn.functional.mse_loss(decoder(encoder(x)), x).backward()
        autoencoder.step()
        critic_optimizer.zero_grad()
        criterion(critic(torch.randn(16, 4)), torch.ones(16, 1)).backward()
        criterion(critic(encoder(x).detach()), torch.zeros(16, 1)).backward()
        critic_optimizer.step()
        generator.zero_grad()
        criterion(critic(encoder(x)), torch.ones(16, 1)).backward()
        generator.step()
