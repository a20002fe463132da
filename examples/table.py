"""Regression from a CSV file. Its last column is the target, its first line has the names."""

import pandas as pd
from torch.utils.data import Subset, random_split


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--table", default="table.csv", help="file of numbers, with commas between")
    return parse_run_args(parser, epochs=2, batch_size=24, learning_rate=0.1)


def read_data(args):
    """Returns two parts of the table, drawn at random: the same parts in all processes."""
    table = pd.read_csv(args.table, index_col=False).dropna(axis=1, how="all")
    table = table.drop(columns="Unnamed: 0", errors="ignore")  # row numbers of to_csv()
    table = table.dropna(subset=table.columns[-1])  # without a target
    table = table.apply(pd.to_numeric, errors="coerce").astype(float)  # a word becomes NaN
    unusable = table.columns[~np.isfinite(table).all()]
    if len(unusable) > 0 or len(table.columns) < 2:
        sys.exit(f"{args.table}: no feature, or blanks or words in {', '.join(unusable)}")
    table = torch.tensor(table.to_numpy(np.float64))
    parts = random_split(table, [0.8, 0.2])
    rows = table[parts[0].indices]
    deviations = rows.std(0)
    deviations[rows.amin(0) == rows.amax(0)] = 1.0  # a constant column becomes 0
    table = ((table - rows.mean(0)) / deviations).float()  # errors are in standard deviations
    data = TensorDataset(table[:, :-1], table[:, -1:])
    return [Subset(data, part.indices) for part in parts]


def training_order(data, rng):
    return rng.permutation(len(data))


def create_loader(data, batches, args):
    return DataLoader(data, batch_sampler=batches, num_workers=args.num_workers)


def create_model(args, data):
    features, _ = data[0]
    return nn.Sequential(nn.Linear(len(features), 16), nn.ReLU(), nn.Linear(16, 1))


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


def finish(model, data, args, device):
    """Called by rank 0 at the end. There is nothing to do."""
