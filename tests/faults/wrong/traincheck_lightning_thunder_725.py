"""A compiled layer does not take part in autocast, and computes in float32.

TrainCheck's lightning-thunder-725, Lightning-AI/lightning-thunder#725. Inside of torch.autocast,
the compiler changed only some kinds of operations to bfloat16. A function that called a primitive
`linear` kept its float32. The training was right and needed more time and memory than expected.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4


def compiled(function):
    """Return the function as a compiler made it that does not know of autocast."""

    def call(*tensors):
        with torch.autocast("cpu", enabled=False):
            return function(*(tensor.float() for tensor in tensors))

    return call


class Net(nn.Module):
    """Two layers, of which the second is called by a function."""

    def __init__(self, fault):
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.second = nn.Linear(64, 64)
        self.last = nn.Linear(64, 2)
        self.linear = compiled(nn.functional.linear) if fault else nn.functional.linear

    def forward(self, inputs):
        hidden = torch.relu(self.first(inputs))
        hidden = torch.relu(self.linear(hidden, self.second.weight, self.second.bias))
        return self.last(hidden)


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
    model = Net(args.fault)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(samples(), 32, shuffle=True)
    for epoch in range(EPOCHS):
        for inputs, labels in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
