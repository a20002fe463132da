"""A variational autoencoder with an optimizer for each weight, as Pyro's PyroOptim makes them."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
encoder, decoder = nn.Linear(16, 8), nn.Linear(4, 16)
weights = [*encoder.parameters(), *decoder.parameters()]
optimizers = [torch.optim.Adam([weight], lr=1e-2) for weight in weights]
data = TensorDataset((torch.rand(320, 16) < 0.3).float())
for _ in range(2):
    for (x,) in DataLoader(data, 16, shuffle=True):
        mean, deviation = encoder(x).chunk(2, 1)
        hidden = mean + torch.randn_like(mean) * deviation.exp()
        loss = nn.functional.binary_cross_entropy_with_logits(decoder(hidden), x, reduction="sum")
        loss = loss + (mean.square() + (2 * deviation).exp() - 2 * deviation - 1).sum() / 2
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
