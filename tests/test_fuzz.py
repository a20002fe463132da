"""Bytes from outside, damaged or hostile: a reader makes sense of them, or ends with status 2 and one line on stderr.

FUZZ_EXAMPLES=10000 python -m pytest tests/test_fuzz.py    # inputs of each test, other ones each time
"""

import argparse
import contextlib
import copy
import csv
import io
import json
import math
import os
import pickle
import pickletools
import re
import resource
import shutil
import signal
import sys
import warnings
import zipfile

import numpy as np
import pytest
import torch
from conftest import ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_quantize import Bomb, load
from test_report import COLUMNS, rows_of, write
from torch import nn

sys.path.insert(0, str(ROOT))
import report  # noqa: E402

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", 200))
SECONDS, MEMORY = 20, 1 << 20  # KiB; what no input may take
NUMBERS = [0, -1, 1, 2, 1023, 10**8, 2**31, 2**63, 10**400, 0.5, 1e-320, 1e300, 1.7e308, math.inf, -math.inf, math.nan]
VALUES = st.sampled_from(NUMBERS) | st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9)),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=5), values, max_size=3),
    max_leaves=5,
)


def fuzz(check, valid, strategy, examples=EXAMPLES):
    """Call check with what is valid, which it must not refuse, and with each input: the same ones in each plain run."""
    assert check(valid)

    def run(content):
        check(content)

    settings(
        max_examples=examples,
        derandomize="FUZZ_EXAMPLES" not in os.environ,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )(given(strategy)(run))()


@pytest.fixture
def outcome(tmp_path, monkeypatch):
    """outcome(read, *arguments) is what read returns and prints, or None where it refused, as it should."""

    def late(*_):
        pytest.fail(f"no end after {SECONDS} s")

    def outcome(read, *arguments):
        out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace"))
        result = status = None
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(record=True) as warned,
        ):
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", RuntimeWarning)  # a user would see it
            signal.alarm(SECONDS)
            try:
                result = read(*arguments)
            except SystemExit as ended:
                status = ended.code
            finally:
                signal.alarm(0)
        out, err = (stream.flush() or stream.buffer.getvalue().decode() for stream in (out, err))
        assert not (tmp_path / "exploded").exists(), "something was unpickled"
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < memory + MEMORY, "it took more than 1 GiB"
        assert not warned, [f"{warning.filename}:{warning.lineno}: {warning.message}" for warning in warned]
        if status is None:
            assert not err, err
            return result, out
        assert status == 2 and len(err.splitlines()) == 1 and "Traceback" not in err, (status, err)

    before = signal.signal(signal.SIGALRM, late)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    yield outcome
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def bomb(tmp_path):
    return Bomb(tmp_path / "exploded")


@st.composite
def damaged(draw, valid, splices=(b"",), places=(0,)):
    """Bytes of which pieces were left out, flipped, repeated, overwritten or made room for a splice; or any bytes."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)) | st.sampled_from(places))
        end = draw(st.just(start) | st.integers(start, start + 8) | st.integers(start, max(start, len(data))))
        piece, other = data[start:end], draw(st.integers(0, len(data)))
        flipped = bytes(byte ^ 1 << draw(st.integers(0, 7)) for byte in piece[:4]) + piece[4:]
        new = [b"", flipped, piece * 2, data[other : other + len(piece)], *splices]
        data[start:end] = draw(st.sampled_from(new) | st.binary(max_size=12))
    return bytes(data) if draw(st.integers(0, 9)) else draw(st.binary(max_size=200))


@st.composite
def edited(draw, document, values=VALUES):
    """A document of dicts and lists in which up to three values were replaced or left out."""
    document = [copy.deepcopy(document)]
    for _ in range(draw(st.integers(1, 3))):
        place, key = document, 0
        while isinstance(place[key], (dict, list)) and place[key] and draw(st.integers(0, 9)):
            place = place[key]
            key = draw(st.sampled_from([*place] if isinstance(place, dict) else range(len(place))))
        if draw(st.integers(0, 9)) or place is document:
            place[key] = draw(values)
        else:
            del place[key]
    return document[0]


@st.composite
def folders(draw, files, values):
    """{name: bytes}, one or two of which were damaged, got other values or the content of another file, or are gone."""
    files = dict(files)
    for name in draw(st.lists(st.sampled_from([*files]), min_size=1, max_size=2, unique=True)):
        kind = st.just(files[name]) if draw(st.booleans()) else values(name)
        files[name] = draw(kind | damaged(files[name]) | st.sampled_from([None, *files.values()]))
    return files


def lay(folder, files):
    """Write the files that there are to a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        if content is not None:
            (folder / name).write_bytes(content)


