"""report.py on logs whose answers are known."""

import csv
import json
import math
import subprocess
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT))
import report  # noqa: E402

COLUMNS = (
    "run,epoch,rank,script,model,dataset,precision,processes,batch_size,epochs,nodes,device,threads,torch,parameters,"
    "grad_accum_steps,comm_hook,compile,max_steps,train_loss,train_acc,val_loss,val_acc,time,samples/s,data,forward,"
    "backward,comm,optimizer,eval,save,comm_total,R,skew"
).split(",")


def rows_of(run, processes, times, batch_size=64, samples=640, **changes):
    """The rows of a run; epochs take `times`, of which 1 s is evaluation and 10% exposed communication."""
    for epoch, time in enumerate(times):
        for rank in range(processes):
            row = dict.fromkeys(COLUMNS, "") | {
                "run": run, "epoch": epoch, "rank": rank, "script": "multigpu/images.py" if processes > 1 else
                "singlegpu/images.py", "model": "cnn", "dataset": "mnist", "precision": "fp32", "processes": processes,
                "batch_size": batch_size, "epochs": len(times), "nodes": 1, "device": "CPU", "threads": 1,
                "parameters": 1_000_000, "grad_accum_steps": 1, "comm_hook": "none" if processes > 1 else "",
                "compile": False, "train_loss": 1 / (epoch + 1), "train_acc": 0.5, "val_loss": 2 / (epoch + 1),
                "val_acc": 0.9, "time": time, "samples/s": samples / (time - 1), "data": 0.1 * (time - 1),
                "forward": 0.3 * (time - 1), "backward": 0.4 * (time - 1), "comm": 0.1 * (time - 1) * (processes > 1),
                "optimizer": 0.1 * (time - 1), "eval": 1, "save": 0, "comm_total": 0.2 * (time - 1) * (processes > 1),
                "R": 4 if processes > 1 else math.nan, "skew": 0.01 * (processes - 1),
            }  # fmt: skip
            yield row | changes


def write(path, *runs):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for run in runs:
            writer.writerows(run)
    return path


def run_report(*arguments):
    done = subprocess.run(
        [sys.executable, ROOT / "report.py", *map(str, arguments)], capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


def tables(out):
    """Each table's rows as {column: text}."""
    found, head = [], None
    for line in out.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]] if line.startswith("|") else None
        if cells is None:
            head = None
        elif head is None:
            head = cells
            found.append([])
        elif set(cells[0]) != {"-"}:
            found[-1].append(dict(zip(head, cells)))
    return found


def test_strong_and_weak(tmp_path):
    """Speedup, efficiency, serial fraction and hidden share by hand; the first epoch does not count; pictures."""
    runs = [rows_of("a", 1, [99, 11, 11]), rows_of("b", 2, [99, 7, 7]), rows_of("c", 4, [99, 5, 5]),
            rows_of("d", 2, [50, 11, 11], batch_size=128, samples=1280)]  # fmt: skip
    out = tmp_path / "out"
    status, text, err = run_report(write(tmp_path / "a.csv", *runs), "--out", out)
    assert status == 0, err
    strong, weak = tables(text)
    assert [row["processes"] for row in strong] == ["1", "2", "4"] and [row["processes"] for row in weak] == ["1", "2"]
    for row, speedup in zip(strong, (1, 10 / 6, 10 / 4)):
        assert float(row["speedup"]) == pytest.approx(speedup, rel=1e-3)
        assert float(row["efficiency"]) == pytest.approx(speedup / float(row["processes"]), rel=1e-3)
    assert float(strong[1]["serial"]) == pytest.approx((6 / 10 - 1 / 2) / (1 - 1 / 2), rel=1e-3)
    fitted = (0.1 * 0.5 + 0.15 * 0.75) / (0.5**2 + 0.75**2)
    assert f"Serial fraction {fitted:.3f}: at most {1 / fitted:.3g} times as fast" in text
    assert strong[1]["hidden"] == "0.5" and strong[1]["R"] == "4" and strong[0]["hidden"] == "-"
    assert strong[0]["epoch time"] == "11" and strong[0]["+-"] == "0" and strong[0]["val_acc"] == "0.9"
    assert (
        float(weak[1]["speedup"]) == pytest.approx(2) and "global batch 64" in text and "batch 64 per process" in text
    )
    assert (out / "report.md").read_text() == text
    kinds = {path.stem.split("cnn_")[1] for path in out.glob("1_strong_images_cnn_*.png")}
    assert kinds == {"epoch_times", "mean_epoch_time", "speedup", "efficiency", "phases", "losses", "accuracies"}
    assert all(path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for path in out.glob("*.png"))


