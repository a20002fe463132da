"""Compare a trained text classifier in fp32, bf16, int8, int4, float8: size, accuracy, speed.

    python singlegpu/text.py --model transformer --snapshot text.pt
    python quantize/text.py --snapshot text.pt           # a snapshot of any text.py
    python quantize/text.py --snapshot text.pt --row int8-torch.ao --out int8.pt

What --out saved is loaded and used like this, with PYTHONPATH=quantize:

    import text
    model, args = text.load_quantized("int8.pt")
    _, data = text.read_data(args)
    tokens, targets = data.__getitems__([0, 1, 2])
    print(model(tokens).argmax(1), targets)

Rows: *-dynamic has int8 or float8 weights, and scales its inputs in each call. *-weights has int8
or int4 weights, and leaves the inputs as they are. In -g32, 32 weights share a scale. int8-torch.ao
is dynamic, by PyTorch's older library, and the other rows are by torchao. In torchao's int4 rows
and, on GPUs, in all of its rows the rest of the model is bf16: compare them with the row bf16.
1.50x is 1.5 times as fast as fp32 in the same mode. On GPUs, fp32 multiplies in TF32. What this
machine or torch.compile cannot run is left out.
Columns: MB is the file; same % is the share of texts whose class is that of fp32. Embeddings do not
change.
Shapes: N texts of a split, B of a batch, T tokens, D = d_model, H heads, K classes.
"""

import argparse
import copy
import io
import os
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import torch
import torchao.quantization as ao
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset
from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
from torchao.quantization.pt2e.inductor_passes import x86
from torchao.utils import should_reduce_range

ROWS = "fp32 bf16 int8-torch.ao int8-dynamic int8-weights int4-weights-g32 float8-dynamic".split()
COLUMNS = ["row", "mode", "MB", "val_acc", "same %", "texts/s"]
COMPILED = ["forward"]  # methods of the model
HUB = {"ag_news": "fancyzhx/ag_news", "imdb": "stanfordnlp/imdb"}  # names on the Hugging Face hub
SIZES = {"small": (128, 4, 512, 2), "large": (256, 8, 1024, 4)}  # D, H, dim_feedforward, layers
SPECIAL_TOKENS = ["[PAD]", "[UNK]"]  # ids 0 and 1
VOCAB_SIZE = 20_000  # at most: the special tokens and the most frequent words
# Chinese, Japanese, Thai, ... have no blanks between words: each character is a token.
SCRIPTS = "Han Hiragana Katakana Thai Lao Khmer Myanmar Tibetan".split()
CHARACTER = "|".join(rf"\p{{{script}}}" for script in SCRIPTS)


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--snapshot", metavar="FILE", required=True, help="what a text.py saved")
    add("--data_dir", default="data", help="folder in which the dataset is looked for first")
    add("--row", choices=ROWS, help="measure only this row, beside fp32")
    add("--out", metavar="FILE", help="save the model of --row")
    add("--eager", action="store_true", help="leave out the compiled rows: compiling takes minutes")
    add("--batch_size", type=int, default=64, help="least number at once; int8 on GPUs needs 17")
    add("--num_samples", type=int, default=0, help="texts to test the quality on; 0: all")
    add("--rounds", type=int, default=5, help="measurements of each speed; their median is printed")
    args = parser.parse_args()
    if args.out and not args.row:
        parser.error("--out needs --row")
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
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    characters = pre_tokenizers.Split(Regex(CHARACTER), "isolated")
    words = pre_tokenizers.Whitespace()  # words, and runs of punctuation
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([characters, words])
    options = {"vocab_size": VOCAB_SIZE, "min_frequency": 2, "special_tokens": SPECIAL_TOKENS}
    trainer = trainers.WordLevelTrainer(**options, show_progress=False)
    tokenizer.train_from_iterator([text or "" for text in batch["text"]], trainer)
    return {"tokenizer": [tokenizer.to_str()]}


def encode(batch, tokenizer):
    """Returns token ids (N, seq_len), with zeros after a text's end."""
    encodings = tokenizer.encode_batch_fast([text or "" for text in batch["text"]])
    tokens = np.array([encoding.ids for encoding in encodings], np.int16)  # VOCAB_SIZE < 2**15
    tokens[:, 0] = tokens[:, 0].clip(1)  # an empty text becomes one [UNK]
    return {"tokens": tokens}


