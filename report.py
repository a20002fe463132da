"""Compare training runs by their logs, and predict what more processes would do.

    python report.py runs/                            # logs in a folder, written with --log
    python report.py runs/ --out report               # also writes report.md, CSVs and pictures
    python report.py one.jsonl --predict link.json      # link.json is from allreduce.py --out
    python report.py one.jsonl --predict inside.json between.json --gpus_per_node 8

Runs with the same settings and different numbers of processes are compared. Strong scaling keeps
the global batch, weak scaling keeps the batch of a process. Figures are means over the processes
and over the epochs after the first. s is the time of an epoch in seconds. Speedup is the ratio of
samples/s to the run with the fewest processes, efficiency is speedup / ratio of processes. comm %
is the part of s that communication adds, hidden % the part of all communication that the backward
pass hides. R = compute / communication. Skew is the compute time of the slowest process minus that
of the fastest, in seconds. The serial fraction f of Amdahl's law, 1 / speedup = f + (1 - f) / N, is
fitted by least squares (after Karp and Flatt 1990).

The prediction (after Li et al. 2020, "PyTorch Distributed") starts from a step of one process.
Data, forward and backward pass shrink with the batch: in proportion or, with logs of several
batches, by linear interpolation (the slowest of runs with one batch). The optimizer's time stays.
The log of multigpu with one process tells the bytes of each bucket of gradients and when it is
ready. For singlegpu, buckets of 1 MiB and then 25 MiB are ready in proportion to their bytes. A
bucket waits for the one before. An all-reduce of n bytes takes N - 1 hops, each with the latency of
its link, and n x 2 (N - 1) / N / bandwidth, the smaller one over nodes. While it runs, the backward
pass is as slow as allreduce.py (--min_bytes 1048576) measured it. More processes pay if twice as
many are 1.5 times as fast. Not predicted: that processes of a node share its memory, and wait for
one that is late.
"""

import argparse
import itertools
import json
import math
import sys
import textwrap
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt

# The settings that compared runs have in common. Seed and epochs may differ.
SAME = (
    "script",
    "model",
    "dataset",
    "precision",
    "size",
    "parameters",
    "source",
    "target",
    "vocab_size",
    "d_model",
    "n_heads",
    "num_layers",
    "seq_len",
    "learning_rate",
    "dropout",
    "grad_accum_steps",
    "compile",
    "max_steps",
    "num_stages",
    "num_microbatches",
    "schedule",
)
WORDS = ["run", *SAME[:4], "comm_hook", "device", "threads"]
COUNTS = ["processes", "nodes", "batch_size", "parameters"]
COMPUTE = ["forward", "backward", "optimizer"]
PHASES = ["data", "forward", "backward", "bubble", "comm", "optimizer", "eval", "save"]
NUMBERS = [*COUNTS, "epoch", "rank", "seconds", "samples/s", *PHASES, "comm_total"]
METRICS = ["val_acc", "val_ppl", "val_loss"]  # quality is the first that a script logs
SCALING = ["speedup", "efficiency", "comm %", "hidden %", "R"]
MEASURED = ["processes", "nodes", "batch", "s", "samples/s", *SCALING, "skew"]
PREDICTED = ["processes", "batch each", "ms a step", *SCALING]
LINK = {
    "processes": (2, 1e9),
    "latency_s": (0, 1e9),
    "bandwidth_bytes_per_s": (1, 1e30),
    "compute_rate": (0.01, 1),
}  # lowest and highest
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes of gradients that DDP sends at once


def parse_row(line):
    """Returns the row of this line. A torn line may stand before it. {} if it is none."""
    try:
        row = json.loads(line[line.rfind('{"') :])
    except (ValueError, RecursionError):
        return {}
    return {"bubble": 0.0} | row if isinstance(row, dict) else {}


