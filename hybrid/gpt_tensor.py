"""Train a GPT whose layers are split over processes: tensor parallelism.

    torchrun --standalone --nproc_per_node=4 -- hybrid/gpt_tensor.py --tensor_size 2  # two groups
    sbatch slurm/hybrid_gpt_tensor.slurm --tensor_size 8

    group 0              rank 0                     rank 1
    group 1              rank 2                     rank 3
    attention            heads 0 to H/2 - 1         heads H/2 to H - 1
    MLP                  features 0 to 2 D - 1      features 2 D to 4 D - 1
    all else             whole                      whole

A group reads the same samples, and each of its ranks holds a part of the layers. The layers qkv and
up make some of their outputs from all inputs. The layers projection and down take these outputs,
and make a part of a sum. An all-reduce adds up the parts. In the backward pass, another one adds up
the gradients of the inputs. So a block needs four all-reduces of (B, T, D), and its GPUs wait for
each: a group belongs on one machine. The ranks of a column hold the same part, and DDP averages its
gradients. This is how Megatron-LM splits a model (Shoeybi et al. 2019).

The snapshot has the form of multinode/gpt.py's, so that either script can resume it on any number
of processes. At the start, each process makes the whole model in RAM, and moves its part to its
GPU. Rank 0 collects whole weights in RAM to save them. Read mnist_tensor.py and multinode/gpt.py
first. For your own model, replace the first section, and name in SPLITS the linear layers of its
`blocks` that are split. Dropout must be on whole tensors, where all processes of a group draw the
same.
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
from contextlib import redirect_stdout
from multiprocessing import active_children
from multiprocessing.util import Finalize
from pathlib import Path

# Slurm or Ctrl-C sends one of these signals: the run saves and stops. torchrun passes on all but
# SIGUSR2. They are blocked, so that none interrupts a save or an all-reduce. A blocked signal stays
# pending until main() looks for it. Threads and workers inherit the block when they start, so it
# comes before the import of torch.
SIGNALS = {signal.SIGTERM, signal.SIGUSR2, signal.SIGINT}
if __name__ == "__main__":  # not where this file is imported
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.lib.stride_tricks import sliding_window_view
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
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


# == How the model is split ========================================================================

# The linear layers of each block that are split: a dimension of the weight, and how many matrices
# it holds. Dimension 0 is that of the outputs, and 1 that of the inputs. The weight of qkv holds
# those of q, k and v, and each of the three is cut. These layers must have no bias: it is not cut,
# and where the inputs are split, each process would add it.
SPLITS = {"qkv": (0, 3), "projection": (1, 1), "up": (0, 1), "down": (1, 1)}


class EnterSplit(torch.autograd.Function):
    """The way into split layers: x itself and, backwards, the sum of its gradients in all parts."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return sum_of_parts(gradient, ctx.group, "backward"), None


class LeaveSplit(torch.autograd.Function):
    """The way out: the sum of all parts. Backwards, each part gets the sum's whole gradient."""

    @staticmethod
    def forward(ctx, part, group):
        return sum_of_parts(part, group, "forward")

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


@torch.compiler.disable
def sum_of_parts(part, group, phase):
    """Returns the sum over the processes of the group. The time until here counts as `phase`."""
    total = part.clone(memory_format=torch.contiguous_format)  # autograd may still need the part
    mark(phase)
    dist.all_reduce(total, group=group)
    sum_marks(total.nbytes)
    return total


def split_weights(model):
    """Returns {weight: its two numbers of SPLITS} for the weights that are split."""
    found = {}
    for block in model.blocks:
        for name, how in SPLITS.items():
            found[getattr(block, name).weight] = how
    return found


def check_biases(model):
    """Ends the run if a split layer has a bias: it would not be cut, or count in each part."""
    for block in model.blocks:
        for name in SPLITS:
            if getattr(block, name).bias is not None:
                exit_all(f"{name} must have no bias")


def cut(whole, dim, num_matrices, group):
    """Returns this process's part of a weight."""
    parts = whole.unflatten(dim, (num_matrices, dist.get_world_size(group), -1))
    return parts.select(dim + 1, dist.get_rank(group)).flatten(dim, dim + 1).contiguous()


def join(part, dim, num_matrices, group):
    """Returns the whole weight, on the CPU. Only that of the group's first process has values."""
    is_first = dist.get_rank(group) == 0
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.gather(part, parts if is_first else None, group=group, group_dst=0)
    parts = [each.cpu().unflatten(dim, (num_matrices, -1)) for each in parts]
    return torch.stack(parts, dim + 1).flatten(dim, dim + 2)


