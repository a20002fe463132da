r"""Train a translator on the GPUs of many nodes or, on machines that have none, on CPU processes.

    torchrun --standalone --nproc_per_node=2 -- multinode/translation.py      # one node, to try it
    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HEAD_NODE:29400 -- \
        multinode/translation.py --dataset multi30k --data_dir data --snapshot de_en.pt    # the same on both nodes
    sbatch --nodes=4 --gpus-per-node=4 slurm/multinode_translation.slurm --dataset multi30k --epochs 20 --dropout 0.1

At the end it translates the test split, and gives BLEU and some examples.
torchrun starts a process for each GPU; given TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, --max_restarts, --snapshot it starts
them again after a failure. The bare -- keeps it from taking --log for its own.
All but the start is multigpu/translation.py.
Shapes: N pairs of a split, B of a batch, S and T tokens of the longest source and target, D = d_model, V vocabulary.
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
import sacrebleu
import tokenizers
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

HUB = {"multi30k": "bentrevett/multi30k"}  # where a data set is that --data_dir lacks
PAD, UNKNOWN, START, END = range(4)  # token ids
SPLITS = ("train", "validation", "test")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FIXED = ("model", "dataset", "source", "target", "seq_len", "batch_size", "learning_rate", "dropout", "seed")
SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
COMM_HOOKS = {"none": default_hooks.allreduce_hook, "bf16": default_hooks.bf16_compress_hook,
              "fp16": default_hooks.fp16_compress_hook, "powersgd": powerSGD_hook.powerSGD_hook}
CHECK_EVERY = 8  # steps between looks at the loss and the stop signals: a look waits for the GPU
PHASES = ("data", "forward", "backward", "comm", "optimizer", "eval", "save")
LOSSES = dict.fromkeys(("train_loss", "val_loss"), ".4f")
NUM_SUMS = 2  # of the losses, the target tokens
QUALITY = {"val_ppl": ".2f"}  # perplexity of a target token
TIMES = {"time": ".2f", "samples/s": ".0f", **dict.fromkeys((*PHASES, "comm_total"), ".3f"), "R": ".2f", "skew": ".3f"}
EPOCH = {"epoch": "", **LOSSES, **QUALITY, **TIMES}  # columns of the table of epochs; times in seconds
SUMMARY = dict.fromkeys(("script", "model", "dataset", "precision", "processes", "batch_size", "epochs"), "")
LOG = ("run", "epoch", "rank", *SUMMARY, "nodes", "device", "threads", "torch", "parameters", "source", "target",
       "seq_len", "train_pairs", "val_pairs", "grad_accum_steps", "comm_hook", "compile", "learning_rate", "dropout",
       "max_steps", "seed", *LOSSES, *QUALITY, *TIMES)
SUMMARY |= LOSSES | QUALITY | {"test_loss": ".4f", "BLEU": ".1f"} | TIMES  # columns of results.md
HEADER = ("{script}: {model}, {parameters:,} parameters, vocabularies {vocab_sizes}; {dataset}, {source} to {target}, "
          "{train_pairs:,} + {val_pairs:,} pairs; global batch {batch_size} = {micro_batch_size} x {processes} "
          "process(es) x {grad_accum_steps} accumulation; {precision}; {nodes} node(s), {device}, {threads} threads; "
          "torch {torch}; epoch {epoch}, step {step}")


def parse_args():
    parser = argparse.ArgumentParser(description="Train a translator on many nodes, under torchrun.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = fail
    add = parser.add_argument
    add("--model", choices=("transformer", "lstm"), default="transformer", help="256 wide, 3 + 3 layers; or 512, 2 + 2")
    add("--dataset", choices=("synthetic", "multi30k"), default="synthetic", help="synthetic: numbers, and their names")
    add("--data_dir", default="data", help="folder that holds the data set's own folder, and receives its tokens")
    add("--source", default="de", help="column to translate from")
    add("--target", default="en", help="column to translate to")
    add("--seq_len", type=int, default=64, help="tokens of a sentence that are read, or written")
    add("--epochs", type=int, default=10, help="passes over the training pairs")
    add("--batch_size", type=int, default=128, help="global batch: pairs per optimizer step of all processes")
    add("--grad_accum_steps", type=int, default=1, help="parts that a process's batch is cut into, to save memory")
    add("--learning_rate", type=float, default=1e-3, help="of AdamW; falls to 0 over the epochs, in a line")
    add("--dropout", type=float, default=0.0, help="probability, on embeddings and in each layer")
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


def number_words(number):
    """The English name of a number from 0 to 999,999, as words."""
    names = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
             "seventeen eighteen nineteen").split()
    tens = "twenty thirty forty fifty sixty seventy eighty ninety".split()
    if number < 20:
        return [names[number]]
    if number < 100:
        words, rest = [tens[number // 10 - 2]], number % 10
    elif number < 1000:
        words, rest = [names[number // 100], "hundred"], number % 100
    else:
        words, rest = [*number_words(number // 1000), "thousand"], number % 1000
    return words + number_words(rest) if rest else words


def synthetic_pairs(args):
    """Digits, and the number's name: {split: {column: texts}}."""
    numbers = np.random.default_rng(0).permutation(1_000_000)[:22_000]
    return {split: {args.source: [" ".join(str(number)) for number in part],
                    args.target: [" ".join(number_words(number)) for number in part]}
            for split, part in zip(SPLITS, np.split(numbers, (20_000, 21_000)))}