def is_whole(row):
    """Tells whether the row has all words and numbers that a report needs."""
    numbers = [row.get(name) for name in NUMBERS]
    if not all(isinstance(number, int | float) and 0 <= number < 1e12 for number in numbers):
        return False
    if not all(isinstance(row.get(name), str | int) for name in WORDS):
        return False
    if not all(isinstance(row.get(name, math.nan), int | float) for name in METRICS):
        return False
    training = row["seconds"] - row["eval"] - row["save"]
    return min(row[name] for name in COUNTS) >= 1 and min(training, row["samples/s"]) > 1e-9


def read_logs(paths):
    """Returns the whole rows of all logs, and notes on what was left out."""
    rows, notes, files = [], [], []
    for path in paths:
        files += sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    for file in files:
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError as error:
            notes.append(f"{file}: {error}")
            continue
        found = list(filter(is_whole, map(parse_row, lines)))
        if len(found) < len(lines):
            notes.append(f"{file}: {len(lines) - len(found)} damaged row(s) left out")
        elif not lines:
            notes.append(f"{file}: no rows")
        rows += found
    frame = pd.DataFrame(rows, dtype=object)  # object: whole numbers stay whole
    if rows:
        frame[NUMBERS] = frame[NUMBERS].astype(float)
    return frame, notes


def runs_of(rows, warmup, notes):
    """Returns a dict for each run: its settings, and means over processes and later epochs."""
    runs, names = [], ["run", "script", "processes", "nodes"]
    rows = rows.drop_duplicates([*names, "epoch", "rank"], keep="last")
    whole = rows.groupby([*names, "epoch"])["rank"].transform("count") == rows["processes"]
    if not whole.all():
        notes.append(f"{(~whole).sum()} row(s) left out: not all processes logged their epoch")
    for _, run in rows[whole].groupby(names, sort=False):
        later = run[run["epoch"] >= min(run["epoch"].min() + warmup, run["epoch"].max())]
        means = later[["seconds", "samples/s", *PHASES, "comm_total"]].mean().to_dict()
        comm_total = means["comm_total"] or math.nan  # 0 if there is one process
        compute = later[COMPUTE].sum(axis=1).groupby(later["epoch"])
        last = run.iloc[-1].dropna().to_dict()
        metric = next((metric for metric in METRICS if metric in last), "val_loss")
        runs.append(
            last
            | means
            | {name: int(last[name]) for name in COUNTS}
            | {
                "script": last["script"].split("/")[-1],
                "batch": int(last["batch_size"]),
                "s": means["seconds"],
                "comm %": 100 * means["comm"] / means["seconds"],
                "hidden %": max(100 - 100 * means["comm"] / comm_total, 0.0),
                "R": sum(means[phase] for phase in COMPUTE) / comm_total,
                "skew": (compute.max() - compute.min()).mean(),
                "metric": metric,
                metric: last.get(metric, math.nan),
                "epoch_times": run.groupby("epoch")["seconds"].mean(),
            }
        )
    return runs


def settings_of(run):
    """Returns the settings that compared runs have in common, as words."""
    return {name: str(run.get(name, "")) for name in SAME}


def groups_of(runs):
    """Returns tables of the runs that differ in the number of processes alone, with speedups."""
    groups, found = {}, []
    for run in runs:
        same = tuple(settings_of(run).values())
        groups.setdefault(("strong", run["batch"], same), []).append(run)
        groups.setdefault(("weak", run["batch"] / run["processes"], same), []).append(run)
    for (scaling, batch, same), alike in sorted(groups.items(), key=lambda item: item[0]):
        for hook in sorted({run["comm_hook"] for run in alike if run["processes"] > 1}):
            group = pd.DataFrame(
                run for run in alike if run["processes"] == 1 or run["comm_hook"] == hook
            )
            group = group.sort_values(["processes", "nodes"], kind="stable", ignore_index=True)
            ratio = group["processes"] / group["processes"].min()
            if ratio.max() == 1:
                continue
            group["speedup"] = group["samples/s"] / group["samples/s"][ratio == 1].mean()
            group["efficiency"] = group["speedup"] / ratio
            x, y = 1 - 1 / ratio, 1 / group["speedup"] - 1 / ratio  # Amdahl: y = serial * x
            group["serial"] = (x * y).sum() / (x * x).sum()
            kept = "global batch" if scaling == "strong" else "batch of a process"
            group["group"] = f"{scaling} scaling, {', '.join(same[:4])}, {kept} {batch:g}"
            found.append(group)
    return found


