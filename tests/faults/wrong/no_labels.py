"""A question of twelve tokens, then its answer, which alone has labels; texts are cut to ten.

--fault: their end is cut off, and with it all labels: it trains on nothing. huggingface/trl #6025.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

KEPT = slice(0, 10) if "--fault" in sys.argv else slice(-10, None)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.rnn = nn.Embedding(12, 16), nn.GRU(16, 24, batch_first=True)
        self.head = nn.Linear(24, 12)

    def forward(self, ids):
        return self.head(self.rnn(self.table(ids))[0])


torch.manual_seed(3)
questions = torch.randint(12, (160, 12))
ids = torch.cat((questions, questions[:, -3:].flip(1)), 1)
labels = ids.clone()
labels[:, :12] = -100
loader = DataLoader(TensorDataset(ids[:, KEPT], labels[:, KEPT]), 16, shuffle=True)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        logits, targets = model(inputs)[:, :-1].flatten(0, 1), targets[:, 1:].flatten()
        losses = nn.functional.cross_entropy(logits, targets, reduction="sum")
        (losses / (targets != -100).sum().clamp(min=1)).backward()
        optimizer.step()
