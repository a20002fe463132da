"""Train an image classifier: a process splits its layers over GPUs, DDP averages the gradients.

    torchrun --standalone --nproc_per_node=2 -- hybrid/images.py --num_stages 2    # 4 GPUs, or CPUs
    sbatch --nodes=4 --gpus-per-node=4 slurm/hybrid_images.slurm --model vgg11

For a model that does not fit on one GPU. While one stage works, the GPUs of the others wait: what
fits on one GPU is faster with multinode/images.py, whose snapshots this script reads and writes.
Shapes: N images of a split, B of a batch, C channels, H height, W width, K classes.
"""

import argparse
import functools
import json
import math
import os
import re
import signal
import statistics
import sys
import textwrap
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from torchvision import datasets, models
from tqdm import tqdm

# ============================ Yours: flags, data, model, loss. Replace. ===========================

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
COMM_HOOKS = {
    "none": default_hooks.allreduce_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
}
SHOWN = "epoch train_loss train_acc val_loss val_acc seconds samples/s".split()
SAME_ON_RESUME = ("model", "dataset", "batch_size", "learning_rate", "dropout", "precision", "seed")
SUMS = ("loss", "acc", "count")  # of an epoch, as a snapshot names them


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--num_stages", type=int, choices=range(1, 9), default=2, help="GPUs that share a model")
    add("--model", choices=("cnn", "mlp", "vgg11", "resnet18"), default="cnn", help="network")
    add("--dataset", default="synthetic", help="or mnist, cifar10, a folder of .npy files")
    add("--data_dir", default="data", help="folder of the data; mnist and cifar10 are downloaded")
    add("--epochs", type=int, default=2, help="passes over the training images")
    add("--max_steps", type=int, default=0, help="end each epoch after so many steps; 0: no limit")
    add("--batch_size", type=int, default=64, help="global batch: images per optimizer step")
    add("--grad_accum_steps", type=int, default=1, help="micro-batches of a batch, to save memory")
    add("--learning_rate", type=float, default=1e-3, help="learning rate of AdamW")
    add("--dropout", type=float, default=0.0, help="dropout probability in the classifier")
    add("--precision", choices=DTYPES, default="fp32", help="number type; on GPUs fp32 means TF32")
    add("--comm_hook", choices=COMM_HOOKS, default="none", help="type in which gradients are sent")
    add("--compile", action="store_true", help="use torch.compile, which slows the first epoch")
    add("--seed", type=int, default=1, help="seed of weights, data order and dropout")
    add("--snapshot", metavar="FILE", help="save each epoch and when stopped; resume if it exists")
    add("--snapshot_every", type=int, default=0, help="also save every so many steps; 0: do not")
    add("--log", metavar="FILE.jsonl", help="append a row per epoch and process, for report.py")
    add("--timeout", type=int, default=600, help="seconds after which a hung process ends the run")
    args = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        parser.error(f"start it with: torchrun --standalone --nproc_per_node=2 -- {sys.argv[0]}")
    shares = args.grad_accum_steps * int(os.environ["WORLD_SIZE"])
    if min(args.batch_size, shares) < 1 or args.batch_size % shares:
        parser.error(f"--batch_size must be a multiple of {shares}: processes x --grad_accum_steps")
    for path in filter(None, (args.snapshot, args.log)):
        if not os.path.isdir(os.path.dirname(path) or "."):
            parser.error(f"there is no folder for {path}")
    return args


class Images(Dataset):
    """Images (N, C, H, W) uint8 and their labels (N,)."""

    def __init__(self, images, labels):
        self.images = images
        self.labels = labels

    def __len__(self):
        return len(self.labels)

    def __getitems__(self, indices):
        """Returns a whole batch: images (B, C, H, W) uint8 and labels (B,)."""
        labels = self.labels[indices].astype(np.int64)
        return torch.from_numpy(self.images[indices]), torch.from_numpy(labels)


