"""An exponential moving average (EMA) of the weights, which is validated in their place.

The average is a part of the model, so that it is saved, resumed and compared between processes. One
that create_optimizer makes would be lost at a resume: it would start from weights not yet loaded.
"""

from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class WithAverage(nn.Module):
    """A network, and the average of its weights after each step."""

    def __init__(self, network, decay):
        super().__init__()
        self.network = network
        self.average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(decay))
        self.average.requires_grad_(False)

    def forward(self, images):
        return self.network(images) if self.training else self.average(images)


def create_model(args, data):
    channels, height, width = data[0][0].shape
    layers = [nn.Flatten(), nn.Linear(channels * height * width, 512), nn.ReLU()]
    layers.append(nn.Linear(512, len(data.classes)))
    return WithAverage(nn.Sequential(*layers), decay=0.99)


def create_optimizer(model, args):
    optimizer = torch.optim.AdamW(model.network.parameters(), args.learning_rate, fused=True)
    update = model.average.update_parameters
    optimizer.register_step_post_hook(lambda *_: update(model.network))
    return optimizer
