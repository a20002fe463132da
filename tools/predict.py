"""Predict how fast a training is on more processes, and what would help it.

    python tools/predict.py one.jsonl link.json --processes 8       # of tools/allreduce.py --out
    python tools/predict.py one.jsonl --link 100Gbit --latency 5us  # a link of your data sheet
    python tools/predict.py one.jsonl inside.json between.json      # nodes of several GPUs
    python tools/predict.py runs/ 2nodes.json 4nodes.json --out pictures    # beside measured runs

Files that end in .json are links. All others are logs of --log, or folders of them. It prints the
answer, a table, and what would help. --all also prints the prediction for a batch that grows, the
hours of the whole training, and the lines for Slurm. The columns are explained in report.py;
measured is the speedup of the fastest run with so many processes in the logs.

Computing. The prediction (after Li et al. 2020, "PyTorch Distributed") starts from a step of a run
of one process. The time of data, forward and backward pass is proportional to the batch; with logs
of several batches it is interpolated. The time of the optimizer is constant. So it holds for
processes that compute as fast as this one did.

Sending. A log of multigpu tells the bytes of each bucket of gradients and when it is ready. For
other logs, DDP's default buckets, 1 MiB and then 25 MiB, are taken to fill evenly. A bucket waits
for the one before. While its all-reduce runs, the backward pass is as slow as allreduce.py
(--min_bytes 1048576) has measured. An all-reduce of n bytes takes the latency, and
n x 2 (N - 1) / N / bandwidth. The latency is that of its hops: 2 (N - 1) in the ring of gloo
(CPUs); with NCCL, which sends small messages through trees, 2 (G - 1) inside nodes of G GPUs and
2 log2(M) between M nodes (its source, src/graph/tuning.cc; no NCCL has been measured yet).

Links. Where a link was measured with as many processes as the row has, its figures are taken as
they are, which the column link says. Measure the link between nodes with all GPUs of two nodes or
more, and the link inside a node with all GPUs of one. Without a link between nodes, all processes
are taken to be on one node.

The scripts print a speedup of twice as many processes, too. It is the same if there is no latency,
no time in data, and no all-reduce that the backward pass hides.
"""

import argparse
import json
import math
import re
import shlex
import signal
import sys
import textwrap
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from logs import (
    LAUNCH,
    PHASES,
    STYLE,
    output_folder,
    pays_up_to,
    read_logs,
    save,
    table,
    with_speedups,
)
from matplotlib.figure import Figure  # without pyplot, which needs a backend that can be loaded

WEAK = ["processes", "step (ms)", "samples/s", "speedup (x)", "efficiency (%)", "comm (%)", "link"]
STRONG = [*WEAK[:-1], "measured (x)", "link"]
HELP = ["change", "step (ms)", "samples/s", "gain (x)", "comm (%)"]
MOST = 1024  # processes that are tried if no number is asked for
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes of gradients that DDP sends at once
BANDWIDTHS = {"Gbit": 125e6, "Mbit": 125e3, "GB": 1e9, "MB": 1e6}  # in bytes/s
LATENCIES = {"us": 1e-6, "ms": 1e-3}  # in seconds
NOT_GIVEN = ("None", "False", "none", "-", "nan")  # what a row has for a flag that was not given
OF_THIS_RUN = {"max_steps", "num_gpus", "snapshot", "log"}  # flags not for a job


# == What was measured: a run of one process, and links ==


def timed_steps(rows):
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


def buckets_of(run, backward):
    """Returns the bytes of each bucket of gradients, and the share of the backward pass before it.

    A share begins when the bucket before is ready, and ends when this one is. `backward` is the
    seconds of the whole pass.
    """
    spans = [span for span in run["last_step"] or () if span[0] == "all-reduce"]
    if spans and backward > 0:
        starts = np.array(sorted(start for _, start, _, _ in spans))
        spans.sort(key=lambda span: span[1])
        sizes = np.array([size for *_, size in spans])
        ready = 1 - (starts[-1] - starts) / backward  # the last one ends the pass
    else:  # a process without DDP has no buckets
        total = 4 * int(run["parameters"])
        ends = np.array([0, *range(FIRST_BUCKET, total, BUCKET), total])
        sizes = np.diff(ends)
        # Of several micro-batches, the last one sends.
        passes = 1 if run["grad_accum_steps"] == "-" else run["grad_accum_steps"]
        ready = 1 - (1 - ends[1:] / max(1, total)) / passes
    return sizes, np.diff(ready.clip(0, 1), prepend=0)


