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
import math
import os
import statistics
import sys
import time
import warnings
import zipfile
from collections import Counter
from contextlib import suppress

import datasets
import numpy as np
import sacrebleu
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn

HUB = {"multi30k": "bentrevett/multi30k"}  # names on the Hugging Face hub
PAD, UNKNOWN, START, END = range(4)  # token ids
DIGITS = "zero one two three four five six seven eight nine".split()
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
    add("--data_dir", default="data", help="folder in which the data set is looked for first")
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
        shape, kind = snapshot["args" if args.load else "settings"], "int8" if args.load else "model"
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
                module.load_state_dict(own, strict=False)  # attention has layers inside
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


def synthetic_pairs(args):
    """Returns splits of random numbers of 1 to 12 digits, and of the names of their digits."""
    generator = np.random.default_rng(0)
    numbers = [generator.integers(10, size=1 + row % 12) for row in range(22_000)]
    pairs = datasets.Dataset.from_dict({
        args.source: [" ".join(map(str, number)) for number in numbers],
        args.target: [" ".join(DIGITS[digit] for digit in number) for number in numbers]})
    return [pairs.skip(2000), pairs.take(1000), pairs.skip(1000).take(1000)]


def read_pairs(args):
    """Returns ids and lengths of each split, the longest sources first; test texts; tokenizers."""
    columns = [args.source, args.target]
    own = os.path.join(args.data_dir, args.dataset)
    place = own if os.path.isdir(own) else HUB.get(args.dataset, args.dataset)
    datasets.disable_progress_bars()
    try:
        if args.dataset == "synthetic":
            splits = synthetic_pairs(args)
        else:
            splits = datasets.load_dataset(place, split=["train", "validation", "test"])
        splits = [split.select_columns(columns) for split in splits]
    except (OSError, TypeError, ValueError, datasets.exceptions.DatasetsError) as error:
        sys.exit(f"cannot read {place}: {error}")
    tokenizers = []
    for column in columns:
        tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # words, and runs of punctuation
        trainer = trainers.WordLevelTrainer(vocab_size=30_000, min_frequency=2, show_progress=False,
                                            special_tokens=["[PAD]", "[UNK]", "[START]", "[END]"])
        tokenizer.train_from_iterator((text or "" for text in splits[0][column]), trainer)
        tokenizer.post_processor = processors.BertProcessing(("[END]", END), ("[START]", START))
        tokenizer.enable_truncation(args.seq_len)
        tokenizer.enable_padding(length=args.seq_len, pad_id=PAD)
        tokenizers.append(tokenizer)

    def encode(batch):
        encoded = {}
        for side, column, tokenizer in zip(("source", "target"), columns, tokenizers):
            encodings = tokenizer.encode_batch_fast([text or "" for text in batch[column]])
            ids = np.array([encoding.ids for encoding in encodings], np.int16)
            encoded |= {f"{side}s": ids, f"{side}_length": np.count_nonzero(ids, axis=1)}
        return encoded

    encode.__module__ = "__main__"  # or spawned processes do not find what `map` keeps on disk
    for index, texts in enumerate(splits):
        arrays = texts.map(encode, batched=True, remove_columns=columns).with_format("numpy")[:]
        order = np.argsort(-arrays["source_length"], kind="stable")
        splits[index] = {name: array[order] for name, array in arrays.items()}
    return *splits, texts.select(order), tokenizers


def select_pairs(split, rows, device):
    """Returns sources (B, S), targets (B, T + 1) and, on the CPU, the sources' lengths (B,)."""
    lengths = split["source_length"][rows]
    sources = split["sources"][rows, :lengths.max()]
    targets = split["targets"][rows, :split["target_length"][rows].max()]
    tensors = [torch.from_numpy(ids).long() for ids in (sources, targets)]
    if device.type == "cuda":  # a copy from pinned memory runs while the GPU computes
        tensors = [ids.pin_memory() for ids in tensors]
    return *(ids.to(device, non_blocking=True) for ids in tensors), torch.from_numpy(lengths)


class Translator(nn.Module):
    """Sources (B, S), lengths (B,), targets (B, T) to logits (B, T, V) of the tokens after them."""

    def forward(self, source, lengths, target):
        return self.decode(self.encode(source, lengths), target)


class LSTMTranslator(Translator):
    """Sutskever, Vinyals and Le 2014: the last state of one LSTM is the first one of the other."""

    def __init__(self, source_size, target_size, dropout):
        super().__init__()
        self.source, self.target = nn.Embedding(source_size, 256), nn.Embedding(target_size, 256)
        self.encoder = nn.LSTM(256, 512, num_layers=2, batch_first=True, dropout=dropout)
        self.decoder = nn.LSTM(256, 512, num_layers=2, batch_first=True, dropout=dropout)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(512, target_size)

    def encode(self, source, lengths):
        x = self.dropout(self.source(source))
        return self.encoder(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))[1]

    def decode(self, state, target):
        return self.head(self.decoder(self.dropout(self.target(target)), state)[0])


