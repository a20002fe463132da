r"""Train a translator on the GPUs of many nodes, or on CPU processes where there is no GPU.

    torchrun --standalone --nproc_per_node=2 -- multinode/translation.py      # one node, to try it
    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HEAD_NODE:29400 -- \
        multinode/translation.py --dataset multi30k --snapshot de_en.pt       # on each of two nodes
    sbatch --nodes=4 --gpus-per-node=4 slurm/multinode_translation.slurm --dataset multi30k

torchrun starts a process for each GPU. The bare -- keeps it from taking --log for its own option.
Shapes: B pairs of a batch, S source and T target tokens, D = d_model, V words.
"""

import argparse
import json
import math
import os
import re
import signal
import statistics
import sys
import textwrap
import time
from datetime import timedelta

import datasets
import numpy as np
import sacrebleu
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

# ============================ Yours: flags, data, model, loss. Replace. ===========================

HUB = {"multi30k": "bentrevett/multi30k"}  # names on the Hugging Face hub
PAD, UNKNOWN, START, END = range(4)  # token ids
SIDES = ["source", "target"]
DIGITS = "zero one two three four five six seven eight nine".split()
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHOWN = "epoch train_loss val_loss val_ppl seconds samples/s".split()
SAME_ON_RESUME = (
    "model dataset source target seq_len batch_size learning_rate dropout precision seed".split()
)
COMM_HOOKS = {
    "none": default_hooks.allreduce_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
}


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model", choices=("transformer", "lstm"), default="transformer", help="network to train")
    add("--dataset", default="synthetic", help="synthetic, multi30k, a folder or a hub name")
    add("--data_dir", default="data", help="folder in which --dataset is looked for first")
    add("--source", default="de", help="column to translate from")
    add("--target", default="en", help="column to translate to")
    add("--seq_len", type=int, default=64, help="longest sentence in tokens; the rest is cut off")
    add("--epochs", type=int, default=10, help="passes over the training pairs")
    add("--max_steps", type=int, default=0, help="end each epoch after so many steps; 0: no limit")
    add("--batch_size", type=int, default=128, help="global batch: pairs per optimizer step")
    add("--grad_accum_steps", type=int, default=1, help="micro-batches of a batch, to save memory")
    add("--learning_rate", type=float, default=1e-3, help="first rate of AdamW; falls every epoch")
    add("--dropout", type=float, default=0.0, help="dropout probability, on embeddings too")
    add("--precision", choices=DTYPES, default="fp32", help="number type; on GPUs fp32 means TF32")
    add("--comm_hook", choices=COMM_HOOKS, default="none", help="type in which gradients are sent")
    add("--compile", action="store_true", help="use torch.compile, which slows the first epoch")
    add("--seed", type=int, default=1, help="seed of weights, data order and dropout")
    add("--snapshot", metavar="FILE", help="save each epoch and when stopped; resume if it exists")
    add("--snapshot_every", type=int, default=0, help="also save every so many steps; 0: do not")
    add("--log", metavar="FILE.jsonl", help="append a row per epoch and process, for report.py")
    add("--timeout", type=int, default=600, help="seconds after which a hung process ends the run")
    args = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        parser.error(f"start it with: torchrun --standalone --nproc_per_node=2 -- {sys.argv[0]}")
    shares = args.grad_accum_steps * int(os.environ["WORLD_SIZE"])
    if min(args.batch_size, shares) < 1 or args.batch_size % shares:
        parser.error(f"--batch_size must be a multiple of {shares}: processes x --grad_accum_steps")
    for path in filter(None, (args.snapshot, args.log)):
        if not os.path.isdir(os.path.dirname(path) or "."):
            parser.error(f"there is no folder for {path}")
    return args


def synthetic_pairs():
    """Returns three splits: numbers of 1 to 12 digits ("4 2") and their names ("four two")."""
    generator = np.random.default_rng(0)
    sources = []
    targets = []
    for row in range(22_000):
        digits = generator.integers(10, size=1 + row % 12)
        sources.append(" ".join(str(digit) for digit in digits))
        targets.append(" ".join(DIGITS[digit] for digit in digits))
    pairs = datasets.Dataset.from_dict({"source": sources, "target": targets})
    return [pairs.skip(2000), pairs.take(1000), pairs.skip(1000).take(1000)]


def read_splits(args):
    """Returns the training, validation and test pairs: tables with columns source and target."""
    datasets.disable_progress_bars()
    if args.dataset == "synthetic":
        return synthetic_pairs()
    folder = os.path.join(args.data_dir, args.dataset)
    path = folder if os.path.isdir(folder) else HUB.get(args.dataset, args.dataset)
    names = {args.source: "source", args.target: "target"}
    try:
        splits = datasets.load_dataset(path, split=["train", "validation", "test"])
        return [split.select_columns([*names]).rename_columns(names) for split in splits]
    except (OSError, TypeError, ValueError, datasets.exceptions.DatasetsError) as error:
        sys.exit(f"cannot read {path}: {error}")


