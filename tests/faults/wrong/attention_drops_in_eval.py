"""Attention whose dropout is 0 in eval(). --fault: it drops there, too.

huggingface/transformers #33844, of scaled_dot_product_attention. --dropout_layer: the model has a
Dropout layer as well.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 2)
        self.dropout = nn.Dropout(0.1) if "--dropout_layer" in sys.argv else nn.Identity()

    def forward(self, x):
        q, k, v = self.qkv(x[:, None].expand(-1, 4, -1)).chunk(3, -1)
        rate = 0.1 if self.training or "--fault" in sys.argv else 0.0
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=rate)
        return self.out(self.dropout(x.mean(1)))


torch.manual_seed(0)
x = torch.randn(240, 8)
data = TensorDataset(x, (x[:, 0] > 0).long())
train = DataLoader(data, 16, shuffle=True)
val = DataLoader(TensorDataset(x[:64]), 16)
model = Attention()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = 0
for _ in range(2):
    for inputs, labels in train:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        step += 1
        if step % 8 == 0:
            model.eval()
            with torch.no_grad():
                shares = [model(batch).softmax(1).mean(0) for (batch,) in val]
            model.train()
