r"""Train a GPT whose weights are divided over processes: FSDP, also known as ZeRO-3.

    torchrun --standalone --nproc_per_node=2 -- hybrid/gpt_fsdp.py            # one node, to try it
    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HEAD_NODE:29400 -- \
        hybrid/gpt_fsdp.py --shard_size 4 --precision bf16 --snapshot gpt     # on each of two nodes
    sbatch --nodes=2 --gpus-per-node=4 slurm/hybrid_gpt_fsdp.slurm --checkpoint_activations

The model need not fit on one GPU. With 4 processes and --shard_size 2, ranks 0 and 1 share a copy,
and 2 and 3 another: each holds half of each weight, of its gradient and of its optimizer state.
Before a block runs, an all-gather collects its weights. After its backward pass, a reduce-scatter
leaves each process its half of the gradients, which an all-reduce averages over the copies. At the
start, a process holds the whole model in RAM. With --grad_accum_steps, it keeps whole gradients on
its device. With --precision bf16, all activations are in bf16, those between the blocks, too.

In the folder of --snapshot, each process writes its shards while the training goes on. This makes a
file of them, which the other gpt.py take. Do so with your own alone: it executes what it finds.
    python -m torch.distributed.checkpoint.format_utils dcp_to_torch gpt/step-000000100 gpt.pt
Read multinode/gpt.py first: `diff multinode/gpt.py hybrid/gpt_fsdp.py` shows what shards add.
For your own data and model, replace the first of the three sections. The model must have `blocks`.
Shapes: B sequences of a batch, T tokens of a sequence, D = d_model, H heads, V vocabulary.
"""

import argparse
import contextlib
import io
import itertools
import json
import math
import os
import pickle
import random
import re
import shutil
import signal
import sys
import sysconfig
import textwrap
import time
import zlib
from collections import Counter
from functools import partial
from glob import glob
from multiprocessing import active_children
from multiprocessing.util import Finalize, get_temp_dir
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, default_collate
from tqdm import tqdm

ON_GPU = torch.accelerator.is_available()  # a GPU of any maker

# == Yours: flags, data, model, loss. Replace it. ==================================================


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


# == The run: flags, steps, rows, snapshots. Keep it. It calls eight functions of the task. ========

