r"""Train a GPT whose parameters are split over processes: FSDP, also known as ZeRO-3.

    torchrun --standalone --nproc_per_node=2 -- hybrid/gpt_fsdp.py
    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HEAD_NODE:29400 -- \
        hybrid/gpt_fsdp.py --shard_size 4 --precision bf16 --snapshot gpt.pt  # on each of two nodes
    sbatch --nodes=2 --gpus-per-node=4 slurm/hybrid_gpt_fsdp.slurm --checkpoint_activations

The model need not fit on one GPU. Each process has samples of its own, as in DDP. With --precision
bf16, parameters are sent and used in bf16, and gradients are sent in fp32. The residual stream is
bf16, too; under multinode/gpt.py's autocast it is fp32. With --grad_accum_steps, each process also
holds whole gradients, 4 bytes a parameter. Snapshots have the format of multinode/gpt.py. Rank 0
needs 4 bytes of RAM a parameter while it starts, and 12 while it saves: 84 GB for 7 billion
parameters.

For your own data and model, replace the first section, as in multinode/gpt.py. The model must have
`blocks` and no BatchNorm, and its operations must run on the device "meta", where tensors take no
memory.
`diff multinode/gpt.py hybrid/gpt_fsdp.py` shows what sharding adds.
Shapes: B sequences of a batch, T tokens of a sequence, D = d_model, H heads, V vocabulary.
"""

import argparse
import faulthandler
import io
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
from datetime import timedelta
from functools import partial
from glob import glob
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, default_collate
from tqdm import tqdm

# ============================ Yours: flags, data, model, loss. Replace. ===========================

MAX_VAL = 2**18  # tokens to validate on, at most: to validate often must not take long


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
    if args.n_heads < 1 or args.d_model % args.n_heads:
        parser.error("--d_model must be a multiple of --n_heads")
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


# ==================================== How the model is split. =====================================
#
#     with 4 processes and --shard_size 2:
#
#              rows of each parameter, its gradient and its optimizer state
#              first half      second half
#     copy 0   rank 0          rank 1
#     copy 1   rank 2          rank 3
#
# For its pass, a block is made whole by an all-gather among the ranks of a copy. After its backward
# pass, a reduce-scatter leaves each of them its half of the gradients, and an all-reduce adds the
# same half of the other copies: rank 0 with 2, rank 1 with 3. Together they average over all
# processes, as DDP does. With --grad_accum_steps, each process adds up whole gradients, and sends
# their sum after the last micro-batch.


def shard_model(model, device, args):
    """Leaves this process a shard of each block and, in the end, of all that is in no block."""
    timeout = timedelta(seconds=args.timeout)  # init_device_mesh() makes such groups without it
    ranks = torch.arange(dist.get_world_size()).view(-1, args.shard_size)  # (copies, shards)
    copy_group, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout)
    shard_group, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout)
    mesh = DeviceMesh.from_group(
        [copy_group, shard_group],
        device.type,
        mesh=ranks,
        mesh_dim_names=("copy", "shard"),  # FSDP wants the copies in the first dimension
    )
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[args.precision],
        reduce_dtype=torch.float32,
    )
    for block in model.blocks:
        if args.compile:
            block.forward = torch.compile(block.forward)
        if args.checkpoint_activations:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    if args.compile:  # the head and the loss, too
        model.forward = torch.compile(model.forward)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def load_shards(run, snapshot, data, args):
    """Gives each process its shards of the snapshot or, if there is none, of new weights."""
    weights = {}
    if run.rank == 0:  # it builds the whole model on its CPU
        set_seeds(run.device, args.seed)
        whole = create_model(args, data)
        if snapshot:
            whole.load_state_dict(snapshot["model"])
        weights = whole.state_dict()
    options = dcp.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dcp.set_model_state_dict(run.model, weights, options=options)  # the other ranks receive
    for name, buffer in run.model.named_buffers():  # also those that no state dict holds
        if run.rank == 0:
            buffer.copy_(whole.get_buffer(name))
        dist.broadcast(buffer, src=0)
    if snapshot:  # each process reads the mapped file tensor by tensor, and keeps its shards
        parameters = [param for group in run.optimizer.param_groups for param in group["params"]]
        for number, moments in snapshot["optimizer"]["state"].items():
            mesh, placements = parameters[number].device_mesh, parameters[number].placements
            for name, tensor in moments.items():
                if tensor.dim() > 0:  # the number of steps is not split
                    tensor = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
                moments[name] = tensor.clone()  # on CPUs, it is a view of the file
        run.optimizer.load_state_dict(snapshot["optimizer"])
        vars(run).update(snapshot["progress"])
        snapshot.clear()  # else the file, once replaced, takes disk space until the end


