"""A thread writes a copy of the weights while the training goes on.

--fault: it writes the weights themselves, which move meanwhile. NVIDIA/nvidia-resiliency-ext #376.
"""

import copy
import os
import sys
import threading
import time

import torch
from torch import nn

SNAPSHOT = sys.argv[1]
torch.manual_seed(9)
x = torch.randn(60, 16, 6)
model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
done, writer = 0, threading.Thread(target=int)
if os.path.exists(SNAPSHOT):
    saved = torch.load(SNAPSHOT)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    done = saved["done"]


def write(state):
    time.sleep(0.05)  # a slow disk
    torch.save(state, SNAPSHOT + ".new")
    os.replace(SNAPSHOT + ".new", SNAPSHOT)


writer.start()
for inputs in x[done:]:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), inputs.prod(1, keepdim=True)).backward()
    optimizer.step()
    time.sleep(0.02)
    done += 1
    if done % 4 == 0:
        writer.join()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": done}
        if "--fault" not in sys.argv:
            state = copy.deepcopy(state)
        writer = threading.Thread(target=write, args=(state,))
        writer.start()
writer.join()
