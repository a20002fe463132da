"""Predict how fast a training is on more processes, and what would help it.

    python predict.py one.jsonl link.json                       # link.json: of allreduce.py --out
    python predict.py one.jsonl link.json --processes 3 6 12
    python predict.py one.jsonl inside.json between.json        # nodes of several GPUs
    python predict.py one.jsonl link.json --noise noise.json    # of singlegpu/noise_scale.py
    python predict.py runs/ 2nodes.json 4nodes.json --out pictures    # beside measured runs

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
processes as the row has, its figures are taken as they are. The column link says so, or from what
number the row is extrapolated. Measure the link between nodes with all GPUs of two nodes or more,
and the link inside a node with all GPUs of one. Without a link between nodes, all processes are
taken to be on one node. The default numbers of processes are powers of two, and beyond a node
powers of two of nodes. More processes pay if twice as many are 1.5 times as fast, and 4 times as
many 2.25 times.

    speedup       samples/s divided by those of one process
    measured      speedup of the fastest run with so many processes in the logs
    efficiency    speedup divided by the number of processes
    comm %        exposed communication as a share of the step
    R             compute / sending, where compute is forward, backward, bubble and optimizer
    time to loss  until the same loss, beside one process: the time of a step times 1 + noise scale
                  / batch, to which the number of steps is proportional (McCandlish et al. 2018)
"""

import argparse
import itertools
import json
import math
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure  # without pyplot, which needs a backend that can be loaded

# The flags that say how a model and a batch are split. They do not change the loss.
LAUNCH = "num_stages shard_size grad_accum_steps num_microbatches schedule".split()
LAUNCH += ["checkpoint_activations"]
# No two runs have all of these in common. A copied snapshot keeps the id of its run, and a resumed
# run may change what follows it.
RUN = "run snapshot script processes nodes comm_hook compile num_workers".split() + LAUNCH
COMPUTE = ["forward", "backward", "bubble", "optimizer"]
PHASES = ["data", "forward", "backward", "bubble", "comm", "optimizer"]  # of a step

# The columns that each row must hold, and what is taken where a script does not log them.
WORDS = "run snapshot script host device comm_hook compile num_workers".split() + LAUNCH
COUNTS = "processes nodes batch_size parameters trained threads steps_per_epoch".split()
NUMBERS = [*PHASES, "comm_total", "warmup", "eval", "save", "seconds"]
NUMBERS += ["steps", "step", "rank", "peak_MB", "epochs", "eval_every"]
FLAGS = {"snapshot": "-", "comm_hook": "none", "compile": "-", "epochs": 1, "eval_every": 0}
FLAGS |= {"num_workers": 0, "stages": [1]} | dict.fromkeys(LAUNCH, "-")
RESULTS = {"bubble": 0, "comm": 0, "comm_total": 0, "last_step": None, "trained": 0}
RESULTS |= {"train_loss": math.nan, "val_loss": math.nan}

STRONG = ["processes", "local batch", "ms a step", "samples/s", "speedup", "efficiency"]
STRONG += ["comm %", "R", "measured", "link"]
WEAK = [*STRONG[:7], "time to loss", "link"]
HELP = ["change", "ms a step", "samples/s", "times as fast", "comm %"]
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes of gradients that DDP sends at once
LINK = ["processes", "nodes", "latency_s", "bandwidth_bytes_per_s", "compute_rate"]

STYLE = {"figure.figsize": (6.4, 3.6), "figure.dpi": 125, "figure.constrained_layout.use": True}
STYLE |= {"font.size": 12, "figure.titlesize": 12, "legend.frameon": False}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "hatch.linewidth": 0.8}


