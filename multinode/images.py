r"""Train an image classifier on the GPUs of many nodes, or on CPU processes where there is no GPU.

    torchrun --standalone --nproc_per_node=2 -- multinode/images.py           # one node, to try it
    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HEAD_NODE:29400 -- \
        multinode/images.py --dataset mnist --snapshot cnn.pt                 # on each of two nodes
    sbatch --nodes=4 --gpus-per-node=4 slurm/multinode_images.slurm --model vgg11

torchrun starts a process for each GPU. The bare -- keeps it from taking --log for its own option.
Beyond 400 processes set TORCH_GLOO_LAZY_INIT=1, or each has two sockets for each of the others.

For your own data and model, replace the first of the three parts. The other two are the same in all
scripts of this folder.
`diff multigpu/images.py multinode/images.py` shows what nodes add.
Shapes: N images of a split, B of a batch, C channels, H height, W width, K classes.
"""

import argparse
import faulthandler
import itertools
import json
import math
import os
import random
import re
import signal
import statistics
import sys
import textwrap
import threading
import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, default_collate
from torchvision import datasets, models
from tqdm import tqdm

# ============================ Yours: flags, data, model, loss. Replace. ===========================

COLUMNS = "epoch train_loss train_acc val_loss val_acc seconds samples/s".split()
METRIC = "val_acc"  # in the row for results.md
# Flags that a resumed run must not change. report.py compares runs that have them in common.
SAME_ON_RESUME = ("model", "dataset", "batch_size", "learning_rate", "dropout", "precision", "seed")
MAX_GRAD_NORM = None  # gradients are not clipped


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model", choices=("cnn", "mlp", "vgg11", "resnet18"), default="cnn", help="network")
    add("--dataset", default="synthetic", help="or mnist, cifar10, a folder of .npy files")
    add("--data_dir", default="data", help="folder of the data; mnist and cifar10 are downloaded")
    add("--dropout", type=float, default=0.0, help="dropout probability in the classifier")
    return parse_run_args(parser, epochs=2, batch_size=64)


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

    The test images of the data sets serve for validation. All processes have the same seeds here,
    so that a random split would be the same in all.
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


def create_model(args, data):
    """Returns a network from images (B, C, H, W) uint8 to logits (B, K), for the training data."""
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


def create_optimizer(model, args):
    return torch.optim.AdamW(model.parameters(), args.learning_rate, fused=True)


def learning_rate(args, done):
    """Returns the learning rate when this share of all steps, 0 to 1, is done."""
    return args.learning_rate


def batch_loss(model, batch, args):
    """Returns the mean loss of a batch, and sums over its images. Rows show sums / count."""
    images, labels = batch
    logits = model(images.float() / 255)  # (B, K)
    loss = nn.functional.cross_entropy(logits, labels)
    correct = (logits.argmax(1) == labels).sum()
    return loss, {"loss": loss * len(labels), "acc": correct, "count": len(labels)}


def more_columns(row):
    """Returns more columns, {name: value}, made of those of the row: times, train_*, val_*."""
    return {}


def finish(model, data, args, device):
    """Shows what the trained model does. Rank 0 calls it at the end, with the validation data."""


# ============================ The run: steps, snapshots, processes. Keep. =========================
# main() calls train(), which calls train_epoch(), evaluate() and log_epoch() in turn. train_epoch()
# calls train_step(), and save_snapshot() at its end. The other functions serve these.

SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)  # each asks the run to save and stop
STOP_REQUESTS = []  # the signals that this process has received
STATES = ("model", "optimizer", "scaler")  # what a snapshot holds the state of
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
COMM_HOOKS = {
    "none": default_hooks.allreduce_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
}