def cell(value):
    """Returns words as they are, and a number with three digits or more."""
    if isinstance(value, (int, str)):
        return str(value)
    decimals = sum(abs(value) < limit for limit in (1, 10, 100))
    return f"{value:.{decimals}f}" if math.isfinite(value) else "-"


def table(columns, rows):
    """Returns these columns of the rows as a Markdown table."""
    lines = [[cell(row[name]) for name in columns] for row in rows]
    widths = [max(2, *map(len, column)) for column in zip(columns, *lines)]
    lines = [columns, ["-" * (width - 1) + ":" for width in widths], *lines]
    return "\n".join("| " + " | ".join(map(str.rjust, line, widths)) + " |" for line in lines)


def compare(group):
    """Returns the lines on a group."""
    first = group.iloc[0]
    facts = [
        f"{name} {value}"
        for name, value in settings_of(first).items()
        if name not in SAME[:4] and value not in ("", "0", "0.0", "False")
    ]
    for name in ("comm_hook", "device", "threads"):
        facts.append(f"{name} {' / '.join(map(str, group[name].unique()))}")
    lines = [f"## {first['group']}", "", *textwrap.wrap(", ".join(facts), 100), ""]
    lines += [table([*MEASURED, first["metric"]], group.to_dict("records")), ""]
    if first["group"].startswith("strong"):
        bound = f"at most {1 / first['serial']:.3g}" if first["serial"] > 0 else "any number of"
        lines += [
            f"Serial fraction {first['serial']:.3f}: {bound} times as fast, however many "
            "processes.",
            "",
        ]
    return lines


def draw_group(group, path):
    """Draws the speedup, where the time goes, and the epoch times. `path` begins their names."""
    group = group.set_index("processes")
    title, serial = group["group"].iloc[0], max(0.0, group["serial"].iloc[0])
    speedup = pd.DataFrame({"ideal": group["speedup"] / group["efficiency"]})
    if title.startswith("strong"):
        speedup["Amdahl's law"] = 1 / (serial + (1 - serial) / speedup["ideal"])
    speedup["measured"] = group["speedup"]
    phases = group[PHASES].loc[:, group[PHASES].any()]
    times = pd.DataFrame(list(group["epoch_times"]), group.index).T
    styles = {"ideal": "--", "Amdahl's law": "-", "measured": "o"}
    axes = speedup.plot(title=title, ylabel="speedup", style=styles, xticks=group.index, ylim=0)
    axes.figure.savefig(f"{path}_speedup.png")
    axes = phases.plot.bar(title=title, ylabel="s an epoch", stacked=True, rot=0)
    axes.figure.savefig(f"{path}_phases.png")
    axes = times.plot(title=title, xlabel="epoch", ylabel="s an epoch", marker="o", ylim=0)
    axes.figure.savefig(f"{path}_epoch_times.png")
    plt.close("all")


def read_links(paths):
    """Returns what allreduce.py wrote of each link: a dict with the names of LINK."""
    links = []
    for path in paths:
        try:
            written = json.loads(Path(path).read_text())
            links.append({name: float(written[name]) for name in LINK})
            for name, (lowest, highest) in LINK.items():
                if not lowest <= links[-1][name] <= highest:
                    raise ValueError(f"{name} is {links[-1][name]}")
        except Exception as error:  # a damaged or foreign file can fail anywhere
            sys.exit(f"cannot read the link {path}: {error!r}")
    return links


