"""An optimizer that holds another one, after the class SAM of davda54/sam.

The schedule has the outer one, and only the inner one's step() is called. Both have the same
groups, so that the rate is used.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base, **settings):
        super().__init__(params, {"rho": 0.05, **settings})
        self.base = base(self.param_groups, **settings)
        self.param_groups = self.base.param_groups

    def weights(self):
        return [weight for group in self.param_groups for weight in group["params"]]

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([weight.grad.norm() for weight in self.weights()]).norm()
        for weight in self.weights():
            self.state[weight]["change"] = weight.grad * 0.05 / norm
            weight.add_(self.state[weight]["change"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for weight in self.weights():
            weight.sub_(self.state[weight]["change"])
        self.base.step()
        self.zero_grad()


torch.manual_seed(0)
x = torch.randn(240, 8)
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 16, shuffle=True)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
for _ in range(3):
    for inputs, labels in loader:
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.first_step()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.second_step()
        schedule.step()