def test_different_settings_are_never_mixed(tmp_path):
    """Runs that differ in more than the processes: no speedup, each said; comparable ones still are."""
    base = rows_of("a", 1, [9, 9])
    others = [rows_of(name, 2, [9, 6], **{column: value}) for name, column, value in (
        ("b", "precision", "bf16"), ("c", "model", "mlp"), ("d", "max_steps", 10), ("e", "dataset", "cifar10"),
        ("f", "script", "multigpu/text.py"), ("g", "compile", True))]  # fmt: skip
    status, text, _ = run_report(write(tmp_path / "a.csv", base, *others))
    assert status == 0 and "no two runs" in text and len(tables(text)[0]) == 7 and "speedup" not in text
    status, text, _ = run_report(write(tmp_path / "a.csv", rows_of("a", 1, [9, 9]), rows_of("b", 2, [9, 5]), *others))
    assert len(tables(text)[0]) == 2 and float(tables(text)[0][1]["speedup"]) == 2


def test_damaged_and_cut_short(tmp_path):
    """All that is missing is said, and the rest reported."""
    whole = write(tmp_path / "whole.csv", rows_of("a", 1, [9, 9]), rows_of("b", 2, [9, 5]))
    short = write(tmp_path / "short.csv", rows_of("c", 4, [9, 3], epochs=5))
    whole.write_text(whole.read_text() + "b,2,0,cnn,syn\n")  # a torn row
    lines = short.read_text().splitlines()
    short.write_text("\n".join(lines[:-1]) + "\n" + lines[-1].replace("0.9", "much"))  # a number that is none
    (tmp_path / "empty.csv").touch()
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "binary.csv").write_bytes(bytes(range(256)) * 20)
    status, text, _ = run_report(tmp_path)
    assert status == 0 and [row["speedup"] for row in tables(text)[0]] == ["1", "2", "4"]
    for note in ("whole.csv: 1 damaged row(s)", "cut short after 2 of 5 epochs", "empty.csv: No columns",
                 "other.csv: not a log", "binary.csv"):  # fmt: skip
        assert note in text, (note, text)
    rank_lost = write(tmp_path / "lost.csv", list(rows_of("a", 2, [9, 5]))[:-1], rows_of("b", 1, [9, 9]))
    status, text, _ = run_report(rank_lost)
    assert "epochs left out that not all processes told of" in text
    beyond = write(tmp_path / "beyond.csv", *(rows_of(run, 2, [9, 9, 9], R=1.7e308) for run in "ab"))
    status, text, err = run_report(beyond)
    assert status == 0 and not err and "e+" not in text and "inf" not in text, err


def test_missing_baseline(tmp_path):
    path = write(tmp_path / "a.csv", rows_of("b", 2, [9, 5]), rows_of("c", 4, [9, 3]))
    _, text, _ = run_report(path)
    assert "The baseline has 2 processes: there is no run of one." in text
    assert [row["efficiency"] for row in tables(text)[0]] == ["1", "1"]


def link(path, processes=2, latency=0.0, bandwidth=1e9):
    path.write_text(
        json.dumps({"processes": processes, "latency_s": latency, "bandwidth_bytes_per_s": bandwidth, "sizes": []})
    )
    return path


def test_prediction_by_hand(tmp_path):
    """One process: 640 samples in 10 s are 10 steps of 1 s: data .1, forward .3, backward .4, optimizer .1 (and .1)."""
    log = write(tmp_path / "a.csv", rows_of("a", 1, [11, 11]))
    status, text, err = run_report(log, "--predict", link(tmp_path / "l.json", bandwidth=40e6, latency=0.01))
    assert status == 0, err
    strong, weak = tables(text)
    assert [int(row["processes"]) for row in strong] == [2**power for power in range(1, 11)]
    # 4 MB: a bucket of 1 MiB, ready after 26% of the backward pass, and one of the rest, at its end; both pass at once.
    first, rest = (1 << 20) / 40e6 + 0.01, (4_000_000 - (1 << 20)) / 40e6 + 0.01
    backward = 0.2
    comm = max(backward * (1 << 20) / 4e6 + first, backward) + rest - backward
    assert float(strong[0]["comm_ms"]) == pytest.approx(1000 * comm, rel=1e-3)
    assert float(strong[0]["comm_total_ms"]) == pytest.approx(1000 * (first + rest), rel=1e-3)
    step = 0.05 + 0.15 + backward + comm + 0.1
    assert float(strong[0]["speedup"]) == pytest.approx(0.9 / step, rel=1e-3)
    assert float(strong[0]["R"]) == pytest.approx(0.45 / (first + rest), rel=1e-3)
    # Weak: the backward pass stays long; a ring of 4 has three times the latency of one of 2, and carries 3/2.
    first, rest = (size * 1.5 / 40e6 + 0.03 for size in (1 << 20, 4_000_000 - (1 << 20)))
    comm = max(0.4 * (1 << 20) / 4e6 + first, 0.4) + rest - 0.4
    assert float(weak[1]["speedup"]) == pytest.approx(4 * 0.9 / (0.9 + comm), rel=1e-3)
    assert "times as fast; it pays" in text and text.count("\n- ") == 3