def split_layers(model, optimizer, group):
    """Leaves this process its heads and features, and their moments in the optimizer."""

    def enter(_, inputs):
        [x] = inputs
        if torch.is_autocast_enabled(x.device.type):  # so that its gradient is sent in bf16, too
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return EnterSplit.apply(x, group)

    def leave(_, inputs, part):
        return LeaveSplit.apply(part, group)

    for weight, how in split_weights(model).items():
        weight.data = cut(weight.data, *how, group)
        for name, moment in optimizer.state.get(weight, {}).items():
            if moment.dim() > 0:  # not Adam's number of steps
                optimizer.state[weight][name] = cut(moment, *how, group)
    for block in model.blocks:
        block.n_heads //= dist.get_world_size(group)
        for name, (dim, _) in SPLITS.items():
            layer = getattr(block, name)
            if dim == 0:
                layer.register_forward_pre_hook(enter)
            else:
                layer.register_forward_hook(leave)


def move_to_device(model, optimizer, device, args):
    """Moves the weights. Returns an optimizer of them, with the moments of the old one."""
    model.to(device)  # on some devices this makes new parameters, which the old one does not know
    moved = create_optimizer(model, args)
    moved.load_state_dict(optimizer.state_dict())
    return moved


def join_states(states, model, optimizer, group):
    """Puts whole weights and moments into the state_dicts of the group's first process."""
    split = split_weights(model)
    for name, weight in model.named_parameters():
        if weight in split:
            states["model"][name] = join(weight.detach(), *split[weight], group)
    in_order = itertools.chain(*[each["params"] for each in optimizer.param_groups])
    for number, weight in enumerate(in_order):  # an optimizer's state_dict knows weights by number
        if weight in split:
            moments = dict(optimizer.state[weight])
            for name, moment in moments.items():
                if moment.dim() > 0:
                    moments[name] = join(moment, *split[weight], group)
            states["optimizer"]["state"][number] = moments


def clip_gradients(model, max_norm, group):
    """Clips the norm of all gradients, and returns it. It counts all parts of a split weight."""
    trained = [weight for weight in model.parameters() if weight.grad is not None]
    norms = {weight: torch.linalg.vector_norm(weight.grad) for weight in trained}
    split = [weight for weight in split_weights(model) if weight in norms]
    if split:
        squares = torch.stack([norms[weight] for weight in split]) ** 2
        dist.all_reduce(squares, group=group)
        norms.update(zip(split, squares.sqrt()))  # of whole weights
    norm = torch.linalg.vector_norm(torch.stack(list(norms.values())))
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm


def count_parameters(model, tensor_size):
    """Returns the number of parameters that are trained, in all parts."""
    split = split_weights(model)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return sum(weight.numel() * (tensor_size if weight in split else 1) for weight in trained)


def create_groups(args):
    """Returns two groups: who split layers with this process, and who have the same part."""
    ranks = torch.arange(dist.get_world_size()).view(-1, args.tensor_size)
    rows, columns = ranks.tolist(), ranks.T.tolist()  # a row splits the layers
    tensor_group, _ = dist.new_subgroups_by_enumeration(rows)
    copies, _ = dist.new_subgroups_by_enumeration(columns)
    return tensor_group, copies


# == The run: flags, steps, rows, snapshots. Keep it. It calls the functions above. ================

DTYPES = {"bf16": torch.bfloat16}  # of autocast, and of the sums that are sent
COMM_HOOKS = {"none": default_hooks.allreduce_hook, "bf16": default_hooks.bf16_compress_hook}


