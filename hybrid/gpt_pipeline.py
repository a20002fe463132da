r"""Train a GPT whose blocks are split over the processes of a pipeline, in one pipeline or many.

    torchrun --standalone --nproc_per_node=2 -- hybrid/gpt_pipeline.py             # one pipeline
    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HEAD_NODE:29400 -- \
        hybrid/gpt_pipeline.py --num_stages 4 --num_microbatches 16    # on each of two nodes
    sbatch --nodes=2 --gpus-per-node=4 slurm/hybrid_gpt_pipeline.slurm --num_microbatches 16

The model need not fit on one GPU. A process first builds or loads the whole model in RAM, 4 bytes a
parameter, and moves its own layers to its GPU. Rank 0 keeps the others in RAM, with their moments
once it has saved (12 bytes a parameter), and draws --sample there. Snapshots have the format of
multinode/gpt.py.

For your own data and model, replace the first section, as in multinode/gpt.py, and in the second
section Stage, head_loss, SUMS and the shapes in create_schedule. If its first and last stage share
no `embedding`, change squared_norm, gather_stages and train_step, too. A stage must have no
buffers.
`diff multinode/gpt.py hybrid/gpt_pipeline.py` shows what stages add.
Shapes: B sequences of a batch or micro-batch, T tokens of one, D = d_model, H heads, V vocabulary.
"""

import argparse
import contextlib
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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.rendezvous import rendezvous
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


# ==================================== How the model is split. =====================================
#
#     with 6 processes and --num_stages 3:
#
#                   stage 0             stage 1             stage 2
#                   embedding, blocks   blocks              blocks, norm, embedding as head
#     pipeline 0    rank 0         <->  rank 1         <->  rank 2
#     pipeline 1    rank 3         <->  rank 4         <->  rank 5
#
# A pipeline passes its share of a batch through its stages in m micro-batches: activations to the
# right, their gradients to the left. An all-reduce adds the gradients of a stage over the pipelines
# (replica_group). The embedding is in the first and in the last stage: its gradients are also added
# over both ends of a pipeline (embedding_group).
#
#     gpipe, m = 4:   stage 0   f0 f1 f2 f3 .. .. .. .. b0 b1 b2 b3       f0: forward pass of
#                     stage 1   .. f0 f1 f2 f3 .. .. b0 b1 b2 b3 ..           micro-batch 0
#                     stage 2   .. .. f0 f1 f2 f3 b0 b1 b2 b3 .. ..       b0: its backward pass
#     1f1b, m = 4:    stage 0   f0 f1 f2 .. .. b0 f3 b1 .. b2 .. b3       ..: bubble
#                     stage 1   .. f0 f1 .. b0 f2 b1 f3 b2 .. b3 ..
#                     stage 2   .. .. f0 b0 f1 b1 f2 b2 f3 b3 .. ..
#
# Both have the same bubble. With S stages, and f and b seconds of a pass through a stage, it is
# (S - 1)(f + b) of (m + S - 1)(f + b) (Huang et al. 2019, "GPipe"). With gpipe, a stage holds the
# activations of m micro-batches, with 1f1b of at most S.


SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
SUMS = ("loss", "count")  # the names of batch_loss's sums. All stages but the last count 0
IGNORED = -100  # the targets of rows that only fill up a batch


class Stage(nn.Module):
    """Some blocks of a GPT, (B, T, D) to (B, T, D).

    The first stage takes token ids (B, T). The last one has the head and gives logits (B, T, V).
    """

    def __init__(self, model, number, args):
        super().__init__()
        self.dtype = DTYPES[args.precision]  # None: float32
        self.is_first = number == 0
        self.is_last = number == args.num_stages - 1
        if self.is_first or self.is_last:
            self.embedding = model.embedding
        if self.is_first:
            self.positions = model.positions
            self.dropout = model.dropout
        size = args.num_layers // args.num_stages
        self.blocks = model.blocks[number * size : (number + 1) * size]
        if self.is_last:
            self.norm = model.norm

    def forward(self, x):
        with torch.autocast(x.device.type, self.dtype, enabled=self.dtype is not None):
            if self.is_first:
                x = self.dropout(self.embedding(x) + self.positions.weight)
            elif torch.is_grad_enabled():
                x.requires_grad_()  # torch 2.11 fails to, if a resumed run begins by validating
            x = self.blocks(x)
            if self.is_last:
                x = F.linear(self.norm(x), self.embedding.weight)  # the head is the embedding
            return x


