"""Random noise from numpy, in workers. --fault: each starts with the same state of numpy.

stackoverflow 67180955; PyTorch's FAQ "My data loader workers return identical random numbers".
--forkserver: a server forks the workers, as by default from Python 3.14 on.
"""

import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

x = torch.randn(240, 8, generator=torch.Generator().manual_seed(0))


class Data(Dataset):
    def __len__(self):
        return len(x)

    def __getitem__(self, index):
        noise = torch.from_numpy(np.random.normal(0, 0.1, 8)).float()
        return x[index] + noise, int(x[index, 0] > 0)


def same_start(worker):
    np.random.seed(0)


if __name__ == "__main__":
    torch.manual_seed(0)
    start = same_start if "--fault" in sys.argv else None
    workers = {"num_workers": 2, "worker_init_fn": start}
    if "--forkserver" in sys.argv:
        workers["multiprocessing_context"] = "forkserver"
    loader = DataLoader(Data(), 16, shuffle=True, **workers)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