def load_texts(args):
    """Returns the training texts and the test texts, tables with columns text and label."""
    if args.dataset == "synthetic":
        splits = datasets.Dataset.from_generator(synthetic_texts).train_test_split(2_000, seed=0)
        return splits["train"], splits["test"]
    folder = os.path.join(args.data_dir, args.dataset)
    path = folder if os.path.isdir(folder) else HUB.get(args.dataset, args.dataset)
    splits = []
    for split in datasets.load_dataset(path, split=["train", "test"]):
        texts = split.select_columns(["text", "label"])
        texts = texts.cast_column("text", datasets.Value("string"))  # it may be digits
        # -1 is the hub's mark for a missing label. NaN differs from itself.
        has_label = [x not in (None, -1, "") and x == x for x in texts["label"][:]]
        splits.append(texts.select(np.flatnonzero(has_label)))
        labels = str(sorted(splits[-1].unique("label")))
        count = f"{sum(has_label)} of {len(split)} rows of {split.split}"
        print(f"{count} have a label other than -1: {labels:.60}", flush=True)
    return splits


class Texts(Dataset):
    """Texts as token ids (N, T), sorted by their lengths (N,), and the numbers of their classes."""

    def __init__(self, tokens, targets, classes):
        lengths = np.count_nonzero(tokens, axis=1)
        order = np.argsort(lengths, stable=True)
        self.tokens, self.lengths, self.targets = tokens[order], lengths[order], targets[order]
        self.classes = classes  # their names (K,)

    def __len__(self):
        return len(self.lengths)

    def __getitems__(self, indices):
        """Returns a whole batch: tokens (B, T), with zeros after a text's end, targets (B,)."""
        tokens = self.tokens[indices, : self.lengths[indices].max()]
        return torch.from_numpy(tokens).long(), torch.from_numpy(self.targets[indices])


def read_data(args):
    """Returns the data to train on and, from the test texts, the data to validate on."""
    # map() caches by the code of a function of __main__, but by the name alone of any other. Where
    # multigpu/text.py starts a process, the main module is called __mp_main__.
    for function in (synthetic_texts, learn_vocabulary, encode):
        function.__module__ = "__main__"
    datasets.disable_progress_bars()
    train_texts, test_texts = load_texts(args)
    labels = sorted(train_texts.unique("label"))
    unknown = sorted(set(test_texts.unique("label")) - set(labels))
    if unknown:
        sys.exit(f"{args.dataset}: test has labels that train has not: {unknown[:5]}")
    options = {"batched": True, "remove_columns": ["text", "label"]}
    vocabulary = train_texts.map(learn_vocabulary, batch_size=None, **options)
    tokenizer = Tokenizer.from_str(vocabulary[0]["tokenizer"])
    tokenizer.encode_special_tokens = True  # "[PAD]" in a text is text
    tokenizer.enable_truncation(args.seq_len)
    tokenizer.enable_padding(length=args.seq_len)
    data = []
    for name, texts in (("train", train_texts), ("test", test_texts)):
        encoded = texts.map(encode, fn_kwargs={"tokenizer": tokenizer}, **options)
        tokens = encoded.with_format("numpy", dtype=np.int16)["tokens"][:]
        data.append(Texts(tokens, np.searchsorted(labels, texts["label"][:]), labels))
        share = (tokens == 1).sum() / (tokens > 0).sum()
        if share > 1 / 3:
            print(f"{share:.0%} of all tokens of {name} are [UNK], words that are rare in train")
        share = np.mean(tokens[:, -1] > 0)
        if share > 0.1:
            print(f"{share:.0%} of the texts of {name} fill --seq_len: the end is cut off")
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
            widen = nn.Linear(d_model, dim_feedforward, bias=False)
            narrow = nn.Linear(dim_feedforward, d_model, bias=False)
            feed_forward = nn.Sequential(nn.LayerNorm(d_model), widen, nn.GELU(), narrow)
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
    model = nn.Sequential(encoder, nn.Dropout(args.dropout), nn.Linear(d_model, len(data.classes)))
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    return model


def create_empty(args):
    """Returns the model of these settings, untrained."""
    return create_model(args, args)  # of the data it needs the classes alone


def load_trained(args):
    """Returns the trained model and data to test it on. Adds the training's settings to args."""
    snapshot = torch.load(args.snapshot, map_location="cpu", weights_only=True, mmap=True)
    vars(args).update(snapshot["settings"] | vars(args))  # flags of this script stay
    train_data, data = read_data(args)
    known = snapshot.get("progress", {}).get("fingerprint")  # what --out has saved has none
    if known and known[0] != len(train_data):
        sys.exit(f"{args.dataset} is not what it was in training: its words have other numbers now")
    args.classes = data.classes
    model = create_empty(args)
    model.load_state_dict(snapshot["model"])
    return model.eval(), data


def classify(model, batches):
    """Returns the likeliest classes (N,)."""
    return torch.cat([model(tokens).argmax(1) for tokens, _ in batches]).cpu().numpy()