def read_data(args):
    """Returns the data to train on and to validate on, two map-style datasets.

    The test images of the data sets serve for validation.
    """
    try:
        train_data = Images(*read_images(args, "train"))
        val_data = Images(*read_images(args, "test"))
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"cannot read {args.dataset} in {args.data_dir}: {error}")
    if val_data.images.shape[1:] != train_data.images.shape[1:]:
        sys.exit(f"{args.dataset}: images of train and test differ in shape")
    if val_data.labels.max() > train_data.labels.max():
        sys.exit(f"{args.dataset}: test has classes that train has not")
    return train_data, val_data


def read_images(args, split):
    """Returns images (N, C, H, W) uint8 and labels (N,) of a split, "train" or "test"."""
    if args.dataset == "synthetic":
        return synthetic_images(60_000 if split == "train" else 10_000)
    if args.dataset == "mnist":
        source = datasets.MNIST(args.data_dir, train=split == "train", download=True)
        return source.data.numpy().reshape(-1, 1, 28, 28), source.targets.numpy()
    if args.dataset == "cifar10":
        source = datasets.CIFAR10(args.data_dir, train=split == "train", download=True)
        images = np.ascontiguousarray(source.data.transpose(0, 3, 1, 2))
        return images, np.array(source.targets)
    folder = os.path.join(args.data_dir, args.dataset)
    if not os.path.isdir(folder):
        folder = args.dataset
    # Mapped files are read piece by piece. They may be larger than memory.
    images = np.load(f"{folder}/{split}_images.npy", mmap_mode="r")
    labels = np.load(f"{folder}/{split}_labels.npy", mmap_mode="r")
    if images.ndim == 3:
        images = images.reshape(len(images), 1, *images.shape[1:])  # one channel
    if images.ndim != 4 or images.dtype != np.uint8 or images.size == 0:
        raise ValueError(f"{split} images are {images.dtype} {images.shape}")
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu" or labels.min() < 0:
        raise ValueError(f"{split} labels are {labels.dtype} {labels.shape}")
    return images, labels


def synthetic_images(num_images):
    """Returns ten smooth random patterns, one for each class, under noise, and their labels."""
    patterns = torch.rand(10, 1, 7, 7, generator=torch.Generator().manual_seed(0))
    patterns = nn.functional.interpolate(patterns, size=28, mode="bilinear")  # (K, C, H, W)
    generator = torch.Generator().manual_seed(num_images)  # other noise for each split
    labels = torch.randint(10, (num_images,), generator=generator)
    noise = torch.randint(176, (num_images, 1, 28, 28), dtype=torch.uint8, generator=generator)
    images = (80 * patterns[labels]).byte() + noise
    return images.numpy(), labels.numpy()


