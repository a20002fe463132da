r"""Compare a trained translator in fp32, in bf16 and with dynamic int8 quantization: size, quality, speed, memory.

    python singlegpu/translation.py --model lstm --snapshot lstm.pt
    python quantize/translation.py --snapshot lstm.pt                   # also one of multigpu, multinode
    python quantize/translation.py --snapshot lstm.pt --save int8.pt    # the quantized weights, to be used:
    python quantize/translation.py --load int8.pt
    sbatch slurm/quantize_translation.slurm                             # trains a little first, given no --snapshot

Weights of linear layers and LSTMs become int8 beforehand, a linear layer's with one scale a row; the input of each
layer when it comes, with a scale of its own. BLEU is of greedy decoding of the whole test split; so are sentences/s.
Backend torch.ao, for CPUs, is deprecated by torch and has the fastest kernels; torchao, its successor, is for GPUs (the
default there), knows linear layers only, and is compiled.
Shapes: B pairs, S and T tokens of the longest source and target, D = d_model, H heads, V vocabulary.
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
import sacrebleu
import tokenizers
import torch
import torch.nn.functional as F
from torch import nn

HUB = {"multi30k": "bentrevett/multi30k"}  # where a data set is that --data_dir lacks
PAD, UNKNOWN, START, END = range(4)  # token ids
SPLITS = ("train", "validation", "test")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# What shapes the model, and its data.
NAMES = {"model": str, "dataset": str, "source": str, "target": str, "seq_len": int}
PRECISIONS = ("fp32", "bf16", "int8")
TABLE = {"script": "", "model": "", "dataset": "", "precision": "", "backend": "", "device": "", "threads": "",
         "MB": ".2f", "BLEU": ".2f", "against fp32": ".2f", "ms a sentence": ".1f", "sentences/s": ".1f",
         "batch_size": "", "peak_MB": ".0f"}


def parse_args():
    parser = argparse.ArgumentParser(description="Compare a trained translator in fp32, bf16 and int8.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = fail
    add = parser.add_argument
    add("--snapshot", metavar="FILE", help="what a translation.py saved")
    add("--data_dir", default="data", help="folder that holds the data set's own folder, and receives its tokens")
    add("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="what to compare; bf16 can take long")
    add("--backend", choices=("torch.ao", "torchao"), default="torchao" if torch.cuda.is_available() else "torch.ao",
        help="of int8; torch.ao is for CPUs")
    add("--engine", default=torch.backends.quantized.engine, help="kernels of torch.ao")
    add("--batch_size", type=int, default=128, help="sentences at once, for sentences/s and for the validation")
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


def number_words(number):
    """The English name of a number from 0 to 999,999, as words."""
    names = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
             "seventeen eighteen nineteen").split()
    tens = "twenty thirty forty fifty sixty seventy eighty ninety".split()
    if number < 20:
        return [names[number]]
    if number < 100:
        words, rest = [tens[number // 10 - 2]], number % 10
    elif number < 1000:
        words, rest = [names[number // 100], "hundred"], number % 100
    else:
        words, rest = [*number_words(number // 1000), "thousand"], number % 1000
    return words + number_words(rest) if rest else words


def synthetic_pairs(args):
    """Digits, and the number's name: {split: {column: texts}}."""
    numbers = np.random.default_rng(0).permutation(1_000_000)[:22_000]
    return {split: {args.source: [" ".join(str(number)) for number in part],
                    args.target: [" ".join(number_words(number)) for number in part]}
            for split, part in zip(SPLITS, np.split(numbers, (20_000, 21_000)))}


def load_pairs(args):
    """The sentences of a data set, from --data_dir or else from the hub: {split: {column: texts}}."""
    import datasets  # here: when the tokens are there, nobody needs it, or the second that it takes

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    source = f"{args.data_dir}/{args.dataset}"
    splits = datasets.load_dataset(source if os.path.isdir(source) else HUB[args.dataset])
    for split in SPLITS:
        if split not in splits or not {args.source, args.target} <= set(splits[split].column_names):
            raise ValueError(f"no columns `{args.source}` and `{args.target}` in the split {split} of {splits}")
    return splits


