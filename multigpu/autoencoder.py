"""Train a convolutional autoencoder on all GPUs of a node, or on two CPU processes without a GPU.

    python multigpu/autoencoder.py                                 # synthetic images: no download
    python multigpu/autoencoder.py --num_gpus 4 --dataset mnist --reconstructions mnist.png
    python multigpu/autoencoder.py --precision bf16 --snapshot auto.pt  # run it again: it resumes
    sbatch slurm/multigpu_autoencoder.slurm --dataset mnist --epochs 3

`diff singlegpu/autoencoder.py multigpu/autoencoder.py` shows what is new.
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
import tempfile
import textwrap
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torchvision import datasets
from torchvision.utils import save_image
from tqdm import tqdm

# ============================ Yours: flags, data, model, loss. Replace. ===========================

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

SHOWN = "epoch train_loss val_loss seconds samples/s".split()
SAME_ON_RESUME = ("dataset", "batch_size", "learning_rate", "precision", "seed")

COMM_HOOKS = {
    "none": default_hooks.allreduce_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
}


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--num_gpus", type=int, default=torch.cuda.device_count() or 2, help="processes to start")
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
    add("--comm_hook", choices=COMM_HOOKS, default="none", help="type in which gradients are sent")
    add("--compile", action="store_true", help="use torch.compile, which slows the first epoch")
    add("--seed", type=int, default=1, help="seed of weights and data order")
    add("--snapshot", metavar="FILE", help="save each epoch and when stopped; resume if it exists")
    add("--snapshot_every", type=int, default=0, help="also save every so many steps; 0: do not")
    add("--log", metavar="FILE.jsonl", help="append a row per epoch and process, for report.py")
    add("--reconstructions", metavar="FILE.png", help="draw 16 images above their reconstructions")
    add("--timeout", type=int, default=600, help="seconds after which a hung process ends the run")
    args = parser.parse_args()
    shares = args.num_gpus * args.grad_accum_steps
    if min(args.batch_size, shares) < 1 or args.batch_size % shares:
        parser.error(f"--batch_size must be a multiple of {shares}: processes x --grad_accum_steps")
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
        share = slice(start + dist.get_rank(), end, dist.get_world_size())
        yield images[order[share]].chunk(args.grad_accum_steps)


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


def setup(args, rank, world_size, init_method, device):
    """Joins the process group."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process without a traceback
    timeout = timedelta(seconds=args.timeout)
    backend, device_id = "gloo", None
    if device.type == "cuda":
        backend, device_id = "nccl", device
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method, timeout, world_size, rank, device_id=device_id)


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


def add_up(sums, since):
    """Adds up over processes. Returns the sums, whether one was asked to stop, mean seconds."""
    local_sums = sums.tolist()  # waits for the GPU, before the time is taken
    seconds = time.perf_counter() - since
    totals = sums.new_tensor([*local_sums, len(STOP_REQUESTS), seconds])
    dist.all_reduce(totals)
    *total_sums, stop_requests, total_seconds = totals.tolist()
    return total_sums, stop_requests > 0, total_seconds / dist.get_world_size()


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


def main(rank, args, init_method):
    world_size = args.num_gpus
    device = find_device(rank)
    setup(args, rank, world_size, init_method, device)
    patient = dist.new_group(backend="gloo", timeout=timedelta(days=1))  # to wait for rank 0
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # on GPUs, fp32 layers compute in TF32
    torch.backends.cudnn.benchmark = True
    train_images = read_pixels(args, "train").to(device)
    val_images = read_pixels(args, "test").to(device)
    val_batches = [(images,) for images in val_images[rank::world_size].split(128)]
    num_steps = len(train_images) // args.batch_size
    if num_steps == 0 or len(val_images) < world_size:
        sys.exit(f"{args.dataset} is too small for --batch_size or for {world_size} processes")
    if args.max_steps > 0:
        num_steps = min(num_steps, args.max_steps)

    torch.manual_seed(args.seed)
    model = create_model(train_images.shape[1]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    progress = load_snapshot(args, parts)
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    comm_hook = COMM_HOOKS[args.comm_hook]
    watch = CommTimer(device, comm_hook)
    comm_hook = watch.hook  # calls it, and notes the time
    ddp_model.register_comm_hook(None, comm_hook)
    if args.compile:
        ddp_model.compile()

    settings = vars(args) | {
        "model": "conv",
        "script": "multigpu/autoencoder.py",
        "processes": world_size,
        "nodes": 1,
        "rank": rank,
        "host": os.uname().nodename,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
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
        steps = range(first_step, num_steps)
        last_check = first_step
        next_check = first_step + 1
        since = time.perf_counter()
        loader = batches(train_images, args, epoch, steps)
        # Each process begins with its share of the sums so far, or 0.0. add_up() adds them up.
        sums = torch.tensor(progress["sums"], dtype=torch.float64, device=device) / world_size
        bar = tqdm(loader, f"epoch {epoch}", num_steps, initial=first_step, disable=rank > 0, **BAR)
        model.train()
        for micro_batches in bar:
            watch.mark("data")
            for number, images in enumerate(micro_batches, start=1):
                is_last = number == args.grad_accum_steps
                ddp_model.require_backward_grad_sync = is_last  # as no_sync() does
                loss, loss_sums = reconstruction_loss(ddp_model, images, args)
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
                if not all(map(math.isfinite, progress["sums"])):
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
                loss_sum, count = progress["sums"]
                bar.set_postfix(train_loss=loss_sum / count, refresh=False)
        if stop:
            break

        val_sums = evaluate(reconstruction_loss, model, val_batches, args)
        dist.all_reduce(val_sums)
        watch.mark("eval")
        watch.flush()
        row = autoencoder_row(settings, progress, val_sums)
        row |= watch.take(len(steps) * args.batch_size)
        epoch_rows = [None] * world_size
        dist.all_gather_object(epoch_rows, row)
        for process_row in epoch_rows:
            process_row["run"] = epoch_rows[0]["run"]  # each process has made up its own
        progress |= {"epoch": epoch + 1, "step": 0, "sums": 0.0}
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
        print_row(rows, "val_loss")
    dist.barrier(patient)
    dist.destroy_process_group()
    if args.reconstructions and rank == 0 and not stop:
        save_reconstructions(model, val_images[:16], args.reconstructions)
    if stop:
        sys.exit(128 + max(STOP_REQUESTS, default=signal.SIGTERM))  # default: another one was asked


def launch_autoencoder(args):
    """Starts the processes, passes stop signals on, and exits with their exit status."""
    find_device(args.num_gpus - 1)  # a wrong number ends here, not in each process
    read_pixels(args, "train")  # so that missing data is downloaded once
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // args.num_gpus)))
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # this machine only
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(main, (args, f"file://{folder}/store"), args.num_gpus, join=False)

        def pass_on(signum, frame):
            for process in context.processes:
                if process.is_alive():
                    os.kill(process.pid, signum)

        for signum in SIGNALS:
            signal.signal(signum, pass_on)
        try:
            while not context.join(grace_period=5):
                pass
        except mp.ProcessExitedException as error:
            sys.exit(error.exit_code if error.exit_code > 0 else str(error))


if __name__ == "__main__":
    launch_autoencoder(parse_args())
