"""Predict how fast a training is on more processes, and what would help it.

    python predict.py one.jsonl link.json                       # link.json: of allreduce.py --out
    python predict.py one.jsonl link.json --processes 3 6 12
    python predict.py one.jsonl inside.json between.json --gpus_per_node 8
    python predict.py one.jsonl link.json --noise noise.json    # of singlegpu/noise_scale.py
    python predict.py runs/ 2nodes.json 4nodes.json --out pictures    # beside measured runs

What ends in .json is a link, all else are logs of --log, or folders of them. The prediction (after
Li et al. 2020, "PyTorch Distributed") starts from a step of a run of one process. The time of data,
forward and backward pass is proportional to the batch; with logs of several batches it is
interpolated. The time of the optimizer is constant. The log of multigpu with one process tells the
bytes of each bucket of gradients and when it is ready. For singlegpu, DDP's default buckets, 1 MiB
and then 25 MiB, are taken to fill evenly. A bucket waits for the one before. While its all-reduce
runs, the backward pass is as slow as allreduce.py (--min_bytes 1048576) has measured.

An all-reduce of n bytes takes the latency, and n x 2 (N - 1) / N / bandwidth of the slowest link.
The latency is that of its hops: 2 (N - 1) in the ring of gloo (CPUs); with NCCL, which sends small
messages through trees, 2 (G - 1) inside nodes of G GPUs and 2 log2(M) between M nodes (its source,
src/graph/tuning.cc; no NCCL has been measured yet). Where a link was measured with as many
processes as the row has, its figures are taken as they are. The column link says so, or from what
number the row is extrapolated, or that two links count. The link between nodes is measured with one
process a node, beside one inside a node and --gpus_per_node, or with all GPUs of each node, which
use all of its network cards. Without a link between nodes, all processes are taken to be on one
node. The numbers of processes are those of --processes, or else powers of two and, beyond a node of
--gpus_per_node, whole nodes.

    speedup       samples/s divided by those of one process
    measured      speedup of the fastest run with so many processes in the logs
    efficiency    speedup divided by the number of processes
    comm %        exposed communication as a share of the step
    R             compute / sending, where compute is forward, backward, bubble and optimizer
    time to loss  until the same loss, beside one process: the time of a step times 1 + noise scale
                  / batch, to which the number of steps is proportional (McCandlish et al. 2018)

More processes pay if twice as many are 1.5 times as fast, and 4 times as many 2.25 times.
"""

import argparse
import functools
import itertools
import json
import math
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt

# No two runs have all of these in common. A resumed run may change the last three.
RUN = "run script processes nodes comm_hook compile grad_accum_steps".split()
TITLE = ["model", "dataset", "precision"]
# The flags of a launch. They say how a model and a batch are split, and change no loss.
LAUNCH = "num_stages shard_size grad_accum_steps num_microbatches schedule".split()
LAUNCH += ["checkpoint_activations"]
COMPUTE = ["forward", "backward", "bubble", "optimizer"]
PHASES = ["data", "forward", "backward", "bubble", "comm", "optimizer"]  # of a step
FEW_STEPS = 10  # fewer are a doubt

# What a row must hold, and what is taken where a script does not log it.
WORDS = ["run", "script", "host", "device", "comm_hook", "compile", *LAUNCH]
COUNTS = "processes nodes batch_size parameters trained threads steps_per_epoch".split()
TIMES = [*PHASES, "comm_total", "warmup", "eval", "save", "seconds", "steps"]
NUMBERS = [*TIMES, "rank", "step", "peak_MB"]
MEASURED = "^(train_|val_|d_model$|num_layers$|seq_len$)"  # numbers, or missing
DEFAULTS = {"comm_hook": "none", "bubble": 0, "comm": 0, "comm_total": 0, "last_step": None}
DEFAULTS |= dict.fromkeys(["compile", *LAUNCH], "-") | {"stages": [1]}  # hybrid/images.py has more
DEFAULTS |= dict.fromkeys("train_loss val_loss d_model num_layers seq_len".split(), math.nan)

