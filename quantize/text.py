"""Compare a trained text classifier in fp32, bf16 and int8: size, accuracy and speed.

    python singlegpu/text.py --model transformer --snapshot text.pt
    python quantize/text.py --snapshot text.pt           # a snapshot of any text.py
    sbatch slurm/quantize_text.slurm --snapshot text.pt  # trains a little without --snapshot

The weights of linear layers become int8 once, with a scale for each row. Their inputs become int8
in each call (dynamic), or never (weight-only). Embeddings and attention do not change.
torch.ao has the fastest kernels for CPUs and is deprecated. torchao, which follows it, needs
torch.compile. Its dynamic kernels need more than 16 tokens at once.
Shapes: N texts of a split, B of a batch, T tokens, D = d_model, H heads, K classes.
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
import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import nn
from torch.utils.data import Dataset

HUB = {"ag_news": "fancyzhx/ag_news", "imdb": "stanfordnlp/imdb"}  # names on the Hugging Face hub
SIZES = {"small": (128, 4, 512, 2), "large": (256, 8, 1024, 4)}  # D, H, dim_feedforward, layers
VOCAB_SIZE = 20_000  # [PAD], [UNK] and the most frequent words, at most
# Chinese, Japanese, Thai, ... have no blanks between words: each character is a token.
SCRIPTS = "Han Hiragana Katakana Thai Lao Khmer Myanmar Tibetan".split()
CHARACTER = "|".join(rf"\p{{{script}}}" for script in SCRIPTS)
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
    add("--snapshot", metavar="FILE", required=True, help="what a text.py saved")
    add("--data_dir", default="data", help="folder in which the dataset is looked for first")
    add(
        "--backend",
        choices=KERNELS,
        help="library for int8; torch.ao is for CPUs",
        default="torch.ao" if torch_ao and not torch.cuda.is_available() else "torchao",
    )
    add("--batch_size", type=int, default=64, help="texts at once; torchao needs more than 16")
    add("--rounds", type=int, default=5, help="measurements of each speed; their median is printed")
    args = parser.parse_args()
    if args.rounds < 1 or args.batch_size < (17 if args.backend == "torchao" else 1):
        parser.error("--rounds or --batch_size is too small")
    return args


def synthetic_texts():
    """Yields texts of 5 to 100 random words. Every tenth word is one of its class's 50 words."""
    generator = np.random.default_rng(0)
    for label in generator.integers(4, size=12_000).tolist():
        num_words = generator.integers(5, 101)
        words = generator.integers(1000, size=num_words)
        words[::10] = 50 * label + words[::10] % 50
        yield {"text": " ".join(map(str, words)), "label": label}


def learn_vocabulary(batch):
    """Returns a tokenizer for these texts, as a table of one row, which map() caches."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    characters = pre_tokenizers.Split(Regex(CHARACTER), "isolated")
    words = pre_tokenizers.Whitespace()  # words, and runs of punctuation
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([characters, words])
    trainer = trainers.WordLevelTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=2,
        show_progress=False,
        special_tokens=["[PAD]", "[UNK]"],
    )
    tokenizer.train_from_iterator([text or "" for text in batch["text"]], trainer)
    return {"tokenizer": [tokenizer.to_str()]}


def encode(batch, tokenizer, labels):
    """Returns token ids (N, seq_len) with zeros after a text's end, lengths (N,), classes (N,)."""
    encodings = tokenizer.encode_batch_fast([text or "" for text in batch["text"]])
    tokens = np.array([encoding.ids for encoding in encodings], np.int16)  # VOCAB_SIZE < 2**15
    tokens[:, 0] = tokens[:, 0].clip(1)  # an empty text becomes one [UNK]
    return {
        "tokens": tokens,
        "length": np.count_nonzero(tokens, axis=1),
        "class": [labels.index(label) for label in batch["label"]],
    }


def has_label(label):
    """None, NaN, blanks, and -1, the hub's own mark, are no labels."""
    return label.strip() != "" if isinstance(label, str) else label is not None and label >= 0