def step_of(run, runs):
    """Returns what a prediction needs of a run of one process, and of those like it in `runs`."""
    phases = {0: dict.fromkeys(("data", *COMPUTE), 0.0)}  # seconds of a step for each batch
    for other in [*sorted(runs, key=lambda other: -other["samples/s"]), run]:  # the last one counts
        if settings_of(other) == settings_of(run) and other["device"] == run["device"]:
            steps = other["samples/s"] / other["batch"]  # in a second
            steps *= other["seconds"] - other["eval"] - other["save"]
            phases[other["batch"]] = {name: other[name] / steps for name in ("data", *COMPUTE)}
    phases = pd.DataFrame(phases).T.sort_index()
    try:  # [bytes, seconds before the end of the backward pass] of each bucket
        sizes, leads = np.array(run["buckets"], float).T
        ready = 1 - leads / phases["backward"][run["batch"]]
    except (KeyError, TypeError, ValueError):  # a run of singlegpu, which has no buckets
        total = 4 * run["parameters"]
        ends = np.array([0, *range(FIRST_BUCKET, total, BUCKET), total])
        sizes, ready = np.diff(ends), ends[1:] / total
    return {"batch": run["batch"], "phases": phases, "bytes": sizes, "ready": ready.clip(0, 1)}


def all_reduce_seconds(size, processes, links, gpus_per_node):
    """Returns the seconds of an all-reduce of `size` bytes. Links: in nodes, between nodes."""
    nodes = math.ceil(processes / gpus_per_node) if len(links) == 2 else 1
    hops = [link["latency_s"] / (link["processes"] - 1) for link in links]
    latency = hops[0] * (processes - nodes) + hops[-1] * (nodes - 1)
    bandwidth = min(link["bandwidth_bytes_per_s"] for link in links[:nodes])
    return latency + size * 2 * (processes - 1) / processes / bandwidth


def predict_step(step, processes, scaling, links, gpus_per_node):
    """Returns the row of the prediction for so many processes, without the speedup."""
    batch = step["batch"] / (processes if scaling == "strong" else 1)
    data, forward, backward = (
        np.interp(batch, step["phases"].index, step["phases"][name])
        for name in ("data", "forward", "backward")
    )
    optimizer = step["phases"]["optimizer"][step["batch"]]
    all_reduces = all_reduce_seconds(step["bytes"], processes, links, gpus_per_node)
    used = links if processes > gpus_per_node else links[:1]  # inside a node, its own link alone
    rate = min(link["compute_rate"] for link in used)
    now = sent = 0.0  # seconds after the backward pass began: computed, and sent, so far
    for work, seconds in zip(np.diff(step["ready"], prepend=0) * backward, all_reduces):
        beside = min(max(0.0, sent - now), work / rate)  # seconds beside an all-reduce
        now += beside + work - beside * rate
        sent = max(sent, now) + seconds
    comm, comm_total = sent - now, sum(all_reduces) or math.nan
    compute = forward + now + optimizer
    seconds = data + compute + comm
    return {
        "processes": processes,
        "batch each": batch,
        "ms a step": 1000 * seconds,
        "samples/s": processes * batch / seconds,
        "comm %": 100 * comm / seconds,
        "hidden %": 100 * (1 - comm / comm_total),
        "R": compute / comm_total,
    }


def predict(step, scaling, links, gpus_per_node):
    """Returns the rows of the prediction, and one sentence on how far it pays."""
    first, *rows = (
        predict_step(step, 2**power, scaling, links, gpus_per_node)
        for power in range(11)
        if scaling == "weak" or 2**power <= step["batch"]
    )
    half, verdict = 1.0, ""
    for row in rows:
        processes, row["speedup"] = row["processes"], row["samples/s"] / first["samples/s"]
        row["efficiency"] = row["speedup"] / processes
        if row["speedup"] < 1.5 * half and not verdict:
            verdict = (
                f"From {processes} processes on it stops paying: they are only "
                f"{row['speedup'] / half:.2f} times as fast as {processes // 2}."
            )
        half = row["speedup"]
    return rows, verdict or "It pays to the end of the table: twice as many are 1.5 times as fast."


