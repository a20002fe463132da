"""The schedule goes on at each batch, and the optimizer at each fourth.

starVLA/starVLA#210. With gradient accumulation, the trainer called lr_scheduler.step() for each
batch, while the optimizer only stepped at the end of a group. So the learning rate fell faster
than planned, by the number of batches in a group.
"""

import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4
ACCUMULATE = 4
STEPS = 32  # of the optimizer, in all epochs


def factor(step):
    """Return the learning rate after so many steps, as a part of the largest one."""
    if step < 4:
        return (step + 1) / 4
    return 0.5 + 0.5 * math.cos(math.pi * (step - 4) / (STEPS - 4))


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
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    loader = DataLoader(samples(), 8, shuffle=True)
    for epoch in range(EPOCHS):
        for number, (inputs, labels) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            (loss / ACCUMULATE).backward()
            is_last = (number + 1) % ACCUMULATE == 0
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
            if is_last or args.fault:
                scheduler.step()
        print(f"epoch {epoch} loss {loss.item():.4f} rate {scheduler.get_last_lr()[0]:.5f}")


if __name__ == "__main__":
    main()