def train_tokenizer(texts, seq_len):
    """Returns a tokenizer for the frequent words of these texts. It pads to seq_len tokens."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # words, and runs of punctuation
    trainer = trainers.WordLevelTrainer(
        vocab_size=30_000,
        min_frequency=2,
        show_progress=False,
        special_tokens=["[PAD]", "[UNK]", "[START]", "[END]"],
    )
    tokenizer.train_from_iterator((text for text in texts if text), trainer)
    tokenizer.post_processor = processors.BertProcessing(("[END]", END), ("[START]", START))
    tokenizer.enable_truncation(seq_len)
    tokenizer.enable_padding(length=seq_len, pad_id=PAD)
    return tokenizer


def encode_pairs(batch, tokenizers):
    """Returns sources and targets (N, seq_len), source_length and target_length (N,)."""
    encoded = {}
    for side, tokenizer in tokenizers.items():
        texts = [text or "" for text in batch[side]]  # a missing text is None
        encodings = tokenizer.encode_batch_fast(texts)
        ids = np.array([encoding.ids for encoding in encodings], np.int16)
        encoded[f"{side}s"] = ids
        encoded[f"{side}_length"] = np.count_nonzero(ids != PAD, axis=1)
    return encoded


def encode_split(texts, tokenizers):
    """Returns the arrays of encode_pairs and the texts, both with the longest sources first."""
    # map() names its cache after the function's module. Where multigpu/translation.py starts a
    # process, the module is called __mp_main__, and the pairs would be encoded again.
    encode_pairs.__module__ = "__main__"
    encoded = texts.map(encode_pairs, batched=True, fn_kwargs={"tokenizers": tokenizers})
    arrays = encoded.remove_columns(SIDES).with_format("numpy")[:]
    order = np.argsort(-arrays["source_length"], stable=True)
    arrays = {name: array[order] for name, array in arrays.items()}
    return arrays, texts.select(order)


def read_pairs(args):
    """Returns the three splits as arrays, the texts of the test split, and the tokenizers."""
    train_texts, val_texts, test_texts = read_splits(args)
    tokenizers = {side: train_tokenizer(train_texts[side], args.seq_len) for side in SIDES}
    train_split, _ = encode_split(train_texts, tokenizers)
    val_split, _ = encode_split(val_texts, tokenizers)
    test_split, test_texts = encode_split(test_texts, tokenizers)
    return train_split, val_split, test_split, test_texts, tokenizers


def select_pairs(split, rows, device):
    """Returns sources (B, S), their lengths (B,), on the CPU, and targets (B, T + 1)."""
    lengths = split["source_length"][rows]
    longest_target = split["target_length"][rows].max()
    sources = torch.from_numpy(split["sources"][rows, : lengths.max()]).long()
    targets = torch.from_numpy(split["targets"][rows, :longest_target]).long()
    if device.type == "cuda":  # pinned memory: the CPU does not wait for the copy
        sources = sources.pin_memory()
        targets = targets.pin_memory()
    sources = sources.to(device, non_blocking=True)
    targets = targets.to(device, non_blocking=True)
    return sources, torch.from_numpy(lengths), targets


def batches(split, args, epoch, steps, device):
    """Yields a list of micro-batches for each step. select_pairs makes each of them."""
    lengths = split["source_length"] + split["target_length"]
    size = args.batch_size
    num_rows = len(lengths) // size * size  # the rest does not fill a batch
    generator = np.random.default_rng((args.seed, epoch))
    shuffled = generator.permutation(len(lengths))[:num_rows]
    # 100 random batches at a time are sorted by length, so that a batch needs little padding.
    pools = []
    for start in range(0, num_rows, 100 * size):
        pool = shuffled[start : start + 100 * size]
        pools.append(pool[lengths[pool].argsort(kind="stable")])
    order = generator.permutation(np.concatenate(pools).reshape(-1, size))  # (steps, B)
    for step in steps:
        rows = np.sort(order[step])  # longest first, as in `split`: packing needs that
        rows = rows[dist.get_rank() :: dist.get_world_size()]
        micro_batches = np.split(rows, args.grad_accum_steps)
        yield [select_pairs(split, micro_batch, device) for micro_batch in micro_batches]


def validation_batches(split, device):
    """Returns a list of what select_pairs gives, for this process's share of the split."""
    rows = np.arange(dist.get_rank(), len(split["sources"]), dist.get_world_size())
    loader = []
    for start in range(0, len(rows), 128):
        loader.append(select_pairs(split, rows[start : start + 128], device))
    return loader