def say(message):
    """Prints a line, of all processes only in that of rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(message, flush=True)


def load_texts(args):
    """Returns the training texts, the test texts (columns text and label), and the K labels."""
    if args.dataset == "synthetic":
        splits = datasets.Dataset.from_generator(synthetic_texts).train_test_split(2_000, seed=0)
        return splits["train"], splits["test"], [0, 1, 2, 3]
    folder = os.path.join(args.data_dir, args.dataset)
    path = folder if os.path.isdir(folder) else HUB.get(args.dataset, args.dataset)
    labelled = {}
    try:
        splits = datasets.load_dataset(path)
        for name in ("train", "test", "validation"):
            if name in splits:
                texts = splits[name].select_columns(["text", "label"])
                texts = texts.cast_column("text", datasets.Value("string"))  # it may be digits
                labelled[name] = texts.filter(has_label, input_columns="label")
    except (OSError, TypeError, ValueError, datasets.exceptions.DatasetsError) as error:
        sys.exit(f"cannot read {path}: {error.__cause__ or error}")
    for name, texts in [*labelled.items()]:
        num_missing = len(splits[name]) - len(texts)
        if num_missing > 0:
            say(f"{num_missing} of {len(splits[name])} rows of {name} have no label: left out")
        if len(texts) == 0:
            del labelled[name]
    if "train" not in labelled or len(labelled) == 1:
        missing = "test" if "train" in labelled else "train"
        sys.exit(f"{path}: {missing} has no labels (in a CSV file, NA and null are none)")
    train_texts, test_texts = [*labelled.values()][:2]
    labels = sorted(train_texts.unique("label"))
    unknown = sorted(set(test_texts.unique("label")) - set(labels))
    if unknown:
        sys.exit(f"{path}: {[*labelled][1]} has labels that train has not: {unknown}")
    return train_texts, test_texts, labels


class Texts(Dataset):
    """Texts as token ids (N, T), sorted by their lengths (N,), and their classes (N,)."""

    def __init__(self, encoded, num_classes):
        arrays = encoded.with_format("numpy", dtype=np.int16)[:]
        order = np.argsort(arrays["length"], stable=True)
        self.tokens = arrays["tokens"][order]
        self.lengths = arrays["length"][order]
        self.classes = arrays["class"][order]
        self.num_classes = num_classes

    def __len__(self):
        return len(self.lengths)

    def __getitems__(self, indices):
        """Returns a whole batch: tokens (B, T), with zeros after a text's end, classes (B,)."""
        tokens = self.tokens[indices, : self.lengths[indices].max()]
        return torch.from_numpy(tokens).long(), torch.from_numpy(self.classes[indices]).long()


def read_data(args):
    """Returns the data to train on and to validate on, two map-style datasets.

    The test texts of the data sets serve for validation.
    """
    # map() caches by the code of a function of __main__, but by the name alone of any other. Where
    # multigpu/text.py starts a process, the main module is called __mp_main__.
    for function in (synthetic_texts, learn_vocabulary, encode, has_label):
        function.__module__ = "__main__"
    datasets.disable_progress_bars()
    train_texts, test_texts, labels = load_texts(args)
    options = {"batched": True, "remove_columns": ["text", "label"]}
    vocabulary = train_texts.map(learn_vocabulary, batch_size=None, **options)
    tokenizer = Tokenizer.from_str(vocabulary[0]["tokenizer"])
    tokenizer.encode_special_tokens = True  # "[PAD]" in a text is text
    tokenizer.enable_truncation(args.seq_len)
    tokenizer.enable_padding(length=args.seq_len)
    options["fn_kwargs"] = {"tokenizer": tokenizer, "labels": labels}
    data = []
    for name, texts in (("train", train_texts), ("test", test_texts)):
        data.append(Texts(texts.map(encode, **options), len(labels)))
        share = (data[-1].tokens == 1).sum() / data[-1].lengths.sum(dtype=np.int64)
        if share > 1 / 3:
            say(f"{share:.0%} of all tokens of {name} are [UNK], words that are rare in train")
    return data


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
                nn.LayerNorm(d_model),
                nn.Linear(d_model, dim_feedforward, bias=False),
                nn.GELU(),
                nn.Linear(dim_feedforward, d_model, bias=False),
            )
            self.layers.append(nn.ModuleList([qkv, projection, feed_forward]))
        self.positions = nn.Embedding(args.seq_len, d_model)
        self.norm = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, tokens):
        real = tokens > 0  # (B, T)
        x = self.dropout(self.embedding(tokens) + self.positions.weight[: tokens.shape[1]])
        for qkv, projection, feed_forward in self.layers:
            q, k, v = qkv(x).unflatten(2, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v, real[:, None, None])
            x = x + self.dropout(projection(y.transpose(1, 2).flatten(2)))  # (B, T, D)
            x = x + self.dropout(feed_forward(x))
        return (self.norm(x) * real[:, :, None]).sum(1) / real.sum(1, keepdim=True)


