"""Does it pay, and would it? Speedup, efficiency and where the time went, from what the scripts wrote with --log.

    python report.py runs/                                     # every .csv in the folder; or name the files
    python report.py runs/ --out report                        # also writes report.md, and pictures of each group
    python report.py one.csv --predict link.json               # before any distributed run: 2 to 1024 processes
    python report.py one.csv --predict inside.json between.json --gpus_per_node 8

Runs are compared that differ in the processes alone, at the same global batch (strong scaling) or at the same batch per
process (weak). The baseline is the run with the fewest processes. Times are means over the processes and over the
epochs after the first ones (--warmup); speedup is of samples/s, which leaves evaluation and saving out; efficiency is
speedup over the ratio of processes; R = compute / communication; hidden is the share of the communication that the
backward pass hides. Serial is Amdahl's serial fraction, as Karp and Flatt measure it (1990, "Measuring parallel
processor performance"), fitted over all counts by least squares; 1 / serial is the largest speedup that it allows.

A prediction needs the log of one process, and link files of allreduce.py, best of messages as large as buckets
(--min_bytes 1048576). Its model (after Li et al. 2020, "PyTorch Distributed", section 3.2, and the ring of Patarasu and
Yuan 2009): with N processes, data, forward and backward pass take the time of 1 / N of the global batch, in proportion
or, if the log also has runs that differ from this one in the batch alone, in a line between the batches that were
measured; the optimizer's time stays. The gradients, 4 bytes a parameter, leave in buckets as DDP makes them, of 1 MiB
and then 25 MiB, each when the backward pass has come as far as its share of the bytes; they pass one after the other, a
bucket of n bytes in latency (N - 1) / (N' - 1) + n 2 (N - 1) / N / bandwidth, measured with N' processes; what is left
after the backward pass is exposed. Over nodes the slower link counts, and the latencies of both. The model does not
know of compute that slows down because it shares cores or memory with the communication or with other processes, of
skew, or of links that others use.
"""
import argparse
import io
import json
import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd

SAME = ("script", "model", "dataset", "source", "target", "precision", "seq_len", "grad_accum_steps", "compile",
        "num_stages", "num_microbatches", "schedule", "balance", "num_workers", "max_steps", "learning_rate",
        "dropout")  # what a user chose, and compared runs have alike; script: without its folder
PHASES = ("data", "forward", "backward", "bubble", "comm", "optimizer", "eval", "save")
METRICS = ("val_acc", "val_ppl", "val_bpb", "val_loss")  # the first that a script has
COLUMNS = ("folder", "processes", "nodes", "batch_size", "comm_hook", "epochs", "epoch time", "+-", "samples/s",
           "speedup", "efficiency", "serial", *PHASES, "comm_total", "hidden", "R", "skew")
NEEDED = ("run", "script", "model", "dataset", "precision", "epoch", "rank", "processes", "nodes", "batch_size",
          "epochs", "parameters", "time", "samples/s", "data", "forward", "backward", "comm", "optimizer", "eval",
          "save", "comm_total")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")  # Okabe, Ito 2008
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "--")
BUCKETS = 1 << 20, 25 << 20  # bytes of DDP's first bucket, and of the others


def fail(message):
    """End on a user's mistake: one line on stderr, exit status 2."""
    print(f"report.py: error: {message}", file=sys.stderr)
    sys.exit(2)


def read_logs(paths):
    """All rows of the logs, and lines on what is missing in them."""
    files = [file for path in paths for file in (sorted(path.glob("*.csv")) if path.is_dir() else [path])]
    if not files:
        fail(f"no .csv file in {' '.join(map(str, paths))}")
    frames, notes = [], []
    for file in files:
        try:
            text = file.read_text(errors="replace")
            frame = pd.read_csv(io.StringIO(text), dtype=str, on_bad_lines="skip", index_col=False)
        except OSError as error:
            notes.append(f"{file}: {error.strerror}")
            continue
        except Exception as error:  # pandas has many
            notes.append(f"{file}: {str(error).strip().splitlines()[0]}")
            continue
        frame = frame.rename(columns={"seconds": "time"})
        if missing := [name for name in NEEDED if name not in frame]:
            notes.append(f"{file}: not a log of these scripts: no column {', '.join(missing)}")
            continue
        words = {"run", *SAME, "comm_hook", "torch"}
        for name in set(frame) - words:
            column = pd.to_numeric(frame[name], errors="coerce")
            frame[name] = column.where(column.abs() < 1e13)
        numbers = frame[[name for name in NEEDED if name not in words]]
        whole = (numbers >= 0).all(axis=1) & frame[["run", "script"]].notna().all(axis=1)
        whole &= (numbers[["processes", "nodes", "batch_size"]] >= 1).all(axis=1)
        whole &= (numbers[["time", "samples/s"]] > 1e-9).all(axis=1)
        whole &= numbers["time"] > numbers["eval"] + numbers["save"]
        if damaged := sum(map(bool, text.splitlines()[1:])) - int(whole.sum()):
            notes.append(f"{file}: {damaged} damaged row(s) left out")
        frames.append(frame[whole])
    rows = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
    return rows, notes


