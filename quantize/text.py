r"""Compare a trained text classifier in fp32, in bf16 and with dynamic int8 quantization: size, quality, speed, memory.

    python singlegpu/text.py --model transformer --snapshot text.pt
    python quantize/text.py --snapshot text.pt                   # also one of multigpu, multinode
    python quantize/text.py --snapshot text.pt --save int8.pt    # the quantized weights, to be used:
    python quantize/text.py --load int8.pt
    sbatch slurm/quantize_text.slurm                             # trains a little first, if it gets no --snapshot

Weights become int8 beforehand, with one scale a row; the input of each layer when it comes, with a scale of its own.
Accuracy is of the whole test split. Backend torch.ao, for CPUs, is deprecated by torch and has the fastest kernels;
torchao, its successor, is for GPUs (the default there), and compiled.
Shapes: B texts, T tokens of the longest, D = d_model, H heads, K classes.
"""
import argparse
import ctypes
import io
import json
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from contextlib import suppress

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

CLASSES = {"synthetic": 4, "ag_news": 4, "imdb": 2}
HUB = {"ag_news": "fancyzhx/ag_news", "imdb": "stanfordnlp/imdb"}  # where a data set is that --data_dir lacks
SIZES = {"small": (128, 4, 512, 2), "large": (256, 8, 1024, 4)}  # d_model, n_heads, dim_feedforward, num_layers
VOCAB_SIZE = 20_000  # the most frequent words, each seen twice or more; 0 fills up, 1 is any other word
# What shapes the model, and its data.
NAMES = {"model": str, "size": str, "dataset": str, "seq_len": int}
PRECISIONS = ("fp32", "bf16", "int8")
TABLE = {"script": "", "model": "", "dataset": "", "precision": "", "backend": "", "device": "", "threads": "",
         "MB": ".2f", "val_acc": ".4f", "against fp32": ".4f", "ms a text": ".3f", "samples/s": ".1f",
         "batch_size": "", "peak_MB": ".0f"}


