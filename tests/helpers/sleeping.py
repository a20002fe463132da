"""A model that sleeps as long as another one computes, and so takes no core. It sends as much."""

from torch.utils.data import TensorDataset


def parse_args():
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--forward", type=float, help="seconds of the forward pass of a sample")
    add("--backward", type=float, help="seconds of the backward pass of a sample")
    add("--optimizer", type=float, help="seconds of the optimizer")
    add("--bytes", type=int, nargs="+", help="of the gradients of each layer, the last layer first")
    add("--shares", type=float, nargs="+", help="of the backward pass that each layer takes")
    return parse_run_args(parser, epochs=2, batch_size=64)


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
    def __init__(self, args):
        super().__init__()
        self.args = args
        layers = [torch.zeros(size // 4) for size in reversed(args.bytes)]
        self.layers = nn.ParameterList(layers)

    def forward(self, x):  # (B, 1)
        x = x.requires_grad_(torch.is_grad_enabled())
        forward_seconds = self.args.forward * len(x) / len(self.layers)
        for weight, share in zip(self.layers, reversed(self.args.shares)):
            x = Sleep.apply(x, weight, forward_seconds, self.args.backward * share * len(x))
        return x


def read_data(args):
    data = TensorDataset(torch.zeros(1 << 16, 1))
    return data, TensorDataset(torch.zeros(64, 1))


def create_model(args, data):
    return Sleeper(args)


def create_optimizer(model, args):
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.step = lambda: time.sleep(args.optimizer)
    return optimizer


def batch_loss(model, batch, args):
    loss = model(batch[0]).sum()
    return loss, {"loss": loss, "count": len(batch[0])}


def training_order(data, rng):
    return range(len(data))


def create_loader(data, batches, args):
    return DataLoader(data, batch_size=None, sampler=batches)


def learning_rate(args, done):
    return args.learning_rate


def finish(model, data, args, device):
    """Nothing."""
