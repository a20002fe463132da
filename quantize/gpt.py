"""Compare a trained GPT in fp32, bf16 and int8: size, perplexity and speed.

    python singlegpu/gpt.py --snapshot gpt.pt
    python quantize/gpt.py --snapshot gpt.pt            # a snapshot of any gpt.py
    sbatch slurm/quantize_gpt.slurm --snapshot gpt.pt   # trains a little without --snapshot

The weights of linear layers become int8 once, with a scale for each row. Their inputs become int8
in each call (dynamic), or never (weight-only). One text at a time is limited by memory bandwidth:
each token reads all weights. Prompts and many texts are limited by arithmetic.
torch.ao has the fastest kernels for CPUs and is deprecated. torchao, which follows it, needs
torch.compile. Its dynamic kernels need more than 16 tokens at once. Speeds are tokens/s: of one
text that goes on, of reading prompts of half --seq_len at once, and of as many texts that go on.
Shapes: B texts, P tokens of a prompt, T tokens, D = d_model, H heads, V vocabulary, L layers.
"""

import argparse
import copy
import io
import math
import os
import statistics
import sys
import sysconfig
import textwrap
import time
import warnings
from glob import glob

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

try:
    from torch.ao import quantization as torch_ao
except ImportError:  # it is deprecated: a later PyTorch may lack it
    torch_ao = None

KERNELS = {"torchao": ["torchao dynamic", "torchao weight-only"]}
if torch_ao:
    KERNELS["torch.ao"] = ["torch.ao"]


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--snapshot", metavar="FILE", required=True, help="what a gpt.py saved")
    add(
        "--backend",
        choices=KERNELS,
        help="library for int8; torch.ao is for CPUs",
        default="torch.ao" if torch_ao and not torch.cuda.is_available() else "torchao",
    )
    add("--batch_size", type=int, default=32, help="texts at once; torchao needs more than 16")
    add("--rounds", type=int, default=5, help="measurements of each speed; their median is printed")
    args = parser.parse_args()
    if args.rounds < 1 or args.batch_size < (17 if args.backend == "torchao" else 1):
        parser.error("--rounds or --batch_size is too small")
    return args


class Tokens(Dataset):
    """Token ids (N,) of an unsigned type, cut into sequences of --seq_len."""

    def __init__(self, tokens, args):
        self.tokens = tokens
        self.args = args

    def __len__(self):
        return max(0, len(self.tokens) - 1) // self.args.seq_len

    def __getitems__(self, indices):
        """Returns a whole batch: token ids (B, T) and the ids that follow them (B, T)."""
        starts = np.array(indices)[:, None] * self.args.seq_len
        ids = self.tokens[starts + np.arange(self.args.seq_len + 1)]  # (B, T + 1)
        if ids.max() >= self.args.vocab_size:
            raise ValueError(f"id {ids.max()} is not below --vocab_size {self.args.vocab_size}")
        ids = torch.from_numpy(ids.astype(np.int64))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()  # else they are pinned in vain


