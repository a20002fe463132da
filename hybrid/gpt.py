r"""Train a GPT whose blocks are split into the stages of a pipeline, with data parallelism over the pipelines.

    torchrun --standalone --nproc_per_node=2 -- hybrid/gpt.py --num_stages 2       # one pipeline of two processes
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HEAD_NODE:29400 -- hybrid/gpt.py \
        --num_stages 4 --num_microbatches 16 --precision bf16 --snapshot gpt.pt --d_model 2048 --n_heads 16 \
        --num_layers 24 --seq_len 1024 --batch_size 512 --learning_rate 2e-4       # four pipelines; on both nodes
    sbatch --nodes=2 --gpus-per-node=4 slurm/hybrid_gpt.slurm --num_stages 4 --num_microbatches 16

For a model that does not fit on one GPU: each process holds some of the blocks. A batch passes in micro-batches, so
that the stages work at the same time; while the first ones come and the last ones go, stages wait: the bubble,
(p - 1) / (m + p - 1) of the time with p equal stages and m micro-batches (Huang et al. 2019, "GPipe"). The processes of
a pipeline are neighbours: it stays within a node where --num_stages divides --nproc_per_node.
The head is the embedding: the first and the last stage hold a copy each and add up their gradients, so both stay equal.
The weights are drawn, loaded and saved in one piece, in the memory of the CPU; snapshots are those of the other gpt.py.
Shapes: B sequences of a micro-batch, T tokens of a sequence, D = d_model, H heads, V vocabulary.
"""
import argparse
import atexit
import csv
import ctypes
import functools
import itertools
import math
import os
import signal
import socket
import sys
import sysconfig
import threading
import time
import zipfile
from collections import namedtuple
from contextlib import suppress
from datetime import timedelta
from glob import glob

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
FIXED = ("dataset", "vocab_size", "d_model", "n_heads", "num_layers", "seq_len", "batch_size", "learning_rate",
         "dropout", "precision", "seed")  # what a resumed run may not change
SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
COMM_HOOKS = {"none": default_hooks.allreduce_hook, "bf16": default_hooks.bf16_compress_hook,
              "fp16": default_hooks.fp16_compress_hook}
Pipeline = namedtuple("Pipeline", "schedule stages modules mesh tied")
CHECK_EVERY = 8  # steps between looks at the loss and the stop signals: a look waits for the GPU
PEAK_TFLOPS = {"V100": 125, "A100": 312, "L40S": 362, "H100 PCIe": 756, "H100": 989, "H200": 989, "B200": 2250}
# of dense matrices in half precision, by NVIDIA's data sheets
PHASES = ("data", "forward", "backward", "bubble", "comm", "optimizer", "eval", "save")
LOSSES = dict.fromkeys(("train_loss", "val_loss"), ".4f")
NUM_SUMS = 2  # of the losses, the tokens
QUALITY = dict.fromkeys(("val_bpb", "val_ppl"), ".4f")  # bits per byte of text, or perplexity of token ids
TIMES = {"time": ".2f", "samples/s": ".1f", "tokens/s": ".0f", "GFLOP/s": ".1f", "MFU": ".3f",
         **dict.fromkeys((*PHASES, "comm_total"), ".3f"), "R": ".2f", "skew": ".3f", "peak_MB": ".0f"}
EPOCH = {"epoch": "", **LOSSES, **QUALITY, **TIMES}  # columns of the table of epochs; times in seconds
SUMMARY = dict.fromkeys(("script", "model", "dataset", "precision", "processes", "batch_size", "epochs"), "")
LOG = ("run", "epoch", "rank", *SUMMARY, "nodes", "device", "threads", "torch", "parameters", "vocab_size", "seq_len",
       "train_tokens", "val_tokens", "num_stages", "num_microbatches", "schedule", "comm_hook", "learning_rate",
       "dropout", "max_steps", "seed", *LOSSES, *QUALITY, *TIMES)
