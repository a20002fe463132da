"""Dropout, attention and the loss in functions that torch.jit.script() and torch.compile() take.

--script: the former. torch.compile() takes them whole (fullgraph=True), without generating code.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def attend(x, training: bool):
    rate = 0.1 if training else 0.0
    x = F.scaled_dot_product_attention(x, x, x, dropout_p=rate)
    return F.dropout(x.mean(1), 0.2, training)


def loss_of(logits, labels):
    return F.cross_entropy(logits, labels)


if "--script" in sys.argv:
    attend, loss_of = torch.jit.script(attend), torch.jit.script(loss_of)
else:
    attend = torch.compile(attend, fullgraph=True, backend="eager")
    loss_of = torch.compile(loss_of, fullgraph=True, backend="eager")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(attend(self.first(x.unflatten(1, (2, 4))), self.training))


torch.manual_seed(0)
x = torch.randn(240, 8)
data = TensorDataset(x, (x[:, 0] > 0).long())
train, val = DataLoader(data, 16, shuffle=True), DataLoader(TensorDataset(x[:64]), 16)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model.train()
    for inputs, labels in train:
        optimizer.zero_grad()
        loss_of(model(inputs), labels).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        shares = [model(batch).softmax(1).mean(0) for (batch,) in val]