DTYPES = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
COMM_HOOKS = {"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)  # each asks the run to save and stop
MAY_CHANGE = (  # flags, of any task, that may differ in a resumed run. All others may not.
    "epochs max_steps eval_every grad_accum_steps comm_hook compile num_workers "
    "data_dir snapshot init_from log sample shard_size checkpoint_activations"
).split()
STEP_FOLDER = "step-" + 9 * "[0-9]"  # the pattern of a snapshot's name


def parse_run_args(parser, **defaults):
    """Adds the flags of the run to those of the task, and parses them all."""
    has_tf32 = ON_GPU and torch.version.cuda is not None  # AMD's TF32 is as inexact as bf16
    add = parser.add_argument_group("the run").add_argument
    add("--epochs", type=int, help="passes over the data; a change can shift the schedule")
    add("--max_steps", type=int, default=0, help="optimizer steps in total; 0: --epochs decides")
    add("--eval_every", type=int, default=0, help="steps between validations; 0: once per epoch")
    add("--batch_size", type=int, help="global batch: samples per optimizer step")
    add("--grad_accum_steps", type=int, default=1, help="micro-batches per batch, to save memory")
    add("--learning_rate", type=float, default=1e-3, help="peak learning rate")
    add("--max_grad_norm", type=float, default=0.0, help="clip gradients to this norm; 0: do not")
    add("--precision", choices=DTYPES, default="tf32" if has_tf32 else "fp32", help="number type")
    add("--comm_hook", choices=COMM_HOOKS, default="none", help="type in which gradients are sent")
    add("--compile", action="store_true", help="use torch.compile, which slows the first steps")
    add("--num_workers", type=int, default=0, help="processes that load data, for each GPU")
    add("--shard_size", type=int, default=0, help="processes that share a copy; 0: all of them")
    add("--checkpoint_activations", action="store_true", help="recompute blocks, to save memory")
    add("--seed", type=int, default=1, help="seed of weights, data order and dropout")
    add("--snapshot", metavar="FOLDER", help="save at each row and when stopped; resume from it")
    add("--init_from", metavar="FILE", help="start from the weights of this snapshot")
    add("--log", metavar="FILE.jsonl", help="append a row for each process, for report.py")
    parser.set_defaults(**defaults)
    return parser.parse_args()


def main(args):  # runs in each process: torchrun or Slurm starts them
    if "SLURM_STEP_NUM_TASKS" in os.environ and not dist.is_torchelastic_launched():  # by srun
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["WORLD_SIZE"] = os.environ["SLURM_STEP_NUM_TASKS"]
        os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
        os.environ["GROUP_WORLD_SIZE"] = os.environ["SLURM_STEP_NUM_NODES"]
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR"} <= {*os.environ}:
        command = f"torchrun --nproc_per_node=PROCESSES -- {' '.join(sys.argv)}"
        sys.exit(f"start it by its job file, or with {command}")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])  # the number of this process on its machine
    num_nodes, num_gpus = int(os.environ["GROUP_WORLD_SIZE"]), torch.accelerator.device_count()
    may_share = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"  # a GPU, as a rehearsal
    if local_rank == num_gpus > 0 and dist.is_torchelastic_launched() and not may_share:
        sys.exit(f"{num_gpus} GPU(s) are too few for the processes of this node")
    device = torch.device(local_rank % num_gpus if ON_GPU else "cpu")
    if ON_GPU:  # Slurm may show a process its own GPU alone, which then has number 0
        torch.accelerator.set_device_index(device.index)
    if num_nodes == 1:  # stay on this machine
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if rank == 0:  # it downloads what is missing, and says what is wrong. The others wait below.
        check_args(args, world_size)
        # It gets a copy of args, which read_data() may change.
        num_train, num_val = map(len, read_data(argparse.Namespace(**vars(args))))
        if num_train < args.batch_size or num_val < world_size:
            sys.exit(f"too few samples: {num_train} for a batch, {num_val} to validate on")
        if world_size < num_nodes * num_gpus:
            print(f"{world_size} processes do not use all {num_gpus} GPUs of a node")
    backend = dist.get_default_backend_for_device(device)  # nccl for NVIDIA GPUs, gloo for CPUs
    # No device_id: with it, a mesh would split this group, which not all backends can.
    dist.init_process_group(backend)  # waits for all
    cpu_group = dist.new_group(backend="gloo")  # for barriers, and for the thread that saves
    if rank > 0:
        check_args(args, world_size)
    with contextlib.redirect_stdout(io.StringIO()):  # rank 0 has printed this already
        if local_rank == 0 and rank > 0:
            read_data(argparse.Namespace(**vars(args)))  # downloads where disks are not shared
        dist.barrier(cpu_group)  # waits for that
        set_seeds(args.seed)  # the same random splits in all processes
        train_data, val_data = read_data(args)
    steps_per_epoch = len(train_data) // args.batch_size  # an incomplete last batch is left out
    num_steps = args.max_steps or args.epochs * steps_per_epoch
    eval_every = args.eval_every or steps_per_epoch

    dtype = DTYPES[args.precision]
    autocast = torch.autocast(device.type, dtype, enabled=dtype is not None)
    torch.set_float32_matmul_precision("high" if args.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = args.precision == "tf32"
    # Time the algorithms of a convolution, and take the fastest. AMD's search takes too long.
    torch.backends.cudnn.benchmark = torch.version.hip is None
    set_seeds(args.seed)  # the same weights in each run, and in all processes
    model = create_model(args, train_data)
    fingerprint = fingerprint_of(train_data, args)
    newest = newest_snapshot(args)
    if args.init_from and not newest:
        load_weights(model, fingerprint, args)
    weights = int(sum(checksum(p.detach()) for p in model.parameters()))  # each keeps its shard
    shard(model, device, args)
    add_marks(model)
    # Parts that the task has put into eval() stay so. A model that is wholly in eval() is trained.
    resting = [part for part in model.modules() if model.training and not part.training]
    model.train()
    for part in resting:
        part.training = False
    optimizer = create_optimizer(model, args)
    optimized = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if optimized - {*model.parameters()}:
        sys.exit("the optimizer has parameters that the model has not: put them into the model")
    left_out = [p for p in model.parameters() if p.requires_grad and p not in optimized]
    for parameter in left_out:
        parameter.requires_grad_(False)  # its gradients would add up, and count in the norm
    if rank == 0 and left_out:
        print(f"{len(left_out)} parameters are frozen: the optimizer does not have them")
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"] + 0.0  # a copy, since it may be a tensor
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    if args.snapshot:  # what a resume could not read fails here, before the training
        torch.save([optimizer.state_dict(), args.settings], file := io.BytesIO())
        torch.load(io.BytesIO(file.getvalue()), "cpu", weights_only=True)
    progress = {"id": f"{time.time_ns():x}", "fingerprint": fingerprint}
    # The steps done, the step of the last row, and the sums of batch_loss since that row.
    progress |= {"step": 0, "row_step": 0, "totals": {}}
    if newest:
        snapshot = torch.load(newest / "run.pt", "cpu", weights_only=True)
        scaler.load_state_dict(snapshot["scaler"])
        progress |= snapshot["progress"]
        if progress["fingerprint"] != fingerprint:
            way_out = "--init_from, with a file made of it, starts anew with its weights"
            sys.exit(f"the training data is not that of {newest}. {way_out}")
    step = first_step = progress["step"]  # the steps done before this start
    flags = f"{args.settings} {num_steps} {eval_every} {args.comm_hook} {bool(args.snapshot)}"
    flags += f" {args.shard_size} {args.grad_accum_steps}"
    setup = zlib.crc32(flags.encode() + Path(__file__).read_bytes())
    numbers = [*fingerprint, len(val_data), setup, weights, step]
    if differ(torch.tensor(numbers, device=device)).any():
        causes = "Sort what comes from a set or a folder, seed generators, share the file system"
        sys.exit(f"the processes have different code, flags, data, weights or snapshots. {causes}")
    if newest:
        load_shards(model, optimizer, newest, cpu_group)
    saving = None  # the snapshot that a thread writes while the training goes on

    stop_requests = []

    def note_stop(signum, frame):
        stop_requests.append(signum)
        if signum == signal.SIGINT:
            signal.signal(signum, signal.SIG_DFL)  # a second Ctrl-C ends the process at once

    for signum in SIGNALS:
        signal.signal(signum, note_stop)
    Finalize(None, end_workers, exitpriority=0)  # called at exit, also after an error
    for stream in (sys.stdout, sys.stderr):
        stream.write, stream.flush = without_errors(stream.write), without_errors(stream.flush)
    if rank == 0:
        print(f"processes {world_size}, device {device}, steps {step} to {num_steps}", flush=True)
    requests = training_requests(train_data, step, args)
    batches = load_batches(train_data, requests, device, args)
    pause = 0.1 if sys.stderr.isatty() else 60  # seconds between two prints of the bar
    bar = tqdm(initial=step, total=num_steps, disable=rank > 0, mininterval=pause)
    # The sums of batch_loss since the last row: of this process, on its device. Names with a slash
    # are the run's own. After a resume, rank 0 alone has the saved sums: they count once.
    sums = Counter(progress["totals"] if rank == 0 else dict.fromkeys(progress["totals"], 0.0))
    rows = []  # of all processes since the start, in rank 0 alone
    look_step, look_time, next_look = step, time.perf_counter(), step + 1
    is_stopped = False
    mark("start")
    while True:
        is_row = step > progress["row_step"] and (step % eval_every == 0 or step >= num_steps)
        # A look, about once a second, at the same step in all processes: they add their sums, and
        # agree whether to stop. Python waits for the GPU only here.
        if is_row or step == next_look:
            own = {name: float(value) for name, value in sums.items()}  # waits for the GPU
            seconds = time.perf_counter() - look_time
            totals = add_up({**own, "/stops": len(stop_requests), "/seconds": seconds}, device)
            mark("comm")
            count_marks(is_warmup=step <= first_step + 3)
            is_stopped = totals.pop("/stops") > 0
            if saving and saving.done():
                saving.result()  # raises what went wrong, such as a full disk
            speed = (step - look_step) * world_size / totals.pop("/seconds")  # steps/s
            if not math.isfinite(totals["loss"]):
                sys.exit(f"the loss is not finite at step {step}")
            bar.set_postfix(loss=f"{totals['loss'] / max(1, totals['count']):.4g}", refresh=False)
            if is_row or is_stopped:
                check_weights(model, step)
                progress |= {"step": step, "totals": dict(totals)}
                if args.snapshot and step > first_step:
                    saving = save_shards(parts, progress, saving, cpu_group, args)
                    mark("save")
                val_totals = {}
                if not is_stopped:  # else the resumed run validates first
                    val_totals = evaluate(model, val_data, device, autocast, args)
                    mark("eval")
                    sums.clear()
                    progress |= {"row_step": step, "totals": {}}
                if args.snapshot and (is_stopped or step >= num_steps):
                    # Waits until the shards are written, then saves which row is done.
                    save_run(parts, progress, saving, cpu_group, args)
                    mark("save")
                row = {"run": progress["id"], "step": step, "steps_per_epoch": steps_per_epoch}
                rate = float(optimizer.param_groups[0]["lr"])
                row |= {"epoch": step / steps_per_epoch, "lr": rate}
                rows += log_row(row, totals, val_totals, model, device, args)
            # Look after each of the first 3 steps. Later, look again in about a second, but after
            # at most twice as many steps as between the last two looks.
            longest = 2 * (step - look_step) if step >= first_step + 3 else 1
            next_look = step + max(1, min(int(speed), longest))
            look_step, look_time = step, time.perf_counter()
        if is_stopped or step >= num_steps:
            break
        factor = float(learning_rate_factor(args, (step + 1) / num_steps))
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        for micro_step in range(args.grad_accum_steps):
            batch = next(batches)
            set_seeds(args.seed, rank, step, micro_step)  # dropout is the same after a resume
            mark("data")
            is_last = micro_step == args.grad_accum_steps - 1
            model.set_requires_gradient_sync(is_last)  # else no averaging, as in no_sync()
            with autocast:
                loss, batch_sums = batch_loss(model, batch, args)
            sums.update(as_tensors(batch_sums))
            mark("forward")
            scaler.scale(loss / args.grad_accum_steps).backward()
            mark("backward")
        if args.max_grad_norm > 0:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm).float()
            norm = norm.full_tensor()  # that of the gradients of all shards
            # The scaler skips steps whose gradients are infinite: their norm does not count.
            sums.update({"/norm": norm.nan_to_num(0, 0, 0), "/steps": norm.isfinite().int()})
        set_seeds(args.seed, step)  # the same in all processes: an optimizer may draw numbers
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        mark("optimizer")
        step += 1
        bar.update()

    bar.close()
    print_marks(rows)
    if not is_stopped:
        set_seeds(args.seed)  # all call the model, and draw the same. Rank 0 prints
        with contextlib.redirect_stdout(io.StringIO() if rank > 0 else sys.stdout):
            finish(model.eval(), val_data, args, device)
    dist.barrier(cpu_group)  # a process that leaves early can make the others fail
    dist.destroy_process_group()
    if rank == 0 and is_stopped:
        has_saved = args.snapshot and step > first_step  # else a job would be queued again for ever
        print(f"stopped at step {step} of {num_steps}, saved {args.snapshot or 'nothing'}")
        if "SLURM_STEP_NUM_TASKS" in os.environ:
            time.sleep(10)  # Slurm ends all when one fails: let the others end first
        sys.exit(os.EX_TEMPFAIL if has_saved else 128 + signal.SIGTERM)  # 75: run me again


