"""Compare training runs by their logs, and draw them.

    python report.py runs/                             # a folder of logs that --log has written
    python report.py runs/ --out report                # also writes the tables, and pictures
    python report.py run.jsonl --step --out report     # also draws the last step of each log

The report compares runs of a task that have different numbers of processes, and otherwise the same
settings: all flags but --batch_size, --seed and those that a resumed run may change. Strong scaling
keeps the global batch, weak scaling keeps the batch of a process. Times are seconds of an epoch:
the mean time of a step over all steps and processes, times the steps of an epoch. So it does not
matter how long a run was, or how often it was resumed or validated. A dash means unknown.

    steps         steps after the warmup, over which the times are means
    seconds       time of an epoch without warmup, validation and saves
    samples/s     speed of the training alone
    speedup       samples/s divided by those of the fastest run with the fewest processes
    efficiency    speedup divided by how many times as many devices there are
    device-hours  of an epoch: devices x seconds / 3600
    comm %        exposed communication as a share of the seconds
    hidden %      share of the communication that goes on beside other phases
    sending       seconds of communication in the process that comes last: it waits for no other
    waiting       mean seconds of communication over all processes, minus sending
    late rank     the process that comes last, on the node late host
    R             compute / sending, where compute is forward, backward, bubble and optimizer
    warmup        seconds of the first three steps after each start of the run, in all
    step          the last one: val_loss and its like are those of that moment
    eval, save    seconds of one validation, and of the snapshots of a row: the last row has two
    peak_MB       memory of the process that has held the most

For pipelines, sending, waiting, late rank and R are dashes: hybrid/gpt_pipeline.py prints those of
whole pipelines. More processes pay if twice as many are 1.5 times as fast, and 4 times as many 2.25
times. --out writes the tables to report.md, and all digits to measured.csv. For run.jsonl, --step
writes run_step.png, and run_step.json for ui.perfetto.dev.
"""

import argparse
import itertools
import json
import math
import sys
import textwrap
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.figure import Figure  # without pyplot, which needs a backend that can be loaded
from matplotlib.patches import Patch

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

SPEED = "processes nodes batch_size steps seconds samples/s speedup efficiency".split()
SPEED += ["device-hours", "split"]
COMMUNICATION = ["processes", "comm %", "hidden %", "R", "sending", "waiting"]
COMMUNICATION += ["late rank", "late host"]
BESIDE = ["processes", "step", "warmup", "eval", "save", "peak_MB"]

# Colours that colour-blind people can tell apart (Okabe and Ito 2008), the same in all pictures.
COLOURS = {"data": "#E69F00", "forward": "#56B4E9", "backward": "#0072B2", "bubble": "#BBBBBB"}
COLOURS |= {"comm": "#D55E00", "optimizer": "#009E73"}
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


