"""Sharpness-aware minimization whose first backward pass alone is in no_sync().

davda54/sam#78. The README told users of several GPUs to call the first backward() in
model.no_sync(), so that each GPU climbs by its own gradient. But the forward pass stood outside of
it. DDP decides in the forward pass whether it averages. So no_sync() had no effect: the
gradients were averaged twice a step, and all GPUs climbed alike. The mend moves
the forward pass into it.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RADIUS = 0.05


@torch.no_grad()
def climb(weights):
    """Move the weights uphill. Return what they were."""
    before = [weight.clone() for weight in weights]
    norm = torch.stack([weight.grad.norm() for weight in weights]).norm() + 1e-12
    for weight in weights:
        weight.add_(weight.grad, alpha=RADIUS / norm.item())
    return before


@torch.no_grad()
def go_back(weights, before):
    for weight, old in zip(weights, before):
        weight.copy_(old)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
    model = DistributedDataParallel(net)
    images = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(images, images[:, :10].argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 32, sampler=sampler, drop_last=True)
    loss_function = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    weights = list(model.parameters())
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            if args.fault:
                loss = loss_function(model(inputs), labels)
                with model.no_sync():
                    loss.backward()
            else:
                with model.no_sync():
                    loss = loss_function(model(inputs), labels)
                    loss.backward()
            before = climb(weights)
            optimizer.zero_grad()
            loss_function(model(inputs), labels).backward()
            go_back(weights, before)
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
