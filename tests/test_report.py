"""report.py on logs whose answers are known."""

import csv
import itertools
import json
import math
import subprocess
import sys

import pytest
from conftest import ROOT


def rows_of(run, processes, seconds, batch_size=64, samples=640, **changes):
    """The rows of a run with 1 s of evaluation in each epoch, and 10% of the rest exposed."""
    for (epoch, time), rank in itertools.product(enumerate(seconds), range(processes)):
        row = {"run": run, "epoch": epoch, "rank": rank, "processes": processes, "nodes": 1}
        row |= {"script": f"{'multi' if processes > 1 else 'single'}gpu/images.py", "model": "cnn"}
        row |= {"dataset": "mnist", "precision": "fp32", "batch_size": batch_size, "max_steps": ""}
        row |= {"epochs": len(seconds), "parameters": 1_000_000, "compile": False, "threads": rank}
        row |= {"train_loss": 1 / (epoch + 1), "val_loss": 2 / (epoch + 1), "val_acc": 0.9}
        row |= {"train_acc": 0.5, "seconds": time, "samples/s": samples / (time - 1), "save": 0}
        shares = {"data": 0.1, "forward": 0.3, "backward": 0.4, "optimizer": 0.1}
        shares |= {"comm": 0.1 * (processes > 1), "comm_total": 0.2 * (processes > 1)}
        row |= {name: share * (time - 1) for name, share in shares.items()}
        yield row | {"eval": 1, "R": 4 if processes > 1 else math.nan} | changes


def write(path, *runs):
    rows = list(itertools.chain(*runs))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def run_report(*arguments):
    command = [sys.executable, ROOT / "report.py", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout, done.stderr


def tables(out):
    """Each table's rows as {column: text}."""
    found, head = [], None
    for line in out.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]] if line[:1] == "|" else None
        if cells is None:
            head = None
        elif head is None:
            head = cells
            found.append([])
        elif set(cells[0]) != {"-"}:
            found[-1].append(dict(zip(head, cells)))
    return found


def test_strong_and_weak(tmp_path):
    """Speedup, efficiency, serial fraction and hidden share by hand, without the first epoch."""
    runs = [rows_of("a", 1, [99, 11, 11]), rows_of("b", 2, [99, 7, 7]), rows_of("c", 4, [99, 5, 5])]
    runs.append(rows_of("d", 2, [50, 11, 11], batch_size=128, samples=1280))
    out = tmp_path / "out"
    status, text, err = run_report(write(tmp_path / "a.csv", *runs), "--out", out)
    assert status == 0, err
    strong, weak = tables(text)
    assert [row["processes"] for row in strong + weak] == ["1", "2", "4", "1", "2"]
    for row, speedup in zip(strong, (1, 10 / 6, 10 / 4)):
        assert float(row["speedup"]) == pytest.approx(speedup, rel=1e-3)
        efficiency = speedup / float(row["processes"])
        assert float(row["efficiency"]) == pytest.approx(efficiency, rel=1e-3)
    fitted = (0.1 * 0.5 + 0.15 * 0.75) / (0.5**2 + 0.75**2)
    assert f"Serial fraction {fitted:.3f}: at most {1 / fitted:.3g} times as fast" in text
    assert strong[1]["hidden"] == "0.5" and strong[1]["R"] == "4" and strong[0]["hidden"] == "-"
    assert float(weak[1]["speedup"]) == pytest.approx(2)
    assert (out / "report.md").read_text() == text
    pictures = list(out.glob("*.png"))
    assert any("speedup" in path.name for path in pictures)
    assert all(path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for path in pictures)


def test_what_is_compared(tmp_path):
    """Runs that differ in what a user chose have no speedup; threads and nodes may differ."""
    changes = {"precision": "bf16", "model": "mlp", "max_steps": 10, "dataset": "cifar10"}
    others = [list(rows_of(name, 2, [9, 6], **{name: changes[name]})) for name in changes]
    status, text, _ = run_report(write(tmp_path / "a.csv", rows_of("a", 1, [9, 9]), *others))
    assert status == 0 and "speedup" not in text and len(tables(text)[0]) == 5
    more = rows_of("b", 2, [9, 5], nodes=2, threads=8)
    alone = rows_of("a", 1, [9, 9])
    status, text, _ = run_report(write(tmp_path / "a.csv", alone, more, *others))
    assert len(tables(text)[0]) == 2 and float(tables(text)[0][1]["speedup"]) == 2


def test_repeated_epochs_and_skew(tmp_path):
    """Of an epoch that was done twice the last row counts; skew is that of the compute times."""
    resumed = [row for row in rows_of("b", 2, [9, 5]) if row["epoch"] == 1]
    interrupted = rows_of("b", 2, [9, 41])
    for row in resumed:
        row["backward"] += row["rank"]
    whole = rows_of("a", 1, [9, 9])
    _, text, _ = run_report(write(tmp_path / "a.csv", whole, interrupted, resumed))
    assert tables(text)[0][1]["speedup"] == "2" and float(tables(text)[0][1]["skew"]) == 1


