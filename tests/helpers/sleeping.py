"""A model that sleeps as long as another one computes, and so takes no core. It sends as much."""

import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

# Batch; seconds of forward, backward and optimizer; bytes of the buckets, the last layer's first,
# and their shares of the backward pass. These are of logs on one core of an AMD EPYC.
MODELS = {
    "text, small": (64, 0.0546, 0.1031, 0.0025, (1053712, 10831872), (0.56, 0.44)),
    "text, large": (64, 0.3144, 0.6103, 0.0060, (1054736, 32161792), (0.23, 0.77)),
    "images, mlp": (64, 0.0015, 0.0021, 0.0006, (1071144, 1607680), (0.54, 0.46)),
    "images, cnn": (256, 0.0947, 0.1549, 0.0012, (4724264, 75264), (0.11, 0.89)),
    "gpt, 10 M": (16, 1.0661, 2.124, 0.0117, (1640960, 26240000, 12139520), (0.03, 0.67, 0.3)),
}


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, forward_seconds, backward_seconds):
        ctx.save_for_backward(weight)
        ctx.seconds = backward_seconds
        time.sleep(forward_seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, ctx.saved_tensors[0].detach(), None, None  # its gradient is 0, too


class Sleeper(nn.Module):
    def __init__(self, name):
        super().__init__()
        batch_size, forward, backward, self.step_seconds, sizes, shares = MODELS[name]
        self.layers = nn.ParameterList([torch.zeros(size // 4) for size in reversed(sizes)])
        self.forward_seconds = forward / batch_size / len(sizes)  # of a layer and a sample
        self.backward_seconds = [backward / batch_size * share for share in reversed(shares)]

    def forward(self, x):  # (B, 1)
        x = x.requires_grad_(torch.is_grad_enabled())
        for weight, backward_seconds in zip(self.layers, self.backward_seconds):
            x = Sleep.apply(x, weight, self.forward_seconds * len(x), backward_seconds * len(x))
        return x


def read_data(args):
    return TensorDataset(torch.zeros(1 << 16, 1)), TensorDataset(torch.zeros(64, 1))


def create_model(args, data):
    return Sleeper(args.model)


def create_optimizer(model, args):
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.step = lambda: time.sleep(model.step_seconds)
    return optimizer


def batch_loss(model, batch, args):
    loss = model(batch[0]).sum()
    return loss, {"loss": loss, "count": len(batch[0])}