def main(args):
    """Trains in one process. Every process runs it; rank 0 also prints and saves."""
    sys.stdout.reconfigure(line_buffering=True)  # a line appears in a log file at once
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # what --precision fp32 means on GPUs
    torch.backends.cudnn.benchmark = True
    run = SimpleNamespace()  # what these functions share
    run.rank = int(os.environ["RANK"])  # torchrun or Slurm has set these four
    run.world_size = int(os.environ["WORLD_SIZE"])
    run.local_rank = int(os.environ["LOCAL_RANK"])  # on this node
    run.nodes = int(os.environ["GROUP_WORLD_SIZE"])
    run.run_id = f"{time.time_ns():x}"  # names the run in the log; a resumed run keeps it
    if run.nodes == 1:
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # this machine only
    run.epoch = 0
    run.step = 0  # steps of this epoch that are done
    run.sums = {}  # of batch_loss, over this process's samples of this epoch
    run.fixed_settings = {name: getattr(args, name) for name in SAME_ON_RESUME}
    json.dumps(run.fixed_settings)  # an error at once if no snapshot could hold them
    init_distributed(run, args, "env://")  # sets run.device and run.patient_group
    set_seeds(args.seed)  # so that a random split of the data is the same in all processes
    train_data, val_data = read_data_in_turn(run, args)
    run.num_steps = len(train_data) // args.batch_size  # the rest does not fill a batch
    if run.num_steps == 0 or len(val_data) < run.world_size:
        sys.exit(f"the data is too small for --batch_size or for {run.world_size} processes")
    run.num_steps = min(run.num_steps, args.max_steps or run.num_steps)

    torch.manual_seed(args.seed)  # the same weights, whatever read_data has drawn
    run.model = create_model(args, train_data).to(run.device)
    run.optimizer = create_optimizer(run.model, args)
    # A part that create_model has put into eval() stays so.
    run.frozen = [part for part in run.model.modules() if run.model.training and not part.training]
    run.lr_scales = []  # a group may have a rate of its own
    for group in run.optimizer.param_groups:
        run.lr_scales.append(group["lr"] / (args.learning_rate or 1.0))
    run.scaler = torch.amp.GradScaler(run.device.type, enabled=args.precision == "fp16")
    if args.snapshot and os.path.exists(args.snapshot):
        load_snapshot(run, args)
    start = (run.epoch, run.step)
    run.sums = {name: total / run.world_size for name, total in run.sums.items()}  # equal shares
    check_same_start(run, args)
    run.compiled_model = torch.compile(run.model) if args.compile else run.model
    run.ddp_model = DistributedDataParallel(run.compiled_model, gradient_as_bucket_view=True)
    run.ddp_model.broadcast_buffers = False  # evaluate() sends BatchNorm's statistics
    comm_hook = COMM_HOOKS[args.comm_hook]
    run.watch = Stopwatch(run.device)
    comm_hook = run.watch.timed(comm_hook)
    run.ddp_model.register_comm_hook(None, comm_hook)

    run.settings = describe(run, args)
    if run.rank == 0:
        settings = ", ".join(f"{name} {value}" for name, value in run.settings.items())
        print(textwrap.fill(settings, 100))
        print(f"starting at epoch {run.epoch}, step {run.step}:")
        print(*(f"{name:>10}" for name in COLUMNS))
    rows = train(run, train_data, val_data, args)
    dist.barrier(run.patient_group)  # a process that leaves early can make the others fail
    dist.destroy_process_group()
    print_summary(rows)  # the times of run.watch
    if run.rank == 0 and run.epoch == args.epochs:
        run.model.eval()
        finish(run.model, val_data, args, run.device)
    if run.epoch < args.epochs and run.rank == 0:
        has_saved = args.snapshot and (run.epoch, run.step) != start
        if "SLURM_STEP_NUM_TASKS" in os.environ:
            time.sleep(10)  # Slurm ends the others when one ends with a status: they end first
        sys.exit(os.EX_TEMPFAIL if has_saved else 128 + signal.SIGTERM)  # 75: run me again


