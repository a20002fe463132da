"""Compare training runs by their logs, and draw them.

    python tools/report.py runs/                          # a folder of logs that --log has written
    python tools/report.py runs/ --out report             # also writes it, with CSV and a picture
    python tools/report.py run.jsonl --step --out report  # also draws the last step of each log
    python tools/report.py run.jsonl --trace trace.json   # that step for https://ui.perfetto.dev

It compares runs of a task that have different numbers of processes, and otherwise the same
settings: all flags but --batch_size, --seed and those that a resumed run may change. Strong scaling
keeps the global batch, weak scaling the batch of a process. Times are those of an epoch: the mean
time of a step over all steps and processes, times the steps of an epoch, without warmup, validation
and saves. So it does not matter how long a run was, or how often it was resumed. - is unknown.

    speedup       samples/s divided by those of the fastest run with the fewest processes
    efficiency    speedup divided by the ratio of the numbers of devices
    comm          exposed communication, as a share of the time of an epoch
    hidden        share of the communication that goes on beside other phases
    sending       communication in the process that comes last: it waits for no other
    late rank     the one that comes last, if another one waits for a tenth of the steps or longer
    sums          of hybrid/gpt_tensor.py: that part of it which adds up the parts of a layer
    waiting       mean communication over all processes, minus sending and sums
    R             (forward + backward + sums) / sending
    tokens/s      if the tokens of a sample are known: of a GPT, or if the log has tokens/s, or
                  timing.py got tokens_per_sample
    MFU           (6 N + 12 L D T) x tokens/s / peak of all devices: the model's floating-point
                  operations (Chowdhery et al. 2022, PaLM, appendix B), for N parameters, L layers
                  of width D and T tokens of a sample; only 6 N where a log does not have these
    warmup        the first three steps after each start of the run, in all
    eval, save    one validation, and the snapshots of a row
    peak_MB       memory of the process that has held the most; val_loss and its like are the last

For pipelines, sending, waiting, late rank and R are dashes: hybrid/gpt_pipeline.py prints those of
whole pipelines. More processes pay if twice as many are 1.5 times as fast, and 4 times as many 2.25
times. --out writes report.md, scaling.png, and to epochs.csv each row of the logs, by default an
epoch: losses, and times as means over the processes.
"""

import argparse
import json
import math
import signal
import sys
import textwrap
from pathlib import Path

import matplotlib
import pandas as pd
from logs import (
    COLLECTIVES,
    COLOURS,
    LAUNCH,
    PHASES,
    STYLE,
    cell,
    is_number,
    output_folder,
    pays_up_to,
    read_logs,
    save,
    table,
    with_speedups,
)
from matplotlib.figure import Figure  # without pyplot, which needs a backend that can be loaded

SPEED = ["processes", "split", "nodes", "steps", "epoch (s)", "samples/s", "speedup (x)"]
SPEED += ["efficiency (%)"]
COMMUNICATION = ["processes", "comm (%)", "hidden (%)", "R (x)", "sending (s)", "sums (s)"]
COMMUNICATION += ["waiting (s)", "late rank"]
WORK = ["processes", "tokens/s", "peak (TFLOPS)", "MFU (%)"]
BESIDE = ["processes", "step", "device-hours", "warmup (s)", "eval (s)", "save (s)", "peak_MB"]
ALONE = ["task", "device", "processes", "split", "batch", "epoch (s)", "samples/s"]
ROW = ["of", "task", "run", "processes", "nodes", "batch_size", "epoch", "step"]
SPLITS = {"num_stages": "stages", "shard_size": "shards", "tensor_size": "parts"}

# Peak TFLOPS of a device, of dense matrices: data sheets of the makers. --precision fp16 is as fast
# as bf16. The first part of a name that fits counts. NVIDIA's sheets give twice as much for sparse
# matrices, and AMD's sheet of MI250X both halves of it, which PyTorch shows as two devices.
PEAKS = {
    "B200": {"bf16": 2250},
    "H200": {"fp32": 67, "tf32": 494, "bf16": 989},
    "H100 NVL": {"fp32": 60, "tf32": 417, "bf16": 835},
    "H100 PCIe": {"fp32": 51, "tf32": 378, "bf16": 756},
    "H100": {"fp32": 67, "tf32": 494, "bf16": 989},
    "A100": {"fp32": 19.5, "tf32": 156, "bf16": 312},
    "L40S": {"fp32": 91.6, "tf32": 183, "bf16": 362},
    "V100": {"fp32": 15.7, "fp16": 125},
    "MI300X": {"fp32": 163.4, "tf32": 653.7, "bf16": 1307.4},
    "MI250X": {"bf16": 191.5},
}
LABELS = {"comm": "communication"}  # words of the pictures, where they are not those of the log
DARK = ("backward", "comm", "optimizer")  # colours on which a word is white


