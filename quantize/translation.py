"""Compare a trained translator in fp32, bf16, int8, int4 and float8: size, BLEU and speed.

    python singlegpu/translation.py --snapshot translation.pt
    python quantize/translation.py --snapshot translation.pt    # a snapshot of any translation.py
    python quantize/translation.py --snapshot translation.pt --row int8-torch.ao --out int8.pt

What --out saved is loaded and used like this, with PYTHONPATH=quantize:

    import translation
    model, args = translation.load_quantized("int8.pt")
    (data,) = translation.read_data(args, ["test"])
    sources, lengths, _ = data.__getitems__([0, 1, 2])
    print(translation.translate_stepwise(model, [(sources, lengths)], data, args))

Rows: *-dynamic has int8 or float8 weights, and scales its inputs in each call. *-weights has int8
or int4 weights, and leaves the inputs as they are. In -g32, 32 weights share a scale. int8-torch.ao
is dynamic, by PyTorch's older library, and the other rows are by torchao. In torchao's int4 rows
and, on GPUs, in all of its rows the rest of the model is bf16: compare them with the row bf16.
1.50x is 1.5 times as fast as fp32 in the same mode. On GPUs, fp32 multiplies in TF32. What this
machine or torch.compile cannot run is left out.
torchao leaves LSTMs as they are: of an lstm, the last layer alone changes. torch.ao changes LSTMs,
too, but --out cannot save them: to load them is to run code. Embeddings do not change.
torch.compile has no LSTMs: of an lstm, all rows are eager.
Columns: MB is the file; same % is the share of sentences that are those of fp32.
Shapes: B sentences of a batch, S source and T target tokens, D = d_model, H heads, V words.
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
import sacrebleu
import torch
import torch.nn.functional as F
import torchao.quantization as ao
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset
from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
from torchao.quantization.pt2e.inductor_passes import x86
from torchao.utils import should_reduce_range

ROWS = "fp32 bf16 int8-torch.ao int8-dynamic int8-weights int4-weights-g32 float8-dynamic".split()
COLUMNS = ["row", "mode", "MB", "BLEU", "same %", "sentences/s"]
COMPILED = ["encode", "step"]  # methods of the model
HUB = {"multi30k": "bentrevett/multi30k"}  # names on the Hugging Face hub
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[START]", "[END]"]
PAD, UNKNOWN, START, END = range(4)  # their ids
SIDES = ["source", "target"]
# Chinese, Japanese, Thai, ... have no blanks between words: each character is a token.
SCRIPTS = "Han Hiragana Katakana Thai Lao Khmer Myanmar Tibetan".split()
CHARACTER = "|".join(rf"\p{{{script}}}" for script in SCRIPTS)
DIGITS = "zero one two three four five six seven eight nine".split()


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--snapshot", metavar="FILE", required=True, help="what a translation.py saved")
    add("--data_dir", default="data", help="folder in which the dataset is looked for first")
    add("--row", choices=ROWS, help="measure only this row, beside fp32")
    add("--out", metavar="FILE", help="save the model of --row")
    add("--eager", action="store_true", help="leave out the compiled rows: compiling takes minutes")
    add(
        "--batch_size",
        type=int,
        default=128,
        help="least number at once; int8 on GPUs needs 17",
    )
    add("--num_samples", type=int, default=0, help="sentences to test the quality on; 0: all")
    add("--rounds", type=int, default=5, help="measurements of each speed; their median is printed")
    args = parser.parse_args()
    if args.out and not args.row:
        parser.error("--out needs --row")
    return args


def synthetic_pairs():
    """Returns three splits: numbers of 1 to 12 digits ("4 2") and their names ("four two")."""
    generator = np.random.default_rng(0)
    pairs = []
    for row in range(22_000):
        digits = generator.integers(10, size=1 + row % 12)
        names = [DIGITS[digit] for digit in digits]
        pairs.append({"source": " ".join(map(str, digits)), "target": " ".join(names)})
    pairs = datasets.Dataset.from_list(pairs)
    return [pairs.skip(2000), pairs.take(1000), pairs.skip(1000).take(1000)]


def read_splits(args):
    """Returns the training, validation and test pairs: tables with columns source and target."""
    if args.dataset == "synthetic":
        return synthetic_pairs()
    folder = os.path.join(args.data_dir, args.dataset)
    path = folder if os.path.isdir(folder) else HUB.get(args.dataset, args.dataset)
    splits = []
    for split in datasets.load_dataset(path, split=["train", "validation", "test"]):
        flat = split.flatten()  # dictionaries, too
        prefix = "translation." if f"translation.{args.source}" in flat.column_names else ""
        names = {prefix + args.source: "source", prefix + args.target: "target"}
        texts = flat.select_columns([*names]).rename_columns(names)
        texts = texts.cast(datasets.Features(dict.fromkeys(SIDES, datasets.Value("string"))))
        splits.append(texts.filter(lambda *pair: all(pair), input_columns=SIDES))
        print(f"{len(splits[-1])} of {len(split)} {split.split} pairs are complete", flush=True)
    return splits


def train_tokenizer(texts, seq_len):
    """Returns a tokenizer for the frequent words of these texts. It pads to seq_len tokens."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    characters = pre_tokenizers.Split(Regex(CHARACTER), "isolated")
    words = pre_tokenizers.Whitespace()  # words, and runs of punctuation
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([characters, words])
    options = {"vocab_size": 30_000, "min_frequency": 2, "special_tokens": SPECIAL_TOKENS}
    tokenizer.train_from_iterator(texts, trainers.WordLevelTrainer(**options, show_progress=False))
    tokenizer.encode_special_tokens = True  # "[END]" in a text is text
    tokenizer.post_processor = processors.BertProcessing(("[END]", END), ("[START]", START))
    tokenizer.enable_truncation(seq_len)
    tokenizer.enable_padding(length=seq_len, pad_id=PAD)
    return tokenizer