def head_loss(logits, targets):
    """Returns the mean loss of logits (B, T, V) and the next ids (B, T)."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def micro_batch_loss(logits, targets, loss_of_head, run, args):
    """Returns a micro-batch's part of the mean loss of a batch, so that gradients just add up."""
    if not torch.is_grad_enabled():  # a validation: drop the rows that fill up a batch
        is_real = targets[:, 0] != IGNORED
        logits = logits[is_real]
        targets = targets[is_real]
        if len(targets) == 0:
            return logits.sum()  # 0, and unused
    # batch_loss calls its model with its batch: here head_loss, with logits and targets.
    loss = compute_loss(run, loss_of_head, (logits, targets), run.pass_sums, args)
    if set(run.pass_sums) != set(SUMS):
        sys.exit(f"SUMS must name what batch_loss sums up: {', '.join(run.pass_sums)}")
    return loss / args.num_microbatches / run.num_pipelines


def create_groups(run, args):
    """Sets the groups of this pipeline, of this stage in all pipelines, and of the embedding.

    The last one is None for a process that holds neither the first stage nor the last one.
    """
    run.pipeline = run.rank // args.num_stages  # the number of this process's pipeline
    run.num_pipelines = run.world_size // args.num_stages
    timeout = timedelta(seconds=args.timeout)
    ranks = torch.arange(run.world_size).view(-1, args.num_stages)  # (pipelines, stages)
    run.pipeline_group, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout)
    run.replica_group, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout)
    run.embedding_group, _ = dist.new_subgroups_by_enumeration(ranks[:, [0, -1]].tolist(), timeout)


def create_schedule(run, args):
    """Returns the schedule, which passes a batch through the stages, and receives and sends."""
    size = args.batch_size // run.num_pipelines // args.num_microbatches  # B
    # What a stage receives and sends. Gradients come back for all but ids and logits.
    with torch.device("meta"):  # only types and shapes
        inputs = torch.empty(size, args.seq_len, args.d_model, requires_grad=True)
        outputs = torch.empty(size, args.seq_len, args.d_model, requires_grad=True)
        if run.stage.is_first:
            inputs = torch.empty(size, args.seq_len, dtype=torch.int64)
        if run.stage.is_last:
            outputs = torch.empty(size, args.seq_len, args.vocab_size, dtype=run.stage.dtype)
    pipeline_stage = PipelineStage(
        run.stage,
        run.rank % args.num_stages,
        args.num_stages,
        run.device,
        input_args=inputs,
        output_args=outputs,
        group=run.pipeline_group,
    )
    if args.compile:
        run.stage.compile()
    compiled_loss = torch.compile(head_loss) if args.compile else head_loss
    loss_function = partial(micro_batch_loss, loss_of_head=compiled_loss, run=run, args=args)
    run.watch.time_passes(pipeline_stage)
    loss_function = run.watch.timed_pass(loss_function, "forward")
    schedule = SCHEDULES[args.schedule]
    return schedule(pipeline_stage, args.num_microbatches, loss_function, scale_grads=False)


def pass_batch(run, schedule_pass, tokens, targets):
    """Passes a batch through the stages, by schedule.step or, to validate, schedule.eval.

    In the last stage, micro_batch_loss() adds the sums of the batch to run.pass_sums.
    """
    if run.stage.is_first:
        schedule_pass(tokens.contiguous(), return_outputs=False)  # torch 2.11 needs contiguous ids
    elif run.stage.is_last:
        schedule_pass(target=targets, return_outputs=False)
    else:
        schedule_pass(return_outputs=False)