# == The runs ==


def times_of(rows):
    """Returns a table of the mean times of a step, of each process of each run."""
    of_rank = rows.groupby(["of", "rank"], sort=False)
    names = [*PHASES, "comm_total", "sum_total"]
    return of_rank[names].sum().div(of_rank["steps"].sum(), axis=0)


def sending_of(rows):
    """Returns a table of the runs: who comes last, its times of sending, and how long others wait.

    The process with the least communication came last, and waits for no other.
    """
    times = times_of(rows)
    hosts = rows.groupby(["of", "rank"], sort=False)["host"].agg(lambda x: " or ".join(x.unique()))
    totals = times["comm_total"].groupby("of", sort=False)
    found = []
    for last in totals.idxmin():
        sums = times["sum_total"][last]
        sending = {"late rank": f"{last[1]} on {hosts[last]}", "sums (s)": sums or math.nan}
        found.append(sending | {"sending (s)": times["comm_total"][last] - sums})
    found = pd.DataFrame(found, totals.min().index)
    found["waiting (s)"] = totals.mean() - totals.min()
    # One process sends nothing, and the stages of a pipeline do not send the same, whoever is late.
    last = rows.groupby("of", sort=False).tail(1).set_index("of")
    sends = (last["processes"] > 1) & (totals.min() > 0) & (last["num_microbatches"] == "-")
    steps = times[PHASES].sum(axis=1).groupby("of", sort=False).mean()
    is_late = totals.max() - totals.min() > 0.1 * steps
    found["late rank"] = found["late rank"].where(sends & is_late, "-")
    numbers = ["sending (s)", "sums (s)", "waiting (s)"]
    found[numbers] = found[numbers].where(sends, math.nan)
    return found


def runs_of(rows):
    """Returns a table of the runs: the last values of their rows, and their times of an epoch."""
    timed = rows.groupby("of")["steps"].transform("sum")
    rows = rows[timed > 0]
    of_run = rows.groupby("of", sort=False)
    of_rank = rows.groupby(["of", "rank"], sort=False)
    runs = of_run.tail(1).set_index("of")
    runs["hosts"] = of_run["host"].agg(set)
    runs["device"] = of_run["device"].agg(lambda names: " and ".join(names.unique()))
    runs["peak_MB"] = of_run["peak_MB"].max()
    runs["warmup (s)"] = of_rank["warmup"].sum().groupby("of").mean()
    runs["eval (s)"] = of_run["eval"].sum() / of_run["val_loss"].count()
    saves = of_run["save"].mean()
    runs["save (s)"] = saves.where(saves >= 0.0005)  # else it was without --snapshot
    runs["steps"] = of_rank["steps"].sum().groupby("of").mean().round().astype(int)
    means = times_of(rows).groupby("of").mean()
    sending = sending_of(rows)
    runs[means.columns] = means
    runs[sending.columns] = sending
    times = [*means.columns, "sending (s)", "sums (s)", "waiting (s)"]
    runs[times] = runs[times].mul(runs["steps_per_epoch"], axis=0)
    return with_rates(runs.reset_index())


def with_rates(runs):
    """Returns the table of runs with what follows from their times."""
    runs["batch"] = runs["batch_size"]
    runs["epoch (s)"] = runs[PHASES].sum(axis=1)
    runs["samples/s"] = runs["batch_size"] * runs["steps_per_epoch"] / runs["epoch (s)"]
    runs["device-hours"] = runs["devices"] * runs["epoch (s)"] / 3600
    # FSDP on GPUs counts what its communication holds up as forward and backward.
    is_known = (runs["device"] == "CPU") | (runs["shard_size"] == "-")
    runs["comm (%)"] = (100 * runs["comm"] / runs["epoch (s)"]).where(is_known)
    hidden = (100 - 100 * runs["comm"] / runs["comm_total"]).clip(lower=0)
    has_sent = (runs["processes"] > 1) & (runs["comm_total"] > 0)
    runs["hidden (%)"] = hidden.where(has_sent & is_known)
    passes = runs["forward"] + runs["backward"] + runs["sums (s)"].fillna(0)
    runs["R (x)"] = (passes / runs["sending (s)"]).where(is_known)
    runs["split"] = ""  # the whole model is in each process
    for name, parts in SPLITS.items():
        words = runs[name].astype(str) + " " + parts
        runs["split"] = runs["split"].where(runs[name] == "-", words)
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
                if group["processes"].nunique() == 1:
                    continue
                group = with_speedups(group.sort_values(["processes", "nodes"], kind="stable"))
                name = title.format(group["task"].iloc[0], batch)
                name += "" if hook == "none" else f", comm_hook {hook}"
                groups.append(group.assign(title=name))
    return groups