def gather_shards(run):
    """Returns the states of the run, whole and on the CPU, in rank 0. All processes call it."""

    def gather(part):
        if isinstance(part, DTensor):
            part = part.full_tensor()  # one parameter at a time, in all processes together
        if not isinstance(part, torch.Tensor):
            return part
        return part.detach().cpu() if run.rank == 0 else None

    return {name: tree_map(gather, dict(getattr(run, name).state_dict())) for name in STATES}


# ========================= The run: steps, rows, snapshots, processes. Keep. ======================
# torchrun or Slurm starts each process. main() has the loop over all steps.
# A look: about once a second, after the same step, all processes add up what they have counted, and
# ask each other whether to stop. A row: what was measured since the row before, and a validation.
# A request: what the loader makes a batch of: random seeds, and the indices of samples.

DTYPES = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)  # each asks the run to save and stop
STOP_REQUESTS = []  # the signals that this process has received
STATES = ("model", "optimizer", "scaler")  # the parts of a run that a snapshot saves
MAY_CHANGE = (  # the flags of all scripts that a resumed run may change. Others shape weights.
    "epochs max_steps eval_every grad_accum_steps comm_hook compile num_workers timeout "
    "data_dir snapshot log sample reconstructions shard_size checkpoint_activations"
).split()


def parse_run_args(parser, **defaults):
    """Adds the flags of the run to those of the task, and parses them all."""
    num_gpus = torch.accelerator.device_count()
    # AMD's TF32 is as inexact as bf16, so it is not the default there.
    has_tf32 = num_gpus > 0 and torch.version.cuda is not None
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
    add("--num_workers", type=int, default=0, help="processes that load data, for each GPU")
    add("--shard_size", type=int, default=0, help="processes that share a copy; 0: all of them")
    add("--checkpoint_activations", action="store_true", help="recompute blocks, to save memory")
    add("--seed", type=int, default=1, help="seed of weights, data order and dropout")
    add("--snapshot", metavar="FILE", help="save at each row and when stopped; resume if it exists")
    add("--log", metavar="FILE.jsonl", help="append a row for each process, for report.py")
    add("--timeout", type=int, default=600, help="seconds that a step may take, or compiling")
    parser.set_defaults(**defaults)
    return parser.parse_args()


def join_launcher():
    """Finds this process's place among the others, as torchrun or Slurm has set it."""
    if "SLURM_STEP_NUM_TASKS" in os.environ:  # started by srun, which has other names for these
        os.environ.setdefault("RANK", os.environ["SLURM_PROCID"])
        os.environ.setdefault("WORLD_SIZE", os.environ["SLURM_STEP_NUM_TASKS"])
        os.environ.setdefault("LOCAL_RANK", os.environ["SLURM_LOCALID"])
        os.environ.setdefault("GROUP_WORLD_SIZE", os.environ["SLURM_STEP_NUM_NODES"])
    needed = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    if not needed <= os.environ.keys():
        command = "torchrun --nproc_per_node=PROCESSES -- " + " ".join(sys.argv)
        sys.exit(f"start it by its job file, or with {command}")
    num_nodes = int(os.environ["GROUP_WORLD_SIZE"])
    if num_nodes == 1:  # nothing leaves this machine
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    num_gpus = torch.accelerator.device_count()
    if os.environ["RANK"] == "0" and int(os.environ["WORLD_SIZE"]) < num_nodes * num_gpus:
        print(f"{os.environ['WORLD_SIZE']} processes do not use all {num_gpus} GPUs of a node")


