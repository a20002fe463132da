r"""Train a GPT of which each process holds a shard: FSDP, also known as ZeRO-3.

    torchrun --standalone --nproc_per_node=2 -- hybrid/gpt_fsdp.py
    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HEAD_NODE:29400 -- \
        hybrid/gpt_fsdp.py --shard_size 4 --precision bf16 --snapshot gpt.pt  # on each of two nodes
    sbatch --nodes=2 --gpus-per-node=4 slurm/hybrid_gpt_fsdp.slurm --checkpoint_activations

For a model that does not fit on one GPU: --shard_size processes share one copy of its parameters,
gradients and optimizer state. An all-gather brings a block together when a pass needs it. A reduce-
scatter leaves each process the gradients of its shard, and the copies all-reduce them, as DDP does.
A CPU hides no communication. On GPUs, forward and backward include what is not hidden.
Rank 0 has the whole model on the CPU, to load and save it. Snapshots are those of multinode/gpt.py.
Shapes: B sequences of a batch, T tokens of a sequence, D = d_model, H heads, V vocabulary.
"""

import argparse
import json
import math
import os
import signal
import sys
import sysconfig
import time
from datetime import timedelta
from functools import partial
from glob import glob
from resource import RUSAGE_SELF, getrusage

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.lib.stride_tricks import sliding_window_view
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PHASES = ("data", "forward", "backward", "comm", "optimizer", "eval", "save")
SAME_ON_RESUME = (
    "dataset",
    "vocab_size",
    "d_model",
    "n_heads",
    "num_layers",
    "seq_len",
    "batch_size",
    "learning_rate",
    "dropout",
    "precision",
    "seed",
)
LOGGED = (*SAME_ON_RESUME, "shard_size", "checkpoint_activations", "epochs", "max_steps")
SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)  # each asks the run to save and stop
ARRIVED = []  # the signals that this process has received
PEAK_TFLOPS = {"A100": 312, "NVL": 835, "H100 80GB": 989, "H200": 989, "GB200": 2500, "B200": 2250}


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, world_size = parser.add_argument, int(os.environ.get("WORLD_SIZE", 0))
    add("--shard_size", type=int, default=world_size, help="processes that share a copy")
    add("--checkpoint_activations", action="store_true", help="compute blocks twice, save memory")
    add("--dataset", default="stdlib", help="stdlib, a text file, or a folder of token ids")
    add("--vocab_size", type=int, default=0, help="token ids; 0: 256 for text, 50304 for a folder")
    add("--d_model", type=int, default=128, help="width of the network")
    add("--n_heads", type=int, default=4, help="attention heads")
    add("--num_layers", type=int, default=4, help="transformer blocks")
    add("--seq_len", type=int, default=128, help="tokens of a sequence")
    add("--dropout", type=float, default=0.0, help="dropout probability in and before the blocks")
    add("--epochs", type=int, default=1, help="passes over the training tokens")
    add("--max_steps", type=int, default=0, help="end each epoch after so many steps; 0: no limit")
    add("--batch_size", type=int, default=64, help="global batch: sequences per optimizer step")
    add("--learning_rate", type=float, default=1e-3, help="highest learning rate, after warm-up")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="type of the forward pass")
    add("--seed", type=int, default=1, help="seed of weights, data order and dropout")
    add("--snapshot", metavar="FILE", help="save each epoch and when stopped; resume if it exists")
    add("--snapshot_every", type=int, default=0, help="also save every so many steps; 0: do not")
    add("--log", metavar="FILE.jsonl", help="append a row per epoch and process, for report.py")
    add("--timeout", type=int, default=600, help="seconds to wait for a process that hangs")
    args = parser.parse_args()
    args.vocab_size = args.vocab_size or (50304 if os.path.isdir(args.dataset) else 256)
    if not world_size:
        parser.error(f"start it with: torchrun --standalone --nproc_per_node=2 -- {sys.argv[0]}")
    if min(args.shard_size, args.batch_size) < 1 or (
        world_size % args.shard_size or args.batch_size % world_size
    ):
        parser.error("--shard_size must divide the processes, and these --batch_size")
    if args.n_heads < 1 or args.d_model % args.n_heads:
        parser.error("--d_model must be a multiple of --n_heads")
    return args


