"""Speedup and efficiency from the rows that the scripts write with --log.

    python report.py runs/demo.csv
    python report.py runs/           # every .csv in the folder

Runs are compared when they share the model, the data set, the precision, the accumulation steps and the global batch
(strong scaling) or the batch per process (weak scaling). The baseline of a group is its run with the fewest processes.
Speedup is the ratio of samples/s, evaluation and saving left out; efficiency is speedup over the ratio of processes.
The means leave the first epoch, which warms up, out. R = compute time over communication time.
"""
import argparse
import csv
import sys
from collections import defaultdict
from pathlib import Path

COLUMNS = ("model", "scaling", "processes", "nodes", "batch_size", "comm_hook", "epoch time", "samples/s", "speedup",
           "efficiency", "comm", "comm_total", "R", "skew")


def read_rows(paths):
    """The rows of all CSV files, those of a crashed line left out."""
    files = [file for path in paths for file in (sorted(path.glob("*.csv")) if path.is_dir() else [path])]
    if not files:
        sys.exit(f"report.py: error: no .csv file in {' '.join(map(str, paths))}")
    rows = []
    for file in files:
        try:
            with open(file, newline="") as lines:
                rows += [row for row in csv.DictReader(lines) if row.get("skew")]
        except OSError as error:
            sys.exit(f"report.py: error: cannot read {file}: {error.strerror}")
    return rows


def summarize(rows):
    """The means of a run over its processes and over its epochs but the first."""
    later = [row for row in rows if row["epoch"] != "0"] or rows
    mean = {name: sum(float(row[name]) for row in later) / len(later)
            for name in ("time", "samples/s", "comm", "comm_total", "R", "skew")}
    return rows[0] | mean | {name: int(rows[0][name]) for name in ("processes", "nodes", "batch_size")}


def compare(runs):
    """The groups' tables of runs, strong scaling first: yields a dict of COLUMNS for each run."""
    for scaling in ("strong", "weak"):
        groups = defaultdict(list)
        for run in runs:
            batch = run["batch_size"] if scaling == "strong" else run["batch_size"] / run["processes"]
            settings = ("model", "seq_len", "dataset", "precision", "grad_accum_steps", "compile", "threads", "device")
            groups[tuple(run.get(name) for name in settings), batch].append(run)
        for group in groups.values():
            group.sort(key=lambda run: run["processes"])
            base = group[0]
            if base["processes"] == group[-1]["processes"]:
                continue
            for run in group:
                speedup = run["samples/s"] / base["samples/s"]
                yield run | {"scaling": scaling, "epoch time": run["time"], "speedup": speedup,
                             "efficiency": speedup * base["processes"] / run["processes"]}


def main():
    parser = argparse.ArgumentParser(description="Speedup and efficiency from the rows that --log wrote.")
    parser.add_argument("paths", nargs="+", type=Path, help="CSV files, or folders of them")
    by_run = defaultdict(list)
    for row in read_rows(parser.parse_args().paths):
        by_run[row["run"]].append(row)
    compared = list(compare([summarize(rows) for rows in by_run.values()]))
    if not compared:
        sys.exit("report.py: error: no two runs with different numbers of processes and otherwise equal settings")
    print("|", " | ".join(COLUMNS), "|\n|" + " --- |" * len(COLUMNS))
    for run in compared:
        cells = (f"{run[name]:.4g}" if isinstance(run[name], float) else str(run[name]) for name in COLUMNS)
        print("|", " | ".join(cell.replace("nan", "-") for cell in cells), "|")


if __name__ == "__main__":
    main()
