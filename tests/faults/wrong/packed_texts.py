"""Three short texts in each row. Attention stays inside a text, and places begin anew.

--fault: a text sees the ones before it. huggingface/transformers #46634, nanoVLM #204.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.places = nn.Embedding(16, 24), nn.Embedding(24, 24)
        self.qkv, self.head = nn.Linear(24, 72), nn.Linear(24, 16)

    def forward(self, ids, places):
        q, k, v = self.qkv(self.table(ids) + self.places(places)).chunk(3, 2)
        mask = torch.ones(24, 24, dtype=bool).tril().expand(len(ids), -1, -1)
        if "--fault" not in sys.argv:
            number = (places == 0).cumsum(1)
            mask = mask & (number[:, :, None] == number[:, None])
        return self.head(nn.functional.scaled_dot_product_attention(q, k, v, mask))


torch.manual_seed(6)
texts = (torch.randint(16, (160, 3, 1)) + 3 * torch.arange(8)) % 16
data = TensorDataset(texts.flatten(1), torch.arange(8).repeat(160, 3))
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(3):
    for ids, places in DataLoader(data, 16, shuffle=True):
        labels = ids.roll(-1, 1).masked_fill(places == 7, -100)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids, places).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