def parse_run_args(parser, **defaults):
    """Adds the flags of the run to those of the task, and parses them all."""
    has_tf32 = ON_GPU and torch.version.cuda is not None  # AMD's TF32 is no more exact than bf16
    add = parser.add_argument_group("the run").add_argument
    add("--batch_size", type=int, help="global batch: samples per optimizer step")
    add("--learning_rate", type=float, default=1e-3, help="peak learning rate")
    add("--max_grad_norm", type=float, default=0.0, help="clip gradients to this norm; 0: do not")
    choices = ["fp32", "tf32", *DTYPES]
    add("--precision", choices=choices, default="tf32" if has_tf32 else "fp32", help="number type")
    add("--seed", type=int, default=1, help="seed of weights, data order and dropout")
    # report.py compares runs that have the same flags up to here. See log_row().
    add("--epochs", type=int, help="passes over the data")
    add("--max_steps", type=int, default=0, help="optimizer steps in total; 0: --epochs decides")
    add("--eval_every", type=int, default=0, help="steps between validations; 0: once per epoch")
    add("--tensor_size", type=int, default=2, help="processes of a group, which splits layers")
    add("--grad_accum_steps", type=int, default=1, help="micro-batches per batch, to save memory")
    add("--comm_hook", choices=COMM_HOOKS, default="none", help="type in which gradients are sent")
    add("--compile", action="store_true", help="use torch.compile, which slows the first steps")
    add("--num_workers", type=int, default=0, help="processes that load data, for each GPU")
    add("--snapshot", metavar="FILE", help="save at validations and when stopped; resume from it")
    add("--init_from", metavar="FILE", help="start from the weights of this snapshot")
    add("--log", metavar="FILE.jsonl", help="append a row for each process, for report.py")
    parser.set_defaults(**defaults)
    args = parser.parse_args()
    numbers = "learning_rate max_grad_norm seed epochs max_steps eval_every num_workers"
    for name in numbers.split():
        if getattr(args, name) < 0:
            parser.error(f"--{name} must not be negative")
    if min(args.batch_size, args.tensor_size, args.grad_accum_steps) < 1:
        parser.error("--batch_size, --tensor_size and --grad_accum_steps must be at least 1")
    return args


