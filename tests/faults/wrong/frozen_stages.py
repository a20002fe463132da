"""The first two stages of a model are frozen.

--fault: frozen_stages=2 is stored, but nothing freezes them. open-mmlab/mmpretrain #702.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(nn.Module):
    def __init__(self, frozen_stages):
        super().__init__()
        self.frozen_stages = frozen_stages
        stages = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(3)]
        self.stages, self.head = nn.ModuleList(stages), nn.Linear(8, 2)
        if "--fault" not in sys.argv:
            self.freeze()

    def freeze(self):
        for stage in self.stages[: self.frozen_stages]:
            stage.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        if "--fault" not in sys.argv:
            self.stages[: self.frozen_stages].eval()
        return self

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return self.head(x)


torch.manual_seed(0)
x = torch.randn(240, 8)
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 16, shuffle=True)

model = Model(frozen_stages=2).train()
trained = [weight for weight in model.parameters() if weight.requires_grad]
optimizer = torch.optim.SGD(trained, lr=0.1)
for _ in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
