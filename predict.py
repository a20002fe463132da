"""Predict how fast a training is on more processes, and what would help it.

    python predict.py one.jsonl link.json                       # link.json: of allreduce.py --out
    python predict.py one.jsonl link.json --processes 3 6 12    # by default powers of two
    python predict.py one.jsonl inside.json between.json --gpus_per_node 8
    python predict.py one.jsonl link.json --noise noise.json    # of singlegpu/noise_scale.py
    python predict.py runs/ 2nodes.json 4nodes.json --out pictures    # beside measured runs

What ends in .json is a link, all else are logs of --log, or folders of them. The prediction (after
Li et al. 2020, "PyTorch Distributed") starts from a step of a run of one process. The time of data,
forward and backward pass is proportional to the batch; with logs of several batches it is
interpolated. The time of the optimizer is constant. The log of multigpu with one process tells the
bytes of each bucket of gradients and when it is ready. For singlegpu, buckets of 1 MiB and then 25
MiB are ready in proportion to their bytes. A bucket waits for the one before. While its all-reduce
runs, the backward pass is as slow as allreduce.py (--min_bytes 1048576) has measured.

An all-reduce of n bytes takes the latency, and n x 2 (N - 1) / N / bandwidth of the slowest link.
The latency is that of its hops: 2 (N - 1) in the ring of gloo (CPUs); with NCCL, which sends small
messages through trees, 2 (G - 1) inside nodes of G GPUs and 2 log2(M) between M nodes (its source,
src/graph/tuning.cc). Where a link was measured with as many processes as the row has, its figures
are taken as they are; the column link tells it, or from what number the row is extrapolated. The
link between nodes is measured with one process a node, beside one inside a node and
--gpus_per_node, or with all GPUs of each node, which use all of its network cards.

    speedup       samples/s divided by those of one process
    efficiency    speedup divided by the number of processes
    comm %        exposed communication as a share of the step
    hidden %      share of the communication that goes on during the backward pass
    R             compute / sending, where compute is forward, backward and optimizer
    time to loss  until the same loss, beside one process: the time of a step times 1 + noise scale
                  / batch, to which the number of steps is proportional (McCandlish et al. 2018)

More processes pay if twice as many are 1.5 times as fast, and 4 times as many 2.25 times.
"""

import argparse
import itertools
import json
import math
import re
import sys
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

# What a row must hold, and what stands for what some scripts lack.
WORDS = ["run", "script", "host", "device"]
COUNTS = ["processes", "nodes", "batch_size", "parameters", "threads", "steps_per_epoch"]
NUMBERS = [*COUNTS, *TIMES, "rank", "step", "peak_MB"]
DEFAULTS = {"bubble": 0.0, "comm": 0.0, "comm_total": 0.0, "comm_hook": "none"}
MEASURED = re.compile("train_|val_|(d_model|num_layers|seq_len)$")  # numbers, or missing

# Colours that colour-blind people can tell apart (Okabe and Ito 2008), the same in all pictures.
COLOURS = {"data": "#E69F00", "forward": "#56B4E9", "backward": "#0072B2", "bubble": "#BBBBBB"}
COLOURS |= {"comm": "#D55E00", "optimizer": "#009E73"}
STYLE = {
    "figure.figsize": (8, 4.5),
    "figure.dpi": 100,
    "figure.constrained_layout.use": True,
    "font.size": 13,
    "axes.titlesize": 12,
    "figure.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.linewidth": 2,
    "lines.markersize": 8,
}

STRONG = ["processes", "local batch", "ms a step", "samples/s", "speedup", "efficiency"]
STRONG += ["comm %", "hidden %", "R", "link"]
WEAK = [*STRONG[:7], "time to loss", "link"]
ASK = ["processes", "nodes", "hours", "device-hours"]
HELP = ["change", "ms a step", "samples/s", "times as fast", "speedup", "comm %"]
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
            return valid(DEFAULTS | row)


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
            notes.append(f"{file}: {len(lines) - len(found)} damaged or old row(s) left out")
        elif not lines:
            notes.append(f"{file}: no rows")
    if not rows:
        sys.exit("no rows to report: " + "; ".join(notes))
    for row in rows:
        row |= {"same": identity(row), "task": task_of(row)}
    rows = pd.DataFrame(rows, dtype=object)  # object: whole numbers stay whole
    for name in rows:
        if name in NUMBERS or MEASURED.match(name):
            rows[name] = pd.to_numeric(rows[name], errors="coerce").astype(float)
    return rows, notes