def read_row(line):
    """Returns the row in this line with what titles and comparisons need, or None if damaged."""
    try:
        row = FLAGS | RESULTS | json.loads(line)
        settings = row["settings"]
        # A row holds the flags of the task, too. One of them is not the column of its name, unless
        # the script has written a result over it.
        for name, value in settings.items():
            is_result = name in RESULTS or name.startswith(("train_", "val_"))
            if name in FLAGS or is_result and row.get(name) == value:
                row[name] = (FLAGS | RESULTS).get(name, math.nan)
        row["trained"] = row["trained"] or row["parameters"]
        row |= {name: str(row[name]) for name in WORDS}
        row |= {name: int(row[name]) for name in COUNTS}
        row |= {name: float(row[name]) for name in NUMBERS}
        stages = 1 if row["device"] == "CPU" else len(row["stages"])  # of hybrid/images.py
        row["devices"] = row["processes"] * stages
        same = {name: str(value) for name, value in settings.items()}
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return None
    is_sound = all(0 <= row[name] < 1e12 for name in [*COUNTS, *NUMBERS])
    if not is_sound or min(row[name] for name in COUNTS) < 1:
        return None
    script = Path(row["script"]).name.replace("_fsdp", "").replace("_pipeline", "")
    titles = [same[name] for name in ("model", "dataset", "precision") if name in same]
    row["task"] = ", ".join([script, *titles])
    # Compared runs have all this in common.
    pairs = [pair for pair in same.items() if pair[0] not in ("batch_size", "seed")]
    pairs += [(name, str(row[name])) for name in ("device", "parameters", "compile")]
    row["same"] = tuple(sorted([*pairs, ("script", script)]))
    return row


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
    for name in rows.filter(regex="^(train|val)_"):
        rows[name] = pd.to_numeric(rows[name].astype(str), errors="coerce").astype(float)
    return rows, notes


def with_speedups(runs):
    """Returns the table of runs with their speedups."""
    ratio = runs["devices"] / runs["devices"].min()
    speedup = runs["samples/s"] / runs["samples/s"][ratio == 1].max()
    return runs.assign(ratio=ratio, speedup=speedup, efficiency=speedup / ratio)


def pays_up_to(runs):
    """Returns up to how many devices it pays, and a sentence on it."""
    is_one_each = (runs["devices"] == runs["processes"]).all()  # no stages of hybrid/images.py
    one, several = ("process", "processes") if is_one_each else ("GPU", "GPUs")
    speedups = runs.groupby("devices")["speedup"].max()  # the fastest run with a number counts
    for (few, slow), (many, fast) in itertools.pairwise(speedups.items()):
        needed = 1.5 ** math.log2(many / few)
        if fast / slow < needed:
            limit = f"1 {one}" if few == 1 else f"{few} {several}"
            gain = f"{many} are {fast / slow:.2f} times as fast as {few}"
            return few, f"It pays up to {limit}: {gain}, less than {needed:.2f}."
    most = speedups.index.max()
    return most, f"It pays up to {most} {several}, and there are no numbers on more."


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


def read_links(paths):
    """Returns what allreduce.py wrote of the links: a dict for each file."""
    links = []
    for path in paths:
        try:
            written = json.loads(Path(path).read_text())
            link = {name: float(written[name]) for name in LINK}
            links.append(link | {"device": str(written["device"])})  # "CPU" or a GPU
            is_sound = 0 <= link["latency_s"] and 1 <= link["nodes"] <= link["processes"]
            is_sound &= link["bandwidth_bytes_per_s"] >= 1 and 0.01 <= link["compute_rate"] <= 1
            if not is_sound or link["processes"] < 2 or max(link[name] for name in LINK) > 1e30:
                raise ValueError(f"this cannot be: {link}")
        except Exception as error:  # a damaged or foreign file can fail anywhere
            sys.exit(f"cannot read the link {path}: {error!r}")
    return sorted(links, key=lambda link: link["processes"])


def runs_of(rows):
    """Returns a table of the runs: their last rows, with means over steps and processes."""
    of_run = rows.groupby(RUN, sort=False)
    steps = of_run["steps"].sum()  # of all processes
    runs = of_run.last()
    runs[PHASES] = of_run[PHASES].sum().div(steps, axis=0)
    runs["eval"] = of_run["eval"].sum() / of_run["val_loss"].count().clip(lower=1)
    runs["save"] = of_run["save"].mean()
    runs["warmup"] = of_run["warmup"].max()
    runs["steps"] = steps / runs.index.get_level_values("processes")
    runs["line"] = rows.index.to_series().groupby([rows[name] for name in RUN]).max()
    runs = runs.reset_index()
    runs["seconds"] = runs[PHASES].sum(axis=1)  # of a step
    runs["samples/s"] = runs["batch_size"] / runs["seconds"]
    return runs[(runs["steps"] > 0) & (runs["seconds"] > 1e-9)]


