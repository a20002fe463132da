"""After one step without gradients, a compiled loop updates nothing any more.

TrainCheck's pytorch-115607, pytorch/pytorch#115607. A loop leaves out backward() at some steps, and
optimizer.step() must then do nothing. Under TorchDynamo, the code that was compiled at such a step
was taken for all steps that followed. So the parameters stayed as they were.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4


class CompiledAdam(torch.optim.Adam):
    """Adam as a compiler sees it that asks only whether a gradient is missing.

    The compiled code updates the parameters that had a gradient when it was made. It is made anew
    if one of them has none. That others have one again makes nothing new.
    """

    compiled_for = None

    def step(self, closure=None):
        tensors = [tensor for group in self.param_groups for tensor in group["params"]]
        gradients = [tensor.grad for tensor in tensors]
        present = {number for number, grad in enumerate(gradients) if grad is not None}
        if self.compiled_for is None or not self.compiled_for <= present:
            self.compiled_for = present
        for number, tensor in enumerate(tensors):
            if number not in self.compiled_for:
                tensor.grad = None
        super().step(closure)
        for tensor, gradient in zip(tensors, gradients):
            tensor.grad = gradient


def samples():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(256, 16, generator=generator)
    labels = (inputs[:, :4].sum(1) > 0).long()
    return TensorDataset(inputs, labels)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Sigmoid(), nn.Linear(32, 2))
    kind = CompiledAdam if args.fault else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=1e-2)
    loader = DataLoader(samples(), 32, shuffle=True)
    step = 0
    for epoch in range(EPOCHS):
        for inputs, labels in loader:
            step += 1
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            if step != 6:
                loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