STRONG = ["processes", "local batch", "ms a step", "samples/s", "speedup", "efficiency"]
STRONG += ["comm %", "R", "measured", "link"]
WEAK = [*STRONG[:7], "time to loss", "link"]
HELP = ["change", "ms a step", "samples/s", "times as fast", "speedup", "comm %"]
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes of gradients that DDP sends at once
LINK = {  # what allreduce.py writes: (lowest, highest)
    "processes": (2, 1e9),
    "nodes": (1, 1e9),
    "latency_s": (0, 1e9),
    "bandwidth_bytes_per_s": (1, 1e30),
    "compute_rate": (0.01, 1),
}

STYLE = {"figure.figsize": (6.4, 3.6), "figure.dpi": 125, "figure.constrained_layout.use": True}
STYLE |= {"font.size": 12, "figure.titlesize": 12, "legend.frameon": False}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "hatch.linewidth": 0.8}


def read_row(line):
    """Returns the row in this line with what titles and comparisons need, or None if damaged."""
    try:
        row = DEFAULTS | json.loads(line)
        row.setdefault("trained", row["parameters"])
        row |= {name: str(row[name]) for name in WORDS}
        row |= {name: int(row[name]) for name in COUNTS}
        row |= {name: float(row[name]) for name in NUMBERS}
        same = {name: str(value) for name, value in row["settings"].items()}
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return None
    if not all(0 <= row[name] < 1e12 for name in [*COUNTS, *NUMBERS]):
        return None
    if min(row[name] for name in COUNTS) < 1:
        return None
    script = Path(row["script"]).name.replace("_fsdp", "").replace("_pipeline", "")
    row["task"] = ", ".join([script, *(same[name] for name in TITLE if name in same)])
    # Compared runs have all this in common.
    same |= {name: str(row[name]) for name in ("device", "parameters", "compile")}
    same["script"] = script
    may_differ = {"batch_size", "seed", "comm_hook", *LAUNCH}
    row["same"] = tuple(sorted((name, same[name]) for name in same.keys() - may_differ))
    # A flag of a task may have a name like that of a result, such as --val_fraction.
    flags = {name for name in row["settings"] if name.startswith(("train_", "val_"))}
    return {name: value for name, value in row.items() if name not in flags}


def read_logs(paths):
    """Returns a table of the rows of all logs, and notes on what was left out."""
    rows = []
    notes = []
    for path in paths:
        for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
            try:
                lines = file.read_text(errors="replace").splitlines()
            except OSError as error:
                sys.exit(f"cannot read {file}: {error}")
            found = [row for row in map(read_row, lines) if row]
            rows += [row | {"file": file} for row in found]
            if len(found) < len(lines) or not lines:
                damaged = len(lines) - len(found)
                notes.append(f"{file}: {damaged} damaged or old row(s) left out of {len(lines)}")
    if not rows:
        sys.exit("no rows to report: " + "; ".join(notes))
    rows = pd.DataFrame(rows).sort_values("step", kind="stable")
    for name in rows.filter(regex=MEASURED):
        rows[name] = pd.to_numeric(rows[name].astype(str), errors="coerce").astype(float)
    return rows, notes


def with_speedups(runs):
    """Returns the table of runs with their speedups."""
    ratio = runs["processes"] / runs["processes"].min()
    speedup = runs["samples/s"] / runs["samples/s"][ratio == 1].max()
    return runs.assign(ratio=ratio, speedup=speedup, efficiency=speedup / ratio)


def pays_up_to(runs):
    """Returns up to how many processes it pays, and a sentence on it."""
    speedups = runs.groupby("processes")["speedup"].max()  # the fastest run with a number counts
    for (few, slow), (many, fast) in itertools.pairwise(speedups.items()):
        needed = 1.5 ** math.log2(many / few)
        if fast / slow < needed:
            limit = "1 process" if few == 1 else f"{few} processes"
            gain = f"{many} are {fast / slow:.2f} times as fast as {few}"
            return few, f"It pays up to {limit}: {gain}, less than {needed:.2f}."
    most = speedups.index.max()
    return most, f"It pays up to {most} processes, and there are no numbers on more."


def cell(value):
    """Returns words and whole numbers as they are, other numbers with at least three digits."""
    if isinstance(value, int | str):
        return str(value)
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


