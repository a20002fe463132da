"""Train a convolutional autoencoder on one GPU, or on the CPU of a machine that has none.

    python singlegpu/autoencoder.py                                 # synthetic images: no download
    python singlegpu/autoencoder.py --dataset mnist --epochs 3 --reconstructions mnist.png
    python singlegpu/autoencoder.py --precision bf16 --snapshot auto.pt  # run it again: it resumes
    sbatch slurm/singlegpu_autoencoder.slurm --dataset mnist --epochs 3

`diff singlegpu/autoencoder.py multigpu/autoencoder.py` shows what all GPUs of a node add,
multinode/autoencoder.py is for many nodes.
To train on your own images, replace read_pixels and create_model.
Shapes: N images of a split, B of a batch, C channels, H height, W width.
"""

import argparse
import json
import math
import os
import re
import signal
import statistics
import sys
import textwrap
import time

import numpy as np
import torch
from torch import nn
from torchvision import datasets
from torchvision.utils import save_image
from tqdm import tqdm

# ============================ Yours: flags, data, model, loss. Replace. ===========================

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

SHOWN = "epoch train_loss val_loss seconds samples/s".split()
SAME_ON_RESUME = ("dataset", "batch_size", "learning_rate", "precision", "seed")


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add(
        "--dataset",
        choices=("synthetic", "mnist", "cifar10"),
        default="synthetic",
        help="images to train on",
    )
    add("--data_dir", default="data", help="folder of the data; mnist and cifar10 are downloaded")
    add("--epochs", type=int, default=2, help="passes over the training images")
    add("--max_steps", type=int, default=0, help="end each epoch after so many steps; 0: no limit")
    add("--batch_size", type=int, default=64, help="global batch: images per optimizer step")
    add("--grad_accum_steps", type=int, default=1, help="micro-batches of a batch, to save memory")
    add("--learning_rate", type=float, default=1e-3, help="learning rate of AdamW")
    add("--precision", choices=DTYPES, default="fp32", help="number type; on GPUs fp32 means TF32")
    add("--compile", action="store_true", help="use torch.compile, which slows the first epoch")
    add("--seed", type=int, default=1, help="seed of weights and data order")
    add("--snapshot", metavar="FILE", help="save each epoch and when stopped; resume if it exists")
    add("--snapshot_every", type=int, default=0, help="also save every so many steps; 0: do not")
    add("--log", metavar="FILE.jsonl", help="append a row per epoch and process, for report.py")
    add("--reconstructions", metavar="FILE.png", help="draw 16 images above their reconstructions")
    args = parser.parse_args()
    if min(args.batch_size, args.grad_accum_steps) < 1 or args.batch_size % args.grad_accum_steps:
        parser.error("--batch_size must be a multiple of --grad_accum_steps")
    for path in filter(None, (args.snapshot, args.log, args.reconstructions)):
        if not os.path.isdir(os.path.dirname(path) or "."):
            parser.error(f"there is no folder for {path}")
    return args


def synthetic_images(num_images):
    """Returns ten smooth random patterns, one for each class, under noise, and their labels."""
    patterns = torch.rand(10, 1, 7, 7, generator=torch.Generator().manual_seed(0))
    patterns = nn.functional.interpolate(patterns, size=28, mode="bilinear")  # (K, C, H, W)
    generator = torch.Generator().manual_seed(num_images)
    labels = torch.randint(10, (num_images,), generator=generator)
    noise = torch.randint(176, (num_images, 1, 28, 28), dtype=torch.uint8, generator=generator)
    images = (80 * patterns[labels]).byte() + noise
    return images.numpy(), labels.numpy()


def read_pixels(args, split):
    """Returns the images (N, C, H, W) uint8 of a split, "train" or "test"."""
    if args.dataset == "synthetic":
        return torch.tensor(synthetic_images(60_000 if split == "train" else 10_000)[0])
    dataset = datasets.MNIST if args.dataset == "mnist" else datasets.CIFAR10
    try:
        source = dataset(args.data_dir, train=split == "train", download=True)
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"cannot read {args.dataset} in {args.data_dir}: {error}")
    images = np.asarray(source.data)
    return torch.tensor(images.transpose(0, 3, 1, 2) if images.ndim == 4 else images[:, None])


