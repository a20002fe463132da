r"""Train a text classifier on the GPUs of many nodes, or on CPU processes where there is no GPU.

    torchrun --standalone --nproc_per_node=2 -- multinode/text.py             # one node, to try it
    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HEAD_NODE:29400 -- \
        multinode/text.py --dataset imdb --snapshot text.pt                   # on each of two nodes
    sbatch --nodes=4 --gpus-per-node=4 slurm/multinode_text.slurm --model transformer

torchrun starts a process for each GPU. The bare -- keeps it from taking --log for its own option.
To train on your own texts, name their folder: splits train and test, columns text and label.
Shapes: N texts of a split, B of a batch, T tokens, D = d_model, H heads, K classes.
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
from datasets import Dataset, disable_progress_bars, exceptions, load_dataset
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PHASES = ("data", "forward", "backward", "comm", "optimizer", "eval", "save")
SAME_ON_RESUME = (
    "model",
    "size",
    "dataset",
    "seq_len",
    "batch_size",
    "learning_rate",
    "dropout",
    "precision",
    "seed",
)
LOGGED = (*SAME_ON_RESUME, "grad_accum_steps", "compile", "epochs", "max_steps")
COMM_HOOKS = {
    "none": default_hooks.allreduce_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
}
SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)  # each asks the run to save and stop
ARRIVED = []  # the signals that this process has received
HUB = {"ag_news": "fancyzhx/ag_news", "imdb": "stanfordnlp/imdb"}  # names on the Hugging Face hub
SIZES = {"small": (128, 4, 512, 2), "large": (256, 8, 1024, 4)}  # D, H, dim_feedforward, layers
VOCAB_SIZE = 20_000  # [PAD], [UNK] and the most frequent words, at most


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model", choices=("nbow", "transformer"), default="nbow", help="nbow: a bag of words")
    add("--size", choices=SIZES, default="small", help="width 128, 2 layers; or 256, 4 layers")
    add("--dataset", default="synthetic", help="or ag_news, imdb, a folder, a name on the hub")
    add("--data_dir", default="data", help="folder in which --dataset is looked for first")
    add("--seq_len", type=int, default=256, help="tokens of a text that the model reads")
    add("--epochs", type=int, default=5, help="passes over the training texts")
    add("--max_steps", type=int, default=0, help="end each epoch after so many steps; 0: no limit")
    add("--batch_size", type=int, default=64, help="global batch: texts per optimizer step")
    add("--grad_accum_steps", type=int, default=1, help="micro-batches of a batch, to save memory")
    add("--learning_rate", type=float, default=1e-3, help="rate of AdamW; x 0.9 after each epoch")
    add("--dropout", type=float, default=0.0, help="dropout probability in blocks and classifier")
    add("--precision", choices=DTYPES, default="fp32", help="number type of the forward pass")
    add("--comm_hook", choices=COMM_HOOKS, default="none", help="send gradients in this type")
    add("--compile", action="store_true", help="use torch.compile, which slows the first epoch")
    add("--seed", type=int, default=1, help="seed of weights, data order and dropout")
    add("--snapshot", metavar="FILE", help="save each epoch and when stopped; resume if it exists")
    add("--snapshot_every", type=int, default=0, help="also save every so many steps; 0: do not")
    add("--log", metavar="FILE.jsonl", help="append a row per epoch and process, for report.py")
    add("--timeout", type=int, default=600, help="seconds to wait for a process that hangs")
    args = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        parser.error(f"start it with: torchrun --standalone --nproc_per_node=2 -- {sys.argv[0]}")
    shares = args.grad_accum_steps * int(os.environ["WORLD_SIZE"])
    if min(args.batch_size, shares) < 1 or args.batch_size % shares:
        parser.error(f"--batch_size must be a multiple of {shares}: processes x --grad_accum_steps")
    return args


def synthetic_texts():
    """Yields texts of 5 to 100 random words. Every tenth word is one of its class's 50 words."""
    generator = np.random.default_rng(0)
    for label in generator.integers(4, size=12_000).tolist():
        words = generator.integers(1000, size=generator.integers(5, 101))
        words[::10] = 50 * label + words[::10] % 50
        yield {"text": " ".join(map(str, words)), "label": label}


def learn_vocabulary(batch):
    """Returns a tokenizer for these texts, as a table of one string, so that `map` caches it."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # words, and runs of punctuation
    trainer = trainers.WordLevelTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=2,
        show_progress=False,
        special_tokens=["[PAD]", "[UNK]"],
    )
    tokenizer.train_from_iterator([text or "" for text in batch["text"]], trainer)
    return {"tokenizer": [tokenizer.to_str()]}


def encode(batch, tokenizer, labels):
    """Returns token ids (N, seq_len) with zeros after a text's end, lengths (N,), classes (N,)."""
    encodings = tokenizer.encode_batch_fast([text or "" for text in batch["text"]])
    tokens = np.array([encoding.ids for encoding in encodings], np.int16)
    tokens[:, 0] = tokens[:, 0].clip(1)  # an empty text becomes one [UNK]
    return {
        "tokens": tokens,
        "length": np.count_nonzero(tokens, axis=1),
        "class": [labels.index(label) for label in batch["label"]],
    }