def parse_args():
    parser = argparse.ArgumentParser(description="Compare a trained text classifier in fp32, bf16 and int8.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = fail
    add = parser.add_argument
    add("--snapshot", metavar="FILE", help="what a text.py saved")
    add("--data_dir", default="data", help="folder that holds the data set's own folder, and receives its tokens")
    add("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="what to compare; bf16 can take long")
    add("--backend", choices=("torch.ao", "torchao"), default="torchao" if torch.cuda.is_available() else "torch.ao",
        help="of int8; torch.ao is for CPUs")
    add("--engine", default=torch.backends.quantized.engine, help="kernels of torch.ao")
    add("--batch_size", type=int, default=64, help="texts at once, for samples/s and for the validation")
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
        shape, kind = snapshot["args"], "int8" if args.load else "model"
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
    saved = {"int8": int8_tensors(model), "args": {name: getattr(args, name) for name in names}}
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


def memory_in_use(device):
    """Bytes: allocated on the GPU or, on a CPU, resident in the process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with suppress(OSError, AttributeError):  # not Linux, or no glibc
        ctypes.CDLL(None).malloc_trim(0)  # what was freed does not count
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))
    return math.nan


def print_row(columns, row=None):
    """A row of a Markdown table or, without `row`, its head."""
    cells = (format(row[name], spec).replace("nan", "-") if row else name for name, spec in columns.items())
    print("|", " | ".join(cell.rjust(max(7, len(name))) for cell, name in zip(cells, columns)), "|")


def synthetic_texts(num_texts, seed):
    """Texts of 5 to 200 random words, a tenth of them from the 50 that their class prefers: ids, ends, labels."""
    random = np.random.default_rng(seed)
    labels, lengths = random.integers(CLASSES["synthetic"], size=num_texts), random.integers(5, 201, num_texts)
    ends = np.concatenate(([0], lengths.cumsum()))
    words, preferred = random.integers(2, 1000, ends[-1]), random.random(ends[-1]) < 0.1
    return np.where(preferred, 2 + words % 50 + 50 * labels.repeat(lengths), words), ends, labels


def tokenize(args, folder):
    """Learn the vocabulary from the training texts and write it, with the tokens of all texts, to the folder."""
    import datasets  # here: when the tokens are there, nobody needs these packages, or the seconds that they take
    import tokenizers

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    source = f"{args.data_dir}/{args.dataset}"
    splits = datasets.load_dataset(source if os.path.isdir(source) else HUB[args.dataset])
    for split in ("train", "test"):
        if split not in splits or not {"text", "label"} <= set(splits[split].column_names):
            raise ValueError(f"no columns `text` and `label` in the split {split} of {splits}")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # words, and runs of other characters
    trainer = tokenizers.trainers.WordLevelTrainer(vocab_size=VOCAB_SIZE, min_frequency=2, show_progress=False,
                                                   special_tokens=["[PAD]", "[UNK]"])
    tokenizer.train_from_iterator((text or "" for text in splits["train"]["text"]), trainer)
    os.makedirs(args.data_dir, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.data_dir, ignore_cleanup_errors=True) as work:
        tokenizer.save(f"{work}/vocabulary.json")
        for split in ("train", "test"):
            ids, lengths = [], []
            for batch in splits[split].iter(1000):  # some at a time: encodings are large
                for encoding in tokenizer.encode_batch_fast([text or "" for text in batch["text"]]):
                    ids.append(np.array(encoding.ids or [1], np.uint16))  # an empty text is an unknown word
                    lengths.append(len(ids[-1]))
            arrays = np.concatenate(ids), np.concatenate(([0], np.cumsum(lengths))), np.array(splits[split]["label"])
            check_texts(*arrays, CLASSES[args.dataset])
            for name, array in zip(("ids", "ends", "labels"), arrays):
                np.save(f"{work}/{split}_{name}.npy", array)
        os.chmod(work, 0o755)
        with suppress(OSError):  # another job was faster
            os.rename(work, folder)


def check_tokens(ids, ends, vocab_size, shortest):
    """Raise ValueError unless these are the ids of texts of `shortest` tokens or more, and where each ends (N + 1,)."""
    known = ids.ndim == ends.ndim == 1 and ids.dtype.kind in "iu" and 0 <= ids.min() <= ids.max() < vocab_size
    if not (known and ends.dtype == np.int64 and ends.min() == ends[0] == 0 and ends.max() == ends[-1] == len(ids)
            and np.diff(ends).min() >= shortest):
        raise ValueError(f"{len(ids)} tokens ({ids.dtype}) are not those of {len(ends) - 1} texts ({ends.dtype})")


def check_texts(ids, ends, labels, num_classes):
    """Raise ValueError unless these are the token ids of all texts, where each ends (N + 1,) and labels (N,)."""
    if labels.shape != (len(ends) - 1,) or len(ends) < 2 or ends[-1] != len(ids):
        raise ValueError(f"{len(labels)} labels of {len(ends) - 1} texts, of {len(ids)} tokens")
    if labels.dtype.kind not in "iu":
        raise ValueError(f"labels are {labels.dtype}, not numbers")
    if labels.min() < 0 or labels.max() >= num_classes:
        raise ValueError(f"labels from {labels.min()} to {labels.max()} instead of 0 to {num_classes - 1}")


def read_texts(args):
    """The training and the test split, each as token ids of all texts, where each ends (N + 1,), labels (N,); V."""
    folder, splits = f"{args.data_dir}/{args.dataset}_tokens", []
    try:
        if args.dataset == "synthetic":
            splits, vocab_size = [synthetic_texts(size, size) for size in (20_000, 2_000)], 1000
        else:
            if not os.path.isdir(folder):
                tokenize(args, folder)
            with open(f"{folder}/vocabulary.json") as file:
                vocab_size = len(json.load(file)["model"]["vocab"])
            splits = [[np.load(f"{folder}/{split}_{name}.npy", "r") for name in ("ids", "ends", "labels")]
                      for split in ("train", "test")]
        for split in splits:
            check_texts(*split, CLASSES[args.dataset])
            check_tokens(*split[:2], vocab_size, shortest=1)
    except Exception as error:  # `datasets` has many of its own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        fail(f"--dataset {args.dataset}: {reason}; remove what is damaged in {args.data_dir}, which must be writable, "
             f"and where there is internet (a login node) run: python {sys.argv[0]} --dataset {args.dataset} "
             f"--data_dir {args.data_dir} --max_steps 1")
    if args.batch_size > len(splits[0][2]):
        fail(f"--batch_size {args.batch_size} exceeds the {len(splits[0][2])} training texts")
    return *splits, vocab_size


def create_dataloader(split, batches, args, device):
    """Yields token ids (B, T), with zeros beyond a text's end, lengths (B,) and labels (B,)."""
    ids, ends, labels = split
    for indices in batches:
        lengths = np.minimum(ends[indices + 1] - ends[indices], args.seq_len)
        columns = np.arange(lengths.max())
        tokens = ids.take(ends[indices][:, None] + columns, mode="clip").astype(np.int64)
        tokens[columns >= lengths[:, None]] = 0
        yield tuple(torch.from_numpy(array).to(device) for array in (tokens, lengths, labels[indices].astype(np.int64)))


class Block(nn.Module):
    """A transformer block with its norms in front, (B, T, D) to (B, T, D).

    It sees what the mask (B, 1, T or 1, T) marks or, without a mask, what came before. Attention itself has no dropout:
    on a CPU that would cost the fast kernel.
    """

    def __init__(self, d_model, n_heads, dim_feedforward, dropout):
        super().__init__()
        self.n_heads, self.dropout = n_heads, nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv, self.projection = nn.Linear(d_model, 3 * d_model, False), nn.Linear(d_model, d_model, False)
        self.up, self.down = nn.Linear(d_model, dim_feedforward, False), nn.Linear(dim_feedforward, d_model, False)

    def attend(self, x, mask=None):
        qkv = self.qkv(self.norm1(x)).unflatten(2, (3, self.n_heads, -1))  # (B, T, 3, H, D / H)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # (B, H, T, D / H)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return x + self.dropout(self.projection(y.transpose(1, 2).flatten(2)))

    def feed_forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))

    def forward(self, x, mask=None):
        return self.feed_forward(self.attend(x, mask))