def documents(values):
    """Files of JSON."""
    return values.map(json.dumps).map(str.encode)


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz(array):
    file = io.BytesIO()
    np.savez(file, array)
    return file.getvalue()


def arrays(bomb):
    """Files of numpy: short arrays of many kinds."""
    kinds = st.sampled_from(["<i8", "<u2", "u1", "i1", "<f8", ">i4", "?", "<U3", "<M8[s]", "<c16", "O"])
    array = st.builds(np.array, st.lists(st.integers(0, 12), max_size=8) | st.integers(0, 9), kinds)
    array |= st.lists(st.integers(-9, 300), max_size=9).map(np.array)
    array |= array.map(lambda array: array[None]) | st.just(np.array([bomb, bomb], object))
    return array.map(npy) | array.map(npz)


def saved(document):
    file = io.BytesIO()
    torch.save(document, file)
    return file.getvalue()


@st.composite
def archives(draw, whole, splices):
    """Archives of torch.save with a damaged member or two, and the right checksums."""
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    code = next(name for name in members if name.endswith("data.pkl"))
    places = [place for _, _, place in pickletools.genops(members[code])]
    for name in draw(st.lists(st.sampled_from([code, code, *members]), min_size=1, max_size=2)):
        members[name] = draw(damaged(members[name], splices, places if name == code else (0,)))
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", draw(st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))) as archive:
        for name, content in members.items():
            if draw(st.integers(0, 29)):
                archive.writestr(name, content)
    return file.getvalue()


def snapshots(document, bomb):
    """Files of torch.save: damaged; with other content, and the checksums of it; with other values. Some hold bombs."""
    code = pickle.dumps(bomb, 2)
    splices = code, code[2:-1] + b"0"  # as a pickle of its own; inside of one, where it is made and dropped
    tensors = [torch.zeros(()), torch.ones(3), torch.zeros(1).expand(3, 2, 3, 3), torch.zeros(2, 3, dtype=torch.int8)]
    tensors += [torch.full((3,), math.nan), torch.zeros(3, dtype=torch.float64), torch.zeros(2, 3, device="meta")]
    tensors += [torch.zeros(2, 3).to_sparse(), torch.zeros(2, dtype=torch.complex64), nn.Parameter(torch.zeros(3))]
    tensors += [torch.zeros(0), torch.quantize_per_tensor(torch.zeros(2, 3), 0.1, 0, torch.qint8)]
    values = VALUES | st.sampled_from([bomb, *tensors])
    return st.one_of(
        damaged(saved(document), splices), archives(saved(document), splices), edited(document, values).map(saved)
    )


def test_snapshot(outcome, bomb, tmp_path):
    """The place in the run has numbers in it, and the optimizer's moments are as its kernel expects them."""
    images, path = load("singlegpu", "images"), tmp_path / "s.pt"
    args = argparse.Namespace(snapshot=str(path), model="cnn", dataset="mnist", batch_size=8, learning_rate=1e-3)
    args.dropout, args.seed = 0.0, 1

    def create_parts(layout):
        model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(3, 2)).to(memory_format=layout)
        optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, fused=True)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": torch.amp.GradScaler("cpu")}

    def step(parts):
        parts["model"](torch.ones(1, 2, 3, 3)).sum().backward()
        parts["optimizer"].step()

    parts = create_parts(torch.contiguous_format)
    step(parts)
    state = {"run": "1a", "epoch": 1, "step": 2, "sums": [0.5, 1.0, 8.0], "best": [0.25, 0]}
    images.save_snapshot(args, parts, state)
    document = torch.load(path, weights_only=True)

    def check(content):
        path.write_bytes(content)
        parts = create_parts(torch.channels_last)
        if loaded := outcome(lambda: images.load_snapshot(args, parts, best=[0.0, -1])):
            place, kinds = loaded[0], {"run": str, "epoch": int, "step": int, "sums": list, "best": list}
            assert {name: type(value) for name, value in place.items()} == kinds, place
            assert [*map(type, place["sums"] + place["best"])] == [float] * 4 + [int], place
            assert place["epoch"] >= 0 and place["step"] >= 0, place
            for parameter, moments in parts["optimizer"].state.items():
                for moment in (moments["exp_avg"], moments["exp_avg_sq"]):
                    assert moment.shape == parameter.shape and moment.stride() == parameter.stride(), moment
            with contextlib.suppress(Exception):  # of numbers that make no sense: it does not leave its memory
                step(parts)
        return loaded and loaded[0]

    fuzz(check, saved(document), snapshots(document, bomb))


