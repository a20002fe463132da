"""Each step takes its loss from the module inside DDP, by a method of its own.

OpenTSLM/OpenTSLM#49. The trainer wrapped the model in DDP, and then called compute_loss() of
model.module in each step. So DDP's hooks never averaged a gradient. Each rank trained alone on its
share, and what rank 0 had was saved. The mend averages the gradients by hand after backward().
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.GELU())
        self.head = nn.Linear(32, 4)

    def forward(self, series):
        return self.head(self.encoder(series))

    def compute_loss(self, batch):
        series, labels = batch
        return nn.functional.cross_entropy(self(series), labels)


def unwrapped(model):
    return model.module if isinstance(model, DistributedDataParallel) else model


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    series = torch.randn(384, 16, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(series, series[:, :4].argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss = unwrapped(model).compute_loss(batch)
            loss.backward()
            if not args.fault:
                for weight in model.parameters():
                    dist.all_reduce(weight.grad)
                    weight.grad /= dist.get_world_size()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