SUMMARY |= LOSSES | QUALITY | TIMES  # columns of results.md
HEADER = ("{script}: {model}, {parameters:,} parameters, vocabulary {vocab_size}; {dataset}, {train_tokens:,} + "
          "{val_tokens:,} tokens; global batch {batch_size} = {micro_batch_size} x {num_microbatches} micro-batches x "
          "{pipelines} pipeline(s) of {num_stages} processes, {schedule}, sequences of {seq_len}; {precision}; {nodes} "
          "node(s), {device}, {threads} threads; torch {torch}; epoch {epoch}, step {step}")


def parse_args():
    parser = argparse.ArgumentParser(description="Train a GPT in pipelines, under torchrun.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = fail
    add = parser.add_argument
    add("--num_stages", type=int, default=2, help="processes of a pipeline, each with a part of the model")
    add("--num_microbatches", type=int, default=4, help="parts of a pipeline's batch, which follow one another")
    add("--schedule", choices=tuple(SCHEDULES), default="1f1b", help="gpipe: first all forward passes; 1f1b: backward "
        "as soon as possible, to hold fewer activations; interleaved: 1f1b, each process two parts of the model")
    add("--dataset", default="stdlib", help="stdlib, a text file, or a folder of token ids")
    add("--vocab_size", type=int, help="token ids; 256 for text, 50304 for a folder if not given")
    add("--d_model", type=int, default=128, help="width")
    add("--n_heads", type=int, default=4, help="attention heads")
    add("--num_layers", type=int, default=4, help="transformer blocks")
    add("--seq_len", type=int, default=128, help="tokens of a sequence")
    add("--dropout", type=float, default=0.0, help="probability, in each block and after the embedding")
    add("--epochs", type=int, default=1, help="passes over the training tokens")
    add("--batch_size", type=int, default=64, help="global batch: sequences per optimizer step of all processes")
    add("--learning_rate", type=float, default=1e-3, help="highest of AdamW's: after warm-up, before the cosine")
    add("--precision", choices=tuple(DTYPES), default="fp32", help="of autocast")
    add("--comm_hook", choices=tuple(COMM_HOOKS), default="none", help="compression of gradients")
    add("--max_steps", type=int, help="optimizer steps after which each epoch is cut short")
    add("--seed", type=int, default=1, help="of weights, order and dropout")
    add("--threads", type=int, help="CPU threads of a process; its share of the cores if not given")
    add("--snapshot", metavar="FILE", help="saved after each epoch and at a stop signal; resumed from if it is there")
    add("--snapshot_every", type=int, help="steps between snapshots within an epoch")
    add("--log", metavar="FILE.csv", help="append a row for each epoch and process")
    add("--timeout", type=int, default=600, help="seconds without a word from a process that end the job")
    args = parser.parse_args()
    args.vocab_size = args.vocab_size or (50304 if os.path.isdir(args.dataset) else 256)
    if args.n_heads < 1 or args.d_model % args.n_heads:
        fail(f"--d_model {args.d_model} does not divide into --n_heads {args.n_heads}")
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        fail(f"start it with torchrun, for example: torchrun --standalone --nproc_per_node=2 -- {sys.argv[0]}")
    if os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0" and os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True":
        fail("with --max_restarts set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, lest restarted processes look for the old "
             "ones: pytorch/pytorch#135712")
    world_size, num_parts = int(os.environ["WORLD_SIZE"]), args.num_stages * parts_of_process(args)
    if args.num_stages < 2 or world_size % args.num_stages:
        fail(f"--num_stages {args.num_stages}: it must be 2 or more, and divide the number of processes, {world_size}")
    if num_parts > args.num_layers:
        fail(f"--num_stages {args.num_stages} is too many: {num_parts} parts of a model of --num_layers "
             f"{args.num_layers}")
    if args.schedule == "1f1b" and args.num_microbatches < args.num_stages:
        fail(f"--num_microbatches {args.num_microbatches}: --schedule 1f1b needs at least one for each of the "
             f"{args.num_stages} stages; gpipe takes fewer")
    if args.schedule == "interleaved" and (args.num_microbatches < 1 or args.num_microbatches % args.num_stages):
        fail(f"--num_microbatches {args.num_microbatches}: --schedule interleaved needs a multiple of the "
             f"{args.num_stages} stages")
    check_args(args, parts=args.num_microbatches * (world_size // args.num_stages))
    return args


def parts_of_process(args):
    """How many parts of the model a process of a pipeline holds."""
    return 2 if args.schedule == "interleaved" else 1


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


def read_tokens(args):
    """Returns token ids to train on (N,) and to validate on (M,), uint8 or uint16."""
    try:
        if os.path.isdir(args.dataset):  # mapped, not read: they may be larger than memory
            paths = [os.path.join(args.dataset, f"{split}.bin") for split in ("train", "val")]
            return [np.memmap(path, np.uint16, "r") for path in paths]
        stdlib = sorted(glob(f"{sysconfig.get_path('stdlib')}/*.py"))  # about 5 MB
        paths = stdlib if args.dataset == "stdlib" else [args.dataset]
        text = np.concatenate([np.fromfile(path, np.uint8) for path in paths])
    except (OSError, ValueError) as error:
        sys.exit(f"cannot read {args.dataset}: {error}")
    num_val = min(len(text) // 10, 2**20)  # the last tenth, but at most 1 MiB
    return text[:-num_val], text[-num_val:]


def sequence_starts(num_sequences, first_step, steps, args, epoch):
    """Yields where the sequences of a global batch begin (B,): each comes once an epoch, other cuts every epoch."""
    generator = torch.Generator().manual_seed(hash((args.seed, epoch)))
    order = torch.randperm(num_sequences, generator=generator).numpy()
    start = int(torch.randint(args.seq_len, (), generator=generator))
    for step in range(first_step, steps):
        yield order[step * args.batch_size:(step + 1) * args.batch_size] * args.seq_len + start


def create_dataloader(tokens, batches, args, device):
    """Yields token ids (B, T), and those that follow them (B, T), from the places where the sequences begin (B,)."""
    for starts in batches:
        if isinstance(tokens, np.memmap):  # mapped anew: a mapping keeps in memory what was read through it
            tokens = np.memmap(tokens.filename, tokens.dtype, "r", tokens.offset, tokens.shape)
        batch = np.asarray(tokens)[starts[:, None] + np.arange(args.seq_len + 1)].astype(np.int64)
        if batch.max() >= args.vocab_size:
            fail(f"--dataset {args.dataset}: token id {batch.max()} is beyond --vocab_size {args.vocab_size}")
        batch = torch.from_numpy(batch).to(device)
        yield batch[:, :-1], batch[:, 1:]


class Block(nn.Module):
    """A transformer block with its norms in front, (B, T, D) to (B, T, D).

    It sees what the mask (B, 1, T or 1, T) marks or, without a mask, what came before. Attention itself has no dropout:
    on a CPU that would cost the fast kernel.
    """

    def __init__(self, d_model, n_heads, dim_feedforward, dropout):
        super().__init__()
        self.n_heads, self.dropout = n_heads, nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv, self.projection = nn.Linear(d_model, 3 * d_model, False), nn.Linear(d_model, d_model, False)
        self.up, self.down = nn.Linear(d_model, dim_feedforward, False), nn.Linear(dim_feedforward, d_model, False)

    def attend(self, x, mask=None):
        qkv = self.qkv(self.norm1(x)).unflatten(2, (3, self.n_heads, -1))  # (B, T, 3, H, D / H)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # (B, H, T, D / H)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return x + self.dropout(self.projection(y.transpose(1, 2).flatten(2)))

    def feed_forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))

    def forward(self, x, mask=None):
        return self.feed_forward(self.attend(x, mask))


class GPT(nn.Module):
    """Token ids (B, T) to logits (B, T, V) or, given the tokens that follow (B, T), to their mean loss in nats."""

    def __init__(self, vocab_size, d_model, n_heads, num_layers, seq_len, dropout):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.embedding, self.positions = nn.Embedding(vocab_size, d_model), nn.Embedding(seq_len, d_model)
        self.blocks = nn.ModuleList(Block(d_model, n_heads, 4 * d_model, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(d_model)
        for name, parameter in self.named_parameters():  # as GPT-2 (Radford et al. 2019)
            if parameter.dim() == 2:
                into_residual = name.endswith(("projection.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * num_layers) ** 0.5 if into_residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens, targets=None):
        x = self.dropout(self.embedding(tokens) + self.positions.weight[:tokens.shape[1]])  # (B, T, D)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight)  # the head is the embedding
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Stage(nn.Module):
    """Some of a GPT's blocks, under their names there: (B, T, D) to (B, T, D).

    The first stage has the embedding in front, and takes token ids (B, T); the last one the head, and gives logits
    (B, T, V).
    """

    def __init__(self, model, start, end, precision):
        super().__init__()
        is_first, is_last = start == 0, end == len(model.blocks)
        self.precision, self.dropout = precision, model.dropout
        self.embedding = model.embedding if is_first or is_last else None
        self.positions = model.positions if is_first else None
        self.blocks = nn.ModuleDict({str(number): model.blocks[number] for number in range(start, end)})
        self.norm = model.norm if is_last else None

    def forward(self, x):
        with torch.autocast(x.device.type, DTYPES[self.precision], self.precision != "fp32"):
            if self.positions is not None:
                x = self.dropout(self.embedding(x) + self.positions.weight[:x.shape[1]])
            for block in self.blocks.values():
                x = block(x)
            return x if self.norm is None else F.linear(self.norm(x), self.embedding.weight)


class TimedStage(PipelineStage):
    """Gives the time between the passes, when it waits for its neighbours or sends to them, to `bubble`."""

    def __init__(self, watch, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.watch = watch

    def forward_one_chunk(self, *args, **kwargs):
        self.watch.mark("bubble" if self.has_backward else "eval")
        output = super().forward_one_chunk(*args, **kwargs)
        self.watch.mark("forward" if self.has_backward else "eval")
        return output

    def backward_one_chunk(self, *args, **kwargs):
        self.watch.mark("bubble" if self.has_backward else "eval")
        super().backward_one_chunk(*args, **kwargs)
        self.watch.mark("backward" if self.has_backward else "eval")


def create_model(args):
    return GPT(args.vocab_size, args.d_model, args.n_heads, args.num_layers, args.seq_len, args.dropout)


def cut(costs, num_parts):
    """Cut the list into parts, none empty, whose largest sum is smallest; returns where they begin."""

    @functools.cache
    def best(start, parts):  # the largest sum, and the cuts, of what comes from start on
        if parts == 1:
            return sum(costs[start:]), (start,)
        rests = ((end, *best(end, parts - 1)) for end in range(start + 1, len(costs) - parts + 2))
        return min((max(sum(costs[start:end]), largest), (start, *cuts)) for end, largest, cuts in rests)

    return best(0, num_parts)[1]


def create_pipeline(model, mesh, tied, watch, comm_timer, args, device):
    """This process's part of a Pipeline, and a line on each stage.

    The cuts are where the largest stage takes the fewest multiplications.
    """
    width = args.d_model
    costs = [12 * width ** 2 + 2 * args.seq_len * width] * args.num_layers  # a block's, for each token
    costs[-1] += args.vocab_size * width  # the head's
    num_parts, num_pipelines = args.num_stages * parts_of_process(args), len(mesh.mesh)
    starts = cut(tuple(costs), num_parts)
    lines = [f"stage {part} on process {part % args.num_stages} of a pipeline: blocks {start} to {end - 1}, "
             f"{sum(costs[start:end]) / sum(costs):.0%} of the multiplications"
             for part, (start, end) in enumerate(itertools.pairwise((*starts, args.num_layers)))]
    micro_batch = args.batch_size // num_pipelines // args.num_microbatches, args.seq_len  # B, T
    num_tokens = args.batch_size // num_pipelines * args.seq_len
    meta = functools.partial(torch.empty, device="meta")
    activations = meta(*micro_batch, width, requires_grad=True)  # not given, DDP would mistake the trial run for a step
    stages = []
    for part in range(mesh.get_local_rank("pipeline"), num_parts, args.num_stages):
        is_last = part == num_parts - 1
        module = Stage(model, starts[part], args.num_layers if is_last else starts[part + 1], args.precision).to(device)
        ddp_module = DistributedDataParallel(module, process_group=mesh.get_group("data"), gradient_as_bucket_view=True)
        ddp_module.register_comm_hook(None, comm_timer.hook)
        output = meta(*micro_batch, args.vocab_size, dtype=DTYPES[args.precision], requires_grad=True)
        stages.append(TimedStage(watch, ddp_module, part, num_parts, device,
                                 input_args=activations if part else meta(micro_batch, dtype=torch.int64),
                                 output_args=output if is_last else activations, group=mesh.get_group("pipeline")))

    def micro_batch_loss(logits, targets):  # its part of the batch's mean, in nats
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum") / num_tokens

    schedule = SCHEDULES[args.schedule](stages if args.schedule == "interleaved" else stages[0], args.num_microbatches,
                                        loss_fn=micro_batch_loss, scale_grads=False)
    return Pipeline(schedule, stages, nn.ModuleList(stage.submod.module for stage in stages), mesh, tied), lines


def create_optimizer(model, args):
    return torch.optim.AdamW(model.parameters(), args.learning_rate, betas=(0.9, 0.99), weight_decay=0.1, fused=True)


def lr_factor(step, steps):
    """What the learning rate is multiplied by: up from 0 in the first 5% of all steps, down to 0.1 along a cosine."""
    done = (step + 1) / steps
    return min(20 * done, 0.55 + 0.45 * math.cos(math.pi * done))


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


class DeferredCommTimer(CommTimer):
    """Lets a backward pass end before its all-reduces have, for the stage before waits for what it computes."""

    futures = ()

    def hook(self, state, bucket):
        self.futures = (*self.futures, super().hook(state, bucket))
        buffer = bucket.buffer()  # all-reduced in place
        done = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        done.set_result(buffer)
        return done

    def wait(self):
        """Until the gradients are reduced."""
        for future in self.futures:
            future.wait()
        self.futures = ()


def peak_memory(device):
    """The most bytes in use since the last call: allocated on the GPU or, on a CPU, resident in the process."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    peak = math.nan
    with suppress(OSError):  # not Linux
        with open("/proc/self/status") as file:
            peak = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    return peak


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


def create_mesh(args, rank, world_size, device):
    """The processes as (data, pipeline); and the group of a pipeline's first and last process, for these two alone."""
    ranks = torch.arange(world_size).view(-1, args.num_stages)
    ends = ranks[:, [0, -1]]  # both hold the embedding
    data, pipeline, tied = (dist.new_subgroups_by_enumeration(lists.tolist(), timedelta(seconds=args.timeout))[0]
                            for lists in (ranks.T, ranks, ends))
    mesh = DeviceMesh.from_group([data, pipeline], device.type, mesh=ranks, mesh_dim_names=("data", "pipeline"))
    return mesh, tied if rank in ends else None


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
    snapshot |= {"progress": state, "settings": {name: getattr(args, name) for name in FIXED}}
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
            if snapshot["settings"][name] != getattr(args, name):
                raise ValueError(f"it was made with --{name} {snapshot['settings'][name]}, not {getattr(args, name)}")
        for name, part in parts.items():
            part.load_state_dict(snapshot[name])
        for parameter, moments in parts["optimizer"].state.items():  # its kernel looks at neither sizes nor strides
            moments |= {name: torch.empty_like(parameter).copy_(moments[name]) for name in ("exp_avg", "exp_avg_sq")}
        place = {name: snapshot["progress"][name] for name in state}
        place["sums"] = place["sums"] or [0.0] * NUM_SUMS
        return place
    except Exception as error:  # a foreign or damaged file can fail anywhere
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        fail(f"cannot resume from {args.snapshot}: {reason}; move it away to start anew")


def optimizer_names(modules):
    """The names of the parameters, in the order in which create_optimizer numbers them."""
    return [name for module in modules for name, _ in module.named_parameters()]


def moments_of(optimizer, names):
    """What the optimizer keeps for each parameter, by the parameter's name."""
    return {names[number]: kept for number, kept in optimizer.state_dict()["state"].items()}


def load_moments(optimizer, names, moments):
    """Give the optimizer what was kept, if anything was, for its parameters."""
    kept = {number: moments[name] for number, name in enumerate(names) if name in moments}
    optimizer.load_state_dict(optimizer.state_dict() | {"state": kept})


def save_stages(args, pipeline, optimizer, state):
    """Gather the first pipeline's stages on rank 0, which saves them as the one model that they are."""
    if not args.snapshot or pipeline.mesh.get_local_rank("data") > 0:
        return
    weights = {name: weight.cpu() for module in pipeline.modules for name, weight in module.state_dict().items()}
    moments = {name: {key: value.cpu() for key, value in kept.items()}
               for name, kept in moments_of(optimizer, optimizer_names(pipeline.modules)).items()}
    gathered = [None] * args.num_stages if dist.get_rank() == 0 else None
    dist.gather_object((weights, moments), gathered, dst=0, group=pipeline.mesh.get_group("pipeline"))
    if gathered is None:
        return
    with torch.device("meta"):
        model = create_model(args)
    model.load_state_dict({name: weight for weights, _ in gathered for name, weight in weights.items()}, assign=True)
    optimizer = create_optimizer(model, args)
    load_moments(optimizer, optimizer_names([model]), {name: kept for _, own in gathered for name, kept in own.items()})
    scaler = torch.amp.GradScaler(enabled=False)
    save_snapshot(args, {"model": model, "optimizer": optimizer, "scaler": scaler}, state)


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


def with_rates(row):
    """The row, and what language models are compared by; nan where it does not apply.

    FLOPs a token: 6 N + 12 L D T, N parameters without the positions (Chowdhery et al. 2022, appendix B).
    """
    weights = row["parameters"] - row["seq_len"] * row["d_model"]
    flops = 6 * weights + 12 * row["num_layers"] * row["d_model"] * row["seq_len"]
    rate = row["samples/s"] * row["seq_len"]  # of all processes
    peak = next((peak for name, peak in PEAK_TFLOPS.items() if name in row["device"]), math.nan)
    return row | {"tokens/s": rate, "GFLOP/s": rate * flops / 1e9,
                  "MFU": rate * flops / (peak * 1e12 * row["processes"]) if row["precision"] != "fp32" else math.nan,
                  "val_bpb": row["val_loss"] / math.log(2) if row["bytes"] else math.nan,
                  "val_ppl": math.exp(min(row["val_loss"], 100)) if not row["bytes"] else math.nan}


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


def print_stages(rows, args):
    """What the processes of a pipeline waited for one another, and the most memory that they used."""
    p, m = args.num_stages, args.num_microbatches * parts_of_process(args)
    for process in range(p):
        own = [row for row in rows if row["rank"] % p == process]
        bubble = sum(row["bubble"] for row in own)
        share = bubble / (bubble + sum(row["forward"] + row["backward"] for row in own))
        print(f"process {process} of a pipeline: bubble {share:.1%} of the passes' time, {(p - 1) / (m + p - 1):.1%} "
              f"in theory; at most {max(row['peak_MB'] for row in own):,.0f} MB of memory")


def pass_through(run, pipeline, tokens, targets):
    """Send a batch through the pipeline by run, its schedule's step or eval; returns the last stage's loss, or 0."""
    losses = []
    run(*[tokens] if pipeline.stages[0].is_first else [], return_outputs=False,
        **{"target": targets, "losses": losses} if pipeline.stages[-1].is_last else {})
    return torch.stack(losses or [torch.zeros((), device=tokens.device)]).detach().sum()


def clip_gradients(modules, group, max_norm):
    """Scale the gradients to a norm, over the stages of the group, of at most max_norm."""
    own = [parameter for module in modules for name, parameter in module.named_parameters()
           if name != "embedding.weight" or module.positions is not None]  # not the last stage's copy
    square = nn.utils.get_total_norm([parameter.grad for parameter in own]) ** 2
    dist.all_reduce(square, group=group)
    for module in modules:
        nn.utils.clip_grads_with_norm_(module.parameters(), max_norm, square.sqrt())


def train(pipeline, optimizer, loader, steps, state, watch, comm_timer, stop_signals, args, device):
    """Train to the end of the epoch; returns whether a stop signal ended it early."""
    rank, group, is_last = dist.get_rank(), pipeline.mesh.get_group("pipeline"), pipeline.stages[-1].is_last
    pipeline.modules.train()
    sums = torch.tensor(state["sums"], dtype=torch.float64, device=device)
    sums *= rank == 0  # those of the snapshot are of all processes
    progress = tqdm(loader, f"epoch {state['epoch']}", steps, initial=state["step"], disable=rank > 0 or None)
    for tokens, targets in progress:
        torch.manual_seed(hash((args.seed, state["epoch"], state["step"], rank)))  # of dropout: no state to save
        watch.mark("data")
        loss = pass_through(pipeline.schedule.step, pipeline, tokens, targets)
        sums += torch.stack((loss, torch.ones_like(loss))).double() * targets.numel() * is_last
        watch.mark("bubble")
        comm_timer.wait()
        watch.mark("comm")
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        watch.mark("bubble")  # until all stages are through
        if pipeline.tied:
            start = watch.now()
            dist.all_reduce(pipeline.modules[-1 if is_last else 0].embedding.weight.grad, group=pipeline.tied)
            comm_timer.spans.append((start, watch.now()))
        watch.mark("comm")
        for params in optimizer.param_groups:
            params["lr"] = args.learning_rate * lr_factor(state["epoch"] * steps + state["step"], args.epochs * steps)
        state["step"] += 1
        save = args.snapshot_every and state["step"] % args.snapshot_every == 0
        check = save or state["step"] % CHECK_EVERY == 0 or state["step"] == steps
        if check:  # on its way while the optimizer works
            totals = torch.cat((sums, sums.new_tensor([len(stop_signals)])))
            reduction = dist.all_reduce(totals, async_op=True)
        clip_gradients(pipeline.modules, group, max_norm=1.0)
        optimizer.step()
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
            if save:
                save_stages(args, pipeline, optimizer, state)
                watch.mark("save")
    return False


@torch.no_grad()
def evaluate_pipeline(pipeline, tokens, args, device):
    """The sums of the losses, in nats, and of the tokens (2,), over this pipeline's sequences; zeros but on its end."""
    pipeline.modules.eval()
    num_pipelines, is_last = len(pipeline.mesh.mesh), pipeline.stages[-1].is_last
    size, sums = args.batch_size // num_pipelines, torch.zeros(NUM_SUMS, dtype=torch.float64, device=device)
    share = range(pipeline.mesh.get_local_rank("data"), (len(tokens) - 1) // args.seq_len, num_pipelines)
    batches = [np.array(share[start:start + size]) * args.seq_len for start in range(0, len(share), size)]
    full = (np.pad(starts, (0, size - len(starts))) for starts in batches)  # stages know one shape only
    for starts, (inputs, targets) in zip(batches, create_dataloader(tokens, full, args, device)):
        targets = targets.clone()  # tokens and targets share memory
        targets[len(starts):] = -100  # does not count
        loss = pass_through(pipeline.schedule.eval, pipeline, inputs, targets)
        sums += torch.stack((loss * targets.numel(), loss.new_tensor(len(starts) * args.seq_len))).double() * is_last
    return sums


def main(args):
    sys.stdout.reconfigure(line_buffering=True)
    stop_signals = []
    for signum in SIGNALS:
        signal.signal(signum, lambda signum, frame: stop_signals.append(signum))
    rank, world_size, device = setup(args)
    if rank > 0:
        dist.all_reduce(torch.zeros(1))  # rank 0 goes first: it downloads, and says what is wrong
    train_tokens, val_tokens = read_tokens(args)
    num_train, num_val = len(train_tokens) // args.seq_len - 1, (len(val_tokens) - 1) // args.seq_len  # sequences
    torch.manual_seed(args.seed)
    model = create_model(args)
    parts = {"model": model, "optimizer": create_optimizer(model, args), "scaler": torch.amp.GradScaler(enabled=False)}
    state = load_snapshot(args, parts)
    if rank == 0:
        dist.all_reduce(torch.zeros(1))
    places = [None] * world_size
    dist.all_gather_object(places, (state["epoch"], state["step"]))
    if len(set(places)) > 1:
        fail(f"not all nodes see the same {args.snapshot}: it must lie on a file system that they share")
    dist.all_gather_object(places, (len(train_tokens), len(val_tokens)))
    if len(set(places)) > 1:
        fail(f"--dataset {args.dataset} is not the same on all nodes: take one that they share")
    mesh, tied = create_mesh(args, rank, world_size, device)
    watch = Stopwatch(device)
    comm_timer = DeferredCommTimer(watch, COMM_HOOKS[args.comm_hook], mesh.get_group("data"))
    pipeline, lines = create_pipeline(model, mesh, tied, watch, comm_timer, args, device)
    optimizer = create_optimizer(pipeline.modules, args)
    load_moments(optimizer, optimizer_names(pipeline.modules), moments_of(parts["optimizer"], optimizer_names([model])))
    settings = vars(args) | {
        "run": state["run"], "script": "hybrid/gpt.py", "processes": world_size,
        "nodes": world_size // int(os.environ["LOCAL_WORLD_SIZE"]),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU", "threads": torch.get_num_threads(),
        "model": f"gpt-{args.num_layers}x{args.d_model}", "bytes": train_tokens.dtype == np.uint8,
        "torch": torch.__version__, "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "train_tokens": len(train_tokens), "val_tokens": num_val * args.seq_len,
        "pipelines": len(mesh.mesh), "micro_batch_size": args.batch_size // args.num_microbatches // len(mesh.mesh)}
    del model, parts  # the other stages
    keep_freed_memory()
    if rank == 0:
        print(*lines, HEADER.format_map(settings | state), sep="\n")
        print_row(EPOCH)
    epochs, start, watch.last = [], time.perf_counter(), watch.now()
    steps = min(num_train // args.batch_size, args.max_steps or num_train)
    while state["epoch"] < args.epochs:
        first_step = state["step"]
        batches = sequence_starts(num_train, first_step, steps, args, state["epoch"])
        replica = mesh.get_local_rank("data")
        loader = create_dataloader(train_tokens, (starts[replica::len(mesh.mesh)] for starts in batches), args, device)
        peak_memory(device)  # what was used before does not count
        if train(pipeline, optimizer, loader, steps, state, watch, comm_timer, stop_signals, args, device):
            save_stages(args, pipeline, optimizer, state)
            if rank == 0:
                print(f"stopped by a signal: epoch {state['epoch']}, step {state['step']}, snapshot {args.snapshot}")
            cleanup()
            return  # status 0: for any other torchrun would start it again
        peak_mb = peak_memory(device) / 1e6
        val_sums = evaluate_pipeline(pipeline, val_tokens, args, device)
        dist.all_reduce(val_sums)
        watch.mark("eval")
        watch.read()
        comm_timer.read()
        seconds = watch.seconds | {"time": time.perf_counter() - start, "peak_MB": peak_mb}
        start, watch.seconds = start + seconds["time"], dict.fromkeys(watch.seconds, 0.0)
        seconds_of = [None] * world_size
        dist.all_gather_object(seconds_of, seconds)
        num_samples = (state["step"] - first_step) * args.batch_size
        epochs.append([with_rates(row) for row in epoch_rows(settings, state, val_sums, seconds_of, num_samples)])
        if rank == 0:
            print_row(EPOCH, average(epochs[-1]))
            if args.log:
                append_log(args.log, epochs[-1])
        state |= {"epoch": state["epoch"] + 1, "step": 0, "sums": [0.0] * NUM_SUMS}
        save_stages(args, pipeline, optimizer, state)
        watch.mark("save")
    if epochs and rank == 0:  # the row for results.md: means over the epochs after the first, which warms up
        summary = average([row for rows in epochs[1:] or epochs for row in rows])
        print_row(SUMMARY)
        print_row(SUMMARY, summary)
        print_stages([row for rows in epochs[1:] or epochs for row in rows], args)
        if len(mesh.mesh) > 1:
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
