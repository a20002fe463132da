"""Train a text classifier on all GPUs of a machine or, if it has none, with two CPU processes.

    python multigpu/text.py                                        # synthetic texts: no download
    python multigpu/text.py --model transformer --dataset imdb --snapshot text.pt
    sbatch slurm/multigpu_text.slurm --model transformer --dataset FOLDER_OR_HUB_NAME

Read mnist.py first: this is the same, with what a long job needs. For your own data and model,
replace the first of three sections. With --snapshot, Ctrl-C saves and stops, and the same command
goes on. Its weights end as without a stop.
Shapes: N texts of a split, B of a batch, T tokens of a text, D = d_model, H heads, K classes.
"""

import argparse
import itertools
import json
import math
import os
import resource
import signal
import sys
import tempfile
import textwrap
import time
from collections import Counter
from multiprocessing import active_children, resource_tracker
from multiprocessing.util import Finalize
from pathlib import Path

SIGNALS = {signal.SIGTERM, signal.SIGUSR2, signal.SIGINT}  # each asks the run to save and stop
if __name__ == "__main__":  # Blocked until main() looks for them. Torch's threads inherit this.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

import datasets
import numpy as np
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, StackDataset, TensorDataset
from tqdm import tqdm

ON_GPU = torch.accelerator.is_available()  # a GPU of any maker

# == Yours: flags, data, model, loss. Replace it. ==================================================

HUB = {"ag_news": "fancyzhx/ag_news", "imdb": "stanfordnlp/imdb"}  # names on the Hugging Face hub
SIZES = {"small": (128, 4, 512, 2), "large": (256, 8, 1024, 4)}  # D, H, dim_feedforward, layers
VOCAB_SIZE = 20_000  # at most: [PAD], which is 0, [UNK], and the most frequent words


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model", choices=("nbow", "transformer"), default="nbow", help="nbow: a bag of words")
    add("--size", choices=SIZES, default="small", help="width 128, 2 layers; or 256, 4 layers")
    add("--dataset", default="synthetic", help="or ag_news, imdb, a folder, a name on the hub")
    add("--data_dir", default="data", help="folder in which --dataset is looked for first")
    add("--seq_len", type=int, default=256, help="tokens of a text that the model reads")
    add("--dropout", type=float, default=0.0, help="dropout probability of the model")
    return parse_run_args(parser, epochs=5, batch_size=64)


def read_data(args):
    """Returns texts to train on and, from the split test, to validate on; columns text, label."""
    if args.dataset == "synthetic":
        splits = synthetic_texts()
    else:
        folder = os.path.join(args.data_dir, args.dataset)
        path = folder if os.path.isdir(folder) else HUB.get(args.dataset, args.dataset)
        splits = datasets.load_dataset(path, split=["train", "test"])
    labels = sorted(splits[0].unique("label"))
    unknown = set(splits[1].unique("label")) - set(labels)
    if unknown:  # the hub marks a label that is not public by -1
        sys.exit(f"{args.dataset}: test has labels that train has not: {unknown}")
    tokenizer = train_tokenizer(splits[0], args.seq_len)
    return [encode(texts, labels, tokenizer, args) for texts in splits]


def synthetic_texts():
    """Returns texts of 5 to 100 random words. Every tenth word is one of its class's 50 words."""
    generator = np.random.default_rng(0)
    texts = []
    for label in generator.integers(4, size=12_000).tolist():
        words = generator.integers(1000, size=generator.integers(5, 101))
        words[::10] = 50 * label + words[::10] % 50
        texts.append({"text": " ".join(map(str, words)), "label": label})
    texts = datasets.Dataset.from_list(texts)
    return texts.skip(2000), texts.take(2000)


def train_tokenizer(texts, seq_len):
    """Returns a tokenizer for the frequent words of these texts. It pads to seq_len tokens."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=False)  # in small letters
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # Japanese and Thai need another
    options = {"vocab_size": VOCAB_SIZE, "min_frequency": 2, "special_tokens": ["[PAD]", "[UNK]"]}
    trainer = trainers.WordLevelTrainer(**options, show_progress=False)
    tokenizer.train_from_iterator((batch["text"] for batch in texts.iter(1000)), trainer)
    tokenizer.enable_truncation(seq_len)
    tokenizer.enable_padding(length=seq_len)
    return tokenizer


class Texts(TensorDataset):
    """Token ids (N, seq_len), with zeros after a text's end, and the numbers of classes (N,)."""

    def __getitem__(self, indices):
        """Returns a batch that is as long as its longest text: tokens (B, T), classes (B,)."""
        tokens, targets = super().__getitem__(indices)
        return tokens[:, : tokens.count_nonzero(1).max()].long(), targets


