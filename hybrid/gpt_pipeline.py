r"""Train a GPT whose blocks are split over a pipeline of processes, in one or many pipelines.

    torchrun --standalone --nproc_per_node=2 -- hybrid/gpt_pipeline.py             # one pipeline
    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HEAD_NODE:29400 -- \
        hybrid/gpt_pipeline.py --num_stages 4 --num_microbatches 16    # on each of two nodes
    sbatch --nodes=2 --gpus-per-node=4 slurm/hybrid_gpt_pipeline.slurm --num_microbatches 16

This is for a model that does not fit on one GPU. A process holds a stage: an equal part of the
blocks. A batch passes through the stages in micro-batches, so that all stages work at the same
time. A stage waits while the first micro-batch is on its way to it, and while the last ones are in
other stages. This is the bubble: (p - 1) / (m + p - 1) of the time with p stages and m micro-
batches (Huang et al. 2019, "GPipe"). Each pipeline has its share of the batch, and all-reduces add
up their gradients. The head is the embedding: the first and the last stage hold a copy each. A
process first builds or loads the full model on its CPU, and rank 0 keeps it there, to save it.
Snapshots have the format of multinode/gpt.py: each resumes the other's.
Shapes: B sequences of a micro-batch, m micro-batches of a batch in a pipeline, T tokens of a
sequence, D = d_model, H heads, V vocabulary.
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
from glob import glob

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.lib.stride_tricks import sliding_window_view
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from tqdm import tqdm

# ============================ Yours: flags, data, model, loss. Replace. ===========================

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
IGNORED = -100  # a target that the loss does not count

SHOWN = "epoch train_loss val_loss val_bpb val_ppl seconds tokens/s TFLOP/s of_matmul".split()
SAME_ON_RESUME = (
    "dataset vocab_size d_model n_heads num_layers seq_len batch_size learning_rate dropout "
    "precision seed"
).split()
SUMS = ("loss", "count")  # of an epoch, as a snapshot names them


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--num_stages", type=int, default=2, help="processes of a pipeline")
    add("--num_microbatches", type=int, default=4, help="micro-batches of a batch in a pipeline")
    add("--schedule", choices=SCHEDULES, default="1f1b", help="1f1b holds fewer activations")
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
    add("--precision", choices=DTYPES, default="fp32", help="number type; on GPUs fp32 means TF32")
    add("--seed", type=int, default=1, help="seed of weights, data order and dropout")
    add("--snapshot", metavar="FILE", help="save each epoch and when stopped; resume if it exists")
    add("--snapshot_every", type=int, default=0, help="also save every so many steps; 0: do not")
    add("--log", metavar="FILE.jsonl", help="append a row per epoch and process, for report.py")
    add("--timeout", type=int, default=600, help="seconds after which a hung process ends the run")
    args = parser.parse_args()
    args.vocab_size = args.vocab_size or (50304 if os.path.isdir(args.dataset) else 256)
    if "WORLD_SIZE" not in os.environ:
        parser.error(f"start it with: torchrun --standalone --nproc_per_node=2 -- {sys.argv[0]}")
    world_size = int(os.environ["WORLD_SIZE"])
    if args.num_stages < 2 or world_size % args.num_stages or args.num_layers % args.num_stages:
        parser.error("--num_stages must be 2 or more, and divide the processes and --num_layers")
    if args.num_microbatches < 1:
        parser.error("--num_microbatches must be at least 1")
    if args.schedule == "1f1b" and args.num_microbatches < args.num_stages:
        parser.error("--num_microbatches must be at least --num_stages, or --schedule gpipe")
    shares = args.num_microbatches * (world_size // args.num_stages)
    if args.batch_size < 1 or args.batch_size % shares:
        parser.error(f"--batch_size must be a multiple of {shares}: micro-batches x pipelines")
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
    """Yields this pipeline's batch for each step: token ids (m B, T) and the next ids (m B, T)."""
    sequences = sliding_window_view(tokens, args.seq_len + 1)[:: args.seq_len]  # (N, T + 1)
    order = np.random.default_rng((args.seed, epoch)).permutation(len(sequences))
    pipeline = dist.get_rank() // args.num_stages
    num_pipelines = dist.get_world_size() // args.num_stages
    for step in steps:
        numbers = order[step * args.batch_size : (step + 1) * args.batch_size]
        numbers = numbers[pipeline::num_pipelines]
        batch = checked_ids(sequences[numbers], args)
        if device.type == "cuda":  # pinned memory: the CPU does not wait for the copy
            batch = batch.pin_memory().to(device, non_blocking=True)
        yield batch[:, :-1], batch[:, 1:]


