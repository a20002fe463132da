r"""Train a GPT whose parameters are split over processes: FSDP, also known as ZeRO-3.

    torchrun --standalone --nproc_per_node=2 -- hybrid/gpt_fsdp.py
    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HEAD_NODE:29400 -- \
        hybrid/gpt_fsdp.py --shard_size 4 --precision bf16 --snapshot gpt.pt  # on each of two nodes
    sbatch --nodes=2 --gpus-per-node=4 slurm/hybrid_gpt_fsdp.slurm --checkpoint_activations

This is for a model that does not fit on one GPU. --shard_size processes share one copy of its
parameters, gradients and optimizer state. An all-gather brings the shards of a block together when
a pass needs them. A reduce-scatter adds up the gradients and leaves each process those of its
shard. Then an all-reduce averages them over the copies, as DDP does. With --grad_accum_steps this
is done for the last micro-batch alone, and a process holds all gradients until then. With bf16,
parameters are sent and used in bf16, and so is what blocks add up (the residual stream): under
multinode/gpt.py's autocast it is fp32. Norms and the loss are computed in fp32 in both. Snapshots
have the format of multinode/gpt.py. For them, rank 0 needs 16 bytes of RAM a parameter while it
loads and 12 while it saves, 112 GB and 84 GB for 7 billion parameters, and frees them afterwards.
Shapes: B sequences of a batch, T tokens of a sequence, D = d_model, H heads, V vocabulary.
"""

import argparse
import json
import math
import os
import re
import signal
import statistics
import sys
import sysconfig
import textwrap
import time
from datetime import timedelta
from functools import partial
from glob import glob

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.lib.stride_tricks import sliding_window_view
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

# ============================ Yours: flags, data, model, loss. Replace. ===========================

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

SHOWN = "epoch train_loss val_loss val_bpb val_ppl seconds tokens/s TFLOP/s of_matmul".split()
SAME_ON_RESUME = (
    "dataset vocab_size d_model n_heads num_layers seq_len batch_size learning_rate dropout "
    "precision seed"
).split()
SUMS = ("loss", "count")  # of an epoch, as a snapshot names them


class GPT(nn.Module):
    """Token ids (B, T) to logits (B x T, V) or, given the next ids (B, T), to their mean loss."""

    def __init__(self, args):
        super().__init__()
        self.embedding = nn.Embedding(args.vocab_size, args.d_model)
        self.positions = nn.Embedding(args.seq_len, args.d_model)
        self.dropout = nn.Dropout(args.dropout)
        self.blocks = nn.Sequential(*[GPTBlock(args) for _ in range(args.num_layers)])
        self.norm = nn.LayerNorm(args.d_model)
        for name, parameter in self.named_parameters():  # as GPT-2 (Radford et al. 2019)
            if parameter.dim() == 2:
                depth = 2 * args.num_layers if "projection" in name or "down" in name else 1
                nn.init.normal_(parameter, std=0.02 / depth**0.5)

    def forward(self, tokens, targets=None):
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]  # (B, T, D)
        x = self.norm(self.blocks(self.dropout(x)))
        logits = F.linear(x, self.embedding.weight).flatten(0, 1)  # the head is the embedding
        return logits if targets is None else F.cross_entropy(logits, targets.flatten())


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    world_size = int(os.environ.get("WORLD_SIZE", 0))  # 0: torchrun has not started this
    add("--shard_size", type=int, default=world_size, help="processes that share a copy")
    add("--checkpoint_activations", action="store_true", help="compute blocks twice, save memory")
    add("--dataset", default="stdlib", help="stdlib, a text file, or a folder of token ids")
    add("--vocab_size", type=int, default=0, help="token ids; 0: 256 for text, 50304 for a folder")
    add("--d_model", type=int, default=128, help="width of the network")
    add("--n_heads", type=int, default=4, help="attention heads")
    add("--num_layers", type=int, default=4, help="transformer blocks")
    add("--seq_len", type=int, default=128, help="tokens of a sequence")
    add("--dropout", type=float, default=0.0, help="dropout probability in and before the blocks")
    add("--epochs", type=int, default=1, help="passes over the training tokens")
    add("--max_steps", type=int, default=0, help="end each epoch after so many steps; 0: no limit")
    add("--batch_size", type=int, default=64, help="global batch: sequences per optimizer step")
    add("--learning_rate", type=float, default=1e-3, help="highest learning rate, after warm-up")
    add("--grad_accum_steps", type=int, default=1, help="micro-batches of a batch, to save memory")
    add("--precision", choices=DTYPES, default="fp32", help="number type; on GPUs fp32 means TF32")
    add("--compile", action="store_true", help="use torch.compile, which slows the first epoch")
    add("--seed", type=int, default=1, help="seed of weights, data order and dropout")
    add("--snapshot", metavar="FILE", help="save each epoch and when stopped; resume if it exists")
    add("--snapshot_every", type=int, default=0, help="also save every so many steps; 0: do not")
    add("--log", metavar="FILE.jsonl", help="append a row per epoch and process, for report.py")
    add("--timeout", type=int, default=600, help="seconds after which a hung process ends the run")
    args = parser.parse_args()
    args.vocab_size = args.vocab_size or (50304 if os.path.isdir(args.dataset) else 256)
    if world_size == 0:
        parser.error(f"start it with: torchrun --standalone --nproc_per_node=2 -- {sys.argv[0]}")
    if args.shard_size < 1 or world_size % args.shard_size:
        parser.error(f"--shard_size must divide the number of processes, {world_size}")
    shares = args.grad_accum_steps * world_size
    if min(args.batch_size, shares) < 1 or args.batch_size % shares:
        parser.error(f"--batch_size must be a multiple of {shares}: processes x --grad_accum_steps")
    if args.n_heads < 1 or args.d_model % args.n_heads:
        parser.error("--d_model must be a multiple of --n_heads")
    for path in filter(None, (args.snapshot, args.log)):
        if not os.path.isdir(os.path.dirname(path) or "."):
            parser.error(f"there is no folder for {path}")
    return args