def load_pairs(args):
    """The sentences of a data set, from --data_dir or else from the hub: {split: {column: texts}}."""
    import datasets  # here: when the tokens are there, nobody needs it, or the second that it takes

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    source = f"{args.data_dir}/{args.dataset}"
    splits = datasets.load_dataset(source if os.path.isdir(source) else HUB[args.dataset])
    for split in SPLITS:
        if split not in splits or not {args.source, args.target} <= set(splits[split].column_names):
            raise ValueError(f"no columns `{args.source}` and `{args.target}` in the split {split} of {splits}")
    return splits


def tokenize_pairs(args, splits, folder):
    """Learn each side's vocabulary from the training sentences; write both, all tokens and the references."""
    for side, column in (("source", args.source), ("target", args.target)):
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="[UNK]"))
        tokenizer.normalizer = tokenizers.normalizers.Lowercase()
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # words, and runs of other characters
        trainer = tokenizers.trainers.WordLevelTrainer(vocab_size=30_000, min_frequency=2, show_progress=False,
                                                       special_tokens=["[PAD]", "[UNK]", "[START]", "[END]"])
        tokenizer.train_from_iterator((text or "" for text in splits["train"][column]), trainer)
        words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        with open(f"{folder}/{side}_words.json", "w") as file:
            json.dump([word for word, _ in words], file)
        for split in SPLITS:
            texts = [text or "" for text in splits[split][column]]
            ids = [np.array([START, *encoding.ids, END], np.uint16) for encoding in tokenizer.encode_batch_fast(texts)]
            np.save(f"{folder}/{split}_{side}_ids.npy", np.concatenate(ids))
            np.save(f"{folder}/{split}_{side}_ends.npy", np.cumsum([0, *map(len, ids)]))
            if (split, side) == ("test", "target"):
                with open(f"{folder}/references.json", "w") as file:
                    json.dump(texts, file)


def check_tokens(ids, ends, vocab_size, shortest):
    """Raise ValueError unless these are the ids of texts of `shortest` tokens or more, and where each ends (N + 1,)."""
    known = ids.ndim == ends.ndim == 1 and ids.dtype.kind in "iu" and 0 <= ids.min() <= ids.max() < vocab_size
    if not (known and ends.dtype == np.int64 and ends.min() == ends[0] == 0 and ends.max() == ends[-1] == len(ids)
            and np.diff(ends).min() >= shortest):
        raise ValueError(f"{len(ids)} tokens ({ids.dtype}) are not those of {len(ends) - 1} texts ({ends.dtype})")