def test_prediction_from_two_batches(tmp_path):
    """Half the batch was measured, too: 20 steps in 10 s, so its phases, and a line on to the whole one's."""
    log = write(tmp_path / "a.csv", rows_of("a", 1, [11, 11]), rows_of("b", 1, [11, 11], batch_size=32, forward=4.0))
    status, text, err = run_report(log, "--predict", link(tmp_path / "l.json", bandwidth=1e15, latency=0))
    assert status == 0, err
    whole = [table for table in tables(text) if float(table[0]["step_ms"]) > 0][0]
    assert float(whole[0]["step_ms"]) == pytest.approx(1000 * (0.05 + 0.2 + 0.2 + 0.1), rel=1e-3)
    assert float(whole[1]["step_ms"]) == pytest.approx(1000 * (0.025 + 0.1 + 0.1 + 0.1), rel=1e-3)


def test_prediction_over_nodes(tmp_path):
    """Inside a node the fast link counts, over nodes the slow one."""
    log = write(tmp_path / "a.csv", rows_of("a", 1, [11, 11]))
    inside, between = link(tmp_path / "i.json", 4, 3e-6, 100e9), link(tmp_path / "b.json", 2, 50e-6, 1e9)
    one = tables(run_report(log, "--predict", inside)[1])[0]
    two = tables(run_report(log, "--predict", inside, between, "--gpus_per_node", 4)[1])[0]
    assert [row["step_ms"] for row in one[:2]] == [row["step_ms"] for row in two[:2]]
    expected = 1000 * (2 * (1e-6 * 6 + 50e-6) + 4e6 * 2 * 7 / 8 / 1e9)
    assert float(two[2]["comm_total_ms"]) == pytest.approx(expected, rel=1e-3)


def test_buckets_are_those_of_ddp():
    """Their bytes add up; the first is of 1 MiB, the others of 25 MiB but for the last."""
    for parameters in (1, 1000, 1 << 18, 10_000_000, 129_000_000):
        sizes = report.buckets_of(parameters)
        assert sum(sizes) == 4 * parameters and sizes[0] <= 1 << 20 and all(size == 25 << 20 for size in sizes[1:-1])


def test_bad_input(tmp_path):
    log = write(tmp_path / "a.csv", rows_of("a", 1, [11, 11]))
    many = write(tmp_path / "b.csv", rows_of("a", 2, [11, 11]))
    (tmp_path / "no.json").write_text("{}")
    (tmp_path / "bad.json").write_text("[1")
    (tmp_path / "list.json").write_text("[" * 100_000)
    (tmp_path / "none").mkdir()
    good = link(tmp_path / "good.json")
    for arguments, message in (
        ([tmp_path / "missing.csv"], "No such file"),
        ([tmp_path / "none"], "no .csv file"),
        ([log, "--warmup", "-1"], "must not be negative"),
        ([log, "--predict", tmp_path / "no.json"], "not of allreduce.py"),
        ([log, "--predict", tmp_path / "bad.json"], "not of allreduce.py"),
        ([log, "--predict", tmp_path / "list.json"], "not of allreduce.py"),
        ([log, "--predict", tmp_path / "missing.json"], "No such file"),
        ([log, "--predict", link(tmp_path / "nan.json", bandwidth=math.nan)], "cannot be"),
        ([log, "--predict", link(tmp_path / "one.json", processes=1)], "cannot be"),
        ([log, "--predict", good, good], "need --gpus_per_node"),
        ([log, "--predict", good, good, good], "takes one or two files"),
        ([many, "--predict", good], "needs the log of a run of one process"),
        ([log, "--out", log], "--out"),
        ([], "required"),
    ):
        status, _, err = run_report(*arguments)
        assert status == 2 and message in err and len(err.splitlines()) == 1, (arguments, err)
