"""A table with regression: TensorDataset, SGD, a split that is drawn anew in each process."""

from torch.utils.data import TensorDataset, random_split

COLUMNS = "epoch train_loss val_loss val_mae seconds samples/s".split()
METRIC = "val_mae"
SAME_ON_RESUME = ("batch_size", "learning_rate", "precision", "seed")
MAX_GRAD_NORM = None


def parse_args():
    parser = argparse.ArgumentParser()
    return parse_run_args(parser, epochs=2, batch_size=24, learning_rate=0.1)


def read_data(args):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(600, 8, generator=generator)
    targets = features.sum(1, keepdim=True) + 0.1 * torch.randn(600, 1, generator=generator)
    return random_split(TensorDataset(features, targets), [0.8, 0.2])


def training_order(data, args, epoch):
    return np.random.default_rng((args.seed, epoch)).permutation(len(data))


def create_model(args, data):
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def create_optimizer(model, args):
    return torch.optim.SGD(model.parameters(), args.learning_rate, momentum=0.9)


def learning_rate(args, done):
    return args.learning_rate * (1 + math.cos(math.pi * done)) / 2


def batch_loss(model, batch, args):
    features, targets = batch
    predictions = model(features)
    loss = nn.functional.mse_loss(predictions, targets)
    errors = (predictions - targets).abs().sum()
    return loss, {"loss": loss * len(targets), "mae": errors, "count": len(targets)}


def more_columns(row):
    return {}


def finish(model, data, args, device):
    pass