def tokenize_pairs(args, splits, folder):
    """Learn each side's vocabulary from the training sentences; write both, all tokens and the references."""
    for side, column in (("source", args.source), ("target", args.target)):
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="[UNK]"))
        tokenizer.normalizer = tokenizers.normalizers.Lowercase()
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # words, and runs of other characters
        trainer = tokenizers.trainers.WordLevelTrainer(vocab_size=30_000, min_frequency=2, show_progress=False,
                                                       special_tokens=["[PAD]", "[UNK]", "[START]", "[END]"])
        tokenizer.train_from_iterator((text or "" for text in splits["train"][column]), trainer)
        words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        with open(f"{folder}/{side}_words.json", "w") as file:
            json.dump([word for word, _ in words], file)
        for split in SPLITS:
            texts = [text or "" for text in splits[split][column]]
            ids = [np.array([START, *encoding.ids, END], np.uint16) for encoding in tokenizer.encode_batch_fast(texts)]
            np.save(f"{folder}/{split}_{side}_ids.npy", np.concatenate(ids))
            np.save(f"{folder}/{split}_{side}_ends.npy", np.cumsum([0, *map(len, ids)]))
            if (split, side) == ("test", "target"):
                with open(f"{folder}/references.json", "w") as file:
                    json.dump(texts, file)


def check_tokens(ids, ends, vocab_size, shortest):
    """Raise ValueError unless these are the ids of texts of `shortest` tokens or more, and where each ends (N + 1,)."""
    known = ids.ndim == ends.ndim == 1 and ids.dtype.kind in "iu" and 0 <= ids.min() <= ids.max() < vocab_size
    if not (known and ends.dtype == np.int64 and ends.min() == ends[0] == 0 and ends.max() == ends[-1] == len(ids)
            and np.diff(ends).min() >= shortest):
        raise ValueError(f"{len(ids)} tokens ({ids.dtype}) are not those of {len(ends) - 1} texts ({ends.dtype})")


def read_pairs(args):
    """Each split's pairs, as ((source ids, ends), (target ids, ends)); both lists of words; the test references."""
    name = f"{args.dataset}_{args.source}_{args.target}_tokens"
    try:
        with tempfile.TemporaryDirectory() as folder:
            if args.dataset == "synthetic":
                tokenize_pairs(args, synthetic_pairs(args), folder)
            else:
                folder = f"{args.data_dir}/{name}"
                if not os.path.isdir(folder):
                    splits = load_pairs(args)
                    os.makedirs(args.data_dir, exist_ok=True)
                    with tempfile.TemporaryDirectory(dir=args.data_dir, ignore_cleanup_errors=True) as work:
                        tokenize_pairs(args, splits, work)
                        os.chmod(work, 0o755)
                        with suppress(OSError):  # another job was faster
                            os.rename(work, folder)
            splits = [[[np.load(f"{folder}/{split}_{side}_{what}.npy", "r") for what in ("ids", "ends")]
                       for side in ("source", "target")] for split in SPLITS]
            *words, references = ([*map(str, json.load(open(f"{folder}/{name}.json")))]
                                  for name in ("source_words", "target_words", "references"))
        for pair in splits:
            for side, known in zip(pair, words):
                check_tokens(*side, len(known), shortest=2)  # a start and an end
            if len(pair[0][1]) != len(pair[1][1]):
                raise ValueError(f"{len(pair[0][1]) - 1} source and {len(pair[1][1]) - 1} target sentences")
        if len(references) != len(splits[2][0][1]) - 1:
            raise ValueError(f"{len(references)} references of {len(splits[2][0][1]) - 1} test sentences")
    except Exception as error:  # `datasets` has many of its own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        fail(f"--dataset {args.dataset}: {reason}; remove what is damaged in {args.data_dir}, which must be writable, "
             f"and where there is internet (a login node) run: python {sys.argv[0]} --dataset {args.dataset} "
             f"--data_dir {args.data_dir} --source {args.source} --target {args.target} --max_steps 1")
    num_train = len(splits[0][0][1]) - 1
    if args.batch_size > num_train:
        fail(f"--batch_size {args.batch_size} exceeds the {num_train} training pairs")
    return splits, words, references


def padded(side, indices, longest):
    """The tokens (B, longest of them) of these sentences, cut at `longest`, zeros beyond their ends; lengths (B,)."""
    ids, ends = side
    lengths = np.minimum(ends[indices + 1] - ends[indices], longest)
    columns = np.arange(lengths.max())
    tokens = ids.take(ends[indices][:, None] + columns, mode="clip").astype(np.int64)
    tokens[columns >= lengths[:, None]] = PAD
    return torch.from_numpy(tokens), torch.from_numpy(lengths)


def create_dataloader(split, batches, args, device):
    """Yields sources (B, S), their lengths (B,) on the CPU, targets (B, T + 1), from pairs of indices and num_tokens.

    The batch's loss is to be divided by num_tokens, so that each token of a global batch counts alike.
    """
    for indices, num_tokens in batches:
        source, lengths = padded(split[0], indices, args.seq_len)
        target, _ = padded(split[1], indices, args.seq_len + 1)
        yield source.to(device), lengths, target.to(device), num_tokens


