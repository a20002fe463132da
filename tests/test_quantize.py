"""The three scripts of quantize, on small models that the training scripts trained."""

import argparse
import functools
import importlib.util
import math
import pickle
import random
import shutil
import sys
import zipfile

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, assert_refused

TRAIN = {
    "gpt": "--d_model 64 --n_heads 2 --num_layers 2 --seq_len 32 --batch_size 24 --learning_rate 3e-3 --epochs 4",
    "text": "--model transformer --seq_len 32 --epochs 1 --max_steps 150",
    "translation": "--model lstm --seq_len 8 --epochs 1 --max_steps 25 --batch_size 64 --learning_rate 3e-3",
}


def load(folder, script):
    """The script as a module; not of its own name, which is that of others, too."""
    spec = importlib.util.spec_from_file_location(f"{folder}_{script}", ROOT / folder / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def trained(fork, tmp_path_factory):
    """trained(script) is a snapshot and what the training printed."""
    folder = tmp_path_factory.mktemp("trained")
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghij", k=generator.randint(2, 7))) for _ in range(40)]
    (folder / "words.txt").write_text(" ".join(generator.choices(words, k=10_000))[:40_000])

    @functools.cache
    def trained(script):
        command = [str(ROOT / "singlegpu" / f"{script}.py"), *TRAIN[script].split(), "--threads", "1"]
        command += ["--dataset", str(folder / "words.txt")] if script == "gpt" else []
        ((status, out, err, _),) = fork([[*command, "--snapshot", str(folder / f"{script}.pt")]], cwd=folder)
        assert status == 0, err
        return folder / f"{script}.pt", out

    return trained


def table(out):
    """{precision: {column: value}} of the printed table."""
    head, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line[:1] == "|"]
    return {row[head.index("precision")]: dict(zip(head, row)) for row in rows}


def run(run_many, script, *arguments):
    ((status, out, err, _),) = run_many(f"quantize/{script}.py", [[*arguments, "--rounds", "1"]])
    assert status == 0, err
    return out


def saved_sizes(path):
    """Bytes of the int8 weights with their scales, and what float32 would take; there are tensors and numbers alone."""
    saved = torch.load(path, weights_only=True)
    assert all(type(tensor) is torch.Tensor and not tensor.is_quantized for tensor in saved["int8"].values())
    names = [name.removesuffix(".int8") for name in saved["int8"] if name.endswith(".int8")]
    small = sum(
        saved["int8"][f"{name}.{what}"].numel() * saved["int8"][f"{name}.{what}"].element_size()
        for name in names
        for what in ("int8", "scale")
    )
    return small, 4 * sum(saved["int8"][f"{name}.int8"].numel() for name in names)


@pytest.mark.parametrize("script, quality", [("gpt", "val_ppl"), ("text", "val_acc"), ("translation", "BLEU")])
def test_table_and_saved_weights(run_many, trained, tmp_path, script, quality):
    """int8 is smaller and as good; saved and loaded it is the same model; fp32 is what an independent look finds."""
    saved = tmp_path / "int8.pt"
    snapshot, printed = trained(script)
    precisions = ["fp32", "int8"] if script == "translation" else ["fp32", "bf16", "int8"]
    out = run(run_many, script, "--snapshot", snapshot, "--save", saved, "--precisions", *precisions)
    rows = table(out)
    assert list(rows) == precisions
    values = {precision: float(row[quality]) for precision, row in rows.items()}
    summary = [[cell.strip() for cell in line.split("|")] for line in printed.splitlines() if line[:1] == "|"]
    of_training = float(dict(zip(*summary[-2:])).get(quality, "nan").replace("-", "nan"))
    if script == "gpt":  # the training gave bits per byte
        assert values["fp32"] < 12 and values["int8"] == pytest.approx(values["fp32"], rel=0.01)
        assert values["fp32"] == pytest.approx(independent_perplexity(snapshot), rel=1e-4)
    elif script == "text":
        assert values["fp32"] > 0.6 and abs(values["int8"] - values["fp32"]) <= 0.003
        assert values["fp32"] == of_training == pytest.approx(independent_accuracy(snapshot), abs=1e-4)
    else:
        assert values["fp32"] > 2 and abs(values["int8"] - values["fp32"]) <= 0.5
        assert values["fp32"] == pytest.approx(of_training, abs=0.051)
    assert "converted: " in out and "left alone: " in out
    sizes = {precision: float(row["MB"]) for precision, row in rows.items()}
    assert sizes["int8"] < sizes["fp32"]
    assert sizes.get("bf16", sizes["fp32"] / 2) == pytest.approx(sizes["fp32"] / 2, rel=0.2)
    small, large = saved_sizes(saved)
    assert small <= 0.30 * large
    times = [column for column in rows["int8"] if column.endswith("/s") or column.startswith("ms ")]
    assert len(times) >= 2 and all(float(row[column]) > 0 for row in rows.values() for column in times)
    (again,) = table(run(run_many, script, "--load", saved)).values()
    assert (
        float(again[quality]) == values["int8"] and again["MB"] == rows["int8"]["MB"] and again["against fp32"] == "-"
    )