def main(args):  # runs in each process: torchrun or srun starts it
    Finalize(None, kill_workers, exitpriority=0)  # like atexit, but before Python waits for workers
    settings = dict(vars(args))  # the flags, before read_data() may add something to args
    rank, local_rank, device, autocast = init_process(args)

    # Data, model, optimizer: what they draw at random is the same in all processes.
    train_data, val_data = read_data_in_turn(args, rank, local_rank)
    check_flags(args, len(train_data))
    steps_per_epoch = len(train_data) // args.batch_size  # an incomplete last batch is left out
    num_steps = args.max_steps or args.epochs * steps_per_epoch
    settings |= {"steps_per_epoch": steps_per_epoch, "num_samples": len(train_data)}
    model = create_model(args, train_data).train()  # whole, and on the CPU
    check_biases(model)
    optimizer = create_optimizer(model, args)
    # A group of parameters with a rate of its own keeps its ratio to --learning_rate.
    lr_scales = [group["lr"] / (args.learning_rate or 1) for group in optimizer.param_groups]
    scaler = torch.amp.GradScaler(device.type, enabled=False)  # for other scripts that resume it
    state = {"model": model, "optimizer": optimizer, "scaler": scaler}
    start_step = start_or_resume(state, settings, args)  # the steps already taken; 0 in a new run
    compare_ranks(settings, len(val_data), start_step)

    # Each process keeps its part of the layers. The weights that are not split stay equal in all.
    tensor_group, copies = create_groups(args)
    split_layers(model, optimizer, tensor_group)
    optimizer = state["optimizer"] = move_to_device(model, optimizer, device, args)
    compiled = torch.compile(model) if args.compile else model  # both have the same weights

    # DDP: equal copies of each part, whose gradients are averaged during the backward pass.
    ddp_model = nn.parallel.DistributedDataParallel(
        compiled, process_group=copies, gradient_as_bucket_view=True
    )
    ddp_model.broadcast_buffers = False  # BatchNorm's statistics: sent above, and in evaluate()
    comm_hook = COMM_HOOKS[args.comm_hook]  # averages a bucket of gradients
    comm_hook = timed_hook(comm_hook)
    ddp_model.register_comm_hook(copies, comm_hook)  # without copies, it would average other parts

    # The processes of a group load the same samples, and draw the same crops and dropout.
    group_number = dist.get_rank(copies)
    set_seed(args.seed, start_step, group_number)
    indices = training_batches(train_data, start_step, copies, args)
    batches = iter(create_loader(train_data, indices, args))
    pause = 0.1 if sys.stderr.isatty() else 60  # seconds between two prints of the bar
    bar = tqdm(initial=start_step, total=num_steps, disable=rank > 0, mininterval=pause)
    own_sums = Counter()  # of batch_loss() in this process since the last poll
    all_sums = Counter()  # and in all processes since the last row, or since a resume
    last_poll_step, last_poll_time = start_step, time.perf_counter()  # a poll: see below
    next_poll_step, row, is_stopped = 0, None, False
    mark("start")
    for step in range(start_step + 1, num_steps + 1):
        # 1. A step. The micro-batches' gradients add up, and the last backward pass averages them.
        set_seed(args.seed, step, group_number)  # the same after a resume
        rate = learning_rate(args, step / num_steps)
        for group, scale in zip(optimizer.param_groups, lr_scales):
            group["lr"] = rate * scale
        for micro_step in range(1, args.grad_accum_steps + 1):
            batch = to_device(next(batches), device)
            mark("data")
            is_last = micro_step == args.grad_accum_steps
            ddp_model.require_backward_grad_sync = is_last  # like no_sync(): the last averages
            with autocast:
                loss, batch_sums = batch_loss(ddp_model, batch, args)
            add_to(own_sums, batch_sums)
            mark("forward")
            (loss / args.grad_accum_steps).backward()
            mark("comm" if is_last else "backward")  # timed_hook() has marked the last backward
        is_warmup = step <= start_step + 3  # the first steps are slower
        row_is_due = step == num_steps or step % (args.eval_every or steps_per_epoch) == 0
        poll_is_due = row_is_due or is_warmup or step >= next_poll_step
        if args.max_grad_norm or poll_is_due:  # a row shows the norm. A limit of inf clips nothing
            norm = clip_gradients(model, args.max_grad_norm or math.inf, tensor_group)
        optimizer.step()
        optimizer.zero_grad()
        mark("optimizer")
        bar.update()
        if not poll_is_due:
            continue

        # 2. A poll, about once a second: is the loss finite? Was a process asked to stop? All poll
        # at the same step, as each waits for the others. In other steps, Python waits for no GPU.
        recent_sums = sum_over_ranks(own_sums)
        own_sums.clear()
        all_sums.update(recent_sums)  # a Counter's update() adds
        own_poll = {"signals": len(SIGNALS & signal.sigpending())}
        own_poll["seconds"] = time.perf_counter() - last_poll_time  # with the waiting for others
        polled = sum_over_ranks(own_poll)
        is_stopped = polled["signals"] > 0 and step < num_steps  # the last step ends the run anyway
        mark("comm")
        count_marks(is_warmup, recent_sums["count"] / args.tensor_size)  # a group has one batch
        mean_loss = recent_sums["loss"] / recent_sums["count"]
        if not math.isfinite(mean_loss):
            exit_all(f"step {step}: the loss is {mean_loss}")
        bar.set_postfix(loss=f"{mean_loss:.4g}", refresh=False)

        # 3. A row: compare the weights, save, validate, print. A stop makes one, too.
        if row_is_due or is_stopped:
            row = {"step": step, "epoch": step / steps_per_epoch, "lr": rate}
            row |= {"grad_norm": norm.item(), "drift": compare_copies(model, copies, step)}
            mark("eval")
            if args.snapshot and group_number == 0:
                save_snapshot(args.snapshot, state, step, settings, train_data, tensor_group)
            mark("save")
            row |= means("train", all_sums)
            all_sums.clear()
            if not is_stopped:  # a stopped run may have no time for it
                row |= means("val", evaluate(compiled, val_data, copies, device, autocast, args))
                mark("eval")
            row = log_row(row, model, device, settings)
        if is_stopped:
            break

        # 4. When the next poll is due.
        next_poll_step = step + steps_until_poll(step - last_poll_step, polled["seconds"])
        last_poll_step, last_poll_time = step, time.perf_counter()

    bar.close()
    print_marks(row)
    del ddp_model  # before torch 2.14, a process can hang at its end if DDP outlives its group
    if not is_stopped:  # all call the model, and draw the same. Rank 0 prints
        torch.manual_seed(args.seed)
        with redirect_stdout(sys.stdout if rank == 0 else None):
            finish(model.eval(), val_data, args, device)
    dist.destroy_process_group()
    if is_stopped and rank == 0:  # the others end with status 0
        if "SLURM_STEP_NUM_TASKS" in os.environ:
            time.sleep(10)  # when a process fails, srun kills those that have not ended
        sys.exit(os.EX_TEMPFAIL if args.snapshot else 128 + signal.SIGTERM)  # 75: run me again