def runs_of(rows, warmup, notes):
    """One row for each run, its epochs that all processes told of; and notes on what was cut short."""
    runs = []
    for run, of_run in rows.groupby("run", sort=False):
        of_run = of_run.drop_duplicates(["epoch", "rank"], keep="last")
        compute = (of_run["forward"] + of_run["backward"] + of_run["optimizer"]).groupby(of_run["epoch"])
        of_run = of_run.assign(skew=compute.transform("max") - compute.transform("min"))
        counts = of_run.groupby("epoch")["rank"].transform("count")
        whole, name = of_run[counts == of_run["processes"]], f"{of_run['script'].iloc[0]}, run {run}"
        if len(whole) < len(of_run):
            notes.append(f"{name}: epochs left out that not all processes told of")
        if whole.empty:
            continue
        if whole["epoch"].max() + 1 < whole["epochs"].iloc[0]:
            notes.append(f"{name}: cut short after {whole['epoch'].max() + 1:.0f} of {whole['epochs'].iloc[0]:.0f} "
                         "epochs")
        later = whole[whole["epoch"] >= whole["epoch"].min() + warmup]
        if later.empty:
            notes.append(f"{name}: no more than {warmup} epoch(s), so the first one counts")
            later = whole
        epochs = later.groupby("epoch")[[name for name in ("time", "samples/s", "comm_total", "R", "skew", *PHASES)
                                         if name in later]].mean()
        last = whole[whole["epoch"] == whole["epoch"].max()].iloc[0]
        folder, _, script = last["script"].rpartition("/")
        metric = next((name for name in METRICS if name in last and np.isfinite(last[name])), "val_loss")
        summary = {name: last.get(name) for name in SAME} | epochs.mean().to_dict()
        summary |= {name: int(last[name]) for name in ("processes", "nodes", "batch_size")}
        runs.append(summary | {
            "script": script, "folder": folder, "comm_hook": last.get("comm_hook"), "epochs": len(epochs),
            "epoch time": summary["time"], "+-": epochs["time"].std(ddof=0), "metric": metric, metric: last.get(metric),
            "hidden": max(0, 1 - summary["comm"] / summary["comm_total"]) if summary.get("comm_total") else math.nan,
            "R": (sum(summary[name] for name in ("forward", "backward", "optimizer")) / summary["comm_total"]
                  if summary.get("comm_total") else math.nan),
            "parameters": last.get("parameters"), "rows": whole})
    return runs


def settings_of(run):
    """What compared runs have alike."""
    return tuple("" if pd.isna(run[name]) else str(run[name]) for name in SAME)


def groups_of(runs):
    """Yields ("strong" or "weak", what the runs have alike, the runs): those that differ in the processes alone."""
    for scaling in ("strong", "weak"):
        groups = {}
        for run in runs:
            batch = run["batch_size"] if scaling == "strong" else run["batch_size"] / run["processes"]
            groups.setdefault((settings_of(run), batch), []).append(run)
        for (same, batch), group in groups.items():
            group.sort(key=lambda run: (run["processes"], run["nodes"]))
            if group[0]["processes"] < group[-1]["processes"]:
                batch = f"global batch {batch}" if scaling == "strong" else f"batch {batch:g} per process"
                settings = dict(zip(SAME, same)) | {"batch": batch}
                yield scaling, settings, group


def serial_fraction(processes, speedups):
    """Amdahl's serial fraction f of 1 / speedup = f + (1 - f) / N, by least squares over counts N > 1; nan of none."""
    counts, inverse = np.array(processes, float), 1 / np.array(speedups, float)
    x, y = (1 - 1 / counts)[counts > 1], (inverse - 1 / counts)[counts > 1]
    return float((x * y).sum() / (x * x).sum()) if len(x) else math.nan


