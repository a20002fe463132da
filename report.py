"""Compare training runs by their logs, and draw them.

    python report.py runs/                            # logs in a folder, written with --log
    python report.py runs/ --out report               # also writes report.md, CSVs and pictures
    python report.py trace.json --out report          # draws a file of --trace

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
"""

import argparse
import itertools
import json
import math
import re
import sys
import textwrap
from pathlib import Path

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.patches import Patch

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
OF_A_RUN = [
    "settings",
    "same",
    "task",
    *WORDS,
    *COUNTS,
    "comm_hook",
    "compile",
    *LAUNCH,
    "stages",
    "buckets",
]
MEASURED = re.compile("train_|val_|(d_model|num_layers|seq_len)$")  # numbers, or missing

RATIOS = ["speedup", "efficiency"]
SPEED = ["processes", "nodes", "batch_size", "steps", "seconds", "samples/s", *RATIOS]
SPEED += ["device-hours", "split"]
COMMUNICATION = ["processes", "comm %", "hidden %", "R", "sending", "waiting"]
COMMUNICATION += ["late rank", "late host", "skew"]
ALONE = [*TITLE, "processes", "batch_size", "steps", "seconds", "samples/s", "device-hours"]
BESIDE = ["processes", "warmup", "eval", "save", "peak_MB", "tokens/s", "TFLOP/s"]
APPLICATION = ["nodes", "processes", "seconds", *RATIOS, "device-hours", "peak_MB", "eval", "save"]

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
    settings = summary["settings"]
    summary |= {name: str(settings.get(name, "-")) for name in TITLE[1:]}
    summary["script"] = script_of(summary)
    summary |= {name: int(summary[name]) for name in COUNTS}
    summary |= {name: str(summary.get(name, "-")) for name in ("comm_hook", "compile", *LAUNCH)}
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
    lines += [pays_up_to(group)[1], ""]
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
        lines += [table(APPLICATION, group), "", pays_up_to(group)[1], ""]
    return lines


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


def draw_speedup(group, path):
    """Draws the speedup beside the ideal, and Amdahl's law."""
    few, sentence = pays_up_to(group)
    group = group.set_index("processes")
    figure, axes = plt.subplots()
    axes.plot(group.index, group["ratio"], "--", color="grey", label="ideal")
    if group["serial"].notna().all():
        serial = max(0.0, group["serial"].iloc[0])
        amdahl = 1 / (serial + (1 - serial) / group["ratio"])
        axes.plot(group.index, amdahl, color="#56B4E9", label="Amdahl's law")
    axes.plot(group.index, group["speedup"], "o", color="#0072B2", label="measured")
    axes.set(xlabel="processes", ylabel="speedup", ylim=0, xticks=group.index)
    axes.set_title(f"{re.split('[:,]', sentence)[0].rstrip('.')}\n{group['group'].iloc[0]}")
    figure.legend(loc="outside right center")
    figure.savefig(path)


def draw_losses(group, path):
    """Draws the loss over steps and over seconds."""
    figure, axes = plt.subplots(1, 2, sharey=True, figsize=(10, 4.5))
    colours = [*COLOURS.values()]
    for number, run in enumerate(group.to_dict("records")):
        colour = colours[(2 + number) % len(colours)]
        for x, ax in zip(("step", "seconds"), axes):
            curve = run["curve"]
            ax.plot(curve[x], curve["train_loss"], "--", color=colour)
            points = curve[curve["val_loss"].notna()]
            label = f"{run['processes']} process(es)" if x == "step" else ""
            ax.plot(points[x], points["val_loss"], "o-", color=colour, label=label)
            ax.set(xlabel="optimizer steps" if x == "step" else "time since the start (s)")
    axes[0].set(ylabel="loss (training dashed)")
    best = group.loc[group["speedup"].idxmax(), "processes"]
    figure.suptitle(f"{best} process(es) train fastest\n{group['group'].iloc[0]}")
    figure.legend(loc="outside right center")
    figure.savefig(path)


def draw_models(groups, path):
    """Draws the speedups of several models side by side."""
    speedups = {}
    for group in groups:
        name = f"{group['task'].iloc[0]}\nbatch {group['batch_size'].iloc[0]}"
        speedups[name.replace(", ", "\n")] = group.groupby("processes")["speedup"].max()
    speedups = pd.DataFrame(speedups).T
    best = speedups.max(axis=1).idxmax().replace("\n", ", ")
    figure, axes = plt.subplots(figsize=(max(8, 2 * len(speedups)), 5))
    speedups.plot.bar(ax=axes, rot=0, legend=False, color=[*COLOURS.values()], fontsize=10)
    axes.set(ylabel="speedup", title=f"More processes help {best} most")
    figure.legend(title="processes", loc="outside right center")
    figure.savefig(path)


