"""Resumed with its weights, its optimizer and its step, after nanoGPT's init_from = "resume".

--fault: the optimizer is saved, but not loaded. --rate --fault: it is, but the rate is warmed up
from 0 again.
"""

import os
import sys

import torch
from torch import nn

SNAPSHOT, WARM_UP = sys.argv[1], 30
torch.manual_seed(5)
x = torch.randn(96, 16, 6)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
done, warmed = 0, 0
if os.path.exists(SNAPSHOT):
    saved = torch.load(SNAPSHOT)
    model.load_state_dict(saved["model"])
    if "--fault" not in sys.argv or "--rate" in sys.argv:
        optimizer.load_state_dict(saved["optimizer"])
    done = saved["done"]
    if "--fault" not in sys.argv or "--rate" not in sys.argv:
        warmed = done
while done < 60:
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * min(1, (warmed + 1) / WARM_UP)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x[done]), x[done].sum(1, keepdim=True)).backward()
    optimizer.step()
    done, warmed = done + 1, warmed + 1
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": done}
    torch.save(saved, SNAPSHOT + ".new")
    os.replace(SNAPSHOT + ".new", SNAPSHOT)
