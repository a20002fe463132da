"""Compare training runs by their logs, and predict what more processes would do.

    python report.py runs/                            # logs in a folder, written with --log
    python report.py runs/ --out report               # also writes report.md, CSVs and pictures
    python report.py one.jsonl --predict link.json    # link.json is from allreduce.py --out
    python report.py one.jsonl --predict inside.json between.json --gpus_per_node 8
    python report.py one.jsonl --predict 2nodes.json 4nodes.json      # measured at several N
    python report.py one.jsonl --predict link.json --noise noise.json # of singlegpu/noise_scale.py

The report compares runs of a task that have the same settings and different numbers of processes N,
however they are launched: in stages, in shards, in micro-batches. Strong scaling keeps the global
batch, weak scaling keeps the batch of a process. Numbers are means over the processes and, if there
are several, the epochs after the first. - is what is not known.

    seconds       wall time of an epoch, with its evaluation and its snapshots
    samples/s     speed of the training alone
    speedup       samples/s divided by those of the fastest run with the fewest processes
    efficiency    speedup divided by how many times as many processes there are
    device-hours  of an epoch: devices x seconds / 3600
    comm %        exposed communication as a share of the training time
    hidden %      share of the communication that goes on during the backward pass
    sending       seconds of communication in the process that comes last: it waits for no other
    waiting       mean seconds of communication over all processes, minus sending
    late rank     the process that comes last, on the node late host
    R             compute / sending, where compute is forward, backward and optimizer
    skew          seconds of compute in the slowest process, minus those in the fastest
    peak_MB       memory of the process that has held the most

More processes pay if twice as many are 1.5 times as fast, and 4 times as many 2.25 times. Amdahl's
serial fraction f, 1 / speedup = f + (1 - f) / N, is a least-squares fit (Karp and Flatt 1990).

The prediction (after Li et al. 2020, "PyTorch Distributed") starts from a step of one process. The
time of data, forward and backward pass is proportional to the batch; with logs of several batches
it is interpolated. The time of the optimizer is constant. The log of multigpu with one process
tells the bytes of each bucket of gradients and when it is ready. For singlegpu, buckets of 1 MiB
and then 25 MiB are ready in proportion to their bytes. A bucket waits for the one before. While its
all-reduce runs, the backward pass is as slow as allreduce.py (--min_bytes 1048576) has measured.

An all-reduce of n bytes takes the latency, and n x 2 (N - 1) / N / bandwidth of the slowest link.
The latency is that of its hops: 2 (N - 1) in the ring of gloo (CPUs); with NCCL, which sends small
messages through trees, 2 (G - 1) inside nodes of G GPUs and 2 log2(M) between M nodes (its source,
src/graph/tuning.cc). Where a link was measured with as many processes as the row has, its figures
are taken as they are; the column link tells it, or from what number the row is extrapolated.
With --noise, time to loss is the time to the same loss beside one process: that of a step, times
1 + noise scale / batch, to which the number of steps is proportional (McCandlish et al. 2018).
"""

import argparse
import itertools
import json
import math
import re
import sys
import textwrap
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt

# Compared runs have these settings in common, and SAME_ON_RESUME of their script. The seed, the
# batch size and the number of epochs may differ.
SAME = "script model dataset precision parameters learning_rate compile max_steps device".split()
# The settings of a launch. They say how a model and a batch are split, and change no loss.
LAUNCH = (
    "num_stages shard_size grad_accum_steps num_microbatches schedule checkpoint_activations"
).split()
TITLE = SAME[:4]
RUN = ["run", "script", "processes", "nodes"]  # no two runs have all of them in common
COMPUTE = ["forward", "backward", "optimizer"]
PHASES = ["data", "forward", "backward", "bubble", "comm", "optimizer", "eval", "save"]
MEANS = ["seconds", "samples/s", *PHASES, "comm_total"]
QUALITY = ["val_acc", "val_ppl", "val_loss"]  # what is shown if the script names no metric