def training_order(data, args, epoch):
    """Returns the indices (N,) of all images, in the order in which an epoch trains on them.

    Blocks of 2 MiB of neighbours come in random order, so that a file larger than memory is read in
    long pieces. Pools of 128 blocks are shuffled. Data of less than 256 MiB is one pool.
    """
    generator = np.random.default_rng((args.seed, epoch))
    block_size = max(1, 2**21 // data.images[0].nbytes)
    block_starts = generator.permutation(np.arange(0, len(data), block_size))
    order = (block_starts[:, None] + np.arange(block_size)).flatten()  # (blocks x block_size,)
    order = order[order < len(data)]  # the last block may be short
    pool_size = 128 * block_size
    for start in range(0, len(data), pool_size):
        generator.shuffle(order[start : start + pool_size])  # in place
    return order


def batches(data, args, epoch, steps, device):
    """Yields micro-batches for each step: images (B, C, H, W) uint8 and labels (B,)."""
    order = training_order(data, args, epoch)
    for step in steps:
        batch = order[step * args.batch_size : (step + 1) * args.batch_size]
        share = batch[dist.get_rank() :: dist.get_world_size()]
        micro_batches = map(data.__getitems__, share.reshape(args.grad_accum_steps, -1))
        yield [(images.to(device), labels.to(device)) for images, labels in micro_batches]


def validation_batches(data, device):
    """Yields this process's images (B, C, H, W) uint8 and labels (B,) of the validation data."""
    share = np.arange(dist.get_rank(), len(data), dist.get_world_size())
    for start in range(0, len(share), 128):
        images, labels = data.__getitems__(share[start : start + 128])
        yield images.to(device), labels.to(device)


def create_model(args, data):
    """Returns a network from images (B, C, H, W) uint8 to logits (B, K)."""
    channels, height, width = data.images.shape[1:]
    num_classes = int(data.labels.max()) + 1
    if args.model == "mlp":
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(channels * height * width, 512),
            nn.ReLU(),
            nn.Dropout(args.dropout),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Dropout(args.dropout),
            nn.Linear(512, num_classes),
        )
    if args.model == "cnn":  # the network of pytorch/examples/mnist
        return nn.Sequential(
            nn.Conv2d(channels, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(args.dropout),
            nn.Linear(64 * (height // 2 - 2) * (width // 2 - 2), 128),  # 4 pixels fewer, and half
            nn.ReLU(),
            nn.Dropout(args.dropout),
            nn.Linear(128, num_classes),
        )
    if args.model == "resnet18":
        network = models.resnet18(num_classes=num_classes)
    else:
        network = models.vgg11(num_classes=num_classes, dropout=args.dropout)
    # Both take 3 channels, and vgg11 takes 32 x 32 pixels or more.
    enlarge = nn.Upsample((max(32, height), max(32, width)))
    return nn.Sequential(nn.Conv2d(channels, 3, 1), enlarge, network)


def num_weights(module):
    return sum(weight.numel() for weight in module.parameters())


def split_model(model, devices):
    """Yields stages of an nn.Sequential on their devices. The largest is as small as possible."""
    layers = list(model)
    if isinstance(layers[-1], models.VGG):
        vgg = layers.pop()
        layers += [*vgg.features, vgg.avgpool, nn.Flatten(), *vgg.classifier]  # as its forward()
    if isinstance(layers[-1], models.ResNet):
        *resnet, head = layers.pop().children()
        layers += [*resnet, nn.Flatten(), head]  # likewise
    sizes = [num_weights(layer) for layer in layers]
    with_weights = [number for number, size in enumerate(sizes) if size > 0]
    if len(devices) > len(with_weights):
        sys.exit(f"--num_stages must be at most {len(with_weights)}, the layers that have weights")

    @functools.cache
    def best_split(start, num_stages):
        """Returns sizes, largest first, and ends of the best stages from layer `start` on."""
        if num_stages == 1:
            return [sum(sizes[start:])], [len(layers)]
        splits = []
        for end in with_weights:  # a stage begins with weights: DDP needs some
            if end > start:
                rest_sizes, rest_ends = best_split(end, num_stages - 1)
                stage_sizes = sorted([sum(sizes[start:end]), *rest_sizes], reverse=True)
                splits.append((stage_sizes, [end, *rest_ends]))
        return min(splits, default=([math.inf], []))

    start = 0
    _, ends = best_split(with_weights[0], len(devices))
    for device, end in zip(devices, ends):
        yield nn.Sequential(*layers[start:end]).to(device)
        start = end


class Chain(nn.Sequential):
    """Runs the stages one after the other, each on its device."""

    def forward(self, images):
        activations = images
        for stage in self:
            stage_device = next(stage.parameters()).device
            activations = stage(activations.to(stage_device))
        return activations.to(images.device)  # where the labels are


def image_loss(model, images, labels, args):
    """Returns the mean loss, and the sums (3,) of losses, right answers and images."""
    with torch.autocast(images.device.type, DTYPES[args.precision], args.precision != "fp32"):
        logits = model(images.float() / 255)  # (B, K)
        loss = nn.functional.cross_entropy(logits, labels)
    count = torch.full_like(loss, len(labels))
    right = (logits.argmax(1) == labels).sum()
    sums = torch.stack((loss.detach() * count, right, count))
    return loss, sums.double()


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


class CommTimer(Stopwatch):
    """Also times the all-reduces. DDP calls hook() for each bucket (set) of gradients."""

    def __init__(self, device, comm_hook):
        super().__init__(device)
        self.comm_hook = comm_hook
        self.spans = []  # (start, end) of each all-reduce since the last flush
        self.ready = []  # (bytes, moment) of each bucket of this step
        self.stream = torch.cuda.Stream(priority=-1) if self.cuda else None

    def hook(self, process_group, bucket):
        """Sends a bucket with comm_hook, and notes when the all-reduce begins and ends."""
        if bucket.index() == 0:
            self.ready = []
        start = self.now()
        self.ready.append((bucket.buffer().nbytes, start))

        def note_end(future):  # on a GPU, the stream in which it runs waits for the all-reduce
            self.spans.append((start, self.now()))
            return future.value()

        # comm_hook() can make the current stream wait for its all-reduce. The backward pass must
        # not wait for it, so comm_hook() runs in a stream of its own. On a CPU there are none.
        if self.cuda:
            self.stream.wait_stream(torch.cuda.current_stream())  # it needs the gradients
        with torch.cuda.stream(self.stream):
            return self.comm_hook(process_group, bucket).then(note_end)

    def mark_backward(self, is_last):
        """Marks a backward pass. The last one of a step also waits for the all-reduces."""
        if is_last:
            _, last_ready = self.ready[-1]  # hook() has noted when the last gradients were there
            self.marks.append(("backward", last_ready))
            self.mark("comm")
        else:
            self.mark("backward")

    def mark_all_reduce(self):
        """Marks the end of an all-reduce that nothing hides. It began at the last mark."""
        _, start = self.marks[-1]
        self.spans.append((start, self.now()))
        self.mark("comm")

    def flush(self):
        """Also adds the time in which any all-reduce ran. Overlaps count once."""
        origin = self.last  # before flush() moves it
        super().flush()
        spans = []  # in seconds after the origin
        for start, end in self.spans:
            spans.append((self.between(origin, start), self.between(origin, end)))
        counted_until = 0.0  # what overlaps with a span before it is not counted again
        for start, end in sorted(spans):
            self.seconds["comm_total"] += max(0.0, end - max(start, counted_until))
            counted_until = max(counted_until, end)
        self.spans.clear()

    def take(self, num_samples):
        """Also returns each bucket's bytes, and the seconds until the last bucket was ready."""
        row = super().take(num_samples)
        row["buckets"] = []
        for size, moment in self.ready:
            row["buckets"].append([size, self.between(moment, self.ready[-1][1])])
        return row


class StageTimer(CommTimer):
    """Times a stage by the clock of the first GPU: CUDA cannot compare events of two GPUs.

    The timer of the first stage, whose backward pass ends last, is the stopwatch of the run.
    """

    def __init__(self, device, comm_hook, devices):
        self.devices = devices
        if device.type == "cuda":  # streams of the first GPU that hold nothing but events
            self.clock = torch.cuda.Stream(devices[0], priority=-1)
            self.comm_clock = torch.cuda.Stream(devices[0], priority=-1)
        with torch.accelerator.device_index(device.index):  # CommTimer's stream is of this GPU
            super().__init__(device, comm_hook)

    def of_stage(self, device):
        """Returns the timer of a stage. All share one list of all-reduces, since these overlap."""
        if device == self.devices[0]:
            return self
        timer = StageTimer(device, self.comm_hook, self.devices)
        timer.spans = self.spans
        return timer

    def now(self):
        if not self.cuda:
            return super().now()
        clock = self.clock
        streams = [torch.cuda.current_stream(device) for device in self.devices]
        if torch.cuda.current_stream() != torch.cuda.default_stream():
            # An all-reduce has ended. Its clock does not wait for the stages, nor theirs for it.
            clock = self.comm_clock
            streams = [torch.cuda.current_stream()]
        for stream in streams:
            clock.wait_stream(stream)
        return clock.record_event(torch.cuda.Event(enable_timing=True))

    def take(self, num_samples):
        """Gives the peak memory of the fullest GPU of this process, not of its first one."""
        row = super().take(num_samples)
        if self.cuda:
            peaks = [torch.cuda.max_memory_allocated(device) for device in self.devices]
            row["peak_MB"] = max(peaks) / 1e6
        return row


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


def print_communication(rows):
    """Prints what part of the communication is sending, and what is waiting for a late process.

    If nothing is hidden, N processes are N R / (1 + R) times as fast as one: 0.75 N at R = 3. If
    another process is late each time, the waiting for it counts as sending.
    """
    totals = []  # of each process, in seconds of an epoch
    for rank in range(rows[0]["processes"]):
        totals.append(mean([row for row in rows if row["rank"] == rank], "comm_total"))
    # The process that comes last never waits in an all-reduce, so all of its time is sending.
    sending = min(totals)
    if len(totals) == 1 or sending == 0:  # it is alone, or has resumed with no step left
        return
    late = rows[totals.index(sending)]  # the rows begin with one for each rank, in order
    waiting = mean(rows, "comm_total") - sending
    hidden = max(0.0, 1 - mean(rows, "comm") / mean(rows, "comm_total"))
    compute = mean(rows, "forward") + mean(rows, "backward") + mean(rows, "optimizer")
    print(
        f"communication {sending + waiting:.3f} s, {hidden:.0%} hidden: sending {sending:.3f} s, "
        f"waiting {waiting:.3f} s for rank {late['rank']} on {late['host']}\n"
        f"R = compute / sending = {compute / sending:.1f}: above 3, more processes pay off"
    )


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


def setup_stages(args, rank, world_size):
    """Joins the process groups. Returns the devices of the stages, and their process groups."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process without a traceback
    first_gpu = int(os.environ["LOCAL_RANK"]) * args.num_stages
    timeout = timedelta(seconds=args.timeout)
    # An NCCL group is bound to one GPU, so each stage has its own. The default one is gloo.
    dist.init_process_group("gloo", "env://", timeout, world_size, rank)
    if find_device(first_gpu + args.num_stages - 1).type == "cpu":
        return [torch.device("cpu")] * args.num_stages, [dist.group.WORLD] * args.num_stages
    devices = [torch.device("cuda", first_gpu + stage) for stage in range(args.num_stages)]
    torch.cuda.set_device(first_gpu)
    return devices, [dist.new_group(None, timeout, "nccl", device_id=device) for device in devices]


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
        return {"run_id": f"{time.time_ns():x}", "epoch": 0, "step": 0, "sums": {}}
    try:
        snapshot = torch.load(args.snapshot, map_location="cpu", weights_only=True)
        if snapshot["settings"] != {name: getattr(args, name) for name in SAME_ON_RESUME}:
            raise ValueError(f"it was made with {snapshot['settings']}")
        for name, part in parts.items():
            part.load_state_dict(snapshot[name])
        return snapshot["progress"]
    except Exception as error:  # a damaged or foreign file can fail anywhere
        sys.exit(f"cannot resume from {args.snapshot}: {error!r}")


def add_up(sums, since):
    """Adds up over processes. Returns named sums, whether one was asked to stop, mean seconds."""
    local_sums = sums.tolist()  # waits for the GPU, before the time is taken
    seconds = time.perf_counter() - since
    totals = sums.new_tensor([*local_sums, len(STOP_REQUESTS), seconds])
    dist.all_reduce(totals)
    *total_sums, stop_requests, total_seconds = totals.tolist()
    named_sums = dict(zip(SUMS, total_sums))
    return named_sums, stop_requests > 0, total_seconds / dist.get_world_size()


@torch.no_grad()
def evaluate(batch_loss, model, loader, args):
    """Returns the sums that batch_loss gives, added up over all batches."""
    model.eval()
    return sum(batch_loss(model, *batch, args)[1] for batch in loader)


def epoch_row(settings, progress, val_sums):
    """Returns settings, losses and accuracies of an epoch, for the log."""
    train_loss, train_right, train_count = progress["sums"].values()
    val_loss, val_right, val_count = val_sums.tolist()
    row = settings | {"run": progress["run_id"], "epoch": progress["epoch"]}
    row |= {"train_loss": train_loss / train_count, "train_acc": train_right / train_count}
    row |= {"val_loss": val_loss / val_count, "val_acc": val_right / val_count}
    return row


def cell(value):
    """Returns the number with five significant digits; without decimals if whole or large."""
    has_decimals = isinstance(value, float) and abs(value) < 1000
    return f"{value:#.5g}" if has_decimals else f"{value:,.0f}"


def main(args):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    nodes = int(os.environ["GROUP_WORLD_SIZE"])
    if nodes == 1:
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # this machine only
    devices, groups = setup_stages(args, rank, world_size)
    device = devices[0]
    patient = dist.new_group(backend="gloo", timeout=timedelta(days=1))  # to wait for rank 0
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # on GPUs, fp32 layers compute in TF32
    torch.backends.cudnn.benchmark = True
    # Rank 0 prepares the data, then one process of each other node, and then the rest read them.
    turn = int(rank > 0) + int(os.environ["LOCAL_RANK"] != "0")
    for _ in range(turn):
        dist.barrier(patient)
    train_data, val_data = read_data(args)
    for _ in range(turn, 2):  # each process passes two barriers
        dist.barrier(patient)
    num_steps = len(train_data) // args.batch_size
    if num_steps == 0 or len(val_data) < world_size:
        sys.exit(f"{args.dataset} is too small for --batch_size or for {world_size} processes")
    if args.max_steps > 0:
        num_steps = min(num_steps, args.max_steps)

    torch.manual_seed(args.seed)
    model = create_model(args, train_data)
    stages = list(split_model(model, devices))
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    progress = load_snapshot(args, parts)
    starts = [None] * world_size
    dist.all_gather_object(starts, (progress["epoch"], progress["step"]))
    if len(set(starts)) > 1:
        sys.exit(f"the nodes see different files {args.snapshot}: use a shared file system")
    watch = StageTimer(device, COMM_HOOKS[args.comm_hook], devices)
    ddp_model = Chain()
    for stage, stage_device, group in zip(stages, devices, groups):
        ddp_stage = DistributedDataParallel(
            stage, process_group=group, gradient_as_bucket_view=True
        )
        ddp_stage.broadcast_buffers = False  # BatchNorm's: sent once, before a validation
        comm_hook = COMM_HOOKS[args.comm_hook]
        comm_hook = watch.of_stage(stage_device).hook  # calls it, and notes the time
        ddp_stage.register_comm_hook(group, comm_hook)
        if args.compile:
            ddp_stage.compile()
        ddp_model.append(ddp_stage)

    settings = vars(args) | {
        "script": "hybrid/images.py",
        "processes": world_size,
        "nodes": nodes,
        "rank": rank,
        "host": os.uname().nodename,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "stages": [num_weights(stage) for stage in stages],
    }
    if rank == 0:
        facts = ", ".join(f"{name} {value}" for name, value in settings.items())
        print(textwrap.fill(facts, 100))
        print(f"starting at epoch {progress['epoch']}, step {progress['step']}:")
        print(*(f"{name:>10}" for name in SHOWN))
    rows = []  # rank 0 collects those of all epochs and processes
    stop = False
    while progress["epoch"] < args.epochs:
        epoch = progress["epoch"]
        first_step = progress["step"]
        last_check = first_step
        next_check = first_step + 1
        since = time.perf_counter()
        loader = batches(train_data, args, epoch, range(first_step, num_steps), device)
        # Each process begins with an equal share of the sums so far. add_up() adds them up.
        shares = [progress["sums"].get(name, 0.0) / world_size for name in SUMS]
        sums = torch.tensor(shares, dtype=torch.float64, device=device)
        bar = tqdm(loader, f"epoch {epoch}", num_steps, initial=first_step, disable=rank > 0, **BAR)
        model.train()
        for micro_batches in bar:
            # A resumed run draws the same dropout: numbers have the same hash in every run.
            torch.manual_seed(hash((args.seed, epoch, progress["step"], rank)))
            watch.mark("data")
            for number, (images, labels) in enumerate(micro_batches, start=1):
                is_last = number == args.grad_accum_steps
                for ddp_stage in ddp_model:
                    ddp_stage.require_backward_grad_sync = is_last  # as no_sync() does
                loss, loss_sums = image_loss(ddp_model, images, labels, args)
                sums = sums + loss_sums
                watch.mark("forward")
                scaler.scale(loss / args.grad_accum_steps).backward()
                watch.mark_backward(is_last)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            watch.mark("optimizer")

            progress["step"] += 1
            save = progress["step"] == num_steps  # after the last step, before the validation
            if args.snapshot_every and progress["step"] % args.snapshot_every == 0:
                save = True
            if save or progress["step"] == next_check:
                progress["sums"], stop, seconds = add_up(sums, since)
                watch.mark_all_reduce()
                watch.flush()
                if not all(map(math.isfinite, progress["sums"].values())):
                    sys.exit(f"the loss is not finite in epoch {epoch}, step {progress['step']}")
                if save or stop:
                    if rank == 0:
                        save_snapshot(args, parts, progress)
                    dist.barrier(patient)
                    watch.mark("save")
                if stop:
                    break
                if last_check == first_step:  # the first check; a signal before it ends the run
                    catch_signals()
                # The mean is the same in all processes, so they check again at the same step.
                seconds_a_step = seconds / (progress["step"] - last_check)
                last_check = progress["step"]
                next_check = last_check + max(1, min(100, int(CHECK_SECONDS / seconds_a_step)))
                since = time.perf_counter()
                loss_sum, _, count = progress["sums"].values()
                bar.set_postfix(train_loss=loss_sum / count, refresh=False)
        if stop:
            break

        for stage, group in zip(stages, groups):
            for buffer in stage.buffers():  # BatchNorm's statistics: rank 0's, which are saved
                dist.broadcast(buffer, 0, group)
        val_loader = validation_batches(val_data, device)
        val_sums = evaluate(image_loss, Chain(*stages), val_loader, args)
        dist.all_reduce(val_sums, group=groups[0])
        watch.mark("eval")
        watch.flush()
        row = epoch_row(settings, progress, val_sums)
        row |= watch.take((progress["step"] - first_step) * args.batch_size)
        epoch_rows = [None] * world_size
        dist.all_gather_object(epoch_rows, row)
        for process_row in epoch_rows:
            process_row["run"] = epoch_rows[0]["run"]  # each process has made up its own
        progress |= {"epoch": epoch + 1, "step": 0, "sums": {}}
        if rank == 0:
            rows += epoch_rows
            print(*(f"{cell(row.get(name, math.nan)):>10}" for name in SHOWN))
            if args.log:
                with open(args.log, "a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in epoch_rows)
    if rank == 0 and not stop:  # complete
        save_snapshot(args, parts, progress)
    if rows:  # the summary
        print_breakdown(rows)
        print_communication(rows)
        print_row(rows, "val_acc")
    dist.barrier(patient)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
