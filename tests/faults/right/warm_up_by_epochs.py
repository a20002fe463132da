"""A warm-up by hand that sets the rate once in each epoch, beside a scheduler of epochs."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WARM_UP, RATE = 4, 0.05
torch.manual_seed(0)
x = torch.randn(96, 6)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), 8, shuffle=True)
to_validate = DataLoader(TensorDataset(x.roll(1, 1)), 16)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
for epoch in range(3):
    if epoch < WARM_UP:
        for group in optimizer.param_groups:
            group["lr"] = RATE * (epoch + 1) / (WARM_UP + 1)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    schedule.step()
    with torch.no_grad():
        print(sum(model(inputs).sum().item() for (inputs,) in to_validate))