def validation_batches(tokens, args, device):
    """Returns this pipeline's batches: token ids (m B, T) and the next ids (m B, T) of each.

    A pipeline takes batches of one size only, so the last one is filled up with IGNORED targets.
    """
    pipeline = dist.get_rank() // args.num_stages
    num_pipelines = dist.get_world_size() // args.num_stages
    tokens = checked_ids(tokens, args).to(device)
    sequences = tokens.unfold(0, args.seq_len + 1, args.seq_len)[pipeline::num_pipelines]
    size = args.batch_size // num_pipelines
    missing = -len(sequences) % size  # up to a multiple of size
    inputs = F.pad(sequences[:, :-1], (0, 0, 0, missing))  # adds rows at the end
    targets = F.pad(sequences[:, 1:], (0, 0, 0, missing), value=IGNORED)
    return list(zip(inputs.split(size), targets.split(size)))


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


class Stage(nn.Module):
    """Some blocks of a GPT, (B, T, D) to (B, T, D). With one stage it is the full GPT.

    The first stage takes token ids (B, T). The last one has the head and gives logits (B, T, V).
    """

    def __init__(self, args, number, num_stages):
        super().__init__()
        self.dtype = DTYPES[args.precision]
        self.batch_tokens = args.batch_size * args.seq_len  # of all pipelines
        self.is_first = number == 0
        self.is_last = number == num_stages - 1
        if self.is_first or self.is_last:
            self.embedding = nn.Embedding(args.vocab_size, args.d_model)
        if self.is_first:
            self.positions = nn.Embedding(args.seq_len, args.d_model)
            self.dropout = nn.Dropout(args.dropout)
        self.blocks = nn.Sequential()
        size = args.num_layers // num_stages
        for block_number in range(number * size, (number + 1) * size):
            self.blocks.add_module(str(block_number), GPTBlock(args))  # its name in the full GPT
        if self.is_last:
            self.norm = nn.LayerNorm(args.d_model)
        for name, parameter in self.named_parameters():  # as GPT-2 (Radford et al. 2019)
            if parameter.dim() == 2:
                depth = 2 * args.num_layers if "projection" in name or "down" in name else 1
                nn.init.normal_(parameter, std=0.02 / depth**0.5)

    def forward(self, x):
        with torch.autocast(x.device.type, self.dtype, self.dtype != torch.float32):
            if self.is_first:
                x = self.dropout(self.embedding(x) + self.positions.weight)
            elif torch.is_grad_enabled():
                x.requires_grad_()  # torch 2.11 forgets it if the run began with a validation
            x = self.blocks(x)
            if self.is_last:
                x = F.linear(self.norm(x), self.embedding.weight)  # the head is the embedding
            return x

    def loss(self, logits, targets):
        """Returns a micro-batch's part of the mean loss of a batch. The gradients just add up."""
        logits = logits.float().flatten(0, 1)
        targets = targets.flatten()
        loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        return loss / self.batch_tokens


