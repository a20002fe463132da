"""Train a GPT whose weights are divided over processes: FSDP, also known as ZeRO-3.

    torchrun --standalone --nproc_per_node=4 -- hybrid/gpt_fsdp.py --precision bf16 --snapshot gpt
    sbatch slurm/hybrid_gpt_fsdp.slurm --checkpoint_activations

The model need not fit on one GPU. With 4 processes and --shard_size 2, ranks 0 and 1 share a copy,
and 2 and 3 another: each holds half of each weight, of its gradient and of its optimizer state.
Before a block runs, an all-gather collects its weights. After its backward pass, a reduce-scatter
leaves each process its half of the gradients, which an all-reduce averages over the copies.

--snapshot is a folder, in which each process writes its shards. Resume only from your own: PyTorch
executes code in it. This makes a file of the shards, for --init_from and quantize/gpt.py:
    python -m torch.distributed.checkpoint.format_utils dcp_to_torch gpt/step-* gpt.pt
Read multinode/gpt.py first. For your own data and model, replace the first of the three sections.
The model must have `blocks`, and no buffers with persistent=False: rank 0 makes and sends the
state_dict, and what is not in it has no values. Each process needs a sequence to validate on.
Shapes: B sequences of a batch, T tokens of a sequence, D = d_model, H heads, V vocabulary.
"""

import argparse
import itertools
import json
import math
import os
import resource
import shutil
import signal
import sys
import sysconfig
import textwrap
import time
from collections import Counter
from contextlib import redirect_stdout
from functools import partial
from multiprocessing import active_children
from multiprocessing.util import Finalize
from pathlib import Path

SIGNALS = {signal.SIGTERM, signal.SIGUSR2, signal.SIGINT}  # each asks the run to save and stop
if __name__ == "__main__":  # Blocked until main() looks for them. Torch's threads inherit this.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from numpy.lib.stride_tricks import sliding_window_view
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_states
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, StackDataset, TensorDataset
from tqdm import tqdm

ON_GPU = torch.accelerator.is_available()  # a GPU of any maker

# == Yours: flags, data, model, loss. Replace it. ==================================================


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--dataset", default="stdlib", help="a text, a folder of tokens, or Python's own source")
    add("--vocab_size", type=int, default=256, help="number of token ids; bytes have 256")
    add("--d_model", type=int, default=128, help="width of the network")
    add("--n_heads", type=int, default=4, help="attention heads")
    add("--num_layers", type=int, default=4, help="transformer blocks")
    add("--seq_len", type=int, default=128, help="tokens of a sequence, which is one sample")
    add("--dropout", type=float, default=0.0, help="dropout probability in and before the blocks")
    add("--sample", type=int, metavar="N", default=0, help="tokens to print at the end")
    return parse_run_args(parser, epochs=1, batch_size=64, eval_every=100, max_grad_norm=1.0)


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
    tokens = torch.tensor(data[:1][0][:, :-1], device=device).long()  # (1, T)
    for _ in range(args.sample):
        logits = model(tokens[:, -args.seq_len :])[:, -1]  # (1, V)
        tokens = torch.cat((tokens, (logits / 0.8).softmax(1).multinomial(1)), 1)  # a temperature
    if args.sample:
        ids = tokens[0, args.seq_len :].tolist()
        print(bytes(ids).decode(errors="replace") if args.vocab_size <= 256 else ids)


# == The run: flags, steps, rows, snapshots. Keep it. It calls the functions above. ================

DTYPES = {"bf16": torch.bfloat16}  # of autocast and of gathered weights. Shards stay in fp32
SENT_TYPES = {"none": torch.float32, "bf16": torch.bfloat16}


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
    add("--shard_size", type=int, default=0, help="processes that share a copy; 0: all of them")
    add("--checkpoint_activations", action="store_true", help="to save memory, run blocks twice")
    add("--grad_accum_steps", type=int, default=1, help="micro-batches; whole gradients are kept")
    add("--comm_hook", choices=SENT_TYPES, default="none", help="type in which gradients are sent")
    add("--compile", action="store_true", help="use torch.compile, which slows the first steps")
    add("--num_workers", type=int, default=0, help="processes that load data, for each GPU")
    add("--snapshot", metavar="FOLDER", help="save at each row and when stopped; resume from it")
    add("--init_from", metavar="FILE", help="start from the weights of this snapshot")
    add("--log", metavar="FILE.jsonl", help="append a row for each process, for report.py")
    parser.set_defaults(**defaults)
    return parser.parse_args()


