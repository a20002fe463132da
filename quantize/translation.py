"""Compare a trained translator in fp32, bf16 and int8: size, BLEU and speed.

    python singlegpu/translation.py --model lstm --snapshot lstm.pt
    python quantize/translation.py --snapshot lstm.pt           # a snapshot of any translation.py
    sbatch slurm/quantize_translation.slurm --snapshot lstm.pt  # trains a little without --snapshot

The weights of linear layers and LSTMs become int8 once. Their inputs become int8 in each call
(dynamic), or never (weight-only). Embeddings stay as they are.
torch.ao has the fastest kernels for CPUs and is deprecated. torchao, which follows it, needs
torch.compile and leaves LSTMs as they are: the lstm's last layer alone becomes int8. Its dynamic
kernels need more than 16 sentences at once.
Shapes: B sentences of a batch, S source and T target tokens, D = d_model, H heads, V words.
"""

import argparse
import copy
import io
import math
import os
import statistics
import sys
import textwrap
import time
import warnings

import datasets
import numpy as np
import sacrebleu
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn
from torch.utils.data import Dataset

HUB = {"multi30k": "bentrevett/multi30k"}  # names on the Hugging Face hub
PAD, UNKNOWN, START, END = range(4)  # token ids
SIDES = ["source", "target"]
# Chinese, Japanese, Thai, ... have no blanks between words: each character is a token.
SCRIPTS = "Han Hiragana Katakana Thai Lao Khmer Myanmar Tibetan".split()
CHARACTER = "|".join(rf"\p{{{script}}}" for script in SCRIPTS)
DIGITS = "zero one two three four five six seven eight nine".split()
DIGITS = "zero one two three four five six seven eight nine".split()
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
    add("--snapshot", metavar="FILE", required=True, help="what a translation.py saved")
    add("--data_dir", default="data", help="folder in which the dataset is looked for first")
    add(
        "--backend",
        choices=KERNELS,
        help="library for int8; torch.ao is for CPUs",
        default="torch.ao" if torch_ao and not torch.cuda.is_available() else "torchao",
    )
    add("--batch_size", type=int, default=128, help="sentences at once; torchao: more than 16")
    add("--rounds", type=int, default=5, help="measurements of each speed; their median is printed")
    args = parser.parse_args()
    if args.rounds < 1 or args.batch_size < (17 if args.backend == "torchao" else 1):
        parser.error("--rounds or --batch_size is too small")
    return args


def synthetic_pairs():
    """Returns three splits: numbers of 1 to 12 digits ("4 2") and their names ("four two")."""
    generator = np.random.default_rng(0)
    sources = []
    targets = []
    for row in range(22_000):
        digits = generator.integers(10, size=1 + row % 12)
        sources.append(" ".join(str(digit) for digit in digits))
        targets.append(" ".join(DIGITS[digit] for digit in digits))
    pairs = datasets.Dataset.from_dict({"source": sources, "target": targets})
    return [pairs.skip(2000), pairs.take(1000), pairs.skip(1000).take(1000)]


def read_splits(args):
    """Returns the training, validation and test pairs: tables with columns source and target."""
    datasets.disable_progress_bars()
    # map() and filter() cache by the code of a function of __main__, but by the name alone of any
    # other. Where multigpu/translation.py starts a process, the main module is called __mp_main__.
    for function in (encode_pairs, is_pair):
        function.__module__ = "__main__"
    if args.dataset == "synthetic":
        return synthetic_pairs()
    folder = os.path.join(args.data_dir, args.dataset)
    path = folder if os.path.isdir(folder) else HUB.get(args.dataset, args.dataset)
    names = {args.source: "source", args.target: "target"}
    pairs = {}
    try:
        splits = datasets.load_dataset(path, split=["train", "validation", "test"])
        for split in splits:
            texts = split.flatten()  # a column of dictionaries becomes translation.de, ...
            if "translation" in split.column_names:
                texts = texts.rename_columns({f"translation.{name}": name for name in names})
            texts = texts.select_columns([*names]).rename_columns(names)
            texts = texts.cast(datasets.Features(dict.fromkeys(SIDES, datasets.Value("string"))))
            pairs[str(split.split)] = texts.filter(is_pair, input_columns=SIDES)
    except (OSError, TypeError, ValueError, datasets.exceptions.DatasetsError) as error:
        sys.exit(f"cannot read {path}: {error.__cause__ or error}")
    for split, (name, texts) in zip(splits, pairs.items()):
        if len(texts) < len(split):
            missing = f"{len(split) - len(texts)} of {len(split)} rows of {name}"
            say(f"{missing} lack {args.source} or {args.target}: left out")
        if len(texts) == 0:
            sys.exit(f"{path}: no row of {name} has {args.source} and {args.target}")
    return [*pairs.values()]


