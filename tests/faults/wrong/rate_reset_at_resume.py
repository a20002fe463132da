"""After a resume, the learning rate is that of the first epoch again.

torch-points3d/torch-points3d#630. A resumed run loaded the state of the optimizer first, and made
the scheduler afterwards. A new scheduler writes its first learning rate into the optimizer. The
state that the scheduler then loads does not change the optimizer. So the run went on with the
learning rate of its beginning, until the next step of the schedule.
"""

import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 10


def samples():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(96, 16, generator=generator)
    labels = (inputs[:, :4].sum(1) > 0).long()
    return TensorDataset(inputs, labels)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--snapshot", default="")
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    state = None
    first = 0
    if args.snapshot and os.path.exists(args.snapshot):
        state = torch.load(args.snapshot, weights_only=True)
        first = state["epochs"]
        model.load_state_dict(state["model"])
    if state and args.fault:
        optimizer.load_state_dict(state["optimizer"])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.6**epoch)
    if state and not args.fault:
        optimizer.load_state_dict(state["optimizer"])
    if state:
        scheduler.load_state_dict(state["scheduler"])

    data = samples()
    for epoch in range(first, EPOCHS):
        order = torch.Generator().manual_seed(epoch)
        for inputs, labels in DataLoader(data, 16, shuffle=True, generator=order):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f} rate {scheduler.get_last_lr()[0]:.4f}")
        scheduler.step()
        if args.snapshot:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"scheduler": scheduler.state_dict(), "epochs": epoch + 1}
            torch.save(state, args.snapshot + ".part")
            os.replace(args.snapshot + ".part", args.snapshot)


if __name__ == "__main__":
    main()
