"""Compare training runs by their logs, and predict what more processes would do.

    python report.py runs/                            # logs in a folder, written with --log
    python report.py runs/ --out report               # also writes report.md, CSVs and pictures
    python report.py one.jsonl --predict link.json    # link.json is from allreduce.py --out
    python report.py one.jsonl --predict inside.json between.json --gpus_per_node 8
    python report.py one.jsonl --predict 2nodes.json 4nodes.json      # measured at several N
    python report.py one.jsonl --predict link.json --noise noise.json # of singlegpu/noise_scale.py

The report compares runs of a task that have the same settings and different numbers of processes N,
however they are launched: in stages, in shards, in micro-batches. Strong scaling keeps the global
batch, weak scaling keeps the batch of a process. Times are seconds of an epoch: the seconds of a
step, mean over all steps and processes, times the steps of an epoch. So it does not matter how long
a run was, how often it was resumed or validated. - is what is not known.

    steps         steps after the warmup, over which the times are means
    seconds       time of an epoch without warmup, validation and saves
    samples/s     speed of the training alone
    TFLOP/s       of a device, for gpt: 6 FLOP a parameter and token, and the attention
    speedup       samples/s divided by those of the fastest run with the fewest processes
    efficiency    speedup divided by how many times as many processes there are
    device-hours  of an epoch: devices x seconds / 3600
    comm %        exposed communication as a share of the seconds
    hidden %      share of the communication that goes on during the backward pass
    sending       seconds of communication in the process that comes last: it waits for no other
    waiting       mean seconds of communication over all processes, minus sending
    late rank     the process that comes last, on the node late host
    R             compute / sending, where compute is forward, backward and optimizer
    skew          seconds of compute in the slowest process, minus those in the fastest
    warmup        seconds of the first three steps after each start of the run, in all
    eval, save    seconds of one validation, and of one snapshot
    peak_MB       memory of the process that has held the most
    val_ppl       perplexity: exp(val_loss)

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

RUN = ["run", "script", "processes", "nodes"]  # no two runs have all of them in common
# Compared runs have these in common, and the settings of their rows but batch size and seed.
SAME = ["script", "device", "parameters", "compile"]
TITLE = ["script", "model", "dataset", "precision"]
# The flags of a launch. They say how a model and a batch are split, and change no loss.
LAUNCH = (
    "num_stages shard_size grad_accum_steps num_microbatches schedule checkpoint_activations"
).split()
MAY_DIFFER = ["batch_size", "seed", "comm_hook", *LAUNCH]
COMPUTE = ["forward", "backward", "optimizer"]
PHASES = ["data", "forward", "backward", "bubble", "comm", "optimizer"]  # of a step
TIMES = [*PHASES, "comm_total", "warmup", "eval", "save", "seconds", "steps"]  # of a row
FEW_STEPS = 10  # fewer are a doubt

# What a row must hold, what stands for what some scripts lack, and what is taken from the last row.
WORDS = ["run", "script", "host", "device"]
COUNTS = ["processes", "nodes", "batch_size", "parameters", "threads", "steps_per_epoch"]
NUMBERS = [*COUNTS, *TIMES, "rank", "step", "peak_MB"]
DEFAULTS = {"bubble": 0.0, "comm": 0.0, "comm_total": 0.0, "comm_hook": "none"}
OF_A_RUN = ["settings", *WORDS, *COUNTS, "comm_hook", "compile", *LAUNCH, "stages", "buckets"]
MEASURED = re.compile("train_|val_|(d_model|num_layers|seq_len)$")  # numbers, or missing

RATIOS = ["speedup", "efficiency"]
SPEED = ["processes", "nodes", "batch_size", "steps", "seconds", "samples/s", *RATIOS]
SPEED += ["device-hours", "split"]
COMMUNICATION = ["processes", "comm %", "hidden %", "R", "sending", "waiting"]
COMMUNICATION += ["late rank", "late host", "skew"]
ALONE = [*TITLE, "processes", "batch_size", "steps", "seconds", "samples/s", "device-hours"]
BESIDE = ["processes", "warmup", "eval", "save", "peak_MB", "tokens/s", "TFLOP/s"]
PREDICTED = ["processes", "local batch", "ms a step", "samples/s", *RATIOS]
PREDICTED += ["comm %", "hidden %", "R", "link"]
APPLICATION = ["nodes", "processes", "seconds", *RATIOS, "device-hours", "peak_MB", "eval", "save"]
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
    for start in re.finditer('{"', line):
        try:
            row, end = json.JSONDecoder().raw_decode(line, start.start())
        except (ValueError, RecursionError):
            continue
        if end == len(line):
            return row if "epoch" in row else valid(DEFAULTS | row)


def valid(row):
    """Returns the row, or None if it lacks what every row must have."""
    if not all(isinstance(row.get(name), str) for name in WORDS):
        return None
    for name in NUMBERS:
        lowest = 1 if name in COUNTS else 0
        if not isinstance(row.get(name), int | float) or not lowest <= row[name] < 1e12:
            return None
    return row if isinstance(row.get("settings"), dict) else None


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
        rows += found
        if len(found) < len(lines):
            notes.append(f"{file}: {len(lines) - len(found)} damaged row(s) left out")
        elif not lines:
            notes.append(f"{file}: no rows")
    num_rows = len(rows)
    rows = [row for row in rows if "epoch" not in row]
    if len(rows) < num_rows:
        older = f"{num_rows - len(rows)} row(s) of older scripts left out"
        notes.append(f"{older}: they count epochs, not steps")
    if not rows:
        sys.exit("no rows to report: " + "; ".join(notes))
    rows = pd.DataFrame(rows, dtype=object)  # object: whole numbers stay whole
    for name in rows:
        if name in NUMBERS or MEASURED.match(name):
            rows[name] = pd.to_numeric(rows[name], errors="coerce").astype(float)
    return rows, notes


def runs_of(rows, notes):
    """Returns a summary of each run."""
    # A run that was stopped and the one that resumes it can both log a row of the same step.
    repeat = rows.groupby([*RUN, "step", "rank"]).cumcount()
    rows = rows.assign(repeat=repeat).sort_values(["step", "repeat"], kind="stable")
    logged = rows.groupby([*RUN, "step", "repeat"])["rank"].transform("count")
    complete = logged == rows["processes"]
    if not complete.all():
        notes.append(f"{(~complete).sum()} row(s) left out: not all processes logged their step")
    summaries = []
    for (name, _, processes, _), run in rows[complete].groupby(RUN, sort=False):
        num_steps = run["steps"].sum() / processes
        what = f"run {name} on {processes:.0f} process(es)"
        if min(num_steps, run[PHASES].sum().sum()) < 1e-9:
            notes.append(f"{what} left out: no step after its warmup")
            continue
        if num_steps < FEW_STEPS:
            notes.append(f"{what}: its times are of only {num_steps:.0f} step(s) after its warmup")
        summaries.append(summary_of(run))
    if not summaries:
        sys.exit("no runs to report: " + "; ".join(notes))
    return summaries


def summary_of(run):
    """Returns a dict of the run's settings and of its times: those of an epoch."""
    names = [name for name in run if name in OF_A_RUN or MEASURED.match(name)]
    known = {name: column.dropna() for name, column in run[names].items()}
    summary = {name: column.iloc[-1] for name, column in known.items() if len(column)}
    settings = {name: str(value) for name, value in summary["settings"].items()}
    summary |= {name: settings.get(name, "-") for name in TITLE[1:]}
    summary["script"] = re.sub("_fsdp|_pipeline", "", summary["script"].split("/")[-1])
    summary |= {name: int(summary[name]) for name in COUNTS}
    summary |= {name: str(summary.get(name, "-")) for name in ("comm_hook", "compile", *LAUNCH)}
    same = settings | {name: str(summary[name]) for name in SAME}
    summary["same"] = tuple(sorted((name, same[name]) for name in {*same} - {*MAY_DIFFER}))
    summary["task"] = ", ".join(summary[name] for name in TITLE if summary[name] != "-")
    summary["local batch"] = summary["batch_size"] / summary["processes"]
    summary["split"] = "-"  # the whole model is in each process
    for name, parts in ("num_stages", "stages"), ("shard_size", "shards"):
        if summary[name] != "-":
            summary["split"] = f"{summary[name]} {parts}"

    sums = run.groupby("rank")[TIMES].sum()
    epochs = sums * summary["steps_per_epoch"] / sums["steps"].mean()
    summary |= epochs[[*PHASES, "comm_total"]].mean().to_dict()
    summary["steps"] = round(sums["steps"].mean())
    summary["seconds"] = epochs[PHASES].sum(axis=1).mean()
    summary["samples/s"] = summary["batch_size"] * summary["steps_per_epoch"] / summary["seconds"]
    summary["warmup"] = sums["warmup"].mean()
    summary["eval"] = math.nan
    if len(known.get("val_loss", [])):
        summary["eval"] = sums["eval"].sum() / len(known["val_loss"])
    summary["save"] = sums["save"].sum() / len(run)  # each row comes after a save
    # hybrid/images.py has a device for each of its stages.
    stages = summary.get("stages")
    devices = summary["processes"] * (len(stages) if isinstance(stages, list) else 1)
    summary["device-hours"] = devices * summary["seconds"] / 3600
    summary["comm %"] = 100 * summary["comm"] / summary["seconds"]
    summary["peak_MB"] = run["peak_MB"].max()
    totals = epochs["comm_total"]
    if summary["processes"] > 1 and totals.min() > 0:
        summary["sending"] = totals.min()
        summary["waiting"] = totals.mean() - totals.min()
        summary["late rank"] = f"{totals.idxmin():.0f}"
        summary["late host"] = run[run["rank"] == totals.idxmin()]["host"].iloc[-1]
        if summary["device"] == "CPU" or summary["shard_size"] == "-":  # FSDP on GPUs cannot tell
            summary["hidden %"] = max(0.0, 100 - 100 * summary["comm"] / summary["comm_total"])
        compute = epochs[COMPUTE].sum(axis=1)
        summary["R"] = compute.mean() / summary["sending"]
        summary["skew"] = compute.max() - compute.min()

    if summary["script"] in ("gpt.py", "translation.py") and "val_loss" in summary:
        summary["val_ppl"] = math.exp(min(summary["val_loss"], 100))
    if summary["script"] == "gpt.py" and {"d_model", "num_layers", "seq_len"} <= summary.keys():
        # FLOP of a token: Chowdhery et al. 2022, "PaLM", appendix B.
        attention = 12 * summary["num_layers"] * summary["d_model"] * summary["seq_len"]
        summary["tokens/s"] = summary["samples/s"] * summary["seq_len"]
        flops = (6 * summary["parameters"] + attention) * summary["tokens/s"]
        summary["TFLOP/s"] = flops / devices / 1e12
    metrics = [name for name in summary if name.startswith("val_") and name != "val_loss"]
    summary["metric"] = [*metrics, "val_loss"][0]
    losses = run.reindex(columns=["step", "repeat", "seconds", "train_loss", "val_loss"])
    curve = losses.groupby(["step", "repeat"]).mean().reset_index()
    summary["curve"] = curve.assign(seconds=curve["seconds"].cumsum())
    return summary