def read_pairs(args):
    """Each split's pairs, as ((source ids, ends), (target ids, ends)); both lists of words; the test references."""
    name = f"{args.dataset}_{args.source}_{args.target}_tokens"
    try:
        with tempfile.TemporaryDirectory() as folder:
            if args.dataset == "synthetic":
                tokenize_pairs(args, synthetic_pairs(args), folder)
            else:
                folder = f"{args.data_dir}/{name}"
                if not os.path.isdir(folder):
                    splits = load_pairs(args)
                    os.makedirs(args.data_dir, exist_ok=True)
                    with tempfile.TemporaryDirectory(dir=args.data_dir, ignore_cleanup_errors=True) as work:
                        tokenize_pairs(args, splits, work)
                        os.chmod(work, 0o755)
                        with suppress(OSError):  # another job was faster
                            os.rename(work, folder)
            splits = [[[np.load(f"{folder}/{split}_{side}_{what}.npy", "r") for what in ("ids", "ends")]
                       for side in ("source", "target")] for split in SPLITS]
            *words, references = ([*map(str, json.load(open(f"{folder}/{name}.json")))]
                                  for name in ("source_words", "target_words", "references"))
        for pair in splits:
            for side, known in zip(pair, words):
                check_tokens(*side, len(known), shortest=2)  # a start and an end
            if len(pair[0][1]) != len(pair[1][1]):
                raise ValueError(f"{len(pair[0][1]) - 1} source and {len(pair[1][1]) - 1} target sentences")
        if len(references) != len(splits[2][0][1]) - 1:
            raise ValueError(f"{len(references)} references of {len(splits[2][0][1]) - 1} test sentences")
    except Exception as error:  # `datasets` has many of its own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        fail(f"--dataset {args.dataset}: {reason}; remove what is damaged in {args.data_dir}, which must be writable, "
             f"and where there is internet (a login node) run: python {sys.argv[0]} --dataset {args.dataset} "
             f"--data_dir {args.data_dir} --source {args.source} --target {args.target} --max_steps 1")
    num_train = len(splits[0][0][1]) - 1
    if args.batch_size > num_train:
        fail(f"--batch_size {args.batch_size} exceeds the {num_train} training pairs")
    return splits, words, references


