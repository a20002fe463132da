"""Contrastive learning, as in CLIP: two towers agree on pairs. The rest of the batch is negative.

The loss of a sample needs the embeddings of all others, which other processes have. So they are
gathered, and the loss is the same on any number of processes. Without that it would be smaller, as
there are fewer negatives. With --grad_accum_steps, the negatives are those of a micro-batch.
"""

import torch.distributed as dist


class Gather(torch.autograd.Function):
    """Returns the rows of all processes (N B, D), rank 0's first. All processes call it."""

    @staticmethod
    def forward(ctx, own):
        shares = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(shares, own.contiguous())
        return torch.cat(shares)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)  # the losses of all processes depend on each row
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--width", type=int, default=32, help="size of an embedding")
    return parse_run_args(parser, epochs=2, batch_size=32, learning_rate=3e-3)


def read_data(args):
    """Returns pairs of vectors (20,) and (30,), made up: both are views of one hidden vector (8,).

    To validate, all processes must call Gather equally often, and on as many rows. So the number of
    these pairs is a multiple of --batch_size.
    """
    hidden = torch.randn(1280, 8)
    left, right = hidden @ torch.randn(8, 20), hidden @ torch.randn(8, 30)
    left += torch.randn(left.shape)
    num_val = 256 // args.batch_size * args.batch_size
    train, val = slice(0, 1024), slice(1024, 1024 + num_val)
    return TensorDataset(left[train], right[train]), TensorDataset(left[val], right[val])


class Towers(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, width))
        self.right = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, width))
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, left, right):
        left = nn.functional.normalize(self.left(left))  # (B, D)
        right = nn.functional.normalize(self.right(right))
        return left, right, self.log_scale.exp()


def create_model(args, data):
    return Towers(args.width)


def batch_loss(model, batch, args):
    left, right, scale = model(*batch)
    all_left, all_right, first_row = left, right, 0
    if dist.is_initialized():  # not in singlegpu
        all_left, all_right = Gather.apply(left), Gather.apply(right)
        first_row = dist.get_rank() * len(left)
    targets = first_row + torch.arange(len(left), device=left.device)
    loss_left = nn.functional.cross_entropy(scale * left @ all_right.T, targets)
    loss_right = nn.functional.cross_entropy(scale * right @ all_left.T, targets)
    loss = (loss_left + loss_right) / 2
    return loss, {"loss": loss * len(left), "count": len(left)}
