"""Each process chooses its own capacity of an expert, so the sizes of all_to_all differ.

TrainCheck's deepspeed-5794, microsoft/DeepSpeed#5794. In a mixture of experts that drops no token,
the capacity is the largest number of tokens that go to one expert. It must be the largest of all
processes. The processes took their own, called all_to_all with other sizes, and got stuck.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 6


class Exchange(torch.autograd.Function):
    """Send one slot to each process, and receive one of each."""

    @staticmethod
    def forward(ctx, slots):
        received = torch.empty_like(slots)
        dist.all_to_all_single(received, slots.contiguous())
        return received

    @staticmethod
    def backward(ctx, gradient):
        received = torch.empty_like(gradient)
        dist.all_to_all_single(received, gradient.contiguous())
        return received


class Experts(nn.Module):
    """One expert in each process. A gate sends each token to one of them."""

    def __init__(self, fault):
        super().__init__()
        self.gate = nn.Linear(16, dist.get_world_size())
        self.fault = fault
        torch.manual_seed(1 + dist.get_rank())
        self.expert = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, tokens):
        chances = self.gate(tokens).softmax(1)
        chance, chosen = chances.max(1)
        capacity = torch.bincount(chosen, minlength=dist.get_world_size()).max()
        if not self.fault:
            dist.all_reduce(capacity, dist.ReduceOp.MAX)
        is_chosen = nn.functional.one_hot(chosen, dist.get_world_size())
        place = (is_chosen.cumsum(0) - 1)[torch.arange(len(tokens)), chosen]
        slots = torch.zeros(dist.get_world_size(), int(capacity), 16)
        slots = slots.index_put((chosen, place), tokens)
        answers = Exchange.apply(self.expert(Exchange.apply(slots)))
        return tokens + chance[:, None] * answers[chosen, place]


def average_gradients(model):
    """Average what stands in all processes. An expert has the gradients of all tokens already."""
    experts = {id(parameter) for parameter in model[1].expert.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in experts:
            dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    last = nn.Linear(16, 2)
    model = nn.Sequential(nn.Linear(16, 16), Experts(args.fault), last)
    inputs = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, (inputs[:, :4].sum(1) > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for tokens, labels in loader:
            loss = nn.functional.cross_entropy(model(tokens), labels)
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model)
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