def train(run, train_data, val_data, args):
    """Trains until all epochs are done or a signal stops it. Returns the rows for the log."""
    rows = []
    indices = training_indices(train_data, run.epoch, run.step, run, args)
    batches = iter(create_loader(train_data, indices, run, args))
    for signum in SIGNALS:  # until here, a signal just ends the process
        signal.signal(signum, note_stop)
    while run.epoch < args.epochs:
        first_step = run.step
        is_stopped = train_epoch(run, batches, args)
        if is_stopped:
            return rows
        val_sums = evaluate(run, val_data, args)
        num_samples = (run.step - first_step) * args.batch_size
        rows += log_epoch(run, val_sums, num_samples, args)
        run.epoch += 1
        run.step = 0
        run.sums = {}
    faulthandler.cancel_dump_traceback_later()
    save_snapshot(run, args)  # the same command has nothing left to do
    for signum in SIGNALS:  # all is saved: from now on a signal ends the process again
        signal.signal(signum, signal.SIG_DFL)
    return rows


def expect_progress(args):
    """Ends this process in --timeout seconds, with its stack, if it is not called again by then."""
    faulthandler.dump_traceback_later(args.timeout, exit=True, file=sys.__stderr__)


def note_stop(signum, frame):
    STOP_REQUESTS.append(signum)
    if signum == signal.SIGINT:
        signal.signal(signum, signal.SIG_DFL)  # a second Ctrl-C ends the process at once


def train_epoch(run, batches, args):
    """Trains to the end of the epoch, and saves. Returns True if a signal stopped it early.

    About once a second, after the same step, all processes look at the loss, which waits for the
    GPU, and tell each other whether they have been asked to stop.
    """
    run.model.train()
    for part in run.frozen:
        part.eval()
    bar = progress_bar(run)
    expect_progress(args)
    is_stopped = False
    last_look = run.step
    next_look = run.step + 1
    start = time.perf_counter()
    while run.step < run.num_steps and not is_stopped:
        train_step(run, batches, args)
        run.step += 1
        bar.update()
        if run.step in (next_look, run.num_steps):
            loss = float(run.sums["loss"])  # of this process
            steps_per_second = (run.step - last_look) / (time.perf_counter() - start)
            news = torch.tensor([bool(STOP_REQUESTS), not math.isfinite(loss), steps_per_second])
            dist.all_reduce(news, dist.ReduceOp.MAX)  # so that all processes know the same
            run.watch.mark("comm")
            run.watch.flush()
            is_stopped, is_not_finite, steps_per_second = news.tolist()  # in any process
            if is_not_finite:
                sys.exit(f"the loss is not finite at step {run.step} of epoch {run.epoch}")
            bar.set_postfix(train_loss=loss / (float(run.sums["count"]) or math.nan), refresh=False)
            last_look = run.step
            next_look = run.step + max(1, int(steps_per_second))
            start = time.perf_counter()
            expect_progress(args)
        is_due = args.snapshot_every > 0 and run.step % args.snapshot_every == 0
        if is_stopped or is_due or run.step == run.num_steps:
            faulthandler.cancel_dump_traceback_later()  # rank 0 may take long to save
            save_snapshot(run, args)
            if not is_stopped:
                expect_progress(args)
    bar.close()
    if is_stopped and run.rank == 0:
        saved = args.snapshot or "nothing, as there is no --snapshot"
        print(f"stopped at epoch {run.epoch}, step {run.step}; saved {saved}")
    return is_stopped


def train_step(run, batches, args):
    """Takes one step of the optimizer, over all micro-batches of a batch."""
    done = (run.epoch + (run.step + 1) / run.num_steps) / args.epochs
    for group, scale in zip(run.optimizer.param_groups, run.lr_scales):
        group["lr"] = float(learning_rate(args, done)) * scale
    set_seeds(args.seed, run.epoch, run.step, run.rank)  # a resumed run draws the same
    for micro_step in range(args.grad_accum_steps):
        batch = to_device(next(batches), run.device)
        run.watch.mark("data")
        is_last = micro_step == args.grad_accum_steps - 1
        run.ddp_model.require_backward_grad_sync = is_last  # False: no all-reduce, as in no_sync()
        loss = compute_loss(run, run.ddp_model, batch, run.sums, args)
        run.watch.mark("forward")
        run.scaler.scale(loss / args.grad_accum_steps).backward()
        run.watch.mark("comm" if is_last else "backward")  # timed_hook has marked the last backward
    if MAX_GRAD_NORM:
        run.scaler.unscale_(run.optimizer)
        nn.utils.clip_grad_norm_(run.model.parameters(), MAX_GRAD_NORM)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad()
    run.watch.mark("optimizer")