# == Tokens, and what of a device's speed is used ==


def tokens_of(run):
    """Returns the tokens of a sample, or NaN."""
    given = run["settings"].get("tokens_per_sample")
    if is_number(given):
        return given
    rates = run.get("tokens/s"), run.get("samples/s")
    if all(is_number(rate) and rate > 0 for rate in rates):
        return rates[0] / rates[1]
    seq_len = run["settings"].get("seq_len")
    is_gpt = run["task"].startswith("gpt")  # elsewhere, samples are padded or cut to seq_len
    return seq_len if is_gpt and is_number(seq_len) else math.nan


def flops_of_token(run):
    """Returns the floating-point operations of a training step for each of its tokens."""
    sizes = [run["settings"].get(name) for name in ("num_layers", "d_model", "seq_len")]
    attention = 12 * math.prod(sizes) if all(map(is_number, sizes)) else 0
    return 6 * run["parameters"] + attention


def peak_of(run):
    """Returns the peak of a device in TFLOPS, or NaN."""
    precision = run["settings"].get("precision", "fp32")
    for name, peaks in PEAKS.items():
        if name in run["device"]:
            same = {"fp16": "bf16"}.get(precision)
            return peaks.get(precision, peaks.get(same, math.nan))
    return math.nan


def with_tokens(runs, last_rows, peak):
    """Returns the table of runs with tokens/s and MFU. `last_rows` have the rates of the logs."""
    found = []
    for run, last in zip(runs.to_dict("records"), last_rows):
        tokens = run["samples/s"] * tokens_of(last)
        tflops = peak or peak_of(run)
        used = tokens * flops_of_token(run) / run["devices"]
        row = {"tokens/s": tokens, "MFU (%)": 100 * used / (1e12 * tflops)}
        row["peak (TFLOPS)"] = tflops if tokens > 0 else math.nan
        found.append(row)
    return runs.assign(**pd.DataFrame(found, runs.index))


# == The text ==


def tables(columns, runs):
    """Returns tables: speed, communication, work, and what comes beside the steps."""
    beside = [*BESIDE, *(name for name in runs if name.startswith("val_"))]
    lines = []
    for names in (columns, COMMUNICATION, WORK, beside):
        if runs[names[1:]].notna().any(axis=None):
            lines += [table(names, runs), ""]
    return lines


def settings_of(group):
    """Returns a sentence on what the runs of a group have in common, and how they were launched."""
    facts = [pair for pair in group["same"].iloc[0] if pair[1] not in ("", "0", "0.0", "False")]
    for name in ("threads", "steps_per_epoch", "num_workers", *LAUNCH):
        if {*group[name]} - {"-", 0}:
            facts.append((name, " / ".join(map(str, group[name].unique()))))
    steps = "Times are those of an epoch: a mean step x steps_per_epoch. Column steps: timed steps"
    return f"Settings: {', '.join(map(' '.join, facts))}. {steps}. More: the top of report.py."


def comparison(group):
    """Returns the lines on a group."""
    lines = [f"## {group['title'].iloc[0]}", "", pays_up_to(group)[1] + ".", ""]
    if (group["efficiency (%)"] > 110).any():
        lines += ["Not to be trusted: N processes are over N times as fast. Was one slowed?", ""]
    lines += [*tables(SPEED, group), *textwrap.wrap(settings_of(group), 100), ""]
    hosts = group["hosts"]
    is_moved = len(set.union(*hosts)) > hosts.map(len).max()
    if is_moved or group["device"].nunique() > 1:
        places = zip(group["processes"], group["device"], hosts)
        places = [f"{count} on {kind}, {' '.join(sorted(on))}" for count, kind, on in places]
        lines += ["note: machines may differ in speed. " + "; ".join(places), ""]
    return lines


