"""Train a translator on all GPUs of a machine or, if it has none, with two CPU processes.

    python multigpu/translation.py                                  # digits to words: no download
    python multigpu/translation.py --dataset multi30k --dropout 0.25 --snapshot de_en.pt
    sbatch slurm/multigpu_translation.slurm --dataset FOLDER --source COLUMN --target COLUMN

At the end it prints BLEU and examples of the test split.

Read mnist.py first. This is the same, in the same order, with what a real job needs.
For your own data and model, replace the first of the three sections.
Shapes: B pairs of a batch, S source and T target tokens, D = d_model, V words.
"""

import argparse
import contextlib
import io
import itertools
import json
import math
import os
import random
import re
import signal
import sys
import tempfile
import textwrap
import time
import zlib
from collections import Counter
from multiprocessing import active_children
from multiprocessing.util import Finalize, get_temp_dir
from pathlib import Path

import datasets
import numpy as np
import sacrebleu
import torch
import torch.distributed as dist
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, default_collate
from tqdm import tqdm

ON_GPU = torch.accelerator.is_available()  # a GPU of any maker

# == Yours: flags, data, model, loss. Replace it. ==================================================

MEAN_TOKENS = 13  # of a sentence, roughly
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
    add("--model", choices=("transformer", "lstm"), default="transformer", help="network to train")
    add("--dataset", default="synthetic", help="synthetic, multi30k, a folder or a hub name")
    add("--data_dir", default="data", help="folder in which --dataset is looked for first")
    add("--source", default="de", help="column to translate from")
    add("--target", default="en", help="column to translate to")
    add("--seq_len", type=int, default=64, help="longest sentence in tokens; the rest is cut off")
    add("--dropout", type=float, default=0.0, help="dropout probability, on embeddings too")
    return parse_run_args(parser, epochs=10, batch_size=128, max_grad_norm=1.0)


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


def training_order(data, args, epoch):
    """Returns the indices of all pairs that fill a batch, in the order of an epoch."""
    lengths = data.lengths["source"] + data.lengths["target"]
    num_pairs = len(data) // args.batch_size * args.batch_size  # an incomplete batch is left out
    generator = np.random.default_rng((args.seed, epoch))
    shuffled = generator.permutation(len(data))[:num_pairs]
    # 100 random batches at a time are sorted by length, so that a batch needs little padding.
    cuts = range(100 * args.batch_size, num_pairs, 100 * args.batch_size)
    pools = [pool[lengths[pool].argsort(stable=True)] for pool in np.split(shuffled, cuts)]
    order = generator.permutation(np.concatenate(pools).reshape(-1, args.batch_size))  # (steps, B)
    return np.sort(order).flatten()  # in each batch: processes get pairs of similar length


class Translator(nn.Module):
    """Maps sources (B, S), lengths (B,) and targets (B, T) to the next tokens' logits (B, T, V)."""

    def forward(self, source, lengths, target):
        return self.decode(self.encode(source, lengths), target)


class LSTMTranslator(Translator):
    """Sutskever, Vinyals and Le 2014: the last state of the encoder starts the decoder."""

    def __init__(self, source_size, target_size, dropout):
        super().__init__()
        self.source = nn.Embedding(source_size, 256)
        self.target = nn.Embedding(target_size, 256)
        self.encoder = nn.LSTM(256, 512, num_layers=2, batch_first=True, dropout=dropout)
        self.decoder = nn.LSTM(256, 512, num_layers=2, batch_first=True, dropout=dropout)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(512, target_size)

    def encode(self, source, lengths):
        x = self.dropout(self.source(source))
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.encoder(packed)[1]  # its last state

    def decode(self, state, target):
        x, _ = self.decoder(self.dropout(self.target(target)), state)
        return self.head(x)


class TransformerTranslator(Translator):
    """Vaswani et al. 2017, with norms first, learned positions, and the embedding as the head."""

    def __init__(self, source_size, target_size, seq_len, dropout):
        super().__init__()
        self.source = nn.Embedding(source_size, 256)
        self.target = nn.Embedding(target_size, 256)
        self.positions = nn.Embedding(seq_len, 256)
        self.dropout = nn.Dropout(dropout)
        options = {"activation": "gelu", "batch_first": True, "norm_first": True, "bias": False}
        layer = nn.TransformerEncoderLayer(256, 8, 512, dropout=0.0, **options)
        self.encoder = nn.TransformerEncoder(layer, 3, nn.LayerNorm(256), False)  # no NestedTensor
        layer = nn.TransformerDecoderLayer(256, 8, 512, dropout=0.0, **options)
        self.decoder = nn.TransformerDecoder(layer, 3, nn.LayerNorm(256))
        for name, module in self.named_modules():  # dropout is only at the end of sublayers
            if name.endswith(("dropout1", "dropout2", "dropout3")):
                module.p = dropout
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.xavier_uniform_(parameter)

    def embed(self, embedding, tokens):
        x = embedding(tokens) * 256**0.5  # scaled as in the paper
        return self.dropout(x + self.positions.weight[: tokens.shape[1]])

    def encode(self, source, lengths):
        """Returns the encoder's output (B, S, D), and where the sources are padding (B, S)."""
        padding = source == PAD
        x = self.embed(self.source, source)
        return self.encoder(x, src_key_padding_mask=padding), padding

    def decode(self, state, target):
        memory, padding = state
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], target.device)
        x = self.embed(self.target, target)
        x = self.decoder(x, memory, mask, tgt_is_causal=True, memory_key_padding_mask=padding)
        return nn.functional.linear(x, self.target.weight)