def shard(model, device, args):
    """Leaves this process a shard of each block and of all else, on the device."""
    shape = (dist.get_world_size() // args.shard_size, args.shard_size)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("copies", "shards"))
    policy = MixedPrecisionPolicy(DTYPES[args.precision], reduce_dtype=COMM_HOOKS[args.comm_hook])
    for block in model.blocks:
        if args.compile:
            block.forward = torch.compile(block.forward)
        if args.checkpoint_activations:  # block.compile() would not compile what is in checkpoint()
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block.to(device), mesh=mesh, mp_policy=policy)
    if args.compile:  # the embedding, the head and the loss
        model.forward = torch.compile(model.forward)
    fully_shard(model.to(device), mesh=mesh, mp_policy=policy)


def without_errors(write):
    """Returns this method of a stream without its errors: a closed pipe must not end a training."""

    def try_to_write(*text):
        with contextlib.suppress(OSError):
            write(*text)

    return try_to_write


def end_workers():
    """Kills the workers. They block SIGTERM (see load_batches), so Python would wait forever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader's handler would raise an error
    for worker in active_children():
        worker.kill()


def set_seeds(*numbers):
    """Seeds the random numbers of Python, NumPy and PyTorch."""
    seed = hash(numbers) % 2**32  # Python hashes numbers alike in all processes, unlike strings
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes longer
    if ON_GPU and not torch.utils.data.get_worker_info():
        torch.get_device_module().manual_seed(seed)


def fingerprint_of(data, args):
    """Returns the length of the data, and a checksum of three samples and the first order."""
    samples = Batches(data)[(args.seed,), [0, len(data) // 2, len(data) - 1]]
    samples = [x.tolist() if isinstance(x, torch.Tensor) else x for x in tree_leaves(samples)]
    set_seeds(args.seed, 0)
    order = np.asarray(training_order(data, args, 0))  # of a long one, str() shows both ends
    text = re.sub("at 0x[0-9a-f]+", "", f"{samples} {order}")  # addresses of objects differ
    return [len(data), zlib.crc32(text.encode())]


def differ(numbers, group=None):
    """Returns, for each of K whole numbers, whether the processes of the group disagree."""
    of_all = [torch.empty_like(numbers) for _ in range(dist.get_world_size(group))]
    dist.all_gather(of_all, numbers, group)
    return (torch.stack(of_all) != numbers).any(0)


def checksum(weights):
    """Returns a sum of all bytes, each times its place: weights that change places count, too."""
    pieces = weights.flatten().view(torch.uint8).split(2**18)  # 256 KiB, to need little memory
    places = torch.arange(1, len(pieces[0]) + 1, dtype=torch.int32, device=weights.device)
    sums = [(piece * places[: len(piece)]).sum() for piece in pieces]
    return sum(number * total for number, total in enumerate(sums, start=1))


def check_weights(model, step):
    """Ends the run if weights are not finite, or if their checksums differ between copies."""
    weights = {n: p.detach().to_local() for n, p in model.named_parameters() if p.requires_grad}
    checksums = torch.stack([checksum(p) for p in weights.values()])
    copies = next(model.parameters()).device_mesh.get_group("copies")
    different = [name for name, differs in zip(weights, differ(checksums, copies)) if differs]
    if different:
        causes = "Does forward() change it? Then FSDP does not see it"
        sys.exit(f"step {step}: {different[0]} is not the same in all copies. {causes}")
    if not all(p.isfinite().all() for p in weights.values()):
        sys.exit(f"the weights are not finite at step {step}")


def load_weights(model, fingerprint, args):
    """Loads the weights of --init_from, except those whose shape differs, such as a new head's."""
    snapshot = torch.load(args.init_from, "cpu", weights_only=True, mmap=True)
    weights = snapshot["model"]
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    fitting = {name: each for name, each in weights.items() if each.shape == shapes.get(name)}
    others = sorted((shapes.keys() | weights.keys()) - fitting.keys())
    if not fitting:
        sys.exit(f"{args.init_from} has no weights of this model")
    if dist.get_rank() == 0 and others:
        print(f"{len(others)} weights do not match {args.init_from}: {', '.join(others):.60}")
    if dist.get_rank() == 0 and snapshot.get("progress", {}).get("fingerprint") != fingerprint:
        print(f"{args.init_from} is of another seed or data: are its words and classes the same?")
    model.load_state_dict(fitting, strict=False)


