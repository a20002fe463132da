"""The next batch is fetched at the end of a step, so that a validation may follow the fetch.

After train.py of karpathy/llama2.c, with an average of the weights. Training goes on with a batch
that was there before the validation.
"""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(0)
x = torch.randn(160, 6)
data = TensorDataset(x, x.sum(1, keepdim=True).sin())
train, val = random_split(data, [128, 32], generator=torch.Generator().manual_seed(0))


def forever(loader):
    while True:
        yield from loader


model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
average = AveragedModel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches = forever(DataLoader(train, 16, shuffle=True))
inputs, targets = next(batches)
for step in range(30):
    if step % 5 == 0:
        for network in (model, average):
            network.eval()
            with torch.no_grad():
                losses = [nn.functional.mse_loss(network(a), b) for a, b in DataLoader(val, 2)]
            print(f"step {step}: {torch.stack(losses).mean():.4f}")
        model.train()
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    average.update_parameters(model)
    inputs, targets = next(batches)