def run_batch(run, stage, tokens, targets):
    """Passes a batch through the pipeline with `run`, the step or eval of its schedule.

    Returns the sums (2,) of losses and tokens. Only the last stage knows them, others return zeros.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=targets.device)
    if stage.is_first:
        run(tokens.contiguous(), return_outputs=False)  # torch 2.11 insists on it
    elif stage.is_last:
        losses = []  # run() appends those of the micro-batches
        run(target=targets, losses=losses, return_outputs=False)
        mean_loss = sum(losses).detach()  # stage.loss() returns parts of it
        sums[0] = mean_loss * stage.batch_tokens
        sums[1] = (targets != IGNORED).sum()
    else:
        run(return_outputs=False)
    return sums


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

# bubble: waiting for other stages, and for what they send
PHASES = ("data", "forward", "backward", "bubble", "comm", "optimizer", "eval", "save")


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


class PipelineTimer(Stopwatch):
    """Also times the passes of micro-batches, the bubble between them, and the all-reduces."""

    def __init__(self, device):
        super().__init__(device)
        self.spans = []  # (start, end) of each all-reduce since the last flush
        self.zero = torch.zeros(1, device=device)
        self.stream = torch.cuda.Stream() if self.cuda else None

    def timed(self, function, phase):
        """Returns the function with marks: its time is the phase, the time before it is bubble."""

        def timed_function(*args, **kwargs):
            if not torch.is_grad_enabled():  # a validation is one phase
                return function(*args, **kwargs)
            self.mark("bubble")
            output = function(*args, **kwargs)
            self.mark(phase)
            return output

        return timed_function

    def mark_bubble(self, pipeline_group):
        """Waits for the other stages, so that this time is not taken for communication.

        dist.barrier() would do, but makes the CPU wait for its GPU. This all-reduce does not.
        """
        dist.all_reduce(self.zero, group=pipeline_group)
        self.mark("bubble")

    def note_all_reduce(self, work):
        """Notes the time from now to the end of an all-reduce that has just been started.

        On a GPU a stream of its own waits for the end, so that the model's stream goes on.
        """
        start = self.now()

        def note_end(future):  # called when the all-reduce has ended
            self.spans.append((start, self.now()))

        with torch.cuda.stream(self.stream):  # on a CPU there is none
            work.get_future().then(note_end)

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


def print_pipelines(rows):
    """Prints what part of the communication is sending, and what is waiting for a late pipeline."""
    processes = rows[0]["processes"]
    num_stages = rows[0]["num_stages"]
    rows_of = {rank: [row for row in rows if row["rank"] == rank] for rank in range(processes)}
    pipelines = [range(first, first + num_stages) for first in range(0, processes, num_stages)]
    totals = []  # of each pipeline, in seconds of an epoch
    for ranks in pipelines:
        totals.append(statistics.mean(mean(rows_of[rank], "comm_total") for rank in ranks))
    # The pipeline that comes last never waits in an all-reduce, so all of its time is sending.
    sending = min(totals)
    if len(pipelines) == 1 or sending == 0:  # it is alone, or has resumed with no step left
        return
    late_pipeline = pipelines[totals.index(sending)]
    # The stages of a pipeline wait for the slowest one: its own bubble is the smallest.
    slowest = min(late_pipeline, key=lambda rank: mean(rows_of[rank], "bubble"))
    waiting = mean(rows, "comm_total") - sending
    hidden = max(0.0, 1 - mean(rows, "comm") / mean(rows, "comm_total"))
    compute = mean(rows, "forward") + mean(rows, "backward") + mean(rows, "optimizer")
    print(
        f"communication {sending + waiting:.3f} s, {hidden:.0%} hidden: sending {sending:.3f} s, "
        f"waiting {waiting:.3f} s for rank {slowest} on {rows_of[slowest][0]['host']}\n"
        f"R = compute / sending = {compute / sending:.1f}: above 3, more pipelines pay off"
    )


def print_bubbles(rows):
    """Prints the bubble of each stage, beside that of the theory."""
    num_stages = rows[0]["num_stages"]
    theory = (num_stages - 1) / (rows[0]["num_microbatches"] + num_stages - 1)
    for number in range(num_stages):
        stage_rows = [row for row in rows if row["rank"] % num_stages == number]
        bubble = mean(stage_rows, "bubble")
        total = bubble + mean(stage_rows, "forward") + mean(stage_rows, "backward")
        print(f"stage {number}: bubble {bubble / total:.1%} of its time, in theory {theory:.1%}")


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


def create_groups(args):
    """Returns the groups of this pipeline, of this stage in all pipelines, and of the embedding.

    The third one is None for a process that holds neither the first stage nor the last one.
    """
    timeout = timedelta(seconds=args.timeout)
    ranks = torch.arange(dist.get_world_size()).view(-1, args.num_stages)  # (pipelines, stages)
    pipeline_group, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout)
    replica_group, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout)
    embedding_group, _ = dist.new_subgroups_by_enumeration(ranks[:, [0, -1]].tolist(), timeout)
    return pipeline_group, replica_group, embedding_group


def create_pipeline_stage(args, stage, pipeline_group, device):
    """Returns a wrapper of the stage that receives its inputs and sends its outputs."""
    num_pipelines = dist.get_world_size() // args.num_stages
    size = args.batch_size // num_pipelines // args.num_microbatches  # B
    with torch.device("meta"):  # only types and shapes
        inputs = torch.empty(size, args.seq_len, args.d_model, requires_grad=True)
        outputs = torch.empty(size, args.seq_len, args.d_model, requires_grad=True)
        if stage.is_first:
            inputs = torch.empty(size, args.seq_len, dtype=torch.int64)
        if stage.is_last:
            outputs = torch.empty(size, args.seq_len, args.vocab_size, dtype=stage.dtype)
    return PipelineStage(
        stage,
        dist.get_rank(pipeline_group),
        args.num_stages,
        device,
        input_args=inputs,
        output_args=outputs,
        group=pipeline_group,
    )


def join_gradients(stage, device):
    """Returns one tensor with all gradients of the stage, so that one all-reduce adds them up.

    The gradients are views of it. optimizer.zero_grad() would drop them: zero the tensor instead.
    """
    sizes = [parameter.numel() for parameter in stage.parameters()]
    gradients = torch.zeros(sum(sizes), device=device)
    for parameter, gradient in zip(stage.parameters(), gradients.split(sizes)):
        parameter.grad = gradient.view_as(parameter)
    return gradients


def squared_norm(stage):
    """Returns the squared norm of the gradients. The embedding counts in the first stage only."""
    gradients = []
    for name, parameter in stage.named_parameters():
        if stage.is_first or name != "embedding.weight":
            gradients.append(parameter.grad)
    return nn.utils.get_total_norm(gradients) ** 2


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


def load_full_model(args):
    """Returns the full model, its optimizer and scaler, and the progress of the run."""
    torch.manual_seed(args.seed)
    model = Stage(args, number=0, num_stages=1)
    optimizer = create_optimizer(model, args)
    scaler = torch.amp.GradScaler(enabled=False)  # snapshots of multinode/gpt.py have one
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    return parts, load_snapshot(args, parts)


def get_state(module, optimizer):
    """Returns the weight and the optimizer's state of each parameter: {name: (tensor, dict)}."""
    state = {}
    for name, parameter in module.named_parameters():
        moments = optimizer.state[parameter].items()  # none before the first step
        state[name] = (parameter.detach().cpu(), {key: tensor.cpu() for key, tensor in moments})
    return state