# What a row must hold, and what stands for what older logs and most scripts lack.
WORDS = ["run", *TITLE, "comm_hook", "device", "host", "metric"]
COUNTS = ["processes", "nodes", "batch_size", "parameters", "threads"]
NUMBERS = [*COUNTS, *MEANS, "epoch", "rank"]
DEFAULTS = {"bubble": 0.0, "comm": 0.0, "comm_total": 0.0, "host": "-", "peak_MB": math.nan}
DEFAULTS |= {"comm_hook": "none", "compile": False, "model": "-", "dataset": "-"}
DEFAULTS |= {"metric": "val_acc", "same_on_resume": []}

RATIOS = ["speedup", "efficiency"]
SPEED = ["processes", "nodes", "batch_size", "seconds", "samples/s", *RATIOS, "device-hours"]
LATE = ["sending", "waiting", "late rank", "late host", "skew", "peak_MB"]
COMMUNICATION = ["processes", "comm %", "hidden %", "R", *LATE]
PREDICTED = ["processes", "local batch", "ms a step", "samples/s", *RATIOS]
PREDICTED += ["comm %", "hidden %", "R", "link"]
APPLICATION = ["nodes", "processes", "seconds", *RATIOS, "device-hours", "peak_MB"]
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes of gradients that DDP sends at once
LINK = {  # what allreduce.py writes: (lowest, highest)
    "processes": (2, 1e9),
    "nodes": (1, 1e9),
    "latency_s": (0, 1e9),
    "bandwidth_bytes_per_s": (1, 1e30),
    "compute_rate": (0.01, 1),
}


def read_row(line):
    """Returns the row in this line, or None if it is damaged. A torn row may stand before it."""
    try:
        row = DEFAULTS | json.loads(line[line.rfind('{"') :])
        row["same_on_resume"] = dict(row["same_on_resume"])  # of pairs: a name and its value
    except (TypeError, ValueError, RecursionError):
        return None
    for name in WORDS:
        if not isinstance(row.get(name), str):
            return None
    for name in NUMBERS:
        if not isinstance(row.get(name), int | float) or not 0 <= row[name] < 1e12:
            return None
    for name in (*QUALITY, row["metric"], "peak_MB"):
        if not isinstance(row.get(name, math.nan), int | float):
            return None
    training = row["seconds"] - row["eval"] - row["save"]
    has_trained = min(training, row["samples/s"]) > 1e-9
    return row if has_trained and min(row[name] for name in COUNTS) >= 1 else None


def read_logs(paths):
    """Returns the complete rows of all logs, and notes on what was left out."""
    files = []
    for path in paths:
        files += sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    rows = []
    notes = []
    for file in files:
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError as error:
            notes.append(f"{file}: {error}")
            continue
        found = list(filter(None, map(read_row, lines)))
        left_out = len(lines) - len(found)
        if left_out:
            notes.append(f"{file}: {left_out} row(s) left out: damaged, or without a step")
        elif not lines:
            notes.append(f"{file}: no rows")
        rows += found
    if not rows:
        sys.exit("no rows to report: " + "; ".join(notes))
    frame = pd.DataFrame(rows, dtype=object)  # object: whole numbers stay whole
    frame[NUMBERS] = frame[NUMBERS].astype(float)
    return frame, notes


def runs_of(rows, warmup, notes):
    """Returns a summary of each run."""
    rows = rows.drop_duplicates([*RUN, "epoch", "rank"], keep="last")  # of epochs done twice
    logged = rows.groupby([*RUN, "epoch"])["rank"].transform("count")
    complete = logged == rows["processes"]
    if not complete.all():
        notes.append(f"{(~complete).sum()} row(s) left out: not all processes logged their epoch")
    return [summary_of(run, warmup) for _, run in rows[complete].groupby(RUN, sort=False)]