def join_gradients(stage, device):
    """Returns one tensor with all gradients of the stage, so that one all-reduce adds them up.

    The gradients are views of it. optimizer.zero_grad() would drop them: zero the tensor instead.
    """
    trained = [parameter for parameter in stage.parameters() if parameter.requires_grad]
    sizes = [parameter.numel() for parameter in trained]
    gradients = torch.zeros(sum(sizes), device=device)
    for parameter, gradient in zip(trained, gradients.split(sizes)):
        parameter.grad = gradient.view_as(parameter)
    return gradients


def squared_norm(stage):
    """Returns the squared norm of the gradients. The embedding counts in the first stage only."""
    gradients = []
    for name, parameter in stage.named_parameters():
        if parameter.requires_grad and (stage.is_first or name != "embedding.weight"):
            gradients.append(parameter.grad)
    return nn.utils.get_total_norm(gradients) ** 2


def forget_other_stages(run):
    """Frees what the model and the optimizer hold of other stages. Rank 0 needs it, to save it."""
    own = set(run.stage.parameters())
    for group in run.optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter in own]
    for parameter in set(run.optimizer.state) - own:
        del run.optimizer.state[parameter]
    run.model = run.stage


def gather_stages(run, args):
    """Brings the stages of the first pipeline together in the model and optimizer of rank 0."""
    if 0 < run.rank < args.num_stages:
        for name, parameter in run.stage.named_parameters():
            if name != "embedding.weight":  # rank 0 has it, too
                state = run.optimizer.state.get(parameter, {})  # of a frozen one there is none
                parts = [parameter.detach(), state]
                parts = tree_map(lambda x: x.cpu() if hasattr(x, "cpu") else x, parts)
                dist.send_object_list(parts, dst=0)
    if run.rank > 0:
        return
    for number in range(1, args.num_stages):
        for name, parameter in Stage(run.model, number, args).named_parameters():
            if name != "embedding.weight":
                received = [None, None]
                dist.recv_object_list(received, src=number)
                parameter.data, state = received
                run.optimizer.state[parameter].update(state)


# ========================= The run: steps, rows, snapshots, processes. Keep. ======================
# torchrun or Slurm starts each process. main() has the loop over all steps.
# A look: about once a second, after the same step, all processes add up what they have counted, and
# ask each other whether to stop. A row: what was measured since the row before, and a validation.
# A request: what the loader makes a batch of: random seeds, and the indices of samples.

