"""Train a GPT, a decoder-only transformer, on one GPU, or on the CPU of a machine that has none.

    python singlegpu/gpt.py                                 # on Python's own source: no download
    python singlegpu/gpt.py --dataset input.txt --seq_len 64 --sample 500
    python singlegpu/gpt.py --dataset data/openwebtext --precision bf16 --compile --snapshot gpt.pt
    sbatch slurm/singlegpu_gpt.slurm --dataset input.txt --d_model 768 --n_heads 12 --num_layers 12

A text file is read as bytes. A folder holds token ids: train and val, as .bin (16 bits, as nanoGPT
writes them) or .npy.

For your own data and model, replace the first of the three sections. The other two contain no task
code: they are the same in all scripts of this folder.
`diff singlegpu/gpt.py multigpu/gpt.py` shows what distribution adds.
Shapes: B sequences of a batch, T tokens of a sequence, D = d_model, H heads, V vocabulary.
"""

import argparse
import faulthandler
import itertools
import json
import math
import os
import random
import resource
import signal
import sys
import sysconfig
import textwrap
import threading
import time
from collections import Counter
from glob import glob
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import BatchSampler, DataLoader, Dataset, default_collate
from tqdm import tqdm

# ============================ Yours: flags, data, model, loss. Replace. ===========================


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--dataset", default="stdlib", help="stdlib, a text file, or a folder of token ids")
    add("--vocab_size", type=int, default=0, help="token ids; 0: 256 for text, 50304 for a folder")
    add("--d_model", type=int, default=128, help="width of the network")
    add("--n_heads", type=int, default=4, help="attention heads")
    add("--num_layers", type=int, default=4, help="transformer blocks")
    add("--seq_len", type=int, default=128, help="tokens of a sequence")
    add("--dropout", type=float, default=0.0, help="dropout probability in and before the blocks")
    add("--sample", type=int, metavar="N", default=0, help="tokens to generate at the end")
    args = parse_run_args(parser, epochs=1, batch_size=64, eval_every=100, max_grad_norm=1.0)
    args.vocab_size = args.vocab_size or (50304 if os.path.isdir(args.dataset) else 256)
    args.model = f"gpt-{args.num_layers}x{args.d_model}"
    return args


class Tokens(Dataset):
    """Token ids (N,), cut into sequences of --seq_len."""

    def __init__(self, tokens, args):
        self.tokens = tokens
        self.args = args

    def __len__(self):
        return max(0, len(self.tokens) - 1) // self.args.seq_len

    def __getitems__(self, indices):
        """Returns a whole batch: token ids (B, T) and the ids that follow them (B, T)."""
        starts = np.array(indices)[:, None] * self.args.seq_len
        ids = self.tokens[starts + np.arange(self.args.seq_len + 1)]  # (B, T + 1)
        ids = torch.from_numpy(ids.astype(np.int64, casting="same_kind"))  # refuses floats
        if ids.max() >= self.args.vocab_size:
            raise ValueError(f"id {ids.max()} is not below --vocab_size {self.args.vocab_size}")
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()  # else they are pinned in vain