def groups_of(runs):
    """Returns tables of the runs that differ in the number of processes alone, with speedups."""
    groups = []
    titles = []
    kept = {"strong": ("batch_size", "global batch"), "weak": ("local batch", "batch of a process")}
    for scaling, (column, words) in kept.items():
        for (batch, _), members in pd.DataFrame(runs).groupby([column, "same"]):
            title = f"{scaling} scaling, {members['task'].iloc[0]}, {words} {batch:g}"
            for hook in sorted(members["comm_hook"][members["processes"] > 1].unique()):
                group = members[(members["processes"] == 1) | (members["comm_hook"] == hook)]
                if group["processes"].nunique() == 1:
                    continue
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
    """Returns these columns of the rows as a Markdown table. - is what a row lacks."""
    cells = pd.DataFrame(rows).reindex(columns=columns).map(cell)
    cells = cells.loc[:, (cells != "-").any()]
    lines = [list(cells), *cells.to_numpy().tolist()]
    widths = [max(2, *map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * (width - 1) + ":" for width in widths])
    return "\n".join(f"| {' | '.join(map(str.rjust, line, widths))} |" for line in lines)


def tables(columns, runs):
    """Returns the lines of three tables: speed, communication, and what comes beside the steps."""
    lines = []
    for names in (columns, COMMUNICATION, [*BESIDE, *pd.unique(runs["metric"])]):
        lines += [table(names, runs), ""]
    return lines


