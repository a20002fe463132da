r"""Train a GPT, a decoder-only transformer, on the GPUs of many nodes or, where there are none, on CPU processes.

    torchrun --standalone --nproc_per_node=2 -- multinode/gpt.py      # one node, to try it
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HEAD_NODE:29400 -- multinode/gpt.py \
        --dataset data/openwebtext --precision bf16 --compile --snapshot gpt.pt --d_model 768 --n_heads 12 \
        --num_layers 12 --seq_len 1024 --batch_size 480 --grad_accum_steps 3 --learning_rate 6e-4   # on both nodes
    sbatch --nodes=4 --gpus-per-node=4 slurm/multinode_gpt.slurm --dataset Salesforce/wikitext:wikitext-103-raw-v1

Stop it at any time: given --snapshot, the same command goes on. Text is read as bytes; a folder with train.bin and
val.bin holds 16-bit token ids, as nanoGPT and llm.c write them.
torchrun starts a process for each GPU; given TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, --max_restarts, --snapshot it starts
them again after a failure. The bare -- keeps it from taking --log for its own. All but the start is multigpu/gpt.py.
Shapes: B sequences of a batch, T tokens of a sequence, D = d_model, H heads, V vocabulary.
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
import sysconfig
import threading
import time
import zipfile
from contextlib import nullcontext, suppress
from datetime import timedelta
from glob import glob

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FIXED = ("dataset", "vocab_size", "d_model", "n_heads", "num_layers", "seq_len", "batch_size", "learning_rate",
         "dropout", "seed")  # what a resumed run may not change
SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
COMM_HOOKS = {"none": default_hooks.allreduce_hook, "bf16": default_hooks.bf16_compress_hook,
              "fp16": default_hooks.fp16_compress_hook, "powersgd": powerSGD_hook.powerSGD_hook}
CHECK_EVERY = 8  # steps between looks at the loss and the stop signals: a look waits for the GPU
PEAK_TFLOPS = {"V100": 125, "A100": 312, "L40S": 362, "H100 PCIe": 756, "H100": 989, "H200": 989, "B200": 2250}
# of dense matrices in half precision, by NVIDIA's data sheets
PHASES = ("data", "forward", "backward", "comm", "optimizer", "eval", "save")
LOSSES = dict.fromkeys(("train_loss", "val_loss"), ".4f")
NUM_SUMS = 2  # of the losses, the tokens
QUALITY = dict.fromkeys(("val_bpb", "val_ppl"), ".4f")  # bits per byte of text, or perplexity of token ids
TIMES = {"time": ".2f", "samples/s": ".1f", "tokens/s": ".0f", "GFLOP/s": ".1f", "MFU": ".3f",
         **dict.fromkeys((*PHASES, "comm_total"), ".3f"), "R": ".2f", "skew": ".3f"}
EPOCH = {"epoch": "", **LOSSES, **QUALITY, **TIMES}  # columns of the table of epochs; times in seconds
SUMMARY = dict.fromkeys(("script", "model", "dataset", "precision", "processes", "batch_size", "epochs"), "")
LOG = ("run", "epoch", "rank", *SUMMARY, "nodes", "device", "threads", "torch", "parameters", "vocab_size", "seq_len",
       "train_tokens", "val_tokens", "grad_accum_steps", "comm_hook", "compile", "learning_rate", "dropout",
       "max_steps", "seed", *LOSSES, *QUALITY, *TIMES)
SUMMARY |= LOSSES | QUALITY | TIMES  # columns of results.md
HEADER = ("{script}: {model}, {parameters:,} parameters, vocabulary {vocab_size}; {dataset}, {train_tokens:,} + "
          "{val_tokens:,} tokens; global batch {batch_size} = {micro_batch_size} x {processes} process(es) x "
          "{grad_accum_steps} accumulation, sequences of {seq_len}; {precision}; {nodes} node(s), {device}, "
          "{threads} threads; torch {torch}; epoch {epoch}, step {step}")


def parse_args():
    parser = argparse.ArgumentParser(description="Train a GPT on many nodes, under torchrun.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = fail
    add = parser.add_argument
    add("--dataset", default="stdlib", help="stdlib (Python's own source); a text file; a folder with train.bin and "
        "val.bin; a data set of the hub with a column `text`, as NAME or NAME:CONFIG")
    add("--vocab_size", type=int, help="token ids; 256 for text, the largest id + 1 rounded up to 64 if not given")
    add("--d_model", type=int, default=128, help="width")
    add("--n_heads", type=int, default=4, help="attention heads")
    add("--num_layers", type=int, default=4, help="transformer blocks")
    add("--seq_len", type=int, default=128, help="tokens of a sequence")
    add("--dropout", type=float, default=0.0, help="probability, in each block and after the embedding")
    add("--epochs", type=int, default=1, help="passes over the training tokens")
    add("--batch_size", type=int, default=64, help="global batch: sequences per optimizer step of all processes")
    add("--grad_accum_steps", type=int, default=1, help="parts that a process's batch is cut into, to save memory")
    add("--learning_rate", type=float, default=1e-3, help="highest of AdamW's: after warm-up, before the cosine")
    add("--precision", choices=tuple(DTYPES), default="fp32", help="of autocast; fp16 scales the loss")
    add("--compile", action="store_true", help="use torch.compile")
    add("--comm_hook", choices=tuple(COMM_HOOKS), default="none", help="compression of gradients")
    add("--max_steps", type=int, help="optimizer steps after which each epoch is cut short")
    add("--seed", type=int, default=1, help="of weights, order and dropout")
    add("--threads", type=int, help="CPU threads of a process; its share of the cores if not given")
    add("--sample", type=int, metavar="N", help="tokens to write at the end")
    add("--snapshot", metavar="FILE", help="saved after each epoch and at a stop signal; resumed from if it is there")
    add("--snapshot_every", type=int, help="steps between snapshots within an epoch")
    add("--log", metavar="FILE.csv", help="append a row for each epoch and process")
    add("--timeout", type=int, default=600, help="seconds without a word from a process that end the job")
    args = parser.parse_args()
    if args.n_heads < 1 or args.d_model % args.n_heads:
        fail(f"--d_model {args.d_model} does not divide into --n_heads {args.n_heads}")
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


def stdlib_source():
    """The source of Python's standard library without its tests (10 to 20 MB, read whole), one file in 30 held out."""
    root, paths = sysconfig.get_path("stdlib"), []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - {"site-packages", "dist-packages", "test", "tests", "idlelib"}
        paths += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    paths.sort()
    held_out = paths[15::30]
    return [np.frombuffer(b"".join(open(path, "rb").read() for path in chosen), np.uint8)
            for chosen in (sorted(set(paths) - set(held_out)), held_out)]