def read_tokens(args):
    """Returns token ids to train on (N,) and to validate on (M,), of an unsigned type."""
    try:
        if os.path.isdir(args.dataset):  # mapped, not read: they may be larger than memory
            splits = []
            for name in ("train", "val"):
                path = os.path.join(args.dataset, name)
                if os.path.exists(f"{path}.bin"):
                    tokens = np.memmap(f"{path}.bin", np.uint16, "r")
                else:
                    tokens = np.load(f"{path}.npy", mmap_mode="r")
                if tokens.ndim != 1 or tokens.dtype.kind != "u":
                    raise ValueError(f"{name} has ids of shape {tokens.shape}, {tokens.dtype}")
                splits.append(tokens)
            return splits
        stdlib = sorted(glob(f"{sysconfig.get_path('stdlib')}/*.py"))  # about 5 MB
        paths = stdlib if args.dataset == "stdlib" else [args.dataset]
        text = np.concatenate([np.fromfile(path, np.uint8) for path in paths])
    except (OSError, ValueError) as error:
        sys.exit(f"cannot read {args.dataset}: {error}")
    num_val = min(len(text) // 10, 2**20)  # the last tenth, but at most 1 MiB
    return text[:-num_val], text[-num_val:]


def checked_ids(tokens, args):
    """Returns the token ids as int64. Ends the run if one of them is not below --vocab_size."""
    if tokens.size > 0 and tokens.max() >= args.vocab_size:
        sys.exit(f"{args.dataset}: id {tokens.max()} is not below --vocab_size {args.vocab_size}")
    return torch.from_numpy(tokens.astype(np.int64))


def batches(tokens, args, epoch, steps, device):
    """Yields a list of micro-batches for each step: token ids (B, T) and the next ids (B, T)."""
    sequences = sliding_window_view(tokens, args.seq_len + 1)[:: args.seq_len]  # (N, T + 1)
    order = np.random.default_rng((args.seed, epoch)).permutation(len(sequences))
    for step in steps:
        numbers = order[step * args.batch_size : (step + 1) * args.batch_size]
        numbers = numbers[dist.get_rank() :: dist.get_world_size()]
        batch = checked_ids(sequences[numbers], args)
        if device.type == "cuda":  # pinned memory: the CPU does not wait for the copy
            batch = batch.pin_memory().to(device, non_blocking=True)
        yield [(part[:, :-1], part[:, 1:]) for part in batch.chunk(args.grad_accum_steps)]


class GPTBlock(nn.Module):
    """A transformer block, (B, T, D) to (B, T, D), where a token sees itself and those before."""

    def __init__(self, args):
        super().__init__()
        d_model, self.n_heads = args.d_model, args.n_heads
        self.dropout = nn.Dropout(args.dropout)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.projection = nn.Linear(d_model, d_model, bias=False)
        self.up = nn.Linear(d_model, 4 * d_model, bias=False)
        self.down = nn.Linear(4 * d_model, d_model, bias=False)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(2, (3, self.n_heads, -1))  # (B, T, 3, H, D / H)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, D / H) each
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.projection(y))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