class Translator(nn.Module):
    """Maps sources (B, S), lengths (B,) and targets (B, T) to the next tokens' logits (B, T, V)."""

    def forward(self, source, lengths, target):
        return self.decode(self.encode(source, lengths), target)


class LSTMTranslator(Translator):
    """Sutskever, Vinyals and Le 2014: the last state of the encoder starts the decoder."""

    def __init__(self, source_size, target_size, dropout):
        super().__init__()
        self.source = nn.Embedding(source_size, 256)
        self.target = nn.Embedding(target_size, 256)
        self.encoder = nn.LSTM(256, 512, num_layers=2, batch_first=True, dropout=dropout)
        self.decoder = nn.LSTM(256, 512, num_layers=2, batch_first=True, dropout=dropout)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(512, target_size)

    def encode(self, source, lengths):
        x = self.dropout(self.source(source))
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        _, state = self.encoder(packed)
        return state

    def decode(self, state, target):
        x, _ = self.decoder(self.dropout(self.target(target)), state)
        return self.head(x)


class TransformerTranslator(Translator):
    """Vaswani et al. 2017, with norms first, learned positions, and the embedding as the head."""

    def __init__(self, source_size, target_size, seq_len, dropout):
        super().__init__()
        self.source = nn.Embedding(source_size, 256)
        self.target = nn.Embedding(target_size, 256)
        self.positions = nn.Embedding(seq_len, 256)
        self.dropout = nn.Dropout(dropout)
        options = {"activation": "gelu", "batch_first": True, "norm_first": True, "bias": False}
        encoder_layer = nn.TransformerEncoderLayer(256, 8, 512, dropout=0.0, **options)
        decoder_layer = nn.TransformerDecoderLayer(256, 8, 512, dropout=0.0, **options)
        self.encoder = nn.TransformerEncoder(
            encoder_layer, 3, nn.LayerNorm(256), enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(decoder_layer, 3, nn.LayerNorm(256))
        for name, module in self.named_modules():  # dropout is only at the end of sublayers
            if name.endswith(("dropout1", "dropout2", "dropout3")):
                module.p = dropout
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.xavier_uniform_(parameter)

    def embed(self, embedding, tokens):
        x = embedding(tokens) * 256**0.5  # scaled as in the paper
        return self.dropout(x + self.positions.weight[: tokens.shape[1]])

    def encode(self, source, lengths):
        """Returns the encoder's output (B, S, D), and where the sources are padding (B, S)."""
        padding = source == PAD
        x = self.embed(self.source, source)
        return self.encoder(x, src_key_padding_mask=padding), padding

    def decode(self, state, target):
        memory, padding = state
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], target.device)
        x = self.embed(self.target, target)
        x = self.decoder(x, memory, mask, tgt_is_causal=True, memory_key_padding_mask=padding)
        return nn.functional.linear(x, self.target.weight)


def create_model(args, source_size, target_size):
    if args.model == "lstm":
        return LSTMTranslator(source_size, target_size, args.dropout)
    return TransformerTranslator(source_size, target_size, args.seq_len, args.dropout)


def translation_loss(model, source, lengths, target, args):
    """Returns the summed loss, for backward(), and the sums (2,) of losses and of tokens."""
    with torch.autocast(source.device.type, DTYPES[args.precision], args.precision != "fp32"):
        logits = model(source, lengths, target[:, :-1]).flatten(0, 1)  # (B x T, V)
        expected = target[:, 1:].flatten()
        loss = nn.functional.cross_entropy(logits, expected, ignore_index=PAD, reduction="sum")
    return loss, torch.stack((loss.detach(), (expected != PAD).sum())).double()


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


def translation_row(settings, progress, val_sums):
    """Returns settings and losses of an epoch, for the log."""
    train_loss, train_count = progress["sums"]
    val_loss, val_count = val_sums.tolist()
    row = settings | {"run": progress["run"], "epoch": progress["epoch"]}
    row |= {"train_loss": train_loss / train_count, "val_loss": val_loss / val_count}
    row["val_ppl"] = math.exp(min(row["val_loss"], 100))  # perplexity of a target token
    return row


def cell(value):
    """Returns the number with five significant digits; without decimals if whole or large."""
    has_decimals = isinstance(value, float) and abs(value) < 1000
    return f"{value:#.5g}" if has_decimals else f"{value:,.0f}"


@torch.no_grad()
def translate(model, loader, tokenizer, args):
    """Returns translations of the loader's sources: greedily, the likeliest token each time."""
    model.eval()
    translations = []
    for source, lengths, _ in loader:
        target = torch.full((len(source), 1), START, device=source.device)  # (B, T)
        state = model.encode(source, lengths)
        while target.shape[1] < args.seq_len and not (target == END).any(1).all():
            token = model.decode(state, target)[:, -1].argmax(1)
            target = torch.cat((target, token[:, None]), 1)
        for ids in target[:, 1:].tolist():
            text = tokenizer.decode(ids, skip_special_tokens=False)
            translations.append(text.partition("[END]")[0])
    return translations


