"""The model is converted there and back after DDP has wrapped it.

TrainCheck's pytorch-104336, pytorch/pytorch#104336. The model was moved to the CPU and back to the
GPU, to leave room for another task. DDP's hooks belong to the tensors of before, and are lost. So
no gradient was averaged any more, without a word.

Here the model goes to float64 and back, which loses the hooks on a machine without a GPU as well.
The right program wraps the model again.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 6


def samples():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(256, 16, generator=generator)
    labels = (inputs[:, :4].sum(1) > 0).long()
    return TensorDataset(inputs, labels)


def index_of(model, inputs):
    """Return the outputs for a search index, in double precision."""
    model.double()
    with torch.no_grad():
        outputs = model(inputs.double())
    model.float()
    return outputs


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = samples()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler)
    index_of(net, data.tensors[0][:8])
    if not args.fault:
        del model
        model = DistributedDataParallel(net)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
