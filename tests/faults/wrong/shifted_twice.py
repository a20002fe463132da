"""A language model of characters. It shifts the labels itself, and is given the ids.

--fault: it is given shifted labels, and learns the token after next. transformers #44642.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.rnn = nn.Embedding(12, 16), nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, 12)

    def forward(self, ids, labels):
        logits = self.head(self.rnn(self.table(ids))[0])[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


torch.manual_seed(2)
text = (torch.randint(12, (160, 1)) + 5 * torch.arange(13)) % 12
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(3):
    for ids in DataLoader(text, 16, shuffle=True):
        labels = ids
        if "--fault" in sys.argv:
            ids, labels = ids[:, :-1], ids[:, 1:]
        optimizer.zero_grad()
        model(ids, labels).backward()
        optimizer.step()
