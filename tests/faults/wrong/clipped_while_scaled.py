"""The gradients are clipped while they still carry the scale of the GradScaler.

milesial/Pytorch-UNet#468. train.py called clip_grad_norm_() before scaler.step(), without
scaler.unscale_(). The gradients were 65536 times too large at that moment. So each step was
clipped to the limit, and the division by the scale then made it tiny.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4
LIMIT = 1.0


class Net(nn.Module):
    """A net that says for each pixel whether it is bright."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 8, 3, padding=1)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, images):
        hidden = torch.relu(self.down(images))
        hidden = torch.relu(self.middle(hidden))
        return self.out(hidden)


def samples():
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(96, 1, 12, 12, generator=generator)
    masks = (nn.functional.avg_pool2d(images, 3, 1, 1) > 0).float()
    return TensorDataset(images, masks)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    loader = DataLoader(samples(), batch_size=12, shuffle=True)
    for epoch in range(EPOCHS):
        model.train()
        for images, masks in loader:
            with torch.autocast("cpu", dtype=torch.float16):
                predicted = model(images)
                loss = nn.functional.binary_cross_entropy_with_logits(predicted, masks)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if not args.fault:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
            scaler.step(optimizer)
            scaler.update()
        print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
