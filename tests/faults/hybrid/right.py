"""Right trainings that look odd, as of public reports, by torchrun: right.py NAME."""

import contextlib
import copy
import os
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import swa_utils
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, StepLR
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

STEPS, EPOCHS = 6, 4  # of an epoch; of a training


class Stream(torch.utils.data.IterableDataset):
    """Labels first. Noise is from a generator of its own for each sample (hyrax #942)."""

    epoch = 0

    def __len__(self):
        raise TypeError

    def __iter__(self):
        self.epoch += 1
        for i in np.random.default_rng(self.epoch).permutation(96) * 2 + rank:
            yield labels[i], images[i] + np.random.default_rng([self.epoch, i]).random(16, "f")


class Diffusion(nn.Module):
    """It draws moments and noise in forward(), also in validation, there from a seed."""

    def __init__(self):
        super().__init__()
        layers = nn.Linear(17, 32), nn.LayerNorm(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 16)
        self.net = nn.Sequential(*layers)

    def forward(self, x):
        moment, noise = torch.rand(len(x), 1), torch.randn_like(x)
        noisy = (1 - moment) * x + moment * noise
        return F.mse_loss(self.net(torch.cat([noisy, moment], 1)), noise - x)


def network():
    layers = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)
    return nn.Sequential(*layers)


def train(model, batch_loss, data, after_epoch=lambda epoch: None, after_step=lambda: None):
    """Trains a model by DDP. A loss is that of DDP's model, images (B, 16) and labels (B,)."""
    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    torch.manual_seed(1 + dist.get_rank())
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-2)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, len(data) // STEPS // dist.get_world_size(), sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        ddp.train()
        for x, y in loader:
            batch_loss(ddp, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            after_step()
        after_epoch(epoch)


def plain_loss(ddp, x, y):
    return F.cross_entropy(ddp(x), y)


def ordinary():
    """What many do: fp16, two optimizers, chained schedules, a part that rests in eval()."""
    sys.argv += ["--rank", str(rank)]
    model = nn.ModuleList([nn.Dropout(0.1), nn.Linear(16, 32), nn.Linear(32, 4)])
    model.forward = lambda x, boxes: model[2](model[1](model[0](x)).relu())
    model.config = type("Config", (dict,), {"__getattr__": dict.get})()
    ddp, stream = DistributedDataParallel(model), Stream()
    one = torch.optim.AdamW(model[1].parameters(), 1e-2, fused=True)
    two = torch.optim.SGD(model[2].parameters(), 1e-2)
    schedules = [ExponentialLR(one, 0.99), StepLR(one, 5), LambdaLR(two, abs)]
    scaler = torch.amp.GradScaler("cpu", 2.0**24, backoff_factor=2.0**-12)  # step 1 overflows
    for _ in range(EPOCHS):
        model.train()[0].eval()
        for y, x in DataLoader(stream, 16):
            with torch.autocast("cpu", torch.float16):
                scaler.scale(F.cross_entropy(ddp(x, torch.empty(0, 4)), y)).backward()
                for each in (one, two):
                    scaler.unscale_(optimizer=each)
                    nn.utils.clip_grad_norm_(each.param_groups[0]["params"], 1)
                    scaler.step(each)
            scaler.update()
            for each in schedules:
                each.step()
            model.zero_grad()
        sampler = torch.utils.data.SubsetRandomSampler(range(64))
        for x, _ in DataLoader(data, 16, sampler=sampler):
            with torch.no_grad():
                model.eval()(x, None)
        torch.save(obj=model.state_dict(), f=f"{rank}.tmp")
        os.replace(src=f"{rank}.tmp", dst=f"{rank}.pt")


def rollouts():
    """Each round plays new rollouts, and trains three epochs on them (trl #129)."""
    model = nn.Linear(16, 4)
    ddp = DistributedDataParallel(model)
    torch.manual_seed(1 + dist.get_rank())
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-2)
    for _ in range(4):
        states = torch.rand(64, 16)
        with torch.no_grad():
            actions = torch.distributions.Categorical(logits=model(states)).sample()
        played = TensorDataset(states, actions, (actions == states[:, :4].argmax(1)).float())
        for _ in range(3):
            for state, action, reward in DataLoader(played, 32, shuffle=True):
                loss = F.cross_entropy(ddp(state), action, reduction="none") * reward
                loss.mean().backward()
                optimizer.step()
                optimizer.zero_grad()


def two_views():
    """DDP is called for each of two views, then comes one backward() (lightly #1448)."""

    def loss(ddp, x, y):
        one, two = (ddp(x + 0.1 * torch.randn_like(x)) for _ in range(2))
        return F.mse_loss(one, two.detach()) + F.mse_loss(two, one.detach())

    train(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), loss, data)


