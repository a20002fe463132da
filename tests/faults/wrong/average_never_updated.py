"""An average of the weights (torch.optim.swa_utils) is validated. --fault: it is never updated."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(240, 8)
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 16, shuffle=True)

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
average = torch.optim.swa_utils.AveragedModel(
    model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
val = DataLoader(TensorDataset(x[:64]), 16)
for _ in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        if "--fault" not in sys.argv:
            average.update_parameters(model)
    average.eval()
    with torch.no_grad():
        shares = [average(batch).softmax(1).mean(0) for (batch,) in val]