def batches(images, args, epoch, steps):
    """Yields these steps' batches, as tuples of micro-batches (B, C, H, W), in random order."""
    order = np.random.default_rng((args.seed, epoch)).permutation(len(images))
    order = torch.from_numpy(order).to(images.device)
    for step in steps:
        start, end = step * args.batch_size, (step + 1) * args.batch_size
        yield images[order[start:end]].chunk(args.grad_accum_steps)


def create_model(channels):
    """Returns a network from images (B, C, H, W) to their reconstructions (B, C, H, W)."""
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 2 * channels, 3, padding=1),  # the code (B, 2 C, H / 4, W / 4)
        nn.Conv2d(2 * channels, 64, 3, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(32, channels, 4, stride=2, padding=1),
    )


def reconstruction_loss(model, images, args):
    """Returns the mean squared error of pixels in 0..1, and the sums (2,) of losses and images."""
    images = images.float() / 255
    with torch.autocast(images.device.type, DTYPES[args.precision], args.precision != "fp32"):
        loss = nn.functional.mse_loss(model(images), images)
    count = torch.full_like(loss, len(images))
    return loss, torch.stack((loss.detach() * count, count)).double()


# ==== Where the time goes. Without it, delete this part, each line with watch and the summary. ====

PHASES = ("data", "forward", "backward", "comm", "optimizer", "eval", "save")


class Stopwatch:
    """Times phases. mark() ends a phase, which began at the mark before."""

    def __init__(self, device):
        self.cuda = device.type == "cuda"
        self.seconds = dict.fromkeys((*PHASES, "comm_total"), 0.0)
        self.marks = []
        self.last = self.now()

    def now(self):
        if self.cuda:
            return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))
        return time.perf_counter()

    def between(self, start, end):
        return start.elapsed_time(end) / 1000 if self.cuda else end - start

    def mark(self, phase):
        self.marks.append((phase, self.now()))

    def flush(self):
        """Adds the marked phases to self.seconds. Waits for the GPU."""
        if self.cuda:
            torch.cuda.synchronize()
        for phase, moment in self.marks:
            self.seconds[phase] += self.between(self.last, moment)
            self.last = moment
        self.marks.clear()

    def take(self, num_samples):
        """Returns the seconds of an epoch, its speed and its memory, and starts again from 0."""
        row = self.seconds | {"seconds": sum(self.seconds[phase] for phase in PHASES)}
        training = row["seconds"] - row["eval"] - row["save"]
        row["samples/s"] = num_samples / max(training, 1e-9)
        row["peak_MB"] = peak_bytes() / 1e6
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        return row


def peak_bytes():
    """Returns the most memory that this process has held: on its GPU, or else in RAM."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if not os.path.exists("/proc/self/status"):  # only Linux tells
        return math.nan
    with open("/proc/self/status") as file:
        return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", file.read())[1])


def mean(rows, name):
    """Returns the mean over processes and epochs. The first of several epochs does not count."""
    later = [row[name] for row in rows if row["epoch"] > rows[0]["epoch"]]
    return statistics.mean(later or [row[name] for row in rows])


def print_breakdown(rows):
    """Prints where an epoch's time goes."""
    seconds = mean(rows, "seconds")
    print(f"\nwhere an epoch's {seconds:.2f} s go (mean over processes and later epochs)")
    for phase in PHASES:
        share = mean(rows, phase) / seconds
        print(f"{phase:9} {mean(rows, phase):8.3f} {share:4.0%}  {'#' * round(50 * share)}")