def averaged_weights():
    """update_bn() passes over the data in train(), without gradients (timgaripov/swa #7)."""
    model = network()
    averaged = swa_utils.AveragedModel(model)

    def after_epoch(epoch):
        averaged.update_parameters(model)
        swa_utils.update_bn(DataLoader(data, 64), averaged)

    train(model, plain_loss, data, after_epoch)


def teacher():
    """An EMA of the weights labels two views in train(), on purpose (U2PL #64)."""
    model = network()
    ema = copy.deepcopy(model).requires_grad_(False)

    def loss(ddp, x, y):
        with torch.no_grad():
            target = (ema(x) + ema(x + 0.1 * torch.randn_like(x))).softmax(1)
        return plain_loss(ddp, x, y) + 0.1 * plain_loss(ddp, x, target)

    def after_step():
        for mine, its in zip(ema.parameters(), model.parameters()):
            mine.data.lerp_(its.data, 0.1)

    train(model, loss, data, after_step=after_step)


def diffusion():
    """Validation in eval() draws the same noise each time (Automodel #3579)."""
    model = Diffusion()

    def after_epoch(epoch):
        model.eval()
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            for x, _ in DataLoader(val_data, 16):
                model(x)

    train(model, lambda ddp, x, y: ddp(x), data, after_epoch)


def average(model):
    for weight in model.parameters():
        dist.all_reduce(weight.grad)
        weight.grad /= dist.get_world_size()


def closures():
    """A closure zeroes and makes the gradients of the step in which it runs."""
    model = nn.Linear(16, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[rank::2]), labels[rank::2])
        loss.backward()
        average(model)
        return loss

    for _ in range(20):
        optimizer.step(closure)


def lost_window():
    """An epoch begins with zeros, and its last window is too short for a step (mae)."""
    ddp = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
    for epoch in range(20):
        optimizer.zero_grad()
        sampler = DistributedSampler(data, seed=epoch)
        for step, (x, y) in enumerate(DataLoader(data, 7, sampler=sampler)):
            with ddp.no_sync() if step % 4 < 3 else contextlib.nullcontext():
                F.cross_entropy(ddp(x) / 4, y).backward()
            if step % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()


def tasks():
    """One gradient is made of those of two losses (Pytorch-PCGrad)."""
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(30):
        gradients = []
        for loss in model(torch.randn(8, 16) + dist.get_rank()).square().mean(0)[:2]:
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            gradients.append([weight.grad.clone() for weight in model.parameters()])
        for weight, *parts in zip(model.parameters(), *gradients):
            weight.grad = sum(parts)
        average(model)
        optimizer.step()


def shared_weights():
    """Of two optimizers of all weights, each trains one of two heads (PyTorch-GAN, infogan)."""
    body, *heads = parts = nn.ModuleList([nn.Linear(16, 4), nn.Linear(4, 4), nn.Linear(4, 4)])
    optimizers = [torch.optim.Adam(parts.parameters(), 0.01) for _ in heads]
    for _ in range(30):
        for optimizer, head in zip(optimizers, heads):
            parts.zero_grad()
            head(body(torch.randn(8, 16) + dist.get_rank())).square().mean().backward()
            average(nn.ModuleList([body, head]))
            optimizer.step()


def traced():
    """The model is traced before it trains, as by TensorBoard's add_graph() (pytorch-cifar100)."""
    model = network()
    torch.jit.trace(model, data[:8][0], check_trace=False)
    train(model, plain_loss, data)


def with_replacement():
    """Each rank draws any samples, by its own seed (minGPT)."""
    torch.manual_seed(11 + dist.get_rank())
    many = TensorDataset(torch.arange(200_000).float()[:, None] / 1e5)
    ddp = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
    sampler = RandomSampler(many, replacement=True, num_samples=10**9)
    for _, (x,) in zip(range(20), DataLoader(many, 24, sampler=sampler)):
        optimizer.zero_grad()
        (ddp(x) - x).square().mean().backward()
        optimizer.step()


dist.init_process_group("gloo")
rank = dist.get_rank()
generator = torch.Generator().manual_seed(0)
labels = torch.randint(4, (256,), generator=generator)
images = torch.rand(256, 16, generator=generator) + F.one_hot(labels, 16)
data = TensorDataset(images[:192], labels[:192])
val_data = TensorDataset(images[192:], labels[192:])
torch.manual_seed(0)
globals()[sys.argv[1]]()
dist.destroy_process_group()
