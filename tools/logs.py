"""What report.py and predict.py share: they read logs, and write columns, tables and pictures.

A log is what a training script writes with --log, and timing.py with log=. At each validation it
gets a line of JSON for each process: a row, a dictionary {column: value}. The times in a row are
seconds since the row before. A row counts once, however many of the files have it.
"""

import argparse
import itertools
import json
import math
import sys
from pathlib import Path

import pandas as pd

# How a model and a batch are split, which does not change the loss.
LAUNCH = "num_stages shard_size grad_accum_steps num_microbatches schedule".split()
LAUNCH += ["checkpoint_activations", "tensor_size"]
# All of these together identify a run. `run` alone does not: a copied snapshot keeps it. From
# comm_hook on, a resumed run may have others.
RUN = "run snapshot script processes nodes comm_hook compile num_workers".split() + LAUNCH
PHASES = ["data", "forward", "backward", "bubble", "comm", "optimizer"]  # of a step
COLLECTIVES = ["all-reduce", "all-gather", "reduce-scatter", "sum"]  # what processes do together

# What is taken where a script does not log these columns.
DEFAULTS = {"snapshot": None, "comm_hook": "none", "compile": False, "num_workers": 0}
DEFAULTS |= {"stages": [1], "nodes": 1, "threads": 1, "epochs": 1, "eval_every": 0}
DEFAULTS |= dict.fromkeys(LAUNCH, "-")
DEFAULTS |= dict.fromkeys(["bubble", "comm", "comm_total", "sum_total"], 0)
DEFAULTS |= dict.fromkeys(["warmup", "eval", "save"], 0)
DEFAULTS |= dict.fromkeys(["peak_MB", "val_loss", "seconds", "samples/s"], math.nan)
DEFAULTS["last_step"] = None

# What a row must have, and the least value of a number. Of some rows only.
TEXTS = ["run", "script", "host", "device"]
COUNTS = {"step": 0, "rank": 0, "steps": 0, "parameters": 0, "processes": 1, "nodes": 1}
COUNTS |= {"batch_size": 1, "steps_per_epoch": 1, "eval_every": 0}
TIMES = [*PHASES, "comm_total", "sum_total", "warmup", "eval", "save"]

# Colours that colour-blind people can tell apart (Okabe and Ito 2008), the same in all pictures.
COLOURS = {"data": "#E69F00", "forward": "#56B4E9", "backward": "#0072B2", "bubble": "#BBBBBB"}
COLOURS |= {"comm": "#D55E00", "optimizer": "#009E73"}
STYLE = {"figure.figsize": (6.4, 3.6), "figure.dpi": 125, "figure.constrained_layout.use": True}
STYLE |= {"font.size": 12, "figure.titlesize": 12, "legend.frameon": False}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "hatch.linewidth": 0.8}


def read_logs(paths):
    """Returns a table of the rows of all logs, by step. SystemExit: one of them is wrong."""
    rows = {}  # by their text: a row that stands in two files counts once
    repeated = []
    for file in files_of(paths):
        count = 0
        for place, line in lines_in(file):
            row = row_of(line, place)
            count += 1
            text = json.dumps(row, sort_keys=True, default=str)
            if text in rows:
                repeated.append(place)
            rows.setdefault(text, row | {"file": file})
        if count == 0:
            sys.exit(f"{file} has no row: did its run reach a validation?")
    if repeated:
        warn(f"{len(repeated)} rows are there twice and count once, the first in {repeated[0]}")
    return pd.DataFrame(rows.values()).sort_values("step", kind="stable")


def warn(message):
    print(f"warning: {message}", file=sys.stderr)


def files_of(paths):
    """Returns the logs that these paths name. A folder stands for all logs in it."""
    files = []
    for path in paths:
        found = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not found:
            sys.exit(f"{path} is a folder without a log: none of its files ends in .jsonl")
        files += found
    return list(dict.fromkeys(files))


def lines_in(file):
    """Yields (place, line) of a file. A last line that was cut off is left out with a warning."""
    try:
        text = file.read_text(errors="replace")
    except OSError as error:
        sys.exit(f"{file} cannot be read: {error.strerror}")
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        place = f"{file}, line {number}"
        is_cut = number == len(lines) and line and not is_json(line)  # it has no end of line
        if is_cut:
            warn(f"{place} was cut off, and is left out")
        elif line.strip():
            yield place, line


def is_json(line):
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def row_of(line, place):
    """Returns the row in this line of a log, with what titles and comparisons need."""
    if not is_json(line):
        sys.exit(f"{place} is not JSON: {line[:40]}")
    row = json.loads(line)
    settings = row.get("settings") if isinstance(row, dict) else None
    if not isinstance(settings, dict):
        sys.exit(f"{place} is no row of a log: it has no settings")
    # A row also holds the flags. Without them, a flag cannot stand for a column of its name.
    row = {name: value for name, value in row.items() if settings.get(name) != value}
    row = DEFAULTS | row
    row["settings"] = settings
    if "batch_size" in settings:
        row["batch_size"] = settings["batch_size"]
    problem = problem_of(row)
    if problem:
        sys.exit(f"{place}: {problem}")
    row["epoch"] = row["step"] / row["steps_per_epoch"]
    row["of"] = str([row[name] for name in RUN])
    stages = 1 if row["device"] == "CPU" else len(row["stages"])  # of hybrid/images.py
    row["devices"] = row["processes"] * stages
    return row | titles_of(row)