DTYPES = {"fp32": None, "tf32": None, "bf16": torch.bfloat16}
SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)  # each asks the run to save and stop
STOP_REQUESTS = []  # the signals that this process has received
STATES = ("model", "optimizer", "scaler")  # the parts of a run that a snapshot saves
MAY_CHANGE = (  # the flags of all scripts that a resumed run may change. Others shape weights.
    "epochs max_steps eval_every grad_accum_steps comm_hook compile num_workers timeout "
    "data_dir snapshot log sample reconstructions num_stages num_microbatches schedule"
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
    add("--learning_rate", type=float, default=1e-3, help="learning rate, highest of a schedule")
    add("--max_grad_norm", type=float, default=0.0, help="clip longer gradients; 0: do not clip")
    add("--precision", choices=DTYPES, default="tf32" if has_tf32 else "fp32", help="number type")
    add("--compile", action="store_true", help="use torch.compile, which slows the first steps")
    add("--num_workers", type=int, default=0, help="processes that load data, for each GPU")
    add("--num_stages", type=int, default=2, help="processes of a pipeline")
    add("--num_microbatches", type=int, default=4, help="micro-batches of a batch in a pipeline")
    add("--schedule", choices=SCHEDULES, default="1f1b", help="1f1b holds fewer activations")
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
    check_args(run, args)
    run.settings = settings_of(args)  # before a function of the task adds to args
    snapshot = read_snapshot(run, args)
    train_data, val_data = connect(run, args, init_method)  # sets run.device and run.store
    create_groups(run, args)
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
    set_seeds(run.device, args.seed)  # again: read_data may have drawn numbers
    run.model = create_model(args, train_data)  # on the CPU
    run.num_parameters = sum(parameter.numel() for parameter in run.model.parameters())
    resting = [part for part in run.model.modules() if not part.training]  # these stay so
    train_again(run.model, resting if run.model.training else [])
    run.stage = Stage(run.model, run.rank % args.num_stages, args).to(run.device)
    run.optimizer = create_optimizer(run.model, args)
    for group in run.optimizer.param_groups:
        group["initial_lr"] = float(group["lr"])  # train_step() scales it, as LambdaLR does
    run.scaler = torch.amp.GradScaler(enabled=False)  # snapshots of multinode/gpt.py have one
    if snapshot:
        restore(run, snapshot, args)
    if run.rank > 0:
        forget_other_stages(run)
    run.gradients = join_gradients(run.stage, run.device)
    run.watch = PipelineWatch(run.device)
    run.schedule = create_schedule(run, args)
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
    if not is_stopped and not args.snapshot:  # else it has gathered them to save them
        gather_stages(run, args)  # for finish()
    dist.barrier()  # a process that leaves early can make the others fail
    dist.destroy_process_group()
    if run.rank > 0:
        return
    print_summary(run.watch)
    if is_stopped:
        saved = args.snapshot or "nothing, as there is no --snapshot"
        print(f"stopped at step {run.step} of {run.num_steps}; saved {saved}")
        has_saved = args.snapshot and run.step > first_step  # else running it again would not help
        if "SLURM_STEP_NUM_TASKS" in os.environ:
            time.sleep(10)  # Slurm ends all when one fails: let the others end first
        sys.exit(os.EX_TEMPFAIL if has_saved else 128 + signal.SIGTERM)  # 75: run me again
    if "finish" in globals():
        set_seeds(run.device, args.seed)
        globals()["finish"](run.model.cpu().eval(), val_data, args, torch.device("cpu"))


def check_args(run, args):
    """Ends the run if the batch cannot be divided, or if a file could not be written."""
    stages = args.num_stages
    if stages < 2 or run.world_size % stages or args.num_layers % stages:
        sys.exit("--num_stages must be 2 or more, and divide the processes and --num_layers")
    if args.num_microbatches < (stages if args.schedule == "1f1b" else 1):
        sys.exit("--num_microbatches must be at least --num_stages, or 1 with --schedule gpipe")
    divisor = run.world_size // stages * args.num_microbatches
    if args.batch_size < 1 or args.batch_size % divisor:
        sys.exit(
            f"--batch_size must be a multiple of {run.world_size // stages} x --num_microbatches"
        )
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
    tokens, targets = to_device(next(batches), run.device)
    set_seeds(run.device, args.seed, run.rank, run.step)  # a resumed run draws the same
    run.watch.mark("data")
    if not run.stage.is_last:
        run.sums = dict.fromkeys(SUMS, 0.0)
    run.pass_sums = run.sums  # micro_batch_loss() adds to them
    pass_batch(run, run.schedule.step, tokens, targets)
    # The gradients of this stage are added up over the pipelines, while other stages work.
    reducing = dist.all_reduce(run.gradients, group=run.replica_group, async_op=True)
    run.watch.note_all_reduce(reducing, run.gradients.nbytes)
    run.watch.mark_bubble(run.pipeline_group)
    reducing.wait()
    # The first and the last stage each have a part of the embedding's gradient.
    if run.embedding_group and run.stage.embedding.weight.requires_grad:
        dist.all_reduce(run.stage.embedding.weight.grad, group=run.embedding_group)
    run.watch.mark("comm")
    if args.max_grad_norm > 0:
        norm = squared_norm(run.stage)
        dist.all_reduce(norm, group=run.pipeline_group)
        run.watch.mark("comm")
        nn.utils.clip_grads_with_norm_(run.stage.parameters(), args.max_grad_norm, norm.sqrt())
    run.optimizer.step()
    run.gradients.zero_()
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
    """Returns the sums of batch_loss over the data, of which each pipeline takes a share."""
    share = range(run.pipeline, len(data), run.num_pipelines)
    size = args.batch_size // run.num_pipelines  # as in training
    batches_of_indices = BatchSampler(share, size, drop_last=False)
    requests = (((args.seed,), indices) for indices in batches_of_indices)
    resting = [part for part in run.stage.modules() if not part.training]
    run.stage.eval()
    run.pass_sums = {} if run.stage.is_last else dict.fromkeys(SUMS, 0.0)
    for number, batch in enumerate(start_loader(data, requests, run, args)):
        expect_progress(args.timeout)
        set_seeds(run.device, args.seed, run.rank, number)  # the same in each validation
        tokens, targets = to_device(batch, run.device)
        missing = size - len(tokens)  # a pipeline takes batches of one size only
        tokens = F.pad(tokens, (0, 0, 0, missing))  # adds rows at the end
        targets = F.pad(targets, (0, 0, 0, missing), value=IGNORED)
        pass_batch(run, run.schedule.eval, tokens, targets)
        if all_stops(run.pipeline_group) > 0:  # pipelines can differ in the number of batches
            break
    train_again(run.stage, resting)
    return all_reduce_sums(run.pass_sums | {"/stops": len(STOP_REQUESTS)})


def training_requests(data, run, args):
    """Yields a request for each batch of this pipeline: seeds, and the indices of samples."""
    draw_order = globals().get("training_order", lambda *_: np.random.permutation(len(data)))
    order = None
    for step in range(run.step, run.num_steps):
        epoch, step_of_epoch = divmod(step, run.steps_per_epoch)
        if order is None or step_of_epoch == 0:
            set_seeds(run.device, args.seed, epoch)  # all processes draw the same order
            order = np.asarray(draw_order(data, args, epoch))
            if not run.steps_per_epoch * args.batch_size <= len(order) <= len(data):
                sys.exit(f"training_order must return {len(data)} indices, not {len(order)}")
            order = order[: run.steps_per_epoch * args.batch_size].reshape(-1, args.batch_size)
        indices = order[step_of_epoch, run.pipeline :: run.num_pipelines].tolist()
        yield (args.seed, step), indices  # all stages of a pipeline load the same samples


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
    """Saves in rank 0, while the other processes wait: ten times as long as --timeout says."""
    if not args.snapshot:
        return
    expect_progress(10 * args.timeout)
    parts = [parameter for parameter in run.stage.parameters() if parameter.requires_grad]
    num_bad = sum(int(not part.isfinite().all()) for part in parts)
    if all_reduce_sums({"bad": num_bad})["bad"] > 0:
        sys.exit(f"weights are not finite at step {run.step}; {args.snapshot} stays as it was")
    key = f"snapshot {run.step} {run.row_step}"  # a barrier would end after --timeout
    gather_stages(run, args)
    if run.rank == 0:
        write_snapshot(run, args)
        run.store.set(key, "is saved")
    wait_for(run, [key], 10 * args.timeout)
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
        "parameters": run.num_parameters,
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

# bubble: waiting for other stages, and for what they send
STEP_PHASES = ("data", "forward", "backward", "bubble", "comm", "optimizer")
COMPUTE = ("forward", "backward", "bubble", "optimizer")
PHASES = ("warmup", *STEP_PHASES, "eval", "save")
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


class PipelineWatch(Stopwatch):
    """Also times the passes of micro-batches, and the bubble between them."""

    def __init__(self, device):
        super().__init__(device)
        self.zero = torch.zeros(1, device=device)  # what mark_bubble() sends
        self.stream = contextlib.nullcontext()
        if self.has_events:
            self.stream = torch.Stream(device, priority=-1)

    def timed_pass(self, function, phase):
        """Returns the function with marks. Its time counts as the phase, that before as bubble."""

        def timed_function(*args, **kwargs):
            if not torch.is_grad_enabled():  # a validation is timed as a whole
                return function(*args, **kwargs)
            self.mark("bubble")
            output = function(*args, **kwargs)
            self.mark(phase)
            return output

        return timed_function

    def time_passes(self, pipeline_stage):
        """Times the two methods that the schedule calls for each micro-batch."""
        for phase in ("forward", "backward"):
            name = f"{phase}_one_chunk"
            setattr(pipeline_stage, name, self.timed_pass(getattr(pipeline_stage, name), phase))

    def mark_bubble(self, pipeline_group):
        """Waits for the other stages, so that this wait counts as bubble, not as comm.

        Unlike dist.barrier(), this all-reduce does not make the CPU wait for its GPU.
        """
        dist.all_reduce(self.zero, group=pipeline_group)
        self.mark("bubble")

    def note_all_reduce(self, work, size):
        """Notes the time from now to the end of an all-reduce of `size` bytes that has just begun.

        On a GPU a side stream waits for the end, so that the model's stream goes on.
        """
        start = self.now()

        def note_end(future):  # called when the all-reduce has ended
            if self.num_steps >= WARMUP_STEPS:
                self.spans.append(("all-reduce", start, self.now(), size))

        with self.stream:
            work.get_future().then(note_end)


def with_speed(times, batch_size):
    """Returns the times, with their sum, and with the speed of training after the warmup."""
    training = sum(times[phase] for phase in STEP_PHASES)
    speed = batch_size * times["steps"] / training if training else 0.0
    return times | {"seconds": sum(times[phase] for phase in PHASES), "samples/s": speed}


def print_summary(watch):
    """Prints where the time since the start has gone, and a row for results.md.

    R is the time of computing divided by that of sending. If nothing is hidden, N pipelines with
    this R are N R / (1 + R) times as fast as one: 0.75 N at R = 3. If different pipelines are late
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
    print_bubbles(watch)
    stages = last["num_stages"]
    totals = []  # the mean comm_total of each pipeline
    for first in range(0, len(watch.totals), stages):
        times_of = watch.totals[first : first + stages]
        totals.append(sum(times["comm_total"] for times in times_of) / stages)
    sending = min(totals)  # the pipeline that comes last never waits in an all-reduce
    if len(totals) > 1 and sending > 0:
        first = totals.index(sending) * stages
        # The slowest stage, for which the others wait, has the smallest bubble.
        late = min(range(first, first + stages), key=lambda rank: watch.totals[rank]["bubble"])
        hidden = max(0.0, 1 - mean["comm"] / mean["comm_total"])
        ratio = sum(mean[phase] for phase in COMPUTE) / sending
        waiting = f"waiting {mean['comm_total'] - sending:.3f} s for rank {late}"
        verdict = "above 3: more pipelines can pay off"
        if ratio <= 3:
            verdict = "below 3: more pipelines hardly pay off"
        print(f"communication {mean['comm_total']:.3f} s, {hidden:.0%} of it hidden:")
        print(f"sending {sending:.3f} s, {waiting} on {watch.rows[late]['host']}")
        print(f"R = compute / sending = {ratio:.1f}, {verdict}")
    names = ("script", "model", "dataset", "precision", "processes", "batch_size")
    cells = {name: str(last.get(name, "-")) for name in names}
    results = {name for name in last if name.startswith("val_")} - last["settings"].keys()
    cells |= {name: f"{last[name]:.4g}" for name in last if name in results}
    mean["peak_MB"] = max(row["peak_MB"] for row in watch.rows)  # of the process with the most
    cells |= {name: f"{value:.4g}" for name, value in mean.items()}
    for line in (cells.keys(), ["---"] * len(cells), cells.values()):
        print("|", " | ".join(line), "|")


def print_bubbles(watch):
    """Prints the mean bubble of each stage in a step, beside (S - 1)(f + b)."""
    num_stages = watch.rows[0]["num_stages"]
    num_microbatches = watch.rows[0]["num_microbatches"]
    theory = (num_stages - 1) / (num_microbatches + num_stages - 1)
    for number in range(num_stages):
        total = Counter()
        for times in watch.totals[number::num_stages]:
            total.update(times)
        steps = max(1, total["steps"])
        passes = total["forward"] + total["backward"]
        share = total["bubble"] / max(1e-9, total["bubble"] + passes)
        ideal = (num_stages - 1) * passes / num_microbatches / steps  # (S - 1)(f + b)
        measured = (
            f"stage {number}: bubble {1000 * total['bubble'] / steps:.1f} ms a step, {share:.0%}"
        )
        print(f"{measured}; (S - 1)(f + b) = {1000 * ideal:.1f} ms, {theory:.0%}")


if __name__ == "__main__":
    args = parse_args()
    join_launcher()
    start(int(os.environ["LOCAL_RANK"]), args, "env://")