def read_texts(args, device):
    """Returns tokens, lengths and classes of both splits, sorted by length, and the K labels."""
    for function in (synthetic_texts, learn_vocabulary, encode):
        function.__module__ = "__main__"  # so that spawned processes share the cache of `map`
    disable_progress_bars()
    folder = os.path.join(args.data_dir, args.dataset)
    source = folder if os.path.isdir(folder) else HUB.get(args.dataset, args.dataset)
    try:
        splits = (
            load_dataset(source, split=["train", "test"])
            if args.dataset != "synthetic"
            else Dataset.from_generator(synthetic_texts).train_test_split(2_000, seed=0).values()
        )
        splits = [split.select_columns(["text", "label"]) for split in splits]
        labels = sorted({label for split in splits for label in split.unique("label")})
    except (OSError, TypeError, ValueError, exceptions.DatasetsError) as error:
        sys.exit(f"cannot read {source}: {error}")
    options = {"batched": True, "remove_columns": ["text", "label"]}
    vocabulary = splits[0].map(learn_vocabulary, batch_size=None, **options)
    tokenizer = Tokenizer.from_str(vocabulary[0]["tokenizer"])
    tokenizer.enable_truncation(args.seq_len)
    tokenizer.enable_padding(length=args.seq_len)
    options["fn_kwargs"] = {"tokenizer": tokenizer, "labels": labels}
    splits = [split.map(encode, **options) for split in splits]
    splits = [split.select(np.argsort(split["length"][:], stable=True)) for split in splits]
    return *([*part.with_format("torch", device=device)[:].values()] for part in splits), labels


