r"""Train a text classifier on the GPUs of many nodes or, on machines that have none, on CPU processes.

    torchrun --standalone --nproc_per_node=2 -- multinode/text.py      # one node, to try it
    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HEAD_NODE:29400 -- multinode/text.py \
        --model transformer --dataset imdb --data_dir data --snapshot text.pt   # the same on each of the two nodes
    sbatch --nodes=4 --gpus-per-node=4 slurm/multinode_text.slurm --model transformer --dataset imdb

torchrun starts a process for each GPU; given TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, --max_restarts, --snapshot it starts
them again after a failure. The bare -- keeps it from taking --log for its own. All but the start is multigpu/text.py.
Shapes: N texts of a split, B of a batch, T tokens of the longest, D = d_model, V vocabulary, K classes.
"""
import argparse
import atexit
import csv
import ctypes
import json
import math
import os
import signal
import socket
import sys
import tempfile
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
from tqdm import tqdm

CLASSES = {"synthetic": 4, "ag_news": 4, "imdb": 2}
HUB = {"ag_news": "fancyzhx/ag_news", "imdb": "stanfordnlp/imdb"}  # where a data set is that --data_dir lacks
SIZES = {"small": (128, 4, 512, 2), "large": (256, 8, 1024, 4)}  # d_model, n_heads, dim_feedforward, num_layers
VOCAB_SIZE = 20_000  # the most frequent words, each seen twice or more; 0 fills up, 1 is any other word
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FIXED = ("model", "size", "dataset", "seq_len", "batch_size", "learning_rate", "dropout", "seed")  # of a resumed run
SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
COMM_HOOKS = {"none": default_hooks.allreduce_hook, "bf16": default_hooks.bf16_compress_hook,
              "fp16": default_hooks.fp16_compress_hook, "powersgd": powerSGD_hook.powerSGD_hook}
CHECK_EVERY = 8  # steps between looks at the loss and the stop signals: a look waits for the GPU
PHASES = ("data", "forward", "backward", "comm", "optimizer", "eval", "save")
LOSSES = dict.fromkeys(("train_loss", "train_acc", "val_loss", "val_acc"), ".4f")
NUM_SUMS = 3  # of the losses, the right answers, the texts
BEST = {"best_acc": ".4f", "best_epoch": ""}
TIMES = {"time": ".2f", "samples/s": ".0f", **dict.fromkeys((*PHASES, "comm_total"), ".3f"), "R": ".2f", "skew": ".3f"}
EPOCH = {"epoch": "", **LOSSES, **TIMES}  # columns of the table of epochs, and how they are formatted; times in seconds
SUMMARY = dict.fromkeys(("script", "model", "dataset", "precision", "processes", "batch_size", "epochs"), "")
LOG = ("run", "epoch", "rank", *SUMMARY, "nodes", "device", "threads", "torch", "parameters", "vocab_size", "seq_len",
       "train_texts", "val_texts", "grad_accum_steps", "comm_hook", "compile", "learning_rate", "dropout", "max_steps",
       "seed", *LOSSES, *BEST, *TIMES)
SUMMARY |= LOSSES | BEST | TIMES  # columns of results.md
HEADER = ("{script}: {model}, {parameters:,} parameters, vocabulary {vocab_size}; {dataset}, {train_texts:,} + "
          "{val_texts:,} texts of {seq_len} tokens at most; global batch {batch_size} = {micro_batch_size} x "
          "{processes} process(es) x {grad_accum_steps} accumulation; {precision}; {nodes} node(s), {device}, "
          "{threads} threads; torch {torch}; epoch {epoch}, step {step}")


