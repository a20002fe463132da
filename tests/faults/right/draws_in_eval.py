"""A variational autoencoder, which is validated in eval() with one draw for each sample.

Its forward draws, as it shall. After pytorch/examples/vae.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(16, 8), nn.Linear(4, 16)

    def forward(self, x):
        mean, deviation = self.encoder(x).chunk(2, 1)
        hidden = mean + torch.randn_like(mean) * deviation.exp()
        return self.decoder(hidden), mean, deviation


def loss_of(result, x):
    output, mean, deviation = result
    loss = nn.functional.binary_cross_entropy_with_logits(output, x, reduction="sum")
    return loss + (mean.square() + (2 * deviation).exp() - 2 * deviation - 1).sum() / 2


torch.manual_seed(0)
data = (torch.rand(400, 16) < 0.3).float()
train, val = TensorDataset(data[:320]), TensorDataset(data[320:])
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(4):
    model.train()
    for (x,) in DataLoader(train, 32, shuffle=True):
        optimizer.zero_grad()
        loss_of(model(x), x).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        print(sum(loss_of(model(x), x).item() for (x,) in DataLoader(val, 40)) / len(val))