def summary_of(run, warmup):
    """Returns a dict of the run's settings and of means over processes and later epochs."""
    first_epoch = min(run["epoch"].min() + warmup, run["epoch"].max())
    later = run[run["epoch"] >= first_epoch]
    summary = run.iloc[-1].dropna().to_dict()  # the settings
    summary["script"] = re.sub("_fsdp|_pipeline", "", summary["script"].split("/")[-1])
    summary |= {name: str(summary.get(name, "-")) for name in LAUNCH}
    summary["split"] = "-"  # the whole model is in each process
    for name, parts in ("num_stages", "stages"), ("shard_size", "shards"):
        if summary[name] != "-":
            summary["split"] = f"{summary[name]} {parts}"
    for name in COUNTS:
        summary[name] = int(summary[name])
    summary |= later[MEANS].mean().to_dict()
    summary["training"] = summary["seconds"] - summary["eval"] - summary["save"]
    # hybrid/images.py has a device for each of its stages.
    devices = summary["processes"] * len(summary.get("stages", [1]))
    summary["device-hours"] = devices * summary["seconds"] / 3600
    summary["comm %"] = 100 * summary["comm"] / summary["training"]
    summary["peak_MB"] = run["peak_MB"].max()
    summary["epoch_times"] = run.groupby("epoch")["seconds"].mean()
    totals = later.groupby("rank")["comm_total"].mean()
    if summary["processes"] > 1 and totals.min() > 0:
        summary["sending"] = totals.min()
        summary["waiting"] = totals.mean() - totals.min()
        summary["late rank"] = f"{totals.idxmin():.0f}"
        summary["late host"] = run[run["rank"] == totals.idxmin()]["host"].iloc[-1]
        if summary["device"] == "CPU" or summary["shard_size"] == "-":  # FSDP on GPUs cannot tell
            summary["hidden %"] = max(0.0, 100 - 100 * summary["comm"] / summary["comm_total"])
        compute = later[COMPUTE].sum(axis=1)
        summary["R"] = compute.mean() / summary["sending"]
        compute_in_epochs = compute.groupby(later["epoch"])
        summary["skew"] = (compute_in_epochs.max() - compute_in_epochs.min()).mean()
    return summary


def settings_of(run):
    """Returns the settings that compared runs have in common, as words."""
    settings = {name: run.get(name, "") for name in SAME} | run["same_on_resume"]
    return {name: str(settings[name]) for name in settings if name not in ("batch_size", "seed")}


def groups_of(runs):
    """Returns tables of the runs that differ in the number of processes alone, with speedups."""
    alike = {}
    for run in runs:
        settings = tuple(settings_of(run).values())
        local_batch = run["batch_size"] / run["processes"]
        alike.setdefault(("strong", run["batch_size"], settings), []).append(run)
        alike.setdefault(("weak", local_batch, settings), []).append(run)
    groups = []
    titles = []
    for scaling, batch, settings in sorted(alike):
        kept = "global batch" if scaling == "strong" else "batch of a process"
        title = f"{scaling} scaling, {', '.join(settings[: len(TITLE)])}, {kept} {batch:g}"
        members = pd.DataFrame(alike[scaling, batch, settings])
        for hook in sorted(members["comm_hook"][members["processes"] > 1].unique()):
            group = members[(members["processes"] == 1) | (members["comm_hook"] == hook)]
            if group["processes"].nunique() > 1:
                group = with_speedups(group.sort_values(["processes", "nodes"], kind="stable"))
                titles.append(title)
                repeated = f" ({titles.count(title)})" if titles.count(title) > 1 else ""
                serial = serial_fraction(group) if scaling == "strong" else math.nan
                groups.append(group.assign(group=title + repeated, serial=serial))
    return groups


def with_speedups(runs):
    """Returns the table of runs with their speedups."""
    ratio = runs["processes"] / runs["processes"].min()
    speedup = runs["samples/s"] / runs["samples/s"][ratio == 1].max()
    return runs.assign(ratio=ratio, speedup=speedup, efficiency=speedup / ratio)


def serial_fraction(group):
    """Returns the serial fraction of Amdahl's law that fits the speedups best."""
    x = 1 - 1 / group["ratio"]
    y = 1 / group["speedup"] - 1 / group["ratio"]  # the law is y = serial * x
    return (x * y).sum() / (x * x).sum()


def pays_up_to(runs):
    """Returns a sentence on up to how many processes it pays."""
    speedups = runs.groupby("processes")["speedup"].max()  # the fastest run with a number counts
    for (few, slow), (many, fast) in itertools.pairwise(speedups.items()):
        gain = fast / slow
        needed = 1.5 ** math.log2(many / few)
        if gain < needed:
            limit = "1 process" if few == 1 else f"{few} processes"
            comparison = f"{many} are {gain:.2f} times as fast as {few}, less than {needed:.2f}"
            return f"It pays up to {limit}: {comparison}."
    return f"It pays up to {speedups.index.max()} processes, and there are no numbers on more."