def parse_args():
    parser = argparse.ArgumentParser(description="Train a text classifier on many nodes, under torchrun.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = fail
    add = parser.add_argument
    add("--model", choices=("nbow", "transformer"), default="nbow", help="mean of the words, before or after attention")
    add("--size", choices=tuple(SIZES), default="small", help="width 128, 2 layers; or 256, 4 layers")
    add("--dataset", choices=tuple(CLASSES), default="synthetic", help="texts; synthetic needs no download")
    add("--data_dir", default="data", help="folder that holds the data set's own folder, and receives its tokens")
    add("--seq_len", type=int, default=256, help="tokens of a text that are read")
    add("--epochs", type=int, default=5, help="passes over the training texts")
    add("--batch_size", type=int, default=64, help="global batch: texts per optimizer step of all processes")
    add("--grad_accum_steps", type=int, default=1, help="parts that a process's batch is cut into, to save memory")
    add("--learning_rate", type=float, default=1e-3, help="of AdamW; times 0.9 after each epoch")
    add("--dropout", type=float, default=0.0, help="probability, in each block and before the last layer")
    add("--precision", choices=tuple(DTYPES), default="fp32", help="of autocast; fp16 scales the loss")
    add("--compile", action="store_true", help="use torch.compile")
    add("--comm_hook", choices=tuple(COMM_HOOKS), default="none", help="compression of gradients")
    add("--max_steps", type=int, help="optimizer steps after which each epoch is cut short")
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


def synthetic_texts(num_texts, seed):
    """Texts of 5 to 200 random words, a tenth of them from the 50 that their class prefers: ids, ends, labels."""
    random = np.random.default_rng(seed)
    labels, lengths = random.integers(CLASSES["synthetic"], size=num_texts), random.integers(5, 201, num_texts)
    ends = np.concatenate(([0], lengths.cumsum()))
    words, preferred = random.integers(2, 1000, ends[-1]), random.random(ends[-1]) < 0.1
    return np.where(preferred, 2 + words % 50 + 50 * labels.repeat(lengths), words), ends, labels


def tokenize(args, folder):
    """Learn the vocabulary from the training texts and write it, with the tokens of all texts, to the folder."""
    import datasets  # here: when the tokens are there, nobody needs these packages, or the seconds that they take
    import tokenizers

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    source = f"{args.data_dir}/{args.dataset}"
    splits = datasets.load_dataset(source if os.path.isdir(source) else HUB[args.dataset])
    for split in ("train", "test"):
        if split not in splits or not {"text", "label"} <= set(splits[split].column_names):
            raise ValueError(f"no columns `text` and `label` in the split {split} of {splits}")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # words, and runs of other characters
    trainer = tokenizers.trainers.WordLevelTrainer(vocab_size=VOCAB_SIZE, min_frequency=2, show_progress=False,
                                                   special_tokens=["[PAD]", "[UNK]"])
    tokenizer.train_from_iterator((text or "" for text in splits["train"]["text"]), trainer)
    os.makedirs(args.data_dir, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.data_dir, ignore_cleanup_errors=True) as work:
        tokenizer.save(f"{work}/vocabulary.json")
        for split in ("train", "test"):
            ids, lengths = [], []
            for batch in splits[split].iter(1000):  # some at a time: encodings are large
                for encoding in tokenizer.encode_batch_fast([text or "" for text in batch["text"]]):
                    ids.append(np.array(encoding.ids or [1], np.uint16))  # an empty text is an unknown word
                    lengths.append(len(ids[-1]))
            arrays = np.concatenate(ids), np.concatenate(([0], np.cumsum(lengths))), np.array(splits[split]["label"])
            check_texts(*arrays, CLASSES[args.dataset])
            for name, array in zip(("ids", "ends", "labels"), arrays):
                np.save(f"{work}/{split}_{name}.npy", array)
        os.chmod(work, 0o755)
        with suppress(OSError):  # another job was faster
            os.rename(work, folder)


def check_tokens(ids, ends, vocab_size, shortest):
    """Raise ValueError unless these are the ids of texts of `shortest` tokens or more, and where each ends (N + 1,)."""
    known = ids.ndim == ends.ndim == 1 and ids.dtype.kind in "iu" and 0 <= ids.min() <= ids.max() < vocab_size
    if not (known and ends.dtype == np.int64 and ends.min() == ends[0] == 0 and ends.max() == ends[-1] == len(ids)
            and np.diff(ends).min() >= shortest):
        raise ValueError(f"{len(ids)} tokens ({ids.dtype}) are not those of {len(ends) - 1} texts ({ends.dtype})")


def check_texts(ids, ends, labels, num_classes):
    """Raise ValueError unless these are the token ids of all texts, where each ends (N + 1,) and labels (N,)."""
    if labels.shape != (len(ends) - 1,) or len(ends) < 2 or ends[-1] != len(ids):
        raise ValueError(f"{len(labels)} labels of {len(ends) - 1} texts, of {len(ids)} tokens")
    if labels.dtype.kind not in "iu":
        raise ValueError(f"labels are {labels.dtype}, not numbers")
    if labels.min() < 0 or labels.max() >= num_classes:
        raise ValueError(f"labels from {labels.min()} to {labels.max()} instead of 0 to {num_classes - 1}")


def read_texts(args):
    """The training and the test split, each as token ids of all texts, where each ends (N + 1,), labels (N,); V."""
    folder, splits = f"{args.data_dir}/{args.dataset}_tokens", []
    try:
        if args.dataset == "synthetic":
            splits, vocab_size = [synthetic_texts(size, size) for size in (20_000, 2_000)], 1000
        else:
            if not os.path.isdir(folder):
                tokenize(args, folder)
            with open(f"{folder}/vocabulary.json") as file:
                vocab_size = len(json.load(file)["model"]["vocab"])
            splits = [[np.load(f"{folder}/{split}_{name}.npy", "r") for name in ("ids", "ends", "labels")]
                      for split in ("train", "test")]
        for split in splits:
            check_texts(*split, CLASSES[args.dataset])
            check_tokens(*split[:2], vocab_size, shortest=1)
    except Exception as error:  # `datasets` has many of its own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        fail(f"--dataset {args.dataset}: {reason}; remove what is damaged in {args.data_dir}, which must be writable, "
             f"and where there is internet (a login node) run: python {sys.argv[0]} --dataset {args.dataset} "
             f"--data_dir {args.data_dir} --max_steps 1")
    if args.batch_size > len(splits[0][2]):
        fail(f"--batch_size {args.batch_size} exceeds the {len(splits[0][2])} training texts")
    return *splits, vocab_size