def newest_snapshot(args):
    """Returns the folder of the newest snapshot, if there is one. DCP writes .metadata last."""
    complete = Path(args.snapshot).glob(f"{STEP_FOLDER}/.metadata") if args.snapshot else ()
    return max((path.parent for path in complete), default=None)


class MetadataUnpickler(pickle.Unpickler):
    """Reads what DCP writes into its .metadata, and refuses everything else."""

    def find_class(self, module, name):
        known = """BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex PosixPath Size
            StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING _StorageInfo
            _get_layout""".split()
        is_known = name in known or isinstance(getattr(torch, name, None), torch.dtype)
        if not is_known or module.partition(".")[0] not in ("torch", "pathlib"):
            raise pickle.UnpicklingError(f"{module}.{name} is not of a snapshot")
        return super().find_class(module, name)


def load_shards(model, optimizer, folder, group):
    """Loads the shards of this process, of which another number of processes may have saved."""
    with open(folder / ".metadata", "rb") as file:
        MetadataUnpickler(file).load()  # dcp.load() would execute what it finds in it
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # then it executes nothing of the rest
    weights, moments = get_state_dict(model, optimizer)
    states = {"model": weights, "optimizer": moments}
    dcp.load(states, checkpoint_id=folder, process_group=group)  # in place
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