def step_of(run, alike, links):
    """Returns what a prediction needs of a run, and of those like it with other batches.

    phases: the seconds of each phase of a step, a row for each batch. bytes, shares: those of
    buckets_of(). faster: how many times as fast the links are. node: the processes of one node.
    """
    no_batch = pd.DataFrame(0.0, [0], PHASES)  # takes no time
    measured = alike.set_index("batch_size")[PHASES].sort_index()
    own = measured.loc[run["batch_size"]]
    sizes, shares = buckets_of(run, own["backward"])
    between = [link["each"] for link in links if link["nodes"] > 1]
    step = {"device": run["device"], "hook": run["comm_hook"], "links": links, "faster": 1}
    step |= {"batch": run["batch_size"], "optimizer": own["optimizer"]}
    step |= {"phases": pd.concat([no_batch, measured]), "bytes": sizes, "shares": shares}
    step["node"] = min(between, default=math.inf)
    return step


def hops_of(processes, nodes, device):
    """Returns half of the messages that an all-reduce sends one after the other."""
    if device == "CPU":
        return processes - 1
    return processes / nodes - 1 + math.log2(nodes)


def network_of(processes, step):
    """Returns the nodes of so many processes, and the figures of the link that counts."""
    nodes = max(1, math.ceil(processes / step["node"]))
    is_between = nodes > 1
    links = [link for link in step["links"] if (link["nodes"] > 1) == is_between]
    links = links or step["links"]
    # The link that was measured with the most processes, but no more than there are.
    fewer = [link for link in links if link["processes"] <= processes]
    link = fewer[-1] if fewer else links[0]
    hops = hops_of(processes, nodes, step["device"])
    measured_hops = hops_of(link["processes"], link["nodes"], step["device"])
    known = link["processes"]
    source = "as measured" if processes == known else f"scaled from {known}"
    return {
        "nodes": nodes,
        "compute_rate": link["compute_rate"],
        "latency": link["latency_s"] * hops / measured_hops,
        "bandwidth": step["faster"] * link["bandwidth_bytes_per_s"],
        "link": source if "device" in link else "by hand",
    }


# == The prediction ==


def predict_step(step, processes, local_batch):
    """Returns the row of the prediction for so many processes, without the speedup."""
    phases = step["phases"]
    seconds = {name: np.interp(local_batch, phases.index, phases[name]) for name in phases}
    seconds["optimizer"] = step["optimizer"]
    network = network_of(processes, step)
    sizes = step["bytes"] / (1 if step["hook"] == "none" else 2)
    per_byte = 2 * (processes - 1) / processes / network["bandwidth"]
    all_reduces = network["latency"] + sizes * per_byte
    rate = network["compute_rate"]
    bucket_ready = 0.0  # in seconds from the beginning of the backward pass
    link_free = 0.0  # likewise: when the all-reduces so far have ended
    for work, all_reduce in zip(step["shares"] * seconds["backward"], all_reduces):
        busy = max(0.0, link_free - bucket_ready)  # so long the link still sends other buckets
        slowed = min(busy, work / rate)  # seconds of work beside them, at a lower rate
        bucket_ready += slowed + work - slowed * rate  # the rest is done at full speed
        link_free = max(link_free, bucket_ready) + all_reduce
    seconds |= {"backward": bucket_ready, "comm": link_free - bucket_ready}
    total = sum(seconds[name] for name in PHASES)
    row = network | seconds | {"processes": processes, "devices": processes}
    row |= {"local batch": local_batch, "samples/s": processes * local_batch / total}
    row |= {"step (ms)": 1000 * total, "comm (%)": 100 * seconds["comm"] / total}
    return row