def print_row(rows, metric):
    """Prints the peak memory of a process, and a row for results.md."""
    peak = max(row["peak_MB"] for row in rows)
    print(f"peak memory {peak:,.0f} MB\n")
    names = ("script", "model", "dataset", "precision", "processes", "batch_size")
    cells = {name: str(rows[-1][name]) for name in names}
    cells[metric] = cell(rows[-1][metric])
    for name in ("seconds", "samples/s", *PHASES, "comm_total"):
        cells[name] = cell(mean(rows, name))
    cells["peak_MB"] = cell(peak)
    for line in (cells.keys(), ["---"] * len(cells), cells.values()):
        print("|", " | ".join(line), "|")


# ============================================= The run. ===========================================

SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)  # each asks the run to save and stop
STOP_REQUESTS = []  # the signals that this process has received
CHECK_SECONDS = 2  # between two looks at the losses and at stop requests
BAR = {"leave": False}  # on a terminal
if not sys.stderr.isatty():  # in a file, a line a minute
    BAR = {"delay": 60, "mininterval": 60, "miniters": 1}
    BAR["bar_format"] = "{desc}, step {n_fmt} of {total_fmt}: {rate_fmt}{postfix}\n"


def find_device(local_rank):
    """Returns the GPU of this process, or the CPU if the machine has no GPU."""
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            sys.exit(f"{torch.cuda.device_count()} GPUs are too few for the processes of this node")
        return torch.device("cuda", local_rank)
    if os.path.exists("/dev/nvidia0") and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        sys.exit(
            f"PyTorch {torch.__version__} cannot use the GPUs of this machine: it is built without "
            "CUDA, or the driver is too old. To use the CPU, set CUDA_VISIBLE_DEVICES to nothing"
        )
    return torch.device("cpu")


def catch_signals():
    """From now on a signal is a request to stop, which the run notices at its next check."""
    for signum in SIGNALS:
        signal.signal(signum, lambda number, frame: STOP_REQUESTS.append(number))


def save_snapshot(args, parts, progress):
    """Writes a temporary file and renames it: a snapshot is never half written."""
    if args.snapshot:
        snapshot = {name: part.state_dict() for name, part in parts.items()}
        snapshot["settings"] = {name: getattr(args, name) for name in SAME_ON_RESUME}
        torch.save(snapshot | {"progress": progress}, args.snapshot + ".tmp")
        os.replace(args.snapshot + ".tmp", args.snapshot)


def load_snapshot(args, parts):
    """Restores `parts` from the snapshot, if there is one. Returns the progress of the run."""
    if not args.snapshot or not os.path.exists(args.snapshot):
        return {"run": f"{time.time_ns():x}", "epoch": 0, "step": 0, "sums": 0.0}
    try:
        snapshot = torch.load(args.snapshot, map_location="cpu", weights_only=True)
        if snapshot["settings"] != {name: getattr(args, name) for name in SAME_ON_RESUME}:
            raise ValueError(f"it was made with {snapshot['settings']}")
        for name, part in parts.items():
            part.load_state_dict(snapshot[name])
        return snapshot["progress"]
    except Exception as error:  # a damaged or foreign file can fail anywhere
        sys.exit(f"cannot resume from {args.snapshot}: {error!r}")


@torch.no_grad()
def evaluate(batch_loss, model, loader, args):
    """Returns the sums that batch_loss gives, added up over all batches."""
    model.eval()
    return sum(batch_loss(model, *batch, args)[1] for batch in loader)


def autoencoder_row(settings, progress, val_sums):
    """Returns settings and losses of an epoch, for the log."""
    train_loss, train_count = progress["sums"]
    val_loss, val_count = val_sums.tolist()
    row = settings | {"run": progress["run"], "epoch": progress["epoch"]}
    row |= {"train_loss": train_loss / train_count, "val_loss": val_loss / val_count}
    return row


def cell(value):
    """Returns the number with five significant digits; without decimals if whole or large."""
    has_decimals = isinstance(value, float) and abs(value) < 1000
    return f"{value:#.5g}" if has_decimals else f"{value:,.0f}"