class LSTMTranslator(nn.Module):
    """Sources (B, S), lengths (B,), targets (B, T) to logits (B, T, V) of the tokens after them.

    Sutskever, Vinyals and Le 2014, "Sequence to sequence learning with neural networks".
    """

    def __init__(self, source_size, target_size, d_embedding, d_hidden, num_layers, dropout):
        super().__init__()
        self.source, self.target = nn.Embedding(source_size, d_embedding), nn.Embedding(target_size, d_embedding)
        self.encoder, self.decoder = (nn.LSTM(d_embedding, d_hidden, num_layers, batch_first=True, dropout=dropout)
                                      for _ in range(2))
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(d_hidden, target_size)

    def encode(self, source, lengths):
        """What decode needs to know of the sources: the state after their last tokens."""
        x = nn.utils.rnn.pack_padded_sequence(self.dropout(self.source(source)), lengths, True, enforce_sorted=False)
        return self.encoder(x)[1]

    def decode(self, state, target):
        return self.head(self.decoder(self.dropout(self.target(target)), state)[0])

    def forward(self, source, lengths, target):
        return self.decode(self.encode(source, lengths), target)


class TransformerTranslator(nn.Module):
    """Sources (B, S), lengths (B,), targets (B, T) to logits (B, T, V) of the tokens after them.

    Vaswani et al. 2017, "Attention is all you need", with the norms in front and learned positions.
    """

    def __init__(self, source_size, target_size, d_model, n_heads, dim_feedforward, num_layers, seq_len, dropout):
        super().__init__()
        self.source, self.target = nn.Embedding(source_size, d_model), nn.Embedding(target_size, d_model)
        self.positions, self.dropout = nn.Embedding(seq_len, d_model), nn.Dropout(dropout)
        sizes = d_model, n_heads, dim_feedforward, dropout
        self.encoder = nn.ModuleList(Block(*sizes) for _ in range(num_layers))
        self.decoder = nn.ModuleList(CrossBlock(*sizes) for _ in range(num_layers))
        self.source_norm, self.target_norm = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.xavier_uniform_(parameter)

    def embed(self, embedding, tokens):
        x = embedding(tokens) * embedding.embedding_dim ** 0.5  # as large as the positions
        return self.dropout(x + self.positions.weight[:tokens.shape[1]])

    def encode(self, source, lengths):
        """What decode needs to know of the sources: their memory (B, S, D), and its mask (B, 1, 1, S)."""
        mask = (source != PAD)[:, None, None]
        x = self.embed(self.source, source)
        for block in self.encoder:
            x = block(x, mask)
        return self.source_norm(x), mask

    def decode(self, state, target):
        x = self.embed(self.target, target)
        for block in self.decoder:
            x = block(x, *state)
        return F.linear(self.target_norm(x), self.target.weight)  # the head is the embedding

    def forward(self, source, lengths, target):
        return self.decode(self.encode(source, lengths), target)


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


class CrossBlock(nn.Module):
    """A Block that attends to what came before and then to the memory (B, S, D), where the mask allows it."""

    def __init__(self, d_model, n_heads, dim_feedforward, dropout):
        super().__init__()
        self.block, self.n_heads = Block(d_model, n_heads, dim_feedforward, dropout), n_heads
        self.dropout = nn.Dropout(dropout)
        self.norm, self.query = nn.LayerNorm(d_model), nn.Linear(d_model, d_model, False)
        self.key_value, self.projection = nn.Linear(d_model, 2 * d_model, False), nn.Linear(d_model, d_model, False)

    def forward(self, x, memory, mask):
        x = self.block.attend(x)
        q = self.query(self.norm(x)).unflatten(2, (self.n_heads, -1)).transpose(1, 2)  # (B, H, T, D / H)
        k, v = self.key_value(memory).unflatten(2, (2, self.n_heads, -1)).unbind(2)  # (B, S, H, D / H)
        y = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.block.feed_forward(x + self.dropout(self.projection(y.transpose(1, 2).flatten(2))))


