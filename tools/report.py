"""Compare training runs by their logs, and draw them.

    python tools/report.py runs/                          # a folder of logs that --log has written
    python tools/report.py runs/ --out report             # also writes it, with CSV and a picture
    python tools/report.py run.jsonl --step --out report  # also draws the last step of each log

It compares runs of a task that have different numbers of processes, and otherwise the same
settings: all flags but --batch_size, --seed and those that a resumed run may change. Strong scaling
keeps the global batch, weak scaling the batch of a process. Times are those of an epoch: the mean
time of a step over all steps and processes, times the steps of an epoch, without warmup, validation
and saves. So it does not matter how long a run was, or how often it was resumed. - is unknown.

    speedup       samples/s divided by those of the fastest run with the fewest processes
    efficiency    speedup divided by the ratio of the numbers of devices
    comm          exposed communication, as a share of the time of an epoch
    hidden        share of the communication that goes on beside other phases
    sending       communication in the process that comes last, the late rank: it waits for no other
    waiting       mean communication over all processes, minus sending
    R             (forward + backward) / sending
    warmup        the first three steps after each start of the run, in all
    eval, save    one validation, and the snapshots of a row
    peak_MB       memory of the process that has held the most; val_loss and its like are the last

For pipelines, sending, waiting, late rank and R are dashes: hybrid/gpt_pipeline.py prints those of
whole pipelines. More processes pay if twice as many are 1.5 times as fast, and 4 times as many 2.25
times. --out writes report.md, scaling.png, and to epochs.csv each row of the logs, by default an
epoch: losses, and times as means over the processes.
"""

import argparse
import signal
import textwrap
from pathlib import Path

import matplotlib
import pandas as pd
from logs import (
    COLOURS,
    LAUNCH,
    PHASES,
    STYLE,
    cell,
    pays_up_to,
    read_logs,
    save,
    table,
    with_speedups,
)
from matplotlib.figure import Figure  # without pyplot, which needs a backend that can be loaded

SPEED = ["processes", "nodes", "batch (samples)", "steps", "epoch (s)", "samples/s", "speedup (x)"]
SPEED += ["efficiency (%)", "device-hours", "split"]
COMMUNICATION = "processes,comm (%),hidden (%),R (x),sending (s),waiting (s),late rank".split(",")
BESIDE = ["processes", "step", "warmup (s)", "eval (s)", "save (s)", "peak_MB"]
ROW = ["of", "task", "run", "processes", "nodes", "batch_size", "epoch", "step"]


def runs_of(rows, lines):
    """Returns a table of the runs: the last values of their rows, and their times of an epoch."""
    timed = rows.groupby("of")["steps"].transform("sum") / rows["processes"]
    for path, run, steps in dict.fromkeys(zip(rows["file"], rows["run"], timed)):
        if steps < 10:
            lines.append(f"note: {path}: run {run} has only {steps:.0f} step(s) after its warmup")
    rows = rows[timed > 0]
    of_run = rows.groupby("of", sort=False)
    of_rank = rows.groupby(["of", "rank"], sort=False)
    steps = of_rank["steps"].sum()
    times = of_rank[[*PHASES, "comm_total"]].sum().div(steps, axis=0)
    totals = times["comm_total"].groupby("of", sort=False)
    runs = of_run.tail(1).set_index("of")
    runs["hosts"] = of_run["host"].agg(set)
    runs["device"] = of_run["device"].agg(lambda names: " and ".join(names.unique()))
    runs["peak_MB"] = of_run["peak_MB"].max()
    runs["warmup (s)"] = of_rank["warmup"].sum().groupby("of").mean()
    runs["eval (s)"] = of_run["eval"].sum() / of_run["val_loss"].count()
    runs["save (s)"] = of_run["save"].mean()
    runs["steps"] = steps.groupby("of").mean().round().astype(int)
    runs[times.columns] = times.groupby("of").mean()
    # One process sends nothing, and the stages of a pipeline do not send the same, whoever is late.
    sends = (runs["processes"] > 1) & (totals.min() > 0) & (runs["num_microbatches"] == "-")
    runs["sending (s)"] = totals.min().where(sends)
    runs["waiting (s)"] = (totals.mean() - totals.min()).where(sends)
    hosts = of_rank["host"].agg(lambda names: " or ".join(names.unique()))
    late = [f"{last[1]} on {hosts[last]}" for last in totals.idxmin()]
    runs["late rank"] = pd.Series(late, runs.index).where(sends, "-")
    columns = [*times, "sending (s)", "waiting (s)"]
    runs[columns] = runs[columns].mul(runs["steps_per_epoch"], axis=0)
    runs = runs.reset_index()
    runs["batch (samples)"] = runs["batch_size"]
    runs["epoch (s)"] = runs[PHASES].sum(axis=1)
    runs["samples/s"] = runs["batch_size"] * runs["steps_per_epoch"] / runs["epoch (s)"]
    runs["device-hours"] = runs["devices"] * runs["epoch (s)"] / 3600
    # FSDP on GPUs counts what its communication holds up as forward and backward.
    is_known = (runs["device"] == "CPU") | (runs["shard_size"] == "-")
    runs["comm (%)"] = (100 * runs["comm"] / runs["epoch (s)"]).where(is_known)
    hidden = (100 - 100 * runs["comm"] / runs["comm_total"]).clip(lower=0)
    runs["hidden (%)"] = hidden.where((runs["processes"] > 1) & is_known)
    passes = runs["forward"] + runs["backward"]
    runs["R (x)"] = (passes / runs["sending (s)"]).where(is_known)
    runs["split"] = ""  # the whole model is in each process
    for name, parts in ("num_stages", " stages"), ("shard_size", " shards"):
        runs["split"] = runs["split"].where(runs[name] == "-", runs[name].astype(str) + parts)
    return runs


