r"""Train a convolutional autoencoder on the GPUs of many nodes, or on CPU processes without a GPU.

    torchrun --standalone --nproc_per_node=2 -- multinode/autoencoder.py      # one node, to try it
    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HEAD_NODE:29400 -- \
        multinode/autoencoder.py --dataset mnist --snapshot auto.pt           # on each of two nodes
    sbatch --nodes=4 --gpus-per-node=4 slurm/multinode_autoencoder.slurm --dataset mnist

torchrun starts a process for each GPU. The bare -- keeps it from taking --log for its own option.
To train on your own images, replace read_pixels and create_model.
Shapes: N images of a split, B of a batch, C channels, H height, W width.
"""

import argparse
import json
import os
import signal
import sys
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torchvision import datasets
from torchvision.utils import save_image
from tqdm import tqdm

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PHASES = ("data", "forward", "backward", "comm", "optimizer", "eval", "save")
SAME_ON_RESUME = ("dataset", "batch_size", "learning_rate", "precision", "seed")
LOGGED = (*SAME_ON_RESUME, "grad_accum_steps", "compile", "epochs", "max_steps")
COMM_HOOKS = {
    "none": default_hooks.allreduce_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
}
SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)  # each asks the run to save and stop
ARRIVED = []  # the signals that this process has received


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
    add("--precision", choices=DTYPES, default="fp32", help="number type of the forward pass")
    add("--comm_hook", choices=COMM_HOOKS, default="none", help="send gradients in this type")
    add("--compile", action="store_true", help="use torch.compile, which slows the first epoch")
    add("--seed", type=int, default=1, help="seed of weights and data order")
    add("--snapshot", metavar="FILE", help="save each epoch and when stopped; resume if it exists")
    add("--snapshot_every", type=int, default=0, help="also save every so many steps; 0: do not")
    add("--log", metavar="FILE.jsonl", help="append a row per epoch and process, for report.py")
    add("--reconstructions", metavar="FILE.png", help="draw 16 images above their reconstructions")
    add("--timeout", type=int, default=600, help="seconds to wait for a process that hangs")
    args = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        parser.error(f"start it with: torchrun --standalone --nproc_per_node=2 -- {sys.argv[0]}")
    shares = args.grad_accum_steps * int(os.environ["WORLD_SIZE"])
    if min(args.batch_size, shares) < 1 or args.batch_size % shares:
        parser.error(f"--batch_size must be a multiple of {shares}: processes x --grad_accum_steps")
    return args


def synthetic_images(num_images):
    """Ten smooth random patterns, one for each class, under noise."""
    patterns = torch.rand(10, 1, 7, 7, generator=torch.Generator().manual_seed(0))
    patterns = nn.functional.interpolate(patterns, size=28, mode="bilinear")  # (K, C, H, W)
    generator = torch.Generator().manual_seed(num_images)
    labels = torch.randint(10, (num_images,), generator=generator)
    noise = torch.randint(176, (num_images, 1, 28, 28), dtype=torch.uint8, generator=generator)
    return ((80 * patterns[labels]).byte() + noise).numpy(), labels.numpy()


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


class CommTimer(Stopwatch):
    """Also times the all-reduces. DDP calls hook() for each bucket (set) of gradients."""

    def __init__(self, device, comm_hook):
        super().__init__(device)
        self.comm_hook, self.spans, self.ready, self.buckets = comm_hook, [], [], []
        self.stream = torch.cuda.Stream(priority=-1) if self.cuda else None

    def hook(self, group, bucket):
        start = self.backward_end = self.now()  # the last bucket: the backward pass is done
        self.ready = self.ready[: bucket.index()] + [(bucket.buffer().nbytes, start)]  # this step's

        def sent(future):
            self.spans.append((start, self.now()))
            return future.value()

        if self.cuda:  # on a separate stream, so that the backward pass does not wait
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            return self.comm_hook(group, bucket).then(sent)

    def read(self, phase):
        """Also adds the time in which any all-reduce ran. Overlaps count once."""
        origin, covered = self.last, 0.0
        super().read(phase)
        spans = [[self.between(origin, at) for at in span] for span in self.spans]
        for start, end in sorted(spans):
            self.seconds["comm_total"] += max(0.0, end - max(start, covered))
            covered = max(covered, end)
        self.spans.clear()
        self.buckets[:] = [[size, self.between(at, self.backward_end)] for size, at in self.ready]


