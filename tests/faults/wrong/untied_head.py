"""A head that is the embedding, made without memory first, and saved once.

--fault: to_empty() unties it, and it is not tied again. NVIDIA-NeMo/Automodel #2511, verl #7834.
"""

import os
import sys

import torch
from torch import nn

SNAPSHOT = sys.argv[1]


class Bigram(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.mix = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.tie()

    def tie(self):
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.mix(self.table(ids)))


with torch.device("meta"):
    model = Bigram()
model.to_empty(device="cpu")
if "--fault" not in sys.argv:
    model.tie()
torch.manual_seed(3)
for weight in model.parameters():
    nn.init.normal_(weight, std=0.3)
ids = torch.randint(20, (48, 32, 2))
done = 0
if os.path.exists(SNAPSHOT):
    saved = torch.load(SNAPSHOT)
    model.load_state_dict(saved["model"] | {"head.weight": saved["model"]["table.weight"]})
    done = saved["done"]
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for old, new in ids[done:].transpose(1, 2):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(old), new).backward()
    optimizer.step()
    done += 1
    state = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    torch.save({"model": state, "done": done}, SNAPSHOT + ".new")
    os.replace(SNAPSHOT + ".new", SNAPSHOT)
