"""Seven micro-batches an epoch, three for a step. The seventh makes a step of its own.

--fault: its gradients are thrown away. --leak --fault: they go into the next epoch's first step.
NVIDIA-NeMo/Automodel #2257, pytorch/torchtune #2745.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WINDOW = 3
torch.manual_seed(1)
x = torch.randn(112, 7)
loader = DataLoader(TensorDataset(x, x[:, :1] * x[:, 1:2]), 16, shuffle=True)
model = nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(12):
    if "--leak" not in sys.argv:
        optimizer.zero_grad()
    for number, (inputs, targets) in enumerate(loader, start=1):
        is_last = number == len(loader)
        is_whole = number <= len(loader) // WINDOW * WINDOW
        size = WINDOW if is_whole else len(loader) % WINDOW
        (nn.functional.mse_loss(model(inputs), targets) / size).backward()
        if number % WINDOW == 0 or is_last and "--fault" not in sys.argv:
            optimizer.step()
            optimizer.zero_grad()