def encode(texts, labels, tokenizer, args):
    """Returns a table as Texts. The shortest come first, so that batches need little padding."""
    batches = (tokenizer.encode_batch_fast(batch["text"]) for batch in texts.iter(1000))
    tokens = np.concatenate([np.array([text.ids for text in batch], np.int16) for batch in batches])
    tokens[:, 0] = tokens[:, 0].clip(1)  # an empty text becomes one [UNK]
    order = np.count_nonzero(tokens, axis=1).argsort(stable=True)
    targets = np.searchsorted(labels, texts["label"][:])
    data = Texts(torch.from_numpy(tokens[order]), torch.from_numpy(targets[order]))
    data.classes, data.batch_size = labels, args.batch_size
    return data


def training_order(data, rng):
    """Returns the indices of an epoch. Texts of a batch are of similar length: little padding."""
    lengths = data.tensors[0].count_nonzero(1).numpy()
    order = rng.permutation(len(data))[: len(data) // data.batch_size * data.batch_size]
    pools = np.arange(len(order)) // (100 * data.batch_size)  # 100 random batches are a pool
    order = order[np.lexsort((lengths[order], pools))]  # pool by pool, sorted by length
    batches = rng.permutation(order.reshape(-1, data.batch_size))
    return rng.permuted(batches, axis=1).flatten()  # so no process has all the long texts


def create_loader(data, batches, args):
    """Returns a loader of these batches, which are lists of indices."""
    options = {"num_workers": args.num_workers, "pin_memory": ON_GPU}
    if args.num_workers:
        options["multiprocessing_context"] = "fork"  # workers share the memory of the data
    if isinstance(data, (StackDataset, TensorDataset)):  # of arrays: a whole batch by one index
        return DataLoader(data, batch_size=None, sampler=batches, **options)
    return DataLoader(data, batch_sampler=batches, **options)


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
            widen = nn.Linear(d_model, dim_feedforward, bias=False)
            narrow = nn.Linear(dim_feedforward, d_model, bias=False)
            feed_forward = nn.Sequential(nn.LayerNorm(d_model), widen, nn.GELU(), narrow)
            self.layers.append(nn.ModuleList([qkv, projection, feed_forward]))
        self.positions = nn.Embedding(args.seq_len, d_model)
        self.norm = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, tokens):
        real = tokens > 0  # (B, T)
        x = self.dropout(self.embedding(tokens) + self.positions.weight[: tokens.shape[1]])
        for qkv, projection, feed_forward in self.layers:
            q, k, v = qkv(x).unflatten(2, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v, real[:, None, None])
            x = x + self.dropout(projection(y.transpose(1, 2).flatten(2)))  # (B, T, D)
            x = x + self.dropout(feed_forward(x))
        return (self.norm(x) * real[:, :, None]).sum(1) / real.sum(1, keepdim=True)


def create_model(args, data):
    """Returns a network from token ids (B, T) to logits (B, K)."""
    d_model = SIZES[args.size][0]
    if args.model == "transformer":
        torch.backends.cuda.enable_cudnn_sdp(False)  # it is slow at each new T
        encoder = TextEncoder(args)
    else:
        encoder = nn.EmbeddingBag(VOCAB_SIZE, d_model, mode="mean", padding_idx=0)
    model = nn.Sequential(encoder, nn.Dropout(args.dropout), nn.Linear(d_model, len(data.classes)))
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    return model


def create_optimizer(model, args):
    return torch.optim.AdamW(model.parameters(), args.learning_rate, fused=True)


def learning_rate(args, done):
    """Returns the rate of a step. `done`: the share of all steps, 0 to 1, this one included."""
    return args.learning_rate * 0.9 ** (done * args.epochs)