def read_tokens(args):
    """Returns token ids to train on (N,) and to validate on (M,), uint8 or uint16."""
    try:
        if os.path.isdir(args.dataset):  # mapped, not read: they may be larger than memory
            paths = [os.path.join(args.dataset, f"{split}.bin") for split in ("train", "val")]
            return [np.memmap(path, np.uint16, "r") for path in paths]
        stdlib = sorted(glob(f"{sysconfig.get_path('stdlib')}/*.py"))  # about 5 MB
        paths = stdlib if args.dataset == "stdlib" else [args.dataset]
        text = np.concatenate([np.fromfile(path, np.uint8) for path in paths])
    except (OSError, ValueError) as error:
        sys.exit(f"cannot read {args.dataset}: {error}")
    num_val = min(len(text) // 10, 2**20)  # the last tenth, but at most 1 MiB
    return text[:-num_val], text[-num_val:]


def batches(tokens, args, epoch, steps, device):
    """Yields token ids (B, T) and the next ids (B, T) for each step."""
    generator = torch.Generator().manual_seed(hash((args.seed, epoch)))
    order = torch.randperm(len(tokens) // args.seq_len - 1, generator=generator).numpy()
    start = int(torch.randint(args.seq_len, (), generator=generator))  # other cuts in each epoch
    sequences = sliding_window_view(tokens[start:], args.seq_len + 1)[:: args.seq_len]  # (N, T + 1)
    for step in steps:
        numbers = order[step * args.batch_size : (step + 1) * args.batch_size]
        numbers = numbers[dist.get_rank() :: dist.get_world_size()]
        batch = torch.from_numpy(sequences[numbers].astype(np.int64))
        if device.type == "cuda":  # pinned memory: the CPU does not wait for the copy
            batch = batch.pin_memory().to(device, non_blocking=True)
        yield batch[:, :-1], batch[:, 1:]


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
    """Token ids (B, T) to logits (B T, V) or, given the next ids (B, T), to their mean loss."""

    def __init__(self, args):
        super().__init__()
        self.embedding = nn.Embedding(args.vocab_size, args.d_model)
        self.positions = nn.Embedding(args.seq_len, args.d_model)
        self.dropout = nn.Dropout(args.dropout)
        self.blocks = nn.Sequential(*[GPTBlock(args) for _ in range(args.num_layers)])
        self.norm = nn.LayerNorm(args.d_model)
        for name, parameter in self.named_parameters():  # as GPT-2 (Radford et al. 2019)
            if parameter.dim() == 2:
                depth = 2 * args.num_layers if "projection" in name or "down" in name else 1
                nn.init.normal_(parameter, std=0.02 / depth**0.5)

    def forward(self, tokens, targets=None):
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]  # (B, T, D)
        x = self.norm(self.blocks(self.dropout(x)))
        logits = F.linear(x, self.embedding.weight).flatten(0, 1)  # the head is the embedding
        return logits if targets is None else F.cross_entropy(logits, targets.flatten())


def create_optimizer(model, args):
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]  # not decayed
    return torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        args.learning_rate,
        (0.9, 0.99),
        weight_decay=0.1,
        fused=True,
    )


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


class ShardTimer(Stopwatch):
    """Also runs and times the collectives of FSDP. On a CPU they interrupt the passes."""

    phase, spans = None, ()

    def mark(self, phase, at=None):
        super().mark(phase, at)
        self.phase = {"data": "forward", "forward": "backward"}.get(phase)  # which pass is next

    def allocate(self, size, *, dtype, device):
        self.start = self.now()  # of the all-reduce, if nothing is scattered before it
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False, **op):
        self.start = self.now()
        collective = dist.reduce_scatter_tensor if op else dist.all_gather_into_tensor
        collective(output_tensor, input_tensor, group=group, **op)
        self.end()

    def end(self, reduced=None):
        if self.phase:
            start, self.start = self.start, self.now()  # an all-reduce may follow
            self.spans += ((start, self.start),)
            if not self.cuda:
                super().mark(self.phase, start)
                super().mark("comm", self.start)

    def read(self, phase):
        """Also adds the time of the collectives."""
        super().read(phase)
        for start, end in self.spans:
            self.seconds["comm_total"] += self.between(start, end)
        self.spans = ()


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


def save_shards(args, parts, model, optimizer, progress):
    """Gathers the shards into the whole parts of rank 0, which saves them."""
    if args.snapshot:
        options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights, moments = dcp.get_state_dict(model, optimizer, options=options)
        if parts:
            parts["model"].load_state_dict(weights)
            parts["optimizer"].load_state_dict(moments)
            save_snapshot(args, parts, progress)


