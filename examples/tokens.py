"""Make files of tokens for gpt.py, from a data set of the Hugging Face Hub, a folder or files.

    python examples/tokens.py Salesforce/wikitext --config wikitext-103-raw-v1 --tokenizer gpt2
    python examples/tokens.py my.txt --vocab_size 8192

Hugging Face's `datasets` reads the source: a name on the Hub, a folder, or files. A folder is one
that save_to_disk() wrote, or it has Parquet, JSON or CSV files. Files of text, *.txt, are read as
they are, and each is one text. Without --tokenizer, a tokenizer is trained on the texts.

The folder --out then has four files. gpt.py maps train.npy and val.npy into memory. tokenizer.json
has the tokenizer, and tokens.json tells how the tokens were made. These are written piece by
piece, so the texts may exceed the memory. If this program is stopped, the same command goes on.

An end-of-text token follows each text. A sequence may have parts of several texts. A token sees all
tokens before it in its sequence, also those of earlier texts. GPT-2 and GPT-3 were trained in this
way.
"""

import argparse
import io
import itertools
import json
import os
import sys
from pathlib import Path

import datasets
import numpy as np
from huggingface_hub import hf_hub_download
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

KINDS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".json": "json", ".jsonl": "json"}
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")  # of known tokenizers
TRAINING_CHARACTERS = 10**8  # so many of the first characters are enough to train a tokenizer
MAX_VAL_TOKENS = 2**18  # at most so many are cut from the end to validate on, as in gpt.py


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("source", nargs="+", help="a name on the Hub, a folder, or files")
    add("--config", help="configuration of the data set, if it has several")
    add("--split", default="train", help="split to train on, such as train or train[:10%%]")
    add("--val_split", help="split to validate on; else the last tenth of the tokens, at most 2^18")
    add("--column", default="text", help="column that has the texts")
    add("--tokenizer", help="a name on the Hub, a tokenizer.json or its folder; else it is trained")
    add("--vocab_size", type=int, default=8192, help="number of token ids of a trained tokenizer")
    add("--end_of_text", help="name of the token between texts; else the tokenizer's own")
    add("--multiple_of", type=int, default=1, help="round the vocabulary up; 64 is fast on GPUs")
    add("--out", default="my_tokens", help="folder that is written")
    return parser.parse_args()


def open_split(args, split):
    """Returns the texts of a split: a Dataset, or a list of files of text."""
    paths = [Path(name) for name in args.source]
    if paths[0].is_dir() and any(paths[0].glob("*.txt")):
        paths = sorted(paths[0].glob("*.txt"))
    if all(path.suffix == ".txt" and path.is_file() for path in paths):
        return paths
    missing = [str(path) for path in paths if not path.is_file()]
    if missing and (len(paths) > 1 or paths[0].suffix in (".txt", *KINDS)):
        sys.exit(f"there is no file {', '.join(missing)}")
    try:
        if not missing:
            kind = KINDS.get(paths[0].suffix)
            if kind is None:
                sys.exit(f"{paths[0]} is none of: *.txt *{' *'.join(KINDS)}")
            data = datasets.load_dataset(kind, data_files=args.source, split=split)
        elif (paths[0] / "dataset_dict.json").exists():
            data = datasets.load_from_disk(args.source[0])[split]
        elif (paths[0] / "state.json").exists():
            data = datasets.load_from_disk(args.source[0])
        else:
            data = datasets.load_dataset(args.source[0], args.config, split=split)
    except Exception as error:  # of many classes: from the network, its libraries, a wrong name
        explain(f"the split {split} of {' '.join(args.source)}", error)
    if args.column not in data.column_names:
        sys.exit(f"there is no column {args.column}: --column is one of {data.column_names}")
    return data