def similar_batches(ends, args, epoch):
    """Indices of an epoch's batches (steps, B): random texts, those of a batch about equally long.

    100 batches at a time are sorted by length and cut, all are shuffled: the same for any number of processes.
    """
    random, lengths = np.random.default_rng((args.seed, epoch)), np.minimum(np.diff(ends), args.seq_len)
    order = random.permutation(len(lengths))[:len(lengths) // args.batch_size * args.batch_size]
    pools = np.split(order, range(100 * args.batch_size, len(order), 100 * args.batch_size))
    batches = np.concatenate([pool[lengths[pool].argsort(kind="stable")] for pool in pools])
    return random.permutation(batches.reshape(-1, args.batch_size))[:args.max_steps]


def tokens_of_a_batch(split, args):
    """How many target tokens a batch has to predict, in the mean: of each sentence all but the start, cut at --seq_len.

    Every batch's loss is divided by it, so that all tokens of an epoch count alike, those of short sentences, too.
    """
    return args.batch_size * np.minimum(np.diff(split[1][1]) - 1, args.seq_len).mean()


def padded(side, indices, longest):
    """The tokens (B, longest of them) of these sentences, cut at `longest`, zeros beyond their ends; lengths (B,)."""
    ids, ends = side
    lengths = np.minimum(ends[indices + 1] - ends[indices], longest)
    columns = np.arange(lengths.max())
    tokens = ids.take(ends[indices][:, None] + columns, mode="clip").astype(np.int64)
    tokens[columns >= lengths[:, None]] = PAD
    return torch.from_numpy(tokens), torch.from_numpy(lengths)


def create_dataloader(split, batches, args, device):
    """Yields sources (B, S), their lengths (B,) on the CPU, targets (B, T + 1), from pairs of indices and num_tokens.

    The batch's loss is to be divided by num_tokens.
    """
    for indices, num_tokens in batches:
        source, lengths = padded(split[0], indices, args.seq_len)
        target, _ = padded(split[1], indices, args.seq_len + 1)
        yield source.to(device), lengths, target.to(device), num_tokens


class LSTMTranslator(nn.Module):
    """Sources (B, S), lengths (B,), targets (B, T) to logits (B, T, V) of the tokens after them.

    Sutskever, Vinyals and Le 2014, "Sequence to sequence learning with neural networks".
    """

    def __init__(self, source_size, target_size, d_embedding, d_hidden, num_layers, dropout):
        super().__init__()
        self.source, self.target = nn.Embedding(source_size, d_embedding), nn.Embedding(target_size, d_embedding)
        self.encoder, self.decoder = (nn.LSTM(d_embedding, d_hidden, num_layers, batch_first=True, dropout=dropout)
                                      for _ in range(2))
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(d_hidden, target_size)

    def encode(self, source, lengths):
        """What decode needs to know of the sources: the state after their last tokens."""
        x = nn.utils.rnn.pack_padded_sequence(self.dropout(self.source(source)), lengths, True, enforce_sorted=False)
        return self.encoder(x)[1]

    def decode(self, state, target):
        return self.head(self.decoder(self.dropout(self.target(target)), state)[0])

    def forward(self, source, lengths, target):
        return self.decode(self.encode(source, lengths), target)


class TransformerTranslator(nn.Module):
    """Sources (B, S), lengths (B,), targets (B, T) to logits (B, T, V) of the tokens after them.

    Vaswani et al. 2017, "Attention is all you need", with the norms in front and learned positions.
    """

    def __init__(self, source_size, target_size, d_model, n_heads, dim_feedforward, num_layers, seq_len, dropout):
        super().__init__()
        self.source, self.target = nn.Embedding(source_size, d_model), nn.Embedding(target_size, d_model)
        self.positions, self.dropout = nn.Embedding(seq_len, d_model), nn.Dropout(dropout)
        sizes = d_model, n_heads, dim_feedforward, dropout
        self.encoder = nn.ModuleList(Block(*sizes) for _ in range(num_layers))
        self.decoder = nn.ModuleList(CrossBlock(*sizes) for _ in range(num_layers))
        self.source_norm, self.target_norm = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.xavier_uniform_(parameter)

    def embed(self, embedding, tokens):
        x = embedding(tokens) * embedding.embedding_dim ** 0.5  # as large as the positions
        return self.dropout(x + self.positions.weight[:tokens.shape[1]])

    def encode(self, source, lengths):
        """What decode needs to know of the sources: their memory (B, S, D), and its mask (B, 1, 1, S)."""
        mask = (source != PAD)[:, None, None]
        x = self.embed(self.source, source)
        for block in self.encoder:
            x = block(x, mask)
        return self.source_norm(x), mask

    def decode(self, state, target):
        x = self.embed(self.target, target)
        for block in self.decoder:
            x = block(x, *state)
        return F.linear(self.target_norm(x), self.target.weight)  # the head is the embedding

    def forward(self, source, lengths, target):
        return self.decode(self.encode(source, lengths), target)


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


class CrossBlock(nn.Module):
    """A Block that attends to what came before and then to the memory (B, S, D), where the mask allows it."""

    def __init__(self, d_model, n_heads, dim_feedforward, dropout):
        super().__init__()
        self.block, self.n_heads = Block(d_model, n_heads, dim_feedforward, dropout), n_heads
        self.dropout = nn.Dropout(dropout)
        self.norm, self.query = nn.LayerNorm(d_model), nn.Linear(d_model, d_model, False)
        self.key_value, self.projection = nn.Linear(d_model, 2 * d_model, False), nn.Linear(d_model, d_model, False)

    def forward(self, x, memory, mask):
        x = self.block.attend(x)
        q = self.query(self.norm(x)).unflatten(2, (self.n_heads, -1)).transpose(1, 2)  # (B, H, T, D / H)
        k, v = self.key_value(memory).unflatten(2, (2, self.n_heads, -1)).unbind(2)  # (B, S, H, D / H)
        y = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.block.feed_forward(x + self.dropout(self.projection(y.transpose(1, 2).flatten(2))))


def create_model(args, source_size, target_size):
    if args.model == "lstm":
        return LSTMTranslator(source_size, target_size, 256, 512, 2, args.dropout)
    return TransformerTranslator(source_size, target_size, 256, 8, 512, 3, args.seq_len + 1, args.dropout)


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


def translation_loss(model, source, lengths, target, num_tokens, args):
    """The loss in nats, summed over the target tokens and divided by num_tokens; the sums of losses and tokens (2,)."""
    with torch.autocast(source.device.type, DTYPES[args.precision], args.precision != "fp32"):
        logits = model(source, lengths, target[:, :-1])  # (B, T, V)
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD, reduction="sum")
    return loss / num_tokens, torch.stack((loss.detach(), (target[:, 1:] != PAD).sum())).double()


