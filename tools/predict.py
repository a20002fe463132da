"""Predict how fast a training is on more processes, and what would help it.

    python tools/predict.py one.jsonl link.json                     # of tools/allreduce.py --out
    python tools/predict.py one.jsonl --link 100Gbit --latency 5us  # a link of your data sheet
    python tools/predict.py one.jsonl inside.json between.json      # nodes of several GPUs
    python tools/predict.py runs/ 2nodes.json 4nodes.json --out pictures    # beside measured runs

Files that end in .json are links, all others are logs of --log, or folders of them. The prediction
(after Li et al. 2020, "PyTorch Distributed") starts from a step of a run of one process. The time
of data, forward and backward pass is proportional to the batch; with logs of several batches it is
interpolated. The time of the optimizer is constant. A log of multigpu tells the bytes of each
bucket of gradients and when it is ready. For singlegpu, DDP's default buckets, 1 MiB and then 25
MiB, are taken to fill evenly. A bucket waits for the one before. While its all-reduce runs, the
backward pass is as slow as allreduce.py (--min_bytes 1048576) has measured.

An all-reduce of n bytes takes the latency, and n x 2 (N - 1) / N / bandwidth. The latency is that
of its hops: 2 (N - 1) in the ring of gloo (CPUs); with NCCL, which sends small messages through
trees, 2 (G - 1) inside nodes of G GPUs and 2 log2(M) between M nodes (its source,
src/graph/tuning.cc; no NCCL has been measured yet). Where a link was measured with as many
processes as the row has, its figures are taken as they are, which the column link says. Measure the
link between nodes with all GPUs of two nodes or more, and the link inside a node with all GPUs of
one. Without a link between nodes, all processes are taken to be on one node. More processes pay if
twice as many are 1.5 times as fast, and 4 times as many 2.25 times. The columns are explained in
report.py; measured is the speedup of the fastest run with so many processes in the logs.
"""

import argparse
import json
import math
import re
import shlex
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from logs import LAUNCH, PHASES, STYLE, pays_up_to, read_logs, save, table, with_speedups
from matplotlib.figure import Figure  # without pyplot, which needs a backend that can be loaded

WEAK = ["processes", "local batch (samples)", "step (ms)", "samples/s", "speedup (x)"]
WEAK += ["efficiency (%)", "comm (%)", "link"]
STRONG = [*WEAK[:-1], "R (x)", "measured (x)", "link"]
HELP = ["change", "step (ms)", "samples/s", "gain (x)", "comm (%)"]
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes of gradients that DDP sends at once
UNITS = {"Gbit": 125e6, "Mbit": 125e3, "GB": 1e9, "MB": 1e6, "us": 1e-6, "ms": 1e-3}
NOT_GIVEN = ("None", "False", "none", "-", "nan")  # what a row has for a flag that was not given
OF_THIS_RUN = {"max_steps", "num_gpus", "snapshot", "log"}  # flags not for a job


def quantity(text):
    """Returns a text such as 100Gbit in bytes/s, and one such as 5us in seconds."""
    for unit, size in UNITS.items():
        if text.endswith(unit):
            return size * float(text.removesuffix(unit))
    raise ValueError(f"{text} has no unit of {', '.join(UNITS)}")


def runs_of(rows):
    """Returns a table of the runs: their last rows, with means over steps and processes."""
    of_run = rows.groupby("of", sort=False)
    steps = of_run["steps"].sum()  # of all processes
    runs = of_run.last()
    runs[PHASES] = of_run[PHASES].sum().div(steps, axis=0)
    runs["eval"] = of_run["eval"].sum() / of_run["val_loss"].count().clip(lower=1)
    runs["save"] = of_run["save"].mean()
    runs["warmup"] = of_run["warmup"].max()
    runs["steps"] = steps / runs["processes"]
    runs["line"] = rows.index.to_series().groupby(rows["of"]).max()
    runs["samples/s"] = runs["batch_size"] / runs[PHASES].sum(axis=1)
    return runs[runs["steps"] > 0].reset_index()