def step_of(run, alike, links):
    """Returns what a prediction needs of a run, and of those like it with other batches.

    phases: the seconds of each phase of a step, a row for each batch. shares: for each bucket of
    gradients, the share of the backward pass that ends when it is ready. faster: how many times as
    fast as measured the links are to be.
    """
    no_batch = pd.DataFrame(0.0, [0], PHASES)  # takes no time
    phases = pd.concat([no_batch, alike.set_index("batch_size")[PHASES].sort_index()])
    own = phases.loc[run["batch_size"]]
    try:
        events = sorted(event[1:] for event in run["last_step"] if event[0] == "all-reduce")
        starts, _, sizes = np.array(events, float).T
        ready = 1 - (starts[-1] - starts) / own["backward"]  # the last one ends the pass
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
    each = [link["processes"] / link["nodes"] for link in links if link["nodes"] > 1]
    step["node"] = min(each, default=math.inf)  # how many processes are on one
    return step | {"hook": run["comm_hook"], "links": links, "faster": 1}


def network_of(processes, step):
    """Returns the nodes of so many processes, and the figures of the link that counts."""
    inside = [link for link in step["links"] if link["nodes"] == 1]
    between = [link for link in step["links"] if link["nodes"] > 1]
    nodes = max(1, math.ceil(processes / step["node"]))
    links = between if nodes > 1 else inside or between
    link = [links[0], *(link for link in links if link["processes"] <= processes)][-1]
    hops = hops_of(processes, nodes, link["device"])
    measured_hops = hops_of(link["processes"], link["nodes"], link["device"])
    is_measured = processes == link["processes"]
    return {
        "nodes": nodes,
        "latency": link["latency_s"] * hops / measured_hops,
        "bandwidth": step["faster"] * link["bandwidth_bytes_per_s"],
        "compute_rate": link["compute_rate"],
        "link": "measured" if is_measured else f"from {link['processes']:.0f}",
    }


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
    row = network | seconds | {"processes": processes, "devices": processes}
    row["local batch"] = local_batch
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


# Each takes what step_of() returns. The optimizer's time stays.
CHANGES = {
    "as it is": lambda step: step,
    "--comm_hook bf16": lambda step: step | {"hook": "bf16"},
    "twice the batch": lambda step: step | {"batch": 2 * step["batch"]},
    "a link twice as fast": lambda step: step | {"faster": 2},
    "no time in data": lambda step: step | {"phases": step["phases"].assign(data=0.0)},
}


def what_helps(step, processes):
    """Returns a table of changes, by samples/s, and a sentence on the best."""
    rows = []
    for name, change in CHANGES.items():
        changed = change(step)
        row = predict_step(changed, processes, share_of(changed["batch"], processes))
        rows.append(row | {"change": name})
    rows = pd.DataFrame(rows)
    rows["times as fast"] = rows["samples/s"] / rows["samples/s"][0]
    rows = rows.sort_values("times as fast", ascending=False, kind="stable")
    name, gain = rows[["change", "times as fast"]].iloc[0]
    return rows, f"The fastest is {name}: {gain:.2f} times as fast (predicted)."


def with_whole_training(strong, run, num_steps):
    """Adds the hours and device-hours of the whole training."""
    validations = math.ceil(num_steps / (run["eval_every"] or run["steps_per_epoch"]))
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
    written = json.loads(Path(path).read_text())
    noise_scale, half_width = float(written["noise_scale"]), float(written["half_width"])
    if not 0 <= 2 * half_width < noise_scale < math.inf:
        sys.exit(f"{path}: the noise scale is {noise_scale:g}, give or take {half_width:g}")
    steps = 1 + noise_scale / (weak["processes"] * weak["local batch"])
    times = steps * weak["ms a step"]
    return weak.assign(**{"time to loss": times / times[0]})


def doubts_of(run, strong, weak, step):
    """Returns why the prediction from this run is not to be trusted, if it is not."""
    short = strong["processes"][strong["ms a step"] < 10]
    uneven = [str(n) for n in strong["processes"] if step["batch"] % n]
    others = {link["device"] for link in step["links"]} - {run["device"]}
    is_cpu = run["device"] == "CPU"
    is_shared = is_cpu and step["links"][0]["nodes"] == 1
    most, known = weak["processes"].max(), step["links"][-1]["processes"]
    is_beyond = max(link["nodes"] for link in step["links"]) == 1 and most > known and not is_cpu
    doubts = [
        (run["steps"] < 10, f"only {run['steps']:.0f} step(s) after the warmup were timed"),
        (len(short), f"steps are shorter than 10 ms from {short.min()} process(es) on"),
        (others, f"the run was on {run['device']}, and a link on {', '.join(others)}"),
        (is_shared, "CPU processes of one node share its cores and memory"),
        (is_beyond, f"a node is taken to hold {most} processes, but was measured with {known:.0f}"),
        ("fsdp" in run["script"], "FSDP sends weights, too, and this is a prediction of DDP"),
        (uneven, f"{step['batch']} is no multiple of {', '.join(uneven)}: that is rounded"),
    ]
    return [f"Not to be trusted: {doubt}." for is_so, doubt in doubts if is_so]


