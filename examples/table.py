"""Regression from a CSV file. Its last column is the target, its first line has the names."""

import pandas as pd
from torch.utils.data import random_split


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--table", default="table.csv", help="file of numbers, with commas between")
    return parse_run_args(parser, epochs=20, batch_size=24, learning_rate=0.01)


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
    train, val = [table[part.indices] for part in random_split(table, [0.8, 0.2])]
    mean, deviation = train.mean(0), train.std(0)  # errors are in standard deviations
    deviation[train.amin(0) == train.amax(0)] = 1.0  # a constant column becomes 0
    parts = [((part - mean) / deviation).float() for part in (train, val)]
    return [TensorDataset(part[:, :-1], part[:, -1:]) for part in parts]


def create_model(args, data):
    features, _ = data[0]
    return nn.Sequential(nn.Linear(len(features), 16), nn.ReLU(), nn.Linear(16, 1))


def batch_loss(model, batch, args):
    features, targets = batch
    predictions = model(features)
    loss = nn.functional.mse_loss(predictions, targets)
    errors = (predictions - targets).abs().sum()
    return loss, {"loss": loss * len(targets), "mae": errors, "count": len(targets)}