def cell(value):
    """Returns words and whole numbers as they are, other numbers with at least three digits."""
    if isinstance(value, int | str):
        return str(value)
    if not math.isfinite(value):
        return "-"
    return f"{round(value, 9):#.3g}" if abs(value) < 99.9 else f"{value:.0f}"


def table(columns, rows):
    """Returns these columns of the rows as a Markdown table. What a row lacks is printed as -."""
    cells = pd.DataFrame(rows).reindex(columns=columns).map(cell)
    lines = [columns, *cells.to_numpy().tolist()]
    widths = [max(2, *map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * (width - 1) + ":" for width in widths])
    return "\n".join(f"| {' | '.join(map(str.rjust, line, widths))} |" for line in lines)


def comparison(group):
    """Returns the lines on a group."""
    first = group.iloc[0].dropna()
    facts = []
    for name, value in settings_of(first).items():
        if name not in TITLE and value not in ("", "0", "0.0", "False"):
            facts.append(f"{name} {value}")
    for name in ("comm_hook", "threads", *LAUNCH):
        if set(group[name]) != {"-"}:
            facts.append(f"{name} {' / '.join(map(str, group[name].unique()))}")
    quality = next((name for name in (first["metric"], *QUALITY) if name in first), "val_loss")
    lines = [f"## {first['group']}", "", *textwrap.wrap(", ".join(facts), 100), ""]
    split = ["split"] if set(group["split"]) != {"-"} else []
    lines += [table([*SPEED, quality, *split], group), "", table(COMMUNICATION, group), ""]
    if first["group"].startswith("strong") and first["serial"] > 0:
        bound = f"at most {1 / first['serial']:.3g} times as fast for any N"
        lines += [f"Serial fraction {first['serial']:.3f}: {bound}.", ""]
    lines += [pays_up_to(group), ""]
    if (group["efficiency"] > 1.1).any():
        doubt = "N processes are more than N times as fast: was a run beside other work?"
        lines += [f"Not to be trusted: {doubt}", ""]
    return lines


def application(groups):
    """Returns the lines to paste into an application for computing time."""
    lines = ["## For an application for computing time", ""]
    lines += ["An epoch takes these seconds and device-hours."]
    lines += ["peak_MB is the memory of the process that has held the most.", ""]
    for group in groups:
        lines += [f"**{group['group'].iloc[0]}, device {group['device'].iloc[0]}**", ""]
        lines += [table(APPLICATION, group), "", pays_up_to(group), ""]
    return lines


def read_links(paths):
    """Returns what allreduce.py wrote of the links: a dict for each file."""
    links = []
    for path in paths:
        try:
            written = json.loads(Path(path).read_text())
            link = {"device": written["device"]}  # "CPU" or a GPU: gloo or NCCL
            for name, (lowest, highest) in LINK.items():
                link[name] = float(written[name])
                if not lowest <= link[name] <= highest:
                    raise ValueError(f"{name} is {link[name]}")
            tflops = written.get("matmul_tflops", {})  # older files lack it
            link["matmul_tflops"] = {name: float(value) for name, value in tflops.items()}
        except Exception as error:  # a damaged or foreign file can fail anywhere
            sys.exit(f"cannot read the link {path}: {error!r}")
        links.append(link)
    return sorted(links, key=lambda link: link["processes"])


def step_of(run, runs):
    """Returns what a prediction needs of a run of one process, and of those like it in `runs`.

    It is a dict: the run's batch_size; phases, the seconds of each phase of a step, a row for each
    batch of which there is a run; and for each bucket of gradients its bytes, and the share of the
    backward pass that ends when it is ready.
    """
    seconds = {0: dict.fromkeys(PHASES, 0.0)}  # a batch of 0 takes no time
    slowest_last = sorted(runs, key=lambda other: other["samples/s"], reverse=True)
    for other in [*slowest_last, run]:  # a later run replaces one of the same batch
        is_launched_alike = all(other[name] == run[name] for name in LAUNCH)
        if is_launched_alike and settings_of(other) == settings_of(run):
            steps = other["samples/s"] * other["training"] / other["batch_size"]
            seconds[other["batch_size"]] = {name: other[name] / steps for name in PHASES}
    phases = pd.DataFrame.from_dict(seconds, orient="index").sort_index()
    try:
        sizes, leads = np.array(run["buckets"], float).T  # bytes, seconds before the last is ready
        ready = 1 - leads / phases["backward"][run["batch_size"]]
    except (ArithmeticError, LookupError, TypeError, ValueError):  # singlegpu has no buckets
        total = 4 * run["parameters"]
        ends = np.array([0, *range(FIRST_BUCKET, total, BUCKET), total])
        sizes = np.diff(ends)
        ready = ends[1:] / total
    shares = np.diff(ready.clip(0, 1), prepend=0)
    return {"batch_size": run["batch_size"], "phases": phases, "bytes": sizes, "shares": shares}