def draw_trace(path):
    """Returns the figure of a --trace: for each rank its phases and, below them, its all-reduces.

    An all-reduce waits until it has begun in all processes: that part of it is pale.
    """
    try:
        events = json.loads(path.read_text())["traceEvents"]
        hosts = {
            event["pid"]: event["args"]["name"]
            for event in events
            if event["name"] == "process_name"
        }
        bars = pd.DataFrame([event for event in events if event["ph"] == "X"])
        bars = bars.astype({"ts": float, "dur": float, "tid": int, "pid": int})
        bars["ts"] = (bars["ts"] - bars["ts"].min()) / 1000  # in ms
        bars["dur"] /= 1000
        bars["number"] = bars.sort_values("ts").groupby(["pid", "tid"]).cumcount()
    except (LookupError, OSError, TypeError, ValueError) as error:
        sys.exit(f"cannot read the trace {path}: {error!r}")
    bars["begun"] = bars.groupby(["tid", "number"])["ts"].transform("max")
    ranks = sorted(bars["pid"].unique())
    figure, axes = plt.subplots(figsize=(8, 1.6 + 1.1 * len(ranks)))
    waits = dict.fromkeys(ranks, 0.0)
    for bar in bars.itertuples():
        row = ranks.index(bar.pid)
        if bar.tid == 0:
            phase = bar.name.split()[0]  # "forward 3" is of micro-batch 3
            colour = COLOURS.get(phase, "#CC79A7")
            axes.barh(
                row,
                bar.dur,
                left=bar.ts,
                height=0.45,
                color=colour,
                edgecolor="white",
                linewidth=0.5,
            )
            continue
        wait = min(max(0.0, bar.begun - bar.ts), bar.dur)
        waits[bar.pid] += wait
        place = {"y": row + 0.36 + 0.12 * (bar.tid - 1), "height": 0.18 / bar.tid}
        axes.barh(width=wait, left=bar.ts, color="white", edgecolor="black", hatch="////", **place)
        axes.barh(width=bar.dur - wait, left=bar.ts + wait, color="black", **place)
    axes.invert_yaxis()
    axes.set_yticks(range(len(ranks)), [hosts.get(rank, f"rank {rank}") for rank in ranks])
    axes.set(xlabel="time (ms)")
    late = min(waits, key=waits.get)
    most = max(waits.values())
    title = f"The others wait up to {most:.3g} ms for rank {late}" if most else "Nobody waits"
    of_phases = bars[bars["tid"] == 0]
    phases = of_phases.groupby(of_phases["name"].str.split().str[0], sort=False)["dur"].sum()
    if "bubble" in phases:  # stages wait for each other, whoever is late
        title = f"{phases['bubble'] / phases.sum():.0%} of this step is bubble"
    figure.suptitle(title)
    marks = [
        Patch(
            color=COLOURS.get(name, "#CC79A7"), label="comm (exposed)" if name == "comm" else name
        )
        for name in phases.index
    ]
    marks += [
        Patch(color="black", label="all-reduce"),
        Patch(facecolor="white", edgecolor="black", hatch="////", label="waiting"),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=4, fontsize=11)
    return figure


def write_all(groups, rows, lines, out):
    """Writes the lines, the tables as CSV, and the pictures."""
    (out / "report.md").write_text("\n".join(lines) + "\n")
    rows.drop(columns=["same", "task"]).to_csv(out / "rows.csv", index=False)
    columns = ["group", *SPEED, *COMMUNICATION[1:], *BESIDE[1:], "serial", *PHASES]
    measured = pd.concat([pd.DataFrame(), *groups])
    columns += [name for name in measured if name.startswith("val_")]
    measured.reindex(columns=columns).to_csv(out / "measured.csv", index=False)
    for number, group in enumerate(groups, start=1):
        steps = group.set_index("processes")
        steps[PHASES] = steps[PHASES].div(steps["steps_per_epoch"], axis=0)
        draw_phases(steps, group["group"].iloc[0], out / f"group{number}_phases.png")
        draw_speedup(group, out / f"group{number}_speedup.png")
        draw_losses(group, out / f"group{number}_loss.png")
        plt.close("all")
    strong = [group for group in groups if group["group"].iloc[0].startswith("strong")]
    if len(strong) > 1:
        draw_models(strong, out / "models.png")


def main():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("paths", nargs="+", type=Path, help="logs (.jsonl), folders of them, traces (.json)")
    add("--out", type=Path, metavar="FOLDER", help="write report.md, CSVs and pictures there")
    args = parser.parse_args()
    plt.rcParams.update(STYLE)
    traces = [path for path in args.paths if path.suffix == ".json"]
    logs = [path for path in args.paths if path.suffix != ".json"]
    if traces and not args.out:
        parser.error("a trace needs --out: it becomes a picture there")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    for path in traces:
        draw_trace(path).savefig(args.out / f"{path.stem}.png")
        plt.close("all")
    if not logs:
        return
    rows, notes = read_logs(logs)
    runs = runs_of(rows, notes)
    groups = groups_of(runs)
    lines = []
    for group in groups:
        lines += comparison(group)
    compared = {key for group in groups for key in group[RUN].itertuples(index=False, name=None)}
    alone = [run for run in runs if tuple(run[name] for name in RUN) not in compared]
    if alone:
        lines += ["## not compared: no other run differs in the number of processes alone", ""]
        lines += tables(ALONE, pd.DataFrame(alone))
    notes = [f"note: {note}" for note in notes]
    print("\n".join(lines + notes))
    if args.out:
        lines += application(groups) if groups else []
        write_all(groups, rows, lines + notes, args.out)


if __name__ == "__main__":
    main()