def read_data(args):
    """Returns the data to train on and to validate on, two map-style datasets."""
    max_val = 2**18  # tokens to validate on, at most: to validate often must not take long
    if os.path.isdir(args.dataset):
        train, val = (read_ids(os.path.join(args.dataset, split)) for split in ("train", "val"))
        return Tokens(train, args), Tokens(val[:max_val], args)
    stdlib = sorted(glob(f"{sysconfig.get_path('stdlib')}/*.py"))  # about 5 MB
    paths = stdlib if args.dataset == "stdlib" else [args.dataset]
    text = np.concatenate([np.fromfile(path, np.uint8) for path in paths])
    if not text.all():
        sys.exit(f"{args.dataset} has bytes of 0, and so it is no text in UTF-8")
    num_val = min(len(text) // 10, max_val)  # the last tenth
    return Tokens(text[:-num_val], args), Tokens(text[-num_val:], args)


def read_ids(path):
    """Returns token ids (N,), mapped, not read: they may be larger than memory."""
    if not os.path.exists(f"{path}.bin"):
        return np.load(f"{path}.npy", mmap_mode="r")
    ids = np.memmap(f"{path}.bin", np.uint16, "r")
    if ids[1:2000:2].max() < ids[:2000:2].max() / 16:  # the upper halves of ids of 32 bits
        sys.exit(f"{path}.bin has ids of more than 16 bits: save them as .npy")
    return ids


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
    """Token ids (B, T) to logits (B x T, V) or, given the next ids (B, T), to their mean loss."""

    def __init__(self, args):
        super().__init__()
        self.embedding = nn.Embedding(args.vocab_size, args.d_model)
        self.positions = nn.Embedding(args.seq_len, args.d_model)
        self.dropout = nn.Dropout(args.dropout)
        self.blocks = nn.Sequential(*[GPTBlock(args) for _ in range(args.num_layers)])
        self.norm = nn.LayerNorm(args.d_model)
        for name, parameter in self.named_parameters():  # as in nanoGPT
            if parameter.dim() == 2:  # GPT-2 (Radford et al. 2019) divides by the root of depth
                depth = 2 * args.num_layers if "projection" in name or "down" in name else 1
                nn.init.normal_(parameter, std=0.02 / depth**0.5)

    def forward(self, tokens, targets=None):
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]  # (B, T, D)
        x = self.norm(self.blocks(self.dropout(x)))
        logits = F.linear(x, self.embedding.weight).flatten(0, 1)  # the head is the embedding
        return logits if targets is None else F.cross_entropy(logits, targets.flatten())


def create_model(args, data):
    return GPT(args)