def read_data(args):
    """Returns the data to train on and to validate on, two map-style datasets."""
    try:
        if os.path.isdir(args.dataset):  # mapped, not read: they may be larger than memory
            splits = []
            for name in ("train", "val"):
                path = os.path.join(args.dataset, name)
                if os.path.exists(f"{path}.bin"):
                    tokens = np.memmap(f"{path}.bin", np.uint16, "r")
                else:
                    tokens = np.load(f"{path}.npy", mmap_mode="r")
                if tokens.ndim != 1 or tokens.dtype.kind != "u":
                    raise ValueError(f"{name} has ids of shape {tokens.shape}, {tokens.dtype}")
                splits.append(Tokens(tokens, args))
            return splits
        stdlib = sorted(glob(f"{sysconfig.get_path('stdlib')}/*.py"))  # about 5 MB
        paths = stdlib if args.dataset == "stdlib" else [args.dataset]
        text = np.concatenate([np.fromfile(path, np.uint8) for path in paths])
    except (OSError, ValueError) as error:
        sys.exit(f"cannot read {args.dataset}: {error}")
    num_val = min(len(text) // 10, 2**18)  # the last tenth, but at most 256 KiB
    return Tokens(text[:-num_val], args), Tokens(text[-num_val:], args)


def batch_loss(model, batch, args):
    """Returns the mean loss of a batch, and sums over its tokens. Rows show sums / count."""
    tokens, targets = batch
    loss = model(tokens, targets)  # in nats; exp(loss) is the perplexity
    return loss, {"loss": loss * targets.numel(), "count": targets.numel()}


class CachedBlock(nn.Module):
    """A GPTBlock with a cache (2, B, H, T, D / H) of the keys and values of earlier tokens."""

    def __init__(self, args):
        super().__init__()
        d_model = args.d_model
        self.n_heads = args.n_heads
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.projection = nn.Linear(d_model, d_model, bias=False)
        self.up = nn.Linear(d_model, 4 * d_model, bias=False)
        self.down = nn.Linear(4 * d_model, d_model, bias=False)

    def forward(self, x, cache, start):
        end = start + x.shape[1]
        qkv = self.qkv(self.norm1(x)).unflatten(2, (3, self.n_heads, -1))  # (B, T, 3, H, D / H)
        qkv = qkv.permute(2, 0, 3, 1, 4)  # (3, B, H, T, D / H)
        cache[:, :, :, start:end] = qkv[1:]
        k, v = cache[:, :, :, :end]
        causal = True if start == 0 else False  # torch.compile needs a plain bool
        y = F.scaled_dot_product_attention(qkv[0], k, v, is_causal=causal)
        x = x + self.projection(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CachedGPT(nn.Module):
    """A GPT that reads token ids (B, T). The cache has the keys of the `start` tokens before."""

    def __init__(self, args):
        super().__init__()
        self.embedding = nn.Embedding(args.vocab_size, args.d_model)
        self.positions = nn.Embedding(args.seq_len, args.d_model)
        self.blocks = nn.ModuleList([CachedBlock(args) for _ in range(args.num_layers)])
        self.norm = nn.LayerNorm(args.d_model)
        self.head = nn.Linear(args.d_model, args.vocab_size, bias=False)
        self.head.weight = self.embedding.weight

    def new_cache(self, num_texts, length):
        """Returns room for keys and values (L, 2, B, H, T, D / H)."""
        n_heads = self.blocks[0].n_heads
        weight = self.positions.weight
        head_size = weight.shape[1] // n_heads
        return weight.new_empty(len(self.blocks), 2, num_texts, n_heads, length, head_size)

    def forward(self, tokens, cache, start, num_logits):
        """Returns the logits (B, num_logits, V) of the tokens that follow the last ones."""
        x = self.embedding(tokens) + self.positions.weight[start : start + tokens.shape[1]]
        for block, block_cache in zip(self.blocks, cache):
            x = block(x, block_cache, start)  # (B, T, D)
        return self.head(self.norm(x[:, -num_logits:]))


def create_trained(args, weights):
    """Returns the model with these weights, and the sequences to test it on."""
    model = CachedGPT(args)
    model.load_state_dict(weights | {"head.weight": weights["embedding.weight"]})
    _, val_data = read_data(args)
    return model.eval(), val_data


def load_model(args):
    """Returns the trained model and data to test it on. Adds the training's settings to args."""
    try:
        snapshot = torch.load(args.snapshot, map_location="cpu", weights_only=True, mmap=True)
        for name, value in snapshot["settings"].items():
            if not hasattr(args, name):  # else it is a flag of this script
                setattr(args, name, value)
        return create_trained(args, snapshot["model"])
    except Exception as error:  # a damaged or foreign file can fail anywhere
        sys.exit(f"cannot load {args.snapshot}: {error!r}")


def quantize(model, kernels):
    """Returns a copy of the model in which linear layers, and torch.ao's LSTMs, are int8."""
    if kernels == "torch.ao":
        warnings.filterwarnings("ignore", ".*deprecated")
        layers = {
            nn.Linear: torch_ao.per_channel_dynamic_qconfig,
            nn.LSTM: torch_ao.default_dynamic_qconfig,
        }
        return torch_ao.quantize_dynamic(model, layers)
    import torchao.quantization as ao  # a slow import

    model = copy.deepcopy(model)
    for layer in model.modules():
        if type(layer) is nn.Linear:
            config = ao.Int8WeightOnlyConfig()
            fits = layer.in_features % 8 == layer.out_features % 8 == 0  # GPUs' kernels need that
            if kernels == "torchao dynamic" and fits:
                config = ao.Int8DynamicActivationInt8WeightConfig()
            ao.quantize_(layer, config)
    return model


def create_variants(model, backend):
    """Returns [(precision, kernels, model)]. On a GPU the rest of an int8 model is bf16."""
    on_gpu = next(model.parameters()).is_cuda
    cpu = torch.cpu.get_capabilities()
    kernels = "eager" if backend == "torch.ao" else "compiled"
    variants = [("fp32", kernels, model)]
    if on_gpu or cpu.get("avx512_bf16") or cpu.get("bf16"):  # x86, Arm
        variants.append(("bf16", kernels, copy.deepcopy(model).bfloat16()))
    else:
        print("bf16 is left out: this CPU has no instructions for it")
    base = variants[-1][2] if on_gpu else model
    for kernels in KERNELS[backend]:
        variants.append(("int8", kernels, quantize(base, kernels)))
    return variants


def megabytes(model):
    """Returns the size of the model's file."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return f"{file.tell() / 1e6:.1f}"


def print_table(rows):
    """Prints dicts as Markdown: a list of speeds as its median and its ratio to the first row's."""
    print("|", " | ".join(rows[0]), "|")
    print("|", " | ".join(["---"] * len(rows[0])), "|")
    for row in rows:
        cells = []
        for name, value in row.items():
            if isinstance(value, list):
                speed = statistics.median(value)
                ratio = speed / statistics.median(rows[0][name])
                value = "-" if math.isnan(speed) else f"{speed:.0f} {ratio:.2f}x"
            cells.append(value)
        print("|", " | ".join(cells), "|")


@torch.no_grad()
def perplexity(model, batches, args):
    """Returns exp of the mean loss in nats over batches of tokens (B, T) and the next ones."""

    def mean_loss(tokens, targets):
        logits = model(tokens, model.new_cache(*tokens.shape), 0, tokens.shape[1])
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    sums = [batch_loss(mean_loss, batch, args)[1] for batch in batches]
    total = sum(float(each["loss"]) for each in sums)
    return math.exp(total / sum(each["count"] for each in sums))


@torch.no_grad()
def generate(model, prompts, num_new):
    """Returns the likeliest tokens (B, num_new), and the seconds of the first and of the rest."""

    def now():
        if prompts.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    num_texts, length = prompts.shape
    cache = model.new_cache(num_texts, length + num_new)
    begin = now()
    tokens = [model(prompts, cache, 0, 1).argmax(2)]
    first = now()
    for start in range(length, length + num_new - 1):
        tokens.append(model(tokens[-1], cache, start, 1).argmax(2))
    end = now()
    return torch.cat(tokens, 1), first - begin, end - first


def tokens_per_second(model, kernels, prompts, num_new):
    """Returns the speeds of one text at a time, of reading prompts, and of many texts at once."""
    num_texts, length = prompts.shape
    one_text = math.nan
    if kernels != "torchao dynamic":  # needs more than 16 tokens at once
        _, _, rest = generate(model, prompts[:1], num_new)
        one_text = (num_new - 1) / rest
    _, first, rest = generate(model, prompts, num_new)
    return one_text, num_texts * length / first, num_texts * (num_new - 1) / rest


def main(args):
    has_kernels = torch.cuda.is_available() and args.backend == "torchao"  # torch.ao: for CPUs
    device = torch.device("cuda" if has_kernels else "cpu")
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs
    torch.compiler.config.recompile_limit = 64  # all variants count together
    model, data = load_model(args)
    model = model.to(device)
    batches = []
    for start in range(0, len(data), args.batch_size):
        indices = range(start, min(start + args.batch_size, len(data)))
        batches.append([part.to(device) for part in data.__getitems__(indices)])
    first_text = batches[0][0][:1]  # (1, T)
    prompts = first_text[:, : args.seq_len // 2].expand(args.batch_size, -1)  # (B, P)
    num_new = args.seq_len - prompts.shape[1]
    settings = vars(args) | {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(textwrap.fill(", ".join(f"{name} {value}" for name, value in settings.items()), 100))

    names = "one text", f"{len(prompts)} prompts", f"{len(prompts)} texts"
    variants = create_variants(model, args.backend)
    rows = []
    for precision, kernels, model in variants:
        row = {"precision": precision, "kernels": kernels, "MB": megabytes(model)}
        if args.backend == "torchao":
            model.compile()
        row["val_ppl"] = f"{perplexity(model, batches, args):.4f}"
        tokens_per_second(model, kernels, prompts, num_new)  # warms up, and compiles
        row |= {name: [] for name in names}
        rows.append(row)
    for _ in range(args.rounds):  # in turn, so that a slow moment of the machine meets all
        for row, (_, kernels, model) in zip(rows, variants):
            speeds = tokens_per_second(model, kernels, prompts, num_new)
            for name, speed in zip(names, speeds):
                row[name].append(speed)
    print_table(rows)


if __name__ == "__main__":
    main(parse_args())