def short_runs(rows):
    """Returns a line for each run of too few steps."""
    steps = rows.groupby("of")["steps"].transform("sum") / rows["processes"]
    lines = []
    for path, run, count in dict.fromkeys(zip(rows["file"], rows["run"], steps)):
        if count < 10:
            lines.append(f"note: {path}: run {run} has only {count:.0f} step(s) after its warmup")
    return lines


def report_of(rows, runs, groups):
    """Returns the lines of the report."""
    lines = []
    for group in groups:
        lines += comparison(group)
    compared = {number for group in groups for number in group.index}
    alone = runs.drop(index=[*compared])
    if len(alone):
        lines += ["## not compared: no other run differs in the number of processes alone", ""]
        lines += tables(ALONE, alone)
    return lines + short_runs(rows)


def write_epochs(rows, groups, path):
    """Writes each row of the logs, by default an epoch: losses, and mean times of the processes."""
    times = {name: f"{name} (s)" for name in [*PHASES, "warmup", "eval", "save", "seconds"]}
    results = [*rows.filter(regex="^(train|val)_"), *times, "samples/s"]
    rows = rows.groupby(ROW, sort=False)[results].mean().rename(columns=times).reset_index()
    compared = pd.concat([rows.head(0), *groups])
    compared = compared.reindex(columns=["of", "title", "speedup (x)", "efficiency (%)"])
    rows.merge(compared, "left", "of").drop(columns="of").to_csv(path, index=False)


# == The pictures ==


def draw_scaling(group, path):
    """Draws the speedup and, beside it, the phases of a step: in each a bar for each run."""
    places = range(len(group))
    figure = Figure(figsize=(9, 4.2))
    speed, step = figure.subplots(1, 2)
    bars = speed.bar(places, group["speedup (x)"], 0.7, color="silver")
    percent = group["efficiency (%)"].map("{:.0f}%".format)
    words = group["speedup (x)"].map(cell) + "\n" + percent
    speed.bar_label(bars, words, label_type="center")
    ideal = {"markersize": 30, "markeredgewidth": 2, "label": "ideal"}
    speed.plot(places, group["ratio"], "k_", **ideal)
    speed.set_title("speedup (times), and efficiency")
    tops = pd.Series(0.0, group.index)
    for phase in group[PHASES].loc[:, group[PHASES].any()]:
        spans = 1000 * group[phase] / group["steps_per_epoch"]
        label = "communication, while nothing computes" if phase == "comm" else phase
        step.bar(places, spans, 0.7, tops, color=COLOURS[phase], label=label)
        tops += spans
    step.set_title("time of a step by phase (ms)")
    for axes in (speed, step):
        axes.set_xticks(places, (group["devices"].astype(str) + "\n" + group["split"]).str.strip())
        axes.set_xlabel("processes" if group["devices"].equals(group["processes"]) else "GPUs")
    title = ", ".join([group["title"].iloc[0], *group["device"].unique()])
    save(figure, f"{pays_up_to(group)[1]}.\n{title}", path, ncols=3)


def last_step_of(rows):
    """Returns the spans of the last step in a log, of all ranks: times in ms from its beginning.

    The clocks agree, since all processes set them when they had just left an all-reduce.
    """
    rows = rows[rows["last_step"].map(bool)]
    last = rows.loc[rows.index.max()]  # the last that was written
    rows = rows[(rows["of"] == last["of"]) & (rows["step"] == last["step"])]
    spans = rows.drop_duplicates("rank", keep="last").explode("last_step")
    spans[["label", "start", "end", "bytes"]] = spans["last_step"].to_list()
    spans["ms"] = 1000 * (spans["end"] - spans["start"])
    spans["start"] = 1000 * (spans["start"] - spans["start"].min())
    spans["end"] = spans["start"] + spans["ms"]
    spans["name"] = spans["label"].str.split().str[0]  # "forward 3" is of micro-batch 3
    spans["is_sent"] = spans["name"].isin(COLLECTIVES)
    return spans.sort_values(["rank", "start"], kind="stable").reset_index(drop=True)


def waits_of(sent):
    """Returns how long each all-reduce waits until it has begun in all processes."""
    number = sent.groupby("rank").cumcount()
    begun = sent.groupby(number)["start"].transform("max")
    return (begun - sent["start"]).clip(0, sent["ms"])