def batch_loss(model, batch, args):
    """Returns the mean loss, and sums: "loss", "count" and more. A row shows sums / count."""
    tokens, targets = batch
    logits = model(tokens)  # (B, K)
    loss = nn.functional.cross_entropy(logits, targets)
    correct = (logits.argmax(1) == targets).sum()
    return loss, {"loss": loss * len(targets), "acc": correct, "count": len(targets)}


def finish(model, data, args, device):
    """Is called by rank 0 at the end, with the data to validate on. Here there is nothing to do."""


# == The run: flags, steps, rows, snapshots. Keep it. It calls the functions above. ================

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # of autocast
COMM_HOOKS = {"none": default_hooks.allreduce_hook, "bf16": default_hooks.bf16_compress_hook}


def parse_run_args(parser, **defaults):
    """Adds the flags of the run to those of the task, and parses them all."""
    has_tf32 = ON_GPU and torch.version.cuda is not None  # AMD's TF32 is as inexact as bf16
    add = parser.add_argument_group("the run").add_argument
    add("--batch_size", type=int, help="global batch: samples per optimizer step")
    add("--learning_rate", type=float, default=1e-3, help="peak learning rate")
    add("--max_grad_norm", type=float, default=0.0, help="clip gradients to this norm; 0: do not")
    choices = ["fp32", "tf32", *DTYPES]
    add("--precision", choices=choices, default="tf32" if has_tf32 else "fp32", help="number type")
    add("--seed", type=int, default=1, help="seed of weights, data order and dropout")
    # From --epochs on, flags may differ between runs that report.py compares.
    add("--epochs", type=int, help="passes over the data")
    add("--max_steps", type=int, default=0, help="optimizer steps in total; 0: --epochs decides")
    add("--eval_every", type=int, default=0, help="steps between validations; 0: once per epoch")
    add("--num_gpus", type=int, default=0, help="processes; 0: all GPUs; no GPU: 2")
    add("--grad_accum_steps", type=int, default=1, help="micro-batches per batch, to save memory")
    add("--comm_hook", choices=COMM_HOOKS, default="none", help="type in which gradients are sent")
    add("--compile", action="store_true", help="use torch.compile, which slows the first steps")
    add("--num_workers", type=int, default=0, help="processes that load data, for each GPU")
    add("--snapshot", metavar="FILE", help="save at each row and when stopped; resume from it")
    add("--init_from", metavar="FILE", help="start from the weights of this snapshot")
    add("--log", metavar="FILE.jsonl", help="append a row for each process, for report.py")
    parser.set_defaults(**defaults)
    return parser.parse_args()