def runs_of(rows, notes):
    """Returns a table of the runs: the last values of their rows, and their times of an epoch."""
    for (run, *_), found in rows.groupby(RUN, sort=False):
        name = f"{found['file'].iloc[0]}: run {run}"
        steps = found["steps"].sum() / found["processes"].iloc[0]
        if steps < 10:
            notes.append(f"{name} has only {steps:.0f} step(s) after its warmup")
        devices = found["device"].unique()
        if len(devices) > 1:
            notes.append(f"{name} was on {' and '.join(devices)}: its times are means over all")
        rows = rows.drop(found.index) if steps == 0 else rows
    if rows.empty:
        sys.exit("no runs to report: " + "; ".join(notes))

    of_run = rows.groupby(RUN, sort=False)
    of_rank = rows.groupby([*RUN, "rank"], sort=False)
    steps = of_rank["steps"].sum()
    times = of_rank[[*PHASES, "comm_total"]].sum().div(steps, axis=0)
    totals = times["comm_total"].groupby(RUN, sort=False)

    runs = of_run.tail(1).set_index(RUN)
    runs["peak_MB"] = of_run["peak_MB"].max()
    runs["warmup"] = of_rank["warmup"].sum().groupby(RUN).mean()
    runs["eval"] = of_run["eval"].sum() / of_run["val_loss"].count()
    runs["save"] = of_run["save"].mean()
    runs["step"] = runs["step"].astype(int)
    runs["steps"] = steps.groupby(RUN).mean().round().astype(int)
    runs[times.columns] = times.groupby(RUN).mean()
    sends = (runs.index.get_level_values("processes") > 1) & (totals.min() > 0)
    # Stages of a pipeline do not send the same, whoever is late.
    sends &= runs.index.get_level_values("num_microbatches") == "-"
    runs["sending"] = totals.min().where(sends)
    runs["waiting"] = (totals.mean() - totals.min()).where(sends)
    last = totals.idxmin()
    runs["late rank"] = last.str[-1].map("{:.0f}".format).where(sends, "-")
    hosts = of_rank["host"].agg(lambda names: " or ".join(names.unique())).reindex(last)
    runs["late host"] = hosts.set_axis(last.index).where(sends, "-")
    columns = [*times, "sending", "waiting"]
    runs[columns] = runs[columns].mul(runs["steps_per_epoch"], axis=0)

    runs = runs.reset_index()
    runs["seconds"] = runs[PHASES].sum(axis=1)
    runs["local batch"] = runs["batch_size"] / runs["processes"]
    runs["samples/s"] = runs["batch_size"] * runs["steps_per_epoch"] / runs["seconds"]
    runs["device-hours"] = runs["devices"] * runs["seconds"] / 3600
    # FSDP on GPUs counts what its communication holds up as forward and backward.
    is_known = (runs["device"] == "CPU") | (runs["shard_size"] == "-")
    runs["comm %"] = (100 * runs["comm"] / runs["seconds"]).where(is_known)
    hidden = (100 - 100 * runs["comm"] / runs["comm_total"]).clip(lower=0)
    runs["hidden %"] = hidden.where((runs["processes"] > 1) & is_known)
    runs["R"] = (runs[COMPUTE].sum(axis=1) / runs["sending"]).where(is_known)
    runs["split"] = "-"  # the whole model is in each process
    for name, parts in ("num_stages", " stages"), ("shard_size", " shards"):
        runs["split"] = runs["split"].where(runs[name] == "-", runs[name] + parts)
    return runs


def groups_of(runs):
    """Returns tables of the runs that differ in the number of processes alone, with speedups."""
    groups = []
    kept = {"strong": ("batch_size", "global batch"), "weak": ("local batch", "batch of a process")}
    for scaling, (column, words) in kept.items():
        for (batch, _), members in runs.groupby([column, "same"]):
            title = f"{scaling} scaling, {members['task'].iloc[0]}, {words} {batch:g}"
            is_one = members["processes"] == 1  # it sends nothing, whatever its --comm_hook
            for hook in sorted(members["comm_hook"][~is_one].unique()):
                group = members[is_one | (members["comm_hook"] == hook)]
                if group["processes"].nunique() > 1:
                    group = with_speedups(group.sort_values(["processes", "nodes"], kind="stable"))
                    end = "" if hook == "none" else f", comm_hook {hook}"
                    groups.append(group.assign(title=title + end, group=len(groups) + 1))
    return groups


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


def tables(columns, runs):
    """Returns three tables: speed, communication, and what comes beside the steps."""
    beside = [*BESIDE, *(name for name in runs if name.startswith("val_"))]
    return [text for names in (columns, COMMUNICATION, beside) for text in (table(names, runs), "")]


def comparison(group):
    """Returns the lines on a group."""
    facts = [pair for pair in group["same"].iloc[0] if pair[1] not in ("", "0", "0.0", "False")]
    for name in ("threads", "steps_per_epoch", "num_workers", *LAUNCH):
        if set(group[name]) - {"-", "0"}:
            facts.append((name, " / ".join(map(str, group[name].unique()))))
    facts = ", ".join(map(" ".join, facts)) + ". Times are those of an epoch."
    lines = [f"## {group['title'].iloc[0]}", "", *textwrap.wrap(facts, 100), ""]
    lines += [*tables(SPEED, group), pays_up_to(group)[1], ""]
    if (group["efficiency"] > 1.1).any():
        doubt = "N processes are more than N times as fast: was a run beside other work?"
        lines += [f"Not to be trusted: {doubt}", ""]
    return lines