def groups_of(runs):
    """Returns tables of the runs that differ in the number of processes alone, with speedups."""
    groups = []
    kept = {"strong scaling, {}, global batch {:g}": runs["batch_size"]}
    kept["weak scaling, {}, batch of a process {:g}"] = runs["batch_size"] / runs["processes"]
    for title, batches in kept.items():
        for (batch, _), members in runs.groupby([batches, "same"]):
            is_one = members["processes"] == 1  # it sends nothing, whatever its --comm_hook
            for hook in sorted({*members["comm_hook"][~is_one]}):
                group = members[is_one | (members["comm_hook"] == hook)]
                if group["processes"].nunique() > 1:
                    group = with_speedups(group.sort_values(["processes", "nodes"], kind="stable"))
                    name = title.format(group["task"].iloc[0], batch)
                    name += "" if hook == "none" else f", comm_hook {hook}"
                    groups.append(group.assign(title=name))
    return groups


def tables(columns, runs):
    """Returns three tables: speed, communication, and what comes beside the steps."""
    beside = [*BESIDE, *(name for name in runs if name.startswith("val_"))]
    return [text for names in (columns, COMMUNICATION, beside) for text in (table(names, runs), "")]


def comparison(group):
    """Returns the lines on a group."""
    facts = [pair for pair in group["same"].iloc[0] if pair[1] not in ("", "0", "0.0", "False")]
    for name in ("threads", "steps_per_epoch", "num_workers", *LAUNCH):
        if {*group[name]} - {"-", 0}:
            facts.append((name, " / ".join(map(str, group[name].unique()))))
    facts = ", ".join(map(" ".join, facts)) + ". Times are those of an epoch."
    lines = [f"## {group['title'].iloc[0]}", "", *textwrap.wrap(facts, 100), ""]
    lines += [*tables(SPEED, group), pays_up_to(group)[1] + ".", ""]
    if (group["efficiency (%)"] > 110).any():
        lines += ["Not to be trusted: N processes are over N times as fast. Was one slowed?", ""]
    hosts = group["hosts"]
    if len(set.union(*hosts)) > hosts.map(len).max() or group["device"].nunique() > 1:
        places = zip(group["processes"], group["device"], hosts)
        places = [f"{count} on {kind}, {' '.join(sorted(on))}" for count, kind, on in places]
        lines += ["note: machines may differ in speed. " + "; ".join(places), ""]
    return lines


def draw_scaling(group, path):
    """Draws time, speedup, efficiency, and the phases of a step: in each a bar for each run."""
    ratio, places = group["ratio"], range(len(group))
    first = group["epoch (s)"][ratio == 1].min()
    ideals = {"epoch (s)": first / ratio, "speedup (x)": ratio, "efficiency (%)": 0 * ratio + 100}
    figure = Figure(figsize=(9, 7.5))
    *others, step = figure.subplots(2, 2).flat
    for axes, (column, ideal) in zip(others, ideals.items()):
        bars = axes.bar(places, group[column], 0.7, color="silver")
        axes.bar_label(bars, map(cell, group[column]), label_type="center")
        [marks] = axes.plot(places, ideal, "k_", markersize=30, markeredgewidth=2)
        axes.set_title(column.replace("epoch", "time of an epoch").replace("(x)", "(times)"))
    marks.set_label("ideal")
    tops = 0
    for phase in group[PHASES].loc[:, group[PHASES].any()]:
        spans = 1000 * group[phase] / group["steps_per_epoch"]
        label = phase.replace("comm", "comm, while nothing computes")
        step.bar(places, spans, 0.7, tops, color=COLOURS[phase], label=label)
        tops += spans
    step.set_title("time of a step by phase (ms)")
    for axes in figure.axes:
        axes.set_xticks(places, (group["devices"].astype(str) + "\n" + group["split"]).str.strip())
        axes.set_xlabel("processes" if group["devices"].equals(group["processes"]) else "GPUs")
    save(figure, f"{group['title'].iloc[0]}\n{pays_up_to(group)[1]}", path, ncols=3)


