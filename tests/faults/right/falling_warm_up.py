"""A warm-up by hand, beside a scheduler of epochs: the rate of biases falls, all others rise.

After train.py of ultralytics/yolov5.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WARM_UP, EPOCHS = 30, 6
torch.manual_seed(0)
x = torch.randn(96, 6)
data = TensorDataset(x, x.sum(1, keepdim=True).sin())
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
biases = [weight for name, weight in model.named_parameters() if name.endswith("bias")]
others = [weight for name, weight in model.named_parameters() if not name.endswith("bias")]
optimizer = torch.optim.SGD(biases, lr=0.01, momentum=0.9, nesterov=True)
optimizer.add_param_group({"params": others, "weight_decay": 0.0005})


def decay(epoch):
    return 1 - 0.99 * epoch / EPOCHS


schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
loader = DataLoader(data, 16, shuffle=True)
for epoch in range(EPOCHS):
    for number, (inputs, targets) in enumerate(loader, len(loader) * epoch):
        for group, start in zip(optimizer.param_groups, (0.1, 0.0)):
            end = group["initial_lr"] * decay(epoch)
            group["lr"] = start + (end - start) * min(1, number / WARM_UP)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    schedule.step()
