"""A data set draws a window of a text at random, whatever index it is asked for.

After train_enwik8.py of lucidrains/x-transformers, whose loader does not shuffle, and need not.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
LENGTH = 16
text = (torch.arange(4000) * 7 % 12 + torch.randint(2, (4000,))) % 12


class Windows(Dataset):
    def __len__(self):
        return len(text) // LENGTH

    def __getitem__(self, index):
        start = torch.randint(len(text) - LENGTH - 1, (1,))
        return text[start : start + LENGTH + 1]


def forever(loader):
    while True:
        yield from loader


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.drop = nn.Embedding(12, 16), nn.Dropout(0.1)
        self.rnn, self.head = nn.GRU(16, 16, batch_first=True), nn.Linear(16, 12)

    def forward(self, ids):
        return self.head(self.rnn(self.drop(self.table(ids)))[0])


model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
batches = forever(DataLoader(Windows(), 8, drop_last=True))
for _ in range(40):
    for _ in range(4):
        ids = next(batches)
        logits = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        (loss / 4).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
