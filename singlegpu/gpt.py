"""Train a GPT with one GPU or, if there is none, with the CPU.

    python singlegpu/gpt.py --dataset my.txt --sample 500 --snapshot gpt.pt
    sbatch slurm/singlegpu_gpt.slurm --dataset my.txt --d_model 768 --n_heads 12 --num_layers 12

Read mnist.py first: this is the same, with what a long job needs. For your own data and model,
replace the first of three sections. With --snapshot, Ctrl-C saves and stops, and the same command
goes on. The final weights are those of a run without a stop, to rounding.
Shapes: B sequences of a batch, T tokens of a sequence, D = d_model, H heads, V vocabulary.
"""

import argparse
import itertools
import json
import math
import os
import resource
import signal
import sys
import sysconfig
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

import numpy as np
import torch
import torch.nn.functional as F
from numpy.lib.stride_tricks import sliding_window_view
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, StackDataset, TensorDataset
from tqdm import tqdm

ON_GPU = torch.accelerator.is_available()  # a GPU of any maker

# == Yours: flags, data, model, loss. Replace it. ==================================================


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--dataset", default="stdlib", help="a text, a folder of tokens, or Python's own source")
    add("--vocab_size", type=int, default=256, help="token ids; a tokens.json replaces it")
    add("--d_model", type=int, default=128, help="width of the network")
    add("--n_heads", type=int, default=4, help="attention heads")
    add("--num_layers", type=int, default=4, help="transformer blocks")
    add("--seq_len", type=int, default=128, help="tokens of a sequence, which is one sample")
    add("--dropout", type=float, default=0.0, help="dropout probability in and before the blocks")
    add("--sample", type=int, metavar="N", default=0, help="tokens to print at the end")
    args = parse_run_args(parser, epochs=1, batch_size=64, eval_every=100, max_grad_norm=1.0)
    if os.path.exists(f"{args.dataset}/tokens.json"):  # of examples/tokens.py
        args.vocab_size = json.loads(Path(args.dataset, "tokens.json").read_text())["vocab_size"]
    return args


def read_data(args):
    """Returns sequences (N, T + 1) to train and to validate on. Each begins where one ends."""
    if os.path.isdir(args.dataset):  # token ids, of examples/tokens.py: they may exceed the memory
        parts = [np.load(f"{args.dataset}/{name}.npy", mmap_mode="r") for name in ("train", "val")]
    else:
        stdlib = Path(sysconfig.get_path("stdlib")).glob("*.py")  # about 5 MB
        paths = sorted(stdlib) if args.dataset == "stdlib" else [args.dataset]
        tokens = np.concatenate([np.fromfile(path, np.uint8) for path in paths])
        num_val = min(len(tokens) // 10, 2**18)  # the last tenth, but no more than is quickly read
        parts = tokens[:-num_val], tokens[-num_val:]
    windows = [sliding_window_view(part, args.seq_len + 1)[:: args.seq_len] for part in parts]
    return [StackDataset(each) for each in windows]


def training_order(data, rng):
    """Returns the indices (N,) of an epoch, drawn from rng: all processes have the same one."""
    return rng.permutation(len(data))


def create_loader(data, batches, args):
    """Returns a loader of these batches, which are lists of indices."""
    options = {"num_workers": args.num_workers, "pin_memory": ON_GPU}
    if args.num_workers:
        options["multiprocessing_context"] = "fork"  # workers share the memory of the data
    if isinstance(data, (StackDataset, TensorDataset)):  # of arrays: a whole batch by one index
        return DataLoader(data, batch_size=None, sampler=batches, **options)
    return DataLoader(data, batch_sampler=batches, **options)


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


class GPT(nn.Module):
    """Token ids (B, T) to logits (B, T, V) or, given the next ids (B, T), to their mean loss."""

    def __init__(self, args):
        super().__init__()
        self.embedding = nn.Embedding(args.vocab_size, args.d_model)
        self.positions = nn.Embedding(args.seq_len, args.d_model)
        self.dropout = nn.Dropout(args.dropout)
        self.blocks = nn.Sequential(*[GPTBlock(args) for _ in range(args.num_layers)])
        self.norm = nn.LayerNorm(args.d_model)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:  # GPT-2 (Radford et al. 2019) divides by the root of depth
                depth = 2 * args.num_layers if "projection" in name or "down" in name else 1
                nn.init.normal_(weight, std=0.02 / depth**0.5)

    def forward(self, tokens, targets=None):
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]  # (B, T, D)
        x = self.norm(self.blocks(self.dropout(x)))
        logits = F.linear(x, self.embedding.weight)  # the head is the embedding
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def create_model(args, data):
    return GPT(args)


def create_optimizer(model, args):
    """Returns AdamW. The weights of matrices decay, those of vectors do not."""
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, args.learning_rate, (0.9, 0.99), weight_decay=0.1, fused=True)


def learning_rate(args, done):
    """Returns the rate of a step. `done`: the share of all steps, 0 to 1, this one included."""
    if done < 0.05:  # a linear rise; then half a cosine falls to a tenth of the peak
        return args.learning_rate * done / 0.05
    return args.learning_rate * (0.55 + 0.45 * math.cos(math.pi * (done - 0.05) / 0.95))


def batch_loss(model, batch, args):
    """Returns the mean loss, and sums over tokens: "loss", "count". A row shows sums / count."""
    tokens = batch[0].long()  # (B, T + 1)
    loss = model(tokens[:, :-1], tokens[:, 1:])  # in nats; exp(loss) is the perplexity
    count = tokens[:, 1:].numel()
    return loss, {"loss": loss * count, "count": count}


@torch.no_grad()
def finish(model, data, args, device):
    """Prints --sample bytes or ids, drawn one by one. They follow the first validation sequence."""
    if args.sample == 0:
        return
    tokens = torch.tensor(data[:1][0][:, :-1], device=device).long()  # (1, T)
    for _ in tqdm(range(args.sample), "sampling", disable=None):  # None: on a terminal alone
        logits = model(tokens[:, -args.seq_len :])[:, -1]  # (1, V)
        tokens = torch.cat((tokens, (logits / 0.8).softmax(1).multinomial(1)), 1)  # a temperature
    ids = tokens[0, args.seq_len :].tolist()
    if args.vocab_size > 256:
        print(ids)
    else:  # bytes. What cannot be printed is shown as an escape, such as \xff
        text = bytes(ids).decode(errors="backslashreplace")
        print("".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text))


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
