"""Workers that live on do not see the epoch that set_epoch() sets.

huggingface/datasets#6673. A stream is shuffled by its seed and its epoch. set_epoch() changes the
stream of the training process. With persistent_workers=True, the workers keep the copy of the first
epoch. So all epochs have the order of the first one. The mend shares the number of the epoch with
the workers.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    """Shards of rows, split by worker. Shards and rows are shuffled anew in each epoch."""

    def __init__(self, shards, seed, shares_epoch):
        self.shards = shards
        self.seed = seed
        self.epoch = torch.tensor(0)
        if shares_epoch:
            self.epoch.share_memory_()

    def set_epoch(self, epoch):
        self.epoch.fill_(epoch)

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + int(self.epoch))
        worker = get_worker_info()
        order = torch.randperm(len(self.shards), generator=generator).tolist()
        for number in order[worker.id :: worker.num_workers]:
            rows = self.shards[number]
            for place in torch.randperm(len(rows), generator=generator).tolist():
                yield rows[place]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    images = torch.randn(8, 16, 20)
    labels = (images[..., :5].sum(-1) > 0).long()
    shards = [list(zip(*pair)) for pair in zip(images, labels.tolist())]
    stream = Stream(shards, seed=42, shares_epoch=not args.fault)
    loader = DataLoader(stream, 16, num_workers=2, persistent_workers=True)
    model = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(4):
        stream.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
