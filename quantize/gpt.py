r"""Compare a trained GPT in fp32, in bf16 and with dynamic int8 quantization: size, quality, speed, memory.

    python singlegpu/gpt.py --snapshot gpt.pt --max_steps 500
    python quantize/gpt.py --snapshot gpt.pt                   # also one of multigpu, multinode, hybrid
    python quantize/gpt.py --snapshot gpt.pt --save int8.pt    # the quantized weights, to be used:
    python quantize/gpt.py --load int8.pt
    sbatch slurm/quantize_gpt.slurm                            # trains a little first, if it gets no --snapshot

Weights become int8 beforehand, with one scale a row; the input of each layer when it comes, with a scale of its own.
Making a token reads every weight once, so it is memory that limits it, and small weights are quick to read; reading a
prompt, or several texts at once, is limited by arithmetic. Perplexity is of the whole validation split.
Backend torch.ao, for CPUs, is deprecated by torch and has the fastest kernels; torchao, its successor, is for GPUs (the
default there), and compiled. Shapes: B texts, P tokens of a prompt, T tokens, D = d_model, H heads, V vocabulary.
"""
import argparse
import ctypes
import io
import math
import os
import statistics
import sys
import sysconfig
import time
import warnings
import zipfile
from collections import Counter
from contextlib import suppress
from glob import glob

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

# What shapes the model, and its data.
NAMES = {"dataset": str, "vocab_size": int, "d_model": int, "n_heads": int, "num_layers": int, "seq_len": int}
PRECISIONS = ("fp32", "bf16", "int8")
TABLE = {"script": "", "model": "", "dataset": "", "precision": "", "backend": "", "device": "", "threads": "",
         "MB": ".2f", "val_ppl": ".4f", "against fp32": ".4f", "prompt tokens/s": ".0f", "ms a token": ".3f",
         "tokens/s": ".0f", "batch_size": "", "peak_MB": ".0f"}
# prompt tokens/s, ms a token: of one text; tokens/s: new ones of batch_size texts at once