def save(figure, sentence, path, loc="outside right center", **legend):
    """Writes the figure, with a sentence above its axes and a legend outside of them."""
    figure.suptitle(sentence, x=0.01, horizontalalignment="left")
    figure.legend(loc=loc, **legend)
    figure.savefig(path)
    plt.close(figure)


def read_links(paths):
    """Returns what allreduce.py wrote of the links: a dict for each file."""
    links = []
    for path in paths:
        try:
            written = json.loads(Path(path).read_text())
            link = {name: float(written[name]) for name in LINK}
            links.append(link | {"device": str(written["device"])})  # "CPU" or a GPU
            for name, (lowest, highest) in LINK.items():
                if not lowest <= link[name] <= highest:
                    raise ValueError(f"{name} is {link[name]}")
            if link["nodes"] > link["processes"]:
                raise ValueError("it has more nodes than processes")
        except Exception as error:  # a damaged or foreign file can fail anywhere
            sys.exit(f"cannot read the link {path}: {error!r}")
    return sorted(links, key=lambda link: link["processes"])


def runs_of(rows):
    """Returns a table of the runs: their last rows, with means over steps and processes."""
    of_run = rows.groupby(RUN, sort=False)
    steps = of_run["steps"].sum()  # of all processes
    runs = of_run.last()
    runs[PHASES] = of_run[PHASES].sum().div(steps, axis=0)
    totals = rows.groupby([*RUN, "rank"])["comm_total"].sum().groupby(RUN)
    speed = rows["steps"] / rows[PHASES].sum(axis=1).clip(lower=1e-9)
    speed = speed[rows["steps"] >= FEW_STEPS].groupby([rows[name] for name in RUN])
    runs["varies"] = 100 * (1 - speed.min() / speed.max())
    is_pipeline = runs["num_microbatches"] != "-"  # its stages do not send the same
    runs["waits"] = (1 - totals.min() / totals.mean() > 0.1) & ~is_pipeline
    runs["eval"] = of_run["eval"].sum() / of_run["val_loss"].count().clip(lower=1)
    runs["save"] = of_run["save"].mean()
    runs["warmup"] = of_run["warmup"].max()
    runs["steps"] = steps
    runs["line"] = rows.index.to_series().groupby([rows[name] for name in RUN]).max()
    runs = runs.reset_index()
    runs["steps"] /= runs["processes"]
    runs["seconds"] = runs[PHASES].sum(axis=1)  # of a step
    runs["samples/s"] = runs["batch_size"] / runs["seconds"]
    return runs[(runs["steps"] > 0) & (runs["seconds"] > 1e-9)]


def step_of(run, alike, links, gpus_per_node=0):
    """Returns what a prediction needs of a run, and of those like it with other batches.

    It is a dict: the global batch; phases, the seconds of each phase of a step, a row for each
    batch; for each bucket of gradients its bytes, and the share of the backward pass that ends when
    it is ready; the links, and how many times faster they are to be than measured.
    """
    no_batch = pd.DataFrame(0.0, [0], PHASES)  # takes no time
    phases = pd.concat([no_batch, alike.set_index("batch_size")[PHASES].sort_index()])
    own = phases.loc[run["batch_size"]]
    try:
        step = pd.DataFrame(run["last_step"], columns=["name", "start", "end", "bytes"])
        buckets = step[step["name"] == "all-reduce"].sort_values("start").astype({"bytes": float})
        sizes = buckets["bytes"].to_numpy()
        leads = buckets["start"].iloc[-1] - buckets["start"].to_numpy(float)  # the last has 0
        ready = 1 - leads / own["backward"]
        if not (np.isfinite(ready).all() and (sizes >= 0).all() and sizes.sum() < 1e15):
            raise ValueError
    except (ArithmeticError, LookupError, TypeError, ValueError):  # singlegpu has no buckets
        total = 4 * run["trained"]
        ends = np.array([0, *range(FIRST_BUCKET, total, BUCKET), total])
        sizes = np.diff(ends)
        passes = run["grad_accum_steps"]  # backward passes of a step. The last one sends
        passes = max(1, int(passes)) if passes.isdecimal() else 1
        ready = 1 - (1 - ends[1:] / total) / passes
    step = {"batch": run["batch_size"], "phases": phases, "optimizer": own["optimizer"]}
    step |= {"bytes": sizes, "shares": np.diff(ready.clip(0, 1), prepend=0)}
    step |= {"hook": run["comm_hook"], "gpus_per_node": gpus_per_node}
    return step | {"links": links, "faster": 1}