def identity(row):
    """Returns what compared runs have in common, as sorted pairs of texts."""
    same = row["settings"] | {name: row.get(name, "-") for name in SAME}
    same["script"] = script_of(row)
    return tuple(sorted((name, str(same[name])) for name in {*same} - {*MAY_DIFFER}))


def script_of(row):
    """Returns the name of the task's script: gpt.py for gpt_fsdp.py, too."""
    return row["script"].split("/")[-1].replace("_fsdp", "").replace("_pipeline", "")


def task_of(row):
    """Returns what titles call a run."""
    words = [script_of(row), *(str(row["settings"].get(name, "-")) for name in TITLE[1:])]
    return ", ".join(word for word in words if word != "-")


def with_speedups(runs):
    """Returns the table of runs with their speedups."""
    ratio = runs["processes"] / runs["processes"].min()
    speedup = runs["samples/s"] / runs["samples/s"][ratio == 1].max()
    return runs.assign(ratio=ratio, speedup=speedup, efficiency=speedup / ratio)


def pays_up_to(runs):
    """Returns up to how many processes it pays, and a sentence on it."""
    speedups = runs.groupby("processes")["speedup"].max()  # the fastest run with a number counts
    for (few, slow), (many, fast) in itertools.pairwise(speedups.items()):
        gain = fast / slow
        needed = 1.5 ** math.log2(many / few)
        if gain < needed:
            limit = "1 process" if few == 1 else f"{few} processes"
            comparison = f"{many} are {gain:.2f} times as fast as {few}, less than {needed:.2f}"
            return few, f"It pays up to {limit}: {comparison}."
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
    """Returns these columns of the rows as a Markdown table. - is what a row lacks."""
    cells = pd.DataFrame(rows).reindex(columns=columns).map(cell)
    cells = cells.loc[:, (cells != "-").any()]
    lines = [list(cells), *cells.to_numpy().tolist()]
    widths = [max(2, *map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * (width - 1) + ":" for width in widths])
    return "\n".join(f"| {' | '.join(map(str.rjust, line, widths))} |" for line in lines)


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
            if link["nodes"] > link["processes"]:
                raise ValueError("it has more nodes than processes")
            tflops = written.get("matmul_tflops", {})  # older files lack it
            link["matmul_tflops"] = {name: float(value) for name, value in tflops.items()}
        except Exception as error:  # a damaged or foreign file can fail anywhere
            sys.exit(f"cannot read the link {path}: {error!r}")
        links.append(link)
    return sorted(links, key=lambda link: link["processes"])


def runs_of(rows):
    """Returns a dict for each run: its last row, with means over its steps and processes."""
    runs = []
    for _, run in rows.groupby(RUN, sort=False):
        steps = run["steps"].sum()  # of all processes
        if steps == 0 or run[PHASES].sum().sum() < 1e-9:
            continue
        means = (run[[*PHASES, "comm_total"]].sum() / steps).to_dict()
        summary = run.iloc[-1].to_dict() | means | {"steps": steps / run["processes"].iloc[0]}
        summary["seconds"] = sum(means[name] for name in PHASES)  # of a step
        summary["samples/s"] = summary["batch_size"] / summary["seconds"]
        totals = run.groupby("rank")["comm_total"].sum()
        summary["waiting"] = (totals.mean() - totals.min()) / summary["steps"]
        has_eval = run["eval"] > 0
        summary["eval"] = run["eval"][has_eval].mean() if has_eval.any() else 0.0
        summary |= {name: int(summary[name]) for name in COUNTS}
        runs.append(summary | {"save": run["save"].mean(), "warmup": run["warmup"].max()})
    return runs