def comparison(group):
    """Returns the lines on a group."""
    first = group.iloc[0]
    facts = []
    for name, value in first["same"]:
        if name not in TITLE and value not in ("", "0", "0.0", "False"):
            facts.append(f"{name} {value}")
    for name in ("comm_hook", "threads", *LAUNCH):
        if set(group[name]) != {"-"}:
            facts.append(f"{name} {' / '.join(map(str, group[name].unique()))}")
    lines = [f"## {first['group']}", "", *textwrap.wrap(", ".join(facts), 100), ""]
    lines += tables(SPEED, group)
    if first["serial"] > 0:
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
    lines += ["The steps of an epoch take these seconds and device-hours. In each validation eval"]
    lines += ["seconds are added, and in each snapshot save seconds."]
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
        if all(other[name] == run[name] for name in ("same", *LAUNCH)):
            steps = other["steps_per_epoch"]
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
    if any(other.get("waiting", 0.0) > 0.1 * other["seconds"] for other in runs):
        found.append("in the logs processes wait for a late one, which is not predicted")
    return [f"Not to be trusted: {doubt}." for doubt in found]


def share_of_matmul(run, links):
    """Returns a sentence on how near the run comes to the speed of a large matmul, if known."""
    # A link's fp32 is TF32 on GPUs that have it. fp16 is as fast as bf16.
    precision = "fp32" if run["precision"] in ("fp32", "tf32") else "bf16"
    limits = [link["matmul_tflops"] for link in links if link["device"] == run["device"]]
    limit = max([found.get(precision, 0.0) for found in limits], default=0.0)
    reached = run.get("TFLOP/s", 0.0)  # known of gpt.py
    if not reached > 0 or limit <= 0:
        return []
    share = f"{reached / limit:.0%} of a large matmul's {limit:.3g}"
    return [f"The run reaches {reached:.3g} TFLOP/s: {share} ({precision})."]


