"""A variational autoencoder with an optimizer for each weight, as Pyro's PyroOptim makes them."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
encoder, decoder = nn.Linear(16, 8), nn.Linear(4, 16)
model = nn.ModuleList([encoder, decoder])
optimizers = [torch.optim.Adam([weight], lr=1e-2) for weight in model.parameters()]
data = (torch.rand(400, 16) < 0.3).float()
train, val = TensorDataset(data[:320]), TensorDataset(data[320:])


def loss_of(x):
    mean, deviation = encoder(x).chunk(2, 1)
    hidden = mean + torch.randn_like(mean) * deviation.exp()
    loss = nn.functional.binary_cross_entropy_with_logits(decoder(hidden), x, reduction="sum")
    return loss + (mean.square() + (2 * deviation).exp() - 2 * deviation - 1).sum() / 2


for epoch in range(4):
    model.train()
    for (x,) in DataLoader(train, 32, shuffle=True):
        loss_of(x).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        losses = [loss_of(x) for (x,) in DataLoader(val, 40)]
    print(f"epoch {epoch}: {sum(losses) / len(val):.4f}", flush=True)
