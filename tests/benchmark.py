"""Measure the speed of the scripts beside what they replace. It is no test, because times vary.

    python tests/benchmark.py ratio "OLD/singlegpu/images.py WORDS" "singlegpu/images.py WORDS"
    python tests/benchmark.py predict --nodes 2 4 8     # speedup on slow links; as root, on Linux
    python tests/benchmark.py predict --nodes 4 --changes "twice the batch"    # which would help

`ratio` and `steps` measure in rounds and print medians. In a round, each side runs once, in turn.
OLD is a checkout of an earlier version. `ratio` compares the samples/s of the logs. A side is a
command without `python`, or several joined by " & ", which run at the same time. Variables may
stand before a command:

    ratio "MALLOC_TOP_PAD_=268435456 singlegpu/images.py" "singlegpu/images.py"
    ratio "singlegpu/gpt.py --batch_size 8 & singlegpu/gpt.py --batch_size 8" \\
        "multigpu/gpt.py --num_gpus 2 --batch_size 16" --columns forward backward comm

train.py of karpathy/nanoGPT can also be a side. `nanogpt` runs it in its setting for a CPU, and
writes such a log:

    ratio "tests/benchmark.py nanogpt --folder NANOGPT" \\
        "singlegpu/gpt.py --dataset TEXT --vocab_size 128 --seq_len 64 --d_model 128 --n_heads 4 \\
        --num_layers 4 --batch_size 12"

`steps` compares the seconds and the CPU seconds of a step. It takes any command with --max_steps.
Each runs in two lengths, and the difference of their times does not contain the start:

    steps "singlegpu/images.py --model mlp --eval_every 9999" \\
        "tests/helpers/plain_loops.py plain singlegpu/images.py --model mlp" --lengths 100 1100
"""

import argparse
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests/helpers"))


def run_side(side, folder):
    """Runs the commands of a side at the same time. Returns the last row of rank 0 of each log."""
    logs, processes = [], []
    for number, command in enumerate(side.split(" & ")):
        logs.append(Path(folder, f"{number}.jsonl"))
        logs[-1].unlink(missing_ok=True)
        variables = re.match(r"(\s*[A-Z_]+=\S* )*", command)[0]
        python, log = shlex.quote(sys.executable), shlex.quote(str(logs[-1]))
        command = f"{variables}{python} {command[len(variables) :]} --log {log}"
        processes.append(subprocess.Popen(command, shell=True, stdout=subprocess.DEVNULL, cwd=ROOT))
    if any([process.wait() for process in processes]):
        sys.exit(f"failed: {side}")
    rows = [map(json.loads, log.read_text().splitlines()) for log in logs]
    return [[row for row in each if row["rank"] == 0][-1] for each in rows]


def ratio(options):
    """Prints the samples/s of the sides. Of --columns, it shows those of a side's first command."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for number, side in itertools.product(range(options.rounds), options.sides):
            rows = run_side(side, folder)
            rate = sum(row["samples/s"] for row in rows)
            found.append(rows[0] | {"round": number, "side": side, "rate": rate})
    found = pd.DataFrame(found).set_index("round")
    first = found["rate"][found["side"] == options.sides[0]]
    names = ["side", "samples/s", "to the first", *options.columns]
    print("|", " | ".join(names), "|")
    print("|" + " --- |" * len(names))
    for side, rows in found.groupby("side", sort=False):
        ratios = rows["rate"] / first
        cells = [side, f"{rows['rate'].median():.1f}"]
        cells.append(f"{ratios.median():.3f} ({ratios.min():.2f} to {ratios.max():.2f})")
        cells += [f"{value:.4g}" for value in rows.reindex(columns=options.columns).median()]
        print("|", " | ".join(cells), "|")


def measure(command):
    """Runs a command. Returns its seconds, and the CPU seconds of it and all its children."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *shlex.split(command)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    errors = process.stderr.read()  # this waits until the command ends
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"failed: {command}\n{errors.decode()}")
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime


def steps(options):
    """Prints the time and CPU time of a step in ms, and their ratios to those of the first side."""
    few, many = options.lengths
    found = []
    for number, side in itertools.product(range(options.rounds), options.sides):
        short = measure(f"{side} --max_steps {few}")
        long = measure(f"{side} --max_steps {many}")
        wall, cpu = [1000 * (b - a) / (many - few) for a, b in zip(short, long)]
        found.append({"round": number, "side": side, "wall": wall, "cpu": cpu})
        print(found[-1], file=sys.stderr)
    found = pd.DataFrame(found).set_index("round")
    first = found[found["side"] == options.sides[0]]
    print("| side | ms of a step | to the first | CPU ms of a step | to the first |")
    print("|" + " --- |" * 5)
    for side, rows in found.groupby("side", sort=False):
        cells = [side]
        for column in "wall", "cpu":
            ratios = rows[column] / first[column]
            cells.append(f"{rows[column].median():.2f}")
            cells.append(f"{ratios.median():.2f} ({ratios.min():.2f} to {ratios.max():.2f})")
        print("|", " | ".join(cells), "|")


def nanogpt(options):
    """Runs train.py of karpathy/nanoGPT in the setting that its README gives for a CPU."""
    words = "train.py config/train_shakespeare_char.py --device=cpu --eval_iters=1 "
    words += "--log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 "
    words += "--dropout=0.0 --lr_decay_iters=2000 --eval_interval=100000 --dtype=float32 "
    words += f"--compile={options.compile} --max_iters={options.max_steps} "
    words += f"--out_dir={tempfile.gettempdir()}"
    told = subprocess.check_output([sys.executable, *words.split()], cwd=options.folder, text=True)
    times = [float(found) for found in re.findall(r"iter \d+: .* time ([\d.]+)ms", told)]
    later = times[min(20, len(times) // 2) :]
    row = {"rank": 0, "samples/s": 12 * 1000 * len(later) / sum(later)}
    Path(options.log).write_text(json.dumps(row) + "\n")


def predict(options):
    import prediction  # here, because it imports torch, and the other commands need none

    prediction.predict(options)


def main():
    wide = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=wide)
    commands = parser.add_subparsers(required=True)
    add = {}
    for run in ratio, steps, nanogpt, predict:
        words = commands.add_parser(run.__name__)
        words.set_defaults(run=run)
        add[run] = words.add_argument
    add[ratio]("sides", nargs="+")
    add[ratio]("--rounds", type=int, default=5)
    add[ratio]("--columns", nargs="+", default=[], help="further columns of the logs")
    add[steps]("sides", nargs="+")
    add[steps]("--rounds", type=int, default=5)
    add[steps]("--lengths", type=int, nargs=2, default=[100, 1100], help="in steps")
    add[nanogpt]("--log", default=os.devnull)
    add[nanogpt]("--folder", default="nanoGPT")
    add[nanogpt]("--max_steps", type=int, default=300)
    add[nanogpt]("--compile", action="store_true")
    add[predict]("--models", nargs="+", help='such as "images, mlp"; all if it is not given')
    add[predict]("--mbit", type=int, nargs="+", default=[100, 400, 1000], help="of each link")
    add[predict]("--nodes", type=int, nargs="+", default=[2, 4, 8])
    add[predict]("--grad_accum_steps", type=int, nargs="+", default=[1], help="micro-batches")
    add[predict]("--changes", nargs="+", default=["as it is"], help="as predict.py names them")
    add[predict]("--max_bytes", type=int, default=1 << 25, help="largest message to measure a link")
    add[predict]("--seconds", type=float, default=4, help="length of a training, roughly")
    add[predict]("--logs", metavar="FOLDER", help="keep the logs and the links there")
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
