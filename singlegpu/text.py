"""Train a text classifier with one GPU or, if there is none, with the CPU.

    python singlegpu/text.py                                        # synthetic texts: no download
    python singlegpu/text.py --model transformer --dataset imdb --snapshot text.pt
    sbatch slurm/singlegpu_text.slurm --model transformer --dataset FOLDER_OR_HUB_NAME

Read mnist.py first: this is the same, with what a long job needs. For your own data and model,
replace the first of three sections. With --snapshot, Ctrl-C saves and stops, and the same command
goes on. The final weights are those of a run without a stop, to rounding.
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
import textwrap
import time
from collections import Counter
from multiprocessing import active_children
from multiprocessing.util import Finalize
from pathlib import Path

# Slurm or Ctrl-C sends one of these signals: the run saves and stops. They are blocked, so that
# none interrupts a save. A blocked signal stays pending until main() looks for it. Threads and
# workers inherit the block when they start, so it comes before the import of torch.
SIGNALS = {signal.SIGTERM, signal.SIGUSR2, signal.SIGINT}
if __name__ == "__main__":  # not where this file is imported
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

import datasets
import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import nn
from torch.utils._pytree import tree_map_only
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
    """Rank 0 calls it at the end, with the data to validate on. Here there is nothing to do."""


# == The run: flags, steps, rows, snapshots. Keep it. It calls the functions above. ================

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # of autocast


def parse_run_args(parser, **defaults):
    """Adds the flags of the run to those of the task, and parses them all."""
    has_tf32 = ON_GPU and torch.version.cuda is not None  # AMD's TF32 is no more exact than bf16
    add = parser.add_argument_group("the run").add_argument
    add("--batch_size", type=int, help="samples per optimizer step")
    add("--learning_rate", type=float, default=1e-3, help="peak learning rate")
    add("--max_grad_norm", type=float, default=0.0, help="clip gradients to this norm; 0: do not")
    choices = ["fp32", "tf32", *DTYPES]
    add("--precision", choices=choices, default="tf32" if has_tf32 else "fp32", help="number type")
    add("--seed", type=int, default=1, help="seed of weights, data order and dropout")
    # report.py compares runs that have the same flags up to here. See log_row().
    add("--epochs", type=int, help="passes over the data")
    add("--max_steps", type=int, default=0, help="optimizer steps in total; 0: --epochs decides")
    add("--eval_every", type=int, default=0, help="steps between validations; 0: once per epoch")
    add("--grad_accum_steps", type=int, default=1, help="micro-batches per batch, to save memory")
    add("--compile", action="store_true", help="use torch.compile, which slows the first steps")
    add("--num_workers", type=int, default=0, help="processes that load data")
    add("--snapshot", metavar="FILE", help="save at validations and when stopped; resume from it")
    add("--init_from", metavar="FILE", help="start from the weights of this snapshot")
    add("--log", metavar="FILE.jsonl", help="append a row at each validation, for report.py")
    parser.set_defaults(**defaults)
    args = parser.parse_args()
    numbers = "learning_rate max_grad_norm seed epochs max_steps eval_every num_workers"
    for name in numbers.split():
        if getattr(args, name) < 0:
            parser.error(f"--{name} must not be negative")
    if args.batch_size < 1 or args.grad_accum_steps < 1:
        parser.error("--batch_size and --grad_accum_steps must be at least 1")
    return args


def main(args):
    Finalize(None, kill_workers, exitpriority=0)  # like atexit, but before Python waits for workers
    settings = dict(vars(args))  # the flags, before read_data() may add something to args
    device = torch.device(0 if ON_GPU else "cpu")
    torch.set_float32_matmul_precision("high" if args.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = args.precision == "tf32"  # for NVIDIA's convolutions alone
    autocast = torch.autocast(device.type, DTYPES.get(args.precision), args.precision in DTYPES)

    # Data, model, optimizer: what they draw at random is the same in each run.
    torch.manual_seed(args.seed)
    train_data, val_data = read_data(args)
    check_flags(args, len(train_data))
    steps_per_epoch = len(train_data) // args.batch_size  # an incomplete last batch is left out
    num_steps = args.max_steps or args.epochs * steps_per_epoch
    print(f"{num_steps} steps on {device}")
    settings |= {"steps_per_epoch": steps_per_epoch, "num_samples": len(train_data)}
    model = create_model(args, train_data).to(device).train()
    optimizer = create_optimizer(model, args)
    # A group of parameters with a rate of its own keeps its ratio to --learning_rate.
    lr_scales = [group["lr"] / (args.learning_rate or 1) for group in optimizer.param_groups]
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")  # else a no-op
    state = {"model": model, "optimizer": optimizer, "scaler": scaler}
    start_step = start_or_resume(state, settings, args)  # the steps already taken; 0 in a new run
    compiled = torch.compile(model) if args.compile else model  # both have the same weights

    set_seed(args.seed, start_step)  # of the workers, too: a resumed run draws other crops
    batches = iter(create_loader(train_data, training_batches(train_data, start_step, args), args))
    pause = 0.1 if sys.stderr.isatty() else 60  # seconds between two prints of the bar
    bar = tqdm(initial=start_step, total=num_steps, mininterval=pause)
    poll_sums = Counter()  # of batch_loss() since the last poll: see below
    row_sums = Counter()  # and since the last row, or since a resume
    last_poll_time, row, is_stopped = time.perf_counter(), None, False
    mark("start")
    for step in range(start_step + 1, num_steps + 1):
        # 1. A step. The gradients of the micro-batches add up.
        set_seed(args.seed, step)  # so that dropout is the same after a resume
        rate = learning_rate(args, step / num_steps)
        for group, scale in zip(optimizer.param_groups, lr_scales):
            group["lr"] = rate * scale
        for _ in range(args.grad_accum_steps):
            batch = to_device(next(batches), device)
            mark("data")
            with autocast:
                loss, batch_sums = batch_loss(compiled, batch, args)
            add_to(poll_sums, batch_sums)
            mark("forward")
            scaler.scale(loss / args.grad_accum_steps).backward()
            mark("backward")
        is_warmup = step <= start_step + 3  # the first steps are slower
        row_is_due = step == num_steps or step % (args.eval_every or steps_per_epoch) == 0
        poll_is_due = row_is_due or is_warmup or time.perf_counter() > last_poll_time + 1
        if args.max_grad_norm or poll_is_due:  # a row shows the norm. A limit of inf clips nothing
            scaler.unscale_(optimizer)  # of fp16: clip the true gradients
            norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        mark("optimizer")
        bar.update()
        if not poll_is_due:
            continue

        # 2. A poll, about once a second: is the loss finite? Was the run asked to stop? In other
        # steps, Python does not wait for the GPU.
        recent_sums = {name: float(value) for name, value in poll_sums.items()}
        poll_sums.clear()
        row_sums.update(recent_sums)  # a Counter's update() adds
        was_asked = len(SIGNALS & signal.sigpending()) > 0
        is_stopped = was_asked and step < num_steps  # the last step ends the run anyway
        count_marks(is_warmup, recent_sums["count"])
        mean_loss = recent_sums["loss"] / recent_sums["count"]
        if not math.isfinite(mean_loss):
            sys.exit(f"step {step}: the loss is {mean_loss}")
        bar.set_postfix(loss=f"{mean_loss:.4g}", refresh=False)

        # 3. A row: save, validate, print. A stop makes one, too.
        if row_is_due or is_stopped:
            row = {"step": step, "epoch": step / steps_per_epoch, "lr": rate}
            row["grad_norm"] = norm.item()
            if args.precision != "fp16" and not norm.isfinite():  # fp16 takes no such step
                sys.exit(f"step {step}: the norm of the gradients is {norm:.4g}")
            if args.snapshot:
                save_snapshot(args.snapshot, state, step, settings, train_data)
            mark("save")
            row |= means("train", row_sums)
            row_sums.clear()
            if not is_stopped:  # a stopped run may have no time for it
                row |= means("val", evaluate(compiled, val_data, device, autocast, args))
                mark("eval")
            row = log_row(row, model, device, settings)
        if is_stopped:
            break
        last_poll_time = time.perf_counter()

    bar.close()
    print_marks(row)
    if is_stopped:  # status 75: it has saved, run it again. 143: as after a SIGTERM
        sys.exit(os.EX_TEMPFAIL if args.snapshot else 128 + signal.SIGTERM)
    finish(model.eval(), val_data, args, device)


def check_flags(args, num_samples):
    """Ends the run if a flag cannot work here."""
    divisor = args.grad_accum_steps
    if args.batch_size % divisor != 0 or args.batch_size > num_samples:
        must = f"must be a multiple of {divisor} (micro-batches), up to {num_samples}"
        sys.exit(f"--batch_size {args.batch_size} {must}")
    for path in (args.snapshot, args.log):
        if path and not os.access(Path(path).absolute().parent, os.W_OK):
            sys.exit(f"cannot write {path}: its folder is missing or read-only")


def start_or_resume(state, settings, args):
    """Loads --snapshot (a checkpoint), or the weights of --init_from. Returns the steps taken."""
    path = args.snapshot or ""
    if os.path.exists(path):
        # mmap saves memory. Not on a CPU: there, the optimizer's state would stay in the old file.
        snapshot = torch.load(path, "cpu", weights_only=True, mmap=ON_GPU)
        old = snapshot["settings"]
        changed = {name: old.get(name) for name in settings if settings[name] != old.get(name)}
        if changed:
            print(f"{path} was saved with {changed}")
        if {"batch_size", "num_samples", "seed"} & changed.keys():  # another place in the data
            sys.exit("to start anew, use --init_from and a new --snapshot")
        for name, part in state.items():
            part.load_state_dict(snapshot.pop(name))  # which frees it
        settings["run"] = old["run"]
        return snapshot["step"]
    settings["run"] = f"{time.time_ns():x}"  # a name for the log
    if args.init_from:
        load_weights(state["model"], args.init_from)
    if not args.snapshot:
        print("without --snapshot, nothing is saved")
    return 0


def load_weights(model, path):
    """Loads those weights of a snapshot whose name and shape the model has, too."""
    snapshot = torch.load(path, "cpu", weights_only=True, mmap=ON_GPU)
    weights = snapshot["model"]
    for name, new in model.state_dict().items():
        if name in weights and weights[name].shape != new.shape:
            del weights[name]
    model.load_state_dict(weights, strict=False)
    names = [name for name, _ in model.named_parameters()]
    missing = [name for name in names if name not in weights]  # such as a new last layer
    if len(missing) == len(names):
        sys.exit(f"no weight of {path} fits: it was saved with {snapshot.get('settings')}")
    if missing:
        print(f"{len(missing)} of {len(names)} weights start anew: {', '.join(missing[:3])}")


def save_snapshot(path, state, step, settings, data):
    """Writes a file beside `path`, and gives it that name, so that `path` is never half written."""
    snapshot = {name: part.state_dict() for name, part in state.items()}
    snapshot |= {"step": step, "settings": settings}
    snapshot["classes"] = [str(name) for name in getattr(data, "classes", ())]
    torch.save(snapshot, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def training_batches(data, start_step, args):
    """Yields the indices of each micro-batch, from step start_step + 1 on."""
    steps_per_epoch = len(data) // args.batch_size
    per_step = args.grad_accum_steps  # micro-batches
    for epoch in itertools.count(start_step // steps_per_epoch):
        with torch.random.fork_rng(devices=()):  # training_order() may draw from torch, too
            torch.default_generator.manual_seed(hash((args.seed, epoch)))
            order = np.asarray(training_order(data, np.random.default_rng([args.seed, epoch])))
        order = order[: steps_per_epoch * args.batch_size]
        micro_batches = order.reshape(-1, args.batch_size // per_step)
        num_taken = (start_step % steps_per_epoch) * per_step
        for indices in micro_batches[num_taken:]:
            yield indices.tolist()
        start_step = 0  # the next epoch is a whole one


def set_seed(*numbers):
    """Seeds torch by these numbers, on the CPU and on the GPU."""
    seed = hash(numbers)  # of whole numbers, it is the same in each run
    torch.default_generator.manual_seed(seed)  # takes 1 us, and torch.manual_seed() 0.1 ms
    if ON_GPU:
        torch.get_device_module().manual_seed(seed)


def to_device(batch, device):
    """Moves the tensors of a batch, which may be in tuples and dictionaries beside other things."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)


