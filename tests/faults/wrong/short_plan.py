"""Two micro-batches a step, and a rate that falls to 0 over all steps.

--fault: it is planned for the steps of one epoch, so it is 0 from then on. NovaSky-AI/SkyRL #872.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 3
torch.manual_seed(1)
x = torch.randn(320, 7)
loader = DataLoader(TensorDataset(x, x[:, :1].sin()), 16, shuffle=True)
model = nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
steps = len(loader) // 2 * (1 if "--fault" in sys.argv else EPOCHS)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
for _ in range(EPOCHS):
    for number, (inputs, targets) in enumerate(loader):
        (nn.functional.mse_loss(model(inputs), targets) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