def network_of(processes, step):
    """Returns what so many processes have of the links: nodes, latency, bandwidth and more.

    Inside and between nodes are two levels, unless the link was measured with all GPUs of a node.
    """
    inside = [link for link in step["links"] if link["nodes"] == 1]
    between = [link for link in step["links"] if link["nodes"] > 1]
    each = between[0]["processes"] / between[0]["nodes"] if between else processes
    nodes = math.ceil(processes / (step["gpus_per_node"] or each))
    if nodes > 1 and each == 1 and inside:
        levels = [(math.ceil(processes / nodes), 1, inside), (nodes, nodes, between)]
    else:
        levels = [(processes, nodes, between if nodes > 1 else inside or between)]
    network = {"nodes": nodes, "latency": 0.0, "bandwidth": math.inf, "compute_rate": 1.0}
    for members, member_nodes, links in levels:
        if members > 1:
            smaller = [link for link in links if link["processes"] <= members]
            link = smaller[-1] if smaller else links[0]
            hops = hops_of(members, member_nodes, link["device"])
            if member_nodes < nodes and link["device"] == "CPU":
                hops *= nodes  # the ring of gloo passes through all nodes
            measured_hops = hops_of(link["processes"], link["nodes"], link["device"])
            network["latency"] += link["latency_s"] * hops / measured_hops
            bandwidth = step["faster"] * link["bandwidth_bytes_per_s"]
            network["bandwidth"] = min(network["bandwidth"], bandwidth)
            network["compute_rate"] = min(network["compute_rate"], link["compute_rate"])
            is_measured = members == link["processes"]
            network["link"] = "measured" if is_measured else f"from {link['processes']:.0f}"
    return network | ({"link": "two links"} if len(levels) > 1 else {})


def hops_of(processes, nodes, device):
    """Returns half of the messages that an all-reduce sends one after the other."""
    return processes - 1 if device == "CPU" else processes / nodes - 1 + math.log2(nodes)


def predict_step(step, processes, local_batch):
    """Returns the row of the prediction for so many processes, without the speedup."""
    phases = step["phases"]
    beyond = max(1.0, local_batch / phases.index[-1])  # a larger batch than any measured
    seconds = {name: beyond * np.interp(local_batch, phases.index, phases[name]) for name in phases}
    seconds["optimizer"] = step["optimizer"]
    sizes = step["bytes"] / (1 if step["hook"] == "none" else 2)
    network = network_of(processes, step)
    rate = network["compute_rate"]
    sent = sizes * 2 * (processes - 1) / processes
    all_reduces = network["latency"] + sent / network["bandwidth"]
    bucket_ready = 0.0  # in seconds from the beginning of the backward pass
    link_free = 0.0  # likewise: when the all-reduces so far have ended
    for work, all_reduce in zip(step["shares"] * seconds["backward"], all_reduces):
        busy = max(0.0, link_free - bucket_ready)  # so long the link still sends other buckets
        slowed = min(busy, work / rate)  # seconds of work beside them, at a lower rate
        bucket_ready += slowed + work - slowed * rate  # the rest is done at full speed
        link_free = max(link_free, bucket_ready) + all_reduce
    seconds |= {"backward": bucket_ready, "comm": link_free - bucket_ready}
    training = sum(seconds[name] for name in PHASES)
    row = network | seconds | {"processes": processes, "local batch": local_batch}
    row |= {"samples/s": processes * local_batch / training, "ms a step": 1000 * training}
    sending = all_reduces.sum() or math.nan
    compute = sum(seconds[name] for name in COMPUTE)
    return row | {"comm %": 100 * seconds["comm"] / training, "R": compute / sending}


def share_of(batch, processes):
    """Returns the batch of a process: the scripts want the same for all."""
    return max(1, round(batch / processes))