def step_of(run, alike, links):
    """Returns what a prediction needs of a run, and of those like it with other batches.

    phases: the seconds of each phase of a step, a row for each batch. shares: for each bucket of
    gradients, the share of the backward pass that ends when it is ready. faster: of the links.
    """
    no_batch = pd.DataFrame(0.0, [0], PHASES)  # takes no time
    phases = pd.concat([no_batch, alike.set_index("batch_size")[PHASES].sort_index()])
    own = phases.loc[run["batch_size"]]
    events = [event[1:] for event in run["last_step"] or () if event[0] == "all-reduce"]
    if events:
        starts, _, sizes = np.array(sorted(events)).T
        ready = 1 - (starts[-1] - starts) / own["backward"]  # the last one ends the pass
    else:  # singlegpu has no buckets
        total = 4 * int(run["parameters"])
        ends = np.array([0, *range(FIRST_BUCKET, total, BUCKET), total])
        sizes = np.diff(ends)
        passes = run["grad_accum_steps"]  # backward passes of a step. The last one sends
        ready = 1 - (1 - ends[1:] / total) / (1 if passes == "-" else passes)
    step = {"device": run["device"], "hook": run["comm_hook"], "links": links, "faster": 1}
    step |= {"batch": run["batch_size"], "phases": phases, "optimizer": own["optimizer"]}
    step |= {"bytes": sizes, "shares": np.diff(ready.clip(0, 1), prepend=0)}
    # How many processes are on one node.
    step["node"] = min((link["each"] for link in links if link["nodes"] > 1), default=math.inf)
    return step


def network_of(processes, step):
    """Returns the nodes of so many processes, and the figures of the link that counts."""
    nodes = max(1, math.ceil(processes / step["node"]))
    links = [link for link in step["links"] if (link["nodes"] > 1) == (nodes > 1)] or step["links"]
    link = [links[0], *(link for link in links if link["processes"] <= processes)][-1]
    hops = hops_of(processes, nodes, step["device"])
    measured_hops = hops_of(link["processes"], link["nodes"], step["device"])
    words = "measured" if processes == link["processes"] else f"from {link['processes']}"
    found = {"nodes": nodes, "compute_rate": link["compute_rate"]}
    found["latency"] = link["latency_s"] * hops / measured_hops
    found["bandwidth"] = step["faster"] * link["bandwidth_bytes_per_s"]
    return found | {"link": words if "device" in link else "by hand"}


def hops_of(processes, nodes, device):
    """Returns half of the messages that an all-reduce sends one after the other."""
    return processes - 1 if device == "CPU" else processes / nodes - 1 + math.log2(nodes)


def predict_step(step, processes, local_batch):
    """Returns the row of the prediction for so many processes, without the speedup."""
    phases = step["phases"]
    seconds = {name: np.interp(local_batch, phases.index, phases[name]) for name in phases}
    seconds["optimizer"] = step["optimizer"]
    sizes = step["bytes"] / (1 if step["hook"] == "none" else 2)
    network = network_of(processes, step)
    rate = network["compute_rate"]
    per_byte = 2 * (processes - 1) / processes / network["bandwidth"]
    all_reduces = network["latency"] + sizes * per_byte
    bucket_ready = 0.0  # in seconds from the beginning of the backward pass
    link_free = 0.0  # likewise: when the all-reduces so far have ended
    for work, all_reduce in zip(step["shares"] * seconds["backward"], all_reduces):
        busy = max(0.0, link_free - bucket_ready)  # so long the link still sends other buckets
        slowed = min(busy, work / rate)  # seconds of work beside them, at a lower rate
        bucket_ready += slowed + work - slowed * rate  # the rest is done at full speed
        link_free = max(link_free, bucket_ready) + all_reduce
    seconds |= {"backward": bucket_ready, "comm": link_free - bucket_ready}
    training = sum(seconds[name] for name in PHASES)
    row = network | seconds | {"processes": processes, "devices": processes}
    row |= {"local batch (samples)": local_batch, "comm (%)": 100 * seconds["comm"] / training}
    row |= {"samples/s": processes * local_batch / training, "step (ms)": 1000 * training}
    passes = seconds["forward"] + seconds["backward"]
    row["R (x)"] = passes / (all_reduces.sum() or math.nan)
    return row


def predict(step, scaling, counts):
    """Returns a table of the prediction for one process and for `counts`, with speedups."""
    batch = step["batch"]
    counts = [n for n in sorted({1, *counts}) if scaling == "weak" or n <= batch]
    # The scripts want the same batch for all processes.
    rows = [predict_step(step, n, batch if scaling == "weak" else round(batch / n)) for n in counts]
    return with_speedups(pd.DataFrame(rows))


# Each takes what step_of() returns. The optimizer's time stays.
CHANGES = {
    "as it is": lambda step: step,
    "--comm_hook bf16": lambda step: step | {"hook": "bf16"},
    "twice the batch": lambda step: step | {"batch": 2 * step["batch"]},
    "a link twice as fast": lambda step: step | {"faster": 2},
    "no time in data": lambda step: step | {"phases": step["phases"].assign(data=0.0)},
}