def levels_of(processes, links, gpus_per_node):
    """Yields the number of members at each level of the network, and a link measured there.

    With gpus_per_node, GPUs send inside a node, and nodes to each other. Else there is one level.
    """
    levels = [(processes, links)]
    if gpus_per_node > 0:
        nodes = math.ceil(processes / gpus_per_node)
        levels = [(math.ceil(processes / nodes), [link for link in links if link["nodes"] == 1])]
        levels += [(nodes, [link for link in links if link["nodes"] > 1])]
    for members, measured in levels:
        if members > 1:
            smaller = [link for link in measured if link["processes"] <= members]
            yield members, (smaller or measured)[-1 if smaller else 0]


def all_reduce_seconds(size, processes, links, gpus_per_node):
    """Returns the seconds of an all-reduce of `size` bytes, and of which links they are."""
    levels = list(levels_of(processes, links, gpus_per_node))
    nodes = math.ceil(processes / gpus_per_node) if gpus_per_node > 0 else 1
    latency = 0.0
    bandwidth = math.inf
    sources = "two links" if len(levels) > 1 else ""
    for members, link in levels:
        hops = members - 1
        measured_hops = link["processes"] - 1
        if link["nodes"] == 1 and link["device"] == "CPU":
            hops *= nodes  # the ring of gloo passes through all nodes
        if link["nodes"] > 1 and link["device"] != "CPU":  # NCCL has trees
            hops, measured_hops = math.log2(members), math.log2(link["processes"])
        latency += link["latency_s"] * hops / measured_hops
        bandwidth = min(bandwidth, link["bandwidth_bytes_per_s"])
        is_measured = members == link["processes"]
        sources = sources or ("measured" if is_measured else f"from {link['processes']:.0f}")
    return latency + size * 2 * (processes - 1) / processes / bandwidth, sources


def predict_step(step, processes, scaling, links, gpus_per_node):
    """Returns the row of the prediction for so many processes, without the speedup."""
    local_batch = step["batch_size"] / (processes if scaling == "strong" else 1)
    phases = step["phases"]
    seconds = {name: np.interp(local_batch, phases.index, phases[name]) for name in phases}
    optimizer = phases["optimizer"][step["batch_size"]]
    all_reduces, sources = all_reduce_seconds(step["bytes"], processes, links, gpus_per_node)
    used_links = [link for _, link in levels_of(processes, links, gpus_per_node)]
    rate = min((link["compute_rate"] for link in used_links), default=1.0)
    bucket_ready = 0.0  # in seconds from the beginning of the backward pass
    link_free = 0.0  # likewise: when the all-reduces so far have ended
    for work, all_reduce in zip(step["shares"] * seconds["backward"], all_reduces):
        busy = max(0.0, link_free - bucket_ready)  # so long the link still sends other buckets
        slowed = min(busy, work / rate)  # seconds of work beside them, at a lower rate
        rest = work - slowed * rate  # seconds of work at full speed
        bucket_ready += slowed + rest
        link_free = max(link_free, bucket_ready) + all_reduce
    comm = link_free - bucket_ready
    compute = seconds["forward"] + bucket_ready + optimizer
    training = seconds["data"] + compute + comm
    row = {"processes": processes, "local batch": local_batch, "ms a step": 1000 * training}
    row |= {"samples/s": processes * local_batch / training, "link": sources}
    row["comm %"] = 100 * comm / training
    comm_total = all_reduces.sum()
    if comm_total > 0:
        row["hidden %"] = max(0.0, 100 - 100 * comm / comm_total)
        row["R"] = compute / comm_total
    return row


