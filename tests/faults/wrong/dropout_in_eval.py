"""F.dropout(x, training=self.training). --fault: without it, it drops in eval(), too.

There is no Dropout layer. PyTorch's documentation of torch.nn.functional.dropout warns of it.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(8, 32), nn.Linear(32, 2)

    def forward(self, x):
        drops = self.training or "--fault" in sys.argv
        return self.out(F.dropout(F.relu(self.hidden(x)), 0.5, training=drops))


torch.manual_seed(0)
x = torch.randn(640, 8)
data = TensorDataset(x, (x[:, 0] > 0).long())
train, val = DataLoader(data, 32, shuffle=True), DataLoader(data, 64)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = 0
for _ in range(2):
    for inputs, labels in train:
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        step += 1
        if step % 7 == 0:
            model.eval()
            with torch.no_grad():
                print(sum(F.cross_entropy(model(a), b).item() for a, b in val) / len(val))