def what_helps(step, processes):
    """Returns a table of changes, by samples/s."""
    rows = []
    for name, change in CHANGES.items():
        changed = change(step)
        local_batch = round(changed["batch"] / processes)
        rows.append(predict_step(changed, processes, local_batch) | {"change": name})
    rows = pd.DataFrame(rows)
    rows["gain (x)"] = rows["samples/s"] / rows["samples/s"][0]
    return rows.sort_values("gain (x)", ascending=False, kind="stable")


def with_whole_training(strong, run, num_steps):
    """Adds the hours and device-hours of the whole training."""
    validations = math.ceil(num_steps / (run["eval_every"] or run["steps_per_epoch"]))
    seconds = num_steps * strong["step (ms)"] / 1000 + run["warmup"]
    seconds += validations * (run["eval"] / strong["processes"] + run["save"])
    hours = seconds / 3600
    return strong.assign(**{"hours": hours, "device-hours": strong["processes"] * hours})


def arguments_of(run, script, changes):
    """Returns the arguments of the run, some of them changed, as far as the script has them."""
    values = run | run["settings"] | changes
    flags = run["settings"]
    if (path := Path(__file__).parent.parent / script).exists():
        flags = re.findall(r'add\("--(\w+)"', path.read_text())
    words = []
    for name in dict.fromkeys([*flags, *changes]):
        value = str(values.get(name))
        if name in changes or name not in OF_THIS_RUN and value not in NOT_GIVEN:
            words += [f"--{name}"] if value == "True" else [f"--{name}", value]
    return shlex.join(words)


def sbatch_line(row, run, num_steps):
    """Returns what to ask Slurm for, with a fifth more time, and time to start and to stop."""
    each = math.ceil(row["processes"] / row["nodes"])
    minutes = math.ceil(1.2 * 60 * row["hours"]) + 5  # SIGUSR2 stops it up to 3 early
    needs = f"--gpus-per-node={each}"
    if run["device"] == "CPU":  # 0 in place of the job file's 4, which a site without GPUs refuses
        needs = f"--gpus-per-node=0 --cpus-per-task={run['threads']}"
    folder = "hybrid" if run["script"].startswith("hybrid/") else "multinode"
    name = Path(run["script"]).stem
    words = ["sbatch", f"--nodes={row['nodes']}", needs, f"--ntasks-per-node={each}"]
    words += [f"--time={minutes // 60}:{minutes % 60:02}:00", f"slurm/{folder}_{name}.slurm"]
    changes = {"batch_size": row["processes"] * row["local batch (samples)"]}
    changes |= {"max_steps": num_steps} if num_steps else {}
    return " ".join([*words, arguments_of(run, f"{folder}/{name}.py", changes)])


def doubts_of(run, strong, weak, step):
    """Returns why the prediction from this run is not to be trusted, if it is not."""
    short = strong["processes"][strong["step (ms)"] < 10]
    uneven = [str(n) for n in strong["processes"] if step["batch"] % n]
    others = {link["device"] for link in step["links"] if "device" in link} - {run["device"]}
    most, known = weak["processes"].max(), step["links"][-1]["processes"]
    is_beyond = step["node"] == math.inf and most > known and run["device"] != "CPU"
    doubts = [
        (run["steps"] < 10, f"only {run['steps']:.0f} step(s) after the warmup were timed"),
        (len(short), f"steps are shorter than 10 ms from {short.min()} process(es) on"),
        (others, f"the run was on {run['device']}, and a link on {', '.join(others)}"),
        (is_beyond, f"a node is taken to hold {most} processes, but was measured with {known}"),
        ("fsdp" in run["script"], "FSDP sends weights, too, and this is a prediction of DDP"),
        (uneven, f"{step['batch']} is no multiple of {', '.join(uneven)}: that is rounded"),
    ]
    return [f"Not to be trusted: {doubt}." for is_so, doubt in doubts if is_so]