def create_model(args, data):
    """Returns a network from token ids (B, T) to logits (B, K)."""
    d_model = SIZES[args.size][0]
    if args.model == "transformer":
        torch.backends.cuda.enable_cudnn_sdp(False)  # it is slow at each new T
        encoder = TextEncoder(args)
    else:
        encoder = nn.EmbeddingBag(VOCAB_SIZE, d_model, mode="mean", padding_idx=0)
    model = nn.Sequential(encoder, nn.Dropout(args.dropout), nn.Linear(d_model, data.num_classes))
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    return model


def batch_loss(model, batch, args):
    """Returns the mean loss of a batch, and sums over its texts. Rows show sums / count."""
    tokens, classes = batch
    logits = model(tokens)  # (B, K)
    loss = nn.functional.cross_entropy(logits, classes)
    correct = (logits.argmax(1) == classes).sum()
    return loss, {"loss": loss * len(classes), "acc": correct, "count": len(classes)}


def create_trained(args, weights):
    """Returns the model with these weights, and the texts to test it on."""
    train_data, val_data = read_data(args)
    model = create_model(args, train_data)
    model.load_state_dict(weights)
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
def accuracy(model, batches, args):
    """Returns the share of right answers."""
    sums = [batch_loss(model, batch, args)[1] for batch in batches]
    return sum(float(each["acc"]) for each in sums) / sum(each["count"] for each in sums)


@torch.no_grad()
def texts_per_second(model, batches):
    start = time.perf_counter()
    for tokens, _ in batches:
        logits = model(tokens)
    if logits.is_cuda:
        torch.cuda.synchronize()
    return sum(len(tokens) for tokens, _ in batches) / (time.perf_counter() - start)


def main(args):
    has_kernels = torch.cuda.is_available() and args.backend == "torchao"  # torch.ao: for CPUs
    device = torch.device("cuda" if has_kernels else "cpu")
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs
    torch.compiler.config.recompile_limit = 64  # all variants count together
    model, data = load_model(args)
    model = model.to(device)
    batches = []
    num_batches = max(1, len(data) // args.batch_size)
    for indices in np.array_split(np.arange(len(data)), num_batches):  # shortest texts first
        tokens, classes = data.__getitems__(indices)
        batches.append((tokens.to(device), classes.to(device)))
    timed = batches[:: len(batches) // 16 + 1]  # stand for all lengths
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
            model.compile()
        row["val_acc"] = f"{accuracy(model, batches, args):.4f}"
        row["texts/s"] = []
        rows.append(row)
    for _ in range(args.rounds):  # in turn, so that a slow moment of the machine meets all
        for row, (_, _, model) in zip(rows, variants):
            row["texts/s"].append(texts_per_second(model, timed))
    print_table(rows)


if __name__ == "__main__":
    main(parse_args())
