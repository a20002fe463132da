"""Speed of the scripts beside what they replace. It is no test, since times vary.

    python tests/benchmark.py ratio "OLD/singlegpu/images.py WORDS" "singlegpu/images.py WORDS"
    python tests/benchmark.py predict --nodes 2 4 8     # speedup on slow links; as root, on Linux
    python tests/benchmark.py changes                   # what would help there, and what does

They measure in rounds, in which the sides take turns, and print medians. OLD is a checkout of an
earlier version. `ratio` compares the samples/s of the logs. A side is a command without `python`,
or several that run at the same time, joined by " & "; variables may stand before it:

    ratio "MALLOC_TOP_PAD_=268435456 singlegpu/images.py" "singlegpu/images.py"
    ratio "singlegpu/gpt.py --batch_size 8 & singlegpu/gpt.py --batch_size 8" \\
        "multigpu/gpt.py --num_gpus 2 --batch_size 16" --columns forward backward comm

train.py of karpathy/nanoGPT, in its setting for a CPU, writes such a log, too, and can be a side:

    ratio "tests/benchmark.py nanogpt --folder NANOGPT" \\
        "singlegpu/gpt.py --dataset TEXT --vocab_size 128 --seq_len 64 --d_model 128 --n_heads 4 \\
        --num_layers 4 --batch_size 12"
"""

import argparse
import itertools
import json
import math
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests/helpers"))


def run_side(side, folder):
    """Runs the commands of a side at the same time. Returns the last row of rank 0 of each log."""
    processes = []
    logs = []
    for number, command in enumerate(side.split(" & ")):
        variables, words = re.fullmatch(r"((?:[A-Z_]+=\S* )*)(.*)", command.strip()).groups()
        logs.append(Path(folder, f"{number}.jsonl"))
        logs[-1].unlink(missing_ok=True)
        words = ["env", *shlex.split(variables), sys.executable, *shlex.split(words)]
        words += ["--log", logs[-1]]
        processes.append(subprocess.Popen(words, stdout=subprocess.DEVNULL, cwd=ROOT))
    if any([process.wait() for process in processes]):
        sys.exit(f"failed: {side}")
    texts = [log.read_text().splitlines() for log in logs]
    return [[row for row in map(json.loads, text) if row["rank"] == 0][-1] for text in texts]


def ratio(options):
    """Compare the samples/s of commands."""
    found = {side: [] for side in options.sides}  # of each round, the rows of the side's commands
    with tempfile.TemporaryDirectory() as folder:
        for _, side in itertools.product(range(options.rounds), options.sides):
            found[side].append(run_side(side, folder))
    rates = {}
    names = ["side", "samples/s", "to the first", *options.columns]
    print("|", " | ".join(names), "|")
    print("|" + " --- |" * len(names))
    for side in options.sides:
        rates[side] = [sum(row["samples/s"] for row in rows) for rows in found[side]]
        ratios = [rate / first for rate, first in zip(rates[side], rates[options.sides[0]])]
        cells = [side, f"{statistics.median(rates[side]):.1f}"]
        cells.append(f"{statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})")
        for name in options.columns:
            value = statistics.median(rows[0].get(name, math.nan) for rows in found[side])
            cells.append(f"{value:.4g}")
        print("|", " | ".join(cells), "|")


def nanogpt(options):
    """train.py of karpathy/nanoGPT in the setting that its README gives for a CPU."""
    words = "train.py config/train_shakespeare_char.py --device=cpu --eval_iters=1 "
    words += "--log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 "
    words += "--dropout=0.0 --lr_decay_iters=2000 --eval_interval=100000 --dtype=float32 "
    words += f"--compile={options.compile} --max_iters={options.max_steps} "
    words += f"--out_dir={tempfile.gettempdir()}"
    told = subprocess.check_output([sys.executable, *words.split()], cwd=options.folder, text=True)
    times = [float(found) for found in re.findall(r"iter \d+: .* time ([\d.]+)ms", told)]
    later = times[min(20, len(times) // 2) :]
    row = {"rank": 0, "samples/s": 12 * 1000 / statistics.mean(later)}
    Path(options.log).write_text(json.dumps(row) + "\n")


def on_links(options):
    """Held against training on slow links: what predict.py says."""
    import prediction  # here, as the other commands need no torch

    getattr(prediction, options.command)(options)


def main():
    wide = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=wide)
    commands = parser.add_subparsers(dest="command", required=True)
    add = {}
    runs = {"ratio": ratio, "nanogpt": nanogpt, "predict": on_links, "changes": on_links}
    for name, run in runs.items():
        words = commands.add_parser(name, help=run.__doc__)
        words.set_defaults(run=run)
        add[name] = words.add_argument
    add["ratio"]("sides", nargs="+")
    add["ratio"]("--rounds", type=int, default=5)
    add["ratio"]("--columns", nargs="+", default=[], help="further columns of the logs")
    add["nanogpt"]("--log", required=True)
    add["nanogpt"]("--folder", default="nanoGPT")
    add["nanogpt"]("--max_steps", type=int, default=300)
    add["nanogpt"]("--compile", action="store_true")
    add["predict"]("--nodes", type=int, nargs="+", default=[2, 4, 8])
    add["predict"]("--mbit", type=int, nargs="+", default=[100, 400, 1000], help="of each link")
    add["predict"]("--models", nargs="+", help='as "images, mlp"; all by default')
    add["predict"]("--grad_accum_steps", type=int, nargs="+", default=[1], help="micro-batches")
    four = ["text, small", "text, large", "images, cnn", "gpt, 10 M"]
    two = ["--comm_hook bf16", "twice the batch"]
    add["changes"]("--nodes", type=int, nargs="+", default=[4])
    add["changes"]("--mbit", type=int, nargs="+", default=[100, 400], help="of each link")
    add["changes"]("--models", nargs="+", default=four)
    add["changes"]("--changes", nargs="+", default=two, help="of those that predict.py tells")
    for name in ("predict", "changes"):
        add[name]("--max_bytes", type=int, default=1 << 25, help="of what measures a link")
        add[name]("--seconds", type=float, default=4, help="of a training, about")
        add[name]("--logs", metavar="FOLDER", help="keep the logs and the links there")
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
