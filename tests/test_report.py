"""report.py on logs whose answers are known, and the last step that the scripts log."""

import itertools
import json
import re

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, call, module, rows as rows_in

report = module("tools/report.py")


def rows_of(run, processes, seconds, batch_size=64, samples=640, steps=10, **changes):
    """The rows of a run: for each a validation of 1 s, and steps, of whose time 10% is exposed.

    `seconds` are those of an epoch of so many samples. A row is so many steps after its warmup.
    """
    settings = {"model": "cnn", "dataset": "mnist", "precision": "fp32", "seed": str(run)}
    settings |= {name: str(changes[name]) for name in settings.keys() & changes.keys()}
    run_row = settings | {"settings": settings | {"batch_size": batch_size}, "run": str(run)}
    run_row |= {"script": f"{'multi' if processes > 1 else 'single'}gpu/images.py", "nodes": 1}
    run_row |= {"processes": processes, "threads": max(1, 4 // processes), "device": "CPU"}
    run_row |= {"batch_size": batch_size, "steps_per_epoch": samples // batch_size, "steps": steps}
    run_row |= {"parameters": 1_000_000, "compile": False, "epochs": 1, "eval_every": 0}
    run_row |= {"train_loss": 2, "val_acc": 0.9, "samples/s": 9, "eval": 1, "save": 0}
    run_row["last_step"] = []
    shares = {"data": 0.2, "forward": 0.3, "backward": 0.4, "optimizer": 0.1}
    if processes > 1:  # singlegpu's rows have no such columns
        run_row["comm_hook"] = "none"
        shares |= {"data": 0.1, "comm": 0.1, "comm_total": 0.2}
    scale = steps * batch_size / samples
    for (number, time), rank in itertools.product(enumerate(seconds, start=1), range(processes)):
        row = {"step": steps * number, "val_loss": 2 / number, "warmup": 5 if number == 1 else 0}
        row |= {"rank": rank, "host": f"node{rank}", "peak_MB": 1000 + rank}
        row |= {name: share * scale * time for name, share in shares.items()}
        row["seconds"] = scale * time + row["warmup"] + 1
        yield run_row | row | changes


def write(path, *runs):
    path.write_text("".join(json.dumps(row) + "\n" for row in itertools.chain(*runs)))
    return path


def tables(*arguments, script=report):
    """What is printed, and the rows {column: text} of each table; those of measured runs in one."""
    done, found = call(script, *arguments), []
    assert done.returncode == 0 and not done.stderr, done.stderr
    for part in done.stdout.split("\n\n"):
        if part.startswith("|"):
            head, _, *rows = [re.split(r" *\| *", line)[1:-1] for line in part.splitlines()]
            rows = [dict(zip(head, row)) for row in rows]
            is_of_report = {"warmup (s)", "tokens/s"} & {*head}
            if is_of_report or ("comm (%)" in head and "step (ms)" not in head):
                rows = [more | row for more, row in zip(found.pop(), rows)]
            found.append(rows)
    return done.stdout, *found


def column(rows, name):
    return " ".join(row[name] for row in rows)


@pytest.fixture
def drawn(monkeypatch):
    """Of each picture the figure, the sentence, and the path; it is not written."""
    found = []
    monkeypatch.setattr(report, "save", lambda *words, **more: found.append(words))
    return found


# Flags of a task, whose names and values change no column. A script writes columns over them.
FLAGS = {"stages": 7, "num_stages": "x", "shard_size": 2, "schedule": [3], "trained": 9}
FLAGS |= {"comm": "x", "comm_total": 5.0, "bubble": 3, "data": "a/x", "val_part": 0.2}


def test_speedup_and_efficiency_by_hand(tmp_path, drawn):
    """The warmup counts apart. A late process is named, and R stays that of the link.

    The picture has a bar for each run, and what would be ideal. Its phases add up to a step.
    """
    late = list(rows_of(4, 4, [4, 4]))
    for row in late:
        row["comm_total"] += 0.6 * (row["rank"] != 1)  # instead of 0.2 x 4 s
        name = "new" if row["step"] == 20 else "node"  # queued again, on other nodes
        row["host"] = f"{name}{row['rank']}"
    runs = [rows_of(1, 1, [10, 10]), rows_of(2, 2, [6, 6]), late]
    runs.append(rows_of("d", 2, [5, 5], batch_size=128))  # of half as many steps an epoch
    runs = [[FLAGS | row | {"settings": row["settings"] | FLAGS} for row in run] for run in runs]
    out = tmp_path / "out"
    text, strong, weak = tables(write(tmp_path / "a.jsonl", *runs), "--out", out)
    for name, cells in {
        "epoch (s)": "10.0 6.00 4.00",  # without the validation
        "speedup (x)": "1.00 1.67 2.50",
        "efficiency (%)": "100 83.3 62.5",
        "device-hours": "0.00278 0.00333 0.00444",
        "comm (%)": "0.00 10.0 10.0",
        "hidden (%)": f"- 50.0 {100 - 100 * 0.4 / (0.8 + 0.45):.1f}",
        "R (x)": "- 3.50 3.50",
        "sending (s)": "- 1.20 0.800",
        "waiting (s)": "- 0.00 0.450",
        "steps": "20 20 20",
        "step": "20 20 20",
        "warmup (s)": "5.00 5.00 5.00",
        "eval (s)": "1.00 1.00 1.00",
        "val_acc": "0.900 0.900 0.900",
        "peak_MB": "1000 1001 1003",
    }.items():
        assert column(strong, name) == cells, name
    assert column(strong, "late rank") == "- - 1 on node1 or new1"
    assert (column(weak, "speedup (x)"), column(weak, "epoch (s)")) == ("1.00 2.00", "10.0 5.00")
    assert "threads 4 / 2 / 1" in " ".join(text.split())
    assert "Not to be trusted" not in text and "note:" not in text
    assert (out / "report.md").read_text().strip() == text.strip()
    found = pd.read_csv(out / "epochs.csv").set_index("processes")
    assert len(found) == 2 * (2 + 1 + 1 + 1), "one process is in both groups"
    last = found.loc[4, ["epoch", "val_loss", "speedup (x)", "comm (s)"]].iloc[-1]
    assert [*last] == pytest.approx([2, 1, 2.5, 0.4])
    assert [path.name for *_, path in drawn] == ["scaling.png", "scaling_2.png"]
    axes = drawn[0][0].axes
    bars, phases = [[bar.get_height() for bar in each.patches] for each in axes]
    np.testing.assert_allclose(bars, [1, 10 / 6, 2.5])
    np.testing.assert_allclose(axes[0].lines[0].get_ydata(), [1, 2, 4])
    words = [text.get_text() for text in axes[0].texts]
    assert words == ["1.00\n100%", "1.67\n83%", "2.50\n62%"]
    np.testing.assert_allclose(np.reshape(phases, (-1, 3)).sum(0), [1000, 600, 400])  # ms
    assert drawn[0][1].startswith("It pays up to 4 processes (more were not tried).\nstrong sca")


def test_a_resumed_and_a_short_run_compare_with_a_whole_one(tmp_path):
    """Sums over all rows, divided by the steps: whatever a row covers, however often it started."""
    stopped = list(rows_of("resumed", 2, [6], steps=7, eval=0))  # it stops before its validation
    resumed = list(rows_of("resumed", 2, [6, 6], steps=7))
    cut = list(rows_of("cut", 2, [6, 6]))
    for row in stopped + cut[2:]:
        del row["val_loss"], row["val_acc"]
    for row in cut[2:]:  # stopped on another machine
        row["device"] = "H100"
    for row in resumed[:2]:  # the validation of the very step at which it was stopped
        row |= dict.fromkeys("data forward backward optimizer comm comm_total steps".split(), 0)
    runs = [rows_of("whole", 1, [10, 10]), stopped, resumed, rows_of("none", 8, [0], steps=0)]
    runs.append(rows_of("short", 4, [4], steps=3, host="node9"))
    text, group = tables(write(tmp_path / "a.jsonl", *runs))
    found = [column(group, name) for name in ("speedup (x)", "steps", "eval (s)", "warmup (s)")]
    assert found == ["1.00 1.67 2.50", "20 14 3", "1.00 1.00 1.00", "5.00 10.0 5.00"]
    assert "run none has only 0 step(s) after its warmup" in text
    assert "run short has only 3 step(s)" in text and text.count("note: ") == 3
    places = "1 on CPU, node0; 2 on CPU, node0 node1; 4 on CPU, node9"
    assert f"note: machines may differ in speed. {places}\n" in text
    _, [row] = tables(write(tmp_path / "b.jsonl", cut))
    assert row["device"] == "CPU and H100"
    assert row["step"] == "20" and "val_loss" not in row, "that of step 10"


PAYS = {  # seconds of 1, 2 and 6 processes: log2(6 / 2) = 1.58 doublings must pay, 1.5**1.58 = 1.90
    (12, 7, 4): "up to 2 processes: 6 are 1.75 times as fast as 2 (rule: 1.90 or more pays).",
    (12, 7, 3.5): "It pays up to 6 processes (more were not tried).",
    (12, 10, 3): "up to 1 process: 2 are 1.20 times as fast as 1 (rule: 1.50 or more pays).",
    (12, 4, 2): "Not to be trusted: N processes are over N times as fast",
}


@pytest.mark.parametrize("times", PAYS)
def test_how_far_it_pays(tmp_path, times):
    runs = [rows_of(n, n, [time], nodes=n) for n, time in zip((1, 2, 6), times)]
    runs.append(rows_of("slow", 2, [30]))  # on one node: the fastest run with 2 counts
    assert PAYS[times] in call(report, write(tmp_path / "a.jsonl", *runs)).stdout


SAME = [{}, {"seed": 7}, {"threads": 9}, {"nodes": 2}, {"comm_hook": "bf16"}, {"batch_size": 128}]
OTHER = [{"precision": "bf16"}, {"model": "mlp"}, {"compile": True}, {"device": "another"}]
OTHER += [{"parameters": 9}, {"script": "multigpu/text.py"}]
OTHER += [{"settings": {"batch_size": 64, "lr": 2}}]


@pytest.mark.parametrize("change", SAME + OTHER)
def test_what_is_compared(tmp_path, change):
    """Runs that differ in what a user chose have no speedup."""
    log = write(tmp_path / "a.jsonl", rows_of("a", 1, [8]), rows_of("b", 2, [2], **change))
    text, group, *_ = tables(log)
    is_other = "## not compared" in text
    assert is_other == (change in OTHER) == ("speedup (x)" not in group[0])


def test_what_is_one_run(tmp_path):
    """Two starts with one snapshot and one hook. A copy of a snapshot keeps the id of its run."""
    parts = [("a.pt", 8, "none"), ("a.pt", 4, "none"), ("b.pt", 2, "none"), ("a.pt", 1, "bf16")]
    runs = [rows_of("b", 2, [time], snapshot=path, comm_hook=hook) for path, time, hook in parts]
    ones = [rows_of(name, 1, [time], snapshot=None) for name, time in (("a", 6), ("slow", 12))]
    text, *found = tables(write(tmp_path / "a.jsonl", *ones, *runs))
    assert re.findall(r"^## strong .* 64(.*)", text, re.M) == [", comm_hook bf16", ""], text
    hooked, plain = (column(group, "speedup (x)") for group in found)
    assert (hooked, plain) == ("1.00 0.500 6.00", "1.00 0.500 1.00 3.00")


def test_launches_are_compared(tmp_path):
    """Stages and shards are of the launch: such runs stand beside those of the whole model.

    Starts with other workers are not averaged. Of 2 processes of 2 GPUs, half would do. What
    communication holds up FSDP on GPUs, and what stages send, is not known.
    """
    launches = {  # processes, seconds, and what differs
        "one": (1, 8, {}),
        "slow": (2, 8, {"num_workers": 0}),
        "ddp": (2, 4, {"num_workers": 4}),
        "fsdp": (2, 5, {"script": "hybrid/gpt_fsdp.py", "shard_size": 2}),
        "pipeline": (2, 6, {"num_stages": 2, "num_microbatches": 4}),
        "stages": (2, 2, {"num_stages": 3, "stages": [5, 5]}),
    }
    gpt = {"script": "multinode/gpt.py", "device": "H100"}
    runs = [rows_of(run, n, [time], **gpt | more) for run, (n, time, more) in launches.items()]
    text, group = tables(write(tmp_path / "a.jsonl", *runs))
    assert [row["split"] for row in group] == ["-", "-", "-", "2 shards", "2 stages", "3 stages"]
    assert column(group, "speedup (x)") == "1.00 1.00 2.00 1.60 1.33 4.00"
    assert column(group, "efficiency (%)") == "100 50.0 100 80.0 66.7 100"
    assert group[-1]["device-hours"] == "0.00222" and "num_workers 0 / 4" in text
    for name, unknown in {"sending (s)": [0, 4], "R (x)": [0, 3, 4], "comm (%)": [3]}.items():
        assert [n for n, row in enumerate(group) if row[name] == "-"] == unknown, name
    assert "It pays up to 4 GPUs (more were not tried)." in text


def step_of(late, rank, start=-9.0):
    """The last step of a rank. Its data take 5 ms, and its backward pass so many seconds more."""
    moments = {"data": (0, 0.005), "forward 0": (0.005, 0.03)}
    moments |= {"backward": (0.03, 0.05 + late), "comm": (0.05 + late, 0.12)}
    spans = [[name, start + first, start + end, 0] for name, (first, end) in moments.items()]
    return [*spans, ["all-reduce", start + 0.035 + late, start + 0.12, 4000]]


def drawn_step(drawn, log, folder):
    """The figure and the sentence of the only picture of a step."""
    drawn.clear()
    tables(log, "--step", "--out", folder)
    [(figure, sentence, path)] = [words for words in drawn if "step" in words[2].name]
    assert path == folder / f"{log.stem}_step.png"
    return figure.axes[0], sentence


def words_in(axes):
    return [text.get_text() for text in axes.texts]


def test_the_last_step_is_drawn(tmp_path, drawn):
    """Rank 1 is 60 ms late: rank 0 waits for it in the all-reduce. Of a folder, each log counts."""
    logged = list(rows_of("a", 2, [1, 1])) + list(rows_of("b", 2, [1, 1]))
    for row in logged:
        step = step_of(0.06 * row["rank"], row["rank"])
        row["last_step"] = step if (row["run"], row["step"]) == ("b", 20) else step[:3]
    folder = tmp_path / "logs"
    folder.mkdir()
    write(folder / "run.jsonl", logged, rows_of("z", 1, [1]))  # killed in the last validation
    write(folder / "none.jsonl", rows_of("a", 1, [1]))
    tables(folder, "--step", "--out", tmp_path)
    [(figure, sentence, path)] = [words for words in drawn if "step" in words[2].name]
    assert path == tmp_path / "run_step.png"
    assert sentence == "Process 1 is late: process 0 waits 60 ms for it."
    [axes] = figure.axes
    bars = [(bar.get_x(), bar.get_width()) for bar in axes.patches[:12]]
    assert len(bars) == 8 + 2 + 2, "of the last row of the last run: phases, all-reduces, waiting"
    assert bars[:2] == [pytest.approx((0, 5)), pytest.approx((0, 5))], "ms of data"
    assert bars[-2:] == [pytest.approx((35, 60)), pytest.approx((95, 0))], "waiting"
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert labels == ["process 0\nnode0", "process 1\nnode1"]
    # The bracket has the length that the sentence says, and its arrow leads to process 0.
    [bracket] = axes.lines
    assert [bracket.get_xdata().min(), bracket.get_xdata().max()] == pytest.approx([50, 110])
    assert words_in(axes)[-2:] == ["process 1: longer backward ", ""]
    assert axes.texts[-1].xy == pytest.approx((80, 0.25)), "below the bar of process 0"


def test_steps_of_one_of_equals_and_of_many(tmp_path, drawn):
    """One process sends nothing. Nobody is late by less than a tenth. Of many, eight are drawn."""
    log = write(tmp_path / "one.jsonl", rows_of("a", 1, [1], last_step=step_of(0, 0)))
    axes, sentence = drawn_step(drawn, log, tmp_path)
    assert sentence == "One step." and len(axes.patches) == 4, "no all-reduce"
    for late, expected in (0.01, "One step. No process is late by more"), (0.02, "GPU 10 is late"):
        logged = list(rows_of("a", 12, [1], device="H100", host="node0"))
        for row in logged:
            row["last_step"] = step_of(late * (row["rank"] == 10), row["rank"])
        axes, sentence = drawn_step(drawn, write(tmp_path / "many.jsonl", logged), tmp_path)
        assert sentence.startswith(expected)
        labels = [text.get_text() for text in axes.get_yticklabels()]
        last = "GPU 10" if late > 0.012 else "GPU 7"
        assert labels == [f"GPU {rank}" for rank in range(7)] + [last]
        assert len(axes.patches) == 8 * 6


def test_a_trace(tmp_path):
    """In Chrome's format: a track never has two spans at once, and all spans are there, in us.

    Its clock begins with the step. The process and its tracks have names.
    """
    logged = list(rows_of("a", 2, [1, 1]))
    for row in logged:
        # An all-reduce of a small bucket, beside the larger one.
        row["last_step"] = [*step_of(0.01, row["rank"]), ["all-reduce", -8.94, -8.9, 8]]
    log, path = write(tmp_path / "a.jsonl", logged), tmp_path / "trace.json"
    assert call(report, log, "--trace", path).returncode == 0
    trace = json.loads(path.read_text())
    assert trace.keys() == {"traceEvents", "displayTimeUnit"}
    names, tracks = {}, {}
    for event in trace["traceEvents"]:
        assert type(event["pid"]) is int and isinstance(event["name"], str)
        if event["ph"] == "M":
            names[event["name"], event["pid"], event.get("tid")] = event["args"]["name"]
        else:
            assert event.keys() == {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
            assert event["ph"] == "X" and type(event["tid"]) is int
            assert event["ts"] >= 0 and event["dur"] >= 0
            tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    assert names["process_name", 1, None] == "rank 1 on node1"
    kinds = ["phases", "collectives", "collectives"]
    assert [names["thread_name", 0, track] for track in range(3)] == kinds
    assert tracks.keys() == {(rank, track) for rank in (0, 1) for track in range(3)}
    for events in tracks.values():
        ends = [event["ts"] + event["dur"] for event in events]
        assert all(event["ts"] >= end - 1e-6 for event, end in zip(events[1:], ends))
    forward = tracks[0, 0][1]
    assert forward["name"] == "forward 0" and forward["ts"] == pytest.approx(5000)
    assert forward["dur"] == pytest.approx(25_000)
    assert [event["args"]["bytes"] for track in (1, 2) for event in tracks[1, track]] == [4000, 8]


def test_tokens_and_mfu(tmp_path):
    """Of a GPT the tokens are known, of others if the log has tokens/s. --peak is of one device.

    In an epoch of 10 s, 640 samples of 100 tokens, on a model of a million weights.
    """
    sizes = {"num_layers": 2, "d_model": 8, "seq_len": 100}
    settings = {"batch_size": 64, "precision": "bf16"} | sizes
    gpt = {"script": "singlegpu/gpt.py", "settings": settings, "device": "NVIDIA H100 80GB HBM3"}
    used = 6400 * (6e6 + 12 * 2 * 8 * 100) / 1e12  # TFLOPS of all devices

    def work_of(*words, processes=1, **changes):
        log = write(tmp_path / "a.jsonl", rows_of("a", processes, [10], **gpt | changes))
        text, [row] = tables(log, *words)
        return [row.get(name) for name in ("tokens/s", "peak (TFLOPS)", "MFU (%)")]

    def percent(peak, devices=1):
        return f"{100 * used / peak / devices:#.3g}"

    assert work_of() == ["6400", "989", percent(989)]
    assert work_of("--peak", 2) == ["6400", "2.00", percent(2)]
    assert work_of("--peak", 2, processes=4) == ["6400", "2.00", percent(2, 4)]
    assert work_of(device="NVIDIA H100 PCIe")[1:] == ["756", percent(756)]
    fp16 = {"settings": settings | {"precision": "fp16"}}
    assert work_of(**fp16)[1] == "989" and work_of(**fp16, device="Tesla V100-SXM2")[1] == "125"
    assert work_of(settings=settings | {"precision": "fp32"}) == ["6400", "67", percent(67)]
    assert work_of(device="CPU") == work_of(device="some GPU") == ["6400", None, None]
    text = {"script": "mine/train.py", "tokens/s": 900.0, "samples/s": 9}
    assert work_of(**text) == ["6400", "989", percent(989)]
    assert work_of(script="singlegpu/text.py") == [None, None, None], "texts are cut and padded"
    used = 6400 * 6e6 / 1e12
    del settings["d_model"]
    assert work_of() == ["6400", "989", percent(989)], "the weights alone"


def test_parts_of_layers(tmp_path):
    """What adds up the parts of a layer is computing, and what averages gradients is sending."""
    logged = list(rows_of("a", 4, [10], tensor_size=2, comm_total=3.0, sum_total=1.0))
    for row in logged:
        row["comm_total"] += 2 * (row["rank"] != 3)
    text, [row] = tables(write(tmp_path / "a.jsonl", logged))
    assert row["split"] == "2 parts"
    names = ("split", "sums (s)", "sending (s)", "waiting (s)", "late rank")
    assert [row.get(name) for name in names[1:]] == ["1.00", "2.00", "1.50", "3 on node3"]
    assert row["R (x)"] == "4.00", "(3 + 4 + 1) / 2"
    one = rows_of("b", 1, [20])
    _, group = tables(write(tmp_path / "b.jsonl", one, logged))
    assert column(group, "split") == "- 2 parts"


REFUSED = {  # flags, and why
    ("--peak", "0"): "argument --peak: 0 is not above 0",
    ("--peak", "fast"): "argument --peak: invalid positive value: 'fast'",
    ("--out", "a.jsonl"): "argument --out: a.jsonl is no folder",
    ("--trace", "missing/a.json"): "missing/a.json cannot be written: its folder is missing",
    ("--trace", "a.json"): "no row of these logs has a last step: it has phases after the first",
    ("--step",): "no row of these logs has a last step: it has phases after the first three steps",
}


@pytest.mark.parametrize("words", REFUSED)
def test_nonsense_is_refused(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    done = call(report, write(tmp_path / "a.jsonl", rows_of("a", 1, [1])), *words)
    assert done.returncode in (1, 2) and REFUSED[words] in done.stderr.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_the_last_step_in_the_log(logged, base):
    """Its phases follow each other, and add up to the columns of a row that is one step.

    Rank 1 is 0.6 s late, and has a clock that is 5 s ahead.
    """
    words = (*base, "--max_steps", 6, "--eval_every", 1)
    before = (ROOT / "tests/helpers/slow.py", "backward", 1, 0.6)
    last = rows_in(logged("multinode/images.py", *words, processes=3, before=before))[-3:]
    ready = []  # when the last gradient of each process is ready
    for row in last:
        events = pd.DataFrame(row["last_step"], columns=["name", "start", "end", "bytes"])
        phases, sent = events[events["bytes"] == 0], events[events["bytes"] > 0]
        np.testing.assert_allclose(phases["start"].iloc[1:], phases["end"].iloc[:-1])
        seconds = (phases["end"] - phases["start"]).groupby(phases["name"]).sum()
        seconds = dict(seconds.drop("comm"))  # the row's has the look's all-reduce, too
        assert seconds.keys() == {"data", "forward", "backward", "optimizer"}
        assert seconds == pytest.approx({name: row[name] for name in seconds}, abs=1e-6)
        assert sent["start"].between(phases["start"].iloc[0], phases["end"].iloc[-1]).all()
        assert (sent["start"] <= sent["end"]).all() and {*sent["name"]} == {"all-reduce"}
        assert sent["bytes"].sum() == 4 * row["parameters"], "float32, once each"
        ready.append(phases["end"][phases["name"] == "backward"].iloc[-1])
        assert sent["start"].min() < ready[-1] <= sent["start"].max(), "the last as backward() ends"
    assert 0.3 < ready[1] - max(ready[0], ready[2]) < 4