def create_model(args, data):
    """Returns a Translator."""
    sizes = [data.tokenizers[side].get_vocab_size() for side in SIDES]
    if args.model == "lstm":
        return LSTMTranslator(*sizes, args.dropout)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it is slow at each new T
    return TransformerTranslator(*sizes, args.seq_len, args.dropout)


def create_optimizer(model, args):
    return torch.optim.AdamW(model.parameters(), args.learning_rate, fused=True)


def learning_rate_factor(args, done):
    """Returns what scales --learning_rate when this share of all steps, 0 to 1, is done."""
    return 1 - 0.95 * done  # it falls to a twentieth


def batch_loss(model, batch, args):
    """Returns the loss of a batch, and sums over its target tokens. A row shows sums / count."""
    sources, lengths, targets = batch
    logits = model(sources, lengths, targets[:, :-1]).flatten(0, 1)  # (B x T, V)
    expected = targets[:, 1:].flatten()
    loss = nn.functional.cross_entropy(logits, expected, ignore_index=PAD, reduction="sum")
    # Not a mean over tokens: processes have different numbers of them, and equal weights.
    return loss / (len(targets) * MEAN_TOKENS), {"loss": loss, "count": (expected != PAD).sum()}


@torch.no_grad()
def translate(model, sources, lengths, tokenizer, args):
    """Returns translations of sources (B, S): greedily, the likeliest token each time."""
    target = torch.full((len(sources), 1), START, device=sources.device)  # (B, T)
    state = model.encode(sources, lengths)
    while target.shape[1] < args.seq_len and not (target == END).any(1).all():
        token = model.decode(state, target)[:, -1].argmax(1)
        target = torch.cat((target, token[:, None]), 1)
    texts = tokenizer.decode_batch(target[:, 1:].tolist(), skip_special_tokens=False)
    return [text.partition("[END]")[0] for text in texts]


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
def finish(model, data, args, device):
    """Prints examples and the BLEU of the test split. Called by one process at the end."""
    sys.__stdout__.reconfigure(errors="replace")  # the locale may not be UTF-8
    test_data = Pairs(read_splits(args)[2], data.tokenizers)
    tokenizer = data.tokenizers["target"]
    translations = []
    for indices in np.array_split(np.arange(len(test_data)), len(test_data) // 128 + 1):
        sources, lengths, _ = test_data.__getitems__(indices)
        translations += translate(model, sources.to(device), lengths, tokenizer, args)
    for index in len(test_data) // 4, len(test_data) // 2, len(test_data) * 3 // 4:
        print(*test_data.texts[index].values(), translations[index], sep="\n    ")
    print(f"BLEU {bleu_score(test_data.texts['target'], translations, tokenizer):.2f}")


# == The run: flags, steps, rows, snapshots. Keep it. It calls eight functions of the task. ========

DTYPES = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
COMM_HOOKS = {"none": "allreduce_hook", "bf16": "bf16_compress_hook", "fp16": "fp16_compress_hook"}
SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)  # each asks the run to save and stop
MAY_CHANGE = (  # flags, of any task, that may differ in a resumed run. All others may not.
    "num_gpus epochs max_steps eval_every grad_accum_steps comm_hook compile num_workers "
    "data_dir snapshot init_from log sample reconstructions"
).split()


def parse_run_args(parser, **defaults):
    """Adds the flags of the run to those of the task, and parses them all."""
    has_tf32 = ON_GPU and torch.version.cuda is not None  # AMD's TF32 is as inexact as bf16
    add = parser.add_argument_group("the run").add_argument
    add("--num_gpus", type=int, default=0, help="processes; 0: one for each GPU")
    add("--epochs", type=int, help="passes over the data; a change can shift the schedule")
    add("--max_steps", type=int, default=0, help="optimizer steps in total; 0: --epochs decides")
    add("--eval_every", type=int, default=0, help="steps between validations; 0: once per epoch")
    add("--batch_size", type=int, help="global batch: samples per optimizer step")
    add("--grad_accum_steps", type=int, default=1, help="micro-batches per batch, to save memory")
    add("--learning_rate", type=float, default=1e-3, help="peak learning rate")
    add("--max_grad_norm", type=float, default=0.0, help="clip gradients to this norm; 0: do not")
    add("--precision", choices=DTYPES, default="tf32" if has_tf32 else "fp32", help="number type")
    add("--comm_hook", choices=COMM_HOOKS, default="none", help="type in which gradients are sent")
    add("--compile", action="store_true", help="use torch.compile, which slows the first steps")
    add("--num_workers", type=int, default=0, help="processes that load data, for each GPU")
    add("--seed", type=int, default=1, help="seed of weights, data order and dropout")
    add("--snapshot", metavar="FILE", help="save at each row and when stopped; resume from it")
    add("--init_from", metavar="FILE", help="start from the weights of this snapshot")
    add("--log", metavar="FILE.jsonl", help="append a row for each process, for report.py")
    parser.set_defaults(**defaults)
    return parser.parse_args()