def independent_perplexity(snapshot):
    gpt = load("singlegpu", "gpt")
    loaded = torch.load(snapshot, weights_only=True)
    args = argparse.Namespace(**loaded["args"])
    model = gpt.create_model(args).eval()
    model.load_state_dict(loaded["model"])
    text = np.fromfile(args.dataset, np.uint8)[-(40_000 // 10) :].astype(np.int64)
    count = (len(text) - 1) // 32
    with torch.no_grad():
        logits = model(torch.from_numpy(text[: count * 32]).view(-1, 32))
        return math.exp(F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(text[1 : count * 32 + 1])))


def independent_accuracy(snapshot):
    text = load("singlegpu", "text")
    loaded = torch.load(snapshot, weights_only=True)
    args = argparse.Namespace(**loaded["args"])
    ids, ends, labels = text.synthetic_texts(2000, 2000)
    model = text.create_model(args, 1000).eval()
    model.load_state_dict(loaded["model"])
    right = 0
    with torch.no_grad():
        for start, end, label in zip(ends, ends[1:], labels):
            tokens = torch.from_numpy(ids[start:end][:32].astype(np.int64))[None]
            right += int(model(tokens, torch.tensor([tokens.shape[1]])).argmax() == label)
    return right / len(labels)


def test_cache_changes_nothing(trained):
    """Generation with cached keys and values: token by token what the training script's model finds likeliest."""
    quantize, gpt = load("quantize", "gpt"), load("singlegpu", "gpt")
    loaded = torch.load(trained("gpt")[0], weights_only=True)
    args = argparse.Namespace(**loaded["args"], load=None, backend="torch.ao", snapshot="")
    model, _ = quantize.create_model(args, loaded["model"], "fp32", torch.device("cpu"))
    plain = gpt.create_model(args).eval()
    plain.load_state_dict(loaded["model"])
    prompts = torch.randint(97, 107, (3, 12), generator=torch.Generator().manual_seed(0))
    found, *_ = quantize.generate(model, prompts, 20)
    tokens = prompts
    with torch.no_grad():
        for _ in range(20):
            tokens = torch.cat((tokens, plain(tokens)[:, -1:].argmax(2)), 1)
    assert torch.equal(found, tokens[:, 12:])


def test_snapshot_of_a_hybrid(run_many, fork, trained, tmp_path):
    path = tmp_path / "hybrid.pt"
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--", str(ROOT / "hybrid/gpt.py")]
    command += [*TRAIN["gpt"].split(), "--max_steps", "2", "--threads", "1", "--snapshot", str(path)]
    command += ["--dataset", str(trained("gpt")[0].parent / "words.txt"), "--num_microbatches", "2"]
    ((status, _, err, _),) = fork([command])
    assert status == 0, err
    out = run(run_many, "gpt", "--snapshot", path, "--precisions", "int8")
    assert list(table(out)) == ["int8"]


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_torchao(run_many, trained):
    """The other backend, compiled: the same quality."""
    ((status, out, err, _),) = run_many(
        "quantize/gpt.py",
        [["--snapshot", trained("gpt")[0], "--backend", "torchao", "--precisions", "int8", "--rounds", "1"]],
        timeout=400,
    )
    assert status == 0, err
    row = table(out)["int8"]
    assert row["backend"] == "torchao"
    assert float(row["val_ppl"]) == pytest.approx(independent_perplexity(trained("gpt")[0]), rel=0.01)


def test_converting_none_is_an_error(capsys):
    for backend in ("torch.ao", "torchao"):
        args = argparse.Namespace(backend=backend)
        with pytest.raises(SystemExit) as ended:
            load("quantize", "gpt").quantize(torch.nn.Sequential(torch.nn.LayerNorm(4)), args)
        assert ended.value.code == 2 and "none of the model's modules" in capsys.readouterr().err


def test_a_torch_without_the_deprecated_backend(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.ao.quantization", None)
    monkeypatch.setattr(sys, "argv", ["gpt.py", "--snapshot", "any.pt", "--backend", "torch.ao"])
    with pytest.raises(SystemExit) as ended:
        load("quantize", "gpt").parse_args()
    assert ended.value.code == 2 and "no longer has torch.ao.quantization" in capsys.readouterr().err


class Bomb:
    """Unpickled, it would leave a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_bad_input(run_many, trained, tmp_path):
    """Each mistake: status 2, one line on stderr, nothing unpickled."""
    torch.save({"model": {}, "args": Bomb(tmp_path / "exploded")}, tmp_path / "bomb.pt")
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    (tmp_path / "empty.pt").touch()
    whole = trained("gpt")[0].read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    with zipfile.ZipFile(trained("gpt")[0]) as archive:
        largest = max(archive.infolist(), key=lambda item: item.file_size)
        spot = whole.index(archive.read(largest)[:64])
    (tmp_path / "flipped.pt").write_bytes(whole[:spot] + bytes([whole[spot] ^ 1]) + whole[spot + 1 :])
    other = torch.load(trained("gpt")[0], weights_only=True)
    other["args"]["d_model"] = 32
    torch.save(other, tmp_path / "sizes.pt")
    other = torch.load(trained("gpt")[0], weights_only=True)
    next(iter(other["model"].values())).view(-1)[5] = math.nan
    torch.save(other, tmp_path / "nan.pt")
    other["args"]["d_model"] = "wide"
    torch.save(other, tmp_path / "words.pt")
    good = ("--snapshot", trained("gpt")[0])
    cases = {
        (): "give one of --snapshot FILE",
        (*good, "--load", trained("gpt")[0]): "give one of --snapshot FILE",
        ("--load", trained("gpt")[0]): "it is not of --save",
        ("--snapshot", trained("text")[0]): "it is not a snapshot of a",
        ("--snapshot", tmp_path / "none.pt"): "No such file",
        ("--snapshot", tmp_path): "Is a directory",
        ("--snapshot", tmp_path / "bomb.pt"): "cannot read",
        ("--snapshot", tmp_path / "pickle.pt"): "not a zip file",
        ("--snapshot", tmp_path / "empty.pt"): "not a zip file",
        ("--snapshot", tmp_path / "cut.pt"): "not a zip file",
        ("--snapshot", tmp_path / "flipped.pt"): "cannot read",
        ("--snapshot", tmp_path / "sizes.pt"): "does not fit the model",
        ("--snapshot", tmp_path / "nan.pt"): "its weights are not finite",
        ("--snapshot", tmp_path / "words.pt"): "it is not a snapshot of a",
        (*good, "--engine", "abacus"): "--engine abacus: this CPU has",
        (*good, "--engine", "none"): "--engine none: this CPU has",
        (*good, "--threads", "0"): "--threads 0 is out of range",
        (*good, "--save", tmp_path): "cannot write",
        (*good, "--save", tmp_path / "a.pt", "--precisions", "fp32"): "they must be among --precisions",
        (*good, "--save", tmp_path / "a.pt", "--backend", "torchao"): "which only unpickling would restore",
        (*good, "--dataset", tmp_path / "none.txt"): "none.txt",
        (*good, "--precisions", "fp8"): "invalid choice",
    }
    assert_refused(run_many("quantize/gpt.py", cases, HF_HUB_OFFLINE="1"), cases)
    assert not (tmp_path / "exploded").exists()