def save(figure, sentence, path, loc="outside right center", **legend):
    """Writes the figure, with a sentence above its axes and a legend outside of them."""
    figure.suptitle(sentence, x=0.01, horizontalalignment="left")
    figure.legend(loc=loc, **legend)
    figure.savefig(path)


def draw_phases(group, path):
    """Draws where the time of a step goes: a bar for each run."""
    phases = group[PHASES].div(group["steps_per_epoch"] / 1000, axis=0)
    phases = phases.set_index(group["processes"]).loc[:, phases.any()]
    axes = Figure().subplots()
    places = range(len(phases))
    tops = phases.cumsum(axis=1)
    for name, spans in phases.items():
        axes.bar(places, spans, 0.7, tops[name] - spans, color=COLOURS[name], label=name)
    axes.set_xticks(places, phases.index)
    axes.set(xlabel="processes", ylabel="time of a step (ms)", xlim=(-0.6, len(phases) - 0.4))
    steps = phases.sum(axis=1)
    few, many = phases.index[[0, -1]]
    sentence = f"On {many} processes a step takes {steps.iloc[-1] / steps.iloc[0]:.2f} times "
    sentence += f"as long as on {few}"
    if math.isfinite(share := group["comm %"].iloc[-1]):
        sentence += f"; {share:.0f}% of it is comm"
    save(axes.figure, f"{sentence}\n{group['title'].iloc[0]}", path, reverse=True)


def events_of(rows):
    """Returns the phases and the collectives of the last step in a log, two tables, or raises.

    Times are in ms since the step began. The clocks agree, since all processes set them when they
    had just left an all-reduce.
    """
    rows = rows[rows["last_step"].map(bool)]
    if rows.empty:
        raise ValueError("its rows hold no step")
    last = rows.loc[rows.index.max()]  # the last that was written
    rows = rows[(rows[[*RUN, "step"]] == last[[*RUN, "step"]]).all(axis=1)]
    events = []
    for row in rows.itertuples():
        process = f"rank {row.rank:.0f} on {row.host}"
        for name, *numbers in row.last_step:
            events.append((int(row.rank), process, str(name), *map(float, numbers)))
    events = pd.DataFrame(events, columns=["rank", "process", "name", "start", "end", "bytes"])
    events[["start", "end"]] = 1000 * (events[["start", "end"]] - events["start"].min())
    events["ms"] = events["end"] - events["start"]
    is_sent = events["name"].isin(["all-reduce", "all-gather", "reduce-scatter"])
    return events[~is_sent], events[is_sent]


def write_trace(phases, sent, path):
    """Writes a step as a Chrome trace: for each rank a line of phases and one of collectives."""
    events = []
    for rank, process in phases.groupby("rank")["process"].last().items():
        events.append({"pid": rank, "name": "process_name", "ph": "M", "args": {"name": process}})
    for thread, part in enumerate((phases, sent)):
        for event in part.itertuples():
            span = {"pid": event.rank, "tid": thread, "name": event.name, "ph": "X"}
            span |= {"ts": 1000 * event.start, "dur": 1000 * event.ms}  # in microseconds
            events.append(span | {"args": {"bytes": event.bytes}})
    path.write_text(json.dumps({"traceEvents": events}))