def predict(step, scaling, counts):
    """Returns a table of the prediction for one process and for `counts`, with speedups."""
    rows = []
    for processes in sorted({1, *counts}):
        if scaling == "weak":
            rows.append(predict_step(step, processes, step["batch"]))
        elif processes <= step["batch"]:
            rows.append(predict_step(step, processes, share_of(step["batch"], processes)))
    return with_speedups(pd.DataFrame(rows))


def default_counts(gpus_per_node):
    """Returns powers of two and, beyond a node, multiples of its GPUs."""
    powers = [2**n for n in range(11)]
    if not gpus_per_node:
        return powers
    nodes = [n for n in range(1, 1 + powers[-1] // gpus_per_node) if n < 9 or n in powers]
    return [n for n in powers if n < gpus_per_node] + [n * gpus_per_node for n in nodes]


# Each takes what step_of() returns. The optimizer's time stays.
CHANGES = {
    "--comm_hook bf16": lambda step: step | {"hook": "bf16"},
    "twice the batch": lambda step: step | {"batch": 2 * step["batch"]},
    "half the batch": lambda step: step | {"batch": step["batch"] / 2},
    "a link twice as fast": lambda step: step | {"faster": 2},
    "no time in data": lambda step: step | {"phases": step["phases"].assign(data=0.0)},
}


def what_helps(step, processes):
    """Returns a table of single changes and the best pair, and a sentence on the best change.

    They are compared by samples/s, since another batch needs another number of steps.
    """
    possible = dict(CHANGES)
    if step["hook"] != "none":
        del possible["--comm_hook bf16"]
    if step["batch"] < 2 * processes:
        del possible["half the batch"]
    rows = []
    subsets = [itertools.combinations(possible, count) for count in range(3)]
    for names in itertools.chain(*subsets):
        if sum("batch" in name for name in names) < 2:  # twice and half exclude each other
            changed = functools.reduce(lambda step, name: CHANGES[name](step), names, step)
            row = predict_step(changed, processes, share_of(changed["batch"], processes))
            rows.append(row | {"change": " and ".join(names) or "as it is", "count": len(names)})
    rows = pd.DataFrame(rows)
    rows["times as fast"] = rows["samples/s"] / rows["samples/s"][0]
    rows["speedup"] = rows["samples/s"] / predict_step(step, 1, step["batch"])["samples/s"]
    rows = rows.sort_values("times as fast", ascending=False)
    rows = rows[(rows["count"] < 2) | (rows.groupby("count").cumcount() == 0)]  # the best pair
    best = rows[rows["count"] == 1].iloc[0]
    if best["times as fast"] < 1.01:
        return rows, "None of these changes helps by itself (predicted)."
    gain = f"{best['times as fast']:.2f} times as fast (predicted)"
    sentence = f"The most helps: {best['change']}, {gain}."
    pair = rows[rows["count"] == 2].iloc[0]
    if pair["times as fast"] > 1.01 * best["times as fast"]:
        sentence += f" The best two, {pair['change']}: {pair['times as fast']:.2f} times."
    return rows, sentence


def with_whole_training(strong, run, num_steps):
    """Adds the hours and device-hours of the whole training."""
    validations = math.ceil(num_steps / float(run.get("eval_every") or run["steps_per_epoch"]))
    seconds = num_steps * strong["ms a step"] / 1000 + run["warmup"]
    seconds += validations * (run["eval"] / strong["processes"] + run["save"])
    hours = seconds / 3600
    return strong.assign(**{"hours": hours, "device-hours": strong["processes"] * hours})


def sbatch_line(row, run):
    """Returns what to ask Slurm for, with a fifth more time, and time to start and to stop."""
    each = math.ceil(row["processes"] / row["nodes"])
    minutes = math.ceil(1.2 * 60 * row["hours"]) + 5  # SIGUSR2 stops it up to 3 early
    needs = f"--gpus-per-node={each}"
    if run["device"] == "CPU":  # 0 in place of the job file's 4, which a site without GPUs refuses
        needs = f"--gpus-per-node=0 --cpus-per-task={run['threads']}"
    folder = "hybrid" if run["script"].startswith("hybrid/") else "multinode"
    words = ["sbatch", f"--nodes={row['nodes']}", needs, f"--ntasks-per-node={each}"]
    words += [f"--time={minutes // 60}:{minutes % 60:02}:00"]
    return " ".join([*words, f"slurm/{folder}_{Path(run['script']).stem}.slurm"])


def with_times_to_loss(weak, path):
    """Adds the time to the same loss beside one process, by a file of noise_scale.py."""
    try:
        written = json.loads(Path(path).read_text())
        noise_scale, half_width = float(written["noise_scale"]), float(written["half_width"])
        if not 0 <= 2 * half_width < noise_scale < math.inf:
            raise ValueError(f"it is {noise_scale:g}, give or take {half_width:g}")
    except Exception as error:  # a damaged or foreign file can fail anywhere
        sys.exit(f"cannot read the noise scale {path}: {error!r}")
    steps = 1 + noise_scale / (weak["processes"] * weak["local batch"])
    times = steps * weak["ms a step"]
    return weak.assign(**{"time to loss": times / times[0]})


def verdicts(strong, weak):
    """Returns the sentences on what the two predictions say."""
    efficient = weak["processes"][(weak["efficiency"] >= 0.8).cummin()].max()
    found = [pays_up_to(strong)[1]]
    found.append(f"With the batch of a process kept, efficiency is 80% or more up to {efficient}.")
    if "time to loss" in weak:
        best = weak.loc[weak["time to loss"].idxmin()]
        share = f"in {best['time to loss']:.2g} of the time of one"
        found.append(f"Then the same loss comes soonest on {best['processes']}, {share}.")
    return found


def doubts_of(run, runs, strong, weak, step):
    """Returns why the prediction from this run is not to be trusted, if it is not."""
    short = strong["processes"][strong["ms a step"] < 10]
    uneven = [str(n) for n in strong["processes"] if step["batch"] % n]
    waits = runs["waits"][runs["same"] == run["same"]].any()
    others = {link["device"] for link in step["links"]} - {run["device"]}
    is_cpu = run["device"] == "CPU"
    is_shared = is_cpu and step["links"][0]["nodes"] == 1
    most, known = weak["processes"].max(), step["links"][-1]["processes"]
    is_beyond = max(link["nodes"] for link in step["links"]) == 1 and most > known and not is_cpu
    doubts = [
        (run["steps"] < FEW_STEPS, f"only {run['steps']:.0f} step(s) after the warmup were timed"),
        (run["varies"] > 20, f"some rows of its log are {run['varies']:.0f}% slower than others"),
        (len(short), f"steps are shorter than 10 ms from {short.min()} process(es) on"),
        (others, f"the run was on {run['device']}, and a link on {', '.join(others)}"),
        (is_shared, "CPU processes of one node share its cores and memory"),
        (is_beyond, f"a node is taken to hold {most} processes, but was measured with {known:.0f}"),
        (waits, "in the logs processes wait for a late one, which is not predicted"),
        (uneven, f"{step['batch']} is no multiple of {', '.join(uneven)}: that is rounded"),
    ]
    return [f"Not to be trusted: {doubt}." for is_so, doubt in doubts if is_so]


def draw(strong, measured, title, path):
    """Draws the predicted speedup beside the ideal and what was measured."""
    figure, axes = plt.subplots()
    axes.loglog(strong["processes"], strong["ratio"], "--", base=2, color="grey", label="ideal")
    axes.plot(strong["processes"], strong["speedup"], "o-", color="#0072B2", label="predicted")
    if len(measured):
        x, y = measured["processes"], measured["speedup"]
        axes.plot(x, y, "s", color="#D55E00", fillstyle="none", markersize=10, label="measured")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="processes (log scale)", ylabel="speedup over one process")
    save(figure, f"{pays_up_to(strong)[1].split(':')[0].rstrip('.')}\n{title}", path)


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("files", nargs="+", type=Path, help="logs (.jsonl) or folders of them, and links (.json)")
    add("--processes", type=int, nargs="+", help="by default powers of two, then whole nodes")
    add("--gpus_per_node", type=int, default=0, help="of nodes with several; 0: see above")
    add("--noise", metavar="NOISE.json", help="file of noise_scale.py: time to the same loss")
    add("--steps", type=int, default=0, help="of the whole training; 0: --epochs of the log")
    add("--out", type=Path, metavar="FOLDER", help="draw the predictions there")
    args = parser.parse_args()
    args.links = read_links([path for path in args.files if path.suffix == ".json"])
    args.logs = [path for path in args.files if path.suffix != ".json"]
    if not args.links or not args.logs:
        parser.error("give a log of --log, and a link that allreduce.py --out has written")
    if min(args.processes or [1]) < 1 or args.gpus_per_node < 0 or args.steps < 0:
        parser.error("--processes must be 1 or more, --gpus_per_node and --steps 0 or more")
    inside = [link for link in args.links if link["nodes"] == 1]
    each = {link["processes"] / link["nodes"] for link in args.links if link["nodes"] > 1}
    if bool(inside and each == {1}) != (args.gpus_per_node > 0) and not each - {1}:
        parser.error("--gpus_per_node is for links inside a node and between nodes: both, or none")
    if len(each) > 1 or each - {1, args.gpus_per_node or max(each, default=1)}:
        parser.error("measure the link between nodes with one process a node, or with all GPUs")
    try:
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=args.out).close()
    except OSError as error:
        parser.error(f"--out: {error}")
    return args