def explain(name, error):
    """Ends the program with what could not be loaded, and why."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    hint = "If it is on the Hub, this needs a network, or an earlier download on this machine."
    sys.exit(f"cannot load {name}. {hint}\n{reason:.500}")


def size_of(texts):
    """Returns the size of the texts, by which a change is noticed: bytes of files, or rows."""
    return sum(path.stat().st_size for path in texts) if isinstance(texts, list) else len(texts)


def pieces_of(texts, column):
    """Yields lists of (piece of a text, whether the text ends here)."""
    if not isinstance(texts, list):  # a Dataset
        for start in range(0, len(texts), 1000):
            rows = texts[start : start + 1000][column]
            yield [(text, True) for text in rows if text]  # some rows are empty
        return
    for path in texts:
        with open(path, encoding="utf-8", newline="") as file:
            while lines := file.readlines(2**20):
                yield [("".join(lines), False)]
        yield [("", True)]


def make_tokenizer(args, texts):
    """Returns the tokenizer, loaded or trained, and the name of its end-of-text token."""
    if args.tokenizer:
        path = Path(args.tokenizer)
        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            if not path.exists():
                path = hf_hub_download(args.tokenizer, "tokenizer.json")
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:
            explain(f"the tokenizer {args.tokenizer}", error)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        known = [name for name in END_NAMES if tokenizer.token_to_id(name) is not None]
        end_name = args.end_of_text or (known or END_NAMES)[0]
        if tokenizer.token_to_id(end_name) is None:
            tokenizer.add_special_tokens([AddedToken(end_name, special=True)])
        return tokenizer, end_name

    def first_texts():
        num_left = TRAINING_CHARACTERS
        for text, _ in itertools.chain.from_iterable(pieces_of(texts, args.column)):
            if num_left <= 0:
                return
            num_left -= len(text)
            yield text

    end_name = args.end_of_text or END_NAMES[0]
    tokenizer = Tokenizer(models.BPE())  # of bytes, like that of GPT-2, so it can write any text
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=args.vocab_size,
        special_tokens=[end_name],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(first_texts(), trainer)
    return tokenizer, end_name


def write_json(path, content):
    """Writes a file under another name, and then renames it, so `path` is never half written."""
    beside = path.with_name(f"{path.name}.tmp")
    beside.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(beside, path)


def header(count, dtype):
    """Returns the first bytes of a .npy file of (count,) numbers. Their length never changes.

    numpy.save() would need all the numbers in memory at once.
    """
    stream = io.BytesIO()
    shape = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(stream, shape)
    return stream.getvalue()


def encode(name, texts, tokenizer, end_id, dtype, args):
    """Writes the tokens of all texts to NAME.part, a .npy file, and returns how many there are."""
    path, progress = Path(args.out, f"{name}.part"), Path(args.out, f"{name}.progress.json")
    done = {"lists": 0, "texts": 0, "bytes": len(header(0, dtype))}
    if path.exists() and progress.exists():
        done = json.loads(progress.read_text())
    else:
        path.write_bytes(header(0, dtype))
    bar = tqdm(total=size_of(texts), desc=name, unit="", disable=None)
    with open(path, "r+b") as file:
        file.truncate(done["bytes"])  # what follows may be half of a list
        file.seek(0, os.SEEK_END)
        for pieces in itertools.islice(pieces_of(texts, args.column), done["lists"], None):
            encoded = tokenizer.encode_batch([text for text, _ in pieces], add_special_tokens=False)
            ids = []
            for (_, is_end), encoding in zip(pieces, encoded):
                ids += encoding.ids + [end_id] * is_end
            file.write(np.array(ids, dtype).tobytes())
            file.flush()
            done["lists"] += 1
            done["texts"] += sum(is_end for _, is_end in pieces)
            done["bytes"] = file.tell()
            write_json(progress, done)
            bar.update(1000 if not isinstance(texts, list) else sum(len(t) for t, _ in pieces))
        count = (done["bytes"] - len(header(0, dtype))) // np.dtype(dtype).itemsize
        file.seek(0)
        file.write(header(count, dtype))
    bar.close()
    return count, done["texts"]


def cut_validation(out, count, dtype):
    """Moves the last tokens of train.part to val.part. Returns how many stay, and how many move."""
    num_val = min(count // 10, MAX_VAL_TOKENS)
    np.save(out / "val.npy", np.load(out / "train.part", mmap_mode="r")[count - num_val :])
    os.replace(out / "val.npy", out / "val.part")
    with open(out / "train.part", "r+b") as file:  # its header no longer counts its last tokens
        file.write(header(count - num_val, dtype))
    return count - num_val, num_val


def main():
    args = parse_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    texts = open_split(args, args.split)
    val_texts = open_split(args, args.val_split) if args.val_split else None
    if args.val_split and isinstance(texts, list):
        sys.exit("files of text have no splits: --val_split is for data sets")
    flags = {name: value for name, value in vars(args).items() if name != "out"}
    flags["size"] = [size_of(part) for part in (texts, val_texts) if part is not None]

    # An earlier run may have done a part or all. It must have had the same flags.
    finished, started = out / "tokens.json", out / "flags.json"
    if finished.exists() or started.exists():
        old = json.loads((finished if finished.exists() else started).read_text())
        if old["flags"] != flags:
            sys.exit(f"{out} was made with other flags: remove it, or give another --out")
    if not finished.exists():
        if not started.exists():
            tokenizer, end_name = make_tokenizer(args, texts)
            tokenizer.save(str(out / "tokenizer.json"))
            write_json(started, {"flags": flags, "end_of_text": end_name})  # now it can go on
        make_tokens(args, texts, val_texts, out, json.loads(started.read_text()))
    told = json.loads(finished.read_text())
    print(f"{told['train_tokens']} and {told['val_tokens']} tokens are in {out}: train on them by")
    print(f"python multigpu/gpt.py --dataset {out}")


def make_tokens(args, texts, val_texts, out, told):
    """Writes train.npy and val.npy, and last tokens.json, which tells that all is complete."""
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # if a text has such a token's name, it stays text
    end_id = tokenizer.token_to_id(told["end_of_text"])
    num_ids = max(tokenizer.get_vocab().values()) + 1
    vocab_size = -(-num_ids // args.multiple_of) * args.multiple_of  # rounded up
    dtype = "<u2" if vocab_size <= 2**16 else "<u4"
    num_train, num_texts = encode("train", texts, tokenizer, end_id, dtype, args)
    if val_texts is None:
        num_train, num_val = cut_validation(out, num_train, dtype)
    else:
        num_val, num_val_texts = encode("val", val_texts, tokenizer, end_id, dtype, args)
        num_texts += num_val_texts
    for name in ("train", "val"):
        os.replace(out / f"{name}.part", out / f"{name}.npy")
    size = len(header(0, dtype)) + num_train * np.dtype(dtype).itemsize
    os.truncate(out / "train.npy", size)  # cut off the tokens that val.npy has
    told |= {"vocab_size": vocab_size, "end_of_text_id": end_id, "texts": num_texts}
    told |= {"train_tokens": num_train, "val_tokens": num_val}
    write_json(out / "tokens.json", told)
    for path in (out / "flags.json", *out.glob("*.progress.json")):
        path.unlink()


if __name__ == "__main__":
    main()
