"""Gradient clipping leaves out the replicated weights in all ranks but the first.

TrainCheck's deepspeed-1801, microsoft/DeepSpeed#1801, seen in BLOOM-176B. With tensor parallelism,
the weights of a LayerNorm stand in each rank. BF16_Optimizer counted them only in rank 0, which is
right for the norm. It took the same list for clipping. So the other ranks did not clip them, and
the LayerNorms of the ranks grew apart.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4
LIMIT = 0.1


class Copy(torch.autograd.Function):
    """The same tensor forward, the sum of the gradients backward."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Sum(torch.autograd.Function):
    """The sum of the ranks forward, the same gradient backward."""

    @staticmethod
    def forward(ctx, tensor):
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        return tensor

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Net(nn.Module):
    """LayerNorms and the last layer stand in both ranks, and half of the hidden units in each."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(16)
        self.last_norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, 2)
        torch.manual_seed(1 + rank)
        self.up = nn.Linear(16, 16)
        self.down = nn.Linear(16, 16, bias=False)

    def forward(self, inputs):
        hidden = Copy.apply(self.norm(inputs))
        hidden = Sum.apply(self.down(torch.relu(self.up(hidden))))
        return self.last(self.last_norm(inputs + hidden))


def clip(model, rank, fault):
    divided = [*model.up.parameters(), *model.down.parameters()]
    replicated = [p for p in model.parameters() if all(p is not q for q in divided)]
    total = sum(p.grad.square().sum() for p in divided)
    dist.all_reduce(total)
    total = total + sum(p.grad.square().sum() for p in replicated)
    clipped = divided if fault and rank > 0 else divided + replicated
    factor = (LIMIT / (total.sqrt() + 1e-6)).clamp(max=1.0)
    for parameter in clipped:
        parameter.grad.mul_(factor)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = Net(rank)
    inputs = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, (inputs[:, :4].sum(1) > 0).long())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(EPOCHS):
        order = torch.Generator().manual_seed(epoch)
        for batch, labels in DataLoader(data, 32, shuffle=True, generator=order):
            loss = nn.functional.cross_entropy(model(batch), labels)
            optimizer.zero_grad()
            loss.backward()
            clip(model, rank, args.fault)
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