def add_to(sums, batch_sums):
    """Adds the sums of a batch to `sums`, in float32 or as whole numbers."""
    for name, value in batch_sums.items():
        value = torch.as_tensor(value).detach()  # else the graph lives until the poll
        sums[name] += value.float() if value.is_floating_point() else value.long()


def means(split, sums):
    """Returns columns of a row, such as train_loss: each sum divided by the count."""
    names = [name for name in sums if name != "count"]
    return {f"{split}_{name}": sums[name] / sums["count"] for name in names}


@torch.no_grad()
def evaluate(model, data, device, autocast, args):
    """Returns the sums of batch_loss() over the data, as numbers."""
    size = args.batch_size // args.grad_accum_steps  # as in training
    indices = list(range(len(data)))
    batches = [indices[start : start + size] for start in range(0, len(data), size)]
    model.eval()
    sums = Counter()
    for batch in create_loader(data, batches, args):
        with autocast:
            _, batch_sums = batch_loss(model, to_device(batch, device), args)
        add_to(sums, batch_sums)
    model.train()
    return {name: float(value) for name, value in sums.items()}


def log_row(row, model, device, settings):
    """Completes the row, prints it, and appends it to --log."""
    printed = [*row, "seconds", "peak_MB"]
    row = settings | row
    row |= take_marks(settings["batch_size"])
    if row.get("steps"):  # not only warmup
        printed.append("tokens/s" if "tokens/s" in row else "samples/s")
    names = list(settings)  # in the order of the flags: report.py compares those before --epochs
    row["settings"] = {name: settings[name] for name in names[: names.index("epochs")]}
    row["script"] = "/".join(Path(__file__).resolve().parts[-2:])
    row |= {"processes": 1, "nodes": 1, "rank": 0}
    row |= {"host": os.uname().nodename, "threads": torch.get_num_threads()}
    get_name = getattr(torch.get_device_module(device), "get_device_name", device.type.upper)
    row["device"] = get_name()
    row["parameters"] = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    text = "  ".join(f"{name} {row[name]:.6g}" for name in printed if name in row)
    tqdm.write(textwrap.fill(text, 100))
    if settings["log"]:
        with open(settings["log"], "a") as file:
            file.write(json.dumps(row) + "\n")
    return row


