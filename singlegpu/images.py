"""Train an image classifier on one GPU, or on the CPU of a machine that has none.

    python singlegpu/images.py                                     # synthetic images: no download
    python singlegpu/images.py --model mlp --dataset mnist --epochs 10
    python singlegpu/images.py --precision bf16 --snapshot cnn.pt  # run it again, and it resumes
    sbatch slurm/singlegpu_images.slurm --model vgg11 --learning_rate 1e-4

`diff singlegpu/images.py multigpu/images.py` shows what distribution adds.
To train on your own images, replace read_images and create_model.
Shapes: N images of a split, B of a batch, C channels, H height, W width, K classes.
"""

import argparse
import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import nn
from torchvision import datasets, models
from tqdm import tqdm

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PHASES = ("data", "forward", "backward", "comm", "optimizer", "eval", "save")
SAME_ON_RESUME = ("model", "dataset", "batch_size", "learning_rate", "dropout", "precision", "seed")
LOGGED = (*SAME_ON_RESUME, "grad_accum_steps", "compile", "epochs", "max_steps")
SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)  # each asks the run to save and stop
ARRIVED = []  # the signals that this process has received
BLOCK = 4096  # images that lie next to each other in the file, and are read together
WINDOW = 16 * BLOCK  # images that are shuffled together, on the device


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model", choices=("cnn", "mlp", "vgg11"), default="cnn", help="network to train")
    add(
        "--dataset",
        choices=("synthetic", "mnist", "cifar10", "bigmnist"),
        default="synthetic",
        help="images to train on; make_bigmnist.py writes bigmnist",
    )
    add("--data_dir", default="data", help="folder of the data; mnist and cifar10 are downloaded")
    add("--epochs", type=int, default=2, help="passes over the training images")
    add("--max_steps", type=int, default=0, help="end each epoch after so many steps; 0: no limit")
    add("--batch_size", type=int, default=64, help="global batch: images per optimizer step")
    add("--grad_accum_steps", type=int, default=1, help="micro-batches of a batch, to save memory")
    add("--learning_rate", type=float, default=1e-3, help="learning rate of AdamW")
    add("--dropout", type=float, default=0.0, help="dropout probability in the classifier")
    add("--precision", choices=DTYPES, default="fp32", help="number type of the forward pass")
    add("--compile", action="store_true", help="use torch.compile, which slows the first epoch")
    add("--seed", type=int, default=1, help="seed of weights, data order and dropout")
    add("--snapshot", metavar="FILE", help="save each epoch and when stopped; resume if it exists")
    add("--snapshot_every", type=int, default=0, help="also save every so many steps; 0: do not")
    add("--log", metavar="FILE.jsonl", help="append a row per epoch and process, for report.py")
    args = parser.parse_args()
    if min(args.batch_size, args.grad_accum_steps) < 1 or args.batch_size % args.grad_accum_steps:
        parser.error("--batch_size must be a multiple of --grad_accum_steps")
    return args


def synthetic_images(num_images):
    """Ten smooth random patterns, one for each class, under noise."""
    patterns = torch.rand(10, 1, 7, 7, generator=torch.Generator().manual_seed(0))
    patterns = nn.functional.interpolate(patterns, size=28, mode="bilinear")  # (K, C, H, W)
    generator = torch.Generator().manual_seed(num_images)
    labels = torch.randint(10, (num_images,), generator=generator)
    noise = torch.randint(176, (num_images, 1, 28, 28), dtype=torch.uint8, generator=generator)
    return ((80 * patterns[labels]).byte() + noise).numpy(), labels.numpy()


def read_images(args, split):
    """Returns images (N, C, H, W) uint8 and labels (N,) of a split, "train" or "test"."""
    if args.dataset == "synthetic":
        return synthetic_images(60_000 if split == "train" else 10_000)
    try:
        if args.dataset == "bigmnist":  # mapped, not read: it may be larger than memory
            path = os.path.join(args.data_dir, "bigmnist", split)
            images, labels = (np.load(f"{path}_{name}.npy", "r") for name in ("images", "labels"))
        else:
            dataset = datasets.MNIST if args.dataset == "mnist" else datasets.CIFAR10
            source = dataset(args.data_dir, train=split == "train", download=True)
            images, labels = np.asarray(source.data), np.asarray(source.targets)
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"cannot read {args.dataset} in {args.data_dir}: {error}")
    return np.moveaxis(images, 3, 1) if images.ndim > 3 else images.reshape(-1, 1, 28, 28), labels


