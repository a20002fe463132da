"""The trainer takes sometimes the DDP model, and sometimes the module in it.

TrainCheck's x-jxmnop-ddp-out-of-sync. A trainer kept the model as a plain module, and wrapped it
where it was used. The training step got the plain module at each second step. So at each second
step the gradients of the processes were not averaged.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 6


class Trainer:
    """A trainer that knows its model both wrapped and unwrapped."""

    def __init__(self, module, fault):
        self.module = module
        self.wrapped = DistributedDataParallel(module)
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        self.fault = fault
        self.steps = 0

    def model(self):
        if self.fault and self.steps % 2 == 0:
            return self.module
        return self.wrapped

    def training_step(self, inputs, labels):
        loss = nn.functional.cross_entropy(self.model()(inputs), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        return loss.item()


def samples():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(256, 16, generator=generator)
    labels = (inputs[:, :4].sum(1) > 0).long()
    return TensorDataset(inputs, labels)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
    trainer = Trainer(module, args.fault)
    data = samples()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = trainer.training_step(inputs, labels)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
