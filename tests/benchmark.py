"""Speed of the scripts beside what they replace. It is no test, since times vary.

    python tests/benchmark.py ratio "OLD/singlegpu/images.py WORDS" "singlegpu/images.py WORDS"
    python tests/benchmark.py bigmnist --folder FOLDER  # reads a file that it writes there
    python tests/benchmark.py predict --nodes 2 4 8     # speedup on slow links; as root, on Linux
    python tests/benchmark.py changes                   # what would help there, and what does
    python tests/benchmark.py steps "singlegpu/gpt.py --dataset TEXT" --loss 2 --batch_sizes 4 16 64

They measure in rounds, in which the sides take turns, and print medians. OLD is a checkout of an
earlier version. `ratio` compares the samples/s of the logs. A side is a command without `python`,
or several that run at the same time, joined by " & "; variables may stand before it:

    ratio "MALLOC_TOP_PAD_=268435456 singlegpu/images.py" "singlegpu/images.py"
    ratio "singlegpu/gpt.py --batch_size 8 & singlegpu/gpt.py --batch_size 8" \\
        "multigpu/gpt.py --num_gpus 2 --batch_size 16" --columns forward backward comm

Two commands of others write such a log, too, and so can be a side: the example of pytorch/examples
with the network and the batches of images.py, and train.py of karpathy/nanoGPT in its CPU setting.

    ratio "tests/benchmark.py classic --data_dir DATA" \\
        "singlegpu/images.py --dataset mnist --data_dir DATA"
    ratio "tests/benchmark.py nanogpt --folder NANOGPT" \\
        "singlegpu/gpt.py --dataset TEXT --vocab_size 128 --seq_len 64 --d_model 128 --n_heads 4 \\
        --num_layers 4 --batch_size 12"
"""

import argparse
import contextlib
import importlib.util
import itertools
import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests/helpers"))


def module(script):
    """Returns a script as a module."""
    spec = importlib.util.spec_from_file_location("script", ROOT / script)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def run_at_once(commands):
    """Runs commands, lists of words, at the same time. Variables may stand before a command."""
    quiet = {"stdout": subprocess.DEVNULL, "cwd": ROOT}
    processes = [subprocess.Popen(["env", *map(str, words)], **quiet) for words in commands]
    if any([process.wait() for process in processes]):
        sys.exit(f"failed: {commands}")


def run_side(side, folder):
    """Runs the commands of a side. Returns the last row of rank 0 of each log."""
    commands = []
    logs = []
    for number, command in enumerate(side.split(" & ")):
        variables, words = re.fullmatch(r"((?:[A-Z_]+=\S* )*)(.*)", command.strip()).groups()
        logs.append(Path(folder, f"{number}.jsonl"))
        logs[-1].unlink(missing_ok=True)
        words = [sys.executable, *shlex.split(words), "--log", logs[-1]]
        commands.append([*shlex.split(variables), *words])
    run_at_once(commands)
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


def write_log(path, samples_per_second):
    """Writes what `ratio` reads."""
    Path(path).write_text(json.dumps({"rank": 0, "samples/s": samples_per_second}) + "\n")