def predict(step, scaling, links, gpus_per_node):
    """Returns the rows of the prediction for 1, 2, 4, ... processes, with speedups."""
    rows = []
    for processes in 2 ** np.arange(11):
        if scaling == "weak" or processes <= step["batch_size"]:
            rows.append(predict_step(step, processes, scaling, links, gpus_per_node))
    return with_speedups(pd.DataFrame(rows))


def with_times_to_loss(weak, path):
    """Adds the time to the same loss beside one process, by a file of noise_scale.py."""
    try:
        noise_scale = float(json.loads(Path(path).read_text())["noise_scale"])
        if not 0 < noise_scale < math.inf:
            raise ValueError(f"it is {noise_scale}")
    except Exception as error:  # a damaged or foreign file can fail anywhere
        sys.exit(f"cannot read the noise scale {path}: {error!r}")
    steps = 1 + noise_scale / (weak["processes"] * weak["local batch"])
    times = steps * weak["ms a step"]
    return weak.assign(**{"time to loss": times / times[0]})


def verdicts(strong, weak):
    """Returns the sentences on what the two predictions say."""
    shorter = strong["ms a step"].diff().fillna(-1) < 0
    shortest = strong["processes"][shorter.cummin()].max()
    efficient = weak["processes"][(weak["efficiency"] >= 0.8).cummin()].max()
    step = f"With the global batch kept, a step gets shorter up to {shortest} process(es)."
    speed = f"the samples/s keep 80% efficiency up to {efficient}."
    found = [step, pays_up_to(strong), f"With the batch of a process kept, {speed}"]
    if "time to loss" in weak:
        best = weak.loc[weak["time to loss"].idxmin()]
        share = f"in {best['time to loss']:.2g} of the time of one"
        found.append(f"Then the same loss comes soonest on {best['processes']}, {share}.")
    return found


def doubts(run, runs, strong, links):
    """Returns sentences on why the prediction from this run is not to be trusted, if it is not."""
    found = []
    short = strong["processes"][strong["ms a step"] < 10]
    if len(short):
        found.append(f"steps are shorter than 10 ms from {short.min()} process(es) on")
    if any(link["device"] != run["device"] for link in links):
        found.append(f"the run was on {run['device']}, and the link of {links[0]['device']}")
    if run["device"] == "CPU" and links[0]["nodes"] == 1:
        found.append("CPU processes of one node share its cores and memory")
    if any(other.get("waiting", 0.0) > 0.1 * other["training"] for other in runs):
        found.append("in the logs processes wait for a late one, which is not predicted")
    return [f"Not to be trusted: {doubt}." for doubt in found]


def share_of_matmul(run, links):
    """Returns a sentence on how near the run comes to the speed of a large matmul, if known."""
    precision = "fp32" if run["precision"] == "fp32" else "bf16"  # fp16 is as fast as bf16
    limits = []
    for link in links:
        if link["device"] == run["device"]:
            limits.append(link["matmul_tflops"].get(precision, 0.0))
    reached = run.get("TFLOP/s")  # gpt.py logs it
    is_known = isinstance(reached, int | float) and 0 < reached < 1e12
    if not is_known or not limits or max(limits) <= 0:
        return []
    share = f"{reached / max(limits):.0%} of a large matmul's {max(limits):.3g}"
    return [f"The run reaches {reached:.3g} TFLOP/s: {share} ({precision})."]


def draw_group(group, path):
    """Draws the speedup, where the time goes, and the epoch times. `path` begins their names."""
    group = group.set_index("processes")
    title = group["group"].iloc[0]
    speedup = pd.DataFrame({"ideal": group["ratio"]})
    if title.startswith("strong"):
        serial = max(0.0, group["serial"].iloc[0])
        speedup["Amdahl's law"] = 1 / (serial + (1 - serial) / group["ratio"])
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