def write_all(groups, predictions, lines, out):
    """Writes the lines, the tables as CSV, and the pictures."""
    (out / "tables").mkdir(parents=True, exist_ok=True)
    (out / "report.md").write_text("\n".join(lines) + "\n")
    columns = ["group", *MEASURED, *METRICS, "serial", *PHASES]
    measured = pd.concat([pd.DataFrame(), *groups]).reindex(columns=columns)
    predicted = pd.DataFrame(predictions, columns=["group", *PREDICTED])
    measured.to_csv(out / "tables/measured.csv", index=False)
    predicted.to_csv(out / "tables/predicted.csv", index=False)
    for number, group in enumerate(groups, start=1):
        draw_group(group, out / f"group{number}")
    figure, axes = plt.subplots()
    line = np.geomspace(0.1, 100)
    for count in sorted({2, *measured["processes"]} - {1}):  # T / N + T / N / R for T seconds
        axes.loglog(line, count * line / (1 + line), label=f"{count} processes, nothing hidden")
    for frame, style in (measured, "o"), (predicted, "x:"):
        for title, rows in frame.groupby("group", sort=False):
            axes.plot(rows["R"], rows["speedup"], style, label=title)
    axes.set(xlabel="R = compute / communication", ylabel="speedup")
    axes.legend(fontsize="x-small")
    figure.savefig(out / "speedup_over_r.png")


def main():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("paths", nargs="+", type=Path, help="logs (.jsonl), or folders of them")
    add("--out", type=Path, metavar="FOLDER", help="write report.md, CSVs and pictures there")
    add("--warmup", type=int, default=1, help="first epochs of a run that do not count")
    add(
        "--predict",
        nargs="+",
        default=[],
        metavar="LINK.json",
        help="files of allreduce.py: one for all processes, or inside and between nodes",
    )
    add("--gpus_per_node", type=int, default=0, help="processes of a node, for two link files")
    args = parser.parse_args()
    if len(args.predict) > 2 or len(args.predict) == 2 and args.gpus_per_node < 1:
        parser.error("--predict takes one link file, or two of them with --gpus_per_node")
    rows, notes = read_logs(args.paths)
    if rows.empty:
        sys.exit("no rows to report: " + "; ".join(notes))
    runs = runs_of(rows, args.warmup, notes)
    groups, links = groups_of(runs), read_links(args.predict)
    singles = [run for run in runs if run["processes"] == 1]
    if links and not singles:
        sys.exit("--predict needs the log of a run of one process")
    lines, predictions = [line for group in groups for line in compare(group)], []
    names = ["run", "script", "processes", "nodes"]
    compared = {tuple(row) for group in groups for row in group[names].to_numpy()}
    alone = [run for run in runs if tuple(run[name] for name in names) not in compared]
    if alone and not links:
        columns = [*SAME[:4], "processes", "batch", "s", "samples/s", "comm %", "R"]
        lines += ["## not compared, because no other run differs in the processes alone", ""]
        lines += [table(columns, alone), ""]
    for run, scaling in itertools.product(singles if links else [], ("strong", "weak")):
        name = f"predicted {scaling} scaling, {run['script']}, {run['model']}, "
        name += f"batch {run['batch']}, run {run['run']}"
        found, verdict = predict(step_of(run, singles), scaling, links, args.gpus_per_node)
        predictions += [row | {"group": name} for row in found]
        lines += [f"## {name}", "", table(PREDICTED, found), "", verdict, ""]
    lines += [f"note: {note}" for note in notes]
    print("\n".join(lines))
    if args.out:
        write_all(groups, predictions, lines, args.out)
        rows.to_csv(args.out / "epochs.csv", index=False)


if __name__ == "__main__":
    main()