@torch.no_grad()
def save_reconstructions(model, images, path):
    """Writes a picture of images (B, C, H, W) above their reconstructions."""
    model.eval()
    images = images.float() / 255
    save_image(torch.cat((images, model(images))), path, nrow=len(images))


def main(args):
    device = find_device(0)
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # on GPUs, fp32 layers compute in TF32
    torch.backends.cudnn.benchmark = True
    train_images = read_pixels(args, "train").to(device)
    val_images = read_pixels(args, "test").to(device)
    val_batches = [(images,) for images in val_images.split(128)]
    num_steps = len(train_images) // args.batch_size
    if num_steps == 0:
        sys.exit(f"--batch_size {args.batch_size} is larger than the training split")
    if args.max_steps > 0:
        num_steps = min(num_steps, args.max_steps)

    torch.manual_seed(args.seed)
    model = create_model(train_images.shape[1]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    progress = load_snapshot(args, parts)
    watch = Stopwatch(device)
    if args.compile:
        model.compile()

    settings = vars(args) | {
        "model": "conv",
        "script": "singlegpu/autoencoder.py",
        "processes": 1,
        "nodes": 1,
        "rank": 0,
        "host": os.uname().nodename,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "threads": torch.get_num_threads(),
        "comm_hook": "none",
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    facts = ", ".join(f"{name} {value}" for name, value in settings.items())
    print(textwrap.fill(facts, 100))
    print(f"starting at epoch {progress['epoch']}, step {progress['step']}:")
    print(*(f"{name:>10}" for name in SHOWN))
    rows = []
    while progress["epoch"] < args.epochs:
        epoch = progress["epoch"]
        first_step = progress["step"]
        steps = range(first_step, num_steps)
        next_check = 0.0
        loader = batches(train_images, args, epoch, steps)
        sums = torch.tensor(progress["sums"], dtype=torch.float64, device=device)
        bar = tqdm(loader, f"epoch {epoch}", num_steps, initial=first_step, **BAR)
        model.train()
        for micro_batches in bar:
            watch.mark("data")
            for images in micro_batches:
                loss, loss_sums = reconstruction_loss(model, images, args)
                sums = sums + loss_sums
                watch.mark("forward")
                scaler.scale(loss / args.grad_accum_steps).backward()
                watch.mark("backward")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            watch.mark("optimizer")

            progress["step"] += 1
            save = progress["step"] == num_steps  # after the last step, before the validation
            if args.snapshot_every and progress["step"] % args.snapshot_every == 0:
                save = True
            stop = len(STOP_REQUESTS) > 0
            if save or stop or time.perf_counter() > next_check:
                progress["sums"] = sums.tolist()
                watch.flush()
                if not all(map(math.isfinite, progress["sums"])):
                    sys.exit(f"the loss is not finite in epoch {epoch}, step {progress['step']}")
                if save or stop:
                    save_snapshot(args, parts, progress)
                    watch.mark("save")
                if stop:
                    sys.exit(128 + STOP_REQUESTS[0])
                catch_signals()  # before the first step a signal just ends the run
                next_check = time.perf_counter() + CHECK_SECONDS
                loss_sum, count = progress["sums"]
                bar.set_postfix(train_loss=loss_sum / count, refresh=False)

        val_sums = evaluate(reconstruction_loss, model, val_batches, args)
        watch.mark("eval")
        watch.flush()
        row = autoencoder_row(settings, progress, val_sums)
        row |= watch.take(len(steps) * args.batch_size)
        rows.append(row)
        progress |= {"epoch": epoch + 1, "step": 0, "sums": 0.0}
        print(*(f"{cell(row.get(name, math.nan)):>10}" for name in SHOWN))
        if args.log:
            with open(args.log, "a") as file:
                file.write(json.dumps(row) + "\n")
    save_snapshot(args, parts, progress)  # complete
    if rows:  # the summary
        print_breakdown(rows)
        print_row(rows, "val_loss")
    if args.reconstructions:
        save_reconstructions(model, val_images[:16], args.reconstructions)


if __name__ == "__main__":
    main(parse_args())