def report_on(run, alike, runs, number, args):
    """Prints the prediction from a run of one process, and draws it."""
    step = step_of(run, alike, args.links, args.gpus_per_node)
    counts = args.processes or default_counts(args.gpus_per_node)
    num_steps = args.steps or int(float(run.get("epochs") or 1) * run["steps_per_epoch"])
    strong = with_whole_training(predict(step, "strong", counts), run, num_steps)
    is_same = (runs["same"] == run["same"]) & (runs["batch_size"] == run["batch_size"])
    measured = runs[is_same & (runs["comm_hook"] == run["comm_hook"]) & (runs["processes"] > 1)]
    measured = measured.assign(speedup=measured["samples/s"] / run["samples/s"])
    strong["measured"] = strong["processes"].map(measured.groupby("processes")["speedup"].max())
    weak = predict(step, "weak", counts)
    if args.noise:
        weak = with_times_to_loss(weak, args.noise)
    title = f"{run['task']}, batch {run['batch_size']}"
    print(f"# {title}, run {run['run']}\n")
    print(*doubts_of(run, runs, strong, weak, step), *verdicts(strong, weak), sep="\n")
    for name, rows, columns in ("strong", strong, STRONG), ("weak", weak, WEAK):
        if len(rows) > 1:
            print(f"\n## predicted {name} scaling, {title}\n\n{table(columns, rows[1:])}")
    default = max(2, pays_up_to(strong)[0])
    for count in sorted({*(args.processes or [default])}):
        if 1 < count <= step["batch"]:
            rows, sentence = what_helps(step, count)
            print(f"\n## what would help on {count} processes\n\n{table(HELP, rows)}\n\n{sentence}")
    print(f"\n## what to ask for: {num_steps:,} steps, a fifth more time, and 5 minutes\n")
    print(table(["processes", "nodes", "hours", "device-hours"], strong), end="\n\n")
    print(*(sbatch_line(row, run) for row in strong.to_dict("records")), "", sep="\n")
    if args.out:
        end = ".png" if number == 1 else f"_{number}.png"
        draw(strong, measured, title, args.out / f"predicted{end}")


def main():
    args = parse_args()
    plt.rcParams.update(STYLE)
    rows, notes = read_logs(args.logs)
    runs = runs_of(rows)
    print("".join(f"note: {note}\n" for note in notes), end="")
    # hybrid/images.py splits the model of one process over several devices.
    singles = runs[(runs["processes"] == 1) & (runs["stages"].str.len() == 1)]
    singles = singles.sort_values("line")  # of equal runs, the last one counts
    singles = singles.drop_duplicates(["same", *LAUNCH, "batch_size"], keep="last")
    if singles.empty:
        sys.exit("no run of one process holds the whole model, and has steps after its warmup")
    number = itertools.count(1)
    for _, alike in singles.groupby(["same", *LAUNCH], sort=False):
        for run in alike.to_dict("records"):
            report_on(run, alike, runs, next(number), args)


if __name__ == "__main__":
    main()
