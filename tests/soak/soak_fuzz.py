"""Damaged or hostile bytes from outside: a reader makes sense of them, or ends with a message.

FUZZ_EXAMPLES=10000 tries that many inputs of each kind, other ones each time.
"""

import argparse
import contextlib
import copy
import io
import json
import math
import os
import pickle
import resource
import signal
import sys
import warnings
import zipfile

import pytest
import torch
from conftest import ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_models import module
from test_report import rows_of, write
from test_launchers import Bomb

sys.path.insert(0, str(ROOT))
import report  # noqa: E402

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", 300))
SECONDS, MEMORY = 60, 1 << 20  # KiB; what no input may take
NUMBERS = [0, -1, 1, 2, 1023, 10**8, 2**31, 2**63, 10**400, 0.5, 1e-320, 1.7e308]
NUMBERS += [math.inf, math.nan]
VALUES = st.sampled_from(NUMBERS) | st.none() | st.booleans() | st.text(max_size=9) | st.just([])
VALUES |= st.lists(st.sampled_from(NUMBERS), max_size=3) | st.just({})


def fuzz(check, valid, strategy):
    """Call check with what is valid, which it must not refuse, and with each input."""
    assert check(valid)
    usual = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    derandomize = "FUZZ_EXAMPLES" not in os.environ
    run = given(strategy)(lambda content: None if check(content) else None)
    settings(max_examples=EXAMPLES, derandomize=derandomize, print_blob=True, **usual)(run)()


@pytest.fixture
def outcome(tmp_path, monkeypatch):
    """outcome(read, *arguments): did it read, and not refuse? Any other end than these is wrong."""

    def late(*_):
        pytest.fail(f"no end after {SECONDS} s")

    def outcome(read, *arguments):
        out, err = io.StringIO(), io.StringIO()
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        signal.alarm(SECONDS)
        ended = None
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            with warnings.catch_warnings():
                warnings.simplefilter("error", RuntimeWarning)  # a user would see it
                try:
                    read(*arguments)
                except SystemExit as end:
                    ended = end.code
        signal.alarm(0)
        assert not (tmp_path / "exploded").exists(), "something was unpickled"
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < memory + MEMORY
        told = err.getvalue() + (ended if isinstance(ended, str) else "")
        assert ended is None or told.strip() and "Traceback" not in told, (ended, told)
        return ended is None

    before = signal.signal(signal.SIGALRM, late)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    yield outcome
    signal.signal(signal.SIGALRM, before)


@st.composite
def damaged(draw, valid):
    """Bytes of which pieces were left out, flipped, repeated or overwritten."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, start + 8) | st.integers(start, max(start, len(data))))
        piece = data[start:end]
        flipped = bytes(byte ^ 1 << draw(st.integers(0, 7)) for byte in piece[:4]) + piece[4:]
        data[start:end] = draw(st.sampled_from([b"", flipped, piece * 2]) | st.binary(max_size=12))
    return bytes(data) if draw(st.integers(0, 9)) else draw(st.binary(max_size=200))


@st.composite
def edited(draw, document, values=VALUES):
    """A document of dicts and lists in which up to three values were replaced or left out."""
    document = [copy.deepcopy(document)]
    for _ in range(draw(st.integers(1, 3))):
        place, key = document, 0
        while isinstance(place[key], (dict, list)) and place[key] and draw(st.integers(0, 9)):
            place = place[key]
            keys = [*place] if isinstance(place, dict) else range(len(place))
            key = draw(st.sampled_from(keys))
        if draw(st.integers(0, 9)) or place is document:
            place[key] = draw(values)
        else:
            del place[key]
    return document[0]


@pytest.fixture
def tell(outcome, tmp_path, monkeypatch):
    """tell(log, *arguments) is the outcome of report.py on bytes that are a log."""

    def tell(log, *arguments):
        (tmp_path / "a.csv").write_bytes(log)
        words = ["report.py", tmp_path / "a.csv", *arguments]
        monkeypatch.setattr(sys, "argv", list(map(str, words)))
        return outcome(report.main)

    tell.rows = [*rows_of("a", 1, [9, 11]), *rows_of("b", 2, [9, 7])]
    tell.valid = write(tmp_path / "valid.csv", tell.rows).read_bytes()
    return tell


def test_logs(tell, tmp_path):
    """Damaged bytes, and whole rows with any values in them."""
    fuzz(tell, tell.valid, damaged(tell.valid))
    changed = edited(tell.rows, VALUES.map(str))
    rows = changed.map(lambda rows: [row for row in rows if isinstance(row, dict) and row])

    def check(rows):
        heads = {name: "" for row in rows for name in row}
        path = write(tmp_path / "b.csv", [heads | row for row in rows] or [{"run": ""}])
        return tell(path.read_bytes())

    fuzz(check, tell.rows, rows)


def test_links(tell, tmp_path):
    """What allreduce.py wrote, damaged or with any values in it."""
    link = {"processes": 2, "latency_s": 1e-5, "bandwidth_bytes_per_s": 1e9, "sizes": [1, 2]}
    valid = json.dumps(link).encode()
    deep = st.integers(1, 9000).map(lambda count: b"[" * count)

    def check(content):
        (tmp_path / "link.json").write_bytes(content)
        return tell(tell.valid, "--predict", tmp_path / "link.json")

    fuzz(check, valid, damaged(valid) | deep | edited(link).map(json.dumps).map(str.encode))


@st.composite
def archives(draw, whole):
    """What torch.save wrote, with a damaged member and the right checksums."""
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = draw(st.sampled_from([*members]))
    members[name] = draw(damaged(members[name]))
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def test_snapshots(outcome, tmp_path):
    """Damaged, with other values, or hostile; weights that do fit are loaded."""
    images, path = module("singlegpu/images.py"), tmp_path / "s.pt"
    args = argparse.Namespace(snapshot=str(path), model="cnn", dataset="mnist", batch_size=8)
    args.learning_rate, args.dropout, args.seed, args.precision = 1e-3, 0.0, 1, "fp32"

    def parts():
        model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.Linear(3, 2))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        found = {"model": model, "optimizer": optimizer, "scaler": scaler}
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        return found | ({"scheduler": scheduler} if "ExponentialLR" in text else {})

    text, name = (ROOT / "singlegpu/images.py").read_text(), "state"
    name = "progress" if '"progress"' in text else name
    place = {"run": "1a", "epoch": 1, "step": 2, "sums": [0.5, 1.0, 8.0]}
    images.save_snapshot(args, parts(), place)
    valid = path.read_bytes()
    document = torch.load(path, weights_only=True)
    assert document[name]["step"] == 2

    def check(content):
        path.write_bytes(content)
        return outcome(images.load_snapshot, args, parts())

    def saved(document):
        file = io.BytesIO()
        torch.save(document, file)
        return file.getvalue()

    bomb = Bomb(tmp_path / "exploded")
    values = VALUES | st.sampled_from([bomb, torch.zeros(()), torch.ones(3), torch.zeros(2, 3)])
    hostile = st.just(pickle.dumps(bomb)) | edited(document, values).map(saved)
    fuzz(check, valid, damaged(valid) | archives(valid) | hostile)