def batches(split, args, epoch, steps, device):
    """Yields a list of micro-batches for each step: images (B, C, H, W) uint8, labels (B,).

    Blocks of neighbouring images come in random order. A thread reads a window of up to 16 blocks,
    copies it to the device and shuffles it there, while the model trains on the one before.
    """
    num_images, size = len(split[1]), args.batch_size
    window_size = max(1, WINDOW // size) * size
    blocks = np.random.default_rng((args.seed, epoch)).permutation(num_images // BLOCK)
    blocks = np.append(blocks, num_images // BLOCK)  # the last, short block stays the last

    def read(window):
        places = np.arange(window * window_size, min((window + 1) * window_size, num_images))
        rows = blocks[places // BLOCK] * BLOCK + places % BLOCK  # of the files
        order = np.random.default_rng((args.seed, epoch, window)).permutation(len(rows))
        return [torch.from_numpy(array[rows]).to(device)[order] for array in split]

    with ThreadPoolExecutor(max_workers=1) as thread:
        next_window = thread.submit(read, steps.start * size // window_size)
        for step in steps:
            window, start = divmod(step * size, window_size)
            if start == 0 or step == steps.start:
                tensors = next_window.result()
                next_window = thread.submit(read, window + 1)
            batch = [
                tensor[start : start + size].chunk(args.grad_accum_steps) for tensor in tensors
            ]
            yield list(zip(*batch))


def create_model(args, channels, size):
    """Returns a network from images (B, channels, size, size) to logits (B, K)."""
    dropout = nn.Dropout(args.dropout)
    if args.model == "mlp":
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(channels * size * size, 512),
            nn.ReLU(),
            dropout,
            nn.Linear(512, 512),
            nn.ReLU(),
            dropout,
            nn.Linear(512, 10),
        )
    if args.model == "cnn":  # the network of pytorch/examples/mnist
        return nn.Sequential(
            nn.Conv2d(channels, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            dropout,
            nn.Linear(64 * (size // 2 - 2) ** 2, 128),
            nn.ReLU(),
            dropout,
            nn.Linear(128, 10),
        )
    vgg11 = models.vgg11(num_classes=10, dropout=args.dropout)  # needs 3 channels, 32 x 32 pixels
    return nn.Sequential(nn.Conv2d(channels, 3, 1), nn.Upsample(32), vgg11)


class Stopwatch:
    """Times phases: a phase lasts from the mark before it to its own mark."""

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

    def mark(self, phase, at=None):
        self.marks.append((phase, at or self.now()))

    def read(self, phase):
        """Marks the phase, and adds all marks to self.seconds. Waits for the GPU."""
        self.mark(phase)
        if self.cuda:
            torch.cuda.synchronize()
        for phase, at in self.marks:
            self.seconds[phase] += self.between(self.last, at)
            self.last = at
        self.marks.clear()


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


def image_loss(model, images, labels, args):
    """Returns the mean loss, and the sums (3,) of losses, right answers and images."""
    with torch.autocast(images.device.type, DTYPES[args.precision], args.precision != "fp32"):
        logits = model(images.float() / 255)  # (B, K)
        loss = nn.functional.cross_entropy(logits, labels.long())
    count = torch.full_like(loss, len(labels))
    sums = torch.stack((loss.detach() * count, (logits.argmax(1) == labels).sum(), count))
    return loss, sums.double()


@torch.no_grad()
def evaluate(batch_loss, model, loader, args):
    """Returns the sums that batch_loss gives, added up over all batches."""
    model.eval()
    return sum(batch_loss(model, *batch, args)[1] for batch in loader)


def epoch_row(settings, progress, val_sums, seconds, num_samples):
    """Returns the row of the log for one epoch and process. Times are in seconds."""
    row = settings | {"run": progress["run"], "epoch": progress["epoch"]}
    for split, (loss, right, count) in ("train", progress["sums"]), ("val", val_sums.tolist()):
        row |= {f"{split}_loss": loss / count, f"{split}_acc": right / count}
    row |= seconds | {"seconds": sum(seconds[phase] for phase in PHASES)}
    row["samples/s"] = num_samples / max(1e-9, row["seconds"] - row["eval"] - row["save"])
    return row


def print_summary(rows, metric):
    """Prints where an epoch's time goes, and a row for results.md. Returns the row's numbers."""
    means = {metric: rows[-1][metric]}
    for name in ("seconds", "samples/s", *PHASES, "comm_total"):
        means[name] = sum(row[name] for row in rows) / len(rows)
    comm_total = means["comm_total"] or float("nan")  # nan: nothing was sent
    means["hidden"] = max(1 - means["comm"] / comm_total, 0.0)
    means["R"] = (means["forward"] + means["backward"] + means["optimizer"]) / comm_total
    print(f"\nwhere an epoch's {means['seconds']:.2f} s go (mean over processes and later epochs)")
    for phase in PHASES:
        share = means[phase] / means["seconds"]
        print(f"{phase:9} {means[phase]:8.3f} {share:4.0%}  {'#' * round(50 * share)}")
    names = ("script", "model", "dataset", "precision", "processes", "batch_size")
    cells = [str(rows[-1][name]) for name in names] + [f"{mean:.4f}" for mean in means.values()]
    for line in ((*names, *means), ["---"] * len(cells), cells):
        print("|", " | ".join(line), "|")
    return means


def main(args):
    for signum in SIGNALS:
        signal.signal(signum, lambda number, frame: ARRIVED.append(number))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # on GPUs, fp32 layers compute in TF32
    torch.backends.cudnn.benchmark = True
    train_split = read_images(args, "train")
    val_split = [torch.tensor(array).to(device) for array in read_images(args, "test")]
    val_batches = list(zip(*(tensor.split(128) for tensor in val_split)))
    num_steps = min(len(train_split[1]) // args.batch_size, args.max_steps or sys.maxsize)
    if num_steps == 0:
        sys.exit(f"--batch_size {args.batch_size} is larger than the training split")

    torch.manual_seed(args.seed)
    model = create_model(args, *train_split[0].shape[1:3]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    progress = load_snapshot(args, parts)
    if args.compile:
        model.compile()

    settings = {name: getattr(args, name) for name in LOGGED} | {
        "script": "singlegpu/images.py",
        "processes": 1,
        "nodes": 1,
        "rank": 0,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "comm_hook": "none",
        "buckets": [],
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    print(
        "{script}: {model}, {parameters:,} parameters; {dataset}, ".format_map(settings)
        + f"{len(train_split[1]):,} + {len(val_split[1]):,} images"
    )
    print(
        "processes {processes}, nodes {nodes}, {device}, threads {threads}; global batch "
        "{batch_size}; {precision}; torch {torch}".format_map(settings)
    )
    print("starting at epoch {epoch}, step {step}:".format_map(progress))
    print("epoch  train_loss  train_acc  val_loss  val_acc  seconds  samples/s")
    rows, watch = [], Stopwatch(device)
    while progress["epoch"] < args.epochs:
        epoch, first_step = progress["epoch"], progress["step"]
        loader = batches(train_split, args, epoch, range(first_step, num_steps), device)
        sums = torch.tensor(progress["sums"], dtype=torch.float64, device=device)
        model.train()
        for micro_batches in tqdm(
            loader, f"epoch {epoch}", num_steps, initial=first_step, leave=False, disable=None
        ):
            torch.manual_seed(hash((args.seed, epoch, progress["step"])))  # for dropout
            watch.mark("data")
            for images, labels in micro_batches:
                loss, loss_sums = image_loss(model, images, labels, args)
                sums = sums + loss_sums
                watch.mark("forward")
                scaler.scale(loss / args.grad_accum_steps).backward()
                watch.mark("backward")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            watch.mark("optimizer")

            progress["step"] += 1
            save = args.snapshot_every and progress["step"] % args.snapshot_every == 0
            if save or progress["step"] % 8 == 0 or progress["step"] == num_steps:
                progress["sums"] = sums.tolist()
                watch.read("optimizer")
                if not sums.isfinite().all():
                    sys.exit(f"the loss is not finite in epoch {epoch}, step {progress['step']}")
                if save or ARRIVED:
                    save_snapshot(args, parts, progress)
                    watch.mark("save")
                if ARRIVED:
                    sys.exit(128 + ARRIVED[0])

        val_sums = evaluate(image_loss, model, val_batches, args)
        watch.read("eval")
        num_samples = max(0, num_steps - first_step) * args.batch_size
        row = epoch_row(settings, progress, val_sums, watch.seconds, num_samples)
        rows.append(row)
        watch.seconds = dict.fromkeys(watch.seconds, 0.0)
        progress |= {"epoch": epoch + 1, "step": 0, "sums": 0.0}
        print(
            "{epoch:5}  {train_loss:10.4f}  {train_acc:9.4f}  {val_loss:8.4f}  {val_acc:7.4f}  "
            "{seconds:7.2f}  {samples/s:9.0f}".format_map(row)
        )
        if args.log:
            with open(args.log, "a") as file:
                file.write(json.dumps(row) + "\n")
        save_snapshot(args, parts, progress)
        watch.mark("save")
    if rows:
        print_summary(rows[1:] or rows, "val_acc")


if __name__ == "__main__":
    main(parse_args())