def main(rank, args, init_method):  # runs in each process: spawn() passes rank 0, 1, ...
    world_size = args.num_gpus  # the number of processes
    device = torch.device(rank % torch.accelerator.device_count() if ON_GPU else "cpu")
    if ON_GPU:
        torch.accelerator.set_device_index(device.index)
    backend = dist.get_default_backend_for_device(device)  # nccl for NVIDIA GPUs, gloo for CPUs
    gpu = device if ON_GPU else None
    dist.init_process_group(backend, init_method, rank=rank, world_size=world_size, device_id=gpu)
    set_seeds(args.seed)  # the same random splits in all processes
    with contextlib.redirect_stdout(io.StringIO()):  # the parent has printed this already
        train_data, val_data = read_data(args)
    steps_per_epoch = len(train_data) // args.batch_size  # an incomplete last batch is left out
    num_steps = args.max_steps or args.epochs * steps_per_epoch
    eval_every = args.eval_every or steps_per_epoch

    dtype = DTYPES[args.precision]
    autocast = torch.autocast(device.type, dtype, enabled=dtype is not None)
    torch.set_float32_matmul_precision("high" if args.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = args.precision == "tf32"
    # Time the algorithms of a convolution, and take the fastest. AMD's search takes too long.
    torch.backends.cudnn.benchmark = torch.version.hip is None
    set_seeds(args.seed)  # the same weights in each run, and in all processes
    model = create_model(args, train_data).to(device)
    # Parts that the task has put into eval() stay so. A model that is wholly in eval() is trained.
    resting = [part for part in model.modules() if model.training and not part.training]
    model.train()
    for part in resting:
        part.training = False
    optimizer = create_optimizer(model, args)
    places = {parameter: place for place, parameter in enumerate(model.parameters())}
    optimized = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if optimized - {*model.parameters()}:
        sys.exit("the optimizer has parameters that the model has not: put them into the model")
    left_out = [p for p in model.parameters() if p.requires_grad and p not in optimized]
    for parameter in left_out:
        parameter.requires_grad_(False)  # its gradients would add up, and count in the norm
    if rank == 0 and left_out:
        print(f"{len(left_out)} parameters are frozen: the optimizer does not have them")
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"] + 0.0  # a copy, since it may be a tensor
        # A snapshot keeps the optimizer's states by place. Sorted, a set's order does not matter.
        group["params"].sort(key=places.get)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    if args.snapshot:  # what a resume could not read fails here, before the training
        torch.save([optimizer.state_dict(), args.settings], file := io.BytesIO())
        torch.load(io.BytesIO(file.getvalue()), "cpu", weights_only=True)
    fingerprint = fingerprint_of(train_data, args)
    progress = {"id": f"{time.time_ns():x}", "fingerprint": fingerprint}
    # The steps done, the step of the last row, and the sums of batch_loss since that row.
    progress |= {"step": 0, "row_step": 0, "totals": {}}
    if args.snapshot and os.path.exists(args.snapshot):
        snapshot = torch.load(args.snapshot, "cpu", weights_only=True)
        progress |= snapshot["progress"]
        if progress["fingerprint"] != fingerprint:
            way_out = f"--init_from {args.snapshot} starts anew with its weights"
            sys.exit(f"the training data is not that of {args.snapshot}. {way_out}")
        for name, part in parts.items():
            part.load_state_dict(snapshot.pop(name))  # which frees its memory
    elif args.init_from:
        load_weights(model, fingerprint, args)
    step = first_step = progress["step"]  # the steps done before this start
    if differ(torch.tensor([*fingerprint, len(val_data), step], device=device)).any():
        causes = "Sort what comes from a set or a folder, seed generators, share the file system"
        sys.exit(f"the processes have different code, flags, data or snapshots. {causes}")
    compiled_model = torch.compile(model) if args.compile else model
    ddp_model = nn.parallel.DistributedDataParallel(compiled_model, gradient_as_bucket_view=True)
    # Buffers, such as BatchNorm's, may differ while training: evaluate() copies those of rank 0.
    ddp_model.broadcast_buffers = False
    hook = getattr(default_hooks, COMM_HOOKS[args.comm_hook])
    hook = with_marks(hook)
    ddp_model.register_comm_hook(None, hook)

    stop_requests = []

    def note_stop(signum, frame):
        stop_requests.append(signum)
        if signum == signal.SIGINT:
            signal.signal(signum, signal.SIG_DFL)  # a second Ctrl-C ends the process at once

    for signum in SIGNALS:
        signal.signal(signum, note_stop)
    Finalize(None, end_workers, exitpriority=0)  # called at exit, also after an error
    for stream in (sys.stdout, sys.stderr):
        stream.write, stream.flush = without_errors(stream.write), without_errors(stream.flush)
    if rank == 0:
        print(f"processes {world_size}, device {device}, steps {step} to {num_steps}", flush=True)
    requests = training_requests(train_data, step, args)
    batches = load_batches(train_data, requests, device, args)
    pause = 0.1 if sys.stderr.isatty() else 60  # seconds between two prints of the bar
    bar = tqdm(initial=step, total=num_steps, disable=rank > 0, mininterval=pause)
    # The sums of batch_loss since the last row: of this process, on its device. Names with a slash
    # are the run's own. After a resume, rank 0 alone has the saved sums: they count once.
    sums = Counter(progress["totals"] if rank == 0 else dict.fromkeys(progress["totals"], 0.0))
    rows = []  # of all processes since the start, in rank 0 alone
    look_step, look_time, next_look = step, time.perf_counter(), step + 1
    is_stopped = False
    mark("start")
    while True:
        is_row = step > progress["row_step"] and (step % eval_every == 0 or step >= num_steps)
        # A look, about once a second, at the same step in all processes: they add their sums, and
        # agree whether to stop. Python waits for the GPU only here.
        if is_row or step == next_look:
            own = {name: float(value) for name, value in sums.items()}  # waits for the GPU
            seconds = time.perf_counter() - look_time
            totals = add_up({**own, "/stops": len(stop_requests), "/seconds": seconds}, device)
            mark("comm")
            count_marks(is_warmup=step <= first_step + 3)
            is_stopped = totals.pop("/stops") > 0
            speed = (step - look_step) * world_size / totals.pop("/seconds")  # steps/s
            if not math.isfinite(totals["loss"]):
                sys.exit(f"the loss is not finite at step {step}")
            bar.set_postfix(loss=f"{totals['loss'] / max(1, totals['count']):.4g}", refresh=False)
            if is_row or is_stopped:
                check_weights(model, step)
                progress |= {"step": step, "totals": dict(totals)}
                if args.snapshot:
                    save(parts, progress, train_data, args)
                    mark("save")
                val_totals = {}
                if not is_stopped:  # else the resumed run validates first
                    val_totals = evaluate(model, compiled_model, val_data, device, autocast, args)
                    mark("eval")
                    sums.clear()
                    progress |= {"row_step": step, "totals": {}}
                    if args.snapshot and step >= num_steps:  # a restart does not validate again
                        save(parts, progress, train_data, args)
                        mark("save")
                row = {"run": progress["id"], "step": step, "steps_per_epoch": steps_per_epoch}
                rate = float(optimizer.param_groups[0]["lr"])
                row |= {"epoch": step / steps_per_epoch, "lr": rate}
                rows += log_row(row, totals, val_totals, model, device, args)
            # Look after each of the first 3 steps. Later, look again in about a second, but after
            # at most twice as many steps as between the last two looks.
            longest = 2 * (step - look_step) if step >= first_step + 3 else 1
            next_look = step + max(1, min(int(speed), longest))
            look_step, look_time = step, time.perf_counter()
        if is_stopped or step >= num_steps:
            break
        factor = float(learning_rate_factor(args, (step + 1) / num_steps))
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        for micro_step in range(args.grad_accum_steps):
            batch = next(batches)
            set_seeds(args.seed, rank, step, micro_step)  # dropout is the same after a resume
            mark("data")
            is_last = micro_step == args.grad_accum_steps - 1
            ddp_model.require_backward_grad_sync = is_last  # else no averaging, as in no_sync()
            with autocast:
                loss, batch_sums = batch_loss(ddp_model, batch, args)
            sums.update(as_tensors(batch_sums))
            mark("forward")
            scaler.scale(loss / args.grad_accum_steps).backward()
            mark("comm" if is_last else "backward")  # if last, the hook has marked backward
        if args.max_grad_norm > 0:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm).float()
            # The scaler skips steps whose gradients are infinite: their norm does not count.
            sums.update({"/norm": norm.nan_to_num(0, 0, 0), "/steps": norm.isfinite().int()})
        set_seeds(args.seed, step)  # the same in all processes: an optimizer may draw numbers
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        mark("optimizer")
        step += 1
        bar.update()

    bar.close()
    del ddp_model  # before torch 2.14, a process can hang at its end if DDP outlives its group
    dist.barrier()  # a process that leaves early can make the others fail
    dist.destroy_process_group()
    if rank > 0:
        return
    print_marks(rows)
    if is_stopped:
        has_saved = args.snapshot and step > first_step  # else a job would be queued again for ever
        print(f"stopped at step {step} of {num_steps}, saved {args.snapshot or 'nothing'}")
        sys.exit(os.EX_TEMPFAIL if has_saved else 128 + signal.SIGTERM)  # 75: run me again
    finish(model.eval(), val_data, args, device)