def similar_batches(ends, args, epoch):
    """Indices of an epoch's batches (steps, B): random texts, those of a batch about equally long.

    100 batches at a time are sorted by length and cut, all are shuffled: the same for any number of processes.
    """
    random, lengths = np.random.default_rng((args.seed, epoch)), np.minimum(np.diff(ends), args.seq_len)
    order = random.permutation(len(lengths))[:len(lengths) // args.batch_size * args.batch_size]
    pools = np.split(order, range(100 * args.batch_size, len(order), 100 * args.batch_size))
    batches = np.concatenate([pool[lengths[pool].argsort(kind="stable")] for pool in pools])
    return random.permutation(batches.reshape(-1, args.batch_size))[:args.max_steps]


def create_dataloader(split, batches, args, device):
    """Yields token ids (B, T), with zeros beyond a text's end, lengths (B,) and labels (B,)."""
    ids, ends, labels = split
    for indices in batches:
        lengths = np.minimum(ends[indices + 1] - ends[indices], args.seq_len)
        columns = np.arange(lengths.max())
        tokens = ids.take(ends[indices][:, None] + columns, mode="clip").astype(np.int64)
        tokens[columns >= lengths[:, None]] = 0
        yield tuple(torch.from_numpy(array).to(device) for array in (tokens, lengths, labels[indices].astype(np.int64)))


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


class TextClassifier(nn.Module):
    """Token ids (B, T) and lengths (B,) to logits (B, K): a linear layer on the mean over the real tokens."""

    def __init__(self, vocab_size, d_model, n_heads, dim_feedforward, num_layers, seq_len, dropout, num_classes):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(vocab_size, d_model), nn.ModuleList()
        if num_layers:
            self.positions, self.norm = nn.Embedding(seq_len, d_model), nn.LayerNorm(d_model)
            self.blocks.extend(Block(d_model, n_heads, dim_feedforward, dropout) for _ in range(num_layers))
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(d_model, num_classes)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, lengths):
        if not self.blocks:  # the mean without making (B, T, D) first
            return self.head(self.dropout(F.embedding_bag(tokens, self.embedding.weight, padding_idx=0)))
        mask = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]  # (B, T)
        x = self.dropout(self.embedding(tokens) + self.positions.weight[:tokens.shape[1]])  # (B, T, D)
        for block in self.blocks:
            x = block(x, mask[:, None, None])
        mean = (self.norm(x) * mask[:, :, None]).sum(1) / lengths[:, None]  # (B, D)
        return self.head(self.dropout(mean))