def predict(step, scaling, counts):
    """Returns a table of the prediction for one process and for `counts`, with speedups."""
    batch = step["batch"]
    rows = []
    for count in sorted({1, *counts}):
        if scaling == "weak":
            rows.append(predict_step(step, count, batch))
        elif count <= batch:  # the scripts want the same batch for all processes
            rows.append(predict_step(step, count, round(batch / count)))
    return with_speedups(pd.DataFrame(rows))


def counts_of(asked, node):
    """Returns the numbers of processes to try: what is asked for, and powers of two below it.

    If the link says how many processes a node has, those are 1, 2, 4, ... on one node, and then
    1, 2, 4, ... whole nodes.
    """
    most = max(asked) if asked else MOST
    powers = [2**n for n in range(most.bit_length())]
    on_one_node = [n for n in powers if n < node]
    on_several = [int(n * node) for n in powers if n * node <= most]
    return sorted({*on_one_node, *on_several, *(asked or ())})


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


# == What to ask a cluster for ==


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
    for path in (script, run["script"]):  # a task of one's own may not stand in each folder yet
        path = Path(__file__).parent.parent / path
        if path.exists():
            flags = re.findall(r'\badd(?:_argument)?\("--(\w+)"', path.read_text())
            break
    words = []
    for name in dict.fromkeys([*flags, *changes]):
        value = str(values.get(name))
        is_given = name not in OF_THIS_RUN and value not in NOT_GIVEN
        if name in changes or is_given:
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
    changes = {"batch_size": row["processes"] * row["local batch"]}
    if num_steps:
        changes["max_steps"] = num_steps
    return " ".join([*words, arguments_of(run, f"{folder}/{name}.py", changes)])


# == The report ==


def answer_of(run, strong):
    """Returns the answer in a sentence, with where it holds."""
    where = f"{run['device']} of host {run['host']}"
    others = "another GPU"
    if run["device"] == "CPU":
        where += f", {run['threads']} thread" + "s" * (run["threads"] != 1)
        others = "a GPU or another CPU"
    return (
        f"{pays_up_to(strong)[1]}. This holds if each process computes as fast as the measured "
        f"one ({where}). For {others}, measure one process there."
    )


def doubts_of(run, strong, weak, step):
    """Returns the reasons not to trust the prediction from this run. There may be none."""
    short = strong["processes"][strong["step (ms)"] < 10]
    uneven = [str(n) for n in strong["processes"] if step["batch"] % n]
    others = {link["device"] for link in step["links"] if "device" in link} - {run["device"]}
    most, known = weak["processes"].max(), step["links"][-1]["processes"]
    is_beyond = step["node"] == math.inf and most > known and run["device"] != "CPU"
    doubts = [
        (run["steps"] < 10, f"only {run['steps']:.0f} step(s) were timed, and 10 are needed"),
        (len(short), f"steps are shorter than 10 ms from {short.min()} process(es) on"),
        (others, f"the run was on {run['device']}, and a link on {', '.join(others)}"),
        (is_beyond, f"a node is taken to hold {most} processes, but was measured with {known}"),
        ("fsdp" in run["script"], "FSDP sends weights, too, and this is a prediction of DDP"),
        (uneven, f"{step['batch']} is no multiple of {', '.join(uneven)}: that is rounded"),
    ]
    for row in strong.to_dict("records"):
        measured, predicted = row["measured (x)"], row["speedup (x)"]
        is_off = abs(predicted / measured - 1) > 0.1  # False if it was not measured
        words = f"{row['processes']} processes were measured to be {measured:.2f} times as fast"
        doubts.append((is_off, f"{words}, and {predicted:.2f} is predicted"))
    return [f"Not to be trusted: {doubt}." for is_so, doubt in doubts if is_so]