def set_seeds(*numbers):
    """Seeds the random numbers of Python, NumPy and PyTorch."""
    seed = hash(numbers) % 2**32  # a tuple of numbers always has the same hash
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 50 times as long
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def compute_loss(run, model, batch, totals, args):
    """Returns the loss of a batch, and adds the batch's sums to the totals."""
    with torch.autocast(run.device.type, DTYPES[args.precision], args.precision != "fp32"):
        result = batch_loss(model, batch, args)
    loss, sums = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not {"loss", "count"} <= set(sums) or set(totals or sums) != set(sums):
        sys.exit("batch_loss must return the loss and, each time, a dict of sums: loss, count, ...")
    for name, value in sums.items():
        total = torch.as_tensor(totals.get(name, 0.0), dtype=torch.float64)  # long sums stay exact
        totals[name] = total + torch.as_tensor(value).detach().reshape(())  # one number
    return loss


def all_reduce_sums(sums):
    """Returns the sums over all processes, as numbers."""
    totals = torch.tensor([float(sums[name]) for name in sorted(sums)], dtype=torch.float64)
    dist.all_reduce(totals)
    return dict(zip(sorted(sums), totals.tolist()))


@torch.no_grad()
def evaluate(run, data, args):
    """Returns the sums of batch_loss over this process's share of the data."""
    ignored = getattr(run.model, "_ddp_params_and_buffers_to_ignore", ())
    for name, buffer in run.model.named_buffers():  # BatchNorm's statistics of rank 0 are saved
        if name not in ignored:
            dist.broadcast(buffer, src=0)
    run.model.eval()
    share = range(run.rank, len(data), run.world_size)
    size = args.batch_size // run.world_size // args.grad_accum_steps  # as in training
    indices = BatchSampler(share, size, drop_last=False)
    totals = {}
    for batch in create_loader(data, indices, run, args):
        expect_progress(args)
        compute_loss(run, run.compiled_model, to_device(batch, run.device), totals, args)
    return totals


def training_indices(data, first_epoch, first_step, run, args):
    """Yields the indices of the samples of each micro-batch of this process, for all epochs."""
    for epoch in range(first_epoch, args.epochs):
        order = draw_order(data, epoch, run, args)
        if len(order) < run.num_steps * args.batch_size:
            sys.exit(f"training_order returned {len(order)} indices for {len(data)} samples")
        for step in range(first_step, run.num_steps):
            batch = order[step * args.batch_size : (step + 1) * args.batch_size]
            share = np.asarray(batch[run.rank :: run.world_size])
            yield from share.reshape(args.grad_accum_steps, -1).tolist()
        first_step = 0


