"""After a restart, the learning rate is warmed up again.

aqlaboratory/openfold#181. The checkpoint brought back the model and the optimizer. The schedule
was made anew and began at step 0. So the learning rate fell back to its warm-up, in the middle of
the plateau. The mend makes the schedule with the last step of the checkpoint.
"""

import argparse
import os

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

BASE, STEPS, WARM_UP, SAVE_EVERY = 1e-2, 40, 6, 5


def factor(step):
    return min(1.0, (step + 1) / WARM_UP)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--snapshot", required=True)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    features = torch.randn(160, 10)
    data = TensorDataset(features, features.cumsum(1))
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=BASE, eps=1e-5)
    done = 0
    if os.path.exists(args.snapshot):
        saved = torch.load(args.snapshot, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["done"]
    last_step = -1 if args.fault or done == 0 else done - 1
    scheduler = LambdaLR(optimizer, factor, last_epoch=last_step)
    while done < STEPS:
        generator = torch.Generator().manual_seed(done // 10)
        order = torch.randperm(160, generator=generator)[done % 10 * 16 :].tolist()
        for inputs, targets in DataLoader(data, 16, sampler=order):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            done += 1
            if done % SAVE_EVERY == 0:
                saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(saved | {"done": done}, args.snapshot + ".new")
                os.replace(args.snapshot + ".new", args.snapshot)
        print(f"step {done} loss {loss.item():.4f} rate {scheduler.get_last_lr()[0]:.4f}")


if __name__ == "__main__":
    main()