def notes_of(run, step, asked):
    """Returns what a reader must know besides."""
    notes = []
    if run["device"] == "CPU" and step["links"][0]["nodes"] == 1:
        notes.append("each process must have cores and memory of its own, which CPUs share")
    too_many = [str(n) for n in asked or () if n > step["batch"]]
    if too_many:
        notes.append(
            f"a batch of {step['batch']} has no samples for {', '.join(too_many)} processes"
        )
    return [f"note: {note}" for note in notes]


def print_what_helps(step, count):
    """Prints a table of the changes that make it at least 1% faster."""
    rows = what_helps(step, count)
    rows = rows[(rows["gain (x)"] >= 1.01) | (rows["change"] == "as it is")]
    print(f"\n## what would help on {count} processes (predicted; gain in samples/s)\n")
    print(table(HELP, rows))


def print_the_rest(run, strong, weak, args):
    """Prints weak scaling, the hours of the whole training, and the lines for Slurm."""
    efficient = weak["processes"][(weak["efficiency (%)"] >= 80).cummin()].max()
    heading = f"predicted, with a batch of {run['batch_size']} for each process"
    print(f"\n## {heading}\n\n{table(WEAK, weak[1:])}")
    print(f"\nEfficiency is 80% or more up to {efficient}.")
    num_steps = args.steps or run["epochs"] * run["steps_per_epoch"]
    strong = with_whole_training(strong, run, num_steps)
    source = "--steps" if args.steps else f"{run['epochs']} epoch(s), --epochs of the log"
    print(f"\n## what to ask for: {num_steps:,} steps ({source}), a fifth more time, 5 minutes\n")
    print(table(["processes", "nodes", "hours", "device-hours"], strong), end="\n\n")
    for row in strong.to_dict("records"):
        print(sbatch_line(row, run, args.steps))


def measured_of(run, runs):
    """Returns the measured runs that differ from this one in the number of processes alone."""
    is_same = (runs["same"] == run["same"]) & (runs["batch_size"] == run["batch_size"])
    is_same &= (runs["comm_hook"] == run["comm_hook"]) & (runs["devices"] == runs["processes"])
    measured = runs[is_same & (runs["processes"] > 1)]
    return measured.assign(speedup=measured["samples/s"] / run["samples/s"])


def report_on(run, alike, runs, number, args):
    """Prints the prediction from a run of one process, and draws it."""
    step = step_of(run, alike, args.links)
    counts = counts_of(args.processes, step["node"])
    strong, weak = predict(step, "strong", counts), predict(step, "weak", counts)
    measured = measured_of(run, runs)
    fastest = measured.groupby("processes")["speedup"].max()
    strong["measured (x)"] = strong["processes"].map(fastest)
    title = f"{run['task']}, global batch {run['batch_size']}"
    print(f"# {title}, run {run['run']}\n")
    print(textwrap.fill(answer_of(run, strong), 100))
    doubts = doubts_of(run, strong, weak, step)
    for line in doubts + notes_of(run, step, args.processes):
        print(line)
    print(f"\n## predicted, with a global batch of {step['batch']}\n\n{table(STRONG, strong[1:])}")
    asked = args.processes or [max(2, pays_up_to(strong)[0])]
    possible = sorted({n for n in asked if 1 < n <= step["batch"]})
    for count in possible if args.all else possible[-1:]:
        print_what_helps(step, count)
    if args.all:
        print_the_rest(run, strong, weak, args)
    print()
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        end = ".png" if number == 1 else f"_{number}.png"
        words = [f"{title}, {run['device']}", *(textwrap.fill(doubt, 76) for doubt in doubts)]
        draw(strong, measured, "\n".join(words), args.out / f"predicted{end}")


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
    sentence = pays_up_to(strong)[1].replace(" (", "\n(") + "."
    errors = abs(strong["speedup (x)"] / strong["measured (x)"] - 1)
    if errors.notna().any():
        difference = f"Predicted and measured speedups differ by at most {errors.max():.0%}."
        sentence = f"{difference}\n{sentence}"
    save(axes.figure, f"{sentence}\n{title}", path, ncols=3)