def draw_order(data, epoch, run, args):
    """Returns training_order(), drawn alike in all processes and after a resume."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    with torch.random.fork_rng([run.device] if run.device.type == "cuda" else []):
        set_seeds(args.seed, epoch)
        order = training_order(data, args, epoch)
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    return order


def create_loader(data, indices, run, args):
    """Returns a loader that makes a batch for each list of `indices`."""
    return DataLoader(
        data,
        batch_sampler=indices,
        collate_fn=collate,
        num_workers=args.num_workers,
        # It seeds the workers, so that the augmentation of the processes differs.
        generator=torch.Generator().manual_seed(args.seed + run.rank),
        # A forked worker starts at once, and shares the memory of the data.
        multiprocessing_context="fork" if args.num_workers else None,
        worker_init_fn=init_worker,
        pin_memory=run.device.type == "cuda",
    )


def collate(samples):
    """Makes a batch of a list of samples. A tuple or dict from __getitems__ is a batch already."""
    return default_collate(samples) if isinstance(samples, list) else samples


def init_worker(worker):
    """Lets a worker outlive a signal to the whole job. It ends with the process that it serves."""
    parent = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def wait_for_parent():
        while os.getppid() == parent:  # while it is alive
            received = signal.sigtimedwait(SIGNALS, 1)
            if received and received.si_pid == parent:  # the loader ends it
                break
        os._exit(0)

    threading.Thread(target=wait_for_parent, daemon=True).start()


def to_device(batch, device):
    """Returns the batch with its tensors on the device. What has no .to stays as it is."""
    if hasattr(batch, "to"):  # a tensor, a PackedSequence, a BatchEncoding, ...
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {name: to_device(part, device) for name, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(part, device) for part in batch))
    if isinstance(batch, (tuple, list)):
        return [to_device(part, device) for part in batch]
    return batch


def save_snapshot(run, args):
    """Rank 0 writes a temporary file and renames it, so that no snapshot is half written."""
    sums = all_reduce_sums(run.sums)
    if args.snapshot and run.rank == 0:
        snapshot = {name: getattr(run, name).state_dict() for name in STATES}
        if not all(parameter.isfinite().all() for parameter in run.model.parameters()):
            sys.exit(f"weights are not finite at step {run.step}; {args.snapshot} stays as it was")
        snapshot["settings"] = run.fixed_settings
        progress = {"run_id": run.run_id, "epoch": run.epoch, "step": run.step, "sums": sums}
        replace_snapshot(snapshot | {"progress": progress}, args)
    dist.barrier(run.patient_group)
    run.watch.mark("save")


def replace_snapshot(snapshot, args):
    """Writes the snapshot. If that fails, or another run has written there, the old one stays."""
    run_id = snapshot["progress"]["run_id"]
    temporary = f"{args.snapshot}.{run_id}.tmp"
    read = partial(torch.load, map_location="cpu", weights_only=True, mmap=True)
    try:
        with open(temporary, "wb") as file:
            torch.save(snapshot, file)
        read(temporary)  # as a resume will
        if os.path.exists(args.snapshot) and read(args.snapshot)["progress"]["run_id"] != run_id:
            raise OSError("another run writes it")
        os.replace(temporary, args.snapshot)
    except (OSError, RuntimeError) as error:
        if os.path.exists(temporary):
            os.remove(temporary)
        cause = error.__context__ or error  # PyTorch's own error does not name a full disk
        sys.exit(f"cannot save {args.snapshot}, which stays as it was: {cause}")


def load_snapshot(run, args):
    """Restores the snapshot."""
    try:
        snapshot = torch.load(args.snapshot, map_location="cpu", weights_only=True, mmap=True)
        saved = snapshot["settings"]
        for name in run.fixed_settings | saved:
            if run.fixed_settings.get(name) != saved.get(name):
                raise ValueError(f"it was made with --{name} {saved.get(name, 'unknown')}")
        for name in STATES:
            getattr(run, name).load_state_dict(snapshot[name])
        vars(run).update(snapshot["progress"])
    except Exception as error:  # a damaged or foreign file can fail anywhere
        sys.exit(f"cannot resume from {args.snapshot}: {error!r}")


def check_same_start(run, args):
    """Ends the run if not all processes have restored the same snapshot."""
    starts = [None] * run.world_size
    dist.all_gather_object(starts, (run.epoch, run.step))
    if len(set(starts)) > 1:
        sys.exit(f"the nodes see different files {args.snapshot}: use a shared file system")


def progress_bar(run):
    """Returns a progress bar or, where there is no terminal, a line of progress a minute."""
    options = {"total": run.num_steps, "initial": run.step, "disable": run.rank > 0}
    options["desc"] = f"epoch {run.epoch}"
    if sys.stderr.isatty():
        return tqdm(leave=False, **options)
    line = "{desc}, step {n_fmt} of {total_fmt}: {rate_fmt}{postfix}\n"
    return tqdm(bar_format=line, delay=60, mininterval=60, miniters=1, **options)


def describe(run, args):
    """Returns all settings, which are printed at the start and in each row of the log."""
    return vars(args) | {
        "script": os.path.join(*os.path.abspath(__file__).split(os.sep)[-2:]),
        "processes": run.world_size,
        "nodes": run.nodes,
        "rank": run.rank,
        "host": os.uname().nodename,
        "device": torch.cuda.get_device_name() if run.device.type == "cuda" else "CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
    }


def log_epoch(run, val_sums, num_samples, args):
    """Prints the epoch's row and appends it to --log. Returns all processes' rows, in rank 0."""
    row = run.settings | {"epoch": run.epoch, "metric": METRIC}
    row["same_on_resume"] = list(run.fixed_settings.items())
    for split, sums in (("train", run.sums), ("val", val_sums)):
        totals = all_reduce_sums(sums)
        for name in totals:
            row[f"{split}_{name}"] = totals[name] / (totals["count"] or math.nan)
    run.watch.mark("eval")
    row |= run.watch.end_epoch(num_samples)
    row |= more_columns(row)
    rows = [None] * run.world_size if run.rank == 0 else None
    dist.gather_object(row, rows)
    if run.rank > 0:
        return []
    for process_row in rows:
        process_row["run"] = run.run_id  # that of rank 0
    print(*(f"{short(row.get(name, '-')):>10}" for name in COLUMNS))
    if args.log:
        with open(args.log, "a") as file:
            file.writelines(json.dumps(process_row, default=str) + "\n" for process_row in rows)
    return rows


def short(value):
    """Returns a number as text: five digits, or all before the decimal point; "-" for nan."""
    if isinstance(value, str):
        return value
    if math.isnan(value):
        return "-"
    return f"{value:.5g}" if abs(value) < 1000 else f"{value:,.0f}"


def init_distributed(run, args, init_method):
    """Connects this process with the others."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process without a traceback
    group = {"init_method": init_method, "rank": run.rank, "world_size": run.world_size}
    group["timeout"] = timedelta(seconds=args.timeout)
    if torch.cuda.is_available():
        if run.local_rank >= torch.cuda.device_count() > 1:
            sys.exit(f"{torch.cuda.device_count()} GPUs are too few for the processes of this node")
        run.device = torch.device("cuda", run.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(run.device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=run.device, **group)
    else:
        run.device = torch.device("cpu")
        dist.init_process_group("gloo", **group)
    # Rank 0 may take long to read or to save. The others wait for it in this group.
    run.patient_group = dist.new_group(backend="gloo", timeout=timedelta(days=1))


def read_data_in_turn(run, args):
    """Returns the data. Rank 0 prepares it, then a process of each other node, then the rest."""
    for turn in (0, 1, 2):
        if turn == int(run.rank > 0) + int(run.local_rank > 0):
            data = read_data(args)
        dist.barrier(run.patient_group)
    return data


def parse_run_args(parser, **defaults):
    """Adds the flags of the run to those of the parser, and parses and checks them."""
    add = parser.add_argument_group("the run").add_argument
    add("--epochs", type=int, help="passes over the data; a change can shift the schedule")
    add("--max_steps", type=int, default=0, help="end each epoch after so many steps; 0: no limit")
    add("--batch_size", type=int, help="global batch: samples per optimizer step")
    add("--grad_accum_steps", type=int, default=1, help="micro-batches of a batch, to save memory")
    add("--learning_rate", type=float, default=1e-3, help="highest learning rate of the schedule")
    add("--precision", choices=DTYPES, default="fp32", help="number type; on GPUs fp32 means TF32")
    add("--comm_hook", choices=COMM_HOOKS, default="none", help="type in which gradients are sent")
    add("--compile", action="store_true", help="use torch.compile, which slows the first epoch")
    add("--num_workers", type=int, default=0, help="processes that load data, for each GPU")
    add("--seed", type=int, default=1, help="seed of weights, data order and dropout")
    add("--snapshot", metavar="FILE", help="save each epoch and when stopped; resume if it exists")
    add("--snapshot_every", type=int, default=0, help="also save every so many steps; 0: do not")
    add("--log", metavar="FILE.jsonl", help="append a row per epoch and process, for report.py")
    add("--timeout", type=int, default=600, help="seconds after which a hung process ends the run")
    parser.set_defaults(**defaults)
    args = parser.parse_args()
    for name, value in vars(args).items():
        if isinstance(value, (int, float)) and value < 0:
            parser.error(f"--{name} must not be negative")
    if "SLURM_STEP_NUM_TASKS" in os.environ:  # started by srun, which has other names for these
        os.environ.setdefault("RANK", os.environ["SLURM_PROCID"])
        os.environ.setdefault("WORLD_SIZE", os.environ["SLURM_STEP_NUM_TASKS"])
        os.environ.setdefault("LOCAL_RANK", os.environ["SLURM_LOCALID"])
        os.environ.setdefault("GROUP_WORLD_SIZE", os.environ["SLURM_STEP_NUM_NODES"])
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_WORLD_SIZE"} <= os.environ.keys():
        parser.error("start it with torchrun --nproc_per_node=PROCESSES -- " + " ".join(sys.argv))
    divisor = int(os.environ["WORLD_SIZE"]) * args.grad_accum_steps
    if min(args.batch_size, divisor) < 1 or args.batch_size % divisor:
        parser.error("--batch_size must be a multiple of processes x --grad_accum_steps")
    for path in filter(None, (args.snapshot, args.log)):
        if os.path.isdir(path) or not os.access(os.path.join(os.path.dirname(path), "."), os.W_OK):
            parser.error(f"cannot write {path}: a folder, or in one that is missing or read-only")
    return args


# == Where the time goes. To do without it, delete up to the main guard and each line with watch. ==

PHASES = ("data", "forward", "backward", "comm", "optimizer", "eval", "save")


class Stopwatch:
    """Times the phases of training, and the all-reduces that the backward pass hides.

    A moment is a time in seconds or, on a GPU, an event. Nothing but flush() waits for the GPU.
    """

    def __init__(self, device):
        self.cuda = device.type == "cuda"
        self.streams = [torch.cuda.Stream(priority=-1) if self.cuda else None for _ in range(2)]
        self.seconds = dict.fromkeys((*PHASES, "comm_total"), 0.0)
        self.marks = [("start", self.now())]  # (phase, the moment at which it ended)
        self.spans = []  # (start, end) of all-reduces since the last flush
        self.buckets = []  # (bytes, moment at which it was ready) of this step's gradients

    def now(self):
        if self.cuda:
            return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))
        return time.perf_counter()

    def between(self, start, end):
        return start.elapsed_time(end) / 1000 if self.cuda else end - start

    def mark(self, phase):
        """Gives the time since the last mark to this phase."""
        self.marks.append((phase, self.now()))

    def timed(self, comm_hook):
        """Returns a hook that DDP calls for each bucket of gradients: comm_hook, and its times."""

        def timed_hook(process_group, bucket):
            start = self.now()
            if bucket.index() == 0:
                self.buckets = []
            buffer = bucket.buffer()
            self.buckets.append((0 if buffer.is_sparse else buffer.nbytes, start))
            if bucket.is_last():
                self.marks.append(("backward", start))

            def note_end(future):  # on a GPU, in a stream that waits for the all-reduce
                self.spans.append((start, self.now()))
                return future.value()

            # comm_hook can make its stream wait for the all-reduce: in a side stream, the backward
            # pass goes on. Two streams take turns, so that the next bucket does not wait, either.
            # On a CPU, the stream is None.
            stream = self.streams[bucket.index() % 2]
            if self.cuda:
                stream.wait_stream(torch.cuda.current_stream())  # which makes the gradients
            with torch.cuda.stream(stream):
                return comm_hook(process_group, bucket).then(note_end)

        return timed_hook

    def flush(self):
        """Adds up the times since the last flush. Waits for the GPU."""
        if self.cuda:
            torch.cuda.synchronize()
        for (_, start), (phase, end) in itertools.pairwise(self.marks):
            self.seconds[phase] += self.between(start, end)
            if phase == "comm":
                self.spans.append((start, end))
        _, origin = self.marks[0]
        spans = []  # in seconds after the last flush
        for start, end in self.spans:
            spans.append((self.between(origin, start), self.between(origin, end)))
        counted_until = 0.0  # where all-reduces overlap, the time counts once
        for start, end in sorted(spans):
            self.seconds["comm_total"] += max(0.0, end - max(start, counted_until))
            counted_until = max(counted_until, end)
        del self.marks[:-1]
        self.spans.clear()

    def end_epoch(self, num_samples):
        """Returns the columns of time and memory. The times start again from 0."""
        self.flush()
        row = self.seconds
        self.seconds = dict.fromkeys(row, 0.0)
        row["seconds"] = sum(row[phase] for phase in PHASES)
        training = row["seconds"] - row["eval"] - row["save"]
        row["samples/s"] = num_samples / training if num_samples else math.nan
        row["peak_MB"] = peak_bytes() / 1e6
        row["buckets"] = []  # of the last step: bytes, and seconds before the last one was ready
        for size, moment in self.buckets:
            row["buckets"].append((size, self.between(moment, self.buckets[-1][1])))
        return row