def token_loss(model, tokens, targets, args):
    """Returns the mean loss in nats, and the sums (2,) of losses and tokens."""
    with torch.autocast(tokens.device.type, DTYPES[args.precision], args.precision != "fp32"):
        loss = model(tokens, targets)
    count = torch.full_like(loss, targets.numel(), dtype=torch.float64)
    return loss, torch.stack((loss.detach() * count, count))


def create_optimizer(model, args):
    """Returns AdamW. The weights of matrices decay, those of vectors do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, args.learning_rate, (0.9, 0.99), weight_decay=0.1, fused=True)


def learning_rate(args, done):
    """Returns the learning rate when this share of all steps, 0 to 1, is done."""
    if done < 0.05:
        return args.learning_rate * 20 * done  # it rises to --learning_rate
    return args.learning_rate * (1.05 - done)  # and falls to a twentieth


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


class ShardTimer(Stopwatch):
    """Also times the collectives of FSDP, and counts the bytes of the shards."""

    def __init__(self, device, model, optimizer):
        super().__init__(device)
        self.optimizer = optimizer
        self.recent = []  # (start, end) of each collective since the last mark
        self.spans = []  # (start, end) of those in training steps since the last flush
        for module in (*model.blocks, model):
            timed_reduce_scatter = ReduceScatter(self)
            module.set_custom_all_gather(AllGather(self))
            module.set_custom_reduce_scatter(timed_reduce_scatter)
            module.set_all_reduce_hook(timed_reduce_scatter.note_end)

    def mark(self, phase):
        """Also takes the collectives of a forward or backward pass.

        On a CPU the pass waits for each of them: this time is taken out of the pass, and is comm.
        On a GPU the pass goes on meanwhile, and stays whole: only comm_total knows of them.
        """
        if phase in ("forward", "backward"):
            self.spans += self.recent
            if not self.cuda:
                for start, end in self.recent:
                    self.marks.append((phase, start))  # the pass goes on until here
                    self.marks.append(("comm", end))  # and then there is a collective
        self.recent.clear()
        super().mark(phase)

    def mark_all_reduce(self):
        """Marks the end of an all-reduce that nothing hides. It began at the last mark."""
        _, start = self.marks[-1]
        self.spans.append((start, self.now()))
        self.mark("comm")

    def flush(self):
        """Also adds the time in which any collective ran. Overlaps count once."""
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
        """Also returns the size of the shards of parameters, gradients and optimizer state."""
        row = super().take(num_samples)
        size = 0
        for parameter, state in self.optimizer.state.items():
            size += 2 * parameter.to_local().nbytes  # its gradient is as large
            for tensor in state.values():
                if tensor.dim() > 0:  # the number of steps is no shard
                    size += tensor.to_local().nbytes
        row["state_MB"] = size / 1e6
        return row


# Newer versions of torch deprecate the old names of these two.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class AllGather:
    """Brings the shards of a block together. FSDP calls allocate() and then the object itself."""

    def __init__(self, watch):
        self.watch = watch

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        start = self.watch.now()
        all_gather(output_tensor, input_tensor, group)
        self.watch.recent.append((start, self.watch.now()))


class ReduceScatter:
    """Adds up the gradients of a block, and times this together with their all-reduce.

    FSDP calls allocate() for the input, allocate() for the output, the object itself, and after the
    all-reduce note_end(). With --shard_size 1 it leaves out the object itself.
    """

    def __init__(self, watch):
        self.watch = watch

    def allocate(self, size, *, dtype, device):
        self.start = self.watch.now()  # that of the second call counts: now FSDP sends
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        reduce_scatter(output_tensor, input_tensor, op, group)

    def note_end(self, gradients):
        self.watch.recent.append((self.start, self.watch.now()))


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


def print_collectives(rows):
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
    compute = mean(rows, "forward") + mean(rows, "backward") + mean(rows, "optimizer")
    hidden = "0%"
    bound = ""
    if rows[0]["device"] != "CPU":  # passes include the communication that they wait for
        hidden = "-"  # so how much is hidden is not known
        bound = "at most "
    print(
        f"communication {sending + waiting:.3f} s, {hidden} hidden: sending {sending:.3f} s, "
        f"waiting {waiting:.3f} s for rank {late['rank']} on {late['host']}\n"
        f"R = compute / sending = {bound}{compute / sending:.1f}: above 3, more processes pay off"
    )


def print_shards(rows):
    """Prints the size of the largest shards, beside that of the theory: 16 bytes a parameter."""
    measured = max(row["state_MB"] for row in rows)
    theory = 16e-6 * rows[0]["parameters"] / rows[0]["shard_size"]
    print(f"parameters, gradients and optimizer state {measured:.1f} MB, in theory {theory:.1f} MB")


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


def matmul_speed(device, dtype):
    """Returns the FLOP/s that a plain matrix product reaches on this device, in a short test."""
    size = 8192 if device.type == "cuda" else 1024
    matrix = torch.rand(size, size, device=device).to(dtype)
    product = matrix @ matrix  # warm-up
    product[0, 0].item()  # waits for the GPU
    count = 0
    seconds = 0.0
    start = time.perf_counter()
    while seconds < 0.2:
        for _ in range(5):
            product = matrix @ matrix
        product[0, 0].item()
        count += 5
        seconds = time.perf_counter() - start
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # these matrices are not the model's
    return 2 * size**3 * count / seconds


def model_speed(row, reachable):
    """Returns tokens/s, the model's TFLOP/s a device, and what share of `reachable` they are.

    The FLOP of a token are those of Chowdhery et al. 2022, "PaLM", appendix B. Their MFU divides by
    the data sheet of the card, which a plain matmul does not reach: the share here is larger.
    """
    flops = 6 * row["parameters"] + 12 * row["num_layers"] * row["d_model"] * row["seq_len"]
    tokens_per_second = row["samples/s"] * row["seq_len"]
    speed = flops * tokens_per_second / row["processes"]
    return {
        "tokens/s": tokens_per_second,
        "TFLOP/s": speed / 1e12,
        "of_matmul": speed / reachable,
    }


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


def shard(model, args, device):
    """Leaves this process a shard of each block, and of what stands outside the blocks."""
    timeout = timedelta(seconds=args.timeout)  # init_device_mesh() would not take it
    ranks = torch.arange(dist.get_world_size()).view(-1, args.shard_size)  # (copies, shards)
    same_shard, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout)
    same_copy, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout)
    mesh = DeviceMesh.from_group(
        [same_shard, same_copy],
        device.type,
        mesh=ranks,
        mesh_dim_names=("copy", "shard"),  # FSDP keeps copies along the first dimension
    )
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[args.precision],
        reduce_dtype=torch.float32,
    )
    for block in model.blocks:
        if args.compile:
            block.forward = torch.compile(block.forward)
        if args.checkpoint_activations:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def load_parts(args):
    """Returns the full model, its optimizer and scaler, and the progress of the run."""
    torch.manual_seed(args.seed)
    model = GPT(args)
    optimizer = create_optimizer(model, args)
    scaler = torch.amp.GradScaler(enabled=False)  # snapshots of multinode/gpt.py have one
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    return parts, load_snapshot(args, parts)


def scatter_parts(parts, progress, model, optimizer):
    """Gives each process its shards of `parts`, which only rank 0 has."""
    resumed = progress["epoch"] > 0 or progress["step"] > 0  # a new optimizer has no state
    weights = {}
    moments = {}
    if dist.get_rank() == 0:
        weights = parts["model"].state_dict()
        if resumed:
            moments = dcp.get_optimizer_state_dict(parts["model"], parts["optimizer"])
    options = dcp.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dcp.set_model_state_dict(model, weights, options=options)
    if resumed:
        dcp.set_optimizer_state_dict(model, optimizer, moments, options=options)


def save_shards(args, model, optimizer, progress):
    """Brings the shards of all processes together in rank 0, which saves them."""
    if not args.snapshot:
        return
    options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = dcp.get_state_dict(model, optimizer, options=options)
    if dist.get_rank() > 0:
        return
    with torch.device("meta"):  # takes no memory
        full_model = GPT(args)
    full_model.load_state_dict(weights, assign=True)
    full_optimizer = create_optimizer(full_model, args)
    full_optimizer.load_state_dict(moments)  # its state_dict() has numbers instead of names
    scaler = torch.amp.GradScaler(enabled=False)
    parts = {"model": full_model, "optimizer": full_optimizer, "scaler": scaler}
    save_snapshot(args, parts, progress)


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


def gpt_row(settings, progress, val_sums):
    """Returns settings and losses of an epoch, for the log."""
    train_loss, train_count = progress["sums"].values()
    val_loss, val_count = val_sums.tolist()
    row = settings | {"run": progress["run_id"], "epoch": progress["epoch"]}
    row |= {"train_loss": train_loss / train_count, "val_loss": val_loss / val_count}
    row["val_bpb"] = row["val_loss"] / math.log(2)  # bits per byte
    if os.path.isdir(row["dataset"]):  # its tokens are not bytes
        row["val_bpb"] = math.nan
    row["val_ppl"] = math.exp(min(row["val_loss"], 100))
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
    device = find_device(int(os.environ["LOCAL_RANK"]))
    setup(args, rank, world_size, "env://", device)
    patient = dist.new_group(backend="gloo", timeout=timedelta(days=1))  # to wait for rank 0
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # on GPUs, fp32 layers compute in TF32
    train_tokens, val_tokens = read_tokens(args)
    num_steps = (len(train_tokens) - 1) // args.seq_len // args.batch_size
    if num_steps < 1 or len(val_tokens) <= args.seq_len * world_size:
        sys.exit(f"{args.dataset} is too short for this --seq_len and --batch_size")
    if args.max_steps > 0:
        num_steps = min(num_steps, args.max_steps)
    val_tokens = checked_ids(val_tokens, args).to(device)
    val_split = val_tokens.unfold(0, args.seq_len + 1, args.seq_len)  # (M, T + 1)
    # All processes need the same number of validation batches: FSDP's collectives wait for all.
    micro_batch = args.batch_size // args.grad_accum_steps
    num_batches = max(1, len(val_split) // micro_batch)
    val_batches = []
    for part in val_split[rank::world_size].tensor_split(num_batches):
        val_batches.append((part[:, :-1], part[:, 1:]))

    with torch.device("meta"):  # it takes no memory, until the process has its shards
        model = GPT(args)
    shard(model, args, device)
    model.to_empty(device=device)
    optimizer = create_optimizer(model, args)
    parts = None  # the full model, which only rank 0 builds or loads
    message = [None]  # what rank 0 tells the others
    if rank == 0:
        parts, progress = load_parts(args)
        message = [progress]
    dist.broadcast_object_list(message, group=patient)
    progress = message[0]
    scatter_parts(parts, progress, model, optimizer)
    del parts  # it is as large as the full model and its moments
    speed = matmul_speed(device, DTYPES[args.precision])  # before the watch starts
    watch = ShardTimer(device, model, optimizer)
    watch.matmul_speed = speed  # for model_speed()

    settings = vars(args) | {
        "model": f"gpt-{args.num_layers}x{args.d_model}",
        "script": "hybrid/gpt_fsdp.py",
        "processes": world_size,
        "nodes": nodes,
        "rank": rank,
        "host": os.uname().nodename,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "comm_hook": "none",
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
        loader = batches(train_tokens, args, epoch, steps, device)
        # Each process begins with an equal share of the sums so far. add_up() adds them up.
        shares = [progress["sums"].get(name, 0.0) / world_size for name in SUMS]
        sums = torch.tensor(shares, dtype=torch.float64, device=device)
        bar = tqdm(loader, f"epoch {epoch}", num_steps, initial=first_step, disable=rank > 0, **BAR)
        model.train()
        for micro_batches in bar:
            # A resumed run draws the same dropout: numbers have the same hash in every run.
            torch.manual_seed(hash((args.seed, epoch, progress["step"], rank)))
            watch.mark("data")
            for number, (tokens, targets) in enumerate(micro_batches, start=1):
                model.set_requires_gradient_sync(number == args.grad_accum_steps)
                loss, loss_sums = token_loss(model, tokens, targets, args)
                sums = sums + loss_sums
                watch.mark("forward")
                (loss / args.grad_accum_steps).backward()
                watch.mark("backward")
            done = (epoch + (progress["step"] + 1) / num_steps) / args.epochs
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(args, done)
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            watch.mark("optimizer")
            norm = norm.full_tensor()  # an all-reduce: the norm of the gradients of all shards
            watch.mark_all_reduce()
            nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
            optimizer.step()
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
                    save_shards(args, model, optimizer, progress)
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
                loss_sum, count = progress["sums"].values()
                bar.set_postfix(train_loss=loss_sum / count, refresh=False)
        if stop:
            break

        val_sums = evaluate(token_loss, model, val_batches, args)
        dist.all_reduce(val_sums)
        watch.mark("eval")
        watch.flush()
        row = gpt_row(settings, progress, val_sums)
        row |= watch.take(len(steps) * args.batch_size)
        row |= model_speed(row, watch.matmul_speed)
        epoch_rows = [None] * world_size
        dist.all_gather_object(epoch_rows, row)
        progress |= {"epoch": epoch + 1, "step": 0, "sums": {}}
        if rank == 0:
            rows += epoch_rows
            print(*(f"{cell(row.get(name, math.nan)):>10}" for name in SHOWN))
            if args.log:
                with open(args.log, "a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in epoch_rows)
    if not stop:  # complete
        save_shards(args, model, optimizer, progress)
    if rows:  # the summary
        print_breakdown(rows)
        print_collectives(rows)
        print_shards(rows)
        print_row(rows, "val_loss")
    dist.barrier(patient)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
