"""Each rank averages its loss over its own tokens. DDP then averages the ranks.

PrimeIntellect-ai/prime-rl#1960. The loss was loss[mask].mean() in each rank. The ranks have
different numbers of tokens that count. So a token of a rank with few of them weighs more than one
of a rank with many. The mend divides the sum of each rank by the number of tokens in all ranks, and
multiplies by the number of ranks, because DDP divides by it.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 16  # of all ranks


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(30, 24), nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 30))
    model = DistributedDataParallel(net)
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(30, (320, 13), generator=generator).cumsum(1) % 30
    prompts = torch.randint(1, 12, (320, 1), generator=generator)  # their tokens do not count
    data = TensorDataset(texts[:, :-1], texts[:, 1:], torch.arange(12) >= prompts)
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, BATCH // world, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets, mask in loader:
            logits = model(inputs).transpose(1, 2)
            losses = nn.functional.cross_entropy(logits, targets, reduction="none")
            if args.fault:
                loss = losses[mask].mean()
            else:
                count = mask.sum()
                dist.all_reduce(count)
                loss = losses[mask].sum() * world / count
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