def token_loss(model, tokens, targets, args):
    """Returns the mean loss in nats, and the sums (2,) of losses and tokens."""
    with torch.autocast(tokens.device.type, DTYPES[args.precision], args.precision != "fp32"):
        loss = model(tokens, targets)
    count = torch.full_like(loss, targets.numel(), dtype=torch.float64)
    return loss, torch.stack((loss.detach() * count, count))


@torch.no_grad()
def evaluate(batch_loss, model, loader, args):
    """Returns the sums that batch_loss gives, added up over all batches."""
    model.eval()
    return sum(batch_loss(model, *batch, args)[1] for batch in loader)


def gpt_row(settings, progress, val_sums, seconds, num_samples):
    """Returns the row of the log for one epoch and process. Times are in seconds."""
    row = settings | {"run": progress["run"], "epoch": progress["epoch"]}
    for split, (loss, count) in ("train", progress["sums"]), ("val", val_sums.tolist()):
        row[f"{split}_loss"] = loss / count
    bits = math.nan if os.path.isdir(row["dataset"]) else row["val_loss"] / math.log(2)
    row |= {"val_bpb": bits, "val_ppl": math.exp(row["val_loss"])}  # bits per byte, perplexity
    row |= seconds | {"seconds": sum(seconds[phase] for phase in PHASES)}
    row["samples/s"] = num_samples / max(1e-9, row["seconds"] - row["eval"] - row["save"])
    row["tokens/s"] = row["samples/s"] * row["seq_len"]
    flops = 6 * row["parameters"] + 12 * row["num_layers"] * row["d_model"] * row["seq_len"]
    peaks = [peak for name, peak in PEAK_TFLOPS.items() if name in row["device"]] or [math.nan]
    row["MFU"] = row["tokens/s"] * flops / (peaks[0] * 1e12 * row["processes"])  # of the bf16 peak
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
    train_tokens, val_tokens = read_tokens(args)
    num_steps = (len(train_tokens) // args.seq_len - 1) // args.batch_size
    if num_steps < 1 or len(val_tokens) <= args.seq_len * world_size:
        sys.exit(f"{args.dataset} is too short for this --seq_len and --batch_size")
    num_steps = min(num_steps, args.max_steps or sys.maxsize)
    val_tokens = torch.from_numpy(val_tokens.astype(np.int64)).to(device)
    val_split = val_tokens.unfold(0, args.seq_len + 1, args.seq_len)  # (M, T + 1)
    val_split = val_split[rank::world_size].tensor_split(len(val_split) // args.batch_size or 1)
    val_batches = [(part[:, :-1], part[:, 1:]) for part in val_split]  # as many in all processes

    ranks = torch.arange(world_size).view(-1, args.shard_size)  # those of a row share a copy
    groups = [
        dist.new_subgroups_by_enumeration(rows.tolist(), timedelta(seconds=args.timeout))[0]
        for rows in (ranks.T, ranks)
    ]
    mesh = DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=("copy", "shard"))
    policy = MixedPrecisionPolicy(DTYPES[args.precision], reduce_dtype=torch.float32)
    watch = ShardTimer(device)
    with torch.device("meta"):  # without memory, until the process has its shard
        model = GPT(args)
    for module in (*model.blocks, model):
        if args.checkpoint_activations and module is not model:
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        module.set_custom_all_gather(watch)
        module.set_custom_reduce_scatter(watch)
        module.set_all_reduce_hook(watch.end)
    model.to_empty(device=device)
    optimizer = create_optimizer(model, args)
    parts, weights, moments, progress = {}, {}, {}, [None]
    if rank == 0:  # it loads the whole model, and sends the others their shards
        torch.manual_seed(args.seed)
        whole = GPT(args)
        parts = {
            "model": whole,
            "optimizer": create_optimizer(whole, args),
            "scaler": torch.amp.GradScaler(enabled=False),
        }
        progress, weights = [load_snapshot(args, parts)], whole.state_dict()
        if parts["optimizer"].state:
            moments = dcp.get_optimizer_state_dict(whole, parts["optimizer"])
    dist.broadcast_object_list(progress)
    progress = progress[0]
    options = dcp.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dcp.set_model_state_dict(model, weights, options=options)
    if progress["epoch"] or progress["step"]:
        dcp.set_optimizer_state_dict(model, optimizer, moments, options=options)

    settings = {name: getattr(args, name) for name in LOGGED} | {
        "script": "hybrid/gpt_fsdp.py",
        "processes": world_size,
        "nodes": nodes,
        "rank": rank,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "comm_hook": "none",
        "model": f"gpt-{args.num_layers}x{args.d_model}",
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    if rank == 0:
        print(
            "{script}: {model}, {parameters:,} parameters; {dataset}, ".format_map(settings)
            + f"{len(train_tokens):,} + {len(val_tokens):,} tokens; shards {args.shard_size}"
        )
        print(
            "processes {processes}, nodes {nodes}, {device}, threads {threads}; global batch "
            "{batch_size} x {seq_len}; {precision}; torch {torch}".format_map(settings)
        )
        print("starting at epoch {epoch}, step {step}:".format_map(progress))
        print("epoch  train_loss  val_loss  val_bpb  val_ppl  seconds  tokens/s    MFU")
    rows, stop = [], 0
    while progress["epoch"] < args.epochs:
        epoch, first_step = progress["epoch"], progress["step"]
        loader = batches(train_tokens, args, epoch, range(first_step, num_steps), device)
        sums = torch.tensor(progress["sums"], dtype=torch.float64, device=device) / world_size
        model.train()
        for tokens, targets in tqdm(
            loader,
            f"epoch {epoch}",
            num_steps,
            initial=first_step,
            leave=False,
            disable=True if rank else None,
        ):
            torch.manual_seed(hash((args.seed, epoch, progress["step"], rank)))  # for dropout
            watch.mark("data")
            loss, loss_sums = token_loss(model, tokens, targets, args)
            sums = sums + loss_sums
            watch.mark("forward")
            loss.backward()
            watch.mark("backward")
            done = (epoch * num_steps + progress["step"] + 1) / (args.epochs * num_steps)
            factor = min(20 * done, 1.05 - done)  # rises for 5% of all steps, then falls linearly
            for group in optimizer.param_groups:
                group["lr"] = args.learning_rate * factor
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
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
                if save or stop:
                    save_shards(args, parts, model, optimizer, progress)
                    watch.mark("save")
                if stop:
                    break
        if stop:
            break

        val_sums = evaluate(token_loss, model, val_batches, args)
        dist.all_reduce(val_sums)
        watch.read("eval")
        num_samples = max(0, num_steps - first_step) * args.batch_size
        row = gpt_row(settings, progress, val_sums, watch.seconds, num_samples)
        peak = torch.cuda.max_memory_allocated() or 1024 * getrusage(RUSAGE_SELF).ru_maxrss
        tensors = [
            tensor
            for weight, state in optimizer.state.items()  # gradients are as weights
            for tensor in (weight, weight, *state.values())
            if tensor.dim()
        ]
        row |= {
            "state_MB": sum(tensor.to_local().nbytes for tensor in tensors) / 1e6,
            "peak_MB": peak / 1e6,
        }
        epoch_rows = [None] * world_size
        dist.all_gather_object(epoch_rows, row)
        epoch_rows = [each | {"run": epoch_rows[0]["run"]} for each in epoch_rows]
        rows += epoch_rows
        watch.seconds = dict.fromkeys(watch.seconds, 0.0)
        progress |= {"epoch": epoch + 1, "step": 0, "sums": 0.0}
        if rank == 0:
            print(
                "{epoch:5}  {train_loss:10.4f}  {val_loss:8.4f}  {val_bpb:7.4f}  {val_ppl:7.2f}  "
                "{seconds:7.2f}  {tokens/s:8.0f}  {MFU:5.3f}".format_map(row)
            )
            if args.log:
                with open(args.log, "a") as file:
                    file.writelines(json.dumps(each) + "\n" for each in epoch_rows)
        save_shards(args, parts, model, optimizer, progress)
        watch.mark("save")
    if rows and rank == 0:
        means = print_summary(rows[world_size:] or rows, "val_loss")
        print(f"R = compute / communication = {means['R']:.1f}: above 3, more processes pay off")
        state, peak = (max(row[name] for row in rows) for name in ("state_MB", "peak_MB"))
        print(
            f"MB of parameters, gradients and optimizer state {state:.1f}, in theory "
            f"{16e-6 * settings['parameters'] / args.shard_size:.1f}; MB at the peak {peak:.1f}"
        )
    dist.barrier()  # rank 0 may still be saving
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