def start(local_rank, args, init_method):
    """Runs main(). If it ends with a message in all processes, one of them prints it."""
    try:
        main(local_rank, args, init_method)
    except SystemExit as end:
        if isinstance(end.code, str):
            for signum in SIGNALS:  # the launcher may end a process that waits here
                signal.signal(signum, signal.SIG_DFL)
            rank = int(os.environ["RANK"])
            time.sleep(1 + 10 * min(rank, 6))  # rank 0 speaks first; then the launcher ends all
            where = f"rank {rank} on {os.uname().nodename}: " if rank > 0 else ""
            sys.exit(where + end.code)
        raise


def main(local_rank, args, init_method):
    """Trains in one process. Every process runs it; rank 0 also prints and saves."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process without a traceback
    run = SimpleNamespace()  # what these functions share
    run.local_rank = local_rank  # on this node
    run.rank = int(os.environ.setdefault("RANK", str(local_rank)))
    run.world_size = int(os.environ["WORLD_SIZE"])
    run.start = f"{time.time_ns():x}"  # names this start
    run.id = run.start  # that of rank 0 is in the log. A resumed run keeps it.
    run.writer = None  # the start that wrote the snapshot from which this one resumes
    run.step = 0  # steps that are done
    run.row_step = 0  # the step of the last row
    run.sums = {}  # of batch_loss since the last look: of this process, on its device
    run.totals = {}  # those since the last row, over all processes
    args.shard_size = args.shard_size or run.world_size
    check_args(run, args)
    run.settings = settings_of(args)  # before a function of the task adds to args
    snapshot = read_snapshot(run, args)
    train_data, val_data = connect(run, args, init_method)  # sets run.device and run.store
    run.num_samples = len(train_data)
    if snapshot and snapshot["progress"]["num_samples"] != run.num_samples:
        sys.exit(f"cannot resume from {args.snapshot}: since then the training data has changed")
    run.steps_per_epoch = run.num_samples // args.batch_size  # an incomplete last batch is left out
    run.num_steps = args.max_steps or args.epochs * run.steps_per_epoch
    if run.steps_per_epoch < 1 or len(val_data) < run.world_size:
        sys.exit(f"{len(train_data)} and {len(val_data)} samples are too few: see --batch_size")

    torch.set_float32_matmul_precision("high" if args.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = args.precision == "tf32"
    torch.backends.cudnn.benchmark = torch.version.hip is None  # AMD's search takes too long
    with torch.device("meta"):  # only shapes, until load_shards() fills the shards
        run.model = create_model(args, train_data)
    shard_model(run.model, run.device, args)
    run.model.to_empty(device=run.device)
    resting = [part for part in run.model.modules() if not part.training]  # these stay so
    train_again(run.model, resting if run.model.training else [])
    run.optimizer = create_optimizer(run.model, args)
    for group in run.optimizer.param_groups:
        group["initial_lr"] = float(group["lr"])  # train_step() scales it, as LambdaLR does
    run.scaler = torch.amp.GradScaler(enabled=False)  # snapshots of multinode/gpt.py have one
    try:
        load_shards(run, snapshot, train_data, args)
    except Exception as error:  # a damaged or foreign file can fail anywhere
        if not snapshot:
            raise
        sys.exit(f"cannot resume from {args.snapshot}: {error}")
    run.watch = ShardWatch(run)
    if all_reduce_sums({"step": run.step})["step"] != run.step * run.world_size:
        sys.exit(f"the nodes have different files {args.snapshot}: use a shared file system")
    if run.rank == 0:
        print(f"processes {run.world_size}, device {run.device},", end=" ")
        print(f"steps {run.step} to {run.num_steps}", flush=True)

    batches = start_loader(train_data, training_requests(train_data, run, args), run, args)
    hides_bar = run.rank > 0 or not sys.stderr.isatty()
    bar = tqdm(total=run.num_steps, initial=run.step, disable=hides_bar, leave=False)
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
            if run.rank == 0 and bar.disable and time.perf_counter() > next_line:
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
    if not is_stopped and "finish" in globals():
        if run.rank > 0:
            sys.stdout = io.StringIO()  # all run it, each with its shards; rank 0 alone prints
        set_seeds(run.device, args.seed)  # all draw the same
        globals()["finish"](run.model.eval(), val_data, args, run.device)
    dist.barrier()  # a process that leaves early can make the others fail
    dist.destroy_process_group()
    if run.rank > 0:
        return
    if is_stopped:
        saved = args.snapshot or "nothing, as there is no --snapshot"
        print(f"stopped at step {run.step} of {run.num_steps}; saved {saved}")
        has_saved = args.snapshot and run.step > first_step  # else running it again would not help
        if "SLURM_STEP_NUM_TASKS" in os.environ:
            time.sleep(10)  # Slurm ends all when one fails: let the others end first
        sys.exit(os.EX_TEMPFAIL if has_saved else 128 + signal.SIGTERM)  # 75: run me again


def check_args(run, args):
    """Ends the run if the batch cannot be divided, or if a file could not be written."""
    if args.shard_size < 1 or run.world_size % args.shard_size:
        sys.exit(f"--shard_size must divide the number of processes, {run.world_size}")
    divisor = run.world_size * args.grad_accum_steps
    if min(divisor, args.batch_size) < 1 or args.batch_size % divisor:
        sys.exit(f"--batch_size must be a multiple of {run.world_size} x --grad_accum_steps")
    for path in filter(None, (args.snapshot, args.log)):
        if os.path.isdir(path) or not os.access(os.path.join(os.path.dirname(path), "."), os.W_OK):
            sys.exit(f"cannot write {path}: it is a folder, or its folder is missing or read-only")


def connect(run, args, init_method):
    """Connects this process with the others, and returns the data.

    Rank 0 prepares the data first, then one process of each other node. Reading may take long.
    """
    run.device = torch.device("cpu")
    backend = "gloo"
    bound = {}
    if torch.accelerator.is_available():
        num_devices = torch.accelerator.device_count()
        num_processes = math.ceil(run.world_size / int(os.environ["GROUP_WORLD_SIZE"]))
        # Slurm can show each process a GPU of its own. torchrun shows the same to all.
        has_own = num_devices == 1 and not dist.is_torchelastic_launched()
        if num_processes > num_devices and not has_own:
            sys.exit(f"{num_devices} GPU(s) are too few for the processes of this node")
        run.device = torch.device(run.local_rank % num_devices)
        torch.accelerator.set_device_index(run.device.index)
        backend = dist.get_default_backend_for_device(run.device)
        bound = {"device_id": run.device} if backend == "nccl" else {}
        backend = f"cpu:gloo,{run.device.type}:{backend}"
    timeout = timedelta(seconds=args.timeout)
    run.store, *_ = next(rendezvous(init_method, run.rank, run.world_size, timeout=timeout))
    if run.rank > 0:
        first = run.rank - run.local_rank if run.local_rank > 0 else 0
        wait_for(run, [f"data of {first}"])
    set_seeds(run.device, args.seed)  # a random split is the same in all processes
    start_time = time.monotonic()
    data = read_data(args)
    run.store.set(f"data of {run.rank}", "is read")
    limit = 10 * (args.timeout + time.monotonic() - start_time)  # others may be slower
    wait_for(run, [f"data of {rank}" for rank in range(run.world_size)], limit)
    group = {"store": run.store, "rank": run.rank, "world_size": run.world_size, "timeout": timeout}
    expect_progress(args.timeout)
    try:
        dist.init_process_group(backend, **group, **bound)
    except RuntimeError as error:
        hint = "do GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network's interface?"
        sys.exit(f"cannot connect: {error}\n{hint} NCCL_DEBUG=INFO tells more")
    expect_progress(0)  # creating the model may take long
    return data


def wait_for(run, keys, seconds=86_400):
    """Waits until other processes have set the keys, for a day if nothing else is said."""
    try:
        run.store.wait(keys, timedelta(seconds=seconds))
    except dist.DistNetworkError:  # rank 0 has ended, and has said why
        sys.exit(1)
    except RuntimeError:  # each kind of store has its own
        sys.exit(f"waited {seconds:.0f} s in vain for another process to read its data, or to save")


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
    """Adds up the sums of all processes. Ends the run if the loss is not finite.

    Returns whether any process was asked to stop, and the steps per second. Waits for the GPU.
    """
    expect_progress(args.timeout)
    sums = {name: float(value) for name, value in run.sums.items()}  # waits for the GPU
    speed = (run.step - look_step) / (time.perf_counter() - look_time)
    # The slash keeps these names apart from those of batch_loss.
    news = {"/stops": len(STOP_REQUESTS), "/speed": speed}
    news = all_reduce_sums(news | sums)
    for name in run.sums:
        run.totals[name] = run.totals.get(name, 0.0) + news[name]
    run.sums = {}
    run.watch.mark("comm")
    run.watch.flush()
    if not math.isfinite(run.totals["loss"]):
        sys.exit(f"the loss is not finite at step {run.step}")
    return news["/stops"] > 0, news["/speed"] / run.world_size


def train_step(run, batches, args):
    """Takes one step of the optimizer, over all micro-batches of a batch."""
    factor_of = globals().get("learning_rate_factor", lambda args, done: 1.0)
    factor = factor_of(args, (run.step + 1) / run.num_steps)
    for group in run.optimizer.param_groups:
        group["lr"] = float(group["initial_lr"] * factor)
    for micro_step in range(args.grad_accum_steps):
        batch = to_device(next(batches), run.device)
        set_seeds(run.device, args.seed, run.rank, run.step, micro_step)  # the same after a resume
        run.watch.mark("data")
        is_last = micro_step == args.grad_accum_steps - 1
        run.model.set_requires_gradient_sync(is_last)  # False: no reduce-scatter, as in no_sync()
        loss = compute_loss(run, run.model, batch, run.sums, args)
        run.watch.mark("forward")
        run.scaler.scale(loss / args.grad_accum_steps).backward()
        run.watch.mark("backward")
    if args.max_grad_norm > 0:
        gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor()  # an all-reduce: the norm of the gradients of all shards
        run.watch.mark("comm")
        nn.utils.clip_grads_with_norm_(run.model.parameters(), args.max_grad_norm, norm)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad()
    run.watch.mark("optimizer")


def set_seeds(*numbers):
    """Seeds the random numbers of Python, NumPy and PyTorch."""
    seed = hash(numbers) % 2**32  # Python hashes numbers alike in all processes, unlike strings
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes longer
    if ON_GPU and not torch.utils.data.get_worker_info():
        torch.get_device_module().manual_seed(seed)


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


def all_reduce_sums(sums):
    """Returns the sums over all processes, as numbers. Waits for the GPU."""
    names = sorted(sums)
    totals = torch.tensor([float(sums[name]) for name in names], dtype=torch.float64)
    dist.all_reduce(totals)
    totals = dict(zip(names, totals.tolist()))
    return {name: totals[name] for name in sums}


def all_stops(group=None):
    """Returns the stop requests of a group, so that all of it stops after the same batch."""
    stops = torch.tensor(len(STOP_REQUESTS))
    dist.all_reduce(stops, group=group)
    return stops.item()


def train_again(model, resting):
    """Calls model.train(), but leaves in eval() the parts that rest, such as frozen ones."""
    model.train()
    for part in resting:
        part.training = False


@torch.no_grad()
def evaluate(run, data, args):
    """Returns the sums of batch_loss over the data, of which each process takes a share."""
    share = np.arange(run.rank, len(data), run.world_size)
    size = args.batch_size // run.world_size // args.grad_accum_steps  # as in training
    # All processes need the same number of batches, none empty: all take part in each all-gather.
    num_batches = min(math.ceil(len(data) / run.world_size / size), len(data) // run.world_size)
    batches_of_indices = [part.tolist() for part in np.array_split(share, num_batches)]
    requests = (((args.seed,), indices) for indices in batches_of_indices)
    resting = [part for part in run.model.modules() if not part.training]
    run.model.eval()
    sums = {}
    for number, batch in enumerate(start_loader(data, requests, run, args)):
        expect_progress(args.timeout)
        set_seeds(run.device, args.seed, run.rank, number)  # the same in each validation
        compute_loss(run, run.model, to_device(batch, run.device), sums, args)
        if all_stops() > 0:
            break
    sums["/stops"] = len(STOP_REQUESTS)
    run.model.reshard()  # else what is in no block stays whole, until a backward pass
    train_again(run.model, resting)
    return all_reduce_sums(sums)


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


def to_device(part, device):
    """Returns a part of a batch on the device. What has no .to stays as it is."""
    if isinstance(part, torch.Tensor):
        return part.to(device, non_blocking=True)
    return part.to(device) if hasattr(part, "to") else part


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


def save_snapshot(run, args):
    """Saves in rank 0, while the other processes wait: ten times as long as --timeout says."""
    if not args.snapshot:
        return
    expect_progress(10 * args.timeout)
    parts = [p.to_local() for p in run.model.parameters() if p.requires_grad]
    num_bad = sum(int(not part.isfinite().all()) for part in parts)
    if all_reduce_sums({"bad": num_bad})["bad"] > 0:
        sys.exit(f"weights are not finite at step {run.step}; {args.snapshot} stays as it was")
    key = f"snapshot {run.step} {run.row_step}"  # a barrier would end after --timeout
    snapshot = gather_shards(run)
    if run.rank == 0:
        write_snapshot(run, snapshot, args)
        run.store.set(key, "is saved")
    wait_for(run, [key], 10 * args.timeout)
    run.watch.mark("save")
    expect_progress(args.timeout)


def write_snapshot(run, snapshot, args):
    """Writes a temporary file and renames it, so that no snapshot is half written."""
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
    """Prints the means since the last row, and appends a row for each process to --log."""
    device_module = torch.get_device_module(run.device)
    plain = (int, float, str, type(None))
    row = {name: v if isinstance(v, plain) else str(v) for name, v in vars(args).items()} | {
        "script": "/".join(Path(__file__).resolve().parts[-2:]),
        "settings": run.settings,
        "processes": run.world_size,
        "nodes": int(os.environ["GROUP_WORLD_SIZE"]),
        "rank": run.rank,
        "host": os.uname().nodename,
        "device": getattr(device_module, "get_device_name", run.device.type.upper)(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        "step": run.step,
        "steps_per_epoch": run.steps_per_epoch,
    }
    means = {}
    for split, totals in (("train", run.totals), ("val", val_totals)):
        count = totals.pop("count", 0)  # 0: not validated, or no sample had a label
        means |= {f"{split}_{name}": total / count for name, total in totals.items() if count}
    row |= means
    row |= run.watch.take_times(args.batch_size)
    rows = [None] * run.world_size if run.rank == 0 else None
    dist.gather_object(row, rows)
    if run.rank > 0:
        return
    run.watch.add_rows(rows)
    words = [f"step {run.step}", *(f"{name} {mean:.4g}" for name, mean in means.items())]
    words += [f"{name} {row[name]:.5g}" for name in ("seconds", "samples/s") if name in row]
    tqdm.write(textwrap.fill("  ".join(words), 100))
    if args.log:
        with open(args.log, "a") as file:
            for process_row in rows:
                process_row["run"] = run.id  # that of rank 0
                file.write(json.dumps(process_row, default=str) + "\n")


# == Where the time goes. To remove it, delete up to the main guard, and each line with watch. =====

STEP_PHASES = ("data", "forward", "backward", "comm", "optimizer")
PHASES = ("warmup", *STEP_PHASES, "eval", "save")  # warmup: the first three steps
TIMES = (*PHASES, "comm_total", "steps")
WARMUP_STEPS = 3  # these first steps allocate memory, search for kernels, compile


class Stopwatch:
    """Times the phases of training, and the all-reduces, also those during the backward pass.

    A moment is a time in seconds or, on a GPU, an event. Only flush() waits for the GPU.
    """

    def __init__(self, device):
        self.device = device
        self.has_events = device.type not in ("cpu", "mps")
        self.num_steps = 0  # since the start
        self.times = dict.fromkeys(TIMES, 0.0)  # seconds, and the number of steps after warmup
        self.marks = [("start", self.now())]  # (phase, the moment at which it ended)
        self.rows = []  # the last row of each process, in rank 0 alone
        self.totals = []  # the summed times of each process, in rank 0 alone
        self.spans = []  # (name, start, end, bytes) of all-reduces since the last flush
        self.last_step = []  # (name, start, end, bytes) of phases and all-reduces

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
        _, now = self.marks[-1]  # time 0: all processes have just left the same all-reduce
        marks = [(phase, -self.between(moment, now)) for phase, moment in self.marks]
        phases = [(phase, start, end, 0) for (_, start), (phase, end) in itertools.pairwise(marks)]
        all_reduces = []  # as phases: (name, start, end, bytes), in seconds after now: negative
        for name, start, end, size in self.spans:
            all_reduces.append((name, -self.between(start, now), -self.between(end, now), size))
        for phase, start, end, _ in phases:
            self.times[phase] += end - start
        sending = all_reduces + [phase for phase in phases if phase[0] == "comm"]
        counted_until = -math.inf  # where all-reduces overlap, the time counts once
        for _, start, end, _ in sorted(sending, key=lambda event: event[1]):
            self.times["comm_total"] += max(0.0, end - max(start, counted_until))
            counted_until = max(counted_until, end)
        step_ends = [end for phase, _, end, _ in phases if phase == "optimizer"]
        self.times["steps"] += len(step_ends)
        if step_ends:
            first, last = [-math.inf, *step_ends][-2:]  # the ends of the last two steps
            self.last_step = [event for event in phases + all_reduces if first <= event[1] < last]
        del self.marks[:-1]
        self.spans.clear()

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

    def add_rows(self, rows):
        """Keeps what the summary needs: a row of each process, and the sums of their times."""
        self.rows = rows
        self.totals = self.totals or [Counter() for _ in rows]
        for row, total in zip(rows, self.totals):
            total.update({name: row[name] for name in TIMES})


class ShardWatch(Stopwatch):
    """Also times the collectives of FSDP, and counts the bytes of the shards.

    On a CPU a pass waits for each collective. This time counts as comm, not as the pass: all of it
    is exposed. On a GPU a pass goes on meanwhile, and the time of collectives counts as comm_total
    alone. Where a pass waits for them in its stream, that counts as forward or backward. So the
    share that is hidden is not known. Copies into the buffers that are sent are not timed.
    """

    def __init__(self, run):
        super().__init__(run.device)
        self.optimizer = run.optimizer
        self.recent = []  # (name, start, end, bytes) of each collective since the last mark
        for module in (*run.model.blocks, run.model):
            timed_reduce_scatter = ReduceScatter(self)
            module.set_custom_all_gather(AllGather(self))
            module.set_custom_reduce_scatter(timed_reduce_scatter)
            module.set_all_reduce_hook(timed_reduce_scatter.note_end)

    def mark(self, phase):
        """Also counts the collectives of the pass that ends here."""
        if phase in ("forward", "backward") and self.num_steps >= WARMUP_STEPS:
            self.spans += self.recent
            if not self.has_events:
                for _, start, end, _ in self.recent:
                    self.marks += [(phase, start), ("comm", end)]  # the pass goes on until `start`
        self.recent.clear()
        super().mark(phase)

    def take_times(self, batch_size):
        """Also returns the size of the shards of parameters, gradients and optimizer state."""
        row = super().take_times(batch_size)
        size = 0
        for parameter, state in self.optimizer.state.items():
            size += 2 * parameter.to_local().nbytes  # its gradient is as large
            for tensor in state.values():
                if tensor.dim() > 0:  # the number of steps is no shard
                    size += tensor.to_local().nbytes
        return row | {"state_MB": size / 1e6}


# Newer versions of torch deprecate the old names of these two.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class AllGather:
    """Brings the shards of a block together. FSDP calls allocate() and then the object itself."""

    def __init__(self, watch):
        self.watch = watch

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        start = self.watch.now()
        all_gather(output_tensor, input_tensor, group)
        self.watch.recent.append(("all-gather", start, self.watch.now(), input_tensor.nbytes))


class ReduceScatter:
    """Adds up the gradients of a block, and times this together with their all-reduce.

    FSDP calls allocate() for the input, allocate() for the output, the object itself, and after the
    all-reduce note_end(). With --shard_size 1 it leaves out the object itself.
    """

    def __init__(self, watch):
        self.watch = watch

    def allocate(self, size, *, dtype, device):
        self.start = self.watch.now()  # the second call, before FSDP sends, overwrites the first
        self.size = math.prod(size) * dtype.itemsize
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        reduce_scatter(output_tensor, input_tensor, op, group)

    def note_end(self, gradients):
        self.watch.recent.append(("reduce-scatter", self.start, self.watch.now(), self.size))


def with_speed(times, batch_size):
    """Returns the times, with their sum, and with the speed of training after the warmup."""
    training = sum(times[phase] for phase in STEP_PHASES)
    speed = batch_size * times["steps"] / training if training else 0.0
    return times | {"seconds": sum(times[phase] for phase in PHASES), "samples/s": speed}


def print_summary(watch):
    """Prints where the time since the start has gone, and a row for results.md.

    R is the time of computing divided by that of sending. If nothing is hidden, N processes with
    this R are N R / (1 + R) times as fast as one: 0.75 N at R = 3. If different processes are late
    in turn, part of the waiting counts as sending.
    """
    if not watch.rows:
        return
    last = watch.rows[0]
    mean = {name: sum(total[name] for total in watch.totals) / len(watch.rows) for name in TIMES}
    mean = with_speed(mean, last["batch_size"])
    print(f"\ntime by phase, {mean['seconds']:.2f} s in all (mean over processes)")
    for phase in PHASES:
        share = mean[phase] / mean["seconds"]
        print(f"{phase:9} {mean[phase]:8.3f} {share:4.0%}  {'#' * round(50 * share)}")
    totals = [total["comm_total"] for total in watch.totals]
    sending = min(totals)  # the process that comes last never waits in an all-reduce
    if len(totals) > 1 and sending > 0:
        late = totals.index(sending)
        hidden = f"{max(0.0, 1 - mean['comm'] / mean['comm_total']):.0%} of it hidden"
        if last["device"] != "CPU":  # passes include the communication that they wait for
            hidden = "how much is hidden is unknown, R is at most this"
        ratio = (mean["forward"] + mean["backward"] + mean["optimizer"]) / sending
        waiting = f"waiting {mean['comm_total'] - sending:.3f} s for rank {late}"
        verdict = "below 3: more processes hardly pay off"
        if ratio > 3:
            verdict = "above 3: more processes can pay off, each on its own GPU or cores"
        print(f"communication {mean['comm_total']:.3f} s, {hidden}:")
        print(f"sending {sending:.3f} s, {waiting} on {watch.rows[late]['host']}")
        print(f"R = compute / sending = {ratio:.1f}, {verdict}")
    theory = 16e-6 * last["parameters"] / last["shard_size"]
    size = max(row["state_MB"] for row in watch.rows)  # of the largest shards
    print(f"parameters, gradients and optimizer state {size:.1f} MB, in theory {theory:.1f} MB")
    names = ("script", "model", "dataset", "precision", "processes", "batch_size")
    cells = {name: str(last.get(name, "-")) for name in names}
    results = {name for name in last if name.startswith("val_")} - last["settings"].keys()
    cells |= {name: f"{last[name]:.4g}" for name in last if name in results}
    mean["peak_MB"] = max(row["peak_MB"] for row in watch.rows)  # of the process with the most
    cells |= {name: f"{value:.4g}" for name, value in mean.items()}
    for line in (cells.keys(), ["---"] * len(cells), cells.values()):
        print("|", " | ".join(line), "|")


if __name__ == "__main__":
    args = parse_args()
    join_launcher()
    start(int(os.environ["LOCAL_RANK"]), args, "env://")
