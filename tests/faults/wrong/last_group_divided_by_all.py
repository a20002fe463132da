"""The last group of an epoch has fewer batches, and is divided by the number of a full group.

Lightning-AI/pytorch-lightning#19987. With accumulate_grad_batches=4, an epoch of 9 batches ends
with a group of a single batch. Its loss was divided by 4, too. So the gradient of the last step of
each epoch was a quarter of what it should be.

`--batch_size 32 --accumulate 1` is the same training without accumulation.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 8


def samples():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(72, 16, generator=generator)
    targets = inputs[:, :4].sum(1, keepdim=True)
    return TensorDataset(inputs, targets)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    order = torch.Generator().manual_seed(2)
    loader = DataLoader(samples(), args.batch_size, shuffle=True, generator=order)
    for epoch in range(EPOCHS):
        optimizer.zero_grad()
        for number, (inputs, targets) in enumerate(loader):
            first_of_group = number - number % args.accumulate
            batches = args.accumulate
            if not args.fault:
                batches = min(args.accumulate, len(loader) - first_of_group)
            loss = nn.functional.mse_loss(model(inputs), targets)
            (loss / batches).backward()

            group_is_full = (number + 1) % args.accumulate == 0
            if group_is_full or number + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
        print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