def compare(group):
    """Adds speedup, efficiency and serial fraction to the runs of a group, against its first one."""
    base = group[0]
    for run in group:
        ratio = run["processes"] / base["processes"]
        run["speedup"] = run["samples/s"] / base["samples/s"]
        run["efficiency"] = run["speedup"] / ratio
        run["serial"] = serial_fraction([ratio], [run["speedup"]])
    return serial_fraction([run["processes"] / base["processes"] for run in group], [run["speedup"] for run in group])


def table(columns, rows):
    """Markdown."""
    def cell(value):
        if value is None or isinstance(value, float) and not math.isfinite(value):
            return "-"
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    rows = [[cell(row.get(name)) for name in columns] for row in rows]
    return "\n".join(["| " + " | ".join(line) + " |" for line in ([*columns], ["---"] * len(columns), *rows)])


def report(rows, warmup, notes, out):
    """The report's lines; writes the pictures of each group into the folder `out`, if there is one."""
    runs = runs_of(rows, warmup, notes)
    groups, lines, told = list(groups_of(runs)), [], set()
    for number, (scaling, settings, group) in enumerate(groups):
        fraction = compare(group)
        told |= {id(run) for run in group}
        plain = ("script", "model", "dataset", "precision", "batch")
        name = ", ".join(value if key in plain else f"{key} {value}" for key, value in settings.items()
                         if value not in ("", "False", "None", "0", "0.0"))
        columns = [column for column in (*COLUMNS, group[0]["metric"])
                   if any(pd.notna(run.get(column)) and run.get(column) != "" for run in group)]
        columns = [column for column in columns if column not in PHASES or any(run.get(column) for run in group)]
        lines += [f"## {scaling} scaling: {name}", "", table(["scaling", *columns],
                  [{"scaling": scaling} | run for run in group]), ""]
        base = group[0]["processes"]
        if base > 1:
            lines.append(f"The baseline has {base} processes: there is no run of one.")
        if scaling == "strong":
            bound = f"at most {1 / fraction:.3g} times as fast, however many processes" if fraction > 0 else "no bound"
            lines.append(f"Serial fraction {fraction:.3f}: {bound if fraction < 1 else 'more processes are slower'}.")
        lines.append("")
        if out:
            name = f"{number + 1}_{scaling}_{settings['script'].removesuffix('.py')}_{settings['model']}"
            name = "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in name[:50])  # or too long
            draw(out, name, scaling, group)
    alone = [run for run in runs if id(run) not in told]
    if alone:
        lines += ["## not compared: no run that differs in the processes alone", "",
                  table(["script", "model", "dataset", *COLUMNS[:COLUMNS.index("speedup")]], alone), ""]
    if not groups:
        lines.append("no two runs with different numbers of processes and otherwise equal settings")
    return lines