def create_optimizer(model, args):
    """Returns AdamW. The weights of matrices decay, those of vectors do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, args.learning_rate, (0.9, 0.99), weight_decay=0.1, fused=True)


def learning_rate_factor(args, done):
    """Returns what scales --learning_rate when this share of all steps, 0 to 1, is done."""
    return min(20 * done, 1.05 - done)  # it rises to 1, and falls to a twentieth


def training_order(data, args, epoch):
    """Returns the indices (N,) of an epoch. The run seeds NumPy equally in all processes."""
    return np.random.permutation(len(data))


def batch_loss(model, batch, args):
    """Returns the mean loss of a batch, and sums over its tokens. A row shows sums / count."""
    tokens, targets = batch
    loss = model(tokens, targets)  # in nats; exp(loss) is the perplexity
    return loss, {"loss": loss * targets.numel(), "count": targets.numel()}


@torch.no_grad()
def finish(model, data, args, device):
    """Prints --sample tokens, drawn one by one, at the end."""
    if not args.sample:
        return
    is_text = not os.path.isdir(args.dataset)
    num_ids = 256 if is_text else args.vocab_size  # an id of a text is a byte
    tokens = data.__getitems__([0])[0].to(device)  # (1, T): the first sequence to validate on
    for _ in range(args.sample):
        logits = model(tokens[:, -args.seq_len :])[-1:, :num_ids] / 0.8  # 0.8: the temperature
        tokens = torch.cat((tokens, logits.softmax(1).multinomial(1)), 1)
    ids = tokens[0, args.seq_len :].tolist()
    sys.__stdout__.reconfigure(errors="replace")  # the locale may not be UTF-8
    print(bytes(ids).decode(errors="replace") if is_text else ids)


# ========================= The run: steps, rows, snapshots, processes. Keep. ======================
# main() has the loop over all steps.
# A look: about once a second, the run asks whether the loss is finite, and whether it must stop.
# A row: what was measured since the row before, and a validation.
# A request: what the loader makes a batch of: random seeds, and the indices of samples.
# Of the first section, the run calls parse_args, read_data, create_model, create_optimizer and
# batch_loss. It also calls training_order, learning_rate_factor and finish, if they are there.

DTYPES = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)  # each asks the run to save and stop
STOP_REQUESTS = []  # the signals that this process has received
STATES = ("model", "optimizer", "scaler")  # the parts of a run that a snapshot saves
MAY_CHANGE = (  # the flags of all scripts that a resumed run may change. Others shape weights.
    "epochs max_steps eval_every grad_accum_steps compile num_workers timeout "
    "data_dir snapshot log sample reconstructions"
).split()


def parse_run_args(parser, **defaults):
    """Adds the flags of the run to those of the task, and parses them all."""
    # AMD's TF32 is as inexact as bf16, so it is not the default there.
    has_tf32 = torch.accelerator.is_available() and torch.version.cuda is not None
    add = parser.add_argument_group("the run").add_argument
    add("--epochs", type=int, help="passes over the data; a change can shift the schedule")
    add("--max_steps", type=int, default=0, help="optimizer steps in all; 0: --epochs decides")
    add("--eval_every", type=int, default=0, help="steps between validations; 0: once per epoch")
    add("--batch_size", type=int, help="global batch: samples per optimizer step")
    add("--grad_accum_steps", type=int, default=1, help="micro-batches of a batch, to save memory")
    add("--learning_rate", type=float, default=1e-3, help="learning rate, highest of a schedule")
    add("--max_grad_norm", type=float, default=0.0, help="clip longer gradients; 0: do not clip")
    add("--precision", choices=DTYPES, default="tf32" if has_tf32 else "fp32", help="number type")
    add("--compile", action="store_true", help="use torch.compile, which slows the first steps")
    add("--num_workers", type=int, default=0, help="processes that load data")
    add("--seed", type=int, default=1, help="seed of weights, data order and dropout")
    add("--snapshot", metavar="FILE", help="save at each row and when stopped; resume if it exists")
    add("--log", metavar="FILE.jsonl", help="append rows, for report.py")
    add("--timeout", type=int, default=600, help="seconds that a step may take, or compiling")
    parser.set_defaults(**defaults)
    return parser.parse_args()


def main(args):
    """Trains in one process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process without a traceback
    run = SimpleNamespace()  # what these functions share
    run.device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    run.start = f"{time.time_ns():x}"  # names this start
    run.id = run.start  # names the run in the log. A resumed run keeps it.
    run.writer = None  # the start that wrote the snapshot from which this one resumes
    run.step = 0  # steps that are done
    run.row_step = 0  # the step of the last row
    run.sums = {}  # of batch_loss since the last look, on the device
    run.totals = {}  # those since the last row
    check_args(run, args)
    run.settings = settings_of(args)  # before a function of the task adds to args
    snapshot = read_snapshot(run, args)
    set_seeds(run.device, args.seed)  # a resumed run draws the same random split
    train_data, val_data = read_data(args)
    run.num_samples = len(train_data)
    if snapshot and snapshot["progress"]["num_samples"] != run.num_samples:
        sys.exit(f"cannot resume from {args.snapshot}: since then the training data has changed")
    run.steps_per_epoch = run.num_samples // args.batch_size  # an incomplete last batch is left out
    run.num_steps = args.max_steps or args.epochs * run.steps_per_epoch
    if run.steps_per_epoch < 1 or len(val_data) < 1:
        sys.exit(f"{len(train_data)} and {len(val_data)} samples are too few: see --batch_size")

    torch.set_float32_matmul_precision("high" if args.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = args.precision == "tf32"
    torch.backends.cudnn.benchmark = torch.version.hip is None  # AMD's search takes too long
    set_seeds(run.device, args.seed)  # again: read_data may have drawn numbers
    run.model = create_model(args, train_data).to(run.device)
    resting = [part for part in run.model.modules() if not part.training]  # these stay so
    train_again(run.model, resting if run.model.training else [])
    run.optimizer = create_optimizer(run.model, args)
    for group in run.optimizer.param_groups:
        group["initial_lr"] = float(group["lr"])  # train_step() scales it, as LambdaLR does
    run.scaler = torch.amp.GradScaler(run.device.type, enabled=args.precision == "fp16")
    if snapshot:
        restore(run, snapshot, args)
    run.compiled_model = torch.compile(run.model) if args.compile else run.model
    run.watch = Stopwatch(run.device)
    print(f"device {run.device}, steps {run.step} to {run.num_steps}", flush=True)

    batches = start_loader(train_data, training_requests(train_data, run, args), run, args)
    bar = tqdm(total=run.num_steps, initial=run.step, disable=None, leave=False)  # on a terminal
    for signum in SIGNALS:  # from here on, a signal asks the run to save and stop
        signal.signal(signum, note_stop)
    expect_progress(args.timeout)
    if run.step > 0 and "learning_rate_factor" in globals():  # it may note how far the training is
        globals()["learning_rate_factor"](args, min(1.0, run.step / max(1, run.num_steps)))
    first_step = look_step = run.step
    first_row = run.row_step
    look_time = time.perf_counter()
    next_look = run.step + 1
    next_line = look_time + 60  # of progress, if there is no bar
    is_stopped = False
    # A look and a row come before the step: a run that was stopped before a validation begins with
    # it when it resumes.
    while True:
        is_row_step = run.step % (args.eval_every or run.steps_per_epoch) == 0
        is_due = run.step > run.row_step and (is_row_step or run.step >= run.num_steps)
        if is_due or run.step == next_look:
            is_stopped, speed = look(run, look_step, look_time, args)
            if bar.disable and time.perf_counter() > next_line:
                next_line = time.perf_counter() + 60
                print(f"step {run.step} of {run.num_steps}, {speed:.3g} steps/s", flush=True)
            if is_due or is_stopped:
                save_snapshot(run, args)
            if is_due and not is_stopped:
                val_totals = evaluate(run, val_data, args)
                is_stopped = val_totals.pop("/stops") > 0  # a resumed run then does it again
                if not is_stopped:
                    log_row(run, val_totals, args)
                    run.row_step = run.step
                    run.totals = {}
            farthest = 2 * (run.step - look_step)  # speed can be that of a few quick steps
            next_look = run.step + max(1, min(int(speed), farthest))
            look_step, look_time = run.step, time.perf_counter()
        if is_stopped or run.step >= run.num_steps:
            break
        train_step(run, batches, args)
        run.step += 1
        bar.update()
    bar.close()
    if is_stopped and run.step > first_step:
        log_row(run, {}, args)  # what was measured since the last row
    elif run.row_step > first_row:
        save_snapshot(run, args)  # with the new row_step: the same command then does nothing more
    expect_progress(0)
    for signum in SIGNALS:  # all is saved: another signal must not change the exit status
        signal.signal(signum, signal.SIG_IGN if is_stopped else signal.SIG_DFL)
    print_summary(run.watch)
    if is_stopped:
        saved = args.snapshot or "nothing, as there is no --snapshot"
        print(f"stopped at step {run.step} of {run.num_steps}; saved {saved}")
        has_saved = args.snapshot and run.step > first_step  # else running it again would not help
        sys.exit(os.EX_TEMPFAIL if has_saved else 128 + signal.SIGTERM)  # 75: run me again
    if "finish" in globals():
        globals()["finish"](run.model.eval(), val_data, args, run.device)


def check_args(run, args):
    """Ends the run if the batch cannot be divided, or if a file could not be written."""
    divisor = args.grad_accum_steps
    if min(divisor, args.batch_size) < 1 or args.batch_size % divisor:
        sys.exit("--batch_size must be a multiple of --grad_accum_steps")
    for path in filter(None, (args.snapshot, args.log)):
        if os.path.isdir(path) or not os.access(os.path.join(os.path.dirname(path), "."), os.W_OK):
            sys.exit(f"cannot write {path}: it is a folder, or its folder is missing or read-only")


def note_stop(signum, frame):
    STOP_REQUESTS.append(signum)
    if signum == signal.SIGINT:
        signal.signal(signum, signal.SIG_DFL)  # a second Ctrl-C ends the process at once


def expect_progress(seconds):
    """Shows this process's stack in so many seconds, and ends it in twice as many. 0: never."""
    faulthandler.cancel_dump_traceback_later()
    if seconds > 0:
        faulthandler.dump_traceback_later(seconds, file=sys.__stderr__)
    signal.alarm(2 * seconds)


def look(run, look_step, look_time, args):
    """Adds up the sums since the last look. Ends the run if the loss is not finite.

    Returns whether a signal has asked the run to stop, and the steps per second. Waits for the GPU.
    """
    expect_progress(args.timeout)
    for name, value in run.sums.items():
        run.totals[name] = run.totals.get(name, 0.0) + float(value)  # waits for the GPU
    run.sums = {}
    speed = (run.step - look_step) / (time.perf_counter() - look_time)
    run.watch.flush()
    if not math.isfinite(run.totals["loss"]):
        sys.exit(f"the loss is not finite at step {run.step}")
    return len(STOP_REQUESTS) > 0, speed


def train_step(run, batches, args):
    """Takes one step of the optimizer, over all micro-batches of a batch."""
    factor_of = globals().get("learning_rate_factor", lambda args, done: 1.0)
    factor = factor_of(args, (run.step + 1) / run.num_steps)
    for group in run.optimizer.param_groups:
        group["lr"] = float(group["initial_lr"] * factor)
    for micro_step in range(args.grad_accum_steps):
        batch = to_device(next(batches), run.device)
        set_seeds(run.device, args.seed, run.step, micro_step)  # a resumed run draws the same
        run.watch.mark("data")
        loss = compute_loss(run, run.compiled_model, batch, run.sums, args)
        run.watch.mark("forward")
        run.scaler.scale(loss / args.grad_accum_steps).backward()
        run.watch.mark("backward")
    if args.max_grad_norm > 0:
        run.scaler.unscale_(run.optimizer)
        nn.utils.clip_grad_norm_(run.model.parameters(), args.max_grad_norm)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad()
    run.watch.mark("optimizer")


def set_seeds(device, *numbers):
    """Seeds the random numbers of Python, NumPy and PyTorch."""
    seed = hash(numbers) % 2**32  # Python hashes numbers alike in all processes, unlike strings
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes longer
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def compute_loss(run, model, batch, sums, args):
    """Returns the loss of a batch, and adds the batch's sums to `sums`."""
    dtype = DTYPES[args.precision]
    with torch.autocast(run.device.type, dtype, enabled=dtype is not None):
        loss, batch_sums = batch_loss(model, batch, args)
    if not {"loss", "count"} <= batch_sums.keys():
        sys.exit("batch_loss must return sums, among them loss and count")
    if sums and sums.keys() != batch_sums.keys():
        sys.exit("batch_loss must return the same sums each time")
    for name, value in batch_sums.items():
        total = sums.get(name, torch.zeros(()))  # float32 is exact enough
        sums[name] = total + torch.as_tensor(value).detach()
    return loss


def train_again(model, resting):
    """Calls model.train(), but leaves in eval() the parts that rest, such as frozen ones."""
    model.train()
    for part in resting:
        part.training = False


@torch.no_grad()
def evaluate(run, data, args):
    """Returns the sums of batch_loss over the data."""
    size = args.batch_size // args.grad_accum_steps  # as in training
    batches_of_indices = BatchSampler(range(len(data)), size, drop_last=False)
    requests = (((args.seed,), indices) for indices in batches_of_indices)
    resting = [part for part in run.model.modules() if not part.training]
    run.model.eval()
    sums = {}
    for number, batch in enumerate(start_loader(data, requests, run, args)):
        expect_progress(args.timeout)
        set_seeds(run.device, args.seed, number)  # the same in each validation
        compute_loss(run, run.compiled_model, to_device(batch, run.device), sums, args)
        if STOP_REQUESTS:
            break
    sums["/stops"] = len(STOP_REQUESTS)
    train_again(run.model, resting)
    return {name: float(value) for name, value in sums.items()}


def training_requests(data, run, args):
    """Yields a request for each micro-batch: seeds, and the indices of samples."""
    draw_order = globals().get("training_order", lambda *_: np.random.permutation(len(data)))
    order = None
    for step in range(run.step, run.num_steps):
        epoch, step_of_epoch = divmod(step, run.steps_per_epoch)
        if order is None or step_of_epoch == 0:
            set_seeds(run.device, args.seed, epoch)  # a resumed run draws the same order
            order = np.asarray(draw_order(data, args, epoch))
            if not run.steps_per_epoch * args.batch_size <= len(order) <= len(data):
                sys.exit(f"training_order must return {len(data)} indices, not {len(order)}")
            order = order[: run.steps_per_epoch * args.batch_size].reshape(-1, args.batch_size)
        for indices in order[step_of_epoch].reshape(args.grad_accum_steps, -1).tolist():
            yield (args.seed, step), indices


class Batches(Dataset):
    """The batches of a data set. A request holds seeds, for augmentation, and indices."""

    def __init__(self, data):
        self.data = data

    def __getitem__(self, request):
        seeds, indices = request
        set_seeds(torch.device("cpu"), *seeds, *indices)  # for augmentation
        if not hasattr(self.data, "__getitems__"):
            return default_collate([self.data[index] for index in indices])
        samples = self.data.__getitems__(indices)  # a tuple or dict is a batch already
        return default_collate(samples) if isinstance(samples, list) else samples


def start_loader(data, requests, run, args):
    """Returns an iterator over batches, one for each request."""
    parent = os.getpid()
    loader = DataLoader(
        Batches(data),
        batch_size=None,  # what the data set returns is a batch
        sampler=requests,
        num_workers=args.num_workers,
        multiprocessing_context="fork" if args.num_workers > 0 else None,  # shares the data
        worker_init_fn=lambda _: init_worker(parent),
        pin_memory=run.device.type not in ("cpu", "mps"),
    )
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # workers inherit this
    batches = iter(loader)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    return batches


def init_worker(parent):
    """Lets a worker outlive a signal to the whole job. It ends with its parent."""

    def wait_for_parent():
        while os.getppid() == parent:  # while it is alive
            received = signal.sigtimedwait(SIGNALS, 1)
            if received and received.si_pid == parent:  # from the loader, to end it
                break
        os._exit(0)

    threading.Thread(target=wait_for_parent, daemon=True).start()


def to_device(batch, device):
    """Returns the batch with its tensors on the device. What has no .to stays as it is."""
    return tree_map(lambda x: x.to(device, non_blocking=True) if hasattr(x, "to") else x, batch)


def settings_of(args):
    """Returns the flags that shape the weights, as numbers and strings."""
    settings = {name: value for name, value in vars(args).items() if name not in MAY_CHANGE}
    # Without the slash at the end of a folder: it means nothing.
    return {
        name: v if isinstance(v, (int, float)) else str(v).rstrip("/")
        for name, v in settings.items()
    }


def load(path):
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def read_snapshot(run, args):
    """Returns the snapshot, or None if there is none yet. One with other settings ends the run."""
    if not args.snapshot or not os.path.exists(args.snapshot):
        return None
    try:
        snapshot = load(args.snapshot)
        if "writer" not in snapshot["progress"]:
            raise ValueError("an older version of this script has written it")
        for name, value in run.settings.items():
            saved = snapshot["settings"].get(name, value)
            names = {os.path.basename(str(each)) for each in (saved, value)}  # folders may differ
            if saved != value and len(names) > 1:
                raise ValueError(f"it was made with --{name} {saved}, not {value}")
        return snapshot
    except Exception as error:  # a damaged or foreign file can fail anywhere
        sys.exit(f"cannot resume from {args.snapshot}: {error}")


def restore(run, snapshot, args):
    """Loads the snapshot into the run."""
    try:
        for name in STATES:
            getattr(run, name).load_state_dict(snapshot[name])
        vars(run).update(snapshot["progress"])
        snapshot.clear()  # else, beside a GPU, the file takes disk space after it is replaced
    except Exception as error:
        sys.exit(f"cannot resume from {args.snapshot}: {error}")


def save_snapshot(run, args):
    """Saves a snapshot. This may take ten times as long as --timeout says."""
    if not args.snapshot:
        return
    expect_progress(10 * args.timeout)
    if not all(p.isfinite().all() for p in run.model.parameters() if p.requires_grad):
        sys.exit(f"weights are not finite at step {run.step}; {args.snapshot} stays as it was")
    write_snapshot(run, args)
    run.watch.mark("save")
    expect_progress(args.timeout)


def write_snapshot(run, args):
    """Writes a temporary file and renames it, so that no snapshot is half written."""
    snapshot = {name: getattr(run, name).state_dict() for name in STATES}
    snapshot["settings"] = run.settings
    progress = ("id", "step", "row_step", "totals", "num_samples")
    snapshot["progress"] = {name: getattr(run, name) for name in progress} | {"writer": run.start}
    temporary = Path(f"{args.snapshot}.{run.id}.{run.start}.tmp")
    try:
        for old in temporary.parent.glob(f"*.{run.id}.*.tmp"):  # of starts that were killed
            old.unlink(missing_ok=True)
        with open(temporary, "wb") as file:
            torch.save(snapshot, file)
            os.fsync(file.fileno())
        if os.path.exists(args.snapshot):
            writer = load(args.snapshot)["progress"]["writer"]
            if writer not in (run.start, run.writer) or not temporary.exists():
                raise OSError("another run writes it")
        load(temporary)  # a type that weights_only refuses, such as NumPy's, fails here
        os.replace(temporary, args.snapshot)
    except Exception as error:
        temporary.unlink(missing_ok=True)
        cause = error.__context__ or error  # PyTorch's own error does not name a full disk
        sys.exit(f"cannot save {args.snapshot}, which stays as it was: {cause}")


def log_row(run, val_totals, args):
    """Prints the means since the last row, and appends a row to --log."""
    device_module = torch.get_device_module(run.device)
    plain = (int, float, str, type(None))
    row = {name: v if isinstance(v, plain) else str(v) for name, v in vars(args).items()} | {
        "script": "/".join(Path(__file__).resolve().parts[-2:]),
        "settings": run.settings,
        "processes": 1,
        "nodes": 1,
        "rank": 0,
        "host": os.uname().nodename,
        "device": getattr(device_module, "get_device_name", run.device.type.upper)(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "trained": sum(p.numel() for p in run.model.parameters() if p.requires_grad),
        "step": run.step,
        "steps_per_epoch": run.steps_per_epoch,
        "run": run.id,
    }
    means = {}
    for split, totals in (("train", run.totals), ("val", val_totals)):
        count = totals.pop("count", 0)  # 0: not validated, or no sample had a label
        means |= {f"{split}_{name}": total / count for name, total in totals.items() if count}
    row |= means
    row |= run.watch.take_times(args.batch_size)
    run.watch.add_row(row)
    words = [f"step {run.step}", *(f"{name} {mean:.4g}" for name, mean in means.items())]
    words += [f"{name} {row[name]:.5g}" for name in ("seconds", "samples/s") if name in row]
    tqdm.write(textwrap.fill("  ".join(words), 100))
    if args.log:
        with open(args.log, "a") as file:
            file.write(json.dumps(row, default=str) + "\n")


# == Where the time goes. To remove it, delete up to the main guard, and each line with watch. =====

STEP_PHASES = ("data", "forward", "backward", "optimizer")
PHASES = ("warmup", *STEP_PHASES, "eval", "save")
TIMES = (*PHASES, "steps")
WARMUP_STEPS = 3  # these first steps allocate memory, search for kernels, compile


class Stopwatch:
    """Times the phases of training.

    A moment is a time in seconds or, on a GPU, an event. Only flush() waits for the GPU.
    """

    def __init__(self, device):
        self.device = device
        self.has_events = device.type not in ("cpu", "mps")
        self.num_steps = 0  # since the start
        self.times = dict.fromkeys(TIMES, 0.0)  # seconds, and the number of steps after warmup
        self.marks = [("start", self.now())]  # (phase, the moment at which it ended)
        self.last_step = []  # (phase, start, end, bytes), for report.py --step
        self.row = {}  # the last row
        self.totals = Counter()  # the summed times of all rows

    def now(self):
        if not self.has_events:
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        return torch.accelerator.current_stream().record_event(event)

    def between(self, start, end):
        return start.elapsed_time(end) / 1000 if self.has_events else end - start

    def mark(self, phase):
        """Counts the time since the last mark as this phase or, in the first steps, as warmup."""
        is_warmup = phase in STEP_PHASES and self.num_steps < WARMUP_STEPS
        self.num_steps += phase == "optimizer"
        self.marks.append(("warmup" if is_warmup else phase, self.now()))

    def flush(self):
        """Adds up the times since the last flush. Waits for the GPU."""
        if self.has_events:
            torch.accelerator.synchronize()
        _, now = self.marks[-1]
        marks = [(phase, -self.between(moment, now)) for phase, moment in self.marks]
        phases = [(phase, start, end, 0) for (_, start), (phase, end) in itertools.pairwise(marks)]
        for phase, start, end, _ in phases:  # in seconds after now: negative
            self.times[phase] += end - start
        step_ends = [end for phase, _, end, _ in phases if phase == "optimizer"]
        self.times["steps"] += len(step_ends)
        if step_ends:
            first, last = [-math.inf, *step_ends][-2:]  # the ends of the last two steps
            self.last_step = [event for event in phases if first <= event[1] < last]
        del self.marks[:-1]

    def take_times(self, batch_size):
        """Returns the columns of time and memory. The times start again from 0."""
        self.mark("eval")  # a validation has just ended
        self.flush()
        row = with_speed(self.times, batch_size)
        self.times = dict.fromkeys(TIMES, 0.0)
        row["peak_MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6  # from KiB
        if self.has_events:
            row["peak_MB"] = torch.accelerator.max_memory_allocated() / 1e6
        row["last_step"] = self.last_step
        return row

    def add_row(self, row):
        """Keeps what the summary needs: the last row, and the sums of the times."""
        self.row = row
        self.totals.update({name: row[name] for name in TIMES})


def with_speed(times, batch_size):
    """Returns the times, with their sum, and with the speed of training after the warmup."""
    training = sum(times[phase] for phase in STEP_PHASES)
    speed = batch_size * times["steps"] / training if training else 0.0
    return times | {"seconds": sum(times[phase] for phase in PHASES), "samples/s": speed}


def print_summary(watch):
    """Prints where the time since the start has gone, and a row for results.md."""
    if not watch.row:
        return
    total = with_speed(watch.totals, watch.row["batch_size"])
    print(f"\ntime by phase, {total['seconds']:.2f} s in all")
    for phase in PHASES:
        share = total[phase] / total["seconds"]
        print(f"{phase:9} {total[phase]:8.3f} {share:4.0%}  {'#' * round(50 * share)}")
    names = ("script", "model", "dataset", "precision", "processes", "batch_size")
    cells = {name: str(watch.row.get(name, "-")) for name in names}
    results = {name for name in watch.row if name.startswith("val_")} - watch.row["settings"].keys()
    cells |= {name: f"{watch.row[name]:.4g}" for name in watch.row if name in results}
    total["peak_MB"] = watch.row["peak_MB"]
    cells |= {name: f"{value:.4g}" for name, value in total.items()}
    for line in (cells.keys(), ["---"] * len(cells), cells.values()):
        print("|", " | ".join(line), "|")


if __name__ == "__main__":
    main(parse_args())
