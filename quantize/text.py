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
import math
import os
import statistics
import sys
import time
import warnings
import zipfile
from collections import Counter
from contextlib import suppress

import numpy as np
import torch
from datasets import Dataset, exceptions, load_dataset
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import nn

HUB = {"ag_news": "fancyzhx/ag_news", "imdb": "stanfordnlp/imdb"}  # names on the Hugging Face hub
SIZES = {"small": (128, 4, 512, 2), "large": (256, 8, 1024, 4)}  # D, H, dim_feedforward, layers
VOCAB_SIZE = 20_000  # the most frequent words that occur at least twice
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
    add("--data_dir", default="data", help="folder in which the data set is looked for first")
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


def synthetic_texts():
    """Yields texts of 5 to 100 random words. Every tenth is one of 50 words that its class has."""
    generator = np.random.default_rng(0)
    for label in generator.integers(4, size=12_000).tolist():
        words = generator.integers(1000, size=generator.integers(5, 101))
        words[::10] = 50 * label + words[::10] % 50
        yield {"text": " ".join(map(str, words)), "label": label}


def learn_vocabulary(batch):
    """Returns a tokenizer that knows the words of these texts, as a column of one JSON string."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # words, and runs of punctuation
    trainer = trainers.WordLevelTrainer(vocab_size=VOCAB_SIZE, min_frequency=2,
                                        show_progress=False, special_tokens=["[PAD]", "[UNK]"])
    tokenizer.train_from_iterator([text or "" for text in batch["text"]], trainer)
    return {"tokenizer": [tokenizer.to_str()]}


def encode(batch, tokenizer, labels):
    """Returns token ids (N, seq_len) with zeros after a text's end, lengths (N,), classes (N,)."""
    encodings = tokenizer.encode_batch_fast([text or "" for text in batch["text"]])
    tokens = np.array([encoding.ids for encoding in encodings], np.int16)
    tokens[:, 0] = tokens[:, 0].clip(1)  # an empty text is an unknown word
    return {"tokens": tokens, "length": np.count_nonzero(tokens, axis=1),
            "class": [labels.index(label) for label in batch["label"]]}


def read_texts(args, device):
    """Returns tokens, lengths and classes of both splits, sorted by length, and the K labels."""
    for function in (synthetic_texts, learn_vocabulary, encode):
        function.__module__ = "__main__"  # or spawned processes do not find the cache of `map`
    folder = os.path.join(args.data_dir, args.dataset)
    source = folder if os.path.isdir(folder) else HUB.get(args.dataset, args.dataset)
    try:
        splits = (load_dataset(source, split=["train", "test"]) if args.dataset != "synthetic" else
                  Dataset.from_generator(synthetic_texts).train_test_split(2_000, seed=0).values())
        splits = [split.select_columns(["text", "label"]) for split in splits]
        labels = sorted({label for split in splits for label in split.unique("label")})
    except (OSError, TypeError, ValueError, exceptions.DatasetsError) as error:
        sys.exit(f"cannot read {source}: {error}")
    options = {"batched": True, "remove_columns": ["text", "label"]}
    vocabulary = splits[0].map(learn_vocabulary, batch_size=None, **options)
    tokenizer = Tokenizer.from_str(vocabulary[0]["tokenizer"])
    tokenizer.enable_truncation(args.seq_len)
    tokenizer.enable_padding(length=args.seq_len)
    options["fn_kwargs"] = {"tokenizer": tokenizer, "labels": labels}
    splits = [split.map(encode, **options) for split in splits]
    splits = [split.select(np.argsort(split["length"][:], stable=True)) for split in splits]
    return *([*part.with_format("torch", device=device)[:].values()] for part in splits), labels


class TextEncoder(nn.Module):
    """A transformer from token ids (B, T) to the mean of its outputs for real tokens (B, D)."""

    def __init__(self, args):
        super().__init__()
        d_model, self.n_heads, dim_feedforward, num_layers = SIZES[args.size]
        self.embedding = nn.Embedding(VOCAB_SIZE, d_model)
        self.layers = nn.ModuleList()
        for _ in range(num_layers):
            qkv = nn.Sequential(nn.LayerNorm(d_model), nn.Linear(d_model, 3 * d_model, bias=False))
            projection = nn.Linear(d_model, d_model, bias=False)
            feed_forward = nn.Sequential(
                nn.LayerNorm(d_model), nn.Linear(d_model, dim_feedforward, bias=False), nn.GELU(),
                nn.Linear(dim_feedforward, d_model, bias=False))
            self.layers.append(nn.ModuleList([qkv, projection, feed_forward]))
        self.positions = nn.Embedding(args.seq_len, d_model)
        self.norm, self.dropout = nn.LayerNorm(d_model), nn.Dropout(args.dropout)

    def forward(self, tokens):
        real = tokens > 0  # (B, T)
        x = self.dropout(self.embedding(tokens) + self.positions.weight[:tokens.shape[1]])
        for qkv, projection, feed_forward in self.layers:
            q, k, v = qkv(x).unflatten(2, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v, real[:, None, None])
            x = x + self.dropout(projection(y.transpose(1, 2).flatten(2)))  # (B, T, D)
            x = x + self.dropout(feed_forward(x))
        return (self.norm(x) * real[:, :, None]).sum(1) / real.sum(1, keepdim=True)