def batches(split, args, epoch, steps):
    """Yields a list of micro-batches for each step: tokens (B, T), classes (B,)."""
    tokens, lengths, classes = split
    size, generator = args.batch_size, np.random.default_rng((args.seed, epoch))
    order = generator.permutation(len(lengths))[: len(lengths) // size * size]
    for pool in np.split(order, range(100 * size, len(order), 100 * size)):
        pool.sort()  # the split is sorted by length: batches need little padding
    order = torch.from_numpy(generator.permutation(order.reshape(-1, size))).to(lengths.device)
    longest = lengths[order[:, -1]].tolist()
    for step in steps:
        rows = order[step, dist.get_rank() :: dist.get_world_size()]
        texts = tokens[rows, : longest[step]], classes[rows]
        yield list(zip(*(tensor.chunk(args.grad_accum_steps) for tensor in texts)))


class TextEncoder(nn.Module):
    """A transformer from token ids (B, T) to the mean of its outputs for real tokens (B, D)."""

    def __init__(self, args):
        super().__init__()
        d_model, self.n_heads, dim_feedforward, num_layers = SIZES[args.size]
        self.embedding = nn.Embedding(VOCAB_SIZE, d_model)
        self.layers = nn.ModuleList()
        for _ in range(num_layers):
            qkv = nn.Sequential(nn.LayerNorm(d_model), nn.Linear(d_model, 3 * d_model, bias=False))
            projection = nn.Linear(d_model, d_model, bias=False)
            feed_forward = nn.Sequential(
                nn.LayerNorm(d_model),
                nn.Linear(d_model, dim_feedforward, bias=False),
                nn.GELU(),
                nn.Linear(dim_feedforward, d_model, bias=False),
            )
            self.layers.append(nn.ModuleList([qkv, projection, feed_forward]))
        self.positions = nn.Embedding(args.seq_len, d_model)
        self.norm, self.dropout = nn.LayerNorm(d_model), nn.Dropout(args.dropout)

    def forward(self, tokens):
        real = tokens > 0  # (B, T)
        x = self.dropout(self.embedding(tokens) + self.positions.weight[: tokens.shape[1]])
        for qkv, projection, feed_forward in self.layers:
            q, k, v = qkv(x).unflatten(2, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v, real[:, None, None])
            x = x + self.dropout(projection(y.transpose(1, 2).flatten(2)))  # (B, T, D)
            x = x + self.dropout(feed_forward(x))
        return (self.norm(x) * real[:, :, None]).sum(1) / real.sum(1, keepdim=True)


def create_model(args, num_classes):
    """Returns a network from token ids (B, T) to logits (B, K)."""
    d_model = SIZES[args.size][0]
    encoder = (
        TextEncoder(args)
        if args.model == "transformer"
        else nn.EmbeddingBag(VOCAB_SIZE, d_model, mode="mean", padding_idx=0)
    )
    model = nn.Sequential(encoder, nn.Dropout(args.dropout), nn.Linear(d_model, num_classes))
    for matrix in (parameter for parameter in model.parameters() if parameter.dim() == 2):
        nn.init.normal_(matrix, std=0.02)
    return model


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


def text_loss(model, tokens, classes, args):
    """Returns the mean loss, and the sums (3,) of losses, right answers and texts."""
    with torch.autocast(tokens.device.type, DTYPES[args.precision], args.precision != "fp32"):
        logits = model(tokens)  # (B, K)
        loss = nn.functional.cross_entropy(logits, classes)
    count = torch.full_like(loss, len(classes))
    sums = torch.stack((loss.detach() * count, (logits.argmax(1) == classes).sum(), count))
    return loss, sums.double()


@torch.no_grad()
def evaluate(batch_loss, model, loader, args):
    """Returns the sums that batch_loss gives, added up over all batches."""
    model.eval()
    return sum(batch_loss(model, *batch, args)[1] for batch in loader)


def epoch_row(settings, progress, val_sums, seconds, num_samples):
    """Returns the row of the log for one epoch and process. Times are in seconds."""
    row = settings | {"run": progress["run"], "epoch": progress["epoch"]}
    for split, (loss, right, count) in ("train", progress["sums"]), ("val", val_sums.tolist()):
        row |= {f"{split}_loss": loss / count, f"{split}_acc": right / count}
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


def main(args):
    for signum in SIGNALS:
        signal.signal(signum, lambda number, frame: ARRIVED.append(number))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    nodes = world_size // int(os.environ["LOCAL_WORLD_SIZE"])
    if nodes == 1:
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # this machine only
    device = setup(args, rank, world_size, "env://")
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # on GPUs, fp32 layers compute in TF32
    if rank > 0:
        dist.barrier()  # rank 0 comes first and downloads what is missing
    train_split, val_split, labels = read_texts(args, device)
    val_batches = [
        (tokens[:, : lengths[-1]], classes)
        for tokens, lengths, classes in zip(
            *(tensor[rank::world_size].split(128) for tensor in val_split)
        )
    ]
    if rank == 0:
        dist.barrier()
    num_steps = min(len(train_split[0]) // args.batch_size, args.max_steps or sys.maxsize)
    if num_steps == 0:
        sys.exit(f"--batch_size {args.batch_size} is larger than the training split")

    torch.manual_seed(args.seed)
    model = create_model(args, len(labels)).to(device)
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
        "model": f"{args.model}-{args.size}",
        "script": "multinode/text.py",
        "processes": world_size,
        "nodes": nodes,
        "rank": rank,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "comm_hook": args.comm_hook,
        "buckets": watch.buckets,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    if rank == 0:
        print(
            "{script}: {model}, {parameters:,} parameters; {dataset}, ".format_map(settings)
            + f"{len(train_split[0]):,} + {len(val_split[0]):,} texts"
        )
        print(
            "processes {processes}, nodes {nodes}, {device}, threads {threads}; global batch "
            "{batch_size}; {precision}; torch {torch}".format_map(settings)
        )
        print("starting at epoch {epoch}, step {step}:".format_map(progress))
        print("epoch  train_loss  train_acc  val_loss  val_acc  seconds  samples/s")
    rows, stop = [], 0
    while progress["epoch"] < args.epochs:
        epoch, first_step = progress["epoch"], progress["step"]
        optimizer.param_groups[0]["lr"] = args.learning_rate * 0.9**epoch
        loader = batches(train_split, args, epoch, range(first_step, num_steps))
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
            torch.manual_seed(hash((args.seed, epoch, progress["step"], rank)))  # for dropout
            watch.mark("data")
            for number, (tokens, classes) in enumerate(micro_batches, start=1):
                last = number == args.grad_accum_steps
                ddp_model.require_backward_grad_sync = last  # as ddp_model.no_sync() does
                loss, loss_sums = text_loss(ddp_model, tokens, classes, args)
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

        val_sums = evaluate(text_loss, model, val_batches, args)
        dist.all_reduce(val_sums)
        watch.read("eval")
        num_samples = max(0, num_steps - first_step) * args.batch_size
        row = epoch_row(settings, progress, val_sums, watch.seconds, num_samples)
        epoch_rows = [None] * world_size
        dist.all_gather_object(epoch_rows, row)
        epoch_rows = [each | {"run": epoch_rows[0]["run"]} for each in epoch_rows]
        rows += epoch_rows
        watch.seconds = dict.fromkeys(watch.seconds, 0.0)
        progress |= {"epoch": epoch + 1, "step": 0, "sums": 0.0}
        if rank == 0:
            print(
                "{epoch:5}  {train_loss:10.4f}  {train_acc:9.4f}  {val_loss:8.4f}  {val_acc:7.4f}"
                "  {seconds:7.2f}  {samples/s:9.0f}".format_map(row)
            )
            if args.log:
                with open(args.log, "a") as file:
                    file.writelines(json.dumps(each) + "\n" for each in epoch_rows)
            save_snapshot(args, parts, progress)
        watch.mark("save")
    if rows and rank == 0:
        means = print_summary(rows[world_size:] or rows, "val_acc")
        print(
            f"{means['hidden']:.0%} of the communication is hidden behind the backward pass\n"
            f"R = compute / communication = {means['R']:.1f}: above 3, more processes pay off"
        )
    dist.barrier()  # rank 0 may still be saving
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