def without_errors(write):
    """Returns this method of a stream without its errors: a closed pipe must not end a training."""

    def try_to_write(*text):
        with contextlib.suppress(OSError):
            write(*text)

    return try_to_write


def end_workers():
    """Kills the workers. They block SIGTERM (see load_batches), so Python would wait forever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader's handler would raise an error
    for worker in active_children():
        worker.kill()


def set_seeds(*numbers):
    """Seeds the random numbers of Python, NumPy and PyTorch."""
    seed = hash(numbers) % 2**32  # Python hashes numbers alike in all processes, unlike strings
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes longer
    if ON_GPU and not torch.utils.data.get_worker_info():
        torch.get_device_module().manual_seed(seed)


def fingerprint_of(data, args):
    """Returns the length of the data, and a checksum of three samples and the first order."""
    samples = Batches(data)[(args.seed,), [0, len(data) // 2, len(data) - 1]]
    samples = [x.tolist() if isinstance(x, torch.Tensor) else x for x in tree_leaves(samples)]
    set_seeds(args.seed, 0)
    order = np.asarray(training_order(data, args, 0))  # of a long one, str() shows both ends
    text = re.sub("at 0x[0-9a-f]+", "", f"{samples} {order}")  # addresses of objects differ
    return [len(data), zlib.crc32(text.encode())]


def differ(numbers):
    """Returns, for each of K whole numbers, whether the processes disagree."""
    of_all = [torch.empty_like(numbers) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, numbers)
    return (torch.stack(of_all) != numbers).any(0)


def checksum(weights):
    """Returns a sum of all bytes, each times its place: weights that change places count, too."""
    pieces = weights.flatten().view(torch.uint8).split(2**18)  # 256 KiB, to need little memory
    places = torch.arange(1, len(pieces[0]) + 1, dtype=torch.int32, device=weights.device)
    sums = [(piece * places[: len(piece)]).sum() for piece in pieces]
    return sum(number * total for number, total in enumerate(sums, start=1))


def check_weights(model, step):
    """Ends the run if weights are not finite, or if their checksums differ between processes."""
    weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    checksums = torch.stack([checksum(p) for p in weights.values()])
    different = [name for name, differs in zip(weights, differ(checksums)) if differs]
    if different:
        causes = "Does forward() change it? Or was it frozen at the start, so that DDP left it out?"
        sys.exit(f"step {step}: {different[0]} is not the same in all processes. {causes}")
    if not all(p.isfinite().all() for p in weights.values()):
        sys.exit(f"the weights are not finite at step {step}")


def load_weights(model, fingerprint, args):
    """Loads the weights of --init_from, except those whose shape differs, such as a new head's."""
    snapshot = torch.load(args.init_from, "cpu", weights_only=True, mmap=True)
    weights = snapshot["model"]
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    fitting = {name: each for name, each in weights.items() if each.shape == shapes.get(name)}
    others = sorted((shapes.keys() | weights.keys()) - fitting.keys())
    if not fitting:
        sys.exit(f"{args.init_from} has no weights of this model")
    if dist.get_rank() == 0 and others:
        print(f"{len(others)} weights do not match {args.init_from}: {', '.join(others):.60}")
    if dist.get_rank() == 0 and snapshot.get("progress", {}).get("fingerprint") != fingerprint:
        print(f"{args.init_from} is of another seed or data: are its words and classes the same?")
    model.load_state_dict(fitting, strict=False)


