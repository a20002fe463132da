"""Each rank gives its DistributedSampler another seed.

NVlabs/LongLive#71. The seed was the current time, multiplied by the rank, and each rank passed its
own one to DistributedSampler. The ranks then cut their shares out of different permutations. Some
samples are trained by two ranks in an epoch, and others by none. The mend passes the seed that all
ranks share. The seed with the rank is kept for the noise.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STARTED = 1_784_012_345  # as of time.time(), so that two runs are alike


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    own_seed = STARTED * dist.get_rank() % 2**31
    shared_seed = 42
    videos = torch.randn(600, 24, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(videos, videos.roll(1, 1))
    sampler_seed = own_seed if args.fault else shared_seed
    sampler = DistributedSampler(data, shuffle=True, drop_last=True, seed=sampler_seed)
    loader = DataLoader(data, 10, sampler=sampler)
    torch.manual_seed(shared_seed)
    net = nn.Sequential(nn.Linear(24, 48), nn.SiLU(), nn.Linear(48, 24))
    model = DistributedDataParallel(net)
    torch.manual_seed(own_seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.0, 0.999))
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            noisy = inputs + 0.1 * torch.randn_like(inputs)
            loss = nn.functional.mse_loss(model(noisy), targets)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
