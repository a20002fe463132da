"""Compare a trained GPT in fp32, bf16, int8, int4 and float8: size, quality and speed.

    python singlegpu/gpt.py --snapshot gpt.pt
    python quantize/gpt.py --snapshot gpt.pt           # a snapshot of any gpt.py
    python quantize/gpt.py --snapshot gpt.pt --row int8-torch.ao --out int8.pt

What --out saved is loaded and used like this, with PYTHONPATH=quantize:

    import gpt, torch
    model, args = gpt.load_quantized("int8.pt")
    prompt = torch.tensor([list(b"def main(")])    # (1, P): here, a token is a byte
    tokens = gpt.generate(model, prompt, num_new=20)
    print(bytes(tokens[0].tolist()))

Rows: *-dynamic has int8 or float8 weights, and scales its inputs in each call. *-weights has int8
or int4 weights, and leaves the inputs as they are. In -g32, 32 weights share a scale. int8-torch.ao
is dynamic, by PyTorch's older library, and the other rows are by torchao. The older one scales all
inputs of a batch alike: a logit depends on the rest of its batch. int8-dynamic scales each token
alone. In torchao's int4 rows and, on GPUs, in all of its rows the rest of the model is bf16:
compare them with the row bf16. What this machine or torch.compile cannot run is left out. 1.50x is
1.5 times as fast as fp32 in the same mode. On GPUs, fp32 is TF32.
Columns: MB is the file's size. "same %" is how often the likeliest token is that of fp32. Speeds
are in tokens/s: one text is written, --batch_size prompts of half --seq_len are read, and as many
texts are written.
Shapes: B texts, P tokens of a prompt, T tokens, D = d_model, H heads, V vocabulary, L layers.
"""

import argparse
import copy
import io
import os
import sys
import sysconfig
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import torchao.quantization as ao
import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer  # noqa: F401, for torch.compile
from numpy.lib.stride_tricks import sliding_window_view
from torch import nn
from torch.utils.data import StackDataset
from torchao.utils import should_reduce_range

ROWS = "fp32 bf16 int8-torch.ao int8-dynamic int8-weights int4-weights-g32 float8-dynamic".split()
COLUMNS = ["row", "mode", "MB", "val_ppl", "same %", "one text", "prompts", "texts"]


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--snapshot", metavar="FILE", required=True, help="what a gpt.py saved")
    add("--dataset", default=argparse.SUPPRESS, help="the data of the training, if moved")
    add("--row", choices=ROWS, help="measure only this row, beside fp32")
    add("--out", metavar="FILE", help="save the model of --row")
    add("--eager", action="store_true", help="leave out the compiled rows: compiling takes minutes")
    add("--batch_size", type=int, default=32, help="texts at once; at least 17 for int8 on GPUs")
    add("--num_samples", type=int, default=0, help="texts to test the quality on; 0: all")
    add("--rounds", type=int, default=5, help="measurements of each speed; their median is printed")
    args = parser.parse_args()
    if args.out and not args.row:
        parser.error("--out needs --row")
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