def save(parts, progress, data, args):
    """Rank 0 writes a temporary file and renames it, so that no snapshot is half written."""
    if dist.get_rank() == 0:
        snapshot = {name: part.state_dict() for name, part in parts.items()}
        snapshot |= {"progress": progress, "settings": args.settings}
        snapshot["classes"] = [str(name) for name in getattr(data, "classes", ())]
        path = os.path.realpath(args.snapshot)  # it may be a link
        with open(f"{path}.tmp", "wb") as file:
            torch.save(snapshot, file)
            os.fsync(file.fileno())
        os.replace(f"{path}.tmp", path)
    dist.barrier()  # the others wait


def training_requests(data, step, args):
    """Yields seeds, and indices of samples, for each micro-batch of this process from `step` on."""
    steps_per_epoch = len(data) // args.batch_size
    for epoch in itertools.count(step // steps_per_epoch):
        set_seeds(args.seed, epoch)  # all processes draw the same order, and each takes its share
        order = np.asarray(training_order(data, args, epoch))
        while step < (epoch + 1) * steps_per_epoch:
            start = step % steps_per_epoch * args.batch_size
            share = order[start : start + args.batch_size][dist.get_rank() :: dist.get_world_size()]
            for indices in share.reshape(args.grad_accum_steps, -1).tolist():
                yield (args.seed, step), indices
            step += 1


class Batches:
    """The batches of a data set. A request is (seeds, indices). The seeds are for augmentation."""

    def __init__(self, data):
        self.data = data

    def __getitem__(self, request):
        seeds, indices = request
        set_seeds(*seeds, *indices)
        if not hasattr(self.data, "__getitems__"):
            return default_collate([self.data[index] for index in indices])
        samples = self.data.__getitems__(indices)  # a tuple or dict is a batch already
        return default_collate(samples) if isinstance(samples, list) else samples


def load_batches(data, requests, device, args):
    """Yields a batch on the device for each request."""
    if args.num_workers and len(get_temp_dir()) > 89:  # a socket's path has at most 107 characters
        sys.exit("TMPDIR is too long for workers")
    loader = DataLoader(
        Batches(data),
        batch_size=None,  # each request is a whole batch
        sampler=requests,
        num_workers=args.num_workers or 0,
        multiprocessing_context="fork" if args.num_workers else None,  # shares the data's memory
        pin_memory=ON_GPU,
    )
    # Workers inherit the blocked signals: Slurm signals them, too, and the run still needs them.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    batches = iter(loader)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    for batch in batches:
        yield tree_map(
            lambda part: to_device(part, device), batch, is_leaf=lambda part: hasattr(part, "to")
        )


def to_device(part, device):
    """Returns a part of a batch on the device. What has no .to stays as it is."""
    if isinstance(part, torch.Tensor):
        return part.to(device, non_blocking=True)
    if not hasattr(part, "to"):
        return part
    moved = part.to(device)
    return part if moved is None else moved  # some move in place, and return nothing


def as_tensors(sums):
    """Returns these sums in float32 or int64. In bfloat16 256 + 1 is 256, in bool 1 + 1 is 1."""
    tensors = {name: torch.as_tensor(x).detach() for name, x in sums.items()}
    return {name: x.float() if x.is_floating_point() else x.long() for name, x in tensors.items()}


def add_up(sums, device):
    """Returns the sums over all processes, as numbers. Waits for the GPU."""
    names = sorted(sums)  # the same order in all processes
    totals = torch.tensor([float(sums[name]) for name in names], device=device)
    dist.all_reduce(totals)
    totals = dict(zip(names, totals.tolist()))
    return {name: totals[name] for name in sums}  # the order of a row's columns


@torch.no_grad()
def evaluate(model, compiled_model, data, device, autocast, args):
    """Returns the sums of batch_loss over the data, of which each process takes a share."""
    for buffer in model.buffers():  # BatchNorm's statistics: those of rank 0
        if buffer.is_contiguous() or 0 not in buffer.stride():  # an expanded one is read only
            dist.broadcast(sent := buffer.contiguous(), src=0)
            buffer.copy_(sent)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    share = range(rank, len(data), world_size)
    size = args.batch_size // world_size // args.grad_accum_steps  # as in training
    pieces = (share[start : start + size] for start in range(0, len(share), size))
    requests = (((args.seed,), list(piece)) for piece in pieces)
    in_training = [part for part in model.modules() if part.training]
    model.eval()
    sums = Counter()
    for number, batch in enumerate(load_batches(data, requests, device, args)):
        set_seeds(args.seed, rank, number)  # the same in each validation
        with autocast:
            _, batch_sums = batch_loss(compiled_model, batch, args)
        sums.update(as_tensors(batch_sums))
    for part in in_training:
        part.training = True
    return add_up(sums, device)


def log_row(row, totals, val_totals, model, device, args):
    """Appends the rows of all processes to --log, prints the means, and returns these rows."""
    if "/norm" in totals:
        row["grad_norm"] = totals.pop("/norm") / max(1, totals.pop("/steps"))
    means = {}
    for split, sums in ("train", totals), ("val", val_totals):
        count = sums.pop("count", 0)  # 0: not validated, or no sample had a label
        means |= {f"{split}_{name}": total / count for name, total in sums.items() if count}
    device_module = torch.get_device_module(device)
    row = vars(args) | row | means
    row |= take_marks(args)
    row |= {
        "script": "/".join(Path(__file__).resolve().parts[-2:]),
        "processes": dist.get_world_size(),
        "rank": dist.get_rank(),
        "host": os.uname().nodename,
        "device": getattr(device_module, "get_device_name", device.type.upper)(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    rows = [None] * row["processes"] if row["rank"] == 0 else None
    dist.gather_object(row, rows)
    if row["rank"] > 0:
        return []
    same = {"run": row["run"], "nodes": len({each["host"] for each in rows})}
    if args.log:
        with open(args.log, "a") as file:
            file.writelines(json.dumps(each | same, default=str) + "\n" for each in rows)
    shown = [*means, "lr", "grad_norm", "seconds", "samples/s"]
    words = [f"{name} {row[name]:.4g}" for name in shown if name in row]
    tqdm.write(textwrap.fill("  ".join([f"step {row['step']}", *words]), 100))
    return [each | {"last_step": None} for each in rows]


def check_args(args, world_size):
    """Ends the run if flags do not fit together, files cannot be written, or settings differ."""
    divisor = world_size * args.grad_accum_steps
    if min(divisor, args.batch_size) < 1 or args.batch_size % divisor:
        sys.exit(f"--batch_size must be a multiple of {world_size} x --grad_accum_steps")
    if args.seed < 0:
        sys.exit("--seed must not be negative")
    for path in map(os.path.realpath, filter(None, (args.snapshot, args.log))):
        if os.path.isdir(path) or not os.access(os.path.dirname(path), os.W_OK):
            sys.exit(f"cannot write {path}: it is a folder, or its folder is missing or read-only")
    args.settings = {}  # the flags that must stay the same, as numbers and strings
    for name, value in vars(args).items():
        if name not in (*MAY_CHANGE, "settings"):
            args.settings[name] = value if isinstance(value, (int, float)) else str(value)
    if args.snapshot and os.path.exists(args.snapshot):
        saved = torch.load(args.snapshot, "cpu", weights_only=True, mmap=True)["settings"]
        for name, value in args.settings.items():
            if saved.get(name, value) != value:
                sys.exit(f"{args.snapshot} was made with --{name} {saved[name]}, not {value}")


# == Where the time goes. To remove it: delete this section, and lines with "mark(" or "marks(". ===

STEP_PHASES = ("data", "forward", "backward", "comm", "optimizer")
PHASES = ("warmup", *STEP_PHASES, "eval", "save")  # warmup: the first three steps
TIMES = (*PHASES, "comm_total", "steps")
moments = []  # the one at which the last phase ended
events = []  # (name, start, end, bytes) since the last look: phases, all-reduces of gradients
last_step = []  # the events of the last step, in seconds
times = Counter()  # seconds by phase since the last row


def now():
    """Returns this moment. Python does not wait for the GPU, which notes it when it gets here."""
    moment = torch.Event(enable_timing=True) if ON_GPU else time.perf_counter()
    if ON_GPU:
        moment.record()
    return moment


def mark(phase):
    """Notes that this phase ends here. It began where the one before it ended."""
    moments.append(now())
    if len(moments) > 1:
        events.append((phase, moments.pop(0), moments[0], 0))


def with_marks(comm_hook):
    """Returns a hook that DDP calls for each bucket of gradients: comm_hook with its times."""
    streams = [contextlib.nullcontext()] * 2  # in which all-reduces are started
    if ON_GPU:
        streams = [torch.Stream(priority=-1) for _ in range(2)]

    def timed_hook(process_group, bucket):
        if bucket.is_last():
            mark("backward")
        start, size = now(), bucket.buffer().nbytes

        def note_end(future):  # on a GPU, in a stream that waits for the all-reduce
            events.append(("all-reduce", start, now(), size))
            return future.value()

        # A hook may make its stream wait for its all-reduce, to convert the result from bf16. If
        # this is a side stream, the backward pass goes on. Two streams take turns, so that a bucket
        # need not wait for the one before it.
        stream = streams[bucket.index() % 2]
        if ON_GPU:
            stream.wait_stream(torch.accelerator.current_stream())  # it computes the gradients
        with stream:
            return comm_hook(process_group, bucket).then(note_end)

    return timed_hook


def count_marks(is_warmup=False):
    """Adds up the times since the last look. Waits for the GPU."""
    if ON_GPU:
        torch.accelerator.synchronize()

    def seconds(moment):  # relative to the last mark, which all set after the same collective
        return -moment.elapsed_time(moments[0]) / 1000 if ON_GPU else moment - moments[0]

    step = []
    counted_until = -math.inf  # where all-reduces overlap, the time counts once
    timed = [(name, seconds(start), seconds(end), size) for name, start, end, size in events]
    events.clear()
    for name, start, end, size in sorted(timed, key=lambda event: event[1]):
        if is_warmup:
            times["warmup"] += end - start if name in PHASES else 0.0
            continue
        if name in PHASES:
            times[name] += end - start
        if name in ("comm", "all-reduce"):
            times["comm_total"] += max(0.0, end - max(start, counted_until))
            counted_until = max(counted_until, end)
        step.append((name, start, end, size))
        if name == "optimizer":
            times["steps"] += 1
            last_step[:] = step
            step = []


def take_marks(args):
    """Returns the columns of time and memory. The times start again from 0."""
    count_marks()
    row = {name: times[name] for name in TIMES}
    times.clear()
    # getrusage() would count the memory of the process that has started this one, too.
    sizes = re.findall(r"Vm(?:HWM|RSS):\s+(\d+)", Path("/proc/self/status").read_text())  # KiB
    row["peak_MB"] = max(map(int, sizes)) * 1024 / 1e6
    if ON_GPU:
        row["peak_MB"] = torch.accelerator.max_memory_allocated() / 1e6
    return row | speed_of(row, args.batch_size) | {"last_step": list(last_step)}


def speed_of(row, batch_size):
    """Returns all seconds of these times, and the speed of training after the warmup."""
    training = sum(row[phase] for phase in STEP_PHASES)
    speed = batch_size * row["steps"] / training if training else 0.0
    return {"seconds": sum(row[phase] for phase in PHASES), "samples/s": speed}


def print_marks(rows):
    """Prints where the time since the start has gone, and a row for results.md."""
    if not rows:
        return
    num_ranks = rows[0]["processes"]
    mean = {name: sum(row[name] for row in rows) / num_ranks for name in TIMES}
    mean |= speed_of(mean, rows[0]["batch_size"])
    print(f"\ntime by phase since this start, {mean['seconds']:.2f} s in all (mean over processes)")
    for phase in PHASES:
        share = mean[phase] / mean["seconds"]
        print(f"{phase:9} {mean[phase]:8.3f} {share:4.0%}  {'#' * round(50 * share)}")
    totals = [sum(row["comm_total"] for row in rows[rank::num_ranks]) for rank in range(num_ranks)]
    sending = min(totals)  # the process that comes last never waits in an all-reduce
    if num_ranks > 1 and sending > 0:
        late = totals.index(sending)
        hidden = max(0.0, 1 - mean["comm"] / mean["comm_total"])
        waiting = f"waiting {mean['comm_total'] - sending:.3f} s for rank {late}"
        print(f"communication {mean['comm_total']:.3f} s, {hidden:.0%} of it hidden:")
        print(f"sending {sending:.3f} s, {waiting} on {rows[late]['host']}")
        # With nothing hidden, N processes are N R / (1 + R) times as fast as one: 0.75 N at R = 3.
        ratio = (mean["forward"] + mean["backward"] + mean["optimizer"]) / sending
        verdict = "above 3: more processes can pay off, each on its own GPU or cores"
        verdict = verdict if ratio > 3 else "below 3: more processes hardly pay off"
        print(f"R = compute / sending = {ratio:.1f}, {verdict}")
    names = ("script", "model", "dataset", "precision", "processes", "batch_size")
    cells = {name: str(rows[0].get(name, "-")) for name in names}
    floats = {name: value for name, value in rows[-1].items() if isinstance(value, float)}
    results = {name: value for name, value in floats.items() if name.startswith("val_")}
    results |= mean | {"peak_MB": max(row["peak_MB"] for row in rows)}
    cells |= {name: f"{value:.4g}" for name, value in results.items()}
    for line in (cells.keys(), ["---"] * len(cells), cells.values()):
        print("|", " | ".join(line), "|")


if __name__ == "__main__":
    args = parse_args()
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        sys.exit(f"each task would train alone: use slurm/multinode_{Path(__file__).stem}.slurm")
    num_gpus = torch.accelerator.device_count()
    args.num_gpus = args.num_gpus or num_gpus or 2
    may_share = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"  # a GPU, as a rehearsal
    if ON_GPU and args.num_gpus > num_gpus and not may_share:
        sys.exit(f"this machine has {num_gpus} GPU(s), not {args.num_gpus}")
    check_args(args, args.num_gpus)
    # Downloads what is missing, once. It gets a copy of args, which read_data() may change.
    num_train, num_val = map(len, read_data(argparse.Namespace(**vars(args))))
    if num_train < args.batch_size or num_val < args.num_gpus:
        sys.exit(f"too few samples: {num_train} for a batch, {num_val} to validate on")
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # stay on this machine
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // args.num_gpus)))
    os.environ.setdefault("PYTHONHASHSEED", "0")  # all processes iterate a set of words alike

    def pass_on(signum, frame):  # asks each process to save and stop
        for process in active_children():
            process.terminate()
        if signum == signal.SIGINT:
            signal.signal(signum, signal.SIG_DFL)  # a second Ctrl-C ends all at once

    for signum in SIGNALS:
        signal.signal(signum, pass_on)
    with tempfile.TemporaryDirectory() as folder:  # the processes meet by a file in it
        start = (main, (args, f"file://{folder}/store"), args.num_gpus)
        try:
            context = torch.multiprocessing.spawn(*start, join=False)
            while not context.join(grace_period=5):
                pass
        except torch.multiprocessing.ProcessExitedException as error:
            if error.exit_code > 0:
                sys.exit(error.exit_code)
            print(error, file=sys.stderr)  # it names the process and the signal that ended it
            sys.exit(128 - error.exit_code)