def set_up(args):
    """Meets the other processes. Returns rank, world_size, device, train_data, val_data."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_WORLD_SIZE")
    if "SLURM_STEP_NUM_TASKS" in os.environ and not dist.is_torchelastic_launched():  # by srun
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_NUM_NODES")
    if not {*names, "MASTER_ADDR"} <= {*os.environ}:
        sys.exit("start it with torchrun or by its job file: see the top of this script")
    rank, world_size, local_rank, num_nodes = [int(os.environ[name]) for name in names]
    num_gpus = torch.accelerator.device_count()
    if local_rank >= num_gpus > 0 and dist.is_torchelastic_launched():
        sys.exit(f"{num_gpus} GPU(s) are too few for the processes of this node")
    device = torch.device(local_rank % num_gpus if ON_GPU else "cpu")  # srun may show only one GPU
    if ON_GPU:
        torch.accelerator.set_device_index(device.index)  # this process's default from now on
    if num_nodes == 1:  # stay on this machine
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if rank == 0:  # Downloads what is missing. A copy of args: read_data() may add to it.
        read_data(argparse.Namespace(**vars(args)))
    backend = dist.get_default_backend_for_device(device)  # nccl for NVIDIA GPUs, gloo for CPUs
    # Without device_id: with it, a mesh would split this group, which not all backends can.
    dist.init_process_group(backend, rank=rank, world_size=world_size)  # waits for all
    if local_rank == 0 and rank > 0:  # where machines do not share a disk
        read_data(argparse.Namespace(**vars(args)))
    dist.barrier()
    torch.manual_seed(args.seed)  # the same random splits and weights in all processes
    train_data, val_data = read_data(args)
    divisor = world_size * args.grad_accum_steps
    if args.batch_size not in range(divisor, len(train_data) + 1, divisor):
        words = f"must be a multiple of {divisor}, at most {len(train_data)}"
        sys.exit(f"--batch_size {args.batch_size} {words}" if rank == 0 else 1)
    if args.snapshot and not os.access(Path(args.snapshot).absolute().parent, os.W_OK):
        sys.exit(f"cannot write {args.snapshot}: its folder is missing or read-only")
    return rank, world_size, device, train_data, val_data


def main(args):  # runs in each process
    Finalize(None, kill_workers, exitpriority=0)  # at the end, before Python waits for workers
    settings = dict(vars(args))  # without what read_data() adds, which may be anything
    rank, world_size, device, train_data, val_data = set_up(args)
    torch.set_float32_matmul_precision("high" if args.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = args.precision == "tf32"  # for NVIDIA's convolutions alone
    autocast = torch.autocast(device.type, DTYPES.get(args.precision), args.precision in DTYPES)
    steps_per_epoch = len(train_data) // args.batch_size  # an incomplete last batch is left out
    settings |= {"steps_per_epoch": steps_per_epoch, "num_samples": len(train_data)}
    num_steps = args.max_steps or args.epochs * steps_per_epoch
    folders = Path(args.snapshot or "/dev/null").glob("step-*/settings.json")  # /dev/null: none
    newest = [max((path.parent for path in folders), default=None)]
    dist.broadcast_object_list(newest)  # all take that of rank 0
    is_new = rank == 0 and not (newest[0] or args.init_from)
    weights = create_model(args, train_data).state_dict() if is_new else {}  # on the CPU
    with torch.device("meta"):  # which has no memory
        model = create_model(args, train_data).train()
    shard_size = args.shard_size or world_size
    if world_size % shard_size:
        sys.exit(f"--shard_size must divide {world_size} processes" if rank == 0 else 1)
    mesh_shape = (world_size // shard_size, shard_size)
    mesh = dist.init_device_mesh(device.type, mesh_shape, mesh_dim_names=("copies", "shards"))
    shard(model, mesh, args)
    model.to_empty(device=device)  # memory for its shards: the values come below
    optimizer = create_optimizer(model, args)
    done_steps = 0
    if newest[0]:
        old = json.loads((newest[0] / "settings.json").read_text())
        done_steps = int(newest[0].name.removeprefix("step-"))
        changed = {name: old.get(name) for name in settings if settings[name] != old.get(name)}
        settings["run"] = old["run"]
        if changed and rank == 0:
            print(f"{newest[0]} was saved with {changed}")
        if {"batch_size", "num_samples"} & changed.keys():  # they would move its place in the data
            sys.exit("to start anew, use --init_from and a new --snapshot" if rank == 0 else 1)
        states = dict(zip(("model", "optimizer"), dcp_states.get_state_dict(model, optimizer)))
        dcp.load(states, checkpoint_id=newest[0])  # in place
        dcp_states.set_optimizer_state_dict(model, optimizer, states["optimizer"])
    else:
        if args.init_from and rank == 0:
            weights = torch.load(args.init_from, "cpu", weights_only=True, mmap=True)["model"]
        options = dcp_states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        dcp_states.set_model_state_dict(model, weights, options=options)
    del weights
    own = [Path(__file__).read_text(), settings, len(val_data), done_steps]
    dist.all_gather_object(by_rank := [None] * world_size, own)
    if any(each != own for each in by_rank):
        sys.exit("ranks differ in code, flags, data or step of the snapshot" if rank == 0 else 1)
    settings.setdefault("run", f"{time.time_ns():x}")  # a name for the log: rank 0's counts

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
            model.set_requires_gradient_sync(is_last)  # else no averaging, as in no_sync()
            with autocast:
                loss, batch_sums = batch_loss(model, batch, args)
            add_batch(batch_sums, sums)
            mark("forward")
            (loss / args.grad_accum_steps).backward()
            mark("backward")
        is_warmup = step <= done_steps + 3  # the first ones are slower
        is_due = step == num_steps or step % (args.eval_every or steps_per_epoch) == 0  # a row
        is_look = is_due or is_warmup or step >= next_look
        if args.max_grad_norm or is_look:  # a row shows the norm; a limit of inf clips nothing
            norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
        optimizer.step()
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
            row["grad_norm"] = float(norm.full_tensor())  # that of the gradients of all shards
            row["drift"] = compare_weights(model, step, mesh["copies"].get_group())
            mark("eval")
            if args.snapshot:
                save(model, optimizer, Path(args.snapshot, f"step-{step:09}"), settings)
            mark("save")
            splits = {"train": totals}
            if not is_stopped:  # a stopped run may have no time for it
                splits["val"] = evaluate(model, val_data, device, autocast, args)
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
    if not is_stopped:  # all call the model, and draw the same. Rank 0 prints
        torch.manual_seed(args.seed)
        with redirect_stdout(sys.stdout if rank == 0 else None):
            finish(model.eval(), val_data, args, device)
    dist.destroy_process_group()
    if is_stopped and rank == 0:
        time.sleep(10 if "SLURM_STEP_NUM_TASKS" in os.environ else 0)  # at 75, srun kills the rest
        sys.exit(os.EX_TEMPFAIL if args.snapshot else 128 + signal.SIGTERM)  # 75: run me again


def shard(model, mesh, args):
    """Divides each block, and then all else, over the processes. Weights become DTensors."""
    policy = MixedPrecisionPolicy(DTYPES.get(args.precision), SENT_TYPES[args.comm_hook])
    for block in model.blocks:
        if args.compile:
            block.forward = torch.compile(block.forward)
        if args.checkpoint_activations:  # block.compile() would not compile what is in checkpoint()
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    if args.compile:  # the embedding, the head and the loss
        model.forward = torch.compile(model.forward)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    collectives = TimedCollectives()
    for part in (*model.blocks, model):
        part.set_custom_all_gather(collectives)
        part.set_custom_reduce_scatter(collectives)
        part.set_all_reduce_hook(collectives.note_end)


def save(model, optimizer, folder, settings):
    """Writes a folder, to which each process adds its shards, and removes those before it."""
    states = dict(zip(("model", "optimizer"), dcp_states.get_state_dict(model, optimizer)))
    dcp.save(states | {"settings": settings}, checkpoint_id=folder)  # quantize/gpt.py needs them
    if dist.get_rank() == 0:
        (folder / "settings.json").write_text(json.dumps(settings))  # now it is complete
        for old in {*folder.parent.glob("step-" + 9 * "[0-9]")} - {folder}:
            shutil.rmtree(old)


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
def compare_weights(model, step, copies):
    """Returns the worst weight's max |difference from the first copy| / max |value|."""
    drifts = []
    for weight in model.parameters():
        own = F.pad(weight.to_local().flatten().float(), (0, 1))  # a shard may be empty
        dist.broadcast(of_first := own.clone(), group=copies, group_src=0)
        drift = (own - of_first).abs().max() / of_first.abs().max().clamp(min=1e-30)
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
    share = range(dist.get_rank(), len(data), dist.get_world_size())
    size = args.batch_size // dist.get_world_size() // args.grad_accum_steps  # as in training
    # All take part in each all-gather: each needs as many batches, none of them empty.
    num_batches = math.ceil(len(data) // dist.get_world_size() / size)
    batches = [part.tolist() for part in np.array_split(share, num_batches)]
    model.eval()
    sums = Counter()
    for batch in create_loader(data, batches, args):
        batch = tree_map(lambda part: part.to(device, non_blocking=True), batch)
        with autocast:
            add_batch(batch_loss(model, batch, args)[1], sums)
    model.train()
    model.reshard()  # else what is in no block stays whole until a backward pass
    sent.clear()  # a validation is timed as a whole
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
sent = []  # (name, start, end, bytes) of all-gathers and reduce-scatters
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


all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # old name
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TimedCollectives:
    """Sends for FSDP, which calls allocate(), then __call__() and, at last, note_end()."""

    def allocate(self, size, *, dtype, device):
        self.start = now()  # FSDP allocates the output of a reduce-scatter right before it sends
        self.size = math.prod(size) * dtype.itemsize
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op=None, async_op=False):
        if op is not None:  # only a reduce-scatter has one
            reduce_scatter(output_tensor, input_tensor, op, group)
            return
        start = now()
        all_gather(output_tensor, input_tensor, group)
        sent.append(("all-gather", start, now(), input_tensor.nbytes))

    def note_end(self, gradients):  # FSDP calls it after the all-reduce over copies
        sent.append(("reduce-scatter", self.start, now(), self.size))


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
    phase, counted_until = "", -math.inf  # where collectives overlap, the time counts once
    for name, start, end, _ in spans:
        times[name] += end - start
        if name in PHASES:
            phase = name
        elif not ON_GPU:  # a CPU waits for it. A GPU's waiting stays in forward and backward
            times[phase] -= end - start
            times["comm"] += end - start
        if name in ("comm", "all-gather", "reduce-scatter"):
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
    main(parse_args())