def draw(out, name, scaling, group):
    """The group's pictures: epoch time over epochs, mean epoch time, speedup, efficiency, phases, losses."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    def picture(kind, y_label, x_label="processes"):
        figure, axes = plt.subplots(figsize=(5, 3.5), layout="constrained")
        axes.set(xlabel=x_label, ylabel=y_label, title=f"{group[0]['script']}, {group[0]['model']}, {scaling} scaling")
        axes.title.set_fontsize("medium")

        def save():
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize="small")
            figure.savefig(out / f"{name}_{kind}.png", dpi=150)
            plt.close(figure)

        return axes, save

    labels = [f"{run['processes']}" + (f" ({run['nodes']} nodes)" if run["nodes"] > 1 else "") for run in group]
    marks, places = "osD^vPX*", np.arange(len(group))
    axes, save = picture("epoch_times", "s an epoch", "epoch")
    for number, run in enumerate(group):
        times = run["rows"].groupby("epoch")["time"].mean()
        axes.plot(times.index, times, marker=marks[number % 8], color=COLOURS[number % 8], label=labels[number])
    axes.set_ylim(0)
    save()
    axes, save = picture("mean_epoch_time", "s an epoch")
    means, spreads = ([run[name] for run in group] for name in ("epoch time", "+-"))
    axes.bar(places, means, yerr=spreads, color=COLOURS[0], capsize=4)
    axes.set_xticks(places, labels)
    save()
    counts = [run["processes"] for run in group]
    for kind, ideal in (("speedup", [count / counts[0] for count in counts]), ("efficiency", [1] * len(counts))):
        axes, save = picture(kind, kind)
        axes.plot(counts, ideal, color="grey", linestyle="--", label="ideal")
        axes.plot(counts, [run[kind] for run in group], marker="o", color=COLOURS[0], label="measured")
        axes.set_xticks(counts)
        axes.set_ylim(0)
        save()
    axes, save = picture("phases", "s an epoch, mean over processes")
    bottom = np.zeros(len(group))
    for number, phase in enumerate(PHASES):
        heights = np.nan_to_num([run.get(phase, 0.0) for run in group])
        if heights.any():
            axes.bar(places, heights, bottom=bottom, label=phase, color=COLOURS[number], hatch=HATCHES[number],
                     edgecolor="white")
            bottom += heights
    axes.set_xticks(places, labels)
    save()
    for kind in ("loss", "acc"):
        names = [name for name in (f"train_{kind}", f"val_{kind}") if name in group[0]["rows"]]
        if not names or group[0]["rows"][names].isna().all(axis=None):
            continue
        axes, save = picture({"loss": "losses", "acc": "accuracies"}[kind], {"loss": "loss", "acc": "accuracy"}[kind],
                             "epoch")
        for number, run in enumerate(group):
            for column, line in zip(names, ("-", "--")):
                values = run["rows"].groupby("epoch")[column].mean()
                axes.plot(values.index, values, line, marker=marks[number % 8], color=COLOURS[number % 8],
                          label=f"{labels[number]}: {column}")
        save()


def read_links(paths):
    """Of each file of allreduce.py: processes, latency_s and bandwidth_bytes_per_s."""
    links = []
    for path in paths:
        try:
            link = json.loads(Path(path).read_text())
            link = {name: float(link[name]) for name in ("processes", "latency_s", "bandwidth_bytes_per_s")}
            if not (2 <= link["processes"] < math.inf and 0 <= link["latency_s"] < 1e9 and
                    1 <= link["bandwidth_bytes_per_s"] < 1e300):
                raise ValueError("its numbers cannot be")
            links.append(link)
        except OSError as error:
            fail(f"--predict {path}: {error.strerror}")
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            fail(f"--predict {path} is not of allreduce.py --out: {str(error).splitlines()[0]}")
    return links


def buckets_of(parameters):
    """Bytes of the buckets that DDP sends gradients of this many float32 parameters in, in their order."""
    sizes, left = [], 4 * parameters
    while left > 0:
        sizes.append(min(left, BUCKETS[bool(sizes)]))
        left -= sizes[-1]
    return sizes


def all_reduce_seconds(size, processes, links, gpus_per_node):
    """Of this many bytes among the processes: see the docstring on top."""
    per_hop = [link["latency_s"] / (link["processes"] - 1) for link in links]
    if len(links) == 1 or processes <= gpus_per_node:
        latency, bandwidth = per_hop[0] * (processes - 1), links[0]["bandwidth_bytes_per_s"]
    else:
        nodes = math.ceil(processes / gpus_per_node)
        latency = per_hop[0] * (processes - nodes) + per_hop[1] * (nodes - 1)
        bandwidth = min(link["bandwidth_bytes_per_s"] for link in links)
    return latency + size * 2 * (processes - 1) / processes / bandwidth


def predict_step(step, processes, scaling, links, gpus_per_node, batch=1, compression=1):
    """The times of a step of many processes, from what step_of says of one.

    With a batch that is `batch` times as large, and gradients `compression` times as small.
    """
    share = step["batch_size"] * (batch / processes if scaling == "strong" else batch)
    data, forward, backward = (time_at(step["measured"], name, share) for name in ("data", "forward", "backward"))
    sizes, clock, comm_total = buckets_of(step["parameters"]), 0.0, 0.0
    for size, sent in zip(sizes, np.cumsum(sizes)):
        took = all_reduce_seconds(size / compression, processes, links, gpus_per_node) if processes > 1 else 0.0
        clock, comm_total = max(clock, backward * sent / (4 * step["parameters"])) + took, comm_total + took
    comm = max(0.0, clock - backward)
    compute = forward + backward + step["optimizer"]
    return {"processes": processes, "step_ms": 1000 * (data + compute + comm), "comm_ms": 1000 * comm,
            "comm_total_ms": 1000 * comm_total, "hidden": 1 - comm / comm_total if comm_total else math.nan,
            "R": compute / comm_total if comm_total else math.nan}


def phases_of(run):
    """The times of a step of a run, in s."""
    steps = run["samples/s"] * (run["time"] - run["eval"] - run["save"]) / run["batch_size"]
    return {name: run[name] / steps for name in ("data", "forward", "backward", "optimizer")}


def step_of(run, runs):
    """What predict_step wants of a run of one process, among others of different batches: times in s, and sizes."""
    alike = [other for other in runs if settings_of(other) == settings_of(run)]
    return {"batch_size": run["batch_size"], "parameters": int(run["parameters"]),
            "optimizer": phases_of(run)["optimizer"],
            "measured": {other["batch_size"]: phases_of(other) for other in [*alike, run]}}


def time_at(measured, name, batch):
    """Of a phase at this batch, in s, from {batch: phases}: in a line between batches, beyond them in proportion."""
    batches = sorted(measured)
    if batch > batches[-1]:
        return measured[batches[-1]][name] * batch / batches[-1]
    return float(np.interp(batch, [0, *batches], [0, *(measured[each][name] for each in batches)]))


def predict_speedup(step, processes, scaling, links, gpus_per_node, **change):
    """Of so many processes over one, both with a batch that is `batch` times as large."""
    alone = predict_step(step, 1, scaling, links, gpus_per_node, batch=change.get("batch", 1))["step_ms"]
    many = predict_step(step, processes, scaling, links, gpus_per_node, **change)["step_ms"]
    return alone / many * (processes if scaling == "weak" else 1)


def predict(rows, warmup, notes, link_files, gpus_per_node):
    """Lines on each run of one process: what 2 to 1024 would do, strong and weak, and what would change it."""
    links = read_links(link_files)
    if len(links) == 2 and not gpus_per_node:
        fail("two link files, inside a node and between nodes, need --gpus_per_node")
    runs, lines = [run for run in runs_of(rows, warmup, notes)
                   if run["processes"] == 1 and 0 < run["parameters"] < 1e11], []
    if not runs:
        fail("--predict needs the log of a run of one process")
    for run in runs:
        step, now = step_of(run, runs), sum(phases_of(run).values())
        name = f"{run['folder']}/{run['script']}, {run['model']}, {run['dataset']}, {run['precision']}"
        lines += [f"## prediction: {name}, {step['parameters']:,} parameters, batch {run['batch_size']}, steps of "
                  f"{1000 * now:.1f} ms", ""]
        for scaling in ("strong", "weak"):
            predictions = [predict_step(step, 2 ** power, scaling, links, gpus_per_node) for power in range(1, 11)]
            for row in predictions:
                row["scaling"], row["speedup"] = scaling, predict_speedup(step, row["processes"], scaling, links,
                                                                          gpus_per_node)
                row["efficiency"] = row["speedup"] / row["processes"]
            lines += [table(("scaling", "processes", "step_ms", "speedup", "efficiency", "comm_ms", "comm_total_ms",
                             "hidden", "R"), predictions), ""]
        two = predict_speedup(step, 2, "strong", links, gpus_per_node)
        verdict = "pays" if two >= 1.5 else "hardly pays" if two > 1.1 else "does not pay"
        lines.append(f"Two processes at the same global batch: {two:.2f} times as fast; it {verdict}. What would "
                     "change it:")
        faster = [link | {"bandwidth_bytes_per_s": 10 * link["bandwidth_bytes_per_s"],
                          "latency_s": link["latency_s"] / 10} for link in links]
        for what, used, change in (
                ("a batch 4 times as large (--batch_size; --grad_accum_steps saves memory)", links, {"batch": 4}),
                ("gradients in half precision (--comm_hook bf16)", links, {"compression": 2}),
                ("a link 10 times as fast", faster, {})):
            lines.append(f"- {what}: {predict_speedup(step, 2, 'strong', used, gpus_per_node, **change):.2f}")
        lines.append("")
    return lines


def main():
    parser = argparse.ArgumentParser(description="Speedup, efficiency and predictions from the rows that --log wrote.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = fail
    parser.add_argument("paths", nargs="+", type=Path, help="CSV files, or folders of them")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write report.md and pictures there")
    parser.add_argument("--warmup", type=int, default=1, help="epochs at a run's start that do not count")
    parser.add_argument("--predict", nargs="+", metavar="LINK.json", help="of allreduce.py: of all processes, or of "
                        "those of a node and of the nodes")
    parser.add_argument("--gpus_per_node", type=int, default=0, help="processes inside a node, for two link files")
    args = parser.parse_args()
    if args.warmup < 0 or args.gpus_per_node < 0 or args.predict and len(args.predict) > 2:
        fail("--warmup and --gpus_per_node must not be negative, and --predict takes one or two files")
    rows, notes = read_logs(args.paths)
    if rows.empty:
        fail("; ".join(notes) or "no rows")
    if args.out:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fail(f"--out {args.out}: {error.strerror}")
    if args.predict:
        lines = predict(rows, args.warmup, notes, args.predict, args.gpus_per_node)
    else:
        lines = report(rows, args.warmup, notes, args.out)
    lines += [f"note: {note}" for note in dict.fromkeys(notes)]
    print("\n".join(lines))
    if args.out:
        (args.out / "report.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
