"""A stream repeats its few samples for ever, in another order each time, without any worker."""

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

torch.manual_seed(0)
x = torch.randn(32, 6)


class Stream(IterableDataset):
    def __iter__(self):
        while True:
            for index in torch.randperm(len(x)):
                yield x[index], x[index].sum(0, keepdim=True).sin()


loader, to_validate = DataLoader(Stream(), 8), DataLoader(TensorDataset(x.roll(1, 1)), 16)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
for step, (inputs, targets) in zip(range(50), loader):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    schedule.step()
    if step % 5 == 4:
        model.eval()
        with torch.no_grad():
            print(sum(model(inputs).sum().item() for (inputs,) in to_validate))
        model.train()