def step_of(run, runs, links, gpus_per_node=0):
    """Returns what a prediction needs of a run of one process, and of those like it in `runs`.

    It is a dict: the global batch; phases, the seconds of each phase of a step, a row for each
    batch of which there is a run; for each bucket of gradients its bytes, and the share of the
    backward pass that ends when it is ready; and the links.
    """
    seconds = {0: dict.fromkeys(PHASES, 0.0)}  # a batch of 0 takes no time
    slowest_last = sorted(runs, key=lambda other: other["samples/s"], reverse=True)
    for other in [*slowest_last, run]:  # a later run replaces one of the same batch
        if all(other.get(name) == run.get(name) for name in ("same", *LAUNCH)):
            seconds[other["batch_size"]] = {name: other[name] for name in PHASES}
    phases = pd.DataFrame.from_dict(seconds, orient="index").sort_index()
    try:
        sizes, leads = np.array(run["buckets"], float).T  # bytes, seconds before the last is ready
        ready = 1 - leads / phases["backward"][run["batch_size"]]
        if not (np.isfinite(ready).all() and (sizes >= 0).all() and sizes.sum() < 1e15):
            raise ValueError
    except (ArithmeticError, LookupError, TypeError, ValueError):  # singlegpu has no buckets
        total = 4 * run["parameters"]
        ends = np.array([0, *range(FIRST_BUCKET, total, BUCKET), total])
        sizes = np.diff(ends)
        ready = ends[1:] / total
    shares = np.diff(ready.clip(0, 1), prepend=0)
    step = {"batch": run["batch_size"], "phases": phases, "bytes": sizes, "shares": shares}
    step |= {"optimizer": phases["optimizer"][run["batch_size"]], "hook": run["comm_hook"]}
    return step | {"links": links, "gpus_per_node": gpus_per_node}


def hops_of(processes, nodes, device):
    """Returns half of the messages that an all-reduce sends one after the other."""
    return processes - 1 if device == "CPU" else processes / nodes - 1 + math.log2(nodes)


def levels_of(processes, step):
    """Returns (processes, nodes, link) of each level of the network."""
    inside = [link for link in step["links"] if link["nodes"] == 1]
    between = [link for link in step["links"] if link["nodes"] > 1]
    whole = [link for link in between if link["processes"] > link["nodes"]]  # all GPUs of a node
    nodes = num_nodes(processes, step)
    if nodes == 1 or whole:
        levels = [(processes, nodes, (inside or between) if nodes == 1 else whole)]
    else:
        levels = [(math.ceil(processes / nodes), 1, inside), (nodes, nodes, between)]
    found = []
    for members, member_nodes, links in levels:
        if members > 1:
            smaller = [link for link in links if link["processes"] <= members]
            found.append((members, member_nodes, (smaller or links)[-1 if smaller else 0]))
    return found


def num_nodes(processes, step):
    """Returns on how many nodes so many processes run."""
    last = max(step["links"], key=lambda link: link["nodes"])
    each = processes if last["nodes"] == 1 else last["processes"] / last["nodes"]
    return math.ceil(processes / (step["gpus_per_node"] or each))


def all_reduce_seconds(sizes, processes, step):
    """Returns the seconds of all-reduces of so many bytes, and of which links they are."""
    levels = levels_of(processes, step)
    latency = 0.0
    bandwidth = math.inf
    sources = "two links" if len(levels) > 1 else ""
    for members, nodes, link in levels:
        hops = hops_of(members, nodes, link["device"])
        if len(levels) > 1 and nodes == 1 and link["device"] == "CPU":
            hops *= num_nodes(processes, step)  # the ring of gloo passes through all nodes
        measured_hops = hops_of(link["processes"], link["nodes"], link["device"])
        latency += link["latency_s"] * hops / measured_hops
        bandwidth = min(bandwidth, link["bandwidth_bytes_per_s"])
        is_measured = members == link["processes"]
        sources = sources or ("measured" if is_measured else f"from {link['processes']:.0f}")
    return latency + sizes * 2 * (processes - 1) / processes / bandwidth, sources