def setup(args, rank, world_size, init_method):
    """Joins the process group. Returns the device of this process."""
    backend, device = "gloo", torch.device("cpu")
    if torch.cuda.is_available():
        backend, device = "nccl", torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method,
        timedelta(seconds=args.timeout),
        world_size,
        rank,
        device_id=device if backend == "nccl" else None,
    )
    return device


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


def reconstruction_loss(model, images, args):
    """Returns the mean squared error of pixels in 0..1, and the sums (2,) of losses and images."""
    images = images.float() / 255
    with torch.autocast(images.device.type, DTYPES[args.precision], args.precision != "fp32"):
        loss = nn.functional.mse_loss(model(images), images)
    count = torch.full_like(loss, len(images))
    return loss, torch.stack((loss.detach() * count, count)).double()


@torch.no_grad()
def evaluate(batch_loss, model, loader, args):
    """Returns the sums that batch_loss gives, added up over all batches."""
    model.eval()
    return sum(batch_loss(model, *batch, args)[1] for batch in loader)


def autoencoder_row(settings, progress, val_sums, seconds, num_samples):
    """Returns the row of the log for one epoch and process. Times are in seconds."""
    row = settings | {"run": progress["run"], "epoch": progress["epoch"]}
    for split, (loss, count) in ("train", progress["sums"]), ("val", val_sums.tolist()):
        row[f"{split}_loss"] = loss / count
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


@torch.no_grad()
def save_reconstructions(model, images, path):
    """Writes a picture of images (B, C, H, W) above their reconstructions."""
    model.eval()
    images = images.float() / 255
    save_image(torch.cat((images, model(images))), path, nrow=len(images))