def draw(strong, measured, title, path):
    """Draws the predicted speedup beside the ideal and what was measured."""
    axes = Figure().subplots()
    axes.loglog(strong["processes"], strong["ratio"], "--", base=2, color="grey", label="ideal")
    axes.plot(strong["processes"], strong["speedup"], "o-", color="#0072B2", label="predicted")
    if len(measured):
        x, y = measured["processes"], measured["speedup"]
        axes.plot(x, y, "s", color="#D55E00", fillstyle="none", markersize=10, label="measured")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="processes (log scale)", ylabel="speedup over one process")
    save(axes.figure, f"{pays_up_to(strong)[1].split(':')[0].rstrip('.')}\n{title}", path)


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("files", nargs="+", type=Path, help="logs (.jsonl) or folders of them, and links (.json)")
    add("--processes", type=int, nargs="+", help="predict these numbers; see above")
    add("--noise", metavar="NOISE.json", help="file of noise_scale.py: time to the same loss")
    add("--steps", type=int, default=0, help="of the whole training; 0: --epochs of the log")
    add("--out", type=Path, metavar="FOLDER", help="draw the predictions there")
    args = parser.parse_args()
    args.links = read_links([path for path in args.files if path.suffix == ".json"])
    args.logs = [path for path in args.files if path.suffix != ".json"]
    if not args.links or not args.logs:
        parser.error("give a log of --log, and a link that allreduce.py --out has written")
    sizes = {link["processes"] / link["nodes"] for link in args.links if link["nodes"] > 1}
    if len(sizes) > 1 or 1 in sizes and any(link["nodes"] == 1 for link in args.links):
        parser.error("measure the links between nodes with all GPUs of each node")
    return args


def report_on(run, alike, runs, number, args):
    """Prints the prediction from a run of one process, and draws it."""
    step = step_of(run, alike, args.links)
    powers = [2**n for n in range(11)]
    nodes = [int(n * step["node"]) for n in powers if n * step["node"] <= powers[-1]]
    counts = args.processes or [n for n in powers if n < step["node"]] + nodes
    num_steps = args.steps or int((run["epochs"] or 1) * run["steps_per_epoch"])
    strong = with_whole_training(predict(step, "strong", counts), run, num_steps)
    is_same = (runs["same"] == run["same"]) & (runs["batch_size"] == run["batch_size"])
    is_same &= (runs["comm_hook"] == run["comm_hook"]) & (runs["devices"] == runs["processes"])
    measured = runs[is_same & (runs["processes"] > 1)]
    measured = measured.assign(speedup=measured["samples/s"] / run["samples/s"])
    strong["measured"] = strong["processes"].map(measured.groupby("processes")["speedup"].max())
    weak = predict(step, "weak", counts)
    if args.noise:
        weak = with_times_to_loss(weak, args.noise)
    title = f"{run['task']}, batch {run['batch_size']}"
    print(f"# {title}, run {run['run']}\n")
    print(*doubts_of(run, strong, weak, step), pays_up_to(strong)[1], sep="\n")
    efficient = weak["processes"][(weak["efficiency"] >= 0.8).cummin()].max()
    print(f"With the batch of a process kept, efficiency is 80% or more up to {efficient}.")
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
        args.out.mkdir(parents=True, exist_ok=True)
        end = ".png" if number == 1 else f"_{number}.png"
        draw(strong, measured, title, args.out / f"predicted{end}")


def main():
    args = parse_args()
    matplotlib.rcParams.update(STYLE)
    rows, notes = read_logs(args.logs)
    runs = runs_of(rows)
    print("".join(f"note: {note}\n" for note in notes), end="")
    is_whole = runs["stages"].map(len) == 1  # hybrid/images.py has several in a process
    singles = runs[(runs["processes"] == 1) & is_whole]
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