def kill_workers():
    """Ends the workers of the loaders, which have inherited the blocked SIGTERM."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader reports a dead worker as an error
    for worker in active_children():
        worker.kill()


# == Where the time goes. You may delete this section, and each line above it that has "mark(" or ==
# "marks(" in it. The section ends before the line with __name__.

STEP_PHASES = ("data", "forward", "backward", "optimizer")
PHASES = ("warmup", *STEP_PHASES, "eval", "save")
marks = []  # (phase, the moment at which it ended)
last_step = []  # the phases of a step: (name, start, end, bytes), for report.py
times, all_times = Counter(), Counter()  # seconds by phase since the last row, and since the start


def now():
    """Returns this moment. A GPU fills in the time later, and Python does not wait."""
    if not ON_GPU:
        return time.perf_counter()
    return torch.accelerator.current_stream().record_event(torch.Event(enable_timing=True))


def mark(phase):
    """Notes that this phase of a step ends here."""
    marks.append((phase, now()))


def count_marks(is_warmup=False, count=0):
    """Adds up the times and steps since the last poll, with its `count`. Waits for the GPU."""
    if ON_GPU:
        torch.accelerator.synchronize()
    if is_warmup:
        marks[:] = [("warmup", moment) for _, moment in marks]
    _, last_moment = marks[-1]

    def seconds(moment):  # before the last one, as a negative number
        return -moment.elapsed_time(last_moment) / 1000 if ON_GPU else moment - last_moment

    spans = []
    for (_, start), (phase, end) in itertools.pairwise(marks):
        times[phase] += seconds(end) - seconds(start)
        spans.append((phase, seconds(start), seconds(end), 0))
    # last_step: the spans between the ends of the last two optimizer phases.
    ends = [number + 1 for number, span in enumerate(spans) if span[0] == "optimizer"]
    times["steps"] += len(ends)
    if ends:
        times["count"] += count
        first = ends[-2] if len(ends) > 1 else 0
        last_step[:] = spans[first : ends[-1]]
    del marks[:-1]  # the last mark is the start of what comes next


def take_marks(batch_size):
    """Returns the columns of a row: the times since the last row, which start anew from here."""
    count_marks()
    columns = columns_of(times, batch_size) | {"last_step": last_step}
    all_times.update(times)
    times.clear()
    return columns


def columns_of(times, batch_size):
    """Returns these times as columns of a row, their sum, the speed of training, and memory."""
    columns = {name: times[name] for name in (*PHASES, "steps")}
    columns["seconds"] = sum(times[phase] for phase in PHASES)
    training = sum(times[phase] for phase in STEP_PHASES)
    columns["samples/s"] = batch_size * times["steps"] / training if training else 0.0
    if times["count"] > batch_size * times["steps"]:  # a sample has several tokens
        columns["tokens/s"] = times["count"] / training
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # from KiB
    columns["peak_MB"] = (torch.accelerator.max_memory_allocated() if ON_GPU else peak) / 1e6
    return columns


def print_marks(row):
    """Prints where the time since the start has gone, and a row for results.md."""
    if row is None:  # there was nothing to do
        return
    columns = columns_of(all_times, row["batch_size"])
    for phase in PHASES:
        if columns[phase] >= 0.0005:
            print(f"{phase:9} {columns[phase]:9.3f} s {columns[phase] / columns['seconds']:4.0%}")
    if columns["steps"] == 0:
        print("too few steps to time: the first three after a start are the warmup")
        return
    names = ["script", "model", "dataset", "precision", "processes", "batch_size"]
    cells = {name: str(row[name]) for name in names if name in row}
    numbers = {name: value for name, value in row.items() if name.startswith("val_")} | columns
    cells |= {name: f"{value:.4g}" for name, value in numbers.items()}
    for line in (cells, ["---"] * len(cells), cells.values()):
        print("|", " | ".join(line), "|")


if __name__ == "__main__":
    args = parse_args()
    if max(int(os.environ.get(x, 1)) for x in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")) > 1:
        sys.exit(f"each process would train alone: use multinode/{Path(__file__).name}")
    main(args)