def main(args):
    for signum in SIGNALS:
        signal.signal(signum, lambda number, frame: ARRIVED.append(number))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    nodes = world_size // int(os.environ["LOCAL_WORLD_SIZE"])
    if nodes == 1:
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # this machine only
    device = setup(args, rank, world_size, "env://")
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # on GPUs, fp32 layers compute in TF32
    torch.backends.cudnn.benchmark = True
    if rank > 0:
        dist.barrier()  # rank 0 comes first and downloads what is missing
    train_images = read_pixels(args, "train").to(device)
    val_images = read_pixels(args, "test").to(device)
    val_batches = list(zip(val_images[rank::world_size].split(128)))
    if rank == 0:
        dist.barrier()
    num_steps = min(len(train_images) // args.batch_size, args.max_steps or sys.maxsize)
    if num_steps == 0:
        sys.exit(f"--batch_size {args.batch_size} is larger than the training split")

    torch.manual_seed(args.seed)
    model = create_model(train_images.shape[1]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    progress = load_snapshot(args, parts)
    places = [None] * world_size
    dist.all_gather_object(places, (progress["epoch"], progress["step"]))
    if len(set(places)) > 1:
        sys.exit(f"the nodes see different files {args.snapshot}: use a shared file system")
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    watch = CommTimer(device, COMM_HOOKS[args.comm_hook])
    ddp_model.register_comm_hook(None, watch.hook)
    if args.compile:
        ddp_model.compile()

    settings = {name: getattr(args, name) for name in LOGGED} | {
        "script": "multinode/autoencoder.py",
        "processes": world_size,
        "nodes": nodes,
        "rank": rank,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "comm_hook": args.comm_hook,
        "model": "conv",
        "buckets": watch.buckets,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    if rank == 0:
        print(
            "{script}: {model}, {parameters:,} parameters; {dataset}, ".format_map(settings)
            + f"{len(train_images):,} + {len(val_images):,} images"
        )
        print(
            "processes {processes}, nodes {nodes}, {device}, threads {threads}; global batch "
            "{batch_size}; {precision}; torch {torch}".format_map(settings)
        )
        print("starting at epoch {epoch}, step {step}:".format_map(progress))
        print("epoch  train_loss  val_loss  seconds  samples/s")
    rows, stop = [], 0
    while progress["epoch"] < args.epochs:
        epoch, first_step = progress["epoch"], progress["step"]
        loader = batches(train_images, args, epoch, range(first_step, num_steps))
        sums = torch.tensor(progress["sums"], dtype=torch.float64, device=device) / world_size
        model.train()
        for micro_batches in tqdm(
            loader,
            f"epoch {epoch}",
            num_steps,
            initial=first_step,
            leave=False,
            disable=True if rank else None,
        ):
            watch.mark("data")
            for number, images in enumerate(micro_batches, start=1):
                last = number == args.grad_accum_steps
                ddp_model.require_backward_grad_sync = last  # as ddp_model.no_sync() does
                loss, loss_sums = reconstruction_loss(ddp_model, images, args)
                sums = sums + loss_sums
                watch.mark("forward")
                scaler.scale(loss / args.grad_accum_steps).backward()
                watch.mark("backward", at=watch.backward_end if last else None)
            watch.mark("comm")  # communication that the backward pass did not hide
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            watch.mark("optimizer")

            progress["step"] += 1
            save = args.snapshot_every and progress["step"] % args.snapshot_every == 0
            if save or progress["step"] % 8 == 0 or progress["step"] == num_steps:
                totals = torch.cat((sums, sums.new_full((1,), len(ARRIVED))))
                dist.all_reduce(totals)  # adds up the shares of resumed sums, too
                *progress["sums"], stop = totals.tolist()
                watch.read("comm")
                if not totals.isfinite().all():
                    sys.exit(f"the loss is not finite in epoch {epoch}, step {progress['step']}")
                if rank == 0 and (save or stop):
                    save_snapshot(args, parts, progress)
                    watch.mark("save")
                if stop:
                    break
        if stop:
            break

        val_sums = evaluate(reconstruction_loss, model, val_batches, args)
        dist.all_reduce(val_sums)
        watch.read("eval")
        num_samples = max(0, num_steps - first_step) * args.batch_size
        row = autoencoder_row(settings, progress, val_sums, watch.seconds, num_samples)
        epoch_rows = [None] * world_size
        dist.all_gather_object(epoch_rows, row)
        epoch_rows = [each | {"run": epoch_rows[0]["run"]} for each in epoch_rows]
        rows += epoch_rows
        watch.seconds = dict.fromkeys(watch.seconds, 0.0)
        progress |= {"epoch": epoch + 1, "step": 0, "sums": 0.0}
        if rank == 0:
            print(
                "{epoch:5}  {train_loss:10.5f}  {val_loss:8.5f}  {seconds:7.2f}  {samples/s:9.0f}".format_map(
                    row
                )
            )
            if args.log:
                with open(args.log, "a") as file:
                    file.writelines(json.dumps(each) + "\n" for each in epoch_rows)
            save_snapshot(args, parts, progress)
        watch.mark("save")
    if rows and rank == 0:
        means = print_summary(rows[world_size:] or rows, "val_loss")
        print(
            f"{means['hidden']:.0%} of the communication is hidden behind the backward pass\n"
            f"R = compute / communication = {means['R']:.1f}: above 3, more processes pay off"
        )
    if args.reconstructions and rank == 0 and not stop:
        save_reconstructions(model, val_images[:16], args.reconstructions)
    dist.barrier()  # rank 0 may still be saving
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