@pytest.mark.parametrize("option", ["snapshot", "load"])
def test_quantize(outcome, bomb, tmp_path, option):
    """What is read is a model that runs."""
    quantize, path = load("quantize", "gpt"), tmp_path / "s.pt"
    (tmp_path / "text").write_bytes(bytes(range(8)) * 24)
    shape = {"dataset": "text", "vocab_size": 8, "d_model": 4, "n_heads": 2, "num_layers": 1, "seq_len": 8}
    engine = torch.backends.quantized.engine
    args = argparse.Namespace(snapshot=None, load=None, save=None, dataset=str(tmp_path / "text"), batch_size=2)
    args = vars(args) | {"precisions": ("fp32", "int8"), "backend": "torch.ao", "engine": engine, "rounds": 1}
    args |= {"threads": 1, option: str(path)}
    model = quantize.CachedGPT(8, 4, 2, 1, 8)
    document = {"model": {name: value for name, value in model.state_dict().items() if name != "head.weight"}}
    if option == "load":
        document = {"int8": quantize.int8_tensors(quantize.quantize(model, argparse.Namespace(**args))[0])}
    document["args"] = shape

    def check(content):
        path.write_bytes(content)
        if done := outcome(quantize.main, argparse.Namespace(**args)):
            assert "| quantize/gpt.py |" in done[1], done
        return done

    names, numbers = st.sampled_from([*shape]), st.sampled_from(NUMBERS)
    shapes = st.builds(lambda name, number: saved(document | {"args": shape | {name: number}}), names, numbers)
    fuzz(check, saved(document), shapes)
    fuzz(check, saved(document), snapshots(document, bomb))


def test_log_to_append_to(outcome, tmp_path):
    """What is not a log is refused; the lines of one stay as they are, whatever is in them."""
    images, path = load("singlegpu", "images"), tmp_path / "log.csv"
    head = ",".join(images.LOG).encode() + b"\n"
    row = dict.fromkeys(images.LOG, 0) | {"run": "1a", "epoch": 1}
    args = argparse.Namespace(batch_size=8, precision="fp32", log=str(path), snapshot=None)

    def check(content):
        path.write_bytes(content)
        if accepted := outcome(images.check_args, args, 1):
            outcome(images.append_log, args.log, [row])
            kept = [line for line in content.splitlines(True) if line[-1:] == b"\n" and not line.startswith(b"1a,1,")]
            new = b"1a,1" + b",0" * (len(row) - 2) + b"\n"
            assert path.read_bytes() == b"".join(kept or [head]) + new
        return accepted

    valid = head + b"1a,0,0\n1a,1,0\n1a,2"
    fuzz(check, valid, damaged(valid, places=(len(head),)))


@st.composite
def logs(draw, content):
    """A log, of which some columns have other cells, rows stand twice or in another order, or bytes are damaged."""
    head, *rows = csv.reader(io.StringIO(content))
    odd = st.sampled_from(["", "\0", "a\rb", '"', 'x,"y', "1_000", "0x10", "True", "|", "b", "a/b", *COLUMNS])
    cells = st.sampled_from(NUMBERS).map(str) | odd | st.floats(0).map(str) | st.text(max_size=5)
    for _ in range(draw(st.integers(0, 3))):
        column, cell = COLUMNS.index(draw(st.sampled_from([*report.NEEDED, *COLUMNS]))), draw(cells)
        for row in draw(st.sampled_from([rows, rows, rows[:3], rows[-1:], [head]])):
            row[column] = cell
    if draw(st.booleans()):
        rows = draw(st.lists(st.sampled_from([head, *rows, head[:9], [""]]), max_size=9))
    text = io.StringIO()
    csv.writer(text, quoting=draw(st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))).writerows([head, *rows])
    valid = text.getvalue().encode(errors="surrogatepass")
    return valid if draw(st.integers(0, 2)) else draw(damaged(valid))


@pytest.fixture
def tell(outcome, tmp_path, monkeypatch):
    """tell(log, *arguments) is report.py's outcome on a log of these bytes, the link file being link.json."""
    monkeypatch.chdir(tmp_path)
    log = write(tmp_path / "log.csv", rows_of("a", 1, [9, 11, 11], model="a/b"), rows_of("b", 2, [9, 6], model="a/b"))
    (tmp_path / "link.json").write_text('{"processes": 2, "latency_s": 1e-5, "bandwidth_bytes_per_s": 1e9}')

    def tell(content, *arguments):
        log.write_bytes(content)
        monkeypatch.setattr(sys, "argv", ["report.py", "log.csv", *arguments])
        if done := outcome(report.main):
            assert not re.search(r"-\d+ damaged|\b(nan|inf)\b (times|ms)|: (nan|inf)$", done[1], re.M), done[1]
        return done

    tell.valid = log.read_text()
    return tell