class CachedBlock(nn.Module):
    """A GPTBlock with a cache (2, B, H, T, D / H) of the keys and values of earlier tokens."""

    def __init__(self, args):
        super().__init__()
        d_model, self.n_heads = args.d_model, args.n_heads
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.projection = nn.Linear(d_model, d_model, bias=False)
        self.up = nn.Linear(d_model, 4 * d_model, bias=False)
        self.down = nn.Linear(4 * d_model, d_model, bias=False)

    def forward(self, x, cache, start):
        end = start + x.shape[1]
        qkv = self.qkv(self.norm1(x)).unflatten(2, (3, self.n_heads, -1))  # (B, T, 3, H, D / H)
        qkv = qkv.permute(2, 0, 3, 1, 4)  # (3, B, H, T, D / H)
        cache[:, :, :, start:end] = qkv[1:]
        causal = True if start == 0 else False  # torch.compile needs a plain bool
        y = F.scaled_dot_product_attention(qkv[0], *cache[:, :, :, :end], is_causal=causal)
        x = x + self.projection(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CachedGPT(nn.Module):
    """A GPT that reads token ids (B, T). Its cache holds keys and values of the `start` before."""

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
        n_heads, d_model = self.blocks[0].n_heads, self.norm.weight.numel()
        shape = (len(self.blocks), 2, num_texts, n_heads, length, d_model // n_heads)
        return self.positions.weight.new_empty(shape)

    def forward(self, tokens, cache, start, num_logits):
        """Returns the logits (B, num_logits, V) of the tokens that follow the last ones."""
        x = self.embedding(tokens) + self.positions.weight[start : start + tokens.shape[1]]
        for block, block_cache in zip(self.blocks, cache):
            x = block(x, block_cache, start)  # (B, T, D)
        return self.head(self.norm(x[:, -num_logits:]))


def load_trained(args):
    """Returns the trained model and data to test it on. Adds the training's settings to args."""
    snapshot = torch.load(args.snapshot, map_location="cpu", weights_only=True, mmap=True)
    vars(args).update(snapshot["settings"] | vars(args))  # flags of this script stay
    weights = snapshot["model"]
    model = CachedGPT(args)
    model.load_state_dict(weights | {"head.weight": weights["embedding.weight"]})
    train_data, val_data = read_data(args)
    if len(train_data) != snapshot["settings"]["num_samples"]:
        sys.exit(f"{args.dataset} has changed: the model may have been trained on its end")
    return model.eval(), val_data


@torch.no_grad()
def generate(model, prompts, num_new):
    """Returns the likeliest tokens (B, num_new) after prompts (B, P). All must fit in --seq_len."""
    length, seq_len = prompts.shape[1], len(model.positions.weight)
    if length + num_new > seq_len + 1:  # the last one is not read
        raise ValueError(f"{length} and {num_new} tokens do not fit in --seq_len {seq_len}")
    cache = model.new_cache(len(prompts), length + num_new)
    tokens = [model(prompts, cache, 0, 1).argmax(2)]  # (B, 1)
    for start in range(length, length + num_new - 1):
        tokens.append(model(tokens[-1], cache, start, 1).argmax(2))
    return torch.cat(tokens, 1)


def test(model, batches):
    """Returns the perplexity, and the likeliest next tokens (N,), of batches (B, T + 1)."""
    losses, likeliest = [], []
    for batch in batches:
        tokens, targets = batch[:, :-1], batch[:, 1:]
        logits = model(tokens, model.new_cache(*tokens.shape), 0, tokens.shape[1]).flatten(0, 1)
        losses.append(F.cross_entropy(logits.float(), targets.flatten(), reduction="none"))
        likeliest.append(logits.argmax(1))
    return torch.cat(losses).mean().exp().item(), torch.cat(likeliest).cpu().numpy()


def measure(row, model, texts, args):
    """Returns tokens/s of one text at a time, of reading prompts, and of many texts at once."""
    half = args.seq_len // 2

    def speed(num_texts, length, num_new):
        prompts = texts[:1, :length].repeat(num_texts, 1)  # (B, P)
        start = time.perf_counter()
        generate(model, prompts, num_new).cpu()  # waits for the device
        return num_texts * (length + num_new - 1) / (time.perf_counter() - start)

    one_text = np.nan
    if (row, texts.device.type) != ("int8-dynamic", "cuda"):  # cuBLAS needs 17 tokens
        one_text = speed(1, 1, half)
    return one_text, speed(args.batch_size, half, 1), speed(args.batch_size, 1, half)


def quantize(model, row):
    """Returns a copy of the model for a row of the table. An error says why there is none."""
    device = next(model.parameters()).device
    on_cpu = device.type == "cpu"
    model = copy.deepcopy(model)
    if row == "fp32":
        return model
    if row == "bf16":
        cpu = torch.cpu.get_capabilities()
        if on_cpu and not (cpu.get("avx512_bf16") or cpu.get("bf16")):  # x86, Arm
            raise NotImplementedError("this CPU has no instructions for it")
        return model.bfloat16()
    if row == "int8-torch.ao":
        if not on_cpu:
            raise NotImplementedError("torch.ao is for CPUs")
        from torch.ao import quantization  # deprecated: a later PyTorch may lack it

        warnings.filterwarnings("ignore", ".*deprecated")
        layers = {nn.Linear: quantization.per_channel_dynamic_qconfig}
        return quantization.quantize_dynamic(model, layers)
    if device.type not in ("cpu", "cuda", "xpu"):
        raise NotImplementedError(f"torchao has no kernels for {device.type}")
    config, multiple = torchao_config(row, device)
    fits = report_what_fits(model, row, multiple)
    if row.startswith("int4") or not on_cpu:  # on CPUs, int4 kernels are fast in bf16 alone
        model.bfloat16()
    ao.quantize_(model, config, fits)
    return model


def torchao_config(row, device):
    """Returns torchao's configuration, and the number of which layers' sizes must be multiples."""
    on_cpu = device.type == "cpu"
    multiple = 1 if on_cpu else 16  # kernels need it
    if row == "int8-dynamic":
        # A CPU without VNNI adds two products in 16 bits, which 8-bit factors overflow.
        reduce_range = should_reduce_range(device)
        return ao.Int8DynamicActivationInt8WeightConfig(reduce_range=reduce_range), multiple
    if row == "int8-weights":
        return ao.Int8WeightOnlyConfig(), multiple
    if row == "float8-dynamic":
        return ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow()), multiple
    group_size = 32  # weights that share a scale
    if on_cpu:
        # A prototype may move. Imported here, it takes this row alone with it.
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        return PrototypeInt4WeightOnlyConfig(group_size=group_size), group_size
    packing = "tile_packed_to_4d" if device.type == "cuda" else "plain_int32"
    config = ao.Int4WeightOnlyConfig(group_size=group_size, int4_packing_format=packing)
    return config, group_size


def report_what_fits(model, row, multiple):
    """Returns a filter of layers for torchao, and names the linear layers that do not pass it."""

    def fits(layer, name=""):
        if type(layer) is not nn.Linear:
            return False
        return all(size % multiple == 0 for size in layer.weight.shape)

    if not any(fits(layer) for layer in model.modules()):
        raise NotImplementedError(f"no linear layer has sizes that are multiples of {multiple}")
    for name, layer in model.named_modules():
        if type(layer) is nn.Linear and not fits(layer):
            print(f"{row}: {name} is not quantized: no multiple of {multiple}", file=sys.stderr)
    return fits


def load_quantized(file, device="cpu"):
    """Returns a model that --out saved on this kind of device, and the settings of its training."""
    saved = torch.load(file, map_location=device, weights_only=True)
    args = argparse.Namespace(**saved["settings"])
    model = CachedGPT(args).eval()
    if args.row == "int8-torch.ao":
        model = quantize(model, args.row)
    model.load_state_dict(saved["model"], assign=True)
    return model, args


@torch.no_grad()
def main(args):
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs
    torch.backends.cuda.enable_cudnn_sdp(False)  # it builds a plan for each new shape
    torch.compiler.config.recompile_limit = 1000  # all rows and layers count together
    torch.compiler.config.accumulated_recompile_limit = 1000
    # On CPUs, int8 products are fast where torch.compile may take weights for constants.
    options = {"freezing": True} if device.type == "cpu" else None
    trained, data = load_trained(args)
    trained.to(device)
    indices = np.linspace(0, len(data) - 1, args.num_samples or len(data)).astype(int)
    parts = np.array_split(indices, max(1, len(indices) // args.batch_size))
    batches = [torch.from_numpy(data[part][0]).long().to(device) for part in parts]

    print(f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"| {' | '.join(COLUMNS)} |\n{'| --- ' * len(COLUMNS)}|")
    for mode in ["eager"] if args.eager else ["eager", "compiled"]:
        for row in dict.fromkeys(["fp32", args.row]) if args.row else ROWS:
            try:
                model = quantize(trained, row)
                file = io.BytesIO()
                torch.save({"settings": vars(args), "model": model.state_dict()}, file)
                if mode == "compiled":
                    # Without fullgraph, a model that does not compile runs eagerly, and so do all
                    # after it, fp32 too: PyTorch then skips the function that they share.
                    model.forward = torch.compile(model.forward, fullgraph=True, options=options)
                score, answers = test(model, batches)
                run = partial(measure, row, model, batches[0], args)
                run()  # warms up
                if args.out and (row, mode) == (args.row, "eager"):
                    load_quantized(io.BytesIO(file.getvalue()), device)  # must be loadable
                    Path(args.out).write_bytes(file.getvalue())
            except Exception as error:
                print(f"| {row} | {mode} | left out: {' '.join(str(error).split()):.200} |")
                if row in ("fp32", args.row):  # nothing is left to compare
                    sys.exit(mode == "eager")  # status 1
                continue
            if row == "fp32":
                fp32_run, fp32_score, fp32_answers = run, score, answers
            cells = [row, mode, f"{file.tell() / 1e6:.1f}"]
            cells.append(f"{score:.5g} {score - fp32_score:+.2g}")
            cells.append(f"{100 * np.mean(answers == fp32_answers):.1f}")
            runs = dict.fromkeys([fp32_run, run])  # the row fp32 has one: its ratio is 1.00x
            rounds = [[each() for each in runs] for _ in range(args.rounds)]  # in turn
            for fp32_speed, speed in np.median(rounds, 0)[[0, -1]].T:
                cells.append("-" if np.isnan(speed) else f"{speed:.4g} {speed / fp32_speed:.2f}x")
            print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main(parse_args())