def main(rank, args, init_method):  # runs in each process: spawn() passes rank 0, 1, ...
    Finalize(None, kill_workers, exitpriority=0)  # at the end, before Python waits for workers
    settings = dict(vars(args))  # without what read_data() adds, which may be anything
    world_size = args.num_gpus  # the number of processes
    device = torch.device(rank % torch.accelerator.device_count() if ON_GPU else "cpu")
    if ON_GPU:
        torch.accelerator.set_device_index(device.index)  # this process's default from now on
    backend = dist.get_default_backend_for_device(device)  # nccl for NVIDIA GPUs, gloo for CPUs
    dist.init_process_group(backend, init_method, rank=rank, world_size=world_size)  # waits for all
    torch.set_float32_matmul_precision("high" if args.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = args.precision == "tf32"  # for NVIDIA's convolutions alone
    autocast = torch.autocast(device.type, DTYPES.get(args.precision), args.precision in DTYPES)
    torch.manual_seed(args.seed)  # the same random splits and weights in all processes
    train_data, val_data = read_data(args)
    steps_per_epoch = len(train_data) // args.batch_size  # an incomplete last batch is left out
    settings |= {"steps_per_epoch": steps_per_epoch, "num_samples": len(train_data)}
    num_steps = args.max_steps or args.epochs * steps_per_epoch
    model = create_model(args, train_data).to(device).train()
    optimizer = create_optimizer(model, args)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")  # else a no-op
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    done_steps = 0
    if args.snapshot and os.path.exists(args.snapshot):
        snapshot = torch.load(args.snapshot, "cpu", weights_only=True, mmap=True)
        done_steps, old = snapshot["step"], snapshot["settings"]
        changed = {name: old.get(name) for name in settings if settings[name] != old.get(name)}
        settings["run"] = old["run"]
        if changed and rank == 0:
            print(f"{args.snapshot} was saved with {changed}")
        if {"batch_size", "num_samples"} & changed.keys():  # they would move its place in the data
            sys.exit("to start anew, use --init_from and a new --snapshot" if rank == 0 else 1)
        for name, part in parts.items():
            part.load_state_dict(snapshot.pop(name))  # which frees it
    elif args.init_from:
        weights = torch.load(args.init_from, "cpu", weights_only=True, mmap=True)["model"]
        shapes = {name: weight.shape for name, weight in model.state_dict().items()}
        fitting = {name: each for name, each in weights.items() if each.shape == shapes.get(name)}
        new = model.load_state_dict(fitting, strict=False).missing_keys  # such as a new last layer
        if new and rank == 0:
            print(f"not in {args.init_from}: {', '.join(new):.60}")
    settings.setdefault("run", f"{time.time_ns():x}")  # a name for the log: rank 0's counts
    network = torch.compile(model) if args.compile else model  # both have the same weights
    ddp_model = nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=True)
    ddp_model.broadcast_buffers = False  # evaluate() sends them, instead of each step
    ddp_model.register_comm_hook(COMM_HOOKS[args.comm_hook], timed_hook)

    torch.manual_seed(hash((args.seed, done_steps, rank)))  # other crops in each process
    batches = iter(create_loader(train_data, training_batches(train_data, done_steps, args), args))
    pause = 0.1 if sys.stderr.isatty() else 60  # seconds between two prints of the bar, at least
    bar = tqdm(initial=done_steps, total=num_steps, disable=rank > 0, mininterval=pause)
    sums, totals = Counter(), Counter()  # of this process since a look, of all since a row
    row, is_stopped = None, False
    look_step, look_time, next_look = done_steps, time.perf_counter(), 0  # of a look: see below
    mark("start")
    for step in range(done_steps + 1, num_steps + 1):
        seed = hash((args.seed, step, rank))  # the same in a resumed run, and so is its dropout
        torch.default_generator.manual_seed(seed)  # torch.manual_seed() takes 0.1 ms
        if ON_GPU:
            torch.get_device_module().manual_seed(seed)
        rate = learning_rate(args, step / num_steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        for micro_step in range(args.grad_accum_steps):
            batch = tree_map(lambda part: part.to(device, non_blocking=True), next(batches))
            mark("data")
            is_last = micro_step == args.grad_accum_steps - 1
            ddp_model.require_backward_grad_sync = is_last  # else no averaging, as in no_sync()
            with autocast:
                loss, batch_sums = batch_loss(ddp_model, batch, args)
            add_batch(batch_sums, sums)
            mark("forward")
            scaler.scale(loss / args.grad_accum_steps).backward()
            mark("comm" if is_last else "backward")  # timed_hook() has marked the last backward
        is_warmup = step <= done_steps + 3  # the first ones are slower
        is_due = step == num_steps or step % (args.eval_every or steps_per_epoch) == 0  # a row
        is_look = is_due or is_warmup or step >= next_look
        if args.max_grad_norm or is_look:  # a row shows the norm; a limit of inf clips nothing
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        mark("optimizer")
        bar.update()
        if not is_look:
            continue

        # A look, about once a second, in all processes at the same step. Python waits for the GPU.
        recent = add_up(sums)
        sums.clear()
        totals.update(recent)
        stops, seconds = len(SIGNALS & signal.sigpending()), time.perf_counter() - look_time
        agreed = add_up({"stops": stops, "seconds": seconds})
        mark("comm")
        count_marks(is_warmup)
        mean_loss = recent["loss"] / recent["count"]
        if not math.isfinite(mean_loss):
            sys.exit(f"step {step}: the loss is {mean_loss}" if rank == 0 else 1)
        bar.set_postfix(loss=f"{mean_loss:.4g}", refresh=False)
        is_stopped = agreed["stops"] > 0 and step < num_steps
        if is_due or is_stopped:
            row = {"step": step, "epoch": step / steps_per_epoch, "lr": rate}
            row |= {"grad_norm": float(norm), "drift": compare_weights(model, step)}
            mark("eval")
            if args.snapshot and rank == 0:
                snapshot = {name: part.state_dict() for name, part in parts.items()}
                snapshot |= {"step": step, "settings": settings}
                snapshot["classes"] = [str(name) for name in getattr(train_data, "classes", ())]
                torch.save(snapshot, f"{args.snapshot}.tmp")
                os.replace(f"{args.snapshot}.tmp", args.snapshot)  # so it is never half written
            mark("save")
            splits = {"train": totals}
            if not is_stopped:  # a stopped run may have no time for it
                splits["val"] = evaluate(network, val_data, device, autocast, args)
                mark("eval")
            row = log_row(row, splits, model, device, settings)
            totals.clear()
        if is_stopped:
            break
        pace = (step - look_step) * world_size / agreed["seconds"]  # steps a second, on average
        next_look = step + max(1, min(int(pace), 2 * (step - look_step)))  # in a second, or sooner
        look_step, look_time = step, time.perf_counter()

    bar.close()
    if row:
        print_marks(row)
    del ddp_model  # before torch 2.14, a process can hang at its end if DDP outlives its group
    dist.destroy_process_group()
    if is_stopped:
        sys.exit(os.EX_TEMPFAIL if args.snapshot else 128 + signal.SIGTERM)  # 75: run me again
    if rank == 0:
        finish(model.eval(), val_data, args, device)


def training_batches(data, step, args):
    """Yields the indices of each micro-batch of this process, from the step after `step` on."""
    steps = len(data) // args.batch_size  # of an epoch. order: (steps, micro-steps, ranks, size)
    size = args.batch_size // dist.get_world_size() // args.grad_accum_steps  # of a micro-batch
    for epoch in itertools.count(step // steps):
        with torch.random.fork_rng(devices=()):  # training_order() may draw from torch, too
            torch.default_generator.manual_seed(hash((args.seed, epoch)))
            order = np.asarray(training_order(data, np.random.default_rng([args.seed, epoch])))
        order = order[: steps * args.batch_size].reshape(steps, -1, dist.get_world_size(), size)
        for indices in order[step % steps :, :, dist.get_rank()].reshape(-1, size):
            yield indices.tolist()
        step = 0


def kill_workers():
    """Ends the workers. They inherit the blocked SIGTERM: Python would wait for them forever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader's handler would raise an error
    for worker in active_children():
        worker.kill()


def add_batch(batch_sums, sums):
    """Adds the sums of a batch to `sums`, on its device, in float32 or as whole numbers."""
    for name, value in batch_sums.items():
        value = torch.as_tensor(value).detach()  # else the graph lives until the look
        sums[name] += value.float() if value.is_floating_point() else value.long()


def add_up(sums):
    """Returns the sums over all processes, as numbers. Waits for the GPU."""
    by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, {name: float(value) for name, value in sums.items()})
    return {name: sum(each.get(name, 0) for each in by_rank) for name in by_rank[0]}


@torch.no_grad()
def compare_weights(model, step):
    """Compares each weight with rank 0's: max |difference| / max |value|. Returns the largest."""
    drifts = []
    for weight in model.parameters():
        own = weight.flatten().float()
        dist.broadcast(of_rank_0 := own.clone(), src=0)
        drift = (own - of_rank_0).abs().max() / of_rank_0.abs().max().clamp(min=1e-30)
        drifts.append(drift.nan_to_num(math.inf))
    dist.all_reduce(drifts := torch.stack(drifts), dist.ReduceOp.MAX)  # now all know it
    name, _ = list(model.named_parameters())[drifts.argmax()]
    if drifts.max() > 1e-2:  # rounding on unlike GPUs stays below, faults grow
        sys.exit(f"step {step}: processes differ in {name}" if dist.get_rank() == 0 else 1)
    return drifts.max().item()


@torch.no_grad()
def evaluate(model, data, device, autocast, args):
    """Returns the sums of batch_loss over the data, of which each process takes a share."""
    for buffer in model.buffers():  # BatchNorm's statistics: those of rank 0
        dist.broadcast(buffer, src=0)
    share = list(range(dist.get_rank(), len(data), dist.get_world_size()))
    size = args.batch_size // dist.get_world_size() // args.grad_accum_steps  # as in training
    batches = [share[start : start + size] for start in range(0, len(share), size)]
    model.eval()
    sums = Counter()
    for batch in create_loader(data, batches, args):
        batch = tree_map(lambda part: part.to(device, non_blocking=True), batch)
        with autocast:
            add_batch(batch_loss(model, batch, args)[1], sums)
    model.train()
    return add_up(sums)


def log_row(row, splits, model, device, settings):
    """Prints rank 0's row, appends those of all processes to --log. Returns this process's."""
    for split, sums in splits.items():
        count = sums.pop("count")
        row |= {f"{split}_{name}": value / count for name, value in sums.items()}
    shown = [*row, "seconds", "samples/s", "peak_MB"]
    count_marks()
    row = settings | row | take_marks(times, settings["batch_size"]) | {"last_step": last_step}
    all_times.update(times)
    times.clear()
    get_name = getattr(torch.get_device_module(device), "get_device_name", device.type.upper)
    row["settings"] = dict(itertools.takewhile(lambda flag: flag[0] != "epochs", settings.items()))
    row["script"] = "/".join(Path(__file__).resolve().parts[-2:])
    row |= {"processes": dist.get_world_size(), "rank": dist.get_rank()}
    row |= {"host": os.uname().nodename, "device": get_name(), "threads": torch.get_num_threads()}
    row["parameters"] = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    rows = [None] * row["processes"]
    dist.all_gather_object(rows, row)
    if row["rank"] == 0:
        tqdm.write(textwrap.fill("  ".join(f"{name} {row[name]:.6g}" for name in shown), 100))
    if row["rank"] == 0 and settings["log"]:
        same = {"run": row["run"], "nodes": len({each["host"] for each in rows})}
        with open(settings["log"], "a") as file:
            file.writelines(json.dumps(each | same) + "\n" for each in rows)
    return row


# == Where the time goes. To remove it: delete it, and mend the lines that use its names. ==========

STEP_PHASES = ("data", "forward", "backward", "comm", "optimizer")
PHASES = ("warmup", *STEP_PHASES, "eval", "save")
marks = []  # (phase, the moment at which it ended)
sent = []  # ("all-reduce", start, end, bytes) of gradients
last_step = []  # phases and all-reduces of a step, as (name, start, end, bytes), for report.py
times, all_times = Counter(), Counter()  # seconds by phase since the last row, and since the start


def now():
    """Returns this moment. Python does not wait for the GPU, which notes it when it gets here."""
    if not ON_GPU:
        return time.perf_counter()
    return torch.accelerator.current_stream().record_event(torch.Event(enable_timing=True))


def mark(phase):
    """Notes that this phase of a step ends here."""
    marks.append((phase, now()))


def timed_hook(comm_hook, bucket):
    """DDP calls it in the backward pass for each bucket of gradients, which comm_hook averages."""
    if bucket.is_last():
        mark("backward")
    start, size = now(), bucket.buffer().nbytes

    def note_end(future):  # on a GPU, in a stream that waits for the all-reduce
        sent.append(("all-reduce", start, now(), size))
        return future.value()

    if not ON_GPU:
        return comm_hook(None, bucket).then(note_end)
    side = torch.Stream(priority=-1)  # in the current one, the backward pass might wait for it
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        return comm_hook(None, bucket).then(note_end)


def count_marks(is_warmup=False):
    """Adds up the times since the last look. Waits for the GPU."""
    if ON_GPU:
        torch.accelerator.synchronize()
    if is_warmup:
        marks[:] = [("warmup", moment) for _, moment in marks]
        sent.clear()
    zero = marks[-1][1]  # a collective has ended: the same moment in all, but for a stop

    def seconds(moment):
        return -moment.elapsed_time(zero) / 1000 if ON_GPU else moment - zero

    spans = [(name, start, end, 0) for (_, start), (name, end) in zip(marks, marks[1:])] + sent
    spans = [(name, seconds(start), seconds(end), size) for name, start, end, size in spans]
    spans.sort(key=lambda span: span[1])
    counted_until = -math.inf  # where all-reduces overlap, the time counts once
    for name, start, end, _ in spans:
        times[name] += end - start
        if name in ("comm", "all-reduce"):
            times["comm_total"] += max(0.0, end - max(start, counted_until))
            counted_until = max(counted_until, end)
    ends = [0] + [place for place, span in enumerate(spans, start=1) if span[0] == "optimizer"]
    times["steps"] += len(ends) - 1
    if len(ends) > 1:
        last_step[:] = spans[ends[-2] : ends[-1]]  # from the end of the step before
    del marks[:-1], sent[:]


def take_marks(times, batch_size):
    """Returns these times as columns of a row, their sum, the speed of training, and memory."""
    row = {name: times[name] for name in (*PHASES, "comm_total", "steps")}
    row["seconds"] = sum(times[phase] for phase in PHASES)
    training = sum(times[phase] for phase in STEP_PHASES)
    row["samples/s"] = batch_size * times["steps"] / training if training else 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    row["peak_MB"] = (torch.accelerator.max_memory_allocated() if ON_GPU else peak) / 1e6
    return row


def print_marks(row):
    """Prints where the time since the start has gone, and a row for results.md. All call it."""
    columns = take_marks(all_times, row["batch_size"])
    rows = [None] * row["processes"]
    dist.all_gather_object(rows, row | columns)
    if row["rank"] > 0:
        return
    mean = {name: sum(each[name] for each in rows) / len(rows) for name in columns}
    for phase in PHASES:
        print(f"{phase:9} {mean[phase]:9.3f} s {mean[phase] / mean['seconds']:4.0%}")
    late = min(rows, key=lambda each: each["comm_total"])  # who comes last waits least
    if (sending := late["comm_total"]) and len(rows) > 1:
        waiting = f"waiting {mean['comm_total'] - sending:.3f} s"
        print(f"sending {sending:.3f} s, {waiting} for rank {late['rank']} on {late['host']}")
        # With nothing hidden, N processes are N R / (1 + R) times as fast as one: 0.75 N at R = 3.
        ratio = (mean["forward"] + mean["backward"] + mean["optimizer"]) / sending
        print(f"R = compute / sending = {ratio:.1f}: above 3, more processes can pay off")
    names = ["script", "model", "dataset", "precision", "processes", "batch_size"]
    cells = {name: str(row[name]) for name in names if name in row}
    mean = {name: value for name, value in row.items() if name.startswith("val_")} | mean
    cells |= {name: f"{value:.4g}" for name, value in mean.items()}
    for line in (cells, ["---"] * len(cells), cells.values()):
        print("|", " | ".join(line), "|")


if __name__ == "__main__":
    args = parse_args()
    if max(int(os.environ.get(x, 1)) for x in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")) > 1:
        sys.exit(f"this script starts its own processes: use multinode/{Path(__file__).name}")
    # The processes that are started here inherit the blocked signals, and look for them.
    resource_tracker.ensure_running()  # starts a helper, and unblocks two signals: block again
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    num_gpus = torch.accelerator.device_count()
    args.num_gpus = args.num_gpus or num_gpus or 2
    if args.num_gpus > num_gpus > 0:
        sys.exit(f"this machine has {num_gpus} GPU(s), not {args.num_gpus}")
    # Downloads what is missing, once. read_data() may add to args: it gets a copy.
    size = len(read_data(argparse.Namespace(**vars(args)))[0])
    divisor = args.num_gpus * args.grad_accum_steps
    if args.batch_size not in range(divisor, size + 1, divisor):
        sys.exit(f"--batch_size {args.batch_size} must be a multiple of {divisor}, at most {size}")
    if args.snapshot and not os.access(Path(args.snapshot).absolute().parent, os.W_OK):
        sys.exit(f"cannot write {args.snapshot}: its folder is missing or read-only")
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # lo: this machine only
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // args.num_gpus)))
    with tempfile.TemporaryDirectory() as tempfile.tempdir:  # the folder of spawn()'s error files
        start = (main, (args, f"file://{tempfile.tempdir}/store"), args.num_gpus)
        context = torch.multiprocessing.spawn(*start, join=False)
        for number in SIGNALS:  # asks each process to save and stop
            signal.signal(number, lambda *_: [each.terminate() for each in context.processes])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            while not context.join(grace_period=5):
                pass
        except torch.multiprocessing.ProcessExitedException as error:
            sys.exit(error.exit_code if error.exit_code > 0 else str(error))