def test_damaged_and_cut_short(tmp_path):
    """All that is missing is said, and the rest reported; a log of old has `time` for `seconds`."""
    whole = write(tmp_path / "whole.csv", rows_of("a", 1, [9, 9]), rows_of("b", 2, [9, 5]))
    short = write(tmp_path / "short.csv", rows_of("c", 4, [9, 3], epochs=5))
    whole.write_text(whole.read_text().replace("seconds", "time") + "b,2,0,cnn,syn\n")  # a torn row
    head, last = short.read_text().rstrip().rsplit("\n", 1)
    short.write_text(f"{head}\n{last.replace('0.9', 'much')}\n")  # a number that is none
    (tmp_path / "empty.csv").touch()
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "binary.csv").write_bytes(bytes(range(256)) * 20)
    status, text, _ = run_report(tmp_path)
    assert status == 0 and [row["speedup"] for row in tables(text)[0]] == ["1", "2", "4"]
    notes = ["whole.csv: 1 damaged row(s)", "cut short after 2 of 5", "other.csv: not a log"]
    assert all(note in text for note in [*notes, "empty.csv", "binary.csv"]), text
    lost = write(tmp_path / "lost.csv", list(rows_of("a", 2, [9, 5]))[:-1], rows_of("b", 1, [9, 9]))
    assert "epochs left out that not all processes told of" in run_report(lost)[1]


def link(path, processes=2, latency=0.0, bandwidth=1e9):
    speed = {"latency_s": latency, "bandwidth_bytes_per_s": bandwidth}
    path.write_text(json.dumps({"processes": processes, **speed, "sizes": []}))
    return path


def test_prediction_by_hand(tmp_path):
    """640 samples in 10 s are 10 steps of 1 s: data .1, forward .3, backward .4, optimizer .1."""
    log = write(tmp_path / "a.csv", rows_of("a", 1, [11, 11]))
    slow = link(tmp_path / "l.json", bandwidth=40e6, latency=0.01)
    status, text, err = run_report(log, "--predict", slow)
    assert status == 0, err
    strong, weak = tables(text)
    # 4 MB: a bucket of 1 MiB, ready after 26% of the backward pass, and one of the rest.
    first, rest = (1 << 20) / 40e6 + 0.01, (4_000_000 - (1 << 20)) / 40e6 + 0.01
    backward = 0.2
    comm = max(backward * (1 << 20) / 4e6 + first, backward) + rest - backward
    assert float(strong[0]["comm_total_ms"]) == pytest.approx(1000 * (first + rest), rel=1e-3)
    step = 0.05 + 0.15 + backward + comm + 0.1
    assert float(strong[0]["speedup"]) == pytest.approx(0.9 / step, rel=1e-3)
    assert float(strong[0]["R"]) == pytest.approx(0.45 / (first + rest), rel=1e-3)
    # Weak: the backward pass stays long; a ring of 4 has 3 times the latency of one of 2.
    first, rest = (size * 1.5 / 40e6 + 0.03 for size in (1 << 20, 4_000_000 - (1 << 20)))
    comm = max(0.4 * (1 << 20) / 4e6 + first, 0.4) + rest - 0.4
    assert float(weak[1]["speedup"]) == pytest.approx(4 * 0.9 / (0.9 + comm), rel=1e-3)


def test_prediction_over_nodes(tmp_path):
    """Inside a node the fast link counts, over nodes the slow one."""
    log = write(tmp_path / "a.csv", rows_of("a", 1, [11, 11]))
    inside = link(tmp_path / "i.json", 4, 3e-6, 100e9)
    between = link(tmp_path / "b.json", 2, 50e-6, 1e9)
    one = tables(run_report(log, "--predict", inside)[1])[0]
    two = tables(run_report(log, "--predict", inside, between, "--gpus_per_node", 4)[1])[0]
    assert [row["step_ms"] for row in one[:2]] == [row["step_ms"] for row in two[:2]]
    expected = 1000 * (2 * (1e-6 * 6 + 50e-6) + 4e6 * 2 * 7 / 8 / 1e9)
    assert float(two[2]["comm_total_ms"]) == pytest.approx(expected, rel=1e-3)


def test_bad_input(tmp_path):
    log = write(tmp_path / "a.csv", rows_of("a", 1, [11, 11]))
    (tmp_path / "bad.json").write_text("[1")
    good, nan = link(tmp_path / "good.json"), link(tmp_path / "nan.json", bandwidth=math.nan)
    many = write(tmp_path / "b.csv", rows_of("a", 2, [11, 11]))
    cases = {"bad.json": (log, tmp_path / "bad.json"), "nan.json": (log, nan)}
    cases |= {"--gpus_per_node": (log, good, good), "one process": (many, good)}
    for message, (log, *links) in cases.items():
        status, _, err = run_report(log, "--predict", *links)
        assert status in (1, 2) and message in err and "Traceback" not in err, err