def train(ddp_model, loader, steps, parts, state, watch, comm_timer, stop_signals, args, device):
    """Train to the end of the epoch; returns whether a stop signal ended it early."""
    rank, optimizer, scaler = dist.get_rank(), parts["optimizer"], parts["scaler"]
    ddp_model.train()
    sums = torch.tensor(state["sums"], dtype=torch.float64, device=device)
    sums *= rank == 0  # those of the snapshot are of all processes
    progress = tqdm(loader, f"epoch {state['epoch']}", steps, initial=state["step"], disable=rank > 0 or None)
    for *batch, num_tokens in progress:
        torch.manual_seed(hash((args.seed, state["epoch"], state["step"], rank)))  # of dropout: no state to save
        watch.mark("data")
        to_come = args.grad_accum_steps
        for part in zip(*(array.chunk(args.grad_accum_steps) for array in batch)):
            to_come -= 1
            with ddp_model.no_sync() if to_come else nullcontext():  # only the last part sends gradients
                loss, part_sums = translation_loss(ddp_model, *part, num_tokens, args)
                sums += part_sums
                watch.mark("forward")
                scaler.scale(loss).backward()
                watch.mark("backward", at=None if to_come else comm_timer.backward_end)
        watch.mark("comm")
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


def whole_batches(split, share):
    """The pairs of the share in batches of 128, about equally long, each with its own number of target tokens."""
    share = share[np.diff(split[0][1])[share].argsort(kind="stable")]
    return [(share[start:start + 128], 1) for start in range(0, len(share), 128)]


@torch.no_grad()
def translate(model, split, batches, words, args, device):
    """{index: translation} of the sources of the batches, by greedy decoding: the likeliest word, up to --seq_len."""
    model.eval()
    translations = {}
    for (indices, _), (source, lengths, _, _) in zip(batches, create_dataloader(split, batches, args, device)):
        target = torch.full((len(indices), 1), START, device=device)
        done = torch.zeros(len(indices), dtype=torch.bool, device=device)
        with torch.autocast(device.type, DTYPES[args.precision], args.precision != "fp32"):
            state = model.encode(source, lengths)
            while target.shape[1] <= args.seq_len and not done.all():
                token = model.decode(state, target)[:, -1].argmax(1)
                target = torch.cat((target, token[:, None]), 1)
                done |= token == END
        for index, ids in zip(indices.tolist(), target[:, 1:].tolist()):
            translations[index] = " ".join(words[id] for id in ids[:ids.index(END) if END in ids else None])
    return translations


def bleu(translations, references):
    """BLEU of lower-cased text in the tokens that the model writes; for sacrebleu they are words between spaces."""
    split = tokenizers.pre_tokenizers.Whitespace().pre_tokenize_str
    references = [" ".join(word for word, _ in split(text.lower())) for text in references]
    return sacrebleu.corpus_bleu([translations[index] for index in range(len(references))], [references],
                                 tokenize="none", force=True).score


def print_translations(split, translations, references, words):
    """Three sentences: source, translation, reference."""
    ids, ends = split[0]
    for index in range(min(3, len(references))):
        source = " ".join(words[id] for id in ids[ends[index] + 1:ends[index + 1] - 1])
        print(f"{source}\n    -> {translations[index]}\n     = {references[index]}")


