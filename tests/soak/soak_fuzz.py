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
import signal
import sys
import warnings

import pytest
import torch
from conftest import ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_launchers import Bomb
from test_models import module
from test_report import rows_of, write

sys.path.insert(0, str(ROOT))
import report  # noqa: E402

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", 200))
NUMBERS = [0, -1, 1, 2, 1023, 10**8, 2**31, 2**63, 10**400, 0.5, 1e-320, 1.7e308]
NUMBERS = st.sampled_from([*NUMBERS, math.inf, math.nan])
VALUES = NUMBERS | st.none() | st.booleans() | st.text(max_size=9) | st.just([]) | st.just({})


def fuzz(check, valid, strategy):
    """Call check with what is valid, which it must not refuse, and with each input."""
    assert check(valid)
    usual = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    usual |= {"max_examples": EXAMPLES, "derandomize": "FUZZ_EXAMPLES" not in os.environ}
    settings(**usual)(given(strategy)(lambda content: None if check(content) else None))()


@pytest.fixture
def outcome(tmp_path, monkeypatch):
    """outcome(read, *arguments): did it read, and not refuse? No other end is right."""

    def outcome(read, *arguments):
        out, err, ended = io.StringIO(), io.StringIO(), None
        signal.alarm(60)  # a reader that finds no end is killed
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            with warnings.catch_warnings():
                warnings.simplefilter("error", RuntimeWarning)  # a user would see it
                try:
                    read(*arguments)
                except SystemExit as end:
                    ended = end.code
        signal.alarm(0)
        assert not (tmp_path / "exploded").exists(), "something was unpickled"
        told = err.getvalue() + (ended if isinstance(ended, str) else "")
        assert ended is None or told.strip() and "Traceback" not in told, (ended, told)
        return ended is None

    monkeypatch.setattr(sys, "argv", ["script.py"])
    return outcome


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
            key = draw(st.sampled_from([*place] if isinstance(place, dict) else range(len(place))))
        if draw(st.integers(0, 9)) or place is document:
            place[key] = draw(values)
        else:
            del place[key]
    return document[0]


def test_logs_and_links(outcome, tmp_path, monkeypatch):
    """Bytes of a log; whole rows with any values in them; and what allreduce.py wrote."""
    log, link = tmp_path / "a.csv", tmp_path / "link.json"
    good = [*rows_of("a", 1, [9, 11]), *rows_of("b", 2, [9, 7])]
    numbers = {"processes": 2, "latency_s": 1e-5, "bandwidth_bytes_per_s": 1e9, "sizes": [1, 2]}
    valid_log, valid_link = write(log, good).read_bytes(), json.dumps(numbers).encode()

    def check_log(content):
        log.write_bytes(content)
        monkeypatch.setattr(sys, "argv", ["report.py", str(log)])
        return outcome(report.main)

    def check_rows(rows):
        rows = [row for row in rows if isinstance(row, dict) and row] or [{"run": ""}]
        empty = dict.fromkeys(name for row in rows for name in row)
        return check_log(write(log, [empty | row for row in rows]).read_bytes())

    def check_link(content):
        link.write_bytes(content)
        log.write_bytes(valid_log)
        monkeypatch.setattr(sys, "argv", ["report.py", str(log), "--predict", str(link)])
        return outcome(report.main)

    fuzz(check_log, valid_log, damaged(valid_log))
    fuzz(check_rows, good, edited(good, VALUES.map(str)))
    deep = st.integers(1, 9000).map(lambda count: b"[" * count)
    fuzz(check_link, valid_link, damaged(valid_link) | deep)
    fuzz(check_link, valid_link, edited(numbers).map(json.dumps).map(str.encode))


def test_snapshots(outcome, tmp_path):
    """Damaged, with other values in it, or hostile."""
    images, path = module("singlegpu/images.py"), tmp_path / "s.pt"
    args = argparse.Namespace(snapshot=str(path), model="cnn", dataset="mnist", batch_size=8)
    args.learning_rate, args.dropout, args.seed, args.precision = 1e-3, 0.0, 1, "fp32"

    def parts():
        model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.Linear(3, 2))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        return {"model": model, "optimizer": optimizer, "scaler": scaler}

    def check(content):
        path.write_bytes(content)
        return outcome(images.load_snapshot, args, parts())

    def saved(document):
        file = io.BytesIO()
        torch.save(document, file)
        return file.getvalue()

    images.save_snapshot(args, parts(), {"run": "1a", "epoch": 1, "step": 2, "sums": [0.5, 8.0]})
    valid, document = path.read_bytes(), torch.load(path, weights_only=True)
    bomb = Bomb(tmp_path / "exploded")
    values = VALUES | st.sampled_from([bomb, torch.zeros(()), torch.ones(3), torch.zeros(2, 3)])
    hostile = st.just(pickle.dumps(bomb)) | edited(document, values).map(saved)
    fuzz(check, valid, damaged(valid) | hostile)