class Pairs(Dataset):
    """Pairs of sentences as token ids, and their texts; the longest sources come first."""

    def __init__(self, texts, tokenizers):
        tokens = {}  # (N, seq_len) of each side
        for side, tokenizer in tokenizers.items():
            batches = (tokenizer.encode_batch_fast(batch[side]) for batch in texts.iter(1000))
            parts = [np.array([encoding.ids for encoding in batch], np.int16) for batch in batches]
            ids = tokens[side] = np.concatenate(parts)
            share = (ids == UNKNOWN).sum() / (np.count_nonzero(ids) - 2 * len(ids))  # START, END
            if share > 1 / 3:
                print(f"{share:.0%} of all words of {texts.split}'s {side} are [UNK], too rare")
            share = np.mean(ids[:, -1] != PAD)
            if share > 0.02:
                print(f"{share:.0%} of {texts.split}'s {side}s fill --seq_len: the end is cut off")
        order = np.argsort(-np.count_nonzero(tokens["source"], axis=1), stable=True)
        self.texts = texts.select(order)
        self.tokens = {side: tokens[side][order] for side in SIDES}
        self.lengths = {side: np.count_nonzero(self.tokens[side], axis=1) for side in SIDES}
        self.tokenizers = tokenizers

    def __len__(self):
        return len(self.texts)

    def __getitems__(self, indices):
        """Returns sources (B, S), the longest first, a list of lengths, and targets (B, T + 1)."""
        rows = np.sort(indices)
        sources = self.tokens["source"][rows, : self.lengths["source"][rows].max()]
        targets = self.tokens["target"][rows, : self.lengths["target"][rows].max()]
        lengths = self.lengths["source"][rows].tolist()  # no tensor: the LSTM needs it on the CPU
        return torch.from_numpy(sources).long(), lengths, torch.from_numpy(targets).long()


def read_data(args, names=("train", "validation")):
    """Returns the data to train on and to validate on, two map-style datasets."""
    datasets.disable_progress_bars()
    splits = dict(zip(("train", "validation", "test"), read_splits(args)))
    tokenizers = {side: train_tokenizer(splits["train"][side], args.seq_len) for side in SIDES}
    return [Pairs(splits[name], tokenizers) for name in names]


class StepwiseLSTM(nn.Module):
    """The lstm of the training scripts: it encodes a batch once, and decodes token by token.

    encode(source, lengths) returns a state; step(state, token, position) the logits (B, 1, V) of
    the tokens after these (B, 1), and the next state.
    """

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


class EncoderLayer(nn.TransformerEncoderLayer):
    """One layer for inference. Its attention is the one above."""

    def __init__(self):
        super().__init__(256, 8, 512, bias=False)
        self.self_attn = Attention()

    def forward(self, x, real):
        y = self.norm1(x)
        x = x + self.self_attn(y, self.self_attn.keys_values(y), real)
        return x + self.linear2(F.gelu(self.linear1(self.norm2(x))))


class DecoderLayer(nn.TransformerDecoderLayer):
    """One layer for inference. `past` has the keys and values of past tokens."""

    def __init__(self):
        super().__init__(256, 8, 512, bias=False)
        self.self_attn = Attention()
        self.multihead_attn = Attention()

    def forward(self, x, past, memory, real):
        y = self.norm1(x)
        past = torch.cat((past, self.self_attn.keys_values(y)), 3)
        x = x + self.self_attn(y, past)
        x = x + self.multihead_attn(self.norm2(x), memory, real)
        x = x + self.linear2(F.gelu(self.linear1(self.norm3(x))))
        return x, past


