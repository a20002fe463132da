r"""Train a GPT whose blocks are split over a pipeline of processes, in one or many pipelines.

    torchrun --standalone --nproc_per_node=2 -- hybrid/gpt_pipeline.py             # one pipeline
    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HEAD_NODE:29400 -- \
        hybrid/gpt_pipeline.py --num_stages 4 --num_microbatches 16    # on each of two nodes
    sbatch --nodes=2 --gpus-per-node=4 slurm/hybrid_gpt_pipeline.slurm --num_microbatches 16

For a model that does not fit on one GPU: each process holds an equal part of the blocks. A batch
passes in micro-batches, so that all stages work at the same time. Stages wait until the first
micro-batch arrives and after the last one has left. This is the bubble: (p - 1) / (m + p - 1) of
the time with p stages and m micro-batches (Huang et al. 2019, "GPipe"). Each pipeline has its share
of the batch, and all-reduces add up their gradients. The head is the embedding: the first and the
last stage hold a copy each. A process first builds or loads the whole model on the CPU. Snapshots
are those of multinode/gpt.py.
Shapes: B sequences of a micro-batch, T tokens of a sequence, D = d_model, H heads, V vocabulary.
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
from glob import glob

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.lib.stride_tricks import sliding_window_view
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from tqdm import tqdm

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PHASES = ("data", "forward", "backward", "comm", "optimizer", "eval", "save")
PHASES += ("bubble",)  # waiting for other stages and for what they send
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
LOGGED = (*SAME_ON_RESUME, "num_stages", "num_microbatches", "schedule", "epochs", "max_steps")
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)  # each asks the run to save and stop
ARRIVED = []  # the signals that this process has received
PEAK_TFLOPS = {"A100": 312, "NVL": 835, "H100 80GB": 989, "H200": 989, "GB200": 2500, "B200": 2250}


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--num_stages", type=int, default=2, help="processes of a pipeline")
    add("--num_microbatches", type=int, default=4, help="micro-batches of a pipeline")
    add("--schedule", choices=SCHEDULES, default="1f1b", help="1f1b holds fewer activations")
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
    if "WORLD_SIZE" not in os.environ:
        parser.error(f"start it with: torchrun --standalone --nproc_per_node=2 -- {sys.argv[0]}")
    world_size = int(os.environ["WORLD_SIZE"])
    if args.num_stages < 2 or world_size % args.num_stages or args.num_layers % args.num_stages:
        parser.error("--num_stages must be 2 or more, and divide the processes and --num_layers")
    if args.num_microbatches < (args.num_stages if args.schedule == "1f1b" else 1):
        parser.error("--num_microbatches must be at least --num_stages, with gpipe at least 1")
    shares = args.num_microbatches * (world_size // args.num_stages)
    if args.batch_size < 1 or args.batch_size % shares:
        parser.error(f"--batch_size must be a multiple of {shares}: micro-batches x pipelines")
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
    """Yields a pipeline's batch for each step: token ids (m B, T) and the next ids (m B, T)."""
    generator = torch.Generator().manual_seed(hash((args.seed, epoch)))
    order = torch.randperm(len(tokens) // args.seq_len - 1, generator=generator).numpy()
    start = int(torch.randint(args.seq_len, (), generator=generator))  # other cuts in each epoch
    sequences = sliding_window_view(tokens[start:], args.seq_len + 1)[:: args.seq_len]  # (N, T + 1)
    pipeline, num_pipelines = (
        each // args.num_stages for each in (dist.get_rank(), dist.get_world_size())
    )
    for step in steps:
        numbers = order[step * args.batch_size : (step + 1) * args.batch_size]
        batch = torch.from_numpy(sequences[numbers[pipeline::num_pipelines]].astype(np.int64))
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


class Stage(nn.Module):
    """Some blocks of a GPT, (B, T, D) to (B, T, D), with the names that they have there.

    The first stage takes token ids (B, T). The last one has the head and gives logits (B, T, V).
    """

    def __init__(self, model, args, number):
        super().__init__()
        size, self.precision = args.num_layers // args.num_stages, args.precision
        self.is_first, self.is_last = number == 0, number == args.num_stages - 1
        self.blocks = model.blocks[number * size : (number + 1) * size]
        if self.is_first:
            self.positions, self.dropout = model.positions, model.dropout
        if self.is_first or self.is_last:
            self.embedding = model.embedding
        if self.is_last:
            self.norm = model.norm

    def forward(self, x):
        with torch.autocast(x.device.type, DTYPES[self.precision], self.precision != "fp32"):
            if self.is_first:
                x = self.dropout(self.embedding(x) + self.positions.weight)
            x = self.blocks(x)
            return F.linear(self.norm(x), self.embedding.weight) if self.is_last else x


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


class ReduceTimer(Stopwatch):
    """Also times all-reduces that run while a process waits for other stages."""

    spans = ()

    def all_reduce(self, tensor, group):
        """Starts to sum the tensor over the group. Returns a future to wait for."""
        start = self.now()

        def sent(future):
            self.spans += ((start, self.now()),)
            return future.value()  # without it, wait() would not wait for a GPU

        return dist.all_reduce(tensor, group=group, async_op=True).get_future().then(sent)

    def read(self, phase):
        """Also adds the time of the all-reduces."""
        super().read(phase)
        for start, end in self.spans:
            self.seconds["comm_total"] += self.between(start, end)
        self.spans = ()


class TimedStage(PipelineStage):
    """Counts the time between the passes of micro-batches as bubble."""

    def mark(self, phase):
        if self.has_backward:  # it has none during validation
            self.watch.mark(phase)

    def forward_one_chunk(self, *args, **kwargs):
        self.mark("bubble")
        output = super().forward_one_chunk(*args, **kwargs)
        self.mark("forward")
        return output

    def loss(self, logits, targets):
        """Returns a micro-batch's part of the global mean loss, so that gradients just add up."""
        logits, targets = logits.float().flatten(0, 1), targets.flatten()
        loss = F.cross_entropy(logits, targets, reduction="sum") / self.num_tokens
        self.mark("forward")
        return loss

    def backward_one_chunk(self, *args, **kwargs):
        self.mark("bubble")
        super().backward_one_chunk(*args, **kwargs)
        self.mark("backward")


def create_schedule(args, watch, stage, group, device):
    """Returns the stage, which passes activations on to its neighbours, and the order of passes."""
    size = args.batch_size * args.num_stages // dist.get_world_size() // args.num_microbatches  # B
    with torch.device("meta"):  # only types and shapes
        tokens = torch.empty(size, args.seq_len, dtype=torch.int64)
        x = torch.empty(size, args.seq_len, args.d_model, requires_grad=True)
        logits = torch.empty(size, args.seq_len, args.vocab_size, dtype=DTYPES[args.precision])
    timed_stage = TimedStage(
        stage,
        dist.get_rank(group),
        args.num_stages,
        device,
        group=group,
        input_args=tokens if stage.is_first else x,
        output_args=logits if stage.is_last else x,
    )
    timed_stage.watch, timed_stage.num_tokens = watch, args.batch_size * args.seq_len
    return timed_stage, SCHEDULES[args.schedule](
        timed_stage, args.num_microbatches, timed_stage.loss, scale_grads=False
    )


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


def save_stages(args, stage, optimizer, progress, group):
    """Gathers the stages of the group's pipeline on rank 0, which saves them as one model."""
    if not args.snapshot or dist.get_rank() >= args.num_stages:
        return
    own = {}
    for name, weight in stage.named_parameters():
        moments = {key: value.cpu() for key, value in optimizer.state[weight].items()}
        own[name] = weight.detach().cpu(), moments
    stages = [None] * args.num_stages if stage.is_first else None
    dist.gather_object(own, stages, group=group)
    if stage.is_first:
        model = GPT(args)
        optimizer = create_optimizer(model, args)
        whole = {name: kept for part in stages for name, kept in part.items()}
        for name, weight in model.named_parameters():
            weight.data, optimizer.state[weight] = whole[name]
        scaler = torch.amp.GradScaler(enabled=False)
        save_snapshot(args, {"model": model, "optimizer": optimizer, "scaler": scaler}, progress)


def pass_through(run, stage, tokens, targets):
    """Runs a batch. Returns the sums (2,) of losses and tokens, which the last stage alone has."""
    losses = []
    inputs = [tokens] if stage.is_first else []
    more = {"target": targets, "losses": losses} if stage.is_last else {}
    run(*inputs, return_outputs=False, **more)  # the schedule's step or eval
    loss = sum(losses, torch.zeros((), device=targets.device)).detach() * stage.num_tokens
    return torch.stack((loss, stage.is_last * (targets >= 0).sum())).double()


def clip_gradients(stage, group):
    """Clips the gradients to a norm of 1 over all stages of the pipeline."""
    gradients = [
        weight.grad
        for name, weight in stage.named_parameters()
        if stage.is_first or name != "embedding.weight"
    ]  # the last stage has a copy
    square = nn.utils.get_total_norm(gradients) ** 2
    dist.all_reduce(square, group=group)
    nn.utils.clip_grads_with_norm_(stage.parameters(), 1.0, square.sqrt())


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
    timeout = timedelta(seconds=args.timeout)
    ranks = torch.arange(world_size).view(-1, args.num_stages)  # a pipeline in each row
    replicas, pipeline, ends = (
        dist.new_subgroups_by_enumeration(lists.tolist(), timeout)[0]
        for lists in (ranks.T, ranks, ranks[:, [0, -1]])
    )
    saving = dist.new_group(ranks[0].tolist(), timeout, "gloo")
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # on GPUs, fp32 layers compute in TF32
    train_tokens, val_tokens = read_tokens(args)
    num_steps = (len(train_tokens) // args.seq_len - 1) // args.batch_size
    if num_steps < 1 or len(val_tokens) <= args.seq_len * world_size:
        sys.exit(f"{args.dataset} is too short for this --seq_len and --batch_size")
    num_steps = min(num_steps, args.max_steps or sys.maxsize)
    val_tokens = torch.from_numpy(val_tokens.astype(np.int64)).to(device)
    val_split = val_tokens.unfold(0, args.seq_len + 1, args.seq_len)  # (M, T + 1)
    val_split = val_split[rank // args.num_stages :: len(ranks)]
    size = args.batch_size // len(ranks)
    val_split = F.pad(val_split, (0, 0, 0, -len(val_split) % size), value=-100)  # not counted
    val_batches = [(part[:, :-1].clamp(0), part[:, 1:]) for part in val_split.split(size)]

    torch.manual_seed(args.seed)
    model = GPT(args)
    num_parameters = sum(p.numel() for p in model.parameters())
    stage = Stage(model, args, rank % args.num_stages).to(device)  # loading the model fills it
    optimizer, whole_optimizer = create_optimizer(stage, args), create_optimizer(model, args)
    scaler = torch.amp.GradScaler(enabled=False)  # unused, but part of a snapshot
    progress = load_snapshot(args, {"model": model, "optimizer": whole_optimizer, "scaler": scaler})
    places = [None] * world_size
    dist.all_gather_object(places, (progress["epoch"], progress["step"]))
    if len(set(places)) > 1:
        sys.exit(f"the nodes see different files {args.snapshot}: use a shared file system")
    for parameter in stage.parameters():
        optimizer.state[parameter] = whole_optimizer.state[parameter]
    del model, whole_optimizer  # frees the other stages
    sizes = [parameter.numel() for parameter in stage.parameters()]
    gradients = torch.zeros(sum(sizes), device=device)  # one tensor, to send them at once
    for parameter, part in zip(stage.parameters(), gradients.split(sizes)):
        parameter.grad = part.view_as(parameter)
    watch = ReduceTimer(device)
    timed_stage, schedule = create_schedule(args, watch, stage, pipeline, device)

    settings = {name: getattr(args, name) for name in LOGGED} | {
        "script": "hybrid/gpt_pipeline.py",
        "processes": world_size,
        "nodes": nodes,
        "rank": rank,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "comm_hook": "none",
        "model": f"gpt-{args.num_layers}x{args.d_model}",
        "parameters": num_parameters,
    }
    if rank == 0:
        print(
            "{script}: {model}, {parameters:,} parameters; {dataset}, ".format_map(settings)
            + f"{len(train_tokens):,} + {len(val_tokens):,} tokens; stages {args.num_stages}"
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
        stage.train()
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
            sums = sums + pass_through(schedule.step, timed_stage, tokens, targets)
            reduced = watch.all_reduce(gradients, replicas)
            dist.all_reduce(torch.zeros(1, device=device), group=pipeline)
            watch.mark("bubble")  # until all stages have done the batch
            reduced.wait()
            if ends:
                watch.all_reduce(stage.embedding.weight.grad, ends).wait()
            watch.mark("comm")
            done = (epoch * num_steps + progress["step"] + 1) / (args.epochs * num_steps)
            factor = min(20 * done, 1.05 - done)  # rises for 5% of all steps, then falls linearly
            for group in optimizer.param_groups:
                group["lr"] = args.learning_rate * factor
            clip_gradients(stage, pipeline)
            optimizer.step()
            gradients.zero_()
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
                    save_stages(args, stage, optimizer, progress, saving)
                    watch.mark("save")
                if stop:
                    break
        if stop:
            break

        stage.eval()
        with torch.no_grad():
            val_sums = sum(pass_through(schedule.eval, timed_stage, *each) for each in val_batches)
        dist.all_reduce(val_sums)
        watch.read("eval")
        num_samples = max(0, num_steps - first_step) * args.batch_size
        row = gpt_row(settings, progress, val_sums, watch.seconds, num_samples)
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
        save_stages(args, stage, optimizer, progress, saving)
        watch.mark("save")
    if rows and rank == 0:
        means = print_summary(rows[world_size:] or rows, "val_loss")
        print(
            f"{means['hidden']:.0%} of the communication is hidden behind other stages' work\n"
            f"R = compute / communication = {means['R']:.1f}: above 3, more processes pay off"
        )
        theory = (args.num_stages - 1) / (args.num_microbatches + args.num_stages - 1)
        for number in range(args.num_stages):
            own = (rows[world_size:] or rows)[number :: args.num_stages]
            total = sum(row["bubble"] + row["forward"] + row["backward"] for row in own)
            bubble = sum(row["bubble"] for row in own) / total
            print(f"stage {number}: bubble {bubble:.1%} of its time, in theory {theory:.1%}")
    dist.barrier()  # rank 0 may still be saving
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