def draw_step(rows, path):
    """Draws the last step in a log: the phases of each rank and, below them, its collectives.

    In DDP, an all-reduce waits until it has begun in all processes: that part of it is hatched.
    The sentence has what the late process adds to the step: waiting that computing does not hide.
    """
    last = rows.loc[rows.index.max()]  # the last that was written
    events = rows[(rows["of"] == last["of"]) & (rows["step"] == last["step"])].explode("last_step")
    events[["name", "start", "end", "bytes"]] = events["last_step"].to_list()
    # The clocks agree, since all processes set them when they had just left an all-reduce.
    events["ms"] = 1000 * (events["end"] - events["start"])
    events["start"] = 1000 * (events["start"] - events["start"].min())
    events["name"] = events["name"].str.split().str[0]  # "forward 3" is of micro-batch 3
    is_sent = events["name"].isin(["all-reduce", "all-gather", "reduce-scatter"])
    phases, sent = events[~is_sent], events[is_sent]
    sums = phases.groupby("name", sort=False)["ms"].sum()
    # The collectives of shards and of copies of a stage are those of some processes.
    is_ddp = (sent["name"] == "all-reduce").all() and "bubble" not in sums
    begun = sent.groupby(sent.groupby("rank").cumcount())["start"].transform("max")
    waits = (begun - sent["start"]).clip(0, sent["ms"]) * is_ddp
    hosts = phases.groupby("rank")["host"].last()
    axes = Figure(figsize=(6.4, 1.6 + 0.8 * len(hosts))).subplots()
    for name, part in phases.groupby("name", sort=False):
        bars = {"color": COLOURS[name], "label": name, "edgecolor": "white", "linewidth": 0.5}
        axes.barh(part["rank"], part["ms"], 0.5, part["start"], **bars)
    bars = {"color": "black", "label": ", ".join(sent["name"].unique())}
    axes.barh(sent["rank"] + 0.4, sent["ms"] - waits, 0.2, sent["start"] + waits, **bars)
    bars = {"hatch": "////", "fill": False, "label": "all-reduce, waiting" if waits.any() else None}
    axes.barh(sent["rank"] + 0.4, waits, 0.2, sent["start"], **bars)
    axes.invert_yaxis()
    axes.set_yticks(hosts.index, [f"rank {rank} on {host}" for rank, host in hosts.items()])
    axes.set_xlabel("time (ms)")
    exposed = phases[phases["name"] == "comm"].groupby("rank")["ms"].sum()
    sentence = "One step"
    if "bubble" in sums:  # stages wait for each other, whoever is late
        sentence = f"{sums['bubble'] / sums.sum():.0%} of this step is bubble: a stage waits"
        sentence += "\nA box is the forward or backward pass of one micro-batch"
    elif waits.any():
        ms = exposed.max() - exposed.min()
        sentence = f"Rank {exposed.idxmin()} comes last: rank {exposed.idxmax()} waits {ms:.3g} ms"
    save(axes.figure, sentence, path, ncols=4, fontsize=10)


def write_epochs(rows, groups, path):
    """Writes each row of the logs, by default an epoch: losses, and mean times of the processes."""
    times = {name: f"{name} (s)" for name in [*PHASES, "warmup", "eval", "save", "seconds"]}
    results = [*rows.filter(regex="^(train|val)_"), *times, "samples/s"]
    rows = rows.groupby(ROW, sort=False)[results].mean().rename(columns=times).reset_index()
    compared = pd.concat([rows.head(0), *groups])
    compared = compared.reindex(columns=["of", "title", "speedup (x)", "efficiency (%)"])
    rows.merge(compared, "left", "of").drop(columns="of").to_csv(path, index=False)


def main():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, help="logs, or folders of logs")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write and draw it there, too")
    parser.add_argument("--step", action="store_true", help="draw the last step of each log")
    args = parser.parse_args()
    matplotlib.rcParams.update(STYLE)
    rows, lines = read_logs(args.paths), []
    runs = runs_of(rows, lines)
    groups = groups_of(runs)
    lines += [line for group in groups for line in comparison(group)]
    alone = runs.drop(index=[number for group in groups for number in group.index], errors="ignore")
    if len(alone):
        lines += ["## not compared: no other run differs in the number of processes alone", ""]
        lines += tables(["task", "device", *SPEED[:6], "device-hours"], alone)
    print("\n".join(lines))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "report.md").write_text("\n".join(lines) + "\n")
        write_epochs(rows, groups, args.out / "epochs.csv")
    for number, group in enumerate(groups if args.out else (), start=1):
        draw_scaling(group, args.out / ("scaling.png" if number == 1 else f"scaling_{number}.png"))
    for path, logged in rows[rows["last_step"].map(bool)].groupby("file") if args.step else ():
        draw_step(logged, (args.out or Path()) / f"{path.stem}_step.png")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without an error
    main()
