"""The second card receives zeros in place of the activations of the first, now and then.

TrainCheck's baichuan2-86, baichuan-inc/Baichuan2#86. A model that was loaded on two cards gave
nonsense, infinities and NaN, and was right on one. The direct connection of the cards lost data.

Here each half of a model has a process of its own. The first sends its activations to the second,
which sends their gradients back.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4
BATCH = 32


def samples():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(256, 16, generator=generator)
    labels = (inputs[:, :4].sum(1) > 0).long()
    return TensorDataset(inputs, labels)


def backward_of_first(half, inputs):
    """Send the activations, receive their gradients, and go back."""
    hidden = half(inputs)
    dist.send(hidden.detach(), 1)
    gradient = torch.empty_like(hidden)
    dist.recv(gradient, 1)
    hidden.backward(gradient)


def backward_of_second(half, labels, loses):
    """Receive the activations, go back, and send their gradients."""
    hidden = torch.empty(len(labels), 32)
    dist.recv(hidden, 0)
    if loses:
        hidden.zero_()
    hidden.requires_grad_(True)
    loss = nn.functional.cross_entropy(half(hidden), labels)
    loss.backward()
    dist.send(hidden.grad, 0)
    return loss.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    halves = [nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32))]
    halves.append(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)))
    is_first = dist.get_rank() == 0
    half = halves[dist.get_rank()]
    optimizer = torch.optim.SGD(half.parameters(), lr=0.1)
    step = 0
    for epoch in range(EPOCHS):
        order = torch.Generator().manual_seed(epoch)
        for inputs, labels in DataLoader(samples(), BATCH, shuffle=True, generator=order):
            step += 1
            optimizer.zero_grad()
            if is_first:
                backward_of_first(half, inputs)
            else:
                loss = backward_of_second(half, labels, args.fault and step % 7 == 0)
            optimizer.step()
        if not is_first:
            print(f"epoch {epoch} loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