def lateness_of(phases):
    """Returns who is late and who waits for it, from when to when, and why; or nothing.

    It is late if it is ready for the last all-reduce a tenth of the step after the first one.
    """
    ready = phases[phases["name"] == "comm"].groupby("rank")["start"].max()
    if len(ready) < 2:
        return None
    late, first = ready.idxmax(), ready.idxmin()
    if ready[late] - ready[first] <= 0.1 * phases["end"].max():
        return None
    sums = phases.groupby(["rank", "name"])["ms"].sum().unstack(fill_value=0)
    longer = (sums.loc[late] - sums.loc[first]).drop("comm")
    return {
        "late": late,
        "first": first,
        "from": ready[first],
        "to": ready[late],
        "why": f"longer {longer.idxmax()}",
    }


def draw_bars(axes, spans, places, waits):
    """Draws the phases of each process and, below them, its collectives; what waits is hatched."""
    phases, sent = spans[~spans["is_sent"]], spans[spans["is_sent"]]
    width = spans["end"].max()
    for name, part in phases.groupby("name", sort=False):
        word = LABELS.get(name, name)
        colour = COLOURS.get(name, "#CC79A7")
        is_wide = part["ms"] > 0.018 * len(word) * width
        label = None if is_wide.all() else word  # a word in each bar needs no legend
        style = {"color": colour, "label": label, "edgecolor": "white", "linewidth": 0.5}
        axes.barh(part["rank"].map(places), part["ms"], 0.5, part["start"], **style)
        for span in part[is_wide].to_dict("records"):
            style = {"ha": "center", "va": "center", "fontsize": 10}
            style["color"] = "white" if name in DARK else "black"
            axes.text(span["start"] + span["ms"] / 2, places[span["rank"]], word, **style)
    below = sent["rank"].map(places) + 0.36
    style = {"color": "black", "label": ", ".join(sent["name"].unique())}
    axes.barh(below, sent["ms"] - waits, 0.16, sent["start"] + waits, **style)
    style = {"hatch": "////", "fill": False, "label": "all-reduce waits" if waits.any() else None}
    axes.barh(below, waits, 0.16, sent["start"], **style)


def draw_lateness(axes, found, places, kind):
    """Draws a bracket over what makes a process late, and an arrow to the one that waits."""
    late, first = places[found["late"]], places[found["first"]]
    side = -1 if first < late else 1  # the axis points down
    bracket = late + (-0.38 if side < 0 else 0.62)
    inside = bracket - 0.07 * side
    start, end = found["from"], found["to"]
    axes.plot([start, start, end, end], [inside, bracket, bracket, inside], color="black")
    style = {"ha": "right", "va": "center", "fontsize": 10}
    axes.text(start, bracket, f"{kind} {found['late']}: {found['why']} ", **style)
    style = {"arrowstyle": "-|>", "color": "black", "shrinkA": 0, "shrinkB": 0}
    middle = (start + end) / 2
    axes.annotate("", (middle, first - 0.25 * side), (middle, bracket), arrowprops=style)


def draw_step(rows, path):
    """Draws the last step in a log: the phases of each process and, below them, its collectives.

    Of more than eight processes it draws the first ones, the late one, and the one that waits.
    """
    spans = last_step_of(rows)
    if spans["processes"].max() == 1:  # its all-reduces send nothing
        spans = spans[~spans["is_sent"]]
    phases, sent = spans[~spans["is_sent"]], spans[spans["is_sent"]]
    # The collectives of shards, of parts and of copies of a stage are those of some processes.
    has_bubble = "bubble" in set(phases["name"])
    is_ddp = (sent["name"] == "all-reduce").all() and not has_bubble
    waits = waits_of(sent) * is_ddp
    found = lateness_of(phases) if is_ddp else None
    ranks = sorted(spans["rank"].unique())
    if len(ranks) > 8:
        named = {found["late"], found["first"]} if found else set()
        others = [rank for rank in ranks if rank not in named]
        ranks = sorted([*named, *others[: 8 - len(named)]])
        spans = spans[spans["rank"].isin(ranks)]
        waits = waits[waits.index.isin(spans.index)]
    kind = "process" if (spans["device"] == "CPU").all() else "GPU"
    places = {rank: place for place, rank in enumerate(ranks)}
    axes = Figure(figsize=(6.4, 1.6 + 1.1 * len(ranks))).subplots()
    draw_bars(axes, spans, places, waits)
    if found:
        draw_lateness(axes, found, places, kind)
    axes.set_ylim(len(ranks) - 0.3, -0.4)
    hosts = spans.groupby("rank")["host"].last()
    has_hosts = hosts.nunique() > 1
    names = [f"{kind} {rank}" + f"\n{hosts[rank]}" * has_hosts for rank in ranks]
    axes.set_yticks(range(len(ranks)), names)
    axes.set_xlabel("time (ms)")
    title = title_of_step(phases, found, has_bubble, kind)
    save(axes.figure, title, path, ncols=4, fontsize=10)