def draw_group(group, path):
    """Draws the speedup, where the time goes, and the losses. `path` begins their names."""
    title = group["group"].iloc[0]
    losses, axes = plt.subplots(1, 2, sharey=True, figsize=(12, 5))
    for number, run in enumerate(group.to_dict("records")):
        style = {"color": f"C{number}"}
        for x, ax in zip(("step", "seconds"), axes):
            curve = run["curve"].set_index(x)
            label = f"{run['processes']} process(es), run {run['run']}"
            curve["train_loss"].plot(ax=ax, linestyle="--", label="", **style)
            curve["val_loss"].dropna().plot(ax=ax, marker="o", label=label, **style)
            ax.set(xlabel=x, ylabel="loss: training dashed, validation with dots")
    axes[1].legend()
    losses.suptitle(title)
    losses.savefig(f"{path}_loss.png")
    group = group.set_index("processes")
    speedup = pd.DataFrame({"ideal": group["ratio"]})
    if group["serial"].notna().all():
        serial = max(0.0, group["serial"].iloc[0])
        speedup["Amdahl's law"] = 1 / (serial + (1 - serial) / group["ratio"])
    speedup["measured"] = group["speedup"]
    phases = group[PHASES].loc[:, group[PHASES].any()]
    styles = {"ideal": "--", "Amdahl's law": "-", "measured": "o"}
    axes = speedup.plot(title=title, ylabel="speedup", style=styles, xticks=group.index, ylim=0)
    axes.figure.savefig(f"{path}_speedup.png")
    axes = phases.plot.bar(title=title, ylabel="s an epoch", stacked=True, rot=0)
    axes.figure.savefig(f"{path}_phases.png")
    plt.close("all")


def write_all(groups, predictions, lines, out):
    """Writes the lines, the tables as CSV, and the pictures."""
    (out / "tables").mkdir(parents=True, exist_ok=True)
    (out / "report.md").write_text("\n".join(lines) + "\n")
    columns = ["group", *SPEED, *COMMUNICATION[1:], *BESIDE[1:], "serial", *PHASES]
    measured = pd.concat([pd.DataFrame(), *groups])
    columns += [name for name in measured if name.startswith("val_")]
    measured = measured.reindex(columns=columns)
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
    add("--predict", nargs="+", default=[], metavar="LINK.json", help="files of allreduce.py")
    add("--noise", metavar="NOISE.json", help="file of noise_scale.py: time to the same loss")
    add("--gpus_per_node", type=int, default=0, help="if links of both kinds are given")
    args = parser.parse_args()
    rows, notes = read_logs(args.paths)
    runs = runs_of(rows, notes)
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
        lines += ["## not compared: no other run differs in the number of processes alone", ""]
        lines += tables(ALONE, pd.DataFrame(alone))
    predictions = []
    for run in singles:
        step = step_of(run, singles)
        found = {}
        for scaling in ("strong", "weak"):
            title = f"predicted {scaling} scaling, {run['task']}, "
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
        rows.to_csv(args.out / "rows.csv", index=False)


if __name__ == "__main__":
    main()
