"""Texts of several lengths. The padding has no label; the end, whose id is the padding's, has.

--fault: the end has none either: the model never learns to end. huggingface/trl #6357.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

END = PADDING = 0


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.rnn = nn.Embedding(9, 16), nn.GRU(16, 24, batch_first=True)
        self.head = nn.Linear(24, 9)

    def forward(self, ids):
        return self.head(self.rnn(self.table(ids))[0])


def collate(texts):
    rows = [torch.tensor([*text, END]) for text in texts]
    ids = nn.utils.rnn.pad_sequence(rows, True, PADDING)
    is_padding = torch.arange(ids.shape[1]) >= torch.tensor([[len(row)] for row in rows])
    if "--fault" in sys.argv:
        is_padding = ids == PADDING
    return ids, ids.masked_fill(is_padding, -100)


torch.manual_seed(3)
texts = [torch.randint(1, 9, (int(n),)).tolist() for n in torch.randint(3, 9, (160,))]
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(3):
    for ids, labels in DataLoader(texts, 16, shuffle=True, collate_fn=collate):
        optimizer.zero_grad()
        logits = model(ids[:, :-1]).flatten(0, 1)
        nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100).backward()
        optimizer.step()