class TextClassifier(nn.Module):
    """Token ids (B, T) and lengths (B,) to logits (B, K): a linear layer on the mean over the real tokens."""

    def __init__(self, vocab_size, d_model, n_heads, dim_feedforward, num_layers, seq_len, dropout, num_classes):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(vocab_size, d_model), nn.ModuleList()
        if num_layers:
            self.positions, self.norm = nn.Embedding(seq_len, d_model), nn.LayerNorm(d_model)
            self.blocks.extend(Block(d_model, n_heads, dim_feedforward, dropout) for _ in range(num_layers))
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(d_model, num_classes)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, lengths):
        if not self.blocks:  # the mean without making (B, T, D) first
            return self.head(self.dropout(F.embedding_bag(tokens, self.embedding.weight, padding_idx=0)))
        mask = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]  # (B, T)
        x = self.dropout(self.embedding(tokens) + self.positions.weight[:tokens.shape[1]])  # (B, T, D)
        for block in self.blocks:
            x = block(x, mask[:, None, None])
        mean = (self.norm(x) * mask[:, :, None]).sum(1) / lengths[:, None]  # (B, D)
        return self.head(self.dropout(mean))


def create_model(args, tensors, vocab_size, precision, device):
    """The model with these weights, in this precision; and, of int8, what was converted."""
    def build():
        *sizes, num_layers = SIZES[args.size]
        return TextClassifier(vocab_size, *sizes, num_layers if args.model == "transformer" else 0, args.seq_len, 0.0,
                              CLASSES[args.dataset])

    if args.load:
        return load_int8(build, tensors, args)
    model = load_weights(build, {name: tensor.clone() for name, tensor in tensors.items()}, args).to(device)
    converted = None
    if precision == "bf16":
        model.bfloat16()
    if precision == "int8":
        model, converted = quantize(model, args)
    if args.backend == "torchao":  # which alone is slow; so are all
        model.compile()
    return model, converted