def create_model(args, vocab_size):
    *sizes, num_layers = SIZES[args.size]
    return TextClassifier(vocab_size, *sizes, num_layers if args.model == "transformer" else 0, args.seq_len,
                          args.dropout, CLASSES[args.dataset])


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


def text_loss(model, tokens, lengths, labels, args):
    """The mean loss, and the sums of the losses, of the right answers and of the texts (3,)."""
    with torch.autocast(tokens.device.type, DTYPES[args.precision], args.precision != "fp32"):
        logits = model(tokens, lengths)  # (B, K)
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
    for batch in progress:
        torch.manual_seed(hash((args.seed, state["epoch"], state["step"], rank)))  # of dropout: no state to save
        watch.mark("data")
        to_come = args.grad_accum_steps
        for part in zip(*(array.chunk(args.grad_accum_steps) for array in batch)):
            to_come -= 1
            with ddp_model.no_sync() if to_come else nullcontext():  # only the last part sends gradients
                loss, part_sums = text_loss(ddp_model, *part, args)
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
        dist.all_reduce(torch.zeros(1))  # rank 0 goes first: it makes the data, and says what is wrong
    train_split, val_split, vocab_size = read_texts(args)
    num_train, num_val = len(train_split[2]), len(val_split[2])
    torch.manual_seed(args.seed)
    model = create_model(args, vocab_size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, fused=True)
    parts = {"model": model, "optimizer": optimizer,
             "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9),
             "scaler": torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")}
    state = load_snapshot(args, parts, best=[0.0, -1])
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
        "run": state["run"], "script": "multinode/text.py", "processes": world_size,
        "nodes": world_size // int(os.environ["LOCAL_WORLD_SIZE"]),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU", "threads": torch.get_num_threads(),
        "torch": torch.__version__, "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "train_texts": num_train, "val_texts": num_val, "vocab_size": vocab_size, "model": f"{args.model}-{args.size}",
        "micro_batch_size": args.batch_size // args.grad_accum_steps // world_size}
    if rank == 0:
        print(HEADER.format_map(settings | state))
        print_row(EPOCH)
    epochs, watch, start = [], Stopwatch(device), time.perf_counter()
    comm_timer = CommTimer(watch, COMM_HOOKS[args.comm_hook],
                           powerSGD_hook.PowerSGDState(None) if args.comm_hook == "powersgd" else None)
    ddp_model.register_comm_hook(None, comm_timer.hook)
    while state["epoch"] < args.epochs:
        first_step, batches = state["step"], similar_batches(train_split[1], args, state["epoch"])
        loader = create_dataloader(train_split, batches[first_step:, rank::world_size], args, device)
        if train(ddp_model, loader, len(batches), parts, state, watch, comm_timer, stop_signals, args, device):
            if rank == 0:
                save_snapshot(args, parts, state)
                print(f"stopped by a signal: epoch {state['epoch']}, step {state['step']}, snapshot {args.snapshot}")
            cleanup()
            return  # status 0: for any other torchrun would start it again
        parts["scheduler"].step()
        val_share = np.diff(val_split[1]).argsort(kind="stable")[rank::world_size]  # by length
        val_batches = [val_share[start:start + 128] for start in range(0, len(val_share), 128)]
        val_sums = evaluate(text_loss, model, create_dataloader(val_split, val_batches, args, device), args, device)
        dist.all_reduce(val_sums)
        watch.mark("eval")
        watch.read()
        comm_timer.read()
        accuracy = (val_sums[1] / val_sums[2]).item()
        if accuracy > state["best"][0]:
            state["best"] = [accuracy, state["epoch"]]
        settings |= dict(zip(BEST, state["best"]))
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