def save_shards(parts, progress, saving, group, args):
    """Starts a thread that writes the shards of this process. Returns its future."""
    folder, snapshot = save_run(parts, progress, saving, group, args)
    send_buffers(parts["model"])  # DCP would write those of any process
    states = get_state_dict(parts["model"], parts["optimizer"])
    snapshot |= {"model": states[0], "optimizer": states[1]}
    return dcp.async_save(snapshot, checkpoint_id=folder, process_group=group)


def save_run(parts, progress, saving, group, args):
    """Writes run.pt, once the last snapshot is complete. Returns the folder and what it wrote."""
    if saving:
        saving.result()  # waits, and raises what went wrong
    folder = Path(args.snapshot, f"step-{progress['step']:09}")
    scaler = parts["scaler"].state_dict() or {"enabled": False}  # DCP leaves out an empty dict
    run = {"scaler": scaler, "progress": progress, "settings": args.settings}
    if dist.get_rank() == 0:
        for old in {*Path(args.snapshot).glob(STEP_FOLDER)} - {newest_snapshot(args)}:
            shutil.rmtree(old, ignore_errors=True)  # it is older, or half written
        folder.mkdir(exist_ok=True)
        with open(folder / "run.tmp", "wb") as file:
            torch.save(run, file)
            os.fsync(file.fileno())
        os.replace(folder / "run.tmp", folder / "run.pt")
    dist.barrier(group)  # the others wait
    if not (folder / "run.pt").exists():
        sys.exit(f"{args.snapshot} must be on a disk that all machines share")
    return folder, run


