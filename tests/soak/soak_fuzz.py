"""Damaged or hostile bytes from outside: a reader makes sense of them, or ends with a message.

FUZZ_EXAMPLES=10000 tries that many inputs of each kind, TEST_SEED=2 others.
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

import pytest
import torch
from conftest import ROOT
from test_launchers import Bomb
from test_models import module
from test_report import rows_of, write

sys.path.insert(0, str(ROOT))
import predict  # noqa: E402
import report  # noqa: E402

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", 300))
VALUES = [0, -1, 1, 2, 10**8, 2**63, 10**400, 0.5, 1e-320, 1.7e308, math.inf, math.nan]
VALUES += [None, True, "", "nine", [], {}]


@pytest.fixture
def outcome(tmp_path, monkeypatch):
    """outcome(read, *arguments): did it read, and not refuse? No other end is right."""

    def outcome(read, *arguments):
        out, err, ended = io.StringIO(), io.StringIO(), None
        signal.alarm(60)  # a reader that finds no end is killed
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
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


def damaged(valid, chance):
    """Bytes of which pieces were left out, repeated, or overwritten."""
    data = bytearray(valid)
    for _ in range(chance.randint(1, 3)):
        start = chance.randint(0, len(data))
        piece = data[start : start + chance.choice((1, 8, len(data)))]
        noise = chance.randbytes(chance.randint(0, 12))
        data[start : start + len(piece)] = chance.choice((b"", piece * 2, noise))
    return bytes(data)


def edited(document, values, chance):
    """A document of dicts and lists in which one value was replaced or left out."""
    document = place = copy.deepcopy(document)
    while True:
        key = chance.choice([*place] if isinstance(place, dict) else range(len(place)))
        if not isinstance(place[key], (dict, list)) or not place[key] or chance.random() < 0.1:
            break
        place = place[key]
    if chance.random() < 0.1:
        del place[key]
    else:
        place[key] = chance.choice(values)
    return document


def test_damaged_logs_and_links_are_read_or_refused(outcome, tmp_path, monkeypatch, chance):
    """Bytes of a log; whole rows with any values in them; and what allreduce.py wrote."""
    log, link = tmp_path / "a.jsonl", tmp_path / "link.json"
    more = {"last_step": [["all-reduce", -0.3, 0, 3e6]], "TFLOP/s": 0.05}
    good = [*rows_of("a", 1, [9, 11], **more), *rows_of("b", 2, [9, 7])]
    numbers = {"processes": 2, "latency_s": 1e-5, "bandwidth_bytes_per_s": 1e9, "compute_rate": 0.9}
    numbers |= {"nodes": 1, "device": "CPU"}
    valid_log, valid_link = write(log, good).read_bytes(), json.dumps(numbers).encode()

    def check(log_content, link_content=None):
        log.write_bytes(log_content)
        words = ["predict.py", str(log), str(link)] if link_content else ["report.py", str(log)]
        link.write_bytes(link_content or b"")
        monkeypatch.setattr(sys, "argv", words)
        return outcome(predict.main if link_content else report.main)

    assert check(valid_log) and check(valid_log, valid_link)
    for _ in range(EXAMPLES):
        check(damaged(valid_log, chance))
        rows = [row for row in edited(good, VALUES, chance) if isinstance(row, dict) and row]
        columns = dict.fromkeys(good[0])
        edited_log = write(tmp_path / "rows.jsonl", [columns | row for row in rows]).read_bytes()
        check(edited_log, chance.choice((None, valid_link)))
        check(valid_log, damaged(valid_link, chance))
        check(valid_log, json.dumps(edited(numbers, VALUES, chance)).encode())
    check(valid_log, b"[" * 9000)


def test_damaged_snapshots_are_read_or_refused(outcome, tmp_path, chance):
    """Damaged, with other values in it, or hostile."""
    images, path = module("singlegpu/images.py"), tmp_path / "s.pt"
    args = argparse.Namespace(snapshot=str(path), model="cnn", batch_size=8)

    def load(content):
        path.write_bytes(content)
        run = argparse.Namespace(settings=images.settings_of(args))
        return outcome(images.read_snapshot, run, args)

    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    document = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": {}}
    document["settings"] = images.settings_of(args)
    totals = {"loss": 0.5, "count": 8.0}
    document["progress"] = {
        "id": "1a",
        "step": 2,
        "row_step": 1,
        "totals": totals,
        "num_samples": 9,
        "writer": "1b",
    }
    torch.save(document, path)
    valid = path.read_bytes()
    bomb = Bomb(tmp_path / "exploded")
    values = [*VALUES, bomb, torch.zeros(()), torch.ones(3), torch.zeros(2, 3)]
    assert load(valid) and not load(pickle.dumps(bomb))
    for _ in range(EXAMPLES):
        load(damaged(valid, chance))
        file = io.BytesIO()
        torch.save(edited(document, values, chance), file)
        load(file.getvalue())
