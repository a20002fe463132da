"""The optimizer takes the learning rate of the first group for all groups.

LiyuanLucasLiu/RAdam#24. RAdam kept the size of a step in a buffer, once for each number of steps,
because it is the same for all tensors. But the learning rate was in it. So the tensors of the
second group were trained with the learning rate of the first.
"""

import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4


class RAdam(torch.optim.Optimizer):
    """Adam whose first steps are damped while its second moment is uncertain."""

    def __init__(self, groups, lr, fault):
        super().__init__(groups, {"lr": lr})
        self.fault = fault
        self.sizes = {}

    def size_of(self, step):
        """Return the factor of a step, and whether the second moment is certain enough."""
        limit = 2 / (1 - 0.999) - 1
        length = limit - 2 * step * 0.999**step / (1 - 0.999**step)
        if length < 5:
            return 1 / (1 - 0.9**step), False
        damping = (length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)
        return math.sqrt(damping * (1 - 0.999**step)) / (1 - 0.9**step), True

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for tensor in group["params"]:
                state = self.state[tensor]
                if not state:
                    state["step"] = 0
                    state["first"] = torch.zeros_like(tensor)
                    state["second"] = torch.zeros_like(tensor)
                state["step"] += 1
                state["first"].lerp_(tensor.grad, 0.1)
                state["second"].lerp_(tensor.grad**2, 0.001)
                if state["step"] not in self.sizes:
                    size, certain = self.size_of(state["step"])
                    self.sizes[state["step"]] = (size * group["lr"], group["lr"], certain)
                size, rate, certain = self.sizes[state["step"]]
                if not self.fault:
                    size = size / rate * group["lr"]
                change = state["first"]
                if certain:
                    change = change / (state["second"].sqrt() + 1e-8)
                tensor.sub_(size * change)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    inputs = torch.randn(128, 16)
    data = TensorDataset(inputs, (inputs[:, :4].sum(1) > 0).long())
    model = nn.ModuleDict({"body": nn.Linear(16, 32), "head": nn.Linear(32, 2)})
    groups = [{"params": list(model["body"].parameters()), "lr": 1e-3}]
    groups.append({"params": list(model["head"].parameters()), "lr": 1e-2})
    optimizer = RAdam(groups, 1e-3, args.fault)
    for epoch in range(EPOCHS):
        for batch, labels in DataLoader(data, 16, shuffle=True):
            loss = nn.functional.cross_entropy(model["head"](model["body"](batch).relu()), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