def text_file(path):
    """A file's bytes, mapped: all but the last tenth, at most 1 MiB, to train on and the rest to validate."""
    size = os.path.getsize(path)
    num_val = min(size // 10, 1 << 20)
    if not num_val:
        raise ValueError(f"{size} bytes are too short a text")
    return (np.memmap(path, np.uint8, "r", 0, (size - num_val,)),
            np.memmap(path, np.uint8, "r", size - num_val, (num_val,)))


def token_file(pattern):
    """The one file's 16-bit ids, mapped; llm.c puts 256 int32 in front: a magic number, the version, the count."""
    paths = glob(pattern)
    if len(paths) != 1:
        raise ValueError(f"{len(paths)} files {pattern} instead of one")
    size, header = os.path.getsize(paths[0]), np.fromfile(paths[0], np.int32, 2).tolist()
    start = 1024 if header == [20240520, 1] else 0
    if size <= start or size % 2 or header[:1] == [20240801]:
        raise ValueError(f"{paths[0]} does not consist of 16-bit token ids")
    return np.memmap(paths[0], np.uint16, "r", start, ((size - start) // 2,))


def hub_text(name):
    """The column `text` of a data set, its lines written once, as bytes, beside the files of `datasets`."""
    import datasets  # here: the other sources need neither the package nor the second that it takes

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    name, _, config = name.partition(":")
    splits, files = datasets.load_dataset(name, config or None), []
    for split in ("train", *[split for split in ("validation", "test") if split in splits][:1]):
        if "text" not in splits[split].column_names:
            raise ValueError(f"no column `text` among {splits[split].column_names}")
        files.append(os.path.join(os.path.dirname(splits[split].cache_files[0]["filename"]), f"{split}_text.bytes"))
        if not os.path.exists(files[-1]):
            with open(f"{files[-1]}.{os.getpid()}", "wb") as file:
                for batch in splits[split].select_columns("text").iter(1000):
                    file.writelines((text or "").removesuffix("\n").encode() + b"\n" for text in batch["text"])
            os.replace(file.name, files[-1])
    return [np.memmap(file, np.uint8, "r") for file in files] if len(files) > 1 else text_file(files[0])


def read_tokens(args):
    """The token ids to train on and those to validate on, (N,) each, uint8 or uint16; sets args.vocab_size."""
    try:
        if args.dataset == "stdlib":
            splits = stdlib_source()
        elif os.path.isfile(args.dataset):
            splits = text_file(args.dataset)
        elif glob(f"{args.dataset}/*.bin"):
            splits = [token_file(f"{args.dataset}/*{split}.bin") for split in ("train", "val")]
        else:
            splits = hub_text(args.dataset)
    except Exception as error:  # `datasets` has many of its own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        fail(f"--dataset {args.dataset}: {reason}; it may be stdlib, a text file, a folder with train.bin and val.bin, "
             "or a data set of the hub (first run this once where there is internet: a login node)")
    if splits[0].dtype == np.uint8:
        args.vocab_size = args.vocab_size or 256
    elif not args.vocab_size:  # read piece by piece: a mapping would keep all of it in memory
        pieces = (np.fromfile(split.filename, np.uint16, 1 << 20, offset=split.offset + 2 * start)
                  for split in splits for start in range(0, len(split), 1 << 20))
        args.vocab_size = math.ceil((max(int(piece.max()) for piece in pieces) + 1) / 64) * 64
    if len(splits[0]) // args.seq_len - 1 < args.batch_size or len(splits[1]) <= args.seq_len:
        fail(f"--dataset {args.dataset}: {len(splits[0])} tokens to train on and {len(splits[1])} to validate on are "
             f"too few for --batch_size {args.batch_size} sequences of --seq_len {args.seq_len}")
    return splits


def permute(numbers, size, seed):
    """Where a random permutation of range(size) takes the numbers: found one by one, so that no list of all is needed.

    A Feistel network, repeated until it lands inside (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
    """
    bits = np.uint64(max(1, math.ceil((size - 1).bit_length() / 2)))
    mask = (np.uint64(1) << bits) - np.uint64(1)
    keys = np.random.default_rng(seed).integers(1 << 32, size=6, dtype=np.uint64)
    numbers = numbers.astype(np.uint64)
    outside = np.ones(len(numbers), bool)
    while outside.any():
        left, right = numbers[outside] >> bits, numbers[outside] & mask
        for key in keys:
            left, right = right, left ^ ((right + key) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32) & mask)
        numbers[outside] = left << bits | right
        outside = numbers >= np.uint64(size)
    return numbers.astype(np.int64)


def sequence_starts(num_sequences, first_step, steps, args, epoch):
    """Yields where the sequences of a global batch begin (B,): each comes once an epoch, other cuts every epoch."""
    offset = np.random.default_rng((args.seed, epoch)).integers(args.seq_len)
    for step in range(first_step, steps, 100):  # some at a time, for speed
        numbers = np.arange(step * args.batch_size, min(step + 100, steps) * args.batch_size)
        order = permute(numbers, num_sequences, (args.seed, epoch))
        yield from (order * args.seq_len + offset).reshape(-1, args.batch_size)


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


def create_model(args):
    return GPT(args.vocab_size, args.d_model, args.n_heads, args.num_layers, args.seq_len, args.dropout)


def create_optimizer(model, args):
    """AdamW, its weight decay on matrices alone; for batches of a million tokens beta2 = 0.95 is usual."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], args.learning_rate,
                             betas=(0.9, 0.99), weight_decay=0.1, fused=True)


def lr_factor(step, steps):
    """What the learning rate is multiplied by: up from 0 in the first 5% of all steps, down to 0.1 along a cosine."""
    warmup = min(2000, math.ceil(steps / 20))
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - 1 - warmup))


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


def token_loss(model, tokens, targets, args):
    """The mean loss in nats, and the sums of the losses and of the tokens (2,)."""
    with torch.autocast(tokens.device.type, DTYPES[args.precision], args.precision != "fp32"):
        loss = model(tokens, targets)
    count = loss.detach().new_full((), targets.numel())
    return loss, torch.stack((loss.detach() * count, count)).double()


def train(ddp_model, loader, steps, parts, state, watch, comm_timer, stop_signals, args, device):
    """Train to the end of the epoch; returns whether a stop signal ended it early."""
    rank, optimizer, scaler = dist.get_rank(), parts["optimizer"], parts["scaler"]
    ddp_model.train()
    sums = torch.tensor(state["sums"], dtype=torch.float64, device=device)
    sums *= rank == 0  # those of the snapshot are of all processes
    progress = tqdm(loader, f"epoch {state['epoch']}", steps, initial=state["step"], disable=rank > 0 or None)
    for tokens, targets in progress:
        torch.manual_seed(hash((args.seed, state["epoch"], state["step"], rank)))  # of dropout: no state to save
        watch.mark("data")
        to_come = args.grad_accum_steps
        for part in zip(tokens.chunk(args.grad_accum_steps), targets.chunk(args.grad_accum_steps)):
            to_come -= 1
            with ddp_model.no_sync() if to_come else nullcontext():  # only the last part sends gradients
                loss, part_sums = token_loss(ddp_model, *part, args)
                sums += part_sums
                watch.mark("forward")
                scaler.scale(loss / args.grad_accum_steps).backward()
                watch.mark("backward", at=None if to_come else comm_timer.backward_end)
        watch.mark("comm")
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * lr_factor(state["epoch"] * steps + state["step"], args.epochs * steps)
        state["step"] += 1
        save = args.snapshot_every and state["step"] % args.snapshot_every == 0
        check = save or state["step"] % CHECK_EVERY == 0 or state["step"] == steps
        if check:  # on its way while the optimizer works
            totals = torch.cat((sums, sums.new_tensor([len(stop_signals)])))
            reduction = dist.all_reduce(totals, async_op=True)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parts["model"].parameters(), max_norm=1.0)
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


@torch.no_grad()
def sample(model, tokens, num_tokens, args):
    """Token ids drawn one after the other, at temperature 0.8, to follow the given ones (1, T); returns a list."""
    model.eval()
    torch.manual_seed(args.seed)
    for _ in range(num_tokens):
        with torch.autocast(tokens.device.type, DTYPES[args.precision], args.precision != "fp32"):
            logits = model(tokens[:, -args.seq_len:])[:, -1]  # (1, V)
        tokens = torch.cat((tokens, torch.multinomial((logits.float() / 0.8).softmax(1), 1)), 1)
    return tokens[0].tolist()


def main(args):
    sys.stdout.reconfigure(line_buffering=True)
    keep_freed_memory()
    stop_signals = []
    for signum in SIGNALS:
        signal.signal(signum, lambda signum, frame: stop_signals.append(signum))
    rank, world_size, device = setup(args)
    if rank > 0:
        dist.all_reduce(torch.zeros(1))  # rank 0 goes first: it downloads, and says what is wrong
    train_tokens, val_tokens = read_tokens(args)
    num_train, num_val = len(train_tokens) // args.seq_len - 1, (len(val_tokens) - 1) // args.seq_len  # sequences
    torch.manual_seed(args.seed)
    model = create_model(args).to(device)
    parts = {"model": model, "optimizer": create_optimizer(model, args),
             "scaler": torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")}
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
    bucket_mb = 1e6 if args.comm_hook == "powersgd" and device.type == "cpu" else None  # gloo would mix its buckets up
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    if args.compile:
        ddp_model.compile()
    settings = vars(args) | {
        "run": state["run"], "script": "multinode/gpt.py", "processes": world_size,
        "nodes": world_size // int(os.environ["LOCAL_WORLD_SIZE"]),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU", "threads": torch.get_num_threads(),
        "model": f"gpt-{args.num_layers}x{args.d_model}", "bytes": train_tokens.dtype == np.uint8,
        "torch": torch.__version__, "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "train_tokens": len(train_tokens), "val_tokens": num_val * args.seq_len,
        "micro_batch_size": args.batch_size // args.grad_accum_steps // world_size}
    if rank == 0:
        print(HEADER.format_map(settings | state))
        print_row(EPOCH)
    epochs, watch, start = [], Stopwatch(device), time.perf_counter()
    comm_timer = CommTimer(watch, COMM_HOOKS[args.comm_hook],
                           powerSGD_hook.PowerSGDState(None) if args.comm_hook == "powersgd" else None)
    ddp_model.register_comm_hook(None, comm_timer.hook)
    steps = min(num_train // args.batch_size, args.max_steps or num_train)
    while state["epoch"] < args.epochs:
        first_step = state["step"]
        batches = sequence_starts(num_train, first_step, steps, args, state["epoch"])
        loader = create_dataloader(train_tokens, (starts[rank::world_size] for starts in batches), args, device)
        if train(ddp_model, loader, steps, parts, state, watch, comm_timer, stop_signals, args, device):
            if rank == 0:
                save_snapshot(args, parts, state)
                print(f"stopped by a signal: epoch {state['epoch']}, step {state['step']}, snapshot {args.snapshot}")
            cleanup()
            return  # status 0: for any other torchrun would start it again
        val_share, size = np.arange(rank, num_val, world_size) * args.seq_len, settings["micro_batch_size"]
        val_batches = (val_share[start:start + size] for start in range(0, len(val_share), size))
        val_sums = evaluate(token_loss, model, create_dataloader(val_tokens, val_batches, args, device), args, device)
        dist.all_reduce(val_sums)
        watch.mark("eval")
        watch.read()
        comm_timer.read()
        seconds = watch.seconds | {"time": time.perf_counter() - start}
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
    if args.sample and rank == 0:
        prompt = torch.from_numpy(val_tokens[:1].astype(np.int64))[None].to(device)
        ids = sample(model, prompt, args.sample, args)
        print(bytes(id for id in ids if id < 256).decode(errors="replace") if settings["bytes"] else ids)


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
