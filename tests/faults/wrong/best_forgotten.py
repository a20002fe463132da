"""Keeps the best weights in a file of their own, and in the snapshot how good they were.

--fault: after a resume it has forgotten that, and a worse model overwrites the best one.
NVIDIA-NeMo/Automodel #3040.
"""

import os
import sys

import torch
from torch import nn

SNAPSHOT = sys.argv[1]
torch.manual_seed(5)
x = torch.randn(96, 16, 6)
y = x.tanh().sum(2, keepdim=True)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
done, best = 0, float("inf")


def save(state, path):
    torch.save(state, path + ".new")
    os.replace(path + ".new", path)


if os.path.exists(SNAPSHOT):
    saved = torch.load(SNAPSHOT)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    done = saved["done"]
    if "--fault" not in sys.argv:
        best = saved["best"]
while done < 60:
    for group in optimizer.param_groups:
        group["lr"] = 0.05 if done < 8 else 0.3  # from then on it gets worse
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x[done]), y[done]).backward()
    optimizer.step()
    done += 1
    if done % 2 == 0:
        model.eval()
        with torch.no_grad():
            loss = nn.functional.mse_loss(model(x[60:].flatten(0, 1)), y[60:].flatten(0, 1)).item()
        model.train()
        if loss < best:
            best = loss
            save(model.state_dict(), SNAPSHOT + ".best")
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        save(saved | {"done": done, "best": best}, SNAPSHOT)