def training_requests(data, step, args):
    """Yields seeds, and indices of samples, for each micro-batch of this process from `step` on."""
    steps_per_epoch = len(data) // args.batch_size
    for epoch in itertools.count(step // steps_per_epoch):
        set_seeds(args.seed, epoch)  # all processes draw the same order, and each takes its share
        order = np.asarray(training_order(data, args, epoch))
        while step < (epoch + 1) * steps_per_epoch:
            start = step % steps_per_epoch * args.batch_size
            share = order[start : start + args.batch_size][dist.get_rank() :: dist.get_world_size()]
            for indices in share.reshape(args.grad_accum_steps, -1).tolist():
                yield (args.seed, step), indices
            step += 1


class Batches:
    """The batches of a data set. A request is (seeds, indices). The seeds are for augmentation."""

    def __init__(self, data):
        self.data = data

    def __getitem__(self, request):
        seeds, indices = request
        set_seeds(*seeds, *indices)
        if not hasattr(self.data, "__getitems__"):
            return default_collate([self.data[index] for index in indices])
        samples = self.data.__getitems__(indices)  # a tuple or dict is a batch already
        return default_collate(samples) if isinstance(samples, list) else samples


def load_batches(data, requests, device, args):
    """Yields a batch on the device for each request."""
    if args.num_workers and len(get_temp_dir()) > 89:  # a socket's path has at most 107 characters
        sys.exit("TMPDIR is too long for workers")
    loader = DataLoader(
        Batches(data),
        batch_size=None,  # each request is a whole batch
        sampler=requests,
        num_workers=args.num_workers or 0,
        multiprocessing_context="fork" if args.num_workers else None,  # shares the data's memory
        pin_memory=ON_GPU,
    )
    # Workers inherit the blocked signals: Slurm signals them, too, and the run still needs them.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    batches = iter(loader)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    for batch in batches:
        yield tree_map(
            lambda part: to_device(part, device), batch, is_leaf=lambda part: hasattr(part, "to")
        )


def to_device(part, device):
    """Returns a part of a batch on the device. What has no .to stays as it is."""
    if isinstance(part, torch.Tensor):
        return part.to(device, non_blocking=True)
    if not hasattr(part, "to"):
        return part
    moved = part.to(device)
    return part if moved is None else moved  # some move in place, and return nothing


def as_tensors(sums):
    """Returns these sums in float32 or int64. In bfloat16 256 + 1 is 256, in bool 1 + 1 is 1."""
    tensors = {name: torch.as_tensor(x).detach() for name, x in sums.items()}
    return {name: x.float() if x.is_floating_point() else x.long() for name, x in tensors.items()}


def add_up(sums, device):
    """Returns the sums over all processes, as numbers. Waits for the GPU."""
    names = sorted(sums)  # the same order in all processes
    totals = torch.tensor([float(sums[name]) for name in names], device=device)
    dist.all_reduce(totals)
    totals = dict(zip(names, totals.tolist()))
    return {name: totals[name] for name in sums}  # the order of a row's columns


@torch.no_grad()
def send_buffers(model):
    """Gives all processes the buffers of rank 0, such as BatchNorm's statistics."""
    for buffer in model.buffers():
        if buffer.is_contiguous() or 0 not in buffer.stride():  # an expanded one is read only
            dist.broadcast(sent := buffer.contiguous(), src=0)
            buffer.copy_(sent)


@torch.no_grad()
def evaluate(model, data, device, autocast, args):
    """Returns the sums of batch_loss over the data, of which each process takes a share."""
    send_buffers(model)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    share = range(rank, len(data), world_size)
    size = args.batch_size // world_size // args.grad_accum_steps  # as in training
    # All need as many batches, none of them empty: all take part in each all-gather.
    num_batches = min(math.ceil(len(data) / world_size / size), len(data) // world_size)
    pieces = np.array_split(share, num_batches)
    requests = (((args.seed,), piece.tolist()) for piece in pieces)
    in_training = [part for part in model.modules() if part.training]
    model.eval()
    sums = Counter()
    for number, batch in enumerate(load_batches(data, requests, device, args)):
        set_seeds(args.seed, rank, number)  # the same in each validation
        with autocast:
            _, batch_sums = batch_loss(model, batch, args)
        sums.update(as_tensors(batch_sums))
    model.reshard()  # else what is in no block stays whole until a backward pass
    for part in in_training:
        part.training = True
    return add_up(sums, device)


def log_row(row, totals, val_totals, model, device, args):
    """Appends the rows of all processes to --log, prints the means, and returns these rows."""
    if "/norm" in totals:
        row["grad_norm"] = totals.pop("/norm") / max(1, totals.pop("/steps"))
    means = {}
    for split, sums in ("train", totals), ("val", val_totals):
        count = sums.pop("count", 0)  # 0: not validated, or no sample had a label
        means |= {f"{split}_{name}": total / count for name, total in sums.items() if count}
    device_module = torch.get_device_module(device)
    row = vars(args) | row | means
    row |= take_marks(args)
    row |= {
        "script": "/".join(Path(__file__).resolve().parts[-2:]),
        "processes": dist.get_world_size(),
        "rank": dist.get_rank(),
        "host": os.uname().nodename,
        "device": getattr(device_module, "get_device_name", device.type.upper)(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "shard_parameters": sum(p.to_local().numel() for p in model.parameters()),
    }
    rows = [None] * row["processes"] if row["rank"] == 0 else None
    dist.gather_object(row, rows)
    if row["rank"] > 0:
        return []
    same = {"run": row["run"], "nodes": len({each["host"] for each in rows})}
    if args.log:
        with open(args.log, "a") as file:
            file.writelines(json.dumps(each | same, default=str) + "\n" for each in rows)
    shown = [*means, "lr", "grad_norm", "seconds", "samples/s"]
    words = [f"{name} {row[name]:.4g}" for name in shown if name in row]
    tqdm.write(textwrap.fill("  ".join([f"step {row['step']}", *words]), 100))
    return [each | {"last_step": None} for each in rows]


def check_args(args, world_size):
    """Ends the run if flags do not fit together, files cannot be written, or settings differ."""
    args.shard_size = args.shard_size or world_size
    if args.shard_size < 1 or world_size % args.shard_size:
        sys.exit(f"--shard_size must divide the number of processes, {world_size}")
    if args.comm_hook != "none" and args.grad_accum_steps > 1:
        sys.exit(
            "FSDP would add up micro-batches in the type of --comm_hook: leave one of them out"
        )
    divisor = world_size * args.grad_accum_steps
    if min(divisor, args.batch_size) < 1 or args.batch_size % divisor:
        sys.exit(f"--batch_size must be a multiple of {world_size} x --grad_accum_steps")
    if args.seed < 0:
        sys.exit("--seed must not be negative")
    if args.snapshot:
        with contextlib.suppress(OSError):  # what is wrong is said below
            os.mkdir(args.snapshot)
    for path in filter(None, (args.snapshot and f"{args.snapshot}/step", args.log)):
        if os.path.isdir(path) or not os.access(f"{os.path.dirname(path) or '.'}/", os.W_OK):
            sys.exit(f"cannot write {path}: it is a folder, or its folder is missing or read-only")
    args.settings = {}  # the flags that must stay the same, as numbers and strings
    for name, value in vars(args).items():
        if name not in (*MAY_CHANGE, "settings"):
            args.settings[name] = value if isinstance(value, (int, float)) else str(value)
    newest = newest_snapshot(args)
    if newest:
        saved = torch.load(newest / "run.pt", "cpu", weights_only=True)["settings"]
        for name, value in args.settings.items():
            if saved.get(name, value) != value:
                sys.exit(f"{newest} was made with --{name} {saved[name]}, not {value}")


# == Where the time goes. To remove it: delete this section, and lines with "mark(" or "marks(". ===

STEP_PHASES = ("data", "forward", "backward", "comm", "optimizer")
PHASES = ("warmup", *STEP_PHASES, "eval", "save")  # warmup: the first three steps
TIMES = (*PHASES, "comm_total", "steps")
moments = []  # the one at which the last phase ended
events = []  # (name, start, end, bytes) since the last look: phases, collectives of FSDP
last_step = []  # the events of the last step, in seconds
times = Counter()  # seconds by phase since the last row


def now():
    """Returns this moment. Python does not wait for the GPU, which notes it when it gets here."""
    moment = torch.Event(enable_timing=True) if ON_GPU else time.perf_counter()
    if ON_GPU:
        moment.record()
    return moment


def mark(phase):
    """Notes that this phase ends here. It began where the one before it ended."""
    moments.append(now())
    if len(moments) > 1:
        events.append((phase, moments.pop(0), moments[0], 0))


def add_marks(model):
    """Lets FSDP send by functions that note the time."""
    collectives = MarkedCollectives()
    for module in (*model.blocks, model):
        module.set_custom_all_gather(collectives)
        module.set_custom_reduce_scatter(collectives)
        module.set_all_reduce_hook(collectives.note_end)


# Newer versions of torch deprecate the old names of these two.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class MarkedCollectives:
    """FSDP calls allocate() for tensors, then the object itself, after an all-reduce note_end()."""

    def allocate(self, size, *, dtype, device):
        self.start = now()  # FSDP allocates the output of a reduce-scatter right before it sends
        self.size = math.prod(size) * dtype.itemsize
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op=None, async_op=False):
        if op is not None:  # a reduce-scatter
            reduce_scatter(output_tensor, input_tensor, op, group)
            return
        start = now()
        all_gather(output_tensor, input_tensor, group)
        events.append(("all-gather", start, now(), input_tensor.nbytes))

    def note_end(self, gradients):
        events.append(("reduce-scatter", self.start, now(), self.size))


def count_marks(is_warmup=False):
    """Adds up the times since the last look. Waits for the GPU."""
    if ON_GPU:
        torch.accelerator.synchronize()

    def seconds(moment):  # relative to the last mark, which all set after the same collective
        return -moment.elapsed_time(moments[0]) / 1000 if ON_GPU else moment - moments[0]

    step = []
    phase, counted_until = "", -math.inf  # where all-reduces overlap, the time counts once
    timed = [(name, seconds(start), seconds(end), size) for name, start, end, size in events]
    events.clear()
    for name, start, end, size in sorted(timed, key=lambda event: event[1]):
        if is_warmup:
            times["warmup"] += end - start if name in PHASES else 0.0
            continue
        if name in PHASES:
            phase = name
            times[name] += end - start
        elif phase == "eval":
            continue
        elif not ON_GPU:  # a CPU waits for it, so all of it is exposed
            times[phase] -= end - start
            times["comm"] += end - start
        if name in ("comm", "all-gather", "reduce-scatter"):
            times["comm_total"] += max(0.0, end - max(start, counted_until))
            counted_until = max(counted_until, end)
        step.append((name, start, end, size))
        if name == "optimizer":
            times["steps"] += 1
            last_step[:] = step
            step = []


def take_marks(args):
    """Returns the columns of time and memory. The times start again from 0."""
    count_marks()
    row = {name: times[name] for name in TIMES}
    times.clear()
    # getrusage() would count the memory of the process that has started this one, too.
    sizes = re.findall(r"Vm(?:HWM|RSS):\s+(\d+)", Path("/proc/self/status").read_text())  # KiB
    row["peak_MB"] = max(map(int, sizes)) * 1024 / 1e6
    if ON_GPU:
        row["peak_MB"] = torch.accelerator.max_memory_allocated() / 1e6
    return row | speed_of(row, args.batch_size) | {"last_step": list(last_step)}


def speed_of(row, batch_size):
    """Returns all seconds of these times, and the speed of training after the warmup."""
    training = sum(row[phase] for phase in STEP_PHASES)
    speed = batch_size * row["steps"] / training if training else 0.0
    return {"seconds": sum(row[phase] for phase in PHASES), "samples/s": speed}


def print_marks(rows):
    """Prints where the time since the start has gone, and a row for results.md."""
    if not rows:
        return
    num_ranks = rows[0]["processes"]
    mean = {name: sum(row[name] for row in rows) / num_ranks for name in TIMES}
    mean |= speed_of(mean, rows[0]["batch_size"])
    print(f"\ntime by phase since this start, {mean['seconds']:.2f} s in all (mean over processes)")
    for phase in PHASES:
        share = mean[phase] / mean["seconds"]
        print(f"{phase:9} {mean[phase]:8.3f} {share:4.0%}  {'#' * round(50 * share)}")
    totals = [sum(row["comm_total"] for row in rows[rank::num_ranks]) for rank in range(num_ranks)]
    sending = min(totals)  # the process that comes last never waits in an all-reduce
    if num_ranks > 1 and sending > 0:
        late = totals.index(sending)
        hidden = f"{max(0.0, 1 - mean['comm'] / mean['comm_total']):.0%} of it hidden"
        if ON_GPU:  # forward and backward include what they wait for
            hidden = "how much is hidden is unknown, R is at most this"
        waiting = f"waiting {mean['comm_total'] - sending:.3f} s for rank {late}"
        print(f"communication {mean['comm_total']:.3f} s, {hidden}:")
        print(f"sending {sending:.3f} s, {waiting} on {rows[late]['host']}")
        # With nothing hidden, N processes are N R / (1 + R) times as fast as one: 0.75 N at R = 3.
        ratio = (mean["forward"] + mean["backward"] + mean["optimizer"]) / sending
        verdict = "above 3: more processes can pay off, each on its own GPU or cores"
        verdict = verdict if ratio > 3 else "below 3: more processes hardly pay off"
        print(f"R = compute / sending = {ratio:.1f}, {verdict}")
    names = ("script", "model", "dataset", "precision", "processes", "batch_size")
    cells = {name: str(rows[0].get(name, "-")) for name in names}
    floats = {name: value for name, value in rows[-1].items() if isinstance(value, float)}
    results = {name: value for name, value in floats.items() if name.startswith("val_")}
    results |= mean | {"peak_MB": max(row["peak_MB"] for row in rows)}
    cells |= {name: f"{value:.4g}" for name, value in results.items()}
    for line in (cells.keys(), ["---"] * len(cells), cells.values()):
        print("|", " | ".join(line), "|")


if __name__ == "__main__":
    main(parse_args())
