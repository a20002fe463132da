"""A training that diverges: its loss is nan from step 18 on. It is saved and loaded rightly.

That it diverges is true. That it was resumed wrongly is not: nan is not equal to nan.
"""

import os
import sys

import torch
from torch import nn

SNAPSHOT = sys.argv[1]
torch.manual_seed(5)
x = torch.randn(96, 16, 6)
model = nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
done = 0
if os.path.exists(SNAPSHOT):
    saved = torch.load(SNAPSHOT)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    done = saved["done"]
while done < 60:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x[done]), x[done].sum(1, keepdim=True))
    if done == 17:
        loss = loss * float("nan")
    loss.backward()
    optimizer.step()
    done += 1
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": done}
    torch.save(saved, SNAPSHOT + ".new")
    os.replace(SNAPSHOT + ".new", SNAPSHOT)