def create_classifier(args, num_classes):
    """Returns a network from token ids (B, T) to logits (B, K)."""
    d_model = SIZES[args.size][0]
    encoder = (TextEncoder(args) if args.model == "transformer" else
               nn.EmbeddingBag(VOCAB_SIZE, d_model, mode="mean", padding_idx=0))
    model = nn.Sequential(encoder, nn.Dropout(args.dropout), nn.Linear(d_model, num_classes))
    for matrix in (parameter for parameter in model.parameters() if parameter.dim() == 2):
        nn.init.normal_(matrix, std=0.02)
    return model


def create_model(args, tensors, num_classes, precision, device):
    """The model with these weights, in this precision; and, of int8, what was converted."""
    def build():
        return create_classifier(args, num_classes)

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
def accuracy(model, batches):
    """The share of right answers."""
    right = sum((model(tokens).argmax(1) == classes).sum().item() for tokens, classes in batches)
    return right / sum(len(classes) for _, classes in batches)


@torch.no_grad()
def seconds_of(model, batches):
    """What the model takes for each of these batches of tokens (B, T), classes (B,)."""
    seconds = []
    for tokens, _ in batches:
        start = time.perf_counter()
        model(tokens)
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
    args.dropout = 0.0
    _, split, labels = read_texts(args, device)  # by length
    # Timed are 20 texts alone, and 8 batches, that stand for all lengths.
    batches = [(tokens[:, :lengths[-1]], classes) for tokens, lengths, classes
               in zip(*(tensor.split(args.batch_size) for tensor in split))]
    some = [(split[0][index, :split[1][index]][None], split[2][index][None])
            for index in np.linspace(0, len(split[0]) - 1, 20, dtype=int)]
    some += [batches[index] for index in np.linspace(0, max(0, len(batches) - 2), 8, dtype=int)]
    some_sizes = [len(classes) for _, classes in some]
    shared = {"script": "quantize/text.py", "model": f"{args.model}-{args.size}", "dataset": args.dataset,
              "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU", "threads": args.threads,
              "batch_size": args.batch_size}
    print(f"quantize/text.py: {shared['model']}, vocabulary {VOCAB_SIZE}; {args.dataset}, {len(split[0]):,} texts of "
          f"{args.seq_len} tokens at most to validate on; {shared['device']}, {args.threads} thread(s); int8 by "
          f"{backend_name(args)}; torch {torch.__version__}")
    precisions = ("int8",) if args.load else args.precisions
    seconds_of(create_model(args, tensors, len(labels), precisions[0], device)[0], some)  # takes what is taken once
    quantized, rows = {}, {}
    for precision in precisions:
        before = memory_in_use(device)
        peak_memory(device)
        quantized[precision], converted = create_model(args, tensors, len(labels), precision, device)
        if converted:
            print(f"int8: {converted}")
        rows[precision] = shared | {"precision": precision, "backend": backend_name(args) if converted else "",
                                    "val_acc": accuracy(quantized[precision], batches)}
        rows[precision]["peak_MB"] = (peak_memory(device) - before) / 1e6
        rows[precision]["MB"] = size_on_disk(quantized[precision], precision, args) / 1e6
    seconds = {precision: [] for precision in quantized}
    for _ in range(args.rounds):
        for precision, model in quantized.items():
            times = seconds_of(model, some)
            seconds[precision].append((sum(times[:20]) / 20, sum(times[20:]) / sum(some_sizes[20:])))
    print_row(TABLE)
    for precision, row in rows.items():
        alone, together = (statistics.median(times) for times in zip(*seconds[precision]))
        print_row(TABLE, row | {
            "against fp32": row["val_acc"] - rows["fp32"]["val_acc"] if "fp32" in rows else math.nan,
            "ms a text": 1000 * alone, "samples/s": 1 / together})
    if args.save:
        save_int8(quantized["int8"], NAMES, args)


if __name__ == "__main__":
    main(parse_args())
