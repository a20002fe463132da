"""A language model of characters, after nanoGPT: y is x, shifted by one.

--fault: it is not shifted, so the model learns to repeat what it is given, and its loss goes to 0.
--inside: the model is given the targets, and computes its loss.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

LENGTH = 12
torch.manual_seed(2)
text = (torch.arange(300) * 5 + torch.randint(2, (300,))) % 12


class Windows(Dataset):
    def __len__(self):
        return 240

    def __getitem__(self, start):
        shift = 0 if "--fault" in sys.argv else 1
        inputs = text[start : start + LENGTH]
        return inputs, text[start + shift : start + shift + LENGTH]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.rnn = nn.Embedding(12, 16), nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, 12)

    def forward(self, ids, targets=None):
        logits = self.head(self.rnn(self.table(ids))[0])
        return logits if targets is None else loss_of(logits, targets)


def loss_of(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(3):
    for inputs, targets in DataLoader(Windows(), 16, shuffle=True):
        optimizer.zero_grad()
        is_inside = "--inside" in sys.argv
        loss = model(inputs, targets) if is_inside else loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