def init_process(args):
    """Joins the other processes. Returns rank, local_rank (on this node), the device, autocast."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_WORLD_SIZE")  # those of torchrun
    if "SLURM_STEP_NUM_TASKS" in os.environ and not dist.is_torchelastic_launched():  # by srun
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_NUM_NODES")
    if not {*names[:3], "MASTER_ADDR"} <= {*os.environ}:
        sys.exit("start it with torchrun or by its job file: see the top of this script")
    rank, world_size, local_rank = [int(os.environ[name]) for name in names[:3]]
    num_nodes = int(os.environ.get(names[3], 2))  # not all launchers tell it: take many
    num_gpus = torch.accelerator.device_count()
    if local_rank >= num_gpus > 0 and dist.is_torchelastic_launched():
        sys.exit(f"{num_gpus} GPU(s) are too few for the processes of this node")
    device = torch.device(local_rank % num_gpus if ON_GPU else "cpu")  # srun may show only one GPU
    if ON_GPU:
        torch.accelerator.set_device_index(device.index)  # this process's default from now on
    if num_nodes == 1:  # stay on this machine
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if rank == 0:  # the others wait for it below, on GPUs for ten minutes
        print(f"{world_size} processes, rank 0 on {device}", flush=True)
        read_data(argparse.Namespace(**vars(args)))  # downloads. It may add to its copy of args
    backend = dist.get_default_backend_for_device(device)  # nccl for NVIDIA GPUs, gloo for CPUs
    own = {"rank": rank, "world_size": world_size, "device_id": device if ON_GPU else None}
    dist.init_process_group(backend, **own)  # they meet
    torch.set_float32_matmul_precision("high" if args.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = args.precision == "tf32"  # for NVIDIA's convolutions alone
    autocast = torch.autocast(device.type, DTYPES.get(args.precision), args.precision in DTYPES)
    return rank, local_rank, device, autocast


def read_data_in_turn(args, rank, local_rank):
    """Returns the data. Of each node, one process reads them first. All processes call it."""
    if local_rank == 0 and rank > 0:  # rank 0 has read them. Nodes may not share a disk
        read_data(argparse.Namespace(**vars(args)))
    dist.barrier()
    torch.manual_seed(args.seed)  # what follows draws the same in all processes
    return read_data(args)


def check_flags(args, num_samples):
    """Ends the run if a flag cannot work here."""
    world_size = dist.get_world_size()
    if world_size % args.tensor_size != 0 or args.n_heads % args.tensor_size != 0:
        exit_all(f"--tensor_size must divide --n_heads and the {world_size} processes")
    divisor = world_size // args.tensor_size * args.grad_accum_steps
    if args.batch_size % divisor != 0 or args.batch_size > num_samples:
        must = f"must be a multiple of {divisor} (groups x micro-batches), up to {num_samples}"
        exit_all(f"--batch_size {args.batch_size} {must}")
    for path in (args.snapshot, args.log):
        if path and not os.access(Path(path).absolute().parent, os.W_OK):
            sys.exit(f"cannot write {path}: its folder is missing or read-only")


def compare_ranks(settings, num_val, start_step):
    """Ends all processes if they differ. Nodes may have other code, flags, data, or snapshots."""
    own = {"code": Path(__file__).read_text(), "flags or data": settings | {"run": None}}
    own |= {"data to validate on": num_val, "step of the snapshot": start_step}
    ranks = gather_from_ranks(own)
    differ = [name for name in own if any(of_rank[name] != ranks[0][name] for of_rank in ranks)]
    if differ:
        exit_all(f"ranks differ in {', '.join(differ)}")


def start_or_resume(state, settings, args):
    """Loads --snapshot (a checkpoint), or the weights of --init_from. Returns the steps taken."""
    rank, path = dist.get_rank(), args.snapshot or ""
    if os.path.exists(path):
        # mmap saves memory. Not on a CPU: there, the optimizer's state would stay in the old file.
        snapshot = torch.load(path, "cpu", weights_only=True, mmap=ON_GPU)
        old = snapshot["settings"]
        changed = {name: old.get(name) for name in settings if settings[name] != old.get(name)}
        if changed and rank == 0:
            print(f"{path} was saved with {changed}")
        if {"batch_size", "num_samples", "seed"} & changed.keys():  # another place in the data
            exit_all("to start anew, use --init_from and a new --snapshot")
        for name, part in state.items():
            part.load_state_dict(snapshot.pop(name))  # which frees it
        settings["run"] = old["run"]
        return snapshot["step"]
    settings["run"] = f"{time.time_ns():x}"  # a name for the log: that of rank 0
    if args.init_from:
        load_weights(state["model"], args.init_from)
    if not args.snapshot and rank == 0:
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
        exit_all(f"no weight of {path} fits: it was saved with {snapshot.get('settings')}")
    if missing and dist.get_rank() == 0:
        print(f"{len(missing)} of {len(names)} weights start anew: {', '.join(missing[:3])}")


def save_snapshot(path, state, step, settings, data, group):
    """Writes a file beside `path`, and gives it that name, so that `path` is never half written.

    All processes of the first group call it, and rank 0 writes.
    """
    snapshot = {name: part.state_dict() for name, part in state.items()}
    join_states(snapshot, state["model"], state["optimizer"], group)
    if dist.get_rank() > 0:
        return
    snapshot |= {"step": step, "settings": settings}
    snapshot["classes"] = [str(name) for name in getattr(data, "classes", ())]
    torch.save(snapshot, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def training_batches(data, start_step, copies, args):
    """Yields the indices of each micro-batch of this group, from step start_step + 1 on."""
    group_number, num_groups = dist.get_rank(copies), dist.get_world_size(copies)
    steps_per_epoch = len(data) // args.batch_size
    per_step = num_groups * args.grad_accum_steps  # micro-batches, in all groups
    for epoch in itertools.count(start_step // steps_per_epoch):
        with torch.random.fork_rng(devices=()):  # training_order() may draw from torch, too
            torch.default_generator.manual_seed(hash((args.seed, epoch)))
            order = np.asarray(training_order(data, np.random.default_rng([args.seed, epoch])))
        order = order[: steps_per_epoch * args.batch_size]
        micro_batches = order.reshape(-1, args.batch_size // per_step)  # for group 0, 1, ...
        num_taken = (start_step % steps_per_epoch) * per_step
        for indices in micro_batches[num_taken + group_number :: num_groups]:
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


def exit_all(message):
    """Ends all processes, which call it together. Rank 0 says why."""
    sys.exit(message if dist.get_rank() == 0 else 1)


def gather_from_ranks(value):
    """Returns a list of what each process gives, rank 0 first. All processes call it."""
    by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, value)
    return by_rank


def sum_over_ranks(sums):
    """Returns the sums over all processes, which all call it. Waits for them, and for the GPU."""
    by_rank = gather_from_ranks({name: float(value) for name, value in sums.items()})
    names = dict.fromkeys(name for of_rank in by_rank for name in of_rank)  # some may lack one
    return {name: sum(of_rank.get(name, 0) for of_rank in by_rank) for name in names}


def means(split, sums):
    """Returns columns of a row, such as train_loss: each sum divided by the count."""
    names = [name for name in sums if name != "count"]
    return {f"{split}_{name}": sums[name] / sums["count"] for name in names}


def steps_until_poll(num_steps, seconds):
    """Returns how many steps take about a second. `seconds`: of num_steps, added up over ranks.

    All must find the same number, so it depends on their mean. It is at most twice num_steps: where
    data comes in bursts, a few quick steps tell little about the next ones.
    """
    steps_a_second = num_steps / (seconds / dist.get_world_size())
    return max(1, min(int(steps_a_second), 2 * num_steps))


@torch.no_grad()
def compare_copies(model, copies, step):
    """Returns the drift: a weight's largest difference from the first copy, over its largest value.

    A split weight has copies in the other groups, and all else has one in each process. All
    processes call it. It ends them if they differ by more than rounding.
    """
    drifts = []
    split = split_weights(model)
    for weight in model.parameters():
        group = copies if weight in split else dist.group.WORLD
        weight = weight.flatten().float()
        of_first = weight.clone()
        dist.broadcast(of_first, group=group, group_src=0)
        drift = (weight - of_first).abs().max() / of_first.abs().max().clamp(min=1e-30)
        drifts.append(drift.nan_to_num(math.inf))  # a NaN counts as the largest
    drifts = torch.stack(drifts)
    dist.all_reduce(drifts, dist.ReduceOp.MAX)  # now all know it
    if drifts.max() > 1e-2:  # GPUs of two kinds round differently, but stay below this
        name, _ = list(model.named_parameters())[drifts.argmax()]
        exit_all(f"step {step}: processes differ in {name}, or it is not finite")
    return drifts.max().item()


@torch.no_grad()
def evaluate(model, data, copies, device, autocast, args):
    """Returns the sums of batch_loss() over the data. All call it: each group has a share."""
    group_number, num_groups = dist.get_rank(copies), dist.get_world_size(copies)
    for buffer in model.buffers():  # BatchNorm's statistics: those of rank 0
        dist.broadcast(buffer, src=0)
    share = list(range(group_number, len(data), num_groups))
    size = args.batch_size // num_groups // args.grad_accum_steps  # as in training
    batches = [share[start : start + size] for start in range(0, len(share), size)]
    model.eval()
    own_sums = Counter()
    for batch in create_loader(data, batches, args):
        with autocast:
            _, batch_sums = batch_loss(model, to_device(batch, device), args)
        add_to(own_sums, batch_sums)
        forget_marks()  # a validation is timed as a whole
    model.train()
    return sum_over_ranks(own_sums)  # each process of a group counts: means are the same


def log_row(row, model, device, settings):
    """Completes the row. Prints rank 0's, and appends those of all to --log. All call it."""
    printed = [*row, "seconds", "peak_MB"]
    row = settings | row
    row |= take_marks(settings["batch_size"])
    if row.get("steps"):  # not only warmup
        printed.append("tokens/s" if "tokens/s" in row else "samples/s")
    names = list(settings)  # in the order of the flags: report.py compares those before --epochs
    row["settings"] = {name: settings[name] for name in names[: names.index("epochs")]}
    row["script"] = "/".join(Path(__file__).resolve().parts[-2:])
    row |= {"processes": dist.get_world_size(), "rank": dist.get_rank()}
    row |= {"host": os.uname().nodename, "threads": torch.get_num_threads()}
    get_name = getattr(torch.get_device_module(device), "get_device_name", device.type.upper)
    row["device"] = get_name()
    row["parameters"] = count_parameters(model, settings["tensor_size"])
    rows = gather_from_ranks(row)
    if row["rank"] == 0:
        text = "  ".join(f"{name} {row[name]:.6g}" for name in printed if name in row)
        tqdm.write(textwrap.fill(text, 100))
    if row["rank"] == 0 and settings["log"]:
        same = {"run": row["run"], "nodes": len({of_rank["host"] for of_rank in rows})}
        with open(settings["log"], "a") as file:
            for of_rank in rows:
                file.write(json.dumps(of_rank | same) + "\n")
    return row


