"""A moving average of the weights is validated, after the documentation of torch.optim.swa_utils.

A SequentialLR warms up from almost 0, then falls to 0 at the last step. Parts of the model are
frozen for the first steps, and then trained, as in gradual unfreezing.
"""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(320, 8)
train = TensorDataset(x[:240], (x[:240, 0] > 0).long())
loader, val = DataLoader(train, 16, shuffle=True), DataLoader(TensorDataset(x[240:]), 16)
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
model[0].requires_grad_(False)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
warm = torch.optim.lr_scheduler.LinearLR(optimizer, 1e-3, 1.0, 5)
fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, fall], [5])
for epoch in range(3):
    model.train()
    if epoch == 1:
        model[0].requires_grad_(True)
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels, label_smoothing=0.1).backward()
        optimizer.step()
        schedule.step()
        average.update_parameters(model)
    update_bn(loader, average)
    average.eval()
    with torch.no_grad():
        shares = [average(batch).softmax(1).mean(0) for (batch,) in val]