def write_all(groups, predictions, lines, out):
    """Writes the lines, the tables as CSV, and the pictures."""
    (out / "tables").mkdir(parents=True, exist_ok=True)
    (out / "report.md").write_text("\n".join(lines) + "\n")
    columns = ["group", *SPEED, *COMMUNICATION[1:], *QUALITY, "serial", *PHASES]
    measured = pd.concat([pd.DataFrame(), *groups]).reindex(columns=columns)
    predicted = pd.DataFrame(predictions, columns=["group", *PREDICTED, "time to loss"])
    measured.to_csv(out / "tables/measured.csv", index=False)
    predicted.to_csv(out / "tables/predicted.csv", index=False)
    for number, group in enumerate(groups, start=1):
        draw_group(group, out / f"group{number}")
    figure, axes = plt.subplots()
    r = np.geomspace(0.1, 100)
    for processes in sorted({2, *measured["processes"]} - {1}):
        speedup = processes * r / (1 + r)  # T seconds become T / N + T / N / R
        axes.loglog(r, speedup, label=f"{processes} processes, nothing hidden")
    from_one = measured.groupby("group")["processes"].transform("min") == 1  # as the curves
    for frame, style in (measured[from_one], "o"), (predicted, "x:"):
        for title, rows in frame.groupby("group", sort=False):
            axes.plot(rows["R"], rows["speedup"], style, label=title)
    axes.set(xlabel="R = compute / sending", ylabel="speedup")
    axes.legend(fontsize="x-small")
    figure.savefig(out / "speedup_over_r.png")


def main():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("paths", nargs="+", type=Path, help="logs (.jsonl), or folders of them")
    add("--out", type=Path, metavar="FOLDER", help="write report.md, CSVs and pictures there")
    add("--warmup", type=int, default=1, help="first epochs of a run that do not count")
    add("--predict", nargs="+", default=[], metavar="LINK.json", help="files of allreduce.py")
    add("--noise", metavar="NOISE.json", help="file of noise_scale.py: time to the same loss")
    add("--gpus_per_node", type=int, default=0, help="if links of both kinds are given")
    args = parser.parse_args()
    rows, notes = read_logs(args.paths)
    runs = runs_of(rows, args.warmup, notes)
    links = read_links(args.predict)
    levels = {link["nodes"] > 1 for link in links}
    if (len(levels) == 2) != (args.gpus_per_node > 0):
        parser.error("--gpus_per_node is for links inside a node and between nodes: both, or none")
    if len(levels) == 2 and any(link["nodes"] not in (1, link["processes"]) for link in links):
        parser.error("measure the link between nodes with one process a node")
    if args.noise and not links:
        parser.error("--noise needs --predict")
    whole = [run for run in runs if run["split"] == "-"]
    singles = [run for run in whole if run["processes"] == 1 and links]  # to predict from
    if links and not singles:
        sys.exit("--predict needs the log of a run of one process that holds the whole model")

    groups = groups_of(runs)
    lines = []
    compared = set()
    for group in groups:
        lines += comparison(group)
        compared.update(group[RUN].itertuples(index=False, name=None))
    compared.update(tuple(run[name] for name in RUN) for run in singles)
    alone = [run for run in runs if tuple(run[name] for name in RUN) not in compared]
    if alone:
        columns = [*TITLE, "processes", "batch_size", "seconds", "samples/s", "device-hours"]
        lines += ["## not compared: no other run differs in the number of processes alone", ""]
        lines += [table(columns, alone), "", table(COMMUNICATION, alone), ""]
    predictions = []
    for run in singles:
        step = step_of(run, singles)
        found = {}
        for scaling in ("strong", "weak"):
            title = f"predicted {scaling} scaling, {run['script']}, {run['model']}, "
            title += f"batch {run['batch_size']}, run {run['run']}"
            found[scaling] = predict(step, scaling, links, args.gpus_per_node)
            if scaling == "weak" and args.noise:
                found[scaling] = with_times_to_loss(found[scaling], args.noise)
            more = found[scaling][1:].to_dict("records")
            predictions += [row | {"group": title} for row in more]
            has_times = "time to loss" in found[scaling]
            columns = [*PREDICTED[:6], "time to loss", "link"] if has_times else PREDICTED
            lines += [f"## {title}", "", table(columns, more), ""]
        lines += [*verdicts(**found), *share_of_matmul(run, links)]
        lines += [*doubts(run, runs, found["strong"], links), ""]
    notes = [f"note: {note}" for note in notes]
    print("\n".join(lines + notes))
    if args.out:
        lines += application(groups) if groups else []
        write_all(groups, predictions, lines + notes, args.out)
        rows.to_csv(args.out / "epochs.csv", index=False)


if __name__ == "__main__":
    main()