class StepwiseTransformer(nn.Module):
    """The transformer of the training scripts, with the methods of StepwiseLSTM."""

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
        """Returns the mask of real tokens, memory and past of each layer of the decoder."""
        real = (source != PAD)[:, None, None]  # (B, 1, 1, S)
        x = self.source(source) * 256**0.5 + self.positions.weight[: source.shape[1]]
        for layer in self.encoder["layers"]:
            x = layer(x, real)
        x = self.encoder["norm"](x)
        memories = [layer.multihead_attn.keys_values(x) for layer in self.decoder["layers"]]
        pasts = [memory[:, :, :, :0] for memory in memories]  # none yet
        return real, memories, pasts

    def step(self, state, token, position):
        real, memories, pasts = state
        x = self.target(token) * 256**0.5 + self.positions.weight[position]
        next_pasts = []
        for layer, memory, past in zip(self.decoder["layers"], memories, pasts):
            x, past = layer(x, past, memory, real)
            next_pasts.append(past)
        return self.head(self.decoder["norm"](x)), (real, memories, next_pasts)


def create_empty(args):
    """Returns the translator of these settings for inference, untrained."""
    if args.model == "lstm":
        return StepwiseLSTM(*args.vocab_sizes)
    return StepwiseTransformer(*args.vocab_sizes, args.seq_len)


def load_trained(args):
    """Returns the trained model and data to test it on. Adds the training's settings to args."""
    snapshot = torch.load(args.snapshot, map_location="cpu", weights_only=True, mmap=True)
    vars(args).update(snapshot["settings"] | vars(args))  # flags of this script stay
    train_data, data = read_data(args, ["train", "test"])
    known = snapshot.get("progress", {}).get("fingerprint")  # what --out has saved has none
    if known and known[0] != len(train_data):
        sys.exit(f"{args.dataset} is not what it was in training: its words have other numbers now")
    args.vocab_sizes = [tokenizer.get_vocab_size() for tokenizer in data.tokenizers.values()]
    model = create_empty(args)
    weights = snapshot["model"]
    for name in [name for name in weights if name.endswith("in_proj_weight")]:
        tensor = weights.pop(name)  # queries, keys and values
        weights[name.replace("in_proj_", "q.")] = tensor[:256]
        weights[name.replace("in_proj_", "kv.")] = tensor[256:]
    if args.model == "transformer":
        weights["head.weight"] = weights["target.weight"]
    model.load_state_dict(weights)
    return model.eval(), data


def bleu_score(texts, translations, tokenizer):
    """Returns the BLEU of the translations of texts, without regard to case."""
    # Else sacrebleu takes an unknown word for three: a bracket, a word, and a bracket.
    translations = [text.replace("[UNK]", "\u2047") for text in translations]
    references = []  # in small letters, with blanks between words, as in the translations
    for text in texts:
        text = tokenizer.normalizer.normalize_str(text)
        words = tokenizer.pre_tokenizer.pre_tokenize_str(text)
        references.append(" ".join(word for word, _ in words))
    # force: no warning that the texts look tokenized.
    return sacrebleu.corpus_bleu(translations, [references], tokenize="intl", force=True).score


@torch.no_grad()
def translate_stepwise(model, batches, data, args):
    """Returns translations by greedy decoding: the likeliest token each time."""
    translations = []
    for sources, lengths, *_ in batches:
        target = torch.full_like(sources[:, :1], START)  # (B, T)
        state = model.encode(sources, lengths)
        while target.shape[1] < args.seq_len and not (target == END).any(1).all():
            logits, state = model.step(state, target[:, -1:], target.shape[1] - 1)
            target = torch.cat((target, logits.argmax(2)), 1)
        ids = target[:, 1:].tolist()
        texts = data.tokenizers["target"].decode_batch(ids, skip_special_tokens=False)
        translations += [text.partition("[END]")[0] for text in texts]
    return translations


def test(model, data, indices, batches, args):
    """Returns the BLEU of all batches, and their translations."""
    translations = translate_stepwise(model, batches, data, args)
    texts = data.texts.select(indices)["target"]
    bleu = bleu_score(texts, translations, data.tokenizers["target"])
    return bleu, np.array(translations)


def measure(row, model, data, batches, args):
    """Returns sentences/s over a few batches, from the longest to the shortest."""
    start = time.perf_counter()
    batches = batches[:: max(1, len(batches) // 3)]
    translations = translate_stepwise(model, batches, data, args)
    return [len(translations) / (time.perf_counter() - start)]


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