def predict_step(step, processes, local_batch):
    """Returns the row of the prediction for so many processes, without the speedup."""
    phases = step["phases"]
    most = phases.index[-1]
    beyond = max(1.0, local_batch / most)  # a larger batch than any measured
    seconds = {name: beyond * np.interp(local_batch, phases.index, phases[name]) for name in phases}
    seconds["optimizer"] = step["optimizer"]
    sizes = step["bytes"] / (1 if step["hook"] == "none" else 2)
    all_reduces, sources = all_reduce_seconds(sizes, processes, step)
    rate = min((link["compute_rate"] for *_, link in levels_of(processes, step)), default=1.0)
    bucket_ready = 0.0  # in seconds from the beginning of the backward pass
    link_free = 0.0  # likewise: when the all-reduces so far have ended
    for work, all_reduce in zip(step["shares"] * seconds["backward"], all_reduces):
        busy = max(0.0, link_free - bucket_ready)  # so long the link still sends other buckets
        slowed = min(busy, work / rate)  # seconds of work beside them, at a lower rate
        rest = work - slowed * rate  # seconds of work at full speed
        bucket_ready += slowed + rest
        link_free = max(link_free, bucket_ready) + all_reduce
    seconds |= {"backward": bucket_ready, "comm": link_free - bucket_ready}
    training = sum(seconds[name] for name in PHASES)
    row = seconds | {"processes": int(processes), "local batch": local_batch}
    row |= {"samples/s": processes * local_batch / training, "link": sources}
    row |= {"ms a step": 1000 * training, "comm %": 100 * seconds["comm"] / training}
    if all_reduces.sum() > 0:
        row["hidden %"] = max(0.0, 100 - 100 * seconds["comm"] / all_reduces.sum())
        row["R"] = sum(seconds[name] for name in COMPUTE) / all_reduces.sum()
    return row


def share_of(batch, processes):
    """Returns the batch of a process: the scripts want the same for all."""
    return max(1, round(batch / processes))


def predict(step, scaling, counts):
    """Returns the rows of the prediction for one process and for `counts`, with speedups."""
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
    nodes = {*range(1, 9), *powers}
    inside = [n for n in powers if n < gpus_per_node]
    return inside + sorted(n * gpus_per_node for n in nodes if n * gpus_per_node <= powers[-1])


def with_link_twice_as_fast(step):
    faster = []
    for link in step["links"]:
        faster.append(link | {"bandwidth_bytes_per_s": 2 * link["bandwidth_bytes_per_s"]})
    return step | {"links": faster}


# Each takes what step_of() returns. The optimizer's time stays.
CHANGES = {
    "--comm_hook bf16": lambda step: step | {"hook": "bf16"},
    "twice the batch": lambda step: step | {"batch": 2 * step["batch"]},
    "half the batch": lambda step: step | {"batch": step["batch"] / 2},
    "a link twice as fast": with_link_twice_as_fast,
    "no time in data": lambda step: step | {"phases": step["phases"].assign(data=0.0)},
}


def what_helps(step, processes):
    """Returns the rows of single changes and of the best pair, and a sentence on the best change.

    They are compared by samples/s, since another batch needs another number of steps.
    """
    alone = predict_step(step, 1, step["batch"])["samples/s"]
    now = predict_step(step, processes, share_of(step["batch"], processes))

    def row_of(names):
        changed = step
        for name in names:
            changed = CHANGES[name](changed)
        row = predict_step(changed, processes, share_of(changed["batch"], processes))
        row |= {"change": " and ".join(names) or "as it is", "speedup": row["samples/s"] / alone}
        return row | {"times as fast": row["samples/s"] / now["samples/s"]}

    possible = list(CHANGES)
    if step["hook"] != "none":
        possible.remove("--comm_hook bf16")
    if step["batch"] < 2 * processes:
        possible.remove("half the batch")
    pairs = []
    for pair in itertools.combinations(possible, 2):
        if not all("batch" in name for name in pair):  # twice and half exclude each other
            pairs.append(row_of(pair))
    singles = [row_of([name]) for name in possible]
    best = max(singles, key=lambda row: row["times as fast"])
    rows = [row_of([]), *singles, max(pairs, key=lambda row: row["times as fast"])]
    rows = sorted(rows, key=lambda row: -row["times as fast"])
    if best["times as fast"] < 1.01:
        return rows, "None of these changes helps by itself (predicted)."
    gain = f"{best['times as fast']:.2f} times as fast (predicted)"
    return rows, f"The most helps: {best['change']}, {gain}."


def with_whole_training(strong, run, num_steps, step):
    """Adds the hours and device-hours of the whole training."""
    every = float(run.get("eval_every") or run["steps_per_epoch"])
    validations = math.ceil(num_steps / every)
    seconds = num_steps * strong["ms a step"] / 1000
    others = run["warmup"] + validations * (run["eval"] / strong["processes"] + run["save"])
    nodes = [num_nodes(processes, step) for processes in strong["processes"]]
    hours = (seconds + others) / 3600
    more = {"hours": hours, "device-hours": strong["processes"] * hours, "nodes": nodes}
    return strong.assign(**more)