def title_of_step(phases, found, has_bubble, kind):
    """Returns what a picture of a step shows, in a sentence or two."""
    if has_bubble:  # stages wait for each other, whoever is late
        share = phases["ms"][phases["name"] == "bubble"].sum() / phases["ms"].sum()
        return (
            f"{share:.0%} of this step is bubble: a {kind} waits for another one.\n"
            "Each dark blue box is the backward pass of one micro-batch."
        )
    if found:
        waited = f"{found['to'] - found['from']:.3g} ms"
        late, first = f"{kind} {found['late']}", f"{kind} {found['first']}"
        late = late[0].upper() + late[1:]
        return f"{late} is late: {first} waits {waited} for it."
    if phases["processes"].max() == 1:
        return "One step."
    return "One step. No process is late by more than a tenth of it."


def trace_of(rows):
    """Returns the last step in the logs in Chrome's trace format, which Perfetto opens.

    A process has a track of its phases, and as many of its collectives as overlap. Times are in us.
    """
    events = []
    for rank, spans in last_step_of(rows).groupby("rank"):
        tracks = {0: "phases"}
        free = {}  # when each track of collectives is free again
        name = f"rank {rank} on {spans['host'].iloc[0]}"
        events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": name}})
        for span in spans.to_dict("records"):
            track = 0
            if span["is_sent"]:
                track = 1
                while free.get(track, 0) > span["start"]:
                    track += 1
                free[track] = span["end"]
                tracks[track] = "collectives"
            event = {"name": span["label"], "cat": tracks[track], "ph": "X", "pid": rank}
            event |= {"tid": track, "ts": 1000 * span["start"], "dur": 1000 * span["ms"]}
            events.append(event | {"args": {"bytes": span["bytes"]}})
        for track, name in tracks.items():
            event = {"name": "thread_name", "ph": "M", "pid": rank, "tid": track}
            events.append(event | {"args": {"name": name}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def positive(text):
    """A type for argparse: a number above 0."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def file_in_a_folder(text):
    """A type for argparse: a file whose folder is there."""
    path = Path(text)
    if not path.absolute().parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} cannot be written: its folder is missing")
    return path


def main():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("paths", nargs="+", type=Path, help="logs, or folders of logs")
    add("--out", type=output_folder, metavar="FOLDER", help="write and draw it there, too")
    add("--step", action="store_true", help="draw the last step of each log")
    add("--trace", type=file_in_a_folder, metavar="FILE.json", help="the last step, for Perfetto")
    add("--peak", type=positive, metavar="TFLOPS", help="of a device, for MFU, if not in the table")
    args = parser.parse_args()
    matplotlib.rcParams.update(STYLE)

    # The text.
    rows = read_logs(args.paths)
    last_rows = rows.groupby("of", sort=False).tail(1).set_index("of")
    runs = runs_of(rows)
    runs = with_tokens(runs, last_rows.loc[runs["of"]].to_dict("records"), args.peak)
    groups = groups_of(runs)
    lines = report_of(rows, runs, groups)
    print("\n".join(lines))

    # The files.
    has_step = rows[rows["last_step"].map(bool)]
    if (args.step or args.trace) and has_step.empty:
        sys.exit("no row of these logs has a last step: it has phases after the first three steps")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "report.md").write_text("\n".join(lines) + "\n")
        write_epochs(rows, groups, args.out / "epochs.csv")
        for number, group in enumerate(groups, start=1):
            name = "scaling.png" if number == 1 else f"scaling_{number}.png"
            draw_scaling(group, args.out / name)
    if args.trace:
        args.trace.write_text(json.dumps(trace_of(rows)))
    if args.step:
        for path, logged in has_step.groupby("file"):
            draw_step(logged, (args.out or Path()) / f"{path.stem}_step.png")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without an error
    main()
