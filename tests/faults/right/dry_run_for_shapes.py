"""Each layer is appended to a network that has found its shape by a call on zeros.

After speechbrain's containers.Sequential, by which its recipes build a model.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(0)
x = torch.randn(96, 1, 12)
data = TensorDataset(x, (x.mean((1, 2)) > 0).long())
train, val = random_split(data, [80, 16], generator=torch.Generator().manual_seed(0))


class Grown(nn.Module):
    """Layers that are added one after another."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.layers = shape, nn.ModuleList()

    def append(self, make):
        with torch.no_grad():
            shape = self(torch.zeros(self.shape)).shape
        self.layers.append(make(shape))

    def forward(self, values):
        for layer in self.layers:
            values = layer(values)
        return values


model = Grown((2, 1, 12))
model.append(lambda shape: nn.Conv1d(shape[1], 8, 3))
model.append(lambda shape: nn.BatchNorm1d(shape[1]))
model.append(lambda shape: nn.Dropout(0.15))
model.append(lambda shape: nn.LeakyReLU())
model.append(lambda shape: nn.Flatten())
model.append(lambda shape: nn.Linear(shape[1], 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
loader = DataLoader(train, 16, shuffle=True)
for epoch in range(6):
    model.train()
    for inputs, labels in loader:
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        right = [(model(inputs).argmax(1) == labels).sum() for inputs, labels in DataLoader(val, 8)]
    print(f"epoch {epoch}: {sum(right)} of {len(val)}")