def sbatch_lines(strong, run):
    """Returns what to ask Slurm for, for each number of processes, with a fifth more time."""
    lines = []
    for row in strong.to_dict("records"):
        each = math.ceil(row["processes"] / row["nodes"])
        minutes = math.ceil(1.2 * 60 * row["hours"])
        gpus = 0 if run["device"] == "CPU" else each
        words = f"sbatch --nodes={row['nodes']} --gpus-per-node={gpus}"
        words += f" --ntasks-per-node={each} --time={minutes // 60}:{minutes % 60:02}:00"
        folder = "hybrid" if run["script"].startswith("hybrid/") else "multinode"
        lines.append(f"{words} slurm/{folder}_{Path(run['script']).stem}.slurm")
    return lines


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
    found = [step, pays_up_to(strong)[1], f"With the batch of a process kept, {speed}"]
    if "time to loss" in weak:
        best = weak.loc[weak["time to loss"].idxmin()]
        share = f"in {best['time to loss']:.2g} of the time of one"
        found.append(f"Then the same loss comes soonest on {best['processes']}, {share}.")
    return found


def doubts_of(run, runs, strong, step):
    """Returns why the prediction from this run is not to be trusted, if it is not."""
    found = []
    links = step["links"]
    if run["steps"] < FEW_STEPS:
        found.append(f"the times are of only {run['steps']:.0f} step(s) after the warmup")
    short = strong["processes"][strong["ms a step"] < 10]
    if len(short):
        found.append(f"steps are shorter than 10 ms from {short.min()} process(es) on")
    if any(link["device"] != run["device"] for link in links):
        found.append(f"the run was on {run['device']}, and the link of {links[0]['device']}")
    if run["device"] == "CPU" and links[0]["nodes"] == 1:
        found.append("CPU processes of one node share its cores and memory")
    if any(other["waiting"] > 0.1 * other["seconds"] for other in runs):
        found.append("in the logs processes wait for a late one, which is not predicted")
    uneven = [str(n) for n in strong["processes"] if step["batch"] % n]
    if uneven:
        found.append(f"{step['batch']} is no multiple of {', '.join(uneven)}: that is rounded")
    return [f"Not to be trusted: {doubt}." for doubt in found]


def share_of_matmul(run, links):
    """Returns a sentence on how near a GPT comes to the speed of a large matmul, if known."""
    sizes = [run.get(name) for name in ("num_layers", "d_model", "seq_len")]
    # A link's fp32 is TF32 on GPUs that have it. fp16 is as fast as bf16.
    precision = "fp32" if run["settings"].get("precision") in ("fp32", "tf32") else "bf16"
    limits = [link["matmul_tflops"] for link in links if link["device"] == run["device"]]
    limit = max([found.get(precision, 0.0) for found in limits], default=0.0)
    if script_of(run) != "gpt.py" or limit <= 0 or not all(map(np.isscalar, sizes)):
        return []
    num_layers, d_model, seq_len = map(float, sizes)
    # FLOP of a token: Chowdhery et al. 2022, "PaLM", appendix B.
    flop = seq_len * (6 * run["parameters"] + 12 * num_layers * d_model * seq_len)
    reached = flop * run["samples/s"] / 1e12
    share = f"{reached / limit:.0%} of a large matmul's {limit:.3g}"
    return [f"The run reaches {reached:.3g} TFLOP/s: {share} ({precision})."]