@torch.no_grad()
def accuracy(model, split, batches, args, device):
    """The share of right answers."""
    right = sum((model(tokens, lengths).argmax(1) == labels).sum().item()
                for tokens, lengths, labels in create_dataloader(split, batches, args, device))
    return right / sum(map(len, batches))


@torch.no_grad()
def seconds_of(model, batches):
    """What the model takes for each of these batches of tokens (B, T), lengths (B,), labels (B,)."""
    seconds = []
    for tokens, lengths, _ in batches:
        start = time.perf_counter()
        model(tokens, lengths)
        if tokens.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def main(args):
    sys.stdout.reconfigure(line_buffering=True)
    warnings.filterwarnings("ignore", ".*deprecated")
    device = torch.device("cuda" if torch.cuda.is_available() and args.backend == "torchao" else "cpu")
    torch.set_num_threads(args.threads)
    tensors = read_weights(args, NAMES)
    _, split, vocab_size = read_texts(args)
    by_length = np.diff(split[1]).argsort(kind="stable")
    batches = [by_length[start:start + args.batch_size] for start in range(0, len(by_length), args.batch_size)]
    # Timed are 20 texts alone, and 8 batches, that stand for all lengths.
    some = [by_length[index:index + 1] for index in np.linspace(0, len(by_length) - 1, 20, dtype=int)]
    some += [batches[index] for index in np.linspace(0, max(0, len(batches) - 2), 8, dtype=int)]
    some_sizes, some = [*map(len, some)], list(create_dataloader(split, some, args, device))
    shared = {"script": "quantize/text.py", "model": f"{args.model}-{args.size}", "dataset": args.dataset,
              "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU", "threads": args.threads,
              "batch_size": args.batch_size}
    print(f"quantize/text.py: {shared['model']}, vocabulary {vocab_size}; {args.dataset}, {len(by_length):,} texts of "
          f"{args.seq_len} tokens at most to validate on; {shared['device']}, {args.threads} thread(s); int8 by "
          f"{backend_name(args)}; torch {torch.__version__}")
    precisions = ("int8",) if args.load else args.precisions
    seconds_of(create_model(args, tensors, vocab_size, precisions[0], device)[0], some)  # takes what is taken once
    models, rows = {}, {}
    for precision in precisions:
        before = memory_in_use(device)
        peak_memory(device)
        models[precision], converted = create_model(args, tensors, vocab_size, precision, device)
        if converted:
            print(f"int8: {converted}")
        rows[precision] = shared | {"precision": precision, "backend": backend_name(args) if converted else "",
                                    "val_acc": accuracy(models[precision], split, batches, args, device)}
        rows[precision]["peak_MB"] = (peak_memory(device) - before) / 1e6
        rows[precision]["MB"] = size_on_disk(models[precision], precision, args) / 1e6
    seconds = {precision: [] for precision in models}
    for _ in range(args.rounds):
        for precision, model in models.items():
            times = seconds_of(model, some)
            seconds[precision].append((sum(times[:20]) / 20, sum(times[20:]) / sum(some_sizes[20:])))
    print_row(TABLE)
    for precision, row in rows.items():
        alone, together = (statistics.median(times) for times in zip(*seconds[precision]))
        print_row(TABLE, row | {
            "against fp32": row["val_acc"] - rows["fp32"]["val_acc"] if "fp32" in rows else math.nan,
            "ms a text": 1000 * alone, "samples/s": 1 / together})
    if args.save:
        save_int8(models["int8"], NAMES, args)


if __name__ == "__main__":
    main(parse_args())