@torch.no_grad()
def set_state(module, optimizer, state):
    """Copies what get_state() has returned into the parameters of the same names."""
    for name, parameter in module.named_parameters():
        if name in state:
            weight, moments = state[name]
            parameter.copy_(weight)
            for key, tensor in moments.items():
                optimizer.state[parameter][key] = tensor.to(parameter.device, copy=True)


def gather_stages(args, parts, stage, optimizer, patient):
    """Brings the stages of the first pipeline together in `parts` of rank 0, to save them."""
    rank = dist.get_rank()
    if not args.snapshot or rank >= args.num_stages:
        return
    state = get_state(stage, optimizer)
    if rank > 0:
        dist.send_object_list([state], dst=0, group=patient)
        return
    set_state(parts["model"], parts["optimizer"], state)
    for sender in range(1, args.num_stages):
        received = [None]
        dist.recv_object_list(received, src=sender, group=patient)
        set_state(parts["model"], parts["optimizer"], received[0])


def add_up(sums, since):
    """Adds up over processes. Returns named sums, whether one was asked to stop, mean seconds."""
    local_sums = sums.tolist()  # waits for the GPU, before the time is taken
    seconds = time.perf_counter() - since
    totals = sums.new_tensor([*local_sums, len(STOP_REQUESTS), seconds])
    dist.all_reduce(totals)
    *total_sums, stop_requests, total_seconds = totals.tolist()
    named_sums = dict(zip(SUMS, total_sums))
    return named_sums, stop_requests > 0, total_seconds / dist.get_world_size()


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
    pipeline_group, replica_group, embedding_group = create_groups(args)
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # on GPUs, fp32 layers compute in TF32
    train_tokens, val_tokens = read_tokens(args)
    num_steps = (len(train_tokens) - 1) // args.seq_len // args.batch_size
    if num_steps < 1 or len(val_tokens) <= args.seq_len * world_size:
        sys.exit(f"{args.dataset} is too short for this --seq_len and --batch_size")
    if args.max_steps > 0:
        num_steps = min(num_steps, args.max_steps)
    val_batches = validation_batches(val_tokens, args, device)

    parts, progress = load_full_model(args)
    starts = [None] * world_size
    dist.all_gather_object(starts, (progress["epoch"], progress["step"]))
    if len(set(starts)) > 1:
        sys.exit(f"the nodes see different files {args.snapshot}: use a shared file system")
    stage = Stage(args, rank % args.num_stages, args.num_stages).to(device)
    optimizer = create_optimizer(stage, args)
    set_state(stage, optimizer, get_state(parts["model"], parts["optimizer"]))
    num_parameters = sum(p.numel() for p in parts["model"].parameters())
    if rank > 0:
        parts = None  # only rank 0 needs the full model again, to save it
    gradients = join_gradients(stage, device)
    pipeline_stage = create_pipeline_stage(args, stage, pipeline_group, device)
    speed = matmul_speed(device, DTYPES[args.precision])  # before the watch starts
    watch = PipelineTimer(device)
    watch.matmul_speed = speed  # for model_speed()
    # The schedule calls these for each micro-batch: now they mark their time, too.
    pipeline_stage.forward_one_chunk = watch.timed(pipeline_stage.forward_one_chunk, "forward")
    pipeline_stage.backward_one_chunk = watch.timed(pipeline_stage.backward_one_chunk, "backward")
    stage.loss = watch.timed(stage.loss, "forward")
    pipeline_schedule = SCHEDULES[args.schedule](
        pipeline_stage, args.num_microbatches, stage.loss, scale_grads=False
    )

    settings = vars(args) | {
        "model": f"gpt-{args.num_layers}x{args.d_model}",
        "script": "hybrid/gpt_pipeline.py",
        "processes": world_size,
        "nodes": nodes,
        "rank": rank,
        "host": os.uname().nodename,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "comm_hook": "none",
        "parameters": num_parameters,
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
        stage.train()
        for tokens, targets in bar:
            # A resumed run draws the same dropout: numbers have the same hash in every run.
            torch.manual_seed(hash((args.seed, epoch, progress["step"], rank)))
            watch.mark("data")
            sums = sums + run_batch(pipeline_schedule.step, stage, tokens, targets)
            # The gradients of this stage are added up over the pipelines, while other stages work.
            reducing = dist.all_reduce(gradients, group=replica_group, async_op=True)
            watch.note_all_reduce(reducing)
            watch.mark_bubble(pipeline_group)
            reducing.wait()
            watch.mark("comm")
            if embedding_group:  # the first and the last stage each have a part of this gradient
                dist.all_reduce(stage.embedding.weight.grad, group=embedding_group)
                watch.mark_all_reduce()
            done = (epoch + (progress["step"] + 1) / num_steps) / args.epochs
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(args, done)
            squares = squared_norm(stage)
            watch.mark("optimizer")
            dist.all_reduce(squares, group=pipeline_group)
            watch.mark_all_reduce()
            nn.utils.clip_grads_with_norm_(stage.parameters(), 1.0, squares.sqrt())
            optimizer.step()
            gradients.zero_()
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
                    gather_stages(args, parts, stage, optimizer, patient)
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
                loss_sum, count = progress["sums"].values()
                bar.set_postfix(train_loss=loss_sum / count, refresh=False)
        if stop:
            break

        stage.eval()
        with torch.no_grad():
            val_sums = sum(
                run_batch(pipeline_schedule.eval, stage, *batch) for batch in val_batches
            )
        dist.all_reduce(val_sums)
        watch.mark("eval")
        watch.flush()
        row = gpt_row(settings, progress, val_sums)
        row |= watch.take(len(steps) * args.batch_size)
        row |= model_speed(row, watch.matmul_speed)
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
    if rank == 0 and not stop:  # complete; `parts` are still those of the last save
        save_snapshot(args, parts, progress)
    if rows:  # the summary
        print_breakdown(rows)
        print_pipelines(rows)
        print_bubbles(rows)
        print_row(rows, "val_loss")
    dist.barrier(patient)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
