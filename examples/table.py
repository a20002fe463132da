"""Regression from a CSV file. Its last column is the target, its first line has the names."""

import warnings

import pandas as pd
from torch.utils.data import Subset, TensorDataset, random_split


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--table", default="table.csv", help="file of numbers, with commas between")
    return parse_run_args(parser, epochs=2, batch_size=24, learning_rate=0.1)


def read_data(args):
    """Returns two parts of the table, drawn at random: the same parts in all processes."""
    with warnings.catch_warnings(action="error", category=pd.errors.ParserWarning):
        table = pd.read_csv(args.table, index_col=False)
    if pd.to_numeric(table.columns, errors="coerce").notna().all():
        sys.exit(f"{args.table}: its first line has numbers, not names")
    is_empty = table.columns.str.startswith("Unnamed: ") & table.isna().all()  # a comma at the end
    table = table.loc[:, ~is_empty & (table.columns != "Unnamed: 0")]  # row numbers of to_csv()
    target = table.columns[-1]
    has_target = table[target].notna()
    if not has_target.any() or len(table.columns) < 2:
        sys.exit(f"{args.table} has no feature, or no row with a {target}")
    if not has_target.all():
        print(f"{(~has_target).sum()} of {len(table)} rows have no {target}: they are left out")
    table = table[has_target].apply(pd.to_numeric, errors="coerce").astype(float)  # words: NaN
    unusable = table.columns[~np.isfinite(table).all()]
    if len(unusable) > 0:
        sys.exit(f"{args.table}: cells that are blank or no number in {', '.join(unusable)}")
    table = torch.tensor(table.to_numpy(np.float64))
    parts = random_split(table, [0.8, 0.2])
    rows = table[parts[0].indices]
    deviations = rows.std(0)
    deviations[rows.amin(0) == rows.amax(0)] = 1.0  # a constant column becomes 0
    table = ((table - rows.mean(0)) / deviations).float()  # errors are in standard deviations
    data = TensorDataset(table[:, :-1], table[:, -1:])
    return [Subset(data, part.indices) for part in parts]


def training_order(data, args, epoch):
    return np.random.permutation(len(data))


def create_model(args, data):
    features, _ = data[0]
    return nn.Sequential(nn.Linear(len(features), 16), nn.ReLU(), nn.Linear(16, 1))


def create_optimizer(model, args):
    return torch.optim.SGD(model.parameters(), args.learning_rate, momentum=0.9)


def learning_rate_factor(args, done):
    return (1 + math.cos(math.pi * done)) / 2


def batch_loss(model, batch, args):
    features, targets = batch
    predictions = model(features)
    loss = nn.functional.mse_loss(predictions, targets)
    errors = (predictions - targets).abs().sum()
    return loss, {"loss": loss * len(targets), "mae": errors, "count": len(targets)}


def finish(model, data, args, device):
    """Called by one process at the end of the training. There is nothing to do."""