def kill_workers():
    """Ends the workers of the loaders, which have inherited the blocked SIGTERM."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader reports a dead worker as an error
    for worker in active_children():
        worker.kill()


# == Where the time goes. You may delete this section, and each line above it that has "mark(", ====
# "marks(" or "timed_hook(" in it. The section ends before the line with __name__.

STEP_PHASES = ("data", "forward", "backward", "comm", "optimizer")
PHASES = ("warmup", *STEP_PHASES, "eval", "save")
marks = []  # (phase, the moment at which it ended)
sent = []  # (name, start, end, bytes): "all-reduce" of gradients, "sum" of a layer's parts
last_step = []  # the phases and all-reduces of a step: (name, start, end, bytes), for report.py
times, all_times = Counter(), Counter()  # seconds by phase since the last row, and since the start


def now():
    """Returns this moment. A GPU fills in the time later, and Python does not wait."""
    if not ON_GPU:
        return time.perf_counter()
    return torch.accelerator.current_stream().record_event(torch.Event(enable_timing=True))


def mark(phase):
    """Notes that this phase of a step ends here."""
    marks.append((phase, now()))


def timed_hook(comm_hook):
    """Returns comm_hook with notes of the moments. DDP calls it for each bucket of gradients."""
    sides = {}  # a stream for each bucket. PyTorch has few: new ones in each step would be shared

    def hook(state, bucket):
        if bucket.is_last():
            mark("backward")  # the last gradient is ready
        start, size = now(), bucket.buffer().nbytes

        def note_end(future):  # it runs when the all-reduce has ended
            sent.append(("all-reduce", start, now(), size))
            return future.value()

        if not ON_GPU:
            return comm_hook(state, bucket).then(note_end)
        # On a GPU, note_end() makes its stream wait for the all-reduce. That must not be the stream
        # of the backward pass, so it gets one of its own.
        if bucket.index() not in sides:
            sides[bucket.index()] = torch.Stream(priority=-1)
        side = sides[bucket.index()]
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            return comm_hook(state, bucket).then(note_end)

    return hook


def sum_marks(size):
    """Notes that a sum of parts ends here, which began at the mark before."""
    _, start = marks[-1]
    mark("comm")  # a forward or a backward pass waits for it
    _, end = marks[-1]
    sent.append(("sum", start, end, size))


def forget_marks():
    """Forgets the marks of a validation, which began when a save ended."""
    while marks[-1][0] != "save":
        marks.pop()
    sent.clear()


def count_marks(is_warmup=False, count=0):
    """Adds up the times and steps since the last poll, with its `count`. Waits for the GPU."""
    if ON_GPU:
        torch.accelerator.synchronize()
    if is_warmup:
        marks[:] = [("warmup", moment) for _, moment in marks]
        sent.clear()
    _, last_moment = marks[-1]  # after a collective, so it is the same moment in all processes

    def seconds(moment):  # before the last one, as a negative number
        return -moment.elapsed_time(last_moment) / 1000 if ON_GPU else moment - last_moment

    phases = []
    for (_, start), (phase, end) in itertools.pairwise(marks):
        times[phase] += seconds(end) - seconds(start)
        phases.append((phase, seconds(start), seconds(end), 0))
    spans = phases + [(name, seconds(start), seconds(end), size) for name, start, end, size in sent]
    spans.sort(key=lambda span: span[1])  # by their start
    # comm_total: the time in any all-reduce. They overlap, and each moment counts once.
    counted_until = -math.inf
    for name, start, end, _ in spans:
        if name in ("comm", "all-reduce"):
            times["comm_total"] += max(0.0, end - max(start, counted_until))
            counted_until = max(counted_until, end)
        if name == "sum":
            times["sum_total"] += end - start
    # last_step: the spans between the ends of the last two optimizer phases.
    ends = [number + 1 for number, span in enumerate(spans) if span[0] == "optimizer"]
    times["steps"] += len(ends)
    if ends:
        times["count"] += count
        first = ends[-2] if len(ends) > 1 else 0
        last_step[:] = spans[first : ends[-1]]
    del marks[:-1]  # the last mark is the start of what comes next
    sent.clear()


def take_marks(batch_size):
    """Returns the columns of a row: the times since the last row, which start anew from here."""
    count_marks()
    columns = columns_of(times, batch_size) | {"last_step": last_step}
    all_times.update(times)
    times.clear()
    return columns


def columns_of(times, batch_size):
    """Returns these times as columns of a row, their sum, the speed of training, and memory."""
    columns = {name: times[name] for name in (*PHASES, "comm_total", "sum_total", "steps")}
    columns["seconds"] = sum(times[phase] for phase in PHASES)
    training = sum(times[phase] for phase in STEP_PHASES)
    columns["samples/s"] = batch_size * times["steps"] / training if training else 0.0
    if times["count"] > batch_size * times["steps"]:  # a sample has several tokens
        columns["tokens/s"] = times["count"] / training
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # from KiB
    columns["peak_MB"] = (torch.accelerator.max_memory_allocated() if ON_GPU else peak) / 1e6
    return columns


def print_marks(row):
    """Prints where the time since the start has gone, and a row for results.md. All call it."""
    if row is None:  # there was nothing to do
        return
    columns = columns_of(all_times, row["batch_size"])
    rows = gather_from_ranks(row | columns)
    if row["rank"] > 0:
        return
    mean = {name: sum(of_rank[name] for of_rank in rows) / len(rows) for name in columns}
    for phase in PHASES:
        if mean[phase] >= 0.0005:
            print(f"{phase:9} {mean[phase]:9.3f} s {mean[phase] / mean['seconds']:4.0%}")
    if mean["steps"] == 0:
        print("too few steps to time: the first three after a start are the warmup")
        return
    if len(rows) > 1:
        print_sending(mean, rows)
    names = ["script", "model", "dataset", "precision", "processes", "batch_size"]
    cells = {name: str(row[name]) for name in names if name in row}
    numbers = {name: value for name, value in row.items() if name.startswith("val_")} | mean
    cells |= {name: f"{value:.4g}" for name, value in numbers.items()}
    for line in (cells, ["---"] * len(cells), cells.values()):
        print("|", " | ".join(line), "|")


def print_sending(mean, rows):
    """Prints how long all-reduces take, who is late, and the speedup of twice as many GPUs.

    `rows` are those of all processes, and `mean` is their mean. In an all-reduce, all wait until
    the last one comes. The last one does not wait: its time in all-reduces is sending alone.
    """
    last = min(rows, key=lambda of_rank: of_rank["comm_total"])
    sums, gradients = last["sum_total"], last["comm_total"] - last["sum_total"]
    waiting = f"waiting {mean['comm_total'] - sums - gradients:.3f} s"
    most = max(of_rank["comm_total"] for of_rank in rows)
    if most - sums - gradients > 0.1 * sum(mean[phase] for phase in STEP_PHASES):  # of the steps
        waiting += f" for rank {last['rank']} on {last['host']}"
    print(f"sending sums of parts {sums:.3f} s, gradients {gradients:.3f} s, {waiting}")
    num_groups = len(rows) // rows[0]["tensor_size"]
    if num_groups == 1:
        return
    # An estimate for twice as many groups, at the same global batch, if no sending is hidden: half
    # of the passes and their sums, the whole optimizer, and a little more sending. In a ring of N,
    # each sends 2 (N - 1) / N of its gradients, and in one of 2 N it sends (2 N - 1) / N of them.
    passes, optimizer, n = mean["forward"] + mean["backward"] + sums, mean["optimizer"], num_groups
    seconds = passes / 2 + optimizer + gradients * (2 * n - 1) / (2 * n - 2)
    speedup = (passes + optimizer + gradients) / seconds
    ratio = f"R = (forward + backward + sums) / gradients = {passes / gradients:.1f}"
    print(f"{ratio}: {2 * len(rows)} processes would be {speedup:.2f} times as fast")


if __name__ == "__main__":
    main(parse_args())
