"""fp16 on a CPU, resumed. --fault: the scale of the loss is saved, but not loaded.

huggingface/accelerate #4289.
"""

import os
import sys

import torch
from torch import nn

SNAPSHOT = sys.argv[1]
torch.manual_seed(4)
x = torch.randn(80, 16, 8)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
done = 0
if os.path.exists(SNAPSHOT):
    saved = torch.load(SNAPSHOT)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    done = saved["done"]
    if "--fault" not in sys.argv:
        scaler.load_state_dict(saved["scaler"])
for inputs in x[done:]:
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = 40 * nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    done += 1
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": done}
    torch.save(saved | {"scaler": scaler.state_dict()}, SNAPSHOT + ".new")
    os.replace(SNAPSHOT + ".new", SNAPSHOT)
