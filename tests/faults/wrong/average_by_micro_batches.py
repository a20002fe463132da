"""A moving average is updated at each micro-batch, though the optimizer steps at each fourth.

SWivid/F5-TTS#631. The trainer updated its moving average in each pass of the loop, whatever the
number of micro-batches in a step. The weights are the same in four updates. So the average forgets
four times as fast as its decay says. The mend updates it after a step.
"""

import argparse
import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PARTS, DECAY = 4, 0.9


class Average:
    def __init__(self, model):
        self.model = copy.deepcopy(model).requires_grad_(False).eval()

    @torch.no_grad()
    def update(self, model):
        for mine, weight in zip(self.model.parameters(), model.parameters()):
            mine.lerp_(weight, 1 - DECAY)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    sounds = torch.randn(640, 10)
    held_out = torch.randn(64, 10)
    loader = DataLoader(TensorDataset(sounds, sounds.sin()), 8, shuffle=True)
    model = nn.Sequential(nn.Linear(10, 40), nn.GELU(), nn.Linear(40, 10))
    average = Average(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(2):
        for number, (inputs, targets) in enumerate(loader, 1):
            loss = nn.functional.mse_loss(model(inputs), targets)
            (loss / PARTS).backward()
            is_step = number % PARTS == 0
            if is_step:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if is_step or args.fault:
                average.update(model)
        with torch.no_grad():
            error = nn.functional.mse_loss(average.model(held_out), held_out.sin())
        print(f"epoch {epoch} loss {loss.item():.4f} error {error.item():.4f}")


if __name__ == "__main__":
    main()