def test(model, data, indices, batches, args):
    """Returns the share of right answers, and the answers (N,)."""
    answers = classify(model, batches)
    return np.mean(answers == data.targets[indices]), answers


def measure(row, model, data, batches, args):
    """Returns texts/s over up to 16 batches, which stand for all lengths."""
    start = time.perf_counter()
    answers = classify(model, batches[:: len(batches) // 16 + 1])
    return [len(answers) / (time.perf_counter() - start)]


def quantize(model, row):
    """Returns a copy of the model for a row of the table. An error says why there is none."""
    device = next(model.parameters()).device
    on_cpu = device.type == "cpu"
    model = copy.deepcopy(model).to(device)  # .to() joins an LSTM's weights again, for cuDNN
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
        per_channel = quantization.per_channel_dynamic_qconfig
        layers = {nn.Linear: per_channel, nn.LSTM: quantization.default_dynamic_qconfig}
        return quantization.quantize_dynamic(model, layers)
    if device.type not in ("cpu", "cuda", "xpu"):
        raise NotImplementedError(f"torchao has no kernels for {device.type}")

    multiple = 1 if on_cpu else 16  # of a layer's sizes, which kernels need
    if row == "int8-dynamic":
        # A CPU without VNNI adds two products in 16 bits, which 8-bit factors overflow.
        config = ao.Int8DynamicActivationInt8WeightConfig(reduce_range=should_reduce_range(device))
    elif row == "int8-weights":
        config = ao.Int8WeightOnlyConfig()
    elif row == "float8-dynamic":
        config = ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow())
    else:
        multiple = 32  # weights that share a scale
        if on_cpu:
            config = PrototypeInt4WeightOnlyConfig(group_size=32)
        else:
            packing = "tile_packed_to_4d" if device.type == "cuda" else "plain_int32"
            config = ao.Int4WeightOnlyConfig(group_size=32, int4_packing_format=packing)

    def fits(layer, name=""):
        return type(layer) is nn.Linear and not any(n % multiple for n in layer.weight.shape)

    if not any(map(fits, model.modules())):
        raise NotImplementedError(f"no linear layer has sizes that are multiples of {multiple}")
    for name, layer in model.named_modules():
        if type(layer) is nn.Linear and not fits(layer):
            print(f"{row}: {name} is not quantized: no multiple of {multiple}", file=sys.stderr)
    if row.startswith("int4") or not on_cpu:  # on CPUs, int4 kernels are fast in bf16 alone
        model.bfloat16()
    ao.quantize_(model, config, fits)
    return model


def load_quantized(file, device="cpu"):
    """Returns a model that --out saved on such a device, and the settings of its training."""
    saved = torch.load(file, map_location=device, weights_only=True)
    args = argparse.Namespace(**saved["settings"])
    model = create_empty(args).eval()
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
    if device.type == "cpu":
        # Without these two, torch.compile leaves int8 products to a slow loop.
        torch._inductor.config.freezing = True
        x86._register_quantization_weight_pack_pass()
    trained, data = load_trained(args)
    trained.to(device)
    num_samples = args.num_samples or len(data)
    indices = np.linspace(0, len(data) - 1, num_samples).astype(int)  # short and long ones
    parts = np.array_split(indices, max(1, num_samples // args.batch_size))
    batches = [data.__getitems__(part) for part in parts]
    batches = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batches)

    print(f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print("|", " | ".join(COLUMNS), "|")
    print("|", " | ".join(["---"] * len(COLUMNS)), "|")
    for mode in ["eager"] if args.eager else ["eager", "compiled"]:
        for row in dict.fromkeys(["fp32", args.row]) if args.row else ROWS:
            try:
                model = quantize(trained, row)
                file = io.BytesIO()
                torch.save({"settings": vars(args), "model": model.state_dict()}, file)
                if mode == "compiled":
                    # Without fullgraph, a model that does not compile runs eagerly, and so do all
                    # after it, fp32 too: PyTorch then skips the function that they share.
                    for name in COMPILED:
                        setattr(model, name, torch.compile(getattr(model, name), fullgraph=True))
                score, answers = test(model, data, indices, batches, args)
                run = partial(measure, row, model, data, batches, args)
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
            # In turn, so that a slow moment of the machine meets both.
            rounds = [[each() for each in runs] for _ in range(args.rounds)]
            for fp32_speed, speed in np.median(rounds, 0)[[0, -1]].T:
                cells.append("-" if np.isnan(speed) else f"{speed:.4g} {speed / fp32_speed:.2f}x")
            print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main(parse_args())