def main(args):
    sys.stdout.reconfigure(line_buffering=True)
    keep_freed_memory()
    stop_signals = []
    for signum in SIGNALS:
        signal.signal(signum, lambda signum, frame: stop_signals.append(signum))
    rank, world_size, device = setup(args)
    if rank > 0:
        dist.all_reduce(torch.zeros(1))  # rank 0 goes first: it makes the data, and says what is wrong
    (train_split, val_split, test_split), words, references = read_pairs(args)
    num_train, num_val, num_test = (len(split[0][1]) - 1 for split in (train_split, val_split, test_split))
    ends = train_split[0][1] + train_split[1][1]  # by which similar_batches knows the lengths of both sides
    num_tokens = tokens_of_a_batch(train_split, args)
    torch.manual_seed(args.seed)
    model = create_model(args, *map(len, words)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, fused=True)
    parts = {"model": model, "optimizer": optimizer,
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
        "run": state["run"], "script": "multinode/translation.py", "processes": world_size,
        "nodes": world_size // int(os.environ["LOCAL_WORLD_SIZE"]),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU", "threads": torch.get_num_threads(),
        "torch": torch.__version__, "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "train_pairs": num_train, "val_pairs": num_val,
        "vocab_sizes": " and ".join(str(len(side)) for side in words),
        "micro_batch_size": args.batch_size // args.grad_accum_steps // world_size}
    if rank == 0:
        print(HEADER.format_map(settings | state))
        print_row(EPOCH)
    epochs, watch, start = [], Stopwatch(device), time.perf_counter()
    comm_timer = CommTimer(watch, COMM_HOOKS[args.comm_hook],
                           powerSGD_hook.PowerSGDState(None) if args.comm_hook == "powersgd" else None)
    ddp_model.register_comm_hook(None, comm_timer.hook)
    while state["epoch"] < args.epochs:
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * (1 - state["epoch"] / args.epochs)
        first_step, batches = state["step"], similar_batches(ends, args, state["epoch"])
        shares = ((indices[rank::world_size], num_tokens / world_size)  # DDP divides, too
                  for indices in batches[first_step:])
        loader = create_dataloader(train_split, shares, args, device)
        if train(ddp_model, loader, len(batches), parts, state, watch, comm_timer, stop_signals, args, device):
            if rank == 0:
                save_snapshot(args, parts, state)
                print(f"stopped by a signal: epoch {state['epoch']}, step {state['step']}, snapshot {args.snapshot}")
            cleanup()
            return  # status 0: for any other torchrun would start it again
        val_batches = whole_batches(val_split, np.arange(rank, num_val, world_size))
        val_loader = create_dataloader(val_split, val_batches, args, device)
        val_sums = evaluate(translation_loss, model, val_loader, args, device)
        dist.all_reduce(val_sums)
        watch.mark("eval")
        watch.read()
        comm_timer.read()
        seconds = watch.seconds | {"time": time.perf_counter() - start}
        start, watch.seconds = start + seconds["time"], dict.fromkeys(watch.seconds, 0.0)
        seconds_of = [None] * world_size
        dist.all_gather_object(seconds_of, seconds)
        num_samples = (state["step"] - first_step) * args.batch_size
        rows = epoch_rows(settings, state, val_sums, seconds_of, num_samples)
        epochs.append([row | {"val_ppl": math.exp(min(row["val_loss"], 100))} for row in rows])
        if rank == 0:
            print_row(EPOCH, average(epochs[-1]))
            if args.log:
                append_log(args.log, epochs[-1])
        state |= {"epoch": state["epoch"] + 1, "step": 0, "sums": [0.0] * NUM_SUMS}
        if rank == 0:
            save_snapshot(args, parts, state)
        watch.mark("save")
    test_batches = whole_batches(test_split, np.arange(rank, num_test, world_size))
    test_loader = create_dataloader(test_split, test_batches, args, device)
    test_sums = evaluate(translation_loss, model, test_loader, args, device)
    dist.all_reduce(test_sums)
    translations = [None] * world_size
    dist.all_gather_object(translations, translate(model, test_split, test_batches, words[1], args, device))
    translations = {index: text for part in translations for index, text in part.items()}
    settings |= {"test_loss": (test_sums[0] / test_sums[1]).item(), "BLEU": bleu(translations, references)}
    if rank == 0:
        print_translations(test_split, translations, references, words[0])
    if epochs and rank == 0:  # the row for results.md: means over the epochs after the first, which warms up
        summary = settings | average([row for rows in epochs[1:] or epochs for row in rows])
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