def parse_args():
    parser = argparse.ArgumentParser(description="Compare a trained GPT in fp32, bf16 and int8.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = fail
    add = parser.add_argument
    add("--snapshot", metavar="FILE", help="what a gpt.py saved")
    add("--dataset", help="text to validate on, as for gpt.py; that of the training if not given")
    add("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="what to compare; bf16 can take long")
    add("--backend", choices=("torch.ao", "torchao"), default="torchao" if torch.cuda.is_available() else "torch.ao",
        help="of int8; torch.ao is for CPUs")
    add("--engine", default=torch.backends.quantized.engine, help="kernels of torch.ao")
    add("--batch_size", type=int, default=16, help="texts at once, for tokens/s and for the validation")
    add("--rounds", type=int, default=5, help="measurements of each time, in turn; their median is told")
    add("--threads", type=int, default=1, help="CPU threads")
    add("--save", metavar="FILE", help="write the int8 weights")
    add("--load", metavar="FILE", help="run int8 weights of --save, instead of --snapshot")
    args = parser.parse_args()
    check_numbers(args)
    return args


def fail(message):
    """End on a user's mistake: one line on stderr, exit status 2."""
    print(f"{sys.argv[0]}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def check_numbers(args):
    """Refuse numbers that cannot be, and files that cannot be written."""
    for name, value in vars(args).items():
        if type(value) is int and value < 1:
            fail(f"--{name} {value} is out of range")
    if bool(args.snapshot) == bool(args.load):
        fail("give one of --snapshot FILE, from the training, and --load FILE, from --save")
    if args.save and "int8" not in args.precisions:
        fail("--save writes int8 weights: they must be among --precisions")
    if args.save and (os.path.isdir(args.save) or not os.access(os.path.dirname(os.path.abspath(args.save)), os.W_OK)):
        fail(f"cannot write {args.save}: it is a folder, or its folder is missing or read-only")
    if args.backend == "torchao" and (args.save or args.load):
        fail("torchao's weights are objects of its own classes, which only unpickling would restore: --save and --load "
             "want --backend torch.ao")
    if args.backend == "torch.ao":
        try:
            from torch.ao.quantization import quantize_dynamic  # noqa: F401
        except ImportError:
            fail(f"torch {torch.__version__} no longer has torch.ao.quantization: take --backend torchao")
        if args.engine not in torch.backends.quantized.supported_engines or args.engine == "none":
            fail(f"--engine {args.engine}: this CPU has {', '.join(torch.backends.quantized.supported_engines)}")
        torch.backends.quantized.engine = args.engine


def read_weights(args, names):
    """Set in args the arguments of these names that shaped the model, and return its tensors by name."""
    path = args.load or args.snapshot
    try:
        if zipfile.ZipFile(path).testzip():  # torch.load does not look at the checksums
            raise ValueError("wrong checksum")
        snapshot = torch.load(path, map_location="cpu", weights_only=True)
        shape, kind = snapshot["settings"], "int8" if args.load else "model"
        fits = all(type(shape.get(name)) is known and (known is str or 0 < shape[name] < 1 << 31)
                   for name, known in names.items())
        if kind not in snapshot or not fits:
            raise ValueError(f"it is not {'of --save' if args.load else 'a snapshot'} of a {sys.argv[0]} model")
        dtypes = {tensor.numpy().dtype.name for tensor in snapshot[kind].values()}
        if not dtypes <= ({"int8", "float32", "float64"} if args.load else {"float32"}):
            raise ValueError(f"its tensors are {', '.join(sorted(dtypes))}")
        if not all(tensor.isfinite().all() for tensor in snapshot[kind].values()):
            raise ValueError("its weights are not finite")
        for name in names:
            if getattr(args, name, None) is None:
                setattr(args, name, shape[name])
        return snapshot[kind]
    except Exception as error:  # a foreign or damaged file can fail anywhere
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        fail(f"cannot read {path}: {reason}")


def load_weights(build, tensors, args):
    """The model that build makes, with these tensors."""
    try:
        with torch.device("meta"):
            model = build()
        model.load_state_dict(tensors, assign=True)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
        fail(f"{args.snapshot} does not fit the model: {reason}")
    return model.eval()


def quantize(model, args):
    """Linear layers, with a scale for each row, and LSTMs to int8 weights; their inputs are quantized as they come.

    Returns the model, and what was converted.
    """
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    sizes = {name: sum(parameter.numel() for parameter in module.parameters())
             for name, module in model.named_modules() if not [*module.children()]}
    if args.backend == "torch.ao":
        qconfigs = {nn.Linear: torch.ao.quantization.per_channel_dynamic_qconfig,
                    nn.LSTM: torch.ao.quantization.default_dynamic_qconfig}
        model = torch.ao.quantization.quantize_dynamic(model, qconfigs, inplace=True)
        converted = [name for name, module in model.named_modules()
                     if isinstance(module, (torch.ao.nn.quantized.dynamic.Linear, torch.ao.nn.quantized.dynamic.LSTM))]
    else:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_  # slow to import

        quantize_(model, Int8DynamicActivationInt8WeightConfig())
        converted = [name for name, module in model.named_modules()
                     if isinstance(module, nn.Linear) and type(module.weight) not in (torch.Tensor, nn.Parameter)]
    if not converted:
        fail("none of the model's modules can be quantized")
    total, left = sum(sizes.values()), [name for name, size in sizes.items() if size and name not in converted]
    groups = Counter(f"{kinds[name]} {name.split('.')[-1]}" for name in converted)
    return model, (f"converted: {', '.join(f'{count} x {group}' for group, count in groups.items())}: "
                   f"{sum(sizes[name] for name in converted) / total:.1%} of the parameters; left alone: "
                   f"{', '.join(sorted({name.split('.')[-1] for name in left})) or 'none'}: "
                   f"{sum(sizes[name] for name in left) / total:.1%}")


def backend_name(args):
    """Backend, and engine where there are several."""
    return args.backend if args.backend == "torchao" else f"{args.backend}/{args.engine}"


def int8_tensors(model):
    """What a model of torch.ao consists of, by name, as plain tensors: int8 weights, their scales, and the others."""
    tensors, quantized = {}, torch.ao.nn.quantized.dynamic
    for prefix, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if isinstance(module, quantized.LSTM):
            own = module.get_weight() | module.get_bias()
        if isinstance(module, quantized.Linear):
            own = {"weight": module.weight(), "bias": module.bias()}
        for name, tensor in own.items():
            name = f"{prefix}.{name}"
            if tensor is None:
                continue
            if not tensor.is_quantized:
                tensors[name] = tensor.detach()
            elif tensor.qscheme() == torch.per_tensor_affine:
                tensors |= {f"{name}.int8": tensor.int_repr(), f"{name}.scale": torch.tensor(tensor.q_scale())}
            else:
                tensors |= {f"{name}.int8": tensor.int_repr(), f"{name}.scale": tensor.q_per_channel_scales()}
    return tensors


def load_int8(build, tensors, args):
    """The model that build makes, quantized, with what int8_tensors gave; and what is int8 in it."""
    try:
        with torch.device("meta"):
            shapes = {name: tensor.shape for name, tensor in build().state_dict().items()}
        if shapes != {name: tensors.get(f"{name}.int8", tensors.get(name)).shape for name in shapes}:
            raise ValueError("its tensors are of other sizes")
        model, converted = quantize(build(), args)
        weights, quantized = dict(tensors), torch.ao.nn.quantized.dynamic
        for name in [name.removesuffix(".int8") for name in tensors if name.endswith(".int8")]:
            integers, scale = weights.pop(f"{name}.int8"), weights.pop(f"{name}.scale")
            if integers.dtype != torch.int8:
                raise ValueError(f"{name}: {integers.dtype}")
            if scale.dim():
                real = integers.double() * scale.double()[:, None]
                zeros = torch.zeros(len(scale), dtype=torch.int64)
                weights[name] = torch.quantize_per_channel(real.float(), scale, zeros, 0, torch.qint8)
            else:
                weights[name] = torch.quantize_per_tensor(integers * scale, scale, 0, torch.qint8)
        for prefix, module in model.named_modules():
            own = {name.removeprefix(f"{prefix}."): weights[name] for name in shapes
                   if name.rpartition(".")[0] == prefix and name in weights}
            if isinstance(module, quantized.LSTM):
                module.set_weight_bias(own)
            elif isinstance(module, quantized.Linear):
                module.set_weight_bias(own["weight"], own.get("bias"))
            elif own:
                module.load_state_dict(own)
        return model.eval(), converted
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        fail(f"{args.load} does not fit the model: {reason}")


def save_int8(model, names, args):
    """Write a model of torch.ao for --load: tensors and numbers, no objects."""
    saved = {"int8": int8_tensors(model), "settings": {name: getattr(args, name) for name in names}}
    try:
        torch.save(saved, args.save + ".tmp")
        os.replace(args.save + ".tmp", args.save)
    except (OSError, RuntimeError) as error:
        fail(f"cannot write {args.save}: {error}")


def size_on_disk(model, precision, args):
    """Bytes of the model's file."""
    file = io.BytesIO()
    is_int8 = precision == "int8" and args.backend == "torch.ao"
    torch.save(int8_tensors(model) if is_int8 else model.state_dict(), file)
    return file.tell()


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


class CachedBlock(nn.Module):
    """A GPT's Block for inference; keeps the keys and values of the tokens before in a cache (2, B, H, T, D / H)."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.norm1, self.norm2 = n_heads, nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv, self.projection = nn.Linear(d_model, 3 * d_model, False), nn.Linear(d_model, d_model, False)
        self.up, self.down = nn.Linear(d_model, 4 * d_model, False), nn.Linear(4 * d_model, d_model, False)

    def forward(self, x, cache, start):  # few operations: for a token or two their overhead counts
        new = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)  # of q, k, v
        cache.narrow(3, start, x.shape[1]).copy_(new[1:])
        k, v = cache.narrow(3, 0, start + x.shape[1]).unbind()
        y = F.scaled_dot_product_attention(new[0], k, v, is_causal=start == 0)
        x = x + self.projection(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CachedGPT(nn.Module):
    """A GPT for inference: token ids (B, T) that follow `start` others, and a cache of these, to (B, T, D).

    Then head makes logits (B, T, V) of those that are wanted.
    """

    def __init__(self, vocab_size, d_model, n_heads, num_layers, seq_len):
        super().__init__()
        self.n_heads = n_heads
        self.embedding, self.positions = nn.Embedding(vocab_size, d_model), nn.Embedding(seq_len, d_model)
        self.blocks = nn.ModuleList(CachedBlock(d_model, n_heads) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(d_model), nn.Linear(d_model, vocab_size, False)

    def new_cache(self, batch_size, length):
        """(L, 2, B, H, T, D / H) for texts of this length."""
        weight = self.positions.weight
        return weight.new_empty(len(self.blocks), 2, batch_size, self.n_heads, length, weight.shape[1] // self.n_heads)

    def forward(self, tokens, cache, start=0):
        x = self.embedding(tokens) + self.positions.weight[start:start + tokens.shape[1]]  # (B, T, D)
        for block, block_cache in zip(self.blocks, cache):
            x = block(x, block_cache, start)
        return self.norm(x)


def create_model(args, tensors, precision, device):
    """The model with these weights, in this precision; and, of int8, what was converted."""
    def build():
        num_layers = min(args.num_layers, len(tensors))  # a wrong number must not take forever
        return CachedGPT(args.vocab_size, args.d_model, args.n_heads, num_layers, args.seq_len)

    if args.load:
        return load_int8(build, tensors, args)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    model = load_weights(build, tensors | {"head.weight": tensors.get("embedding.weight")}, args).to(device)
    converted = None
    if precision == "bf16":
        model.bfloat16()
    if precision == "int8":
        model, converted = quantize(model, args)
    if args.backend == "torchao":  # which alone is slow; so are all
        model.compile()
    return model, converted


def create_dataloader(tokens, args, device):
    """Yields token ids (B, T) and those that follow them (B, T) of the whole split, in sequences of --seq_len."""
    starts = np.arange(0, len(tokens) - args.seq_len, args.seq_len)
    for first in range(0, len(starts), args.batch_size):
        batch = np.asarray(tokens)[starts[first:first + args.batch_size, None] + np.arange(args.seq_len + 1)]
        batch = torch.from_numpy(batch.astype(np.int64)).to(device)
        if batch.max() >= args.vocab_size:
            fail(f"--dataset {args.dataset}: token id {batch.max()} is beyond the model's {args.vocab_size}")
        yield batch[:, :-1], batch[:, 1:]


@torch.no_grad()
def perplexity(model, tokens, args, device):
    """exp of the mean loss in nats of the tokens."""
    total, count = 0.0, 0
    for inputs, targets in create_dataloader(tokens, args, device):
        logits = model.head(model(inputs, model.new_cache(*inputs.shape)))
        total += F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum").item()
        count += targets.numel()
    return math.exp(min(total / count, 100))


@torch.no_grad()
def generate(model, prompts, num_new):
    """The likeliest continuation (B, num_new) of prompts (B, P); seconds for its first token, and for all others."""
    def now():
        if prompts.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    length = prompts.shape[1]
    cache, start = model.new_cache(len(prompts), length + num_new), now()
    tokens = [model.head(model(prompts, cache)[:, -1:]).argmax(2)]
    first = now()
    for position in range(length, length + num_new - 1):
        tokens.append(model.head(model(tokens[-1], cache, position)).argmax(2))
    return torch.cat(tokens, 1), first - start, now() - first


def peak_memory(device):
    """The most bytes in use since the last call: allocated on the GPU or, on a CPU, resident in the process."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    peak = math.nan
    with suppress(OSError):  # not Linux
        with open("/proc/self/status") as file:
            peak = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    return peak


def print_row(columns, row=None):
    """A row of a Markdown table or, without `row`, its head."""
    cells = (format(row[name], spec).replace("nan", "-") if row else name for name, spec in columns.items())
    print("|", " | ".join(cell.rjust(max(7, len(name))) for cell, name in zip(cells, columns)), "|")


def memory_in_use(device):
    """Bytes: allocated on the GPU or, on a CPU, resident in the process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with suppress(OSError, AttributeError):  # not Linux, or no glibc
        ctypes.CDLL(None).malloc_trim(0)  # what was freed does not count
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))
    return math.nan


def main(args):
    sys.stdout.reconfigure(line_buffering=True)
    warnings.filterwarnings("ignore", ".*deprecated")
    device = torch.device("cuda" if torch.cuda.is_available() and args.backend == "torchao" else "cpu")
    torch.set_num_threads(args.threads)
    tensors = read_weights(args, NAMES)
    if args.seq_len < 4:
        fail(f"sequences of {args.seq_len} tokens are too short for a prompt and what follows it")
    if args.d_model % args.n_heads:
        fail(f"a width of {args.d_model} does not divide into {args.n_heads} heads")
    _, tokens = read_tokens(args)
    prompts = torch.from_numpy(tokens[:args.seq_len // 2].astype(np.int64)).expand(args.batch_size, -1).to(device)
    num_new = args.seq_len - prompts.shape[1]
    shared = {"script": "quantize/gpt.py", "model": f"gpt-{args.num_layers}x{args.d_model}", "dataset": args.dataset,
              "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU", "threads": args.threads,
              "batch_size": args.batch_size}
    print(f"quantize/gpt.py: {shared['model']}, vocabulary {args.vocab_size}; {args.dataset}, {len(tokens):,} tokens "
          f"to validate on; prompts of {prompts.shape[1]} tokens, {num_new} more; {shared['device']}, {args.threads} "
          f"thread(s); int8 by {backend_name(args)}; torch {torch.__version__}")
    precisions = ("int8",) if args.load else args.precisions
    generate(create_model(args, tensors, precisions[0], device)[0], prompts, num_new)  # takes what is taken once
    models, rows = {}, {}
    for precision in precisions:
        before = memory_in_use(device)
        peak_memory(device)
        models[precision], converted = create_model(args, tensors, precision, device)
        if converted:
            print(f"int8: {converted}")
        rows[precision] = shared | {"precision": precision, "backend": backend_name(args) if converted else "",
                                    "val_ppl": perplexity(models[precision], tokens, args, device)}
        for batch in (prompts[:1], prompts):
            generate(models[precision], batch, num_new)
        rows[precision]["peak_MB"] = (peak_memory(device) - before) / 1e6
        rows[precision]["MB"] = size_on_disk(models[precision], precision, args) / 1e6
    seconds = {precision: [] for precision in models}
    for _ in range(args.rounds):
        for precision, model in models.items():
            alone, together = generate(model, prompts[:1], num_new), generate(model, prompts, num_new)
            seconds[precision].append((*alone[1:], together[2]))
    print_row(TABLE)
    for precision, row in rows.items():
        prompt, rest, rest_of_many = (statistics.median(times) for times in zip(*seconds[precision]))
        print_row(TABLE, row | {
            "against fp32": row["val_ppl"] / rows["fp32"]["val_ppl"] if "fp32" in rows else math.nan,
            "prompt tokens/s": prompts.shape[1] / prompt, "ms a token": 1000 * rest / (num_new - 1),
            "tokens/s": args.batch_size * (num_new - 1) / rest_of_many})
    if args.save:
        save_int8(models["int8"], NAMES, args)


if __name__ == "__main__":
    main(parse_args())