class TransformerTranslator(Translator):
    """Vaswani et al. 2017, with norms in front, learned positions and the embedding as the head."""

    def __init__(self, source_size, target_size, seq_len, dropout):
        super().__init__()
        self.source, self.target = nn.Embedding(source_size, 256), nn.Embedding(target_size, 256)
        self.positions, self.dropout = nn.Embedding(seq_len, 256), nn.Dropout(dropout)
        options = {"activation": "gelu", "batch_first": True, "norm_first": True, "bias": False}
        encoder_layer = nn.TransformerEncoderLayer(256, 8, 512, 0.0, **options)
        decoder_layer = nn.TransformerDecoderLayer(256, 8, 512, 0.0, **options)
        self.encoder = nn.TransformerEncoder(encoder_layer, 3, nn.LayerNorm(256), False)
        self.decoder = nn.TransformerDecoder(decoder_layer, 3, nn.LayerNorm(256))
        for name, module in self.named_modules():  # none inside attention and feed-forward layers
            if name.endswith(("dropout1", "dropout2", "dropout3")):
                module.p = dropout
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.xavier_uniform_(parameter)

    def embed(self, embedding, tokens):
        x = embedding(tokens) * 256 ** 0.5  # as large as the positions
        return self.dropout(x + self.positions.weight[:tokens.shape[1]])

    def encode(self, source, lengths):
        """Returns the memory (B, S, D), and where it is padding (B, S)."""
        padding = source == PAD
        return self.encoder(self.embed(self.source, source), None, padding), padding

    def decode(self, state, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], target.device)
        x = self.decoder(self.embed(self.target, target), state[0], mask, tgt_is_causal=True,
                         memory_key_padding_mask=state[1])
        return nn.functional.linear(x, self.target.weight)


def create_model(args, tensors, sizes, precision, device):
    """The model with these weights, in this precision; and, of int8, what was converted."""
    def build():
        if args.model == "lstm":
            return LSTMTranslator(*sizes, 0.0)
        return TransformerTranslator(*sizes, args.seq_len, 0.0)

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
def translate(model, loader, tokenizer, args):
    """Returns the translations of the loader's sources, by greedy decoding: the likeliest words."""
    model.eval()
    texts = []
    for source, _, lengths in loader:
        target = torch.full((len(source), 1), START, device=source.device)  # (B, T)
        state = model.encode(source, lengths)
        while target.shape[1] < args.seq_len and not (target == END).any(1).all():
            token = model.decode(state, target)[:, -1].argmax(1)
            target = torch.cat((target, token[:, None]), 1)
        for ids in target[:, 1:].tolist():
            texts.append(tokenizer.decode(ids, skip_special_tokens=False).partition("[END]")[0])
    return texts


def bleu(translations, texts, args):
    """BLEU as the training scripts print it."""
    references = [text or "" for text in texts[args.target]]
    return sacrebleu.corpus_bleu(translations, [references], lowercase=True, tokenize="intl", force=True).score


def main(args):
    sys.stdout.reconfigure(line_buffering=True)
    warnings.filterwarnings("ignore", ".*deprecated")
    device = torch.device("cuda" if torch.cuda.is_available() and args.backend == "torchao" else "cpu")
    torch.set_num_threads(args.threads)
    tensors = read_weights(args, NAMES)
    *_, split, texts, words = read_pairs(args)

    def select(rows):
        return [select_pairs(split, part, device) for part in rows]

    rows = np.arange(len(texts))
    batches = select(np.split(rows, range(args.batch_size, len(rows), args.batch_size)))
    alone = select(np.linspace(0, len(rows) - 1, 20, dtype=int)[:, None])
    together = [batches[index] for index in np.linspace(0, len(batches) - 1, min(3, len(batches)), dtype=int)]
    num_together = sum(len(source) for source, _, _ in together)
    shared = {"script": "quantize/translation.py", "model": args.model, "dataset": args.dataset,
              "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU", "threads": args.threads,
              "batch_size": args.batch_size}
    print(f"quantize/translation.py: {args.model}, {args.dataset}, "
          f"{args.source} to {args.target}, {len(rows):,} pairs to test on; {shared['device']}, {args.threads} "
          f"thread(s); int8 by {backend_name(args)}; torch {torch.__version__}")

    def run(model, batches):
        return translate(model, batches, words[1], args)

    def seconds_of(model, batches):
        start = time.perf_counter()
        run(model, batches)
        return time.perf_counter() - start

    precisions, sizes = ("int8",) if args.load else args.precisions, [each.get_vocab_size() for each in words]
    run(create_model(args, tensors, sizes, precisions[0], device)[0], together[:1])  # takes what is taken once
    translators, rows = {}, {}
    for precision in precisions:
        before = memory_in_use(device)
        peak_memory(device)
        translators[precision], converted = create_model(args, tensors, sizes, precision, device)
        if converted:
            print(f"int8: {converted}")
        rows[precision] = shared | {"precision": precision, "backend": backend_name(args) if converted else "",
                                    "BLEU": bleu(run(translators[precision], batches), texts, args)}
        rows[precision]["peak_MB"] = (peak_memory(device) - before) / 1e6
        rows[precision]["MB"] = size_on_disk(translators[precision], precision, args) / 1e6
    seconds = {precision: [] for precision in translators}
    for _ in range(args.rounds):
        for precision, model in translators.items():
            times = seconds_of(model, alone) / len(alone), seconds_of(model, together) / num_together
            seconds[precision].append(times)
    print_row(TABLE)
    for precision, row in rows.items():
        one, one_of_many = (statistics.median(times) for times in zip(*seconds[precision]))
        print_row(TABLE, row | {
            "against fp32": row["BLEU"] - rows["fp32"]["BLEU"] if "fp32" in rows else math.nan,
            "ms a sentence": 1000 * one, "sentences/s": 1 / one_of_many})
    if args.save:
        save_int8(translators["int8"], NAMES, args)


if __name__ == "__main__":
    main(parse_args())