def titles_of(row):
    """Returns the task, a title, and what compared runs have in common."""
    settings = row["settings"]
    script = Path(row["script"]).name
    for split in ("_fsdp", "_pipeline", "_tensor"):
        script = script.replace(split, "")
    titles = [str(settings[name]) for name in ("model", "dataset", "precision") if name in settings]
    same = {name: settings[name] for name in settings if name not in ("batch_size", "seed")}
    same |= {name: row[name] for name in ("device", "parameters", "compile")}
    same["script"] = script
    same = tuple(sorted((name, str(value)) for name, value in same.items()))
    return {"task": ", ".join([script, *titles]), "same": same}


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def problem_of(row):
    """Returns what is wrong with a row, or nothing."""
    for name in TEXTS:
        if not isinstance(row.get(name), str):
            return f"{name} is no text but {row.get(name)}"
    least = COUNTS | dict.fromkeys(TIMES, 0)
    for name in least:
        value = row.get(name)
        if not is_number(value) or not least[name] <= value < math.inf:
            return f"{name} is no number of {least[name]} or more but {value}"
    if row["rank"] >= row["processes"]:
        return f"rank {row['rank']} is none of {row['processes']} processes"
    if not isinstance(row["stages"], list) or not row["stages"]:
        return f"stages is no list but {row['stages']}"
    for span in row["last_step"] or ():
        if not is_span(span):
            return f"last_step has {span}, and each part is [name, start, end, bytes]"
    return None


def is_span(span):
    """Whether this is [name, start, end, bytes], as last_step holds them."""
    if not isinstance(span, list) or len(span) != 4 or not isinstance(span[0], str):
        return False
    return all(map(is_number, span[1:])) and span[1] <= span[2]


def with_speedups(runs):
    """Returns the table of runs with their speedups."""
    ratio = runs["devices"] / runs["devices"].min()
    fewest = runs["samples/s"][ratio == 1].max()
    speedup = runs["samples/s"] / fewest
    columns = {"speedup (x)": speedup, "efficiency (%)": 100 * speedup / ratio}
    return runs.assign(ratio=ratio, **columns)


def count_of(number, runs):
    """Returns words such as "1 process" or "4 GPUs"."""
    is_one_each = (runs["devices"] == runs["processes"]).all()  # no stages of hybrid/images.py
    one, several = ("process", "processes") if is_one_each else ("GPU", "GPUs")
    return f"{number} {one if number == 1 else several}"


def pays_up_to(runs):
    """Returns up to how many devices it pays, and a sentence on it.

    More pay if twice as many are 1.5 times as fast, and 4 times as many 2.25 times.
    """
    speedups = runs.groupby("devices")["speedup (x)"].max()  # the fastest with a number counts
    for (few, slow), (many, fast) in itertools.pairwise(speedups.items()):
        needed = 1.5 ** math.log2(many / few)
        if fast / slow < needed:
            gain = f"{many} are {fast / slow:.2f} times as fast as {few}"
            rule = f"(rule: {needed:.2f} or more pays)"
            return few, f"It pays up to {count_of(few, runs)}: {gain} {rule}"
    most = speedups.index.max()
    return most, f"It pays up to {count_of(most, runs)} (more were not tried)"


def cell(value):
    """Returns words and whole numbers as they are, other numbers with at least three digits."""
    if not isinstance(value, float):
        return str(value) or "-"
    if not math.isfinite(value):
        return "-"
    return f"{round(value, 9):#.3g}" if abs(value) < 99.9 else f"{value:.0f}"


def table(columns, rows):
    """Returns these columns of the rows as a Markdown table, without those that are empty."""
    cells = pd.DataFrame(rows).reindex(columns=columns).map(cell)
    cells = cells.loc[:, (cells != "-").any()]
    lines = [list(cells), *cells.to_numpy().tolist()]
    widths = [max(2, *map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * (width - 1) + ":" for width in widths])
    return "\n".join(f"| {' | '.join(map(str.rjust, line, widths))} |" for line in lines)


def output_folder(text):
    """A type for argparse: a folder that is there, or that can be made."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no folder")
    return path


def save(figure, sentence, path, loc="outside lower center", **legend):
    """Writes the figure, with a sentence above its axes and a legend outside of them."""
    figure.suptitle(sentence, x=0.01, horizontalalignment="left")
    figure.legend(loc=loc, **legend)
    figure.savefig(path)