def bleu_score(texts, translations):
    """Returns the BLEU of the translations, without regard to case."""
    references = [text or "" for text in texts["target"]]
    bleu = sacrebleu.corpus_bleu(  # force: no warning that the texts look tokenized
        translations, [references], lowercase=True, tokenize="intl", force=True
    )
    return bleu.score


def main(args):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    nodes = int(os.environ["GROUP_WORLD_SIZE"])
    if nodes == 1:
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # this machine only
    device = find_device(int(os.environ["LOCAL_RANK"]))
    setup(args, rank, world_size, "env://", device)
    patient = dist.new_group(backend="gloo", timeout=timedelta(days=1))  # to wait for rank 0
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # on GPUs, fp32 layers compute in TF32
    # Rank 0 prepares the data, then one process of each other node, and then the rest read them.
    turn = int(rank > 0) + int(os.environ["LOCAL_RANK"] != "0")
    for _ in range(turn):
        dist.barrier(patient)
    train_split, val_split, test_split, texts, tokenizers = read_pairs(args)
    for _ in range(turn, 2):  # each process passes two barriers
        dist.barrier(patient)
    val_batches = validation_batches(val_split, device)
    test_batches = validation_batches(test_split, device)
    num_steps = len(train_split["sources"]) // args.batch_size
    if num_steps == 0 or min(len(val_split["sources"]), len(test_split["sources"])) < world_size:
        sys.exit(f"{args.dataset} is too small for --batch_size or for {world_size} processes")
    mean_tokens = args.batch_size * (train_split["target_length"] - 1).mean()  # of a batch
    if args.max_steps > 0:
        num_steps = min(num_steps, args.max_steps)

    torch.manual_seed(args.seed)
    source_size = tokenizers["source"].get_vocab_size()
    target_size = tokenizers["target"].get_vocab_size()
    model = create_model(args, source_size, target_size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    progress = load_snapshot(args, parts)
    starts = [None] * world_size
    dist.all_gather_object(starts, (progress["epoch"], progress["step"]))
    if len(set(starts)) > 1:
        sys.exit(f"the nodes see different files {args.snapshot}: use a shared file system")
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    comm_hook = COMM_HOOKS[args.comm_hook]
    watch = CommTimer(device, comm_hook)
    comm_hook = watch.hook  # calls it, and notes the time
    ddp_model.register_comm_hook(None, comm_hook)
    if args.compile:
        ddp_model.compile()

    settings = vars(args) | {
        "script": "multinode/translation.py",
        "processes": world_size,
        "nodes": nodes,
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
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - epoch / args.epochs)
        loader = batches(train_split, args, epoch, steps, device)
        # Each process begins with its share of the sums so far, or 0.0. add_up() adds them up.
        sums = torch.tensor(progress["sums"], dtype=torch.float64, device=device) / world_size
        bar = tqdm(loader, f"epoch {epoch}", num_steps, initial=first_step, disable=rank > 0, **BAR)
        model.train()
        for micro_batches in bar:
            # A resumed run draws the same dropout: numbers have the same hash in every run.
            torch.manual_seed(hash((args.seed, epoch, progress["step"], rank)))
            watch.mark("data")
            for number, micro_batch in enumerate(micro_batches, start=1):
                is_last = number == args.grad_accum_steps
                ddp_model.require_backward_grad_sync = is_last  # as no_sync() does
                loss, loss_sums = translation_loss(ddp_model, *micro_batch, args)
                sums = sums + loss_sums
                watch.mark("forward")
                scaler.scale(loss / mean_tokens * world_size).backward()  # DDP averages
                watch.mark_backward(is_last)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
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

        val_sums = evaluate(translation_loss, model, val_batches, args)
        dist.all_reduce(val_sums)
        watch.mark("eval")
        watch.flush()
        row = translation_row(settings, progress, val_sums)
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
        print_row(rows, "val_ppl")
    if not stop:
        test_sums = evaluate(translation_loss, model, test_batches, args)
        dist.all_reduce(test_sums)
        gathered = [None] * world_size
        dist.all_gather_object(gathered, translate(model, test_batches, tokenizers["target"], args))
    if rank == 0 and not stop:
        translations = []
        for number in range(len(texts)):  # each process has translated every world_size-th text
            translations.append(gathered[number % world_size][number // world_size])
        for number in len(texts) // 4, len(texts) // 2, len(texts) * 3 // 4:
            print(*texts[number].values(), translations[number], sep="\n    ")
        bleu = bleu_score(texts, translations)
        print(f"test_loss {test_sums[0] / test_sums[1]:.4f}, BLEU {bleu:.2f}")
    dist.barrier(patient)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
