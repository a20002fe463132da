"""report.py on logs whose answers are known."""

import csv
import itertools
import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT
from test_training import arguments_of


def rows_of(run, processes, seconds, batch_size=64, samples=640, steps=10, **changes):
    """The rows of a run: for each a validation of 1 s, and steps, of whose time 10% is exposed.

    `seconds` are those of an epoch of so many samples. A row is so many steps after its warmup.
    """
    for (number, time), rank in itertools.product(enumerate(seconds, start=1), range(processes)):
        settings = {"model": "cnn", "dataset": "mnist", "precision": "fp32", "seed": f"{run}"}
        row = {**settings, "batch_size": batch_size, "run": str(run), "step": steps * number}
        row |= {"script": f"{'multi' if processes > 1 else 'single'}gpu/images.py"}
        row |= {"settings": settings | {"batch_size": str(batch_size)}, "steps": steps}
        row |= {"processes": processes, "nodes": 1, "rank": rank, "device": "CPU", "buckets": []}
        row |= {"threads": max(1, 4 // processes), "parameters": 1_000_000, "compile": False}
        row |= {"host": f"node{rank}", "peak_MB": 1000 + rank}
        row |= {"steps_per_epoch": samples // batch_size, "train_loss": 2, "val_loss": 2 / number}
        row |= {"val_acc": 0.9, "warmup": 5 if number == 1 else 0, "eval": 1, "save": 0}
        shares = {"data": 0.2, "forward": 0.3, "backward": 0.4, "optimizer": 0.1}
        if processes > 1:  # singlegpu's rows have no such columns
            row["comm_hook"] = "none"
            shares |= {"data": 0.1, "comm": 0.1, "comm_total": 0.2}
        scale = steps * batch_size / samples
        row |= {name: share * scale * time for name, share in shares.items()}
        row["seconds"] = scale * time + row["warmup"] + 1
        row["settings"] |= {name: str(changes[name]) for name in settings.keys() & changes.keys()}
        yield row | changes


def write(path, *runs):
    path.write_text("".join(json.dumps(row) + "\n" for row in itertools.chain(*runs)))
    return path


def run_report(*arguments):
    command = [sys.executable, ROOT / "report.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def tables(*arguments):
    """What is printed, and the rows {column: text} of each table; those of measured runs in one."""
    done, found = run_report(*arguments), []
    assert done.returncode == 0 and not done.stderr, done.stderr
    for part in done.stdout.split("\n\n"):
        if part.startswith("|"):
            head, _, *rows = [re.split(r" *\| *", line)[1:-1] for line in part.splitlines()]
            assert len(head) <= 12 and part.index("\n") <= 120
            rows = [dict(zip(head, row)) for row in rows]
            if "warmup" in head or ("comm %" in head and "ms a step" not in head):
                rows = [more | row for more, row in zip(found.pop(), rows)]
            found.append(rows)
    return done.stdout, *found


def test_speedup_and_efficiency_by_hand(tmp_path):
    """Speedup, efficiency, serial fraction and hidden share by hand. The warmup counts apart."""
    runs = [rows_of(n, n, [time, time]) for n, time in ((1, 10), (2, 6), (4, 4))]
    runs.append(rows_of("d", 2, [10, 10], batch_size=128, samples=1280))
    out = tmp_path / "out"
    text, strong, weak = tables(write(tmp_path / "a.jsonl", *runs), "--out", out)
    assert [row["speedup"] for row in strong + weak] == ["1.00", "1.67", "2.50", "1.00", "2.00"]
    assert [row["efficiency"] for row in strong] == ["1.00", "0.833", "0.625"]
    assert "Serial fraction 0.200: at most 5 times as fast" in text
    assert "Not to be trusted" not in text and "note:" not in text
    fast = write(tmp_path / "fast.jsonl", rows_of("a", 1, [10, 10]), rows_of("b", 2, [4, 4]))
    told = run_report(fast).stdout
    assert "more than N times as fast" in told and "Serial fraction" not in told
    assert strong[1]["hidden %"] == "50.0" and strong[1]["R"] == "4.00" and strong[0]["R"] == "-"
    assert [row["comm %"] for row in strong] == ["0.00", "10.0", "10.0"]
    assert [row["seconds"] for row in strong] == ["10.0", "6.00", "4.00"], "without the validation"
    assert [row["device-hours"] for row in strong] == ["0.00278", "0.00333", "0.00444"]
    beside = [strong[2][name] for name in ("steps", "warmup", "eval", "save", "val_acc")]
    assert beside == ["20", "5.00", "1.00", "0.00", "0.900"]
    assert strong[0]["hidden %"] == strong[0]["waiting"] == "-" and "threads 4 / 2 / 1" in text
    whole, paste = (out / "report.md").read_text().split("## For an application")
    assert whole.strip() == text.strip() and paste.count("It pays up to") == 2
    columns = "nodes | processes | seconds | speedup | efficiency | device-hours | peak_MB"
    values = "1 | 4 | 4.00 | 2.50 | 0.625 | 0.00444 | 1003"
    for line in columns, values:
        assert f"| {line} |" in re.sub(" +", " ", paste), paste
    found = csv.DictReader((out / "tables/measured.csv").read_text().splitlines())
    assert [row["speedup"][:6] for row in found] == ["1.0", "1.6666", "2.5", "1.0", "2.0"]
    assert len([path for path in out.glob("*.png") if path.read_bytes()[1:4] == b"PNG"]) == 7


def test_a_resumed_and_a_short_run_compare_with_a_whole_one(tmp_path):
    """Sums over all rows, divided by the steps: whatever a row covers, however often it started."""
    whole = rows_of("whole", 1, [10, 10])
    stopped = list(rows_of("resumed", 2, [6], steps=7))  # it stops before its validation
    resumed = list(rows_of("resumed", 2, [6, 6], steps=7))
    for row in stopped:
        row |= {"eval": 0}
        del row["val_loss"], row["val_acc"]
    for row in resumed[:2]:  # the validation of the very step at which it was stopped
        row |= {"data": 0, "forward": 0, "backward": 0, "optimizer": 0, "comm": 0, "steps": 0}
        row |= {"warmup": 0, "comm_total": 0}
    short = rows_of("short", 4, [4], steps=3)
    none = rows_of("none", 8, [0], steps=0, **{"samples/s": 0})
    log = write(tmp_path / "a.jsonl", whole, stopped, resumed, short, none)
    text, (one, two, four) = tables(log, "--out", tmp_path / "out")
    assert [row["speedup"] for row in (one, two, four)] == ["1.00", "1.67", "2.50"]
    assert [row["steps"] for row in (one, two, four)] == ["20", "14", "3"]
    assert [row["eval"] for row in (one, two, four)] == ["1.00"] * 3, "of a validation"
    assert "run none on 8 process(es) left out: no step after its warmup" in text
    assert (
        text.count("note: ") == 2 and "run short on 4 process(es): its times are of only 3" in text
    )
    alone = write(tmp_path / "b.jsonl", rows_of("none", 1, [0], steps=0))
    done = run_report(alone)
    assert done.returncode and "no runs to report" in done.stderr


def test_gpt_and_translation(tmp_path):
    """e^2 = 7.39; 64 samples/s are 6400 tokens/s, each 6 x 1e6 + 12 x 2 x 50 x 100 FLOP."""
    gpt = {"script": "singlegpu/gpt.py", "d_model": 50, "num_layers": 2, "seq_len": 100}
    words = {"val_loss": 2, "val_acc": math.nan}
    runs = [rows_of(n, n, [10], **words, **gpt) for n in (1, 2)]
    runs += [rows_of(n, n, [10], **words, script="multigpu/translation.py") for n in (3, 6)]
    _, group, other = tables(write(tmp_path / "a.jsonl", *runs))
    assert [row["val_ppl"] for row in (*group, *other)] == ["7.39"] * 4
    assert [row["tokens/s"] for row in group] == ["6400"] * 2 and "tokens/s" not in other[0]
    assert [row["TFLOP/s"] for row in group] == ["0.0392", "0.0196"]


def test_how_far_it_pays(tmp_path):
    """Of 2 and 6 processes log2(6 / 2) = 1.58 doublings must pay, 1.5**1.58 = 1.90."""
    cases = {
        (12, 7, 4): "It pays up to 2 processes: 6 are 1.75 times as fast as 2, less than 1.90.",
        (12, 7, 3.5): "It pays up to 6 processes, and there are no numbers on more.",
        (12, 10, 3): "It pays up to 1 process: 2 are 1.20 times as fast as 1, less than 1.50.",
    }
    for times, sentence in cases.items():
        runs = [rows_of(n, n, [time], nodes=n) for n, time in zip((1, 2, 6), times)]
        runs.append(rows_of("slow", 2, [30]))  # on one node: the fastest run with 2 counts
        text, group = tables(write(tmp_path / "a.jsonl", *runs))
        assert sentence in text and len(group) == 4, text


def test_a_late_process_keeps_the_R_of_the_link(tmp_path):
    """It is named with its host, and R stays that of the link."""
    three = list(rows_of("b", 3, [6, 6], samples=640, nodes=2))
    for row in three:
        if row["rank"] != 1:
            row["comm_total"] += 0.9  # instead of 0.2 x 6 s
    runs = rows_of("a", 1, [10, 10]), rows_of("even", 3, [6, 6], nodes=3), three
    _, (one, late, even) = tables(write(tmp_path / "a.jsonl", *runs))
    assert [row["R"] for row in (one, late, even)] == ["-", "4.00", "4.00"]
    assert even["waiting"] == "0.00"
    assert [late["sending"], late["waiting"]] == ["1.20", "0.600"]
    assert [late["late rank"], late["late host"], late["peak_MB"]] == ["1", "node1", "1002"]
    assert even["hidden %"] == "50.0" and late["hidden %"] == f"{100 - 100 * 0.6 / 1.8:.1f}"


def test_what_is_compared(tmp_path):
    """Runs that differ in what a user chose have no speedup; threads and nodes may differ."""
    changes = {"precision": "bf16", "model": "mlp", "compile": True, "device": "another"}
    others = [rows_of(name, 2, [5], **{name: value}) for name, value in changes.items()]
    others += [rows_of("precision", 2, [4], nodes=2), rows_of("c", 2, [2], comm_hook="bf16")]
    log = write(tmp_path / "a", rows_of("a", 1, [8]), *others)
    _, bf16, plain, alone = tables(log, "--out", tmp_path)
    assert [row["speedup"] for row in bf16 + plain] == ["1.00", "4.00", "1.00", "2.00"]
    assert len(alone) == 4 and "speedup" not in alone[0]
    measured = csv.DictReader((tmp_path / "tables/measured.csv").read_text().splitlines())
    assert len({row["group"] for row in measured}) == 2, "a name for each group"
    _, *same, _, _ = tables(log, "--predict", link(tmp_path / "l.json"))
    assert same == [bf16, plain, alone], "a prediction comes after them"


def test_settings_of_an_own_section(tmp_path):
    """Runs that differ in a user's own setting are not compared, and his metric is shown."""
    runs = []
    for number, folder, processes in ((1, "a", 1), (2, "a", 2), (3, "b", 2)):
        own = {"data": folder, "seed": str(number)}  # `data` is also the name of a phase
        changes = {"settings": own, "val_iou": 0.5, "val_acc": math.nan}
        runs.append(rows_of(number, processes, [4], **changes))
    _, group, alone = tables(write(tmp_path / "a.jsonl", *runs))
    assert [row["val_iou"] for row in group] == ["0.500", "0.500"]
    assert len(alone) == 1 and "speedup" not in alone[0]


def test_launches_are_compared(tmp_path):
    """Stages and shards are of the launch: such runs stand beside those of the whole model."""
    gpt = {"script": "multinode/gpt.py", "grad_accum_steps": 1}
    shards = {"script": "hybrid/gpt_fsdp.py", "shard_size": 2}
    stages = {"script": "hybrid/gpt_pipeline.py", "num_microbatches": 4}
    runs = [rows_of("one", 1, [8], **gpt), rows_of("ddp", 2, [4], **gpt)]
    runs += [rows_of("fsdp", 2, [5], **gpt | shards)]
    runs += [rows_of(f"{n} stages", n, [6], **stages, num_stages=n) for n in (2, 4)]
    runs += [rows_of("images", 1, [6], script="hybrid/images.py", num_stages=2, stages=[5, 5])]
    log = write(tmp_path / "a.jsonl", *runs)
    text, group, alone = tables(log)
    assert [row["split"] for row in group] == ["-", "-", "2 shards", "2 stages", "4 stages"]
    assert [row["speedup"] for row in group] == ["1.00", "2.00", "1.60", "1.33", "1.33"]
    assert "num_microbatches - / 4" in text and "schedule" not in text
    assert alone[0]["device-hours"] == "0.00333", "two devices"
    predicted = run_report(log, "--predict", link(tmp_path / "l.json")).stdout
    assert "run one" in predicted and "run images" not in predicted


def test_skew(tmp_path):
    """The skew is that of the compute times of an epoch."""
    two = list(rows_of("b", 2, [4, 4]))
    two[1]["backward"] += 2  # of one of two rows, each of an epoch
    _, (_, two) = tables(write(tmp_path / "a.jsonl", rows_of("a", 1, [8, 8]), two))
    assert two["skew"] == "1.00"


def test_damaged_rows_are_left_out(tmp_path):
    """What is left out is said, and the rest reported."""
    whole = write(tmp_path / "whole.jsonl", rows_of("a", 1, [8]), rows_of("b", 2, [4]))
    text = whole.read_text()
    torn = text.splitlines()[0][:400]  # within the settings; the next append goes on in its line
    assert '"settings": {"' in torn
    whole.write_text(f"{torn}{text}cnn,mnist,64\n{text.splitlines()[-1][:-1]}")
    changes = {"eval": math.inf}, {"data": "a"}, {"rank": "b"}, {"settings": 1}
    wrong = [rows_of("d", 1, [9], **change) for change in changes]
    write(tmp_path / "wrong.jsonl", rows_of("c", 4, [2]), *wrong)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "binary.jsonl").write_bytes(bytes(range(256)) * 20)
    text, group = tables(tmp_path)
    assert [row["speedup"] for row in group] == ["1.00", "2.00", "4.00"]
    for note in (
        "whole.jsonl: 2 damaged row",
        "wrong.jsonl: 4 damaged row",
        "empty.jsonl",
        "binary.jsonl",
    ):
        assert note in text, text
    runs = list(rows_of("a", 2, [4]))[:-1], rows_of("b", 1, [8])
    lost = write(tmp_path / "lost.jsonl", *runs)
    assert "1 row(s) left out: not all processes logged their step" in run_report(lost).stdout
    older = [{"epoch": 0, "run": "older"}] * 3
    told = run_report(write(tmp_path / "old.jsonl", older, rows_of("a", 1, [9]))).stdout
    assert told.count("note: ") == 1 and "3 row(s) of older scripts left out" in told


def link(path, processes=2, latency=0.0, bandwidth=1e9, rate=1.0, nodes=1, device="CPU"):
    found = {"processes": processes, "nodes": nodes, "device": device, "latency_s": latency}
    found |= {"bandwidth_bytes_per_s": bandwidth, "compute_rate": rate}
    path.write_text(json.dumps(found))
    return path


def test_prediction_by_hand(tmp_path):
    """640 samples in 10 s are 10 steps of 1 s: data .1, forward .3, backward .4, optimizer .1."""
    log = write(tmp_path / "a.jsonl", rows_of("a", 1, [10, 10], data=1))
    slow = link(tmp_path / "l.json", 2, 0.01, 40e6)
    text, strong, weak = tables(log, "--predict", slow, "--out", tmp_path)
    assert [row["processes"] for row in strong] == [str(2**n) for n in range(1, 7)], "batch 64"
    assert [row["processes"] for row in weak] == [str(2**n) for n in range(1, 11)]
    # 4 MB: a bucket of 1 MiB, ready after 26% of the backward pass, and one of the rest.
    first, rest = (size / 40e6 + 0.01 for size in (1 << 20, 4_000_000 - (1 << 20)))
    comm = max(0.2 * (1 << 20) / 4e6 + first, 0.2) + rest - 0.2
    step = 0.05 + 0.15 + 0.2 + comm + 0.1
    assert float(strong[0]["speedup"]) == pytest.approx(0.9 / step, rel=0.004)
    assert float(strong[0]["R"]) == pytest.approx(0.45 / (first + rest), rel=0.004)
    # Weak: the backward pass stays long; a ring of 4 has 3 times the latency of one of 2.
    first, rest = (size * 1.5 / 40e6 + 0.03 for size in (1 << 20, 4_000_000 - (1 << 20)))
    comm = max(0.4 * (1 << 20) / 4e6 + first, 0.4) + rest - 0.4
    assert float(weak[1]["speedup"]) == pytest.approx(4 * 0.9 / (0.9 + comm), rel=0.004)
    assert "It pays up to 2 processes: 4 are 1.32 times as fast as 2, less than 1.50." in text
    assert "a step gets shorter up to 4 process(es)." in text
    assert "keep 80% efficiency up to 8." in text
    assert "Not to be trusted: CPU processes of one node share its cores and memory" in text
    assert "TFLOP/s" not in text
    slow.write_text(json.dumps(json.loads(slow.read_text()) | {"matmul_tflops": {"fp32": 0.5}}))
    gpt = {"script": "singlegpu/gpt.py", "d_model": 50, "num_layers": 2, "seq_len": 500}
    log = write(tmp_path / "a.jsonl", rows_of("a", 1, [10, 10], data=1, **gpt))
    share = "reaches 0.235 TFLOP/s: 47% of a large matmul's 0.5 (fp32)."
    assert share in run_report(log, "--predict", slow).stdout


def test_prediction_takes_the_buckets_of_the_log(run, data, tmp_path):
    log = write(
        tmp_path / "a.jsonl", rows_of("a", 1, [10, 10], data=1, buckets=[[3e6, 0.3], [1e6, 0]])
    )
    _, strong, _ = tables(log, "--predict", link(tmp_path / "l.json", 2, 0, 40e6, 0.5))
    # The first is ready after 0.05 s and takes 0.075 s, in which 0.0375 s of 0.15 s are computed.
    step = 0.05 + 0.15 + (0.05 + 0.075 + 0.1125) + 0.025 + 0.1
    assert float(strong[0]["speedup"]) == pytest.approx(0.9 / step, rel=0.004)
    words = (*arguments_of("mlp", data), "--max_steps", 3, "--log", tmp_path / "b")
    run("multigpu/images.py", *words, processes=1)
    row = json.loads((tmp_path / "b").read_text())
    sizes, leads = zip(*row["buckets"])
    assert sum(sizes) == 4 * row["parameters"] and leads[0] > leads[-1] == 0


def test_prediction_over_nodes(tmp_path):
    """Inside a node the fast link counts, over nodes the slow one."""
    log = write(tmp_path / "a.jsonl", rows_of("a", 1, [10, 10], data=1))
    links = link(tmp_path / "i", 4, 3e-6, 200e6), link(tmp_path / "b", 2, 50e-6, 100e6, 0.5, 2)
    _, one, _ = tables(log, "--predict", links[0])
    _, two, _ = tables(log, "--predict", *links, "--gpus_per_node", 4)
    assert one[:2] == two[:2]
    comm_total = 2 * (1e-6 * 6 + 50e-6) + 4e6 * 2 * 7 / 8 / 100e6
    beside = 1e-6 * 6 + 50e-6 + (1 << 20) * 2 * 7 / 8 / 100e6  # seconds of half the speed
    compute = 0.7 / 8 + 0.1 + 0.5 * beside
    assert float(two[2]["R"]) == pytest.approx(compute / comm_total, rel=0.004)


def test_prediction_of_nccl_and_of_several_links(tmp_path):
    """Trees have 2 log2(nodes) hops, a ring 2 (N - 1); what was measured at an N counts there."""
    log, two = write(tmp_path / "a.jsonl", rows_of("a", 1, [10, 10], data=1)), tmp_path / "2.json"
    seconds = {}
    for device in ("CPU", "H100"):
        _, strong, _ = tables(log, "--predict", link(two, 2, 0.02, 1e15, 1, 2, device))
        assert [row["link"] for row in strong[:2]] == ["measured", "from 2"]
        seconds[device] = [float(row["ms a step"]) for row in strong]
    # Two buckets send one after the other, the first from 26% of the backward pass on.
    count = np.array([8, 16, 32])
    hidden = (1 - (1 << 20) / 4e6) * 400 / count
    for hops, found in zip((count - 1, np.log2(count)), seconds.values()):
        expected = 800 / count + 100 + 2 * 20 * hops - hidden
        assert found[2:5] == pytest.approx(expected, abs=1)
    more = link(tmp_path / "4.json", 4, 0.5, 1e15, 1, 4)
    text, strong, _ = tables(log, "--predict", more, link(two, 2, 0.02, 1e15, 1, 2))
    assert [row["link"] for row in strong[:3]] == ["measured", "measured", "from 4"]
    assert float(strong[1]["ms a step"]) > 1000 > float(strong[0]["ms a step"])
    assert "up to 2 process(es)" in text and "Not to be trusted" not in text


def test_time_to_the_same_loss(tmp_path):
    """A batch of b needs 1 + B / b of the steps: with B = 100, of 64 2.56, and of 128 1.78."""
    log, good = (
        write(tmp_path / "a.jsonl", rows_of("a", 1, [10, 10], data=1)),
        tmp_path / "noise.json",
    )
    good.write_text('{"noise_scale": 100}')
    fast = link(tmp_path / "l.json", 2, 0.05, 1e12, nodes=2)
    text, strong, weak = tables(log, "--predict", fast, "--noise", good)
    step = float(weak[0]["ms a step"]) / 900
    assert float(weak[0]["time to loss"]) == pytest.approx(step * 1.78 / 2.56, rel=0.01)
    times = [float(row["time to loss"]) for row in weak]
    best = weak[times.index(min(times))]["processes"]
    assert f"the same loss comes soonest on {best}, in" in text and 1 < int(best) < 1024
    assert "time to loss" not in strong[0]
    done = run_report(log, "--noise", good)
    assert done.returncode == 2 and "--noise needs --predict" in done.stderr


def test_bad_links_are_refused(tmp_path):
    one, two = (write(tmp_path / f"{n}.jsonl", rows_of("a", n, [10, 10])) for n in (1, 2))
    good, nan = link(tmp_path / "good.json"), link(tmp_path / "nan.json", bandwidth=math.nan)
    (bad := tmp_path / "bad.json").write_text("[1")
    between = link(tmp_path / "between.json", nodes=2)
    both, noise = "links inside a node and between nodes", link(tmp_path / "noise.json")
    four = link(tmp_path / "four.json", 4, nodes=2)
    for message, (log, *more) in (
        ("bad.json", (one, bad)),
        ("nan.json", (one, nan)),
        ("one process", (two, good)),
        (both, (one, good, between)),
        (both, (one, good, "--gpus_per_node", 8)),
        ("one process a node", (one, good, four, "--gpus_per_node", 2)),
        ("cannot read the noise scale", (one, good, "--noise", noise)),
    ):
        done = run_report(log, "--predict", *more)
        assert done.returncode and message in done.stderr.splitlines()[-1], done.stderr