def draw_step(phases, sent, path):
    """Draws the phases of each rank and, below them, its collectives.

    In DDP, an all-reduce waits until it has begun in all processes: that part of it is hatched.
    """
    names = phases["name"].str.split().str[0]  # "forward 3" is of micro-batch 3
    # The collectives of shards and of copies of a stage are those of some processes.
    is_ddp = (sent["name"] == "all-reduce").all() and not (names == "bubble").any()
    begun = sent.groupby(sent.groupby("rank").cumcount())["start"].transform("max")
    waits = (begun - sent["start"]).clip(0, sent["ms"]) * is_ddp
    hosts = phases.groupby("rank")["process"].last()
    figure = Figure(figsize=(6.4, 1.6 + 0.8 * len(hosts)))
    axes = figure.subplots()
    colours = names.map(COLOURS).fillna("#CC79A7")
    edges = {"edgecolor": "white", "linewidth": 0.5}
    hatched = {"facecolor": "white", "edgecolor": "black", "hatch": "////"}
    axes.barh(phases["rank"], phases["ms"], 0.5, phases["start"], color=colours, **edges)
    axes.barh(sent["rank"] + 0.4, waits, 0.2, sent["start"], **hatched)
    axes.barh(sent["rank"] + 0.4, sent["ms"] - waits, 0.2, sent["start"] + waits, color="black")
    axes.invert_yaxis()
    axes.set_yticks(hosts.index, hosts)
    axes.set(xlabel="time (ms)")
    waits = waits.groupby(sent["rank"]).sum()
    spans = phases["ms"].groupby(names, sort=False).sum()
    if "bubble" in spans:  # stages wait for each other, whoever is late
        share = spans["bubble"] / spans.sum()
        sentence = f"{share:.0%} of this step is bubble: stages wait for each other"
    elif not is_ddp:
        sentence = f"{len(sent) / len(hosts):.0f} collectives in this step"
    elif waits.max() > 0:
        exposed = phases["ms"][(names == "comm") & (phases["rank"] == waits.idxmax())].sum()
        sentence = f"Rank {waits.idxmax()} waits {waits.max():.3g} ms in all-reduces "
        sentence += f"for rank {waits.idxmin()}, {exposed:.3g} ms exposed"
    else:
        sentence = "Nobody waits"
    marks = [
        Patch(color=colour, label=name.replace("comm", "comm (exposed)"))
        for name, colour in dict(zip(names, colours)).items()
        if spans[name] > 0.004 * spans.sum()  # the others cannot be seen
    ]
    if len(sent):
        marks.append(Patch(color="black", label=", ".join(sent["name"].unique())))
    if len(sent) and is_ddp:
        marks.append(Patch(**hatched, label="waiting in it"))
    save(figure, sentence, path, "outside lower center", handles=marks, ncols=4, fontsize=10)
    return figure


def draw_steps(rows, out):
    """Draws and writes the last step of each log, and names the logs that hold none."""
    stems = [path.stem for path in rows["file"].unique()]
    for path, logged in rows.groupby("file"):
        name = path.stem if stems.count(path.stem) == 1 else f"{path.parent.name}_{path.stem}"
        try:
            phases, sent = events_of(logged)
            write_trace(phases, sent, out / f"{name}_step.json")
            draw_step(phases, sent, out / f"{name}_step.png")
        except (ArithmeticError, TypeError, ValueError) as error:  # damaged
            print(f"cannot read the last step in {path}: {error}", file=sys.stderr)


def write_all(groups, lines, out):
    """Writes the lines, the table of the compared runs, and pictures of each group."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.md").write_text("\n".join(lines) + "\n")
    measured = pd.concat([pd.DataFrame(), *groups])
    columns = ["group", "title", *SPEED, *COMMUNICATION[1:], *BESIDE[1:], *PHASES]
    columns += [name for name in measured if name.startswith("val_")]
    measured.reindex(columns=columns).to_csv(out / "measured.csv", index=False)
    for number, group in enumerate(groups, start=1):
        end = ".png" if number == 1 else f"_{number}.png"
        draw_phases(group, out / f"phases{end}")


def main():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("paths", nargs="+", type=Path, help="logs, or folders of logs")
    add("--out", type=Path, metavar="FOLDER", help="write the report and pictures there")
    add("--step", action="store_true", help="also draw the last step of each log")
    args = parser.parse_args()
    matplotlib.rcParams.update(STYLE)
    if args.step and not args.out:
        parser.error("--step needs --out")
    rows, notes = read_logs(args.paths)
    runs = runs_of(rows, notes)
    groups = groups_of(runs)
    lines = [line for group in groups for line in comparison(group)]
    alone = runs.drop(index=[number for group in groups for number in group.index], errors="ignore")
    if len(alone):
        lines += ["## not compared: no other run differs in the number of processes alone", ""]
        lines += tables(["task", *SPEED[:6], "device-hours"], alone)
    lines += [f"note: {note}" for note in notes]
    print("\n".join(lines))
    if args.out:
        write_all(groups, lines, args.out)
    if args.step:
        draw_steps(rows, args.out)


if __name__ == "__main__":
    main()