def draw(strong, measured, title, path):
    """Draws the predicted speedup, and where the time of a predicted step goes."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots()
        axes.plot(strong["processes"], strong["ratio"], "--", color="grey", label="ideal")
        axes.plot(strong["processes"], strong["speedup"], "o-", color="#0072B2", label="predicted")
        if len(measured):
            axes.plot(*measured.to_numpy().T, "s", color="#D55E00", label="measured")
        axes.set(xscale="log", yscale="log", xlabel="processes", ylabel="speedup")
        ticks = strong["processes"]
        axes.set_xticks(ticks, ticks, minor=False)
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_title(pays_up_to(strong)[1].split(":")[0].rstrip(".") + f"\n{title}")
        figure.legend(loc="outside right center")
        figure.savefig(f"{path}_speedup.png")
        draw_phases(strong.set_index("processes"), title, f"{path}_phases.png")
    plt.close("all")


def draw_phases(runs, title, path):
    """Draws where the time of a step goes: a bar for each number of processes, the index."""
    phases = 1000 * runs[PHASES].loc[:, runs[PHASES].any()]
    figure, axes = plt.subplots()
    phases.plot.bar(ax=axes, stacked=True, rot=0, color=COLOURS, legend=False, width=0.7)
    largest = phases.iloc[-1].idxmax()
    share = phases[largest].iloc[-1] / phases.iloc[-1].sum()
    axes.set_title(f"On {phases.index[-1]} processes {share:.0%} of a step is {largest}\n{title}")
    axes.set(xlabel="processes", ylabel="time of a step (ms)")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center")  # in the bars' order
    figure.savefig(path)


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("files", nargs="+", type=Path, help="logs (.jsonl) or folders of them, and links (.json)")
    add("--processes", type=int, nargs="+", metavar="N", help="how many; by default powers of two")
    add("--gpus_per_node", type=int, default=0, help="of nodes with several; 0: see above")
    add("--noise", metavar="NOISE.json", help="file of noise_scale.py: time to the same loss")
    add("--steps", type=int, default=0, help="of the whole training; 0: --epochs of the log")
    add("--out", type=Path, metavar="FOLDER", help="write pictures and predicted.csv there")
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
    return args


def report_on(run, runs, singles, args):
    """Prints the prediction from a run of one process. Returns its rows."""
    step = step_of(run, singles, args.links, args.gpus_per_node)
    counts = args.processes or default_counts(args.gpus_per_node)
    strong, weak = (predict(step, scaling, counts) for scaling in ("strong", "weak"))
    num_steps = args.steps or int(float(run.get("epochs") or 1) * run["steps_per_epoch"])
    strong = with_whole_training(strong, run, num_steps, step)
    if args.noise:
        weak = with_times_to_loss(weak, args.noise)
    title = f"{run['task']}, batch {run['batch_size']}"
    lines = [f"# {title}, run {run['run']}", ""]
    lines += [*doubts_of(run, runs, strong, step), *verdicts(strong, weak)]
    lines += share_of_matmul(run, args.links)
    for name, frame, columns in ("strong", strong, STRONG), ("weak", weak, WEAK):
        lines += ["", f"## predicted {name} scaling, {title}", "", table(columns, frame[1:])]
    default = max(2, pays_up_to(strong)[0])
    possible = [count for count in args.processes or [default] if count <= step["batch"]]
    for count in sorted({*possible} - {1}):
        rows, sentence = what_helps(step, count)
        lines += ["", f"## what would help on {count} processes", "", table(HELP, rows)]
        lines += ["", sentence]
    lines += ["", f"## what to ask for: {num_steps:,} steps, and a fifth more time", ""]
    lines += [table(ASK, strong), "", *sbatch_lines(strong, run)]
    print("\n".join(lines) + "\n")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        keys = ("same", "batch_size")
        others = [other for other in runs if all(other[key] == run[key] for key in keys)]
        measured = pd.DataFrame(others)[["processes", "samples/s"]]
        measured["samples/s"] /= run["samples/s"]
        draw(strong, measured[measured["processes"] > 1], title, args.out / f"run_{run['run']}")
    return [
        frame.assign(run=run["run"], scaling=name)
        for name, frame in zip(("strong", "weak"), (strong, weak))
    ]


def main():
    args = parse_args()
    rows, notes = read_logs(args.logs)
    runs = runs_of(rows)
    # hybrid/images.py splits the model of one process over several devices.
    whole = [run for run in runs if not isinstance(run.get("stages"), list)]
    singles = [run for run in whole if run["processes"] == 1]
    if not singles:
        sys.exit("there is no log of a run of one process that holds the whole model")
    print("".join(f"note: {note}\n" for note in notes), end="")
    latest = {(run["same"], run["batch_size"]): run for run in singles}
    found = []
    for run in latest.values():
        found += report_on(run, runs, singles, args)
    if args.out:
        pd.concat(found).to_csv(args.out / "predicted.csv", index=False)


if __name__ == "__main__":
    main()