def is_pair(source, target):
    return bool(source and source.strip() and target and target.strip())


def say(message):
    """Prints a line, of all processes only in that of rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(message, flush=True)


def train_tokenizer(texts, seq_len):
    """Returns a tokenizer for the frequent words of these texts. It pads to seq_len tokens."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    characters = pre_tokenizers.Split(Regex(CHARACTER), "isolated")
    words = pre_tokenizers.Whitespace()  # words, and runs of punctuation
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([characters, words])
    trainer = trainers.WordLevelTrainer(
        vocab_size=30_000,
        min_frequency=2,
        show_progress=False,
        special_tokens=["[PAD]", "[UNK]", "[START]", "[END]"],
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.encode_special_tokens = True  # "[END]" in a text is text
    tokenizer.post_processor = processors.BertProcessing(("[END]", END), ("[START]", START))
    tokenizer.enable_truncation(seq_len)
    tokenizer.enable_padding(length=seq_len, pad_id=PAD)
    return tokenizer


def encode_pairs(batch, tokenizers):
    """Returns sources and targets (N, seq_len), source_length and target_length (N,)."""
    encoded = {}
    for side, tokenizer in tokenizers.items():
        encodings = tokenizer.encode_batch_fast(batch[side])
        ids = np.array([encoding.ids for encoding in encodings], np.int16)
        encoded[f"{side}s"] = ids
        encoded[f"{side}_length"] = np.count_nonzero(ids != PAD, axis=1)
    return encoded


class Pairs(Dataset):
    """Pairs of sentences as token ids, and their texts; the longest sources come first."""

    def __init__(self, texts, tokenizers):
        encoded = texts.map(encode_pairs, batched=True, fn_kwargs={"tokenizers": tokenizers})
        arrays = encoded.remove_columns(SIDES).with_format("numpy", dtype=np.int16)[:]
        order = np.argsort(-arrays["source_length"], stable=True)
        self.arrays = {name: array[order] for name, array in arrays.items()}
        self.texts = texts.select(order)
        self.tokenizers = tokenizers

    def __len__(self):
        return len(self.texts)

    def __getitems__(self, indices):
        """Returns a whole batch, longest first: sources (B, S), lengths (B,), targets (B, T + 1).

        The lengths are an array, not a tensor: the LSTM needs them on the CPU.
        """
        rows = {name: array[np.sort(indices)] for name, array in self.arrays.items()}
        sources = torch.from_numpy(rows["sources"][:, : rows["source_length"].max()])
        targets = torch.from_numpy(rows["targets"][:, : rows["target_length"].max()])
        return sources.long(), rows["source_length"], targets.long()


def read_data(args, names=("train", "validation")):
    """Returns the data to train on and to validate on, two map-style datasets."""
    splits = dict(zip(("train", "validation", "test"), read_splits(args)))
    texts = splits["train"]
    tokenizers = {side: train_tokenizer(texts[side], args.seq_len) for side in SIDES}
    data = []
    for name in names:
        data.append(Pairs(splits[name], tokenizers))
        for side in SIDES:
            num_words = (data[-1].arrays[f"{side}_length"] - 2).sum(dtype=np.int64)
            share = (data[-1].arrays[f"{side}s"] == UNKNOWN).sum() / num_words
            if share > 1 / 3:
                say(f"{share:.0%} of all words of {name}'s {side} are [UNK], rare in train")
    return data


class StepwiseLSTM(nn.Module):
    """The lstm of the training scripts, for inference: one token at a time, with a kept state."""

    def __init__(self, source_size, target_size):
        super().__init__()
        self.source = nn.Embedding(source_size, 256)
        self.target = nn.Embedding(target_size, 256)
        self.encoder = nn.LSTM(256, 512, num_layers=2, batch_first=True)
        self.decoder = nn.LSTM(256, 512, num_layers=2, batch_first=True)
        self.head = nn.Linear(512, target_size)

    def encode(self, source, lengths):
        x = self.source(source)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        _, state = self.encoder(packed)
        return state

    def step(self, state, token, position):
        """Returns the logits (B, 1, V) of the tokens after these (B, 1), and the next state."""
        x, state = self.decoder(self.target(token), state)
        return self.head(x), state


class Attention(nn.Module):
    """nn.MultiheadAttention hides its weights from quantization. This has linear layers."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(256, 256, bias=False)
        self.kv = nn.Linear(256, 512, bias=False)
        self.out_proj = nn.Linear(256, 256, bias=False)

    def keys_values(self, x):
        """Returns the keys and values (2, B, H, S, D / H) of tokens (B, S, D)."""
        return self.kv(x).unflatten(2, (2, 8, 32)).permute(2, 0, 3, 1, 4)

    def forward(self, x, keys_values, mask=None):
        q = self.q(x).unflatten(2, (8, 32)).transpose(1, 2)  # (B, H, T, D / H)
        y = F.scaled_dot_product_attention(q, *keys_values, mask)
        return self.out_proj(y.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    """nn.TransformerEncoderLayer for inference."""

    def __init__(self):
        super().__init__()
        self.self_attn = Attention()
        self.linear1 = nn.Linear(256, 512, bias=False)
        self.linear2 = nn.Linear(512, 256, bias=False)
        self.norm1 = nn.LayerNorm(256, bias=False)
        self.norm2 = nn.LayerNorm(256, bias=False)

    def forward(self, x, real):
        y = self.norm1(x)
        x = x + self.self_attn(y, self.self_attn.keys_values(y), real)
        return x + self.linear2(F.gelu(self.linear1(self.norm2(x))))


class DecoderLayer(EncoderLayer):
    """nn.TransformerDecoderLayer for inference. `past` has the keys and values of past tokens."""

    def __init__(self):
        super().__init__()
        self.multihead_attn = Attention()
        self.norm3 = nn.LayerNorm(256, bias=False)

    def forward(self, x, past, memory, real):
        y = self.norm1(x)
        past = torch.cat((past, self.self_attn.keys_values(y)), 3)
        x = x + self.self_attn(y, past)
        x = x + self.multihead_attn(self.norm2(x), memory, real)
        x = x + self.linear2(F.gelu(self.linear1(self.norm3(x))))
        return x, past


class StepwiseTransformer(nn.Module):
    """The transformer of the training scripts, for inference: one token at a time, with a cache."""

    def __init__(self, source_size, target_size, seq_len):
        super().__init__()
        self.source = nn.Embedding(source_size, 256)
        self.target = nn.Embedding(target_size, 256)
        self.positions = nn.Embedding(seq_len, 256)
        encoder_layers = nn.ModuleList([EncoderLayer() for _ in range(3)])
        decoder_layers = nn.ModuleList([DecoderLayer() for _ in range(3)])
        self.encoder = nn.ModuleDict({"layers": encoder_layers, "norm": nn.LayerNorm(256)})
        self.decoder = nn.ModuleDict({"layers": decoder_layers, "norm": nn.LayerNorm(256)})
        self.head = nn.Linear(256, target_size, bias=False)
        self.head.weight = self.target.weight

    def encode(self, source, lengths):
        """Returns the mask of real tokens, and (past, memory) for each layer of the decoder."""
        real = (source != PAD)[:, None, None]  # (B, 1, 1, S)
        x = self.source(source) * 256**0.5 + self.positions.weight[: source.shape[1]]
        for layer in self.encoder["layers"]:
            x = layer(x, real)
        x = self.encoder["norm"](x)
        caches = []
        for layer in self.decoder["layers"]:
            memory = layer.multihead_attn.keys_values(x)
            no_past = memory[:, :, :, :0]
            caches.append((no_past, memory))
        return real, caches

    def step(self, state, token, position):
        """Returns the logits (B, 1, V) of the tokens after these (B, 1), and the next state."""
        real, caches = state
        x = self.target(token) * 256**0.5 + self.positions.weight[position]
        next_caches = []
        for layer, (past, memory) in zip(self.decoder["layers"], caches):
            x, past = layer(x, past, memory, real)
            next_caches.append((past, memory))
        return self.head(self.decoder["norm"](x)), (real, next_caches)


def create_trained(args, weights):
    """Returns a translator for inference with these weights, renamed, and the pairs to test on."""
    (data,) = read_data(args, ["test"])
    sizes = [tokenizer.get_vocab_size() for tokenizer in data.tokenizers.values()]
    if sizes != [len(weights["source.weight"]), len(weights["target.weight"])]:
        raise ValueError(f"{args.dataset} in {args.data_dir} is not the data of the training")
    if args.model == "lstm":
        model = StepwiseLSTM(*sizes)
        model.load_state_dict(weights)
        return model.eval(), data
    model = StepwiseTransformer(*sizes, args.seq_len)
    renamed = {"head.weight": weights["target.weight"]}
    for name, tensor in weights.items():
        if name.endswith("in_proj_weight"):  # queries, keys and values
            prefix = name.removesuffix("in_proj_weight")
            renamed[f"{prefix}q.weight"] = tensor[:256]
            renamed[f"{prefix}kv.weight"] = tensor[256:]
        else:
            renamed[name] = tensor
    model.load_state_dict(renamed)
    return model.eval(), data


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


def bleu_score(texts, translations):
    """Returns the BLEU of the translations, without regard to case."""
    references = [text or "" for text in texts["target"]]
    bleu = sacrebleu.corpus_bleu(  # force: no warning that the texts look tokenized
        translations, [references], lowercase=True, tokenize="intl", force=True
    )
    return bleu.score


@torch.no_grad()
def translate_stepwise(model, batches, tokenizer, args):
    """Returns translations by greedy decoding, the likeliest token each time, and sentences/s."""
    translations = []
    start = time.perf_counter()
    for source, lengths in batches:
        target = torch.full_like(source[:, :1], START)  # (B, T)
        state = model.encode(source, lengths)
        while target.shape[1] < args.seq_len and not (target == END).any(1).all():
            logits, state = model.step(state, target[:, -1:], target.shape[1] - 1)
            target = torch.cat((target, logits.argmax(2)), 1)
        for ids in target[:, 1:].tolist():
            text = tokenizer.decode(ids, skip_special_tokens=False)
            translations.append(text.partition("[END]")[0])
    return translations, len(translations) / (time.perf_counter() - start)


def main(args):
    has_kernels = torch.cuda.is_available() and args.backend == "torchao"  # torch.ao: for CPUs
    device = torch.device("cuda" if has_kernels else "cpu")
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs
    torch.compiler.config.recompile_limit = 64  # all variants count together
    model, data = load_model(args)
    model = model.to(device)
    batches = []
    num_batches = max(1, len(data) // args.batch_size)
    for indices in np.array_split(np.arange(len(data)), num_batches):  # longest sources first
        sources, lengths, _ = data.__getitems__(indices)
        batches.append((sources.to(device), lengths))
    timed = batches[:: max(1, len(batches) // 3)]  # a few, from the longest to the shortest
    settings = vars(args) | {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(textwrap.fill(", ".join(f"{name} {value}" for name, value in settings.items()), 100))

    variants = create_variants(model, args.backend)
    rows = []
    for precision, kernels, model in variants:
        row = {"precision": precision, "kernels": kernels, "MB": megabytes(model)}
        if args.backend == "torchao":
            model.encode = torch.compile(model.encode)
            model.step = torch.compile(model.step)
        # This warms up the model, too.
        translations, _ = translate_stepwise(model, batches, data.tokenizers["target"], args)
        row["BLEU"] = f"{bleu_score(data.texts, translations):.2f}"
        row["sentences/s"] = []
        rows.append(row)
    for _ in range(args.rounds):  # in turn, so that a slow moment of the machine meets all
        for row, (_, _, model) in zip(rows, variants):
            _, speed = translate_stepwise(model, timed, data.tokenizers["target"], args)
            row["sentences/s"].append(speed)
    print_table(rows)


if __name__ == "__main__":
    main(parse_args())