def classic(options):
    """The MNIST example of pytorch/examples, with AdamW: a DataLoader of transformed images."""
    import torch  # here, as the other commands do not need it
    from torchvision import datasets, transforms

    steps = [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
    data = datasets.MNIST(options.data_dir, train=True, transform=transforms.Compose(steps))
    loader = torch.utils.data.DataLoader(data, batch_size=options.batch_size, shuffle=True)
    images = module("singlegpu/images.py")
    args = argparse.Namespace(**vars(options), dataset="mnist", dropout=0.0, pretrained=False)
    model = images.create_model(args, images.read_data(args)[0])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    for _ in range(2):  # the second epoch counts
        start = time.perf_counter()
        num_samples = 0
        for x, y in itertools.islice(loader, options.max_steps or None):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            num_samples += len(x)
        rate = num_samples / (time.perf_counter() - start)
    write_log(options.log, rate)


def nanogpt(options):
    """train.py of karpathy/nanoGPT in the setting that its README gives for a CPU."""
    words = "train.py config/train_shakespeare_char.py --device=cpu --eval_iters=1 "
    words += "--log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 "
    words += "--dropout=0.0 --lr_decay_iters=2000 --eval_interval=100000 --dtype=float32 "
    words += f"--compile={options.compile} --max_iters={options.max_steps or 300} "
    words += f"--out_dir={tempfile.gettempdir()}"
    told = subprocess.check_output([sys.executable, *words.split()], cwd=options.folder, text=True)
    times = [float(found) for found in re.findall(r"iter \d+: .* time ([\d.]+)ms", told)]
    later = times[min(20, len(times) // 2) :]
    write_log(options.log, 12 * 1000 / statistics.mean(later))


def write_images(folder, num_images, shape):
    """Writes a data set for images.py: random images, and 64 more to validate on."""
    generator = np.random.default_rng(0)
    for split, count in (("train", num_images), ("test", 64)):
        path = f"{folder}/{split}_images.npy"
        images = np.lib.format.open_memmap(path, "w+", np.uint8, (count, *shape))
        for start in range(0, count, 1000):
            part = images[start : start + 1000]
            part[:] = generator.integers(256, size=part.shape, dtype=np.uint8)
        np.save(f"{folder}/{split}_labels.npy", (np.arange(count) % 10).astype(np.uint8))


def forget(path):
    """Takes a file out of the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bigmnist(options):
    """Images/s from a file that is not in the page cache: in blocks, by workers, at random."""
    images = module("singlegpu/images.py")
    in_blocks = images.training_order
    ways = {"blocks": (in_blocks, 0), "blocks, 2 workers": (in_blocks, 2)}
    ways["random"] = (lambda data, args, epoch: np.random.permutation(len(data)), 0)
    shape = (28, 28) if options.image_size == 28 else (3, options.image_size, options.image_size)
    for gigabytes in options.gigabytes:
        rates = {way: [] for way in ways}
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            write_images(folder, max(64, int(gigabytes * 1e9 / math.prod(shape))), shape)
            for _, way in itertools.product(range(options.rounds), ways):
                forget(f"{folder}/train_images.npy")
                images.training_order, num_workers = ways[way]
                settings = {"seed": 1, "batch_size": 64, "grad_accum_steps": 1}
                settings |= {"num_workers": num_workers, "dataset": folder, "data_dir": ""}
                args = argparse.Namespace(**settings)
                with contextlib.redirect_stdout(None):
                    data, _ = images.read_data(args)  # this maps the file anew, without its pages
                requests = images.training_requests(data, 0, args)
                start = time.perf_counter()
                for count, _ in enumerate(images.load_batches(data, requests, "cpu", args), 1):
                    seconds = time.perf_counter() - start
                    if seconds > options.seconds or count == len(data) // 64:
                        break
                rates[way].append(count * 64 / seconds)
                del data
        told = [f"{way} {statistics.median(rates[way]):,.0f} images/s" for way in ways]
        print(f"{gigabytes:g} GB of {'x'.join(map(str, shape))}: {', '.join(told)}")


def predict(options):
    """Speedup of many nodes: as predict.py says it beforehand, and as it is."""
    import prediction  # here, as the other commands need no torch

    prediction.predict(options)


def changes(options):
    """What would help on four nodes: as predict.py says it beforehand, and as it is."""
    import prediction

    prediction.changes(options)


def steps_until(script, args, data, val_batch, batch_size, learning_rate, options):
    """Returns after how many steps the validation loss is as low as wanted, or infinity."""
    import torch

    torch.manual_seed(args.seed)
    args.learning_rate = learning_rate
    model = script.create_model(args, data)
    optimizer = script.create_optimizer(model, args)
    generator = np.random.default_rng(args.seed)
    batches = script.Batches(data)
    losses = [math.inf]  # after 0, every, 2 x every, ... steps
    for step in range(1, options.max_steps + 1):
        batch = batches[(args.seed, step), generator.integers(len(data), size=batch_size).tolist()]
        loss, _ = script.batch_loss(model, batch, args)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        if step % options.every == 0:
            with torch.no_grad():
                losses.append(script.batch_loss(model, val_batch, args)[0].item())
            if losses[-1] <= options.loss:
                share = (losses[-2] - options.loss) / (losses[-2] - losses[-1])  # of the last steps
                return step - options.every * (1 - (share if math.isfinite(share) else 1))
    return math.inf


def steps(options):
    """Steps to a loss by batch, each with the best of some constant learning rates."""
    script_path, *words = shlex.split(options.script)
    script = module(script_path)
    sys.argv = [script_path, *words]
    args = script.parse_args()
    data, val_data = script.read_data(args)
    val_batch = script.Batches(val_data)[(0,), list(range(min(len(val_data), 1000)))]
    print("| batch | learning rate | steps | samples |")
    print("|" + " --- |" * 4, flush=True)
    for size in options.batch_sizes:
        found = []
        for rate in options.learning_rates:
            count = steps_until(script, args, data, val_batch, size, rate, options)
            found.append((count, rate))
        count, rate = min(found)
        print(f"| {size} | {rate:g} | {count:.0f} | {size * count:,.0f} |", flush=True)


def main():
    wide = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=wide)
    commands = parser.add_subparsers(dest="command", required=True)
    add = {}
    for command in (ratio, bigmnist, predict, changes, steps, classic, nanogpt):
        words = commands.add_parser(command.__name__, help=command.__doc__.splitlines()[0])
        words.set_defaults(run=command)
        add[command.__name__] = words.add_argument
    for name in ("ratio", "bigmnist"):
        add[name]("--rounds", type=int, default=5)
    add["steps"]("script", help="with its flags, such as 'singlegpu/gpt.py --dataset input.txt'")
    add["steps"]("--loss", type=float, required=True, help="validation loss to reach")
    add["steps"]("--batch_sizes", type=int, nargs="+", required=True)
    add["steps"]("--learning_rates", type=float, nargs="+", default=[3e-4, 1e-3, 3e-3])
    add["steps"]("--every", type=int, default=10, help="steps between two validations")
    add["steps"]("--max_steps", type=int, default=3000, help="where it gives up")
    for name in ("predict", "changes", "classic", "nanogpt"):
        add[name]("--max_steps", type=int, default=0, help="0: as many as the command takes")
    for name in ("classic", "nanogpt"):
        add[name]("--log", required=True)
    add["classic"]("--data_dir", type=os.path.abspath, default="data")
    add["ratio"]("sides", nargs="+")
    add["ratio"]("--columns", nargs="+", default=[], help="further columns of the logs")
    add["bigmnist"]("--folder", required=True, help="where the file is written, and removed")
    add["bigmnist"]("--gigabytes", type=float, nargs="+", default=[0.6, 10], help="of the file")
    add["bigmnist"]("--image_size", type=int, default=28, help="28: as bigmnist; 224: in 3 colours")
    add["bigmnist"]("--seconds", type=float, default=20, help="of each measurement, at most")
    add["predict"]("--nodes", type=int, nargs="+", default=[2, 4, 8])
    add["predict"]("--mbit", type=int, nargs="+", default=[100, 400, 1000], help="of each link")
    add["predict"]("--models", nargs="+", help='as "images, mlp"; all by default')
    add["predict"]("--faults", action="store_true", help="also a late node, a slow link, and more")
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
    add["classic"]("--model", default="cnn")
    add["classic"]("--batch_size", type=int, default=64)
    add["nanogpt"]("--folder", default="nanoGPT")
    add["nanogpt"]("--compile", action="store_true")
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