def draw(strong, measured, title, path):
    """Draws the predicted speedup beside the ideal and what was measured."""
    axes = Figure().subplots()
    axes.loglog(strong["processes"], strong["ratio"], "--", base=2, color="grey", label="ideal")
    axes.plot(strong["processes"], strong["speedup (x)"], "o-", color="#0072B2", label="predicted")
    if len(measured):
        x, y = measured["processes"], measured["speedup"]
        axes.plot(x, y, "s", color="#D55E00", fillstyle="none", markersize=10, label="measured")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="processes (both axes: log scale)", ylabel="speedup (times)")
    sentence = pays_up_to(strong)[1].replace(": ", ":\n", 1)
    save(axes.figure, f"{sentence}\n{title}", path, ncols=3)


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("files", nargs="+", type=Path, help="logs (.jsonl) or folders of them, and links (.json)")
    add("--link", type=quantity, metavar="100Gbit", help="bandwidth of a link, a second")
    add("--latency", type=quantity, metavar="5us", default=0, help="of a hop of this link")
    add("--gpus_per_node", type=int, default=1, help="of the nodes that have this link")
    add("--processes", type=int, nargs="+", help="predict these numbers; see above")
    add("--steps", type=int, default=0, help="of the whole training; 0: --epochs of the log")
    add("--out", type=Path, metavar="FOLDER", help="draw the predictions there")
    args = parser.parse_args()
    links = [json.loads(path.read_text()) for path in args.files if path.suffix == ".json"]
    args.links = [link | {"each": link["processes"] / link["nodes"]} for link in links]
    if args.link:
        hand = {"processes": 2, "nodes": 2, "each": args.gpus_per_node, "compute_rate": 1.0}
        hand |= {"latency_s": 2 * args.latency, "bandwidth_bytes_per_s": args.link}
        args.links.append(hand)
    args.links.sort(key=lambda link: link["processes"])
    args.logs = [path for path in args.files if path.suffix != ".json"]
    if not args.links or not args.logs:
        parser.error("give a log of --log, and a link of allreduce.py --out or --link")
    sizes = {link["each"] for link in args.links if link["nodes"] > 1}
    if len(sizes) > 1 or 1 in sizes and any(link["nodes"] == 1 for link in args.links):
        parser.error("measure the links between nodes with all GPUs of each node")
    return args


def report_on(run, alike, runs, number, args):
    """Prints the prediction from a run of one process, and draws it."""
    step = step_of(run, alike, args.links)
    powers = [2**n for n in range(11)]
    nodes = [int(n * step["node"]) for n in powers if n * step["node"] <= powers[-1]]
    counts = args.processes or [n for n in powers if n < step["node"]] + nodes
    num_steps = args.steps or run["epochs"] * run["steps_per_epoch"]
    strong = with_whole_training(predict(step, "strong", counts), run, num_steps)
    is_same = (runs["same"] == run["same"]) & (runs["batch_size"] == run["batch_size"])
    is_same &= (runs["comm_hook"] == run["comm_hook"]) & (runs["devices"] == runs["processes"])
    measured = runs[is_same & (runs["processes"] > 1)]
    measured = measured.assign(speedup=measured["samples/s"] / run["samples/s"])
    strong["measured (x)"] = strong["processes"].map(measured.groupby("processes")["speedup"].max())
    weak = predict(step, "weak", counts)
    title = f"{run['task']}, batch {run['batch_size']}"
    print(f"# {title}, run {run['run']}\n", *doubts_of(run, strong, weak, step), sep="\n")
    print(pays_up_to(strong)[1])
    efficient = weak["processes"][(weak["efficiency (%)"] >= 80).cummin()].max()
    print(f"With the batch of a process kept, efficiency is 80% or more up to {efficient}.")
    for name, rows, columns in ("strong", strong, STRONG), ("weak", weak, WEAK):
        print(f"\n## predicted {name} scaling, {title}\n\n{table(columns, rows[1:])}")
    for count in sorted({*(args.processes or [max(2, pays_up_to(strong)[0])])}):
        if 1 < count <= step["batch"]:
            rows = table(HELP, what_helps(step, count))
            print(f"\n## what would help on {count} processes (predicted)\n\n{rows}")
    source = "--steps" if args.steps else f"{run['epochs']} epoch(s), --epochs of the log"
    print(f"\n## what to ask for: {num_steps:,} steps ({source}), a fifth more time, 5 minutes\n")
    print(table(["processes", "nodes", "hours", "device-hours"], strong), end="\n\n")
    print(*(sbatch_line(row, run, args.steps) for row in strong.to_dict("records")), "", sep="\n")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        end = ".png" if number == 1 else f"_{number}.png"
        draw(strong, measured, title, args.out / f"predicted{end}")


def main():
    args = parse_args()
    matplotlib.rcParams.update(STYLE)
    runs = runs_of(read_logs(args.logs))
    is_whole = runs["stages"].map(len) == 1  # hybrid/images.py has several in a process
    singles = runs[(runs["processes"] == 1) & is_whole].sort_values("line")  # the last counts
    singles = singles.drop_duplicates(["same", *LAUNCH, "batch_size"], keep="last")
    if singles.empty:
        raise SystemExit("no run of one process holds a whole model and has steps after its warmup")
    if (singles["device"] == "CPU").any() and args.links[0]["nodes"] == 1:
        print("note: on CPUs this holds as far as each process has cores and memory of its own\n")
    for number, (_, alike) in enumerate(singles.groupby(["same", *LAUNCH], sort=False), start=1):
        for run in alike.to_dict("records"):
            report_on(run, alike, runs, number, args)


if __name__ == "__main__":
    main()
