"""Gradients are zeroed before the last micro-batch of each group of four.

meituan-longcat/LongCat-Image#46. The examples called optimizer.zero_grad() at the beginning of
`with accelerator.accumulate(model)`. Accelerate lets zero_grad() and step() through in the last
micro-batch of a group alone. So zero_grad() threw away what the others had left, and the step saw
a quarter of one micro-batch's gradient. The mend calls it after step().
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PARTS = 4


class Accumulating:
    """An optimizer of which zero_grad() and step() do nothing but in the last micro-batch."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.is_last = False

    def zero_grad(self):
        if self.is_last:
            self.optimizer.zero_grad()

    def step(self):
        if self.is_last:
            self.optimizer.step()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    latents = torch.randn(512, 12)
    data = TensorDataset(latents, latents[:, :3] ** 2)
    loader = DataLoader(data, 4, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Linear(12, 48), nn.SiLU(), nn.Linear(48, 3))
    optimizer = Accumulating(torch.optim.AdamW(model.parameters(), lr=1e-3))
    for epoch in range(3):
        for number, (inputs, targets) in enumerate(loader):
            optimizer.is_last = number % PARTS == PARTS - 1
            if args.fault:
                optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            (loss / PARTS).backward()
            if optimizer.is_last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if not args.fault:
                optimizer.zero_grad()
        print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