def create_model(args, tensors, sizes, precision, device):
    """The model with these weights, in this precision; and, of int8, what was converted."""
    def build():
        if args.model == "lstm":
            return LSTMTranslator(*sizes, 256, 512, 2, 0.0)
        return TransformerTranslator(*sizes, 256, 8, 512, 3, args.seq_len + 1, 0.0)

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
def translate(model, split, batches, words, args, device):
    """{index: translation} of the sources of the batches, by greedy decoding: the likeliest word, up to --seq_len."""
    model.eval()
    translations = {}
    for (indices, _), (source, lengths, _, _) in zip(batches, create_dataloader(split, batches, args, device)):
        target = torch.full((len(indices), 1), START, device=device)
        done = torch.zeros(len(indices), dtype=torch.bool, device=device)
        with torch.autocast(device.type, DTYPES[args.precision], args.precision != "fp32"):
            state = model.encode(source, lengths)
            while target.shape[1] <= args.seq_len and not done.all():
                token = model.decode(state, target)[:, -1].argmax(1)
                target = torch.cat((target, token[:, None]), 1)
                done |= token == END
        for index, ids in zip(indices.tolist(), target[:, 1:].tolist()):
            translations[index] = " ".join(words[id] for id in ids[:ids.index(END) if END in ids else None])
    return translations


def bleu(translations, references):
    """BLEU of lower-cased text in the tokens that the model writes; for sacrebleu they are words between spaces."""
    split = tokenizers.pre_tokenizers.Whitespace().pre_tokenize_str
    references = [" ".join(word for word, _ in split(text.lower())) for text in references]
    return sacrebleu.corpus_bleu([translations[index] for index in range(len(references))], [references],
                                 tokenize="none", force=True).score


def main(args):
    sys.stdout.reconfigure(line_buffering=True)
    warnings.filterwarnings("ignore", ".*deprecated")
    args.precision = "fp32"  # of autocast, which translate knows: there is none
    device = torch.device("cuda" if torch.cuda.is_available() and args.backend == "torchao" else "cpu")
    torch.set_num_threads(args.threads)
    tensors = read_weights(args, NAMES)
    (_, _, split), words, references = read_pairs(args)
    by_length = np.diff(split[0][1]).argsort(kind="stable")
    batches = [(by_length[start:start + args.batch_size], 1) for start in range(0, len(by_length), args.batch_size)]
    alone = [(by_length[index:index + 1], 1) for index in np.linspace(0, len(by_length) - 1, 20, dtype=int)]
    together = [batches[index] for index in np.linspace(0, len(batches) - 1, min(3, len(batches)), dtype=int)]
    num_together = sum(len(indices) for indices, _ in together)
    shared = {"script": "quantize/translation.py", "model": args.model, "dataset": args.dataset,
              "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU", "threads": args.threads,
              "batch_size": args.batch_size}
    print(f"quantize/translation.py: {args.model}, vocabularies {len(words[0])} and {len(words[1])}; {args.dataset}, "
          f"{args.source} to {args.target}, {len(by_length):,} pairs to test on; {shared['device']}, {args.threads} "
          f"thread(s); int8 by {backend_name(args)}; torch {torch.__version__}")

    def run(model, batches):
        return translate(model, split, batches, words[1], args, device)

    def seconds_of(model, batches):
        start = time.perf_counter()
        run(model, batches)
        return time.perf_counter() - start

    precisions, sizes = ("int8",) if args.load else args.precisions, [*map(len, words)]
    run(create_model(args, tensors, sizes, precisions[0], device)[0], together[:1])  # takes what is taken once
    models, rows = {}, {}
    for precision in precisions:
        before = memory_in_use(device)
        peak_memory(device)
        models[precision], converted = create_model(args, tensors, sizes, precision, device)
        if converted:
            print(f"int8: {converted}")
        rows[precision] = shared | {"precision": precision, "backend": backend_name(args) if converted else "",
                                    "BLEU": bleu(run(models[precision], batches), references)}
        rows[precision]["peak_MB"] = (peak_memory(device) - before) / 1e6
        rows[precision]["MB"] = size_on_disk(models[precision], precision, args) / 1e6
    seconds = {precision: [] for precision in models}
    for _ in range(args.rounds):
        for precision, model in models.items():
            times = seconds_of(model, alone) / len(alone), seconds_of(model, together) / num_together
            seconds[precision].append(times)
    print_row(TABLE)
    for precision, row in rows.items():
        one, one_of_many = (statistics.median(times) for times in zip(*seconds[precision]))
        print_row(TABLE, row | {
            "against fp32": row["BLEU"] - rows["fp32"]["BLEU"] if "fp32" in rows else math.nan,
            "ms a sentence": 1000 * one, "sentences/s": 1 / one_of_many})
    if args.save:
        save_int8(models["int8"], NAMES, args)


if __name__ == "__main__":
    main(parse_args())
