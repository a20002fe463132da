r"""Train an image classifier on the GPUs of many nodes or, on machines that have none, on CPU processes.

    torchrun --standalone --nproc_per_node=2 -- multinode/images.py      # one node, to try it
    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HEAD_NODE:29400 -- multinode/images.py \
        --model mlp --dataset mnist --data_dir data --snapshot mlp.pt    # the same on each of the two nodes
    sbatch --nodes=4 --gpus-per-node=4 slurm/multinode_images.slurm --model vgg11 --learning_rate 1e-4

torchrun starts a process for each GPU; given TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, --max_restarts, --snapshot it starts
them again after a failure. The bare -- keeps it from taking --log for its own. All but the start is multigpu/images.py.
Shapes: N images of a split, B of a batch, C channels, H height, W width, K classes.
"""
import argparse
import atexit
import csv
import ctypes
import math
import os
import signal
import socket
import sys
import threading
import time
import zipfile
from contextlib import nullcontext, suppress
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchvision import datasets, models
from tqdm import tqdm

NUM_CLASSES = 10
MEAN_STD = {"synthetic": (0.49, 0.18), "mnist": (0.13, 0.31), "bigmnist": (0.13, 0.31), "cifar10": (0.47, 0.25)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BLOCK = 4096  # images next to each other that are read at once
FIXED = ("model", "dataset", "batch_size", "learning_rate", "dropout", "seed")  # what a resumed run may not change
SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
COMM_HOOKS = {"none": default_hooks.allreduce_hook, "bf16": default_hooks.bf16_compress_hook,
              "fp16": default_hooks.fp16_compress_hook, "powersgd": powerSGD_hook.powerSGD_hook}
CHECK_EVERY = 8  # steps between looks at the loss and the stop signals: a look waits for the GPU
PHASES = ("data", "forward", "backward", "comm", "optimizer", "eval", "save")
LOSSES = dict.fromkeys(("train_loss", "train_acc", "val_loss", "val_acc"), ".4f")
NUM_SUMS = 3  # of the losses, the right answers, the images
TIMES = {"time": ".2f", "samples/s": ".0f", **dict.fromkeys((*PHASES, "comm_total"), ".3f"), "R": ".2f", "skew": ".3f"}
EPOCH = {"epoch": "", **LOSSES, **TIMES}  # columns of the table of epochs, and how they are formatted; times in seconds
SUMMARY = dict.fromkeys(("script", "model", "dataset", "precision", "processes", "batch_size", "epochs"), "")
LOG = ("run", "epoch", "rank", *SUMMARY, "nodes", "device", "threads", "torch", "parameters", "train_images",
       "val_images", "grad_accum_steps", "comm_hook", "compile", "num_workers", "learning_rate", "dropout", "max_steps",
       "seed", *LOSSES, *TIMES)
SUMMARY |= LOSSES | TIMES  # columns of results.md
HEADER = ("{script}: {model}, {parameters:,} parameters; {dataset}, {train_images:,} + {val_images:,} images; "
          "global batch {batch_size} = {micro_batch_size} x {processes} process(es) x {grad_accum_steps} accumulation; "
          "{precision}; {nodes} node(s), {device}, {threads} threads; torch {torch}; epoch {epoch}, step {step}")


def parse_args():
    parser = argparse.ArgumentParser(description="Train an image classifier on many nodes, under torchrun.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = fail
    add = parser.add_argument
    add("--model", choices=("cnn", "mlp", "vgg11"), default="cnn", help="network; vgg11 wants --learning_rate 1e-4")
    add("--dataset", choices=tuple(MEAN_STD), default="synthetic", help="images; synthetic needs no download")
    add("--data_dir", default="data", help="folder that holds, or receives, the data set's own folder")
    add("--epochs", type=int, default=2, help="passes over the training images")
    add("--batch_size", type=int, default=64, help="global batch: images per optimizer step of all processes")
    add("--grad_accum_steps", type=int, default=1, help="parts that a process's batch is cut into, to save memory")
    add("--learning_rate", type=float, default=1e-3, help="of AdamW; times 0.9 after each epoch")
    add("--dropout", type=float, default=0.0, help="probability, before the last layers")
    add("--precision", choices=tuple(DTYPES), default="fp32", help="of autocast; fp16 scales the loss")
    add("--compile", action="store_true", help="use torch.compile")
    add("--comm_hook", choices=tuple(COMM_HOOKS), default="none", help="compression of gradients")
    add("--max_steps", type=int, help="optimizer steps after which each epoch is cut short")
    add("--num_workers", type=int, default=0, help="processes that gather batches ahead; 0: the training process does")
    add("--seed", type=int, default=1, help="of weights, order and dropout")
    add("--threads", type=int, help="CPU threads of a process; its share of the cores if not given")
    add("--snapshot", metavar="FILE", help="saved after each epoch and at a stop signal; resumed from if it is there")
    add("--snapshot_every", type=int, help="steps between snapshots within an epoch")
    add("--log", metavar="FILE.csv", help="append a row for each epoch and process")
    add("--timeout", type=int, default=600, help="seconds without a word from a process that end the job")
    args = parser.parse_args()
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        fail(f"start it with torchrun, for example: torchrun --standalone --nproc_per_node=2 -- {sys.argv[0]}")
    if os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0" and os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True":
        fail("with --max_restarts set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, lest restarted processes look for the old "
             "ones: pytorch/pytorch#135712")
    check_args(args, parts=args.grad_accum_steps * int(os.environ["WORLD_SIZE"]))
    return args


def fail(message):
    """End on a user's mistake: one line on stderr, exit status 2."""
    print(f"{sys.argv[0]}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def check_args(args, parts):
    """Refuse what cannot work; `parts` is the number of equal parts that a global batch is cut into."""
    ranges = {"seed": (0, math.inf), "num_workers": (0, math.inf), "dropout": (0, 1)}
    for name, value in vars(args).items():
        low, high = ranges.get(name, (1e-30, math.inf))
        if type(value) in (int, float) and not low <= value < high:
            fail(f"--{name} {value} is out of range")
    if args.batch_size % parts:
        near = args.batch_size // parts * parts
        near = f"{near} or {near + parts}" if near else parts
        fail(f"--batch_size {args.batch_size} does not divide into {parts} equal parts: take {near}")
    if args.precision == "fp16" and not torch.cuda.is_available():
        fail("--precision fp16 needs a GPU: on a CPU take bf16 or fp32")
    for path in filter(None, map(vars(args).get, ("snapshot", "log", "reconstructions"))):
        if os.path.isdir(path) or not os.access(os.path.dirname(os.path.abspath(path)), os.W_OK):
            fail(f"cannot write {path}: it is a folder, or its folder is missing or read-only")
    if args.log and os.path.exists(args.log):
        if open(args.log, errors="replace").readline() not in ("", ",".join(LOG) + "\n"):
            fail(f"--log {args.log} is not a log of this script")


def synthetic_images(num_images, seed):
    """Ten smooth random patterns, one a class, shifted by up to 3 pixels, under noise: (N, H, W) uint8, (N,) int64."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.rand(NUM_CLASSES, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    patterns = F.interpolate(patterns, size=34, mode="bilinear")[:, 0].mul(80).byte()
    shifted = patterns.unfold(1, 28, 1).unfold(2, 28, 1)  # (K, 7, 7, H, W)
    labels, dy, dx = (torch.randint(high, (num_images,), generator=generator) for high in (NUM_CLASSES, 7, 7))
    noise = torch.empty(num_images, 28, 28, dtype=torch.uint8).random_(0, 176, generator=generator)
    return shifted[labels, dy, dx] + noise, labels


def read_data(args, download=True):
    """The training and the validation split, each as arrays: images (N, C, H, W) uint8, labels (N,)."""
    folder, splits = args.data_dir, []
    try:
        for split, size in (("train", 60_000), ("test", 10_000)):
            if args.dataset == "synthetic":
                images, labels = synthetic_images(size, seed=size)
            elif args.dataset == "bigmnist":  # mapped, not loaded: it may be larger than memory
                stem = f"{folder}/bigmnist/{split}_"
                images, labels = (np.load(f"{stem}{name}.npy", "r") for name in ("images", "labels"))
            else:
                source = datasets.MNIST if args.dataset == "mnist" else datasets.CIFAR10
                source = source(folder, split == "train", download=download)
                images, labels = source.data, source.targets
            images, labels = np.asanyarray(images), np.asanyarray(labels)  # a mapped array stays one
            shape = (len(labels), 32, 32, 3) if args.dataset == "cifar10" else (len(labels), 28, 28)
            fits = images.dtype == np.uint8 and images.shape == shape and labels.ndim == 1 and labels.dtype.kind in "iu"
            if not fits or labels.min() < 0 or labels.max() >= NUM_CLASSES:
                raise ValueError(f"images {images.shape} ({images.dtype}), {len(labels)} labels up to {labels.max()}")
            splits.append((images.transpose(0, 3, 1, 2) if images.ndim == 4 else images[:, None], labels))
    except Exception as error:  # a damaged file can fail anywhere
        reason = " ".join(str(error).split()) or "a file is cut short"
        command = f"python {sys.argv[0]} --dataset {args.dataset} --data_dir {folder} --max_steps 1"
        if args.dataset == "bigmnist":
            command = f"python singlegpu/make_bigmnist.py --data_dir {folder} --out {folder}/bigmnist"
        fail(f"--dataset {args.dataset}: {reason}; remove what is damaged in {folder} and, where there is internet (a "
             f"login node), run: {command}")
    if args.batch_size > len(splits[0][1]):
        fail(f"--batch_size {args.batch_size} exceeds the {len(splits[0][1])} training images")
    return splits


def read_ahead(images, blocks):
    """Have the system fetch these blocks of a mapped file, so that they are there when they are used."""
    if isinstance(images, np.memmap) and hasattr(os, "posix_fadvise"):
        size = BLOCK * images[0].nbytes
        with open(images.filename, "rb") as file:
            for block in np.sort(blocks).tolist():
                os.posix_fadvise(file.fileno(), images.offset + block * size, size, os.POSIX_FADV_WILLNEED)


def shuffled_batches(images, steps, args, epoch):
    """Yields the indices (B,) of these steps' batches: the same for any number of processes, other ones each epoch.

    Blocks come in random order, and are shuffled 16 at a time, so that a disk sees long reads: of the next 16 while
    these are used. Up to 65,536 images that is a full shuffle.
    """
    random, rest, step = np.random.default_rng((args.seed, epoch)), np.empty(0, np.int64), 0
    blocks = random.permutation(-(-len(images) // BLOCK))
    for start in range(0, len(blocks), 16):
        indices = (blocks[start:start + 16, None] * BLOCK + np.arange(BLOCK)).ravel()
        indices = np.concatenate((rest, random.permutation(indices[indices < len(images)])))
        batches, rest = np.split(indices, [len(indices) // args.batch_size * args.batch_size])
        if steps.start < step + len(batches) // args.batch_size:
            read_ahead(images, blocks[start:start + 32])
        for batch in batches.reshape(-1, args.batch_size):
            if step in steps:
                yield batch
            step += 1
        if step >= steps.stop:
            return


class Gather:
    """Of a split: gather[indices] are the images (B, C, H, W) uint8 and labels (B,) there, as tensors."""

    def __init__(self, split):
        self.split, self.count = split, 0

    def __getitem__(self, indices):
        self.count += len(indices)
        if self.count > 16 * BLOCK:  # what has been read of a mapped file need not stay in memory: map it anew
            self.split = [np.memmap(array.filename, array.dtype, "r", array.offset, array.shape)
                          if isinstance(array, np.memmap) and array.flags.c_contiguous else array
                          for array in self.split]
            self.count = 0
        return [torch.from_numpy(array.take(indices, 0)) for array in self.split]


def ignore_signals(worker):
    """A worker of the loader ends with its training process alone, which may have to save first."""
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def create_dataloader(split, batches, args, device):
    """Yields images (B, C, H, W) and labels (B,): bytes are gathered and sent, the device normalises them."""
    mean, std = MEAN_STD[args.dataset]
    gathered = map(Gather(split).__getitem__, batches)
    if args.num_workers:  # forked, so that they share the split
        gathered = DataLoader(Gather(split), None, sampler=batches, num_workers=args.num_workers,
                              multiprocessing_context="fork", worker_init_fn=ignore_signals)
    for images, labels in gathered:
        yield images.to(device).float().div_(255).sub_(mean).div_(std), labels.to(device).long()


def create_model(args, channels, size):
    """A network from images (B, channels, size, size) to logits (B, K)."""
    if args.model == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, 512), nn.ReLU(), nn.Dropout(args.dropout),
                             nn.Linear(512, 512), nn.ReLU(), nn.Dropout(args.dropout), nn.Linear(512, NUM_CLASSES))
    if args.model == "cnn":  # the network of pytorch/examples/mnist
        return nn.Sequential(nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
                             nn.Flatten(), nn.Dropout(args.dropout), nn.Linear(64 * (size // 2 - 2) ** 2, 128),
                             nn.ReLU(), nn.Dropout(args.dropout), nn.Linear(128, NUM_CLASSES))
    model = models.vgg11(num_classes=NUM_CLASSES, dropout=args.dropout)
    model.features[0] = nn.Conv2d(channels, 64, 3, padding=(34 - size) // 2)  # pads to 32 x 32, to be halved five times
    return model


def keep_freed_memory():
    """Have glibc keep what is freed for the next step: fetching it anew can take a third of a step on a CPU."""
    with suppress(OSError, AttributeError):  # there is no glibc
        libc = ctypes.CDLL(None)
        for option, value in ((-4, 0), (-1, 1 << 30), (-2, 1 << 26)):  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
            libc.mallopt(option, value)


class Stopwatch:
    """mark(phase) gives the time since the previous mark to that phase, so that the phases add up to the whole.

    On CUDA a mark is an event in the stream: only read() waits for the GPU.
    """

    def __init__(self, device):
        self.cuda, self.marks, self.seconds = device.type == "cuda", [], dict.fromkeys((*PHASES, "comm_total"), 0.0)
        self.last = self.now()

    def now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start, end):
        return start.elapsed_time(end) / 1000 if self.cuda else end - start

    def mark(self, phase, at=None):
        self.marks.append((phase, at or self.now()))

    def read(self):
        """Add the marks up to `seconds`."""
        if self.cuda:
            torch.cuda.synchronize()
        for phase, at in self.marks:
            self.seconds[phase] += self.between(self.last, at)
            self.last = at
        self.marks.clear()


class CommTimer:
    """Times the all-reduces of DDP, which calls `hook` whenever a bucket of gradients is ready."""

    def __init__(self, watch, inner_hook, inner_state):
        self.watch, self.inner_hook, self.inner_state = watch, inner_hook, inner_state
        self.spans = []

    def hook(self, state, bucket):
        start = self.watch.now()
        if bucket.is_last():
            self.backward_end = start

        def ended(future):
            self.spans.append((start, self.watch.now()))
            return future.value()

        return self.inner_hook(self.inner_state, bucket).then(ended)

    def read(self):
        """Add the time in which any of them ran to the watch's seconds: gloo runs several at once, NCCL one by one."""
        until = -math.inf
        for start, end in sorted([self.watch.between(self.spans[0][0], at) for at in span] for span in self.spans):
            self.watch.seconds["comm_total"] += max(0.0, end - max(start, until))
            until = max(until, end)
        self.spans.clear()


def setup(args):
    """Join the other processes; returns rank, world_size and device."""
    rank, world_size, local_rank, local_world_size = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    torch.set_num_threads(args.threads or max(1, len(os.sched_getaffinity(0)) // local_world_size))
    device, place = torch.device("cpu"), f"process {os.getpid()}"
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())  # Slurm may show a task its own GPU only
        torch.cuda.set_device(device)
        place = f"{device} {torch.cuda.get_device_properties(device).uuid}"
    if local_world_size == world_size:  # one node: nothing needs to listen to the network
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    elif "GLOO_SOCKET_IFNAME" not in os.environ and socket.gethostbyname(socket.gethostname()).startswith("127."):
        fail(f"the name {socket.gethostname()} means this machine only (127...), which no other node can reach: set "
             "GLOO_SOCKET_IFNAME to the network interface that the nodes share, such as eth0")
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                            timeout=timedelta(seconds=args.timeout))
    places = [None] * world_size
    dist.all_gather_object(places, f"{socket.gethostname()}, {place}")
    if len(set(places)) < world_size:
        fail(f"two processes share a GPU: {places}")
    dist.all_reduce(torch.ones(1, device=device), async_op=True).wait(timedelta(seconds=min(60, args.timeout)))
    if rank == 0:
        print(*(f"rank {number}: {place}" for number, place in enumerate(places)), sep="\n")
    return rank, world_size, device


def cleanup():
    dist.all_reduce(torch.zeros(1))  # a process that leaves early can abort the others
    dist.destroy_process_group()


def leave(status=0):
    """End without Python's own end: a thread of gloo's that frees its last tensor meanwhile would abort the process."""
    atexit._run_exitfuncs()
    os._exit(status)


def save_snapshot(args, parts, state):
    """Written aside, then renamed: the file is whole at any moment."""
    if not args.snapshot:
        return
    if not all(parameter.isfinite().all() for parameter in parts["model"].parameters()):
        sys.exit(f"{sys.argv[0]}: error: the weights are not finite; {args.snapshot} stays as it was")
    snapshot = {name: part.state_dict() for name, part in parts.items()}
    snapshot |= {"state": state, "args": {name: getattr(args, name) for name in FIXED}}
    try:
        with open(args.snapshot + ".tmp", "wb") as file:
            torch.save(snapshot, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(args.snapshot + ".tmp", args.snapshot)
    except (OSError, RuntimeError) as error:  # a full disk must not end the training
        print(f"{sys.argv[0]}: warning: snapshot not saved: {error}", file=sys.stderr, flush=True)
        with suppress(OSError):
            os.remove(args.snapshot + ".tmp")


def load_snapshot(args, parts, **more):
    """Bring `parts` to where the snapshot, if there is one, was made; returns that place in the run, with `more`."""
    state = {"run": f"{time.time_ns():x}", "epoch": 0, "step": 0, "sums": [0.0] * NUM_SUMS, **more}
    if not args.snapshot or not os.path.exists(args.snapshot):
        return state
    try:
        if zipfile.ZipFile(args.snapshot).testzip():  # torch.load does not look at the checksums
            raise ValueError("wrong checksum")
        snapshot = torch.load(args.snapshot, map_location="cpu", weights_only=True)
        for name in FIXED:
            if snapshot["args"][name] != getattr(args, name):
                raise ValueError(f"it was made with --{name} {snapshot['args'][name]}, not {getattr(args, name)}")
        for name, part in parts.items():
            part.load_state_dict(snapshot[name])
        for parameter, moments in parts["optimizer"].state.items():  # its kernel looks at neither sizes nor strides
            moments |= {name: torch.empty_like(parameter).copy_(moments[name]) for name in ("exp_avg", "exp_avg_sq")}
        place = {name: snapshot["state"][name] for name in state}
        kinds = [[[*map(type, value)] if type(value) is list else type(value) for value in each.values()]
                 for each in (place, state)]
        if kinds[0] != kinds[1] or min(place["epoch"], place["step"]) < 0:
            raise ValueError("it does not tell where in the run it was made")
        return place
    except Exception as error:  # a foreign or damaged file can fail anywhere
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        fail(f"cannot resume from {args.snapshot}: {reason}; move it away to start anew")


def append_log(path, rows):
    """Append an epoch's rows, one a process; what a crash left of that epoch, or of a line, is dropped first."""
    try:
        with open(path, "a+", newline="", errors="surrogateescape") as file:
            file.seek(0)
            lines = file.readlines()
        epoch = f"{rows[0]['run']},{rows[0]['epoch']},"
        kept = [line for line in lines if line.endswith("\n") and not line.startswith(epoch)]
        if kept != lines:
            with open(path + ".tmp", "w", newline="", errors="surrogateescape") as file:
                file.writelines(kept)
            os.replace(path + ".tmp", path)
        with open(path, "a", newline="", buffering=1 << 20) as file:  # all rows in one write
            writer = csv.DictWriter(file, LOG, extrasaction="ignore", lineterminator="\n")
            if not kept:
                writer.writeheader()
            writer.writerows(rows)
    except OSError as error:  # a full disk must not end the training
        print(f"{sys.argv[0]}: warning: log not written: {error}", file=sys.stderr, flush=True)


def epoch_rows(settings, state, val_sums, seconds_of, num_samples):
    """An epoch's rows of the log, one for each process, from the seconds of its phases."""
    losses = [total / sums[-1] for sums in (state["sums"], val_sums.tolist()) for total in sums[:-1]]
    compute = [seconds["forward"] + seconds["backward"] + seconds["optimizer"] for seconds in seconds_of]
    return [{**settings, "epoch": state["epoch"], "rank": rank, **dict(zip(LOSSES, losses)), **seconds,
             "samples/s": num_samples / (seconds["time"] - seconds["eval"] - seconds["save"]),
             "R": compute[rank] / (seconds["comm_total"] or math.nan), "skew": max(compute) - min(compute)}
            for rank, seconds in enumerate(seconds_of)]


def average(rows):
    """The last row, its times the means over all rows."""
    return rows[-1] | {name: sum(row[name] for row in rows) / len(rows) for name in TIMES}


def print_row(columns, row=None):
    """A row of a Markdown table or, without `row`, its head."""
    cells = (format(row[name], spec).replace("nan", "-") if row else name for name, spec in columns.items())
    print("|", " | ".join(cell.rjust(max(7, len(name))) for cell, name in zip(cells, columns)), "|")


def print_verdict(summary):
    """How much of the communication the backward pass hides, and whether more processes would pay."""
    hidden = max(0, 1 - summary["comm"] / summary["comm_total"])
    print(f"{hidden:.0%} of the communication is hidden behind the backward pass; R = compute / communication = "
          f"{summary['R']:.2f}")
    if summary["R"] < 3:
        print("R is below 3: more processes will hardly pay, for they wait for gradients more than they compute; "
              "a larger --batch_size, or --comm_hook, raises R")


def image_loss(model, images, labels, args):
    """The mean loss, and the sums of the losses, of the right answers and of the images (3,)."""
    with torch.autocast(images.device.type, DTYPES[args.precision], args.precision != "fp32"):
        logits = model(images)  # (B, K)
        loss = F.cross_entropy(logits, labels)
    count = loss.detach().new_full((), len(labels))
    return loss, torch.stack((loss.detach() * count, (logits.argmax(1) == labels).sum(), count)).double()


def train(ddp_model, loader, steps, parts, state, watch, comm_timer, stop_signals, args, device):
    """Train to the end of the epoch; returns whether a stop signal ended it early."""
    rank, optimizer, scaler = dist.get_rank(), parts["optimizer"], parts["scaler"]
    ddp_model.train()
    sums = torch.tensor(state["sums"], dtype=torch.float64, device=device)
    sums *= rank == 0  # those of the snapshot are of all processes
    progress = tqdm(loader, f"epoch {state['epoch']}", steps, initial=state["step"], disable=rank > 0 or None)
    for images, labels in progress:
        torch.manual_seed(hash((args.seed, state["epoch"], state["step"], rank)))  # of dropout: no state to save
        watch.mark("data")
        to_come = args.grad_accum_steps
        for part in zip(images.chunk(args.grad_accum_steps), labels.chunk(args.grad_accum_steps)):
            to_come -= 1
            with ddp_model.no_sync() if to_come else nullcontext():  # only the last part sends gradients
                loss, part_sums = image_loss(ddp_model, *part, args)
                sums += part_sums
                watch.mark("forward")
                scaler.scale(loss / args.grad_accum_steps).backward()
                watch.mark("backward", at=None if to_come else comm_timer.backward_end)
        watch.mark("comm")
        state["step"] += 1
        save = args.snapshot_every and state["step"] % args.snapshot_every == 0
        check = save or state["step"] % CHECK_EVERY == 0 or state["step"] == steps
        if check:  # on its way while the optimizer works
            totals = torch.cat((sums, sums.new_tensor([len(stop_signals)])))
            reduction = dist.all_reduce(totals, async_op=True)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        watch.mark("optimizer")
        if check:
            reduction.wait()
            *state["sums"], stop = totals.tolist()
            watch.read()
            comm_timer.read()
            if not np.isfinite(state["sums"]).all():
                sys.exit(f"{sys.argv[0]}: error: loss not finite in epoch {state['epoch']} by step {state['step']}"
                         if rank == 0 else 1)
            if stop:
                return True
            if save and rank == 0:
                save_snapshot(args, parts, state)
                watch.mark("save")
    return False


@torch.no_grad()
def evaluate(batch_loss, model, loader, args, device):
    """The sums that batch_loss gives, over all of the loader's batches; zeros if there are none."""
    model.eval()
    sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=device)
    return sum((batch_loss(model, *batch, args)[1] for batch in loader), sums)


def main(args):
    sys.stdout.reconfigure(line_buffering=True)
    keep_freed_memory()
    stop_signals = []
    for signum in SIGNALS:
        signal.signal(signum, lambda signum, frame: stop_signals.append(signum))
    rank, world_size, device = setup(args)
    if rank > 0:
        dist.all_reduce(torch.zeros(1))  # rank 0 goes first: it downloads, and says what is wrong
    train_split, val_split = read_data(args, download=rank == 0)
    num_train, num_val = len(train_split[1]), len(val_split[1])
    torch.manual_seed(args.seed)
    layout = torch.contiguous_format if args.precision == "fp32" else torch.channels_last  # faster for half precision
    model = create_model(args, *train_split[0].shape[1:3]).to(device, memory_format=layout)
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, fused=True)
    parts = {"model": model, "optimizer": optimizer,
             "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9),
             "scaler": torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")}
    state = load_snapshot(args, parts)
    if rank == 0:
        dist.all_reduce(torch.zeros(1))
    places = [None] * world_size
    dist.all_gather_object(places, (state["epoch"], state["step"]))
    if len(set(places)) > 1:
        fail(f"not all nodes see the same {args.snapshot}: it must lie on a file system that they share")
    bucket_mb = 1e6 if args.comm_hook == "powersgd" and device.type == "cpu" else None  # gloo would mix its buckets up
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    if args.compile:
        ddp_model.compile()
    settings = vars(args) | {
        "run": state["run"], "script": "multinode/images.py", "processes": world_size,
        "nodes": world_size // int(os.environ["LOCAL_WORLD_SIZE"]),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU", "threads": torch.get_num_threads(),
        "torch": torch.__version__, "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "train_images": num_train, "val_images": num_val,
        "micro_batch_size": args.batch_size // args.grad_accum_steps // world_size}
    if rank == 0:
        print(HEADER.format_map(settings | state))
        print_row(EPOCH)
    epochs, watch, start = [], Stopwatch(device), time.perf_counter()
    comm_timer = CommTimer(watch, COMM_HOOKS[args.comm_hook],
                           powerSGD_hook.PowerSGDState(None) if args.comm_hook == "powersgd" else None)
    ddp_model.register_comm_hook(None, comm_timer.hook)
    while state["epoch"] < args.epochs:
        first_step, num_steps = state["step"], min(num_train // args.batch_size, args.max_steps or num_train)
        batches = shuffled_batches(train_split[0], range(first_step, num_steps), args, state["epoch"])
        shares = (indices[rank::world_size] for indices in batches)
        loader = create_dataloader(train_split, shares, args, device)
        if train(ddp_model, loader, num_steps, parts, state, watch, comm_timer, stop_signals, args, device):
            if rank == 0:
                save_snapshot(args, parts, state)
                print(f"stopped by a signal: epoch {state['epoch']}, step {state['step']}, snapshot {args.snapshot}")
            cleanup()
            return  # status 0: for any other torchrun would start it again
        parts["scheduler"].step()
        val_share = np.arange(rank, num_val, world_size)
        val_batches = [val_share[start:start + 128] for start in range(0, len(val_share), 128)]
        val_sums = evaluate(image_loss, model, create_dataloader(val_split, val_batches, args, device), args, device)
        dist.all_reduce(val_sums)
        watch.mark("eval")
        watch.read()
        comm_timer.read()
        seconds = watch.seconds | {"time": time.perf_counter() - start}
        start, watch.seconds = start + seconds["time"], dict.fromkeys(watch.seconds, 0.0)
        seconds_of = [None] * world_size
        dist.all_gather_object(seconds_of, seconds)
        num_samples = (state["step"] - first_step) * args.batch_size
        epochs.append(epoch_rows(settings, state, val_sums, seconds_of, num_samples))
        if rank == 0:
            print_row(EPOCH, average(epochs[-1]))
            if args.log:
                append_log(args.log, epochs[-1])
        state |= {"epoch": state["epoch"] + 1, "step": 0, "sums": [0.0] * NUM_SUMS}
        if rank == 0:
            save_snapshot(args, parts, state)
        watch.mark("save")
    if epochs and rank == 0:  # the row for results.md: means over the epochs after the first, which warms up
        summary = average([row for rows in epochs[1:] or epochs for row in rows])
        print_row(SUMMARY)
        print_row(SUMMARY, summary)
        if summary["comm_total"]:
            print_verdict(summary)
    cleanup()


def end_the_silent(rank, world_size):
    """After a failed collective: name the processes that do not report within 5 s that theirs has failed, too.

    Those of this node are killed, as torchrun would do 30 s after its own signal.
    """
    silent = [0] if rank else []  # which serves the store, or its torchrun does

    def ask():
        with suppress(dist.DistError):
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(*address, timeout=timedelta(seconds=5))
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # it knows of failures before a restart
                store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
            store.set(f"failed/{rank}", "")
            time.sleep(5)
            silent[:] = [other for other in range(world_size) if not store.check([f"failed/{other}"])]

    asking = threading.Thread(target=ask, daemon=True)  # which a store that hangs keeps for ever, whatever its timeout
    asking.start()
    asking.join(8)
    if silent:
        print(f"{sys.argv[0]}: error: rank {rank} failed; no answer of ranks {silent}", file=sys.stderr, flush=True)
    torchrun, job = os.getppid(), f"MASTER_PORT={os.environ['MASTER_PORT']}"
    with suppress(OSError), open(f"/proc/{torchrun}/task/{torchrun}/children") as children:  # OSError: not Linux
        for pid in children.read().split():
            with open(f"/proc/{pid}/environ", errors="replace") as environ:
                told = environ.read().split("\0")
            if job in told and any(f"RANK={other}" in told for other in silent):
                os.kill(int(pid), signal.SIGKILL)


def run_under_torchrun(args):
    """main, in a process that is told to stop when torchrun ends, however that ends."""
    with suppress(OSError, AttributeError):  # this is not Linux
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    try:
        main(args)
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError):  # of which the others know nothing yet
            end_the_silent(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        raise
    leave()


if __name__ == "__main__":
    run_under_torchrun(parse_args())