def peak_bytes():
    """Returns the most memory held so far: by tensors on the GPU, or else by the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    with open("/proc/self/status") as file:
        return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", file.read())[1])


def mean_of(rows, name):
    return statistics.mean(row[name] for row in rows)


def print_summary(all_rows):
    """Prints where the time of these rows goes: those of all epochs and processes."""
    # The first of several epochs is slower than the others.
    rows = [row for row in all_rows if row["epoch"] > all_rows[0]["epoch"]] or all_rows
    if not rows:
        return
    seconds = mean_of(rows, "seconds")
    print(f"\nwhere an epoch's {seconds:.2f} s go (mean over processes and later epochs)")
    for phase in PHASES:
        share = mean_of(rows, phase) / seconds
        print(f"{phase:9} {mean_of(rows, phase):8.3f} {share:4.0%}  {'#' * round(50 * share)}")
    print_communication(rows)
    peak = max(row["peak_MB"] for row in all_rows)
    print(f"peak memory {short(peak)} MB\n")

    names = ("script", "model", "dataset", "precision", "processes", "batch_size")
    cells = {name: str(rows[-1].get(name, "-")) for name in names}
    cells[METRIC] = short(rows[-1].get(METRIC, math.nan))
    for name in ("seconds", "samples/s", *PHASES, "comm_total"):
        cells[name] = short(mean_of(rows, name))
    cells["peak_MB"] = short(peak)
    for line in (cells.keys(), ["---"] * len(cells), cells.values()):
        print("|", " | ".join(line), "|")


def print_communication(rows):
    """Prints how much of the communication is sending, and how much is waiting for a late process.

    R says how many times as long a process computes as it sends. If nothing is hidden, N processes
    are N R / (1 + R) times as fast as one: 0.75 N at R = 3. If different processes are late in
    turn, some of the waiting for them counts as sending.
    """
    totals = []  # the mean comm_total of each process
    for rank in range(rows[0]["processes"]):
        totals.append(mean_of([row for row in rows if row["rank"] == rank], "comm_total"))
    # The process that comes last never waits in an all-reduce: all of its time is sending.
    sending = min(totals)
    if len(totals) == 1 or sending == 0:  # it is alone, or has resumed with no step left
        return
    waiting = mean_of(rows, "comm_total") - sending
    late = rows[totals.index(sending)]  # the rows begin with one for each rank, in order
    hidden = max(0.0, 1 - mean_of(rows, "comm") / mean_of(rows, "comm_total"))
    compute = mean_of(rows, "forward") + mean_of(rows, "backward") + mean_of(rows, "optimizer")
    pays = compute > 3 * sending
    verdict = "above 3: more processes pay off" if pays else "at most 3: more will hardly pay off"
    print(
        f"communication {sending + waiting:.3f} s, {hidden:.0%} hidden: sending {sending:.3f} s, "
        f"waiting {waiting:.3f} s for rank {late['rank']} on {late['host']}\n"
        f"R = compute / sending = {compute / sending:.1f}, {verdict}"
    )


if __name__ == "__main__":
    main(parse_args())
