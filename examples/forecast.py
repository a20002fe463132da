"""Forecast of time series. A CSV file has a column of times, and one for each series."""

import pandas as pd


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--series", help="CSV file; made up if it is not given")
    add("--time", default="date", help="its column of ISO dates or numbers, to sort by")
    add("--window", type=int, default=96, help="moments that the model sees")
    add("--horizon", type=int, default=24, help="moments that it predicts")
    return parse_run_args(parser, epochs=2, batch_size=24)


def read_series(args):
    """Returns the series (moments, C) as float64."""
    if not args.series:  # two rhythms, and noise
        hours = np.arange(2000)[:, None] + np.arange(3)
        noise = np.random.default_rng(0).standard_normal(hours.shape)
        return np.sin(hours * 2 * np.pi / 24) + np.cos(hours * 2 * np.pi / 168) + 0.1 * noise
    table = pd.read_csv(args.series, index_col=False).dropna(axis=1, how="all")
    times = table.pop(args.time)
    if not pd.api.types.is_numeric_dtype(times):
        times = pd.to_datetime(times)
    table = table.iloc[times.argsort(kind="stable")]
    table = table.apply(pd.to_numeric, errors="coerce").astype(float)  # a word becomes NaN
    unusable = table.columns[~np.isfinite(table).all()]
    if len(unusable) > 0:
        sys.exit(f"{args.series}: cells that are blank or no number in {', '.join(unusable)}")
    return table.to_numpy(np.float64)


def read_data(args):
    """Returns windows (C, window + horizon). The last fifth of the time validates."""
    series = read_series(args)
    length = args.window + args.horizon
    start = len(series) * 4 // 5  # from here on, nothing is seen in training
    past = series[:start]
    deviations = past.std(0)
    deviations[past.min(0) == past.max(0)] = 1.0  # a constant series becomes 0
    series = torch.tensor((series - past.mean(0)) / deviations).float()
    return [TensorDataset(part.unfold(0, length, 1)) for part in (series[:start], series[start:])]


class Forecast(nn.Module):
    """A network on what a series differs from its last value. All series share it."""

    def __init__(self, args):
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(args.window, 128), nn.GELU(), nn.Linear(128, args.horizon)
        )

    def forward(self, past):  # (B, C, window)
        last = past[..., -1:]
        return last + self.network(past - last)  # (B, C, horizon)


def create_model(args, data):
    return Forecast(args)


def batch_loss(model, batch, args):
    """The rows' mae and naive are in standard deviations. naive: the last value, repeated."""
    (windows,) = batch
    past, future = windows[..., : args.window], windows[..., args.window :]
    predictions = model(past)
    loss = nn.functional.mse_loss(predictions, future)
    errors = (predictions - future).abs().mean((1, 2)).sum()
    naive = (past[..., -1:] - future).abs().mean((1, 2)).sum()
    sums = {"loss": loss * len(windows), "mae": errors, "naive": naive, "count": len(windows)}
    return loss, sums
