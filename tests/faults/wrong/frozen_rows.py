"""Only the last two rows of an embedding learn: the gradient of the others is set to 0.

--fault: AdamW's weight decay moves them nevertheless. extropic-ai/sparse-transformers #3.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(8)
ids = torch.randint(22, (160, 5))
loader = DataLoader(TensorDataset(ids, (ids == 20).sum(1)), 16, shuffle=True)
model = nn.Sequential(nn.EmbeddingBag(22, 16), nn.ReLU(), nn.Linear(16, 6))
table = model[0].weight
table.register_hook(lambda gradient: torch.cat((torch.zeros(20, 16), gradient[20:])))
decay = 0.1 if "--fault" in sys.argv else 0.0
groups = [{"params": table, "weight_decay": decay}, {"params": model[2].parameters()}]
optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
for _ in range(3):
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