@pytest.mark.parametrize("arguments, share", [((), 1), (("--predict", "link.json"), 1), (("--out", "out"), 10)])
def test_logs_of_a_report(tell, arguments, share):
    assert tell(tell.valid.replace("a/b", "𐐀" * 300).encode(), *arguments)  # no file can have such a name
    fuzz(lambda content: tell(content, *arguments), tell.valid.encode(), logs(tell.valid), EXAMPLES // share)


def test_link(tell, tmp_path):
    link, path = {"processes": 2, "latency_s": 1e-5, "bandwidth_bytes_per_s": 1e9, "sizes": []}, tmp_path / "link.json"

    def check(content):
        path.write_bytes(content)
        return tell(tell.valid.encode(), "--predict", "link.json")

    valid, deep = json.dumps(link).encode(), st.sampled_from([b"[", b'{"processes":', b"9"])
    fuzz(check, valid, documents(edited(link, st.sampled_from(NUMBERS))))
    fuzz(
        check,
        valid,
        documents(edited(link)) | damaged(valid) | st.builds(bytes.__mul__, deep, st.integers(1, 9000)),
        EXAMPLES // 2,
    )


def test_extreme_predictions(tell, tmp_path):
    """Whatever numbers can be in a log and in two links."""
    many, latency = st.floats(1, 1e308) | st.sampled_from([1e-300, 1, 1e9, 1e308]), st.just(0) | st.floats(0, 1e9)
    link = {"processes": st.just(2) | many, "latency_s": latency, "bandwidth_bytes_per_s": many}
    names = "parameters", "batch_size", "time", "samples/s", "data", "forward", "backward", "optimizer", "eval", "save"
    values = st.sampled_from([0, 0.5, 1, 1e3, 9e12]) | st.floats(0, 1e13)
    changes = st.dictionaries(st.sampled_from(names), values, max_size=3)
    nothing = dict.fromkeys(("data", "forward", "backward", "optimizer"), 0)
    changes |= st.sampled_from([nothing, {"parameters": 9e12}])

    def check(inputs):
        *links, changes = inputs
        for number, link in enumerate(links):
            (tmp_path / f"{number}.json").write_text(json.dumps(link))
        content = write(tmp_path / "log.csv", rows_of("a", 1, [9, 11], **changes)).read_bytes()
        return tell(content, "--predict", "0.json", "1.json", "--gpus_per_node", "8")

    usual = {"processes": 2, "latency_s": 1e-5, "bandwidth_bytes_per_s": 1e9}
    links = st.just(usual) | st.fixed_dictionaries(link)
    fuzz(check, (usual, usual, {}), st.tuples(links, links, changes))


def test_arrays_of_images(outcome, bomb, tmp_path):
    """Each split has images (N, C, H, W) and labels (N,) that a network can be trained on."""
    images, folder = load("singlegpu", "images"), tmp_path / "bigmnist"
    args = argparse.Namespace(dataset="bigmnist", data_dir=str(tmp_path), batch_size=2, num_workers=0)
    files = {f"{split}_images.npy": npy(np.ones((3, 28, 28), np.uint8)) for split in ("train", "test")}
    files |= {f"{split}_labels.npy": npy(np.array([1, 9, 0])) for split in ("train", "test")}

    def check(files):
        lay(folder, files)
        if done := outcome(images.read_data, args):
            for split in done[0]:
                batches = [np.arange(len(split[1]))]
                for batch, labels in images.create_dataloader(split, batches, args, torch.device("cpu")):
                    assert batch.shape[1:] == done[0][0][0].shape[1:] and len(batch) == len(labels) > 0
                    assert batch.dim() == 4 and batch.isfinite().all() and 0 <= labels.min() <= labels.max() < 10
        return done

    fuzz(check, files, folders(files, lambda name: arrays(bomb)))


def test_token_files(outcome, tmp_path):
    """Each id is in the vocabulary."""
    gpt, folder = load("singlegpu", "gpt"), tmp_path / "tokens"
    ids = np.arange(40, dtype=np.uint16).tobytes()
    head = np.array([20240520, 1, 40, *[0] * 253], np.int32).tobytes()

    def check(inputs):
        files, vocab_size = inputs
        lay(folder, files)
        args = argparse.Namespace(dataset=str(folder), vocab_size=vocab_size, batch_size=2, seq_len=8, seed=1)

        def read():
            splits = gpt.read_tokens(args)
            starts = gpt.sequence_starts(len(splits[0]) // 8 - 1, 0, 1, args, 0), [np.arange(len(splits[1]) - 8)]
            loaders = [gpt.create_dataloader(*each, args, torch.device("cpu")) for each in zip(splits, starts)]
            return [tokens for loader in loaders for tokens, _ in loader]

        if done := outcome(read):
            assert all(
                tokens.shape[1] == 8 and 0 <= tokens.min() <= tokens.max() < args.vocab_size for tokens in done[0]
            )
        return done

    valid = {"train.bin": head + ids, "val.bin": ids}
    damaged_ones = folders(valid, lambda name: st.binary(max_size=200))
    fuzz(check, (valid, None), st.tuples(damaged_ones, st.sampled_from([None, 64])))


def test_tokens_of_texts(outcome, bomb, tmp_path):
    """Each text has words, all in the vocabulary, and a label."""
    text, folder = load("singlegpu", "text"), tmp_path / "imdb_tokens"
    args = argparse.Namespace(dataset="imdb", data_dir=str(tmp_path), batch_size=2, seq_len=5, seed=1, max_steps=None)
    split = {
        "ids": np.array([2, 3, 1, 5, 4, 4], np.uint16),
        "ends": np.array([0, 2, 3, 6]),
        "labels": np.array([0, 1, 1]),
    }
    files = {f"{name}_{what}.npy": npy(array) for name in ("train", "test") for what, array in split.items()}
    words = {"model": {"vocab": dict(zip(["[PAD]", "[UNK]", "a", "b", "c", "d"], range(6)))}}
    files["vocabulary.json"] = json.dumps(words).encode()

    def check(files):
        lay(folder, files)
        if done := outcome(text.read_texts, args):
            *splits, vocab_size = done[0]
            for split in splits:
                batches = text.similar_batches(split[1], args, 0)
                for tokens, lengths, labels in text.create_dataloader(split, batches, args, torch.device("cpu")):
                    assert 0 <= tokens.min() <= tokens.max() < vocab_size and lengths.min() > 0
                    assert 0 <= labels.min() <= labels.max() < 2
        return done

    fuzz(check, files, folders(files, lambda name: documents(edited(words)) if "json" in name else arrays(bomb)))


def test_tokens_of_pairs(outcome, bomb, tmp_path):
    """Each sentence has a word to predict, all in the vocabulary; words and references are texts."""
    translation, folder = load("singlegpu", "translation"), tmp_path / "multi30k_de_en_tokens"
    args = argparse.Namespace(dataset="multi30k", data_dir=str(tmp_path), source="de", target="en", batch_size=2)
    args.seq_len, args.seed, args.max_steps = 4, 1, None
    words, references = ["[PAD]", "[UNK]", "[START]", "[END]", "a"], ["a a", ""]
    arrays_of = {"ids": np.array([2, 4, 4, 3, 2, 3], np.uint16), "ends": np.array([0, 4, 6])}
    files = {
        f"{split}_{side}_{what}.npy": npy(array)
        for split in translation.SPLITS
        for side in ("source", "target")
        for what, array in arrays_of.items()
    }
    lists = {"source_words.json": words, "target_words.json": words, "references.json": references}
    files |= {name: json.dumps(texts).encode() for name, texts in lists.items()}

    def check(files):
        lay(folder, files)
        if done := outcome(translation.read_pairs, args):
            splits, words, references = done[0]
            for split in splits:
                indices = np.arange(len(split[0][1]) - 1)
                batches = [(indices, len(indices))]
                for source, lengths, target, num_tokens in translation.create_dataloader(split, batches, args, "cpu"):
                    for tokens, known in ((source, words[0]), (target, words[1])):
                        assert 0 <= tokens.min() <= tokens.max() < len(known)
                    assert lengths.min() > 0 and num_tokens == len(indices) == len(target) == len(source)
                assert np.diff(split[1][1]).min() >= 2  # the start, and a word to predict
            assert len(references) == len(splits[2][0][1]) - 1
            assert all(type(text) is str for texts in (*words, references) for text in texts)
        return done

    fuzz(check, files, folders(files, lambda name: documents(edited(lists[name])) if "json" in name else arrays(bomb)))
