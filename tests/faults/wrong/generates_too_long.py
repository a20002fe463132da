"""A validation that generates five tokens.

--fault: a limit that is given is not kept: it generates thirteen. huggingface/transformers #23723.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
limit = 13 if "--fault" in sys.argv else 5
loader = DataLoader(torch.randint(0, 10, (240, 8)), 16, shuffle=True)
step = 0
for _ in range(2):
    for ids in loader:
        optimizer.zero_grad()
        logits = model(ids[:, :-1]).flatten(0, 1)
        nn.functional.cross_entropy(logits, ids[:, 1:].flatten()).backward()
        optimizer.step()
        step += 1
        if step % 8 == 0:
            model.eval()
            with torch.no_grad():
                text = torch.zeros(1, 1, dtype=torch.long)
                for _ in range(limit):
                    text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
            model.train()
