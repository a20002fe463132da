"""All workers of a loader draw the same random numbers.

TrainCheck's stackoverflow-67180955, fixed in pytorch/pytorch#56488. Each worker of a DataLoader is
a copy of the process, with the state of NumPy's generator in it. So all workers augmented their
samples by the same numbers. PyTorch now seeds NumPy's global generator in each worker. It cannot
do so for a generator that the data set keeps.
"""

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

EPOCHS = 3


class Shifted(Dataset):
    """Rows that are shifted and made noisy at random."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.labels = torch.randint(0, 4, (256,), generator=generator)
        self.rows = 0.3 * torch.randn(256, 24, generator=generator)
        self.rows[torch.arange(256), 4 + 5 * self.labels] += 2.0
        self.random = np.random.default_rng(0)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        shift = int(self.random.integers(-1, 2))
        noise = torch.from_numpy(self.random.normal(0, 0.1, 24)).float()
        return torch.roll(self.rows[index], shift) + noise, self.labels[index]


def seed_worker(worker):
    """Give the copy of the data set in this worker a generator of its own."""
    information = get_worker_info()
    information.dataset.random = np.random.default_rng(information.seed)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    start = None if args.fault else seed_worker
    loader = DataLoader(Shifted(), 16, shuffle=True, num_workers=2, worker_init_fn=start)
    model = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(EPOCHS):
        for rows, labels in loader:
            loss = nn.functional.cross_entropy(model(rows), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