# == Arguments ==


def at_least(least):
    """Returns a type for argparse: whole numbers from `least` on."""

    def number(text):
        found = int(text)
        if found < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return found

    return number


def quantity(units):
    """Returns a type for argparse: a text such as 100Gbit, which has one of these units."""

    def number(text):
        for unit, size in units.items():
            if text.endswith(unit):
                found = size * float(text.removesuffix(unit))
                if not 0 < found < math.inf:
                    raise argparse.ArgumentTypeError(f"{text} is not above 0")
                return found
        raise argparse.ArgumentTypeError(f"{text} has no unit of {', '.join(units)}")

    return number


def read_link(path):
    """Returns the link in a file of allreduce.py. SystemExit: the file holds no link."""
    try:
        link = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"{path} is no link of allreduce.py --out: {error}")
    least = {"processes": 2, "nodes": 1, "latency_s": 0}
    above_zero = ["bandwidth_bytes_per_s", "compute_rate"]
    for name in [*least, *above_zero]:
        value = link.get(name) if isinstance(link, dict) else None
        is_number = isinstance(value, (int, float)) and math.isfinite(value)
        if not is_number or value < least.get(name, 0) or (name in above_zero and value == 0):
            sys.exit(f"{path} is no link of allreduce.py --out: its {name} is {value}")
    return link | {"each": link["processes"] / link["nodes"]}


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("files", nargs="+", type=Path, help="logs (.jsonl) or folders of them, and links (.json)")
    add(
        "--link", type=quantity(BANDWIDTHS), metavar="100Gbit", help="bandwidth of a link, a second"
    )
    add("--latency", type=quantity(LATENCIES), metavar="5us", default=0, help="of one of its hops")
    add("--gpus_per_node", type=at_least(1), default=1, help="of the nodes that have this link")
    add("--processes", type=at_least(1), nargs="+", help="predict these, and powers of two below")
    add("--steps", type=at_least(0), default=0, help="of the whole training; 0: the log's --epochs")
    add("--all", action="store_true", help="also a growing batch, hours, and lines for Slurm")
    add("--out", type=output_folder, metavar="FOLDER", help="draw the predictions there")
    args = parser.parse_args()
    args.links = [read_link(path) for path in args.files if path.suffix == ".json"]
    if args.link:
        hand = {"processes": 2, "nodes": 2, "each": args.gpus_per_node, "compute_rate": 1.0}
        hand |= {"latency_s": 2 * args.latency, "bandwidth_bytes_per_s": args.link}
        args.links.append(hand)
    args.links.sort(key=lambda link: link["processes"])
    args.logs = [path for path in args.files if path.suffix != ".json"]
    if not args.links or not args.logs:
        parser.error("give a log of --log, and a link of allreduce.py --out or --link")
    sizes = {link["each"] for link in args.links if link["nodes"] > 1}
    has_inside = any(link["nodes"] == 1 for link in args.links)
    if len(sizes) > 1 or (1 in sizes and has_inside):
        parser.error("measure the links between nodes with all GPUs of each node")
    return args


def main():
    args = parse_args()
    matplotlib.rcParams.update(STYLE)
    runs = timed_steps(read_logs(args.logs))
    is_whole = runs["stages"].map(len) == 1  # hybrid/images.py has several in a process
    singles = runs[(runs["processes"] == 1) & is_whole].sort_values("line")  # the last counts
    singles = singles.drop_duplicates(["same", *LAUNCH, "batch_size"], keep="last")
    if singles.empty:
        sys.exit("no run of one process holds a whole model and has steps after its warmup")
    if (singles["parameters"] == 0).any():
        sys.exit("a log does not say how large its model is: give it to print_marks()")
    for number, (_, alike) in enumerate(singles.groupby(["same", *LAUNCH], sort=False), start=1):
        for run in alike.to_dict("records"):
            report_on(run, alike, runs, number, args)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without an error
    main()
