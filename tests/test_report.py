"""report.py on logs whose answers are known, and the last step that the scripts log."""

import csv
import itertools
import json
import re
from collections import Counter

import pytest
from conftest import ROOT, call, module, rows as rows_in

report = module("tools/report.py")


def rows_of(run, processes, seconds, batch_size=64, samples=640, steps=10, **changes):
    """The rows of a run: for each a validation of 1 s, and steps, of whose time 10% is exposed.

    `seconds` are those of an epoch of so many samples. A row is so many steps after its warmup.
    """
    for (number, time), rank in itertools.product(enumerate(seconds, start=1), range(processes)):
        settings = {"model": "cnn", "dataset": "mnist", "precision": "fp32", "seed": str(run)}
        row = settings | {"batch_size": batch_size, "run": str(run), "rank": rank, "nodes": 1}
        settings |= {name: str(changes[name]) for name in settings.keys() & changes.keys()}
        row |= {"script": f"{'multi' if processes > 1 else 'single'}gpu/images.py"}
        row |= {"settings": settings | {"batch_size": batch_size}, "processes": processes}
        row |= {"threads": max(1, 4 // processes), "parameters": 1_000_000, "compile": False}
        row |= {"host": f"node{rank}", "device": "CPU", "peak_MB": 1000 + rank, "last_step": []}
        row |= {"steps_per_epoch": samples // batch_size, "step": steps * number, "steps": steps}
        row |= {"train_loss": 2, "val_loss": 2 / number, "val_acc": 0.9, "samples/s": 9, "save": 0}
        row |= {"warmup": 5 if number == 1 else 0, "eval": 1, "epochs": 1, "eval_every": 0}
        shares = {"data": 0.2, "forward": 0.3, "backward": 0.4, "optimizer": 0.1}
        if processes > 1:  # singlegpu's rows have no such columns
            row["comm_hook"] = "none"
            shares |= {"data": 0.1, "comm": 0.1, "comm_total": 0.2}
        scale = steps * batch_size / samples
        row |= {name: share * scale * time for name, share in shares.items()}
        yield row | {"seconds": scale * time + row["warmup"] + 1} | changes


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
            if "warmup (s)" in head or ("comm (%)" in head and "step (ms)" not in head):
                rows = [more | row for more, row in zip(found.pop(), rows)]
            found.append(rows)
    return done.stdout, *found


def column(rows, name):
    return " ".join(row[name] for row in rows)


def test_speedup_and_efficiency_by_hand(tmp_path, monkeypatch):
    """The warmup counts apart. A late process is named, and R stays that of the link.

    The picture has a bar for each run, and what would be ideal. Its phases add up to a step.
    """
    save, drawn = report.save, []

    def keep(figure, *words, **more):
        drawn.append(figure)
        save(figure, *words, **more)

    monkeypatch.setattr(report, "save", keep)
    late = list(rows_of(4, 4, [4, 4]))
    for row in late:
        row["comm_total"] += 0.6 * (row["rank"] != 1)  # instead of 0.2 x 4 s
        name = "new" if row["step"] == 20 else "node"  # queued again, on other nodes
        row["host"] = f"{name}{row['rank']}"
    runs = [rows_of(1, 1, [10, 10]), rows_of(2, 2, [6, 6]), late]
    runs.append(rows_of("d", 2, [5, 5], batch_size=128))  # of half as many steps an epoch
    out = tmp_path / "out"
    text, strong, weak = tables(write(tmp_path / "a.jsonl", *runs), "--out", out)
    for name, cells in {
        "epoch (s)": "10.0 6.00 4.00",  # without the validation
        "speedup (x)": "1.00 1.67 2.50",
        "efficiency (%)": "100 83.3 62.5",
        "device-hours": "0.00278 0.00333 0.00444",
        "comm (%)": "0.00 10.0 10.0",
        "hidden (%)": f"- 50.0 {100 - 100 * 0.4 / (0.8 + 0.45):.1f}",
        "R (x)": "- 4.00 4.00",
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
    assert strong[2]["late rank"] == "1 on node1 or new1"
    assert (column(weak, "speedup (x)"), column(weak, "epoch (s)")) == ("1.00 2.00", "10.0 5.00")
    assert "threads 4 / 2 / 1" in " ".join(text.split())
    assert "Not to be trusted" not in text and "note:" not in text
    assert (out / "report.md").read_text().strip() == text.strip()
    found = list(csv.DictReader((out / "epochs.csv").read_text().splitlines()))
    assert len(found) == 2 * (2 + 1 + 1 + 1), "one process is in both groups"
    last = [row for row in found if row["processes"] == "4"][-1]
    names = "epoch", "val_loss", "speedup (x)", "comm (s)"
    assert [float(last[name]) for name in names] == pytest.approx([2, 1, 2.5, 0.4])
    assert {path.name for path in out.glob("*.png")} == {"scaling.png", "scaling_2.png"}
    heights = [[bar.get_height() for bar in axes.patches] for axes in drawn[0].axes]
    ideals = [list(line.get_ydata()) for axes in drawn[0].axes for line in axes.lines]
    assert heights[0] == pytest.approx([10, 6, 4]) and ideals[0] == pytest.approx([10, 5, 2.5])
    assert heights[1] == pytest.approx([1, 10 / 6, 2.5]) and ideals[1] == [1, 2, 4]
    assert heights[2] == pytest.approx([100, 250 / 3, 62.5]) and ideals[2] == [100] * 3
    steps = [sum(heights[3][run::3]) for run in range(3)]
    assert steps == pytest.approx([1000, 600, 400]), "ms"


def test_a_resumed_and_a_short_run_compare_with_a_whole_one(tmp_path):
    """Sums over all rows, divided by the steps: whatever a row covers, however often it started."""
    stopped = list(rows_of("resumed", 2, [6], steps=7))  # it stops before its validation
    resumed = list(rows_of("resumed", 2, [6, 6], steps=7))
    for row in stopped:
        row |= {"eval": 0}
        del row["val_loss"], row["val_acc"]
    for row in resumed[:2]:  # the validation of the very step at which it was stopped
        row |= dict.fromkeys("data forward backward optimizer comm comm_total steps".split(), 0)
    runs = [rows_of("whole", 1, [10, 10]), stopped, resumed, rows_of("short", 4, [4], steps=3)]
    runs.append(rows_of("none", 8, [0], steps=0))
    text, group = tables(write(tmp_path / "a.jsonl", *runs))
    found = [column(group, name) for name in ("speedup (x)", "steps", "eval (s)", "warmup (s)")]
    assert found == ["1.00 1.67 2.50", "20 14 3", "1.00 1.00 1.00", "5.00 10.0 5.00"]
    assert "run none has only 0 step(s) after its warmup" in text
    assert "run short has only 3 step(s)" in text and text.count("note: ") == 2
    cut = list(rows_of("cut", 2, [6, 6]))  # stopped on another machine, without a validation
    for row in cut[2:]:
        row["device"] = "H100"
        del row["val_loss"], row["val_acc"]
    text, [row] = tables(write(tmp_path / "b.jsonl", cut))
    assert row["device"] == "CPU and H100"
    assert row["step"] == "20" and "val_loss" not in row, "that of step 10"


def test_other_machines_have_a_note(tmp_path):
    """Where no run was on all of them, or where one was on two kinds of GPU."""
    mixed = list(rows_of("b", 2, [6], device="H100"))
    mixed[0]["device"] = "H200"
    cases = {"2 on CPU, node9": rows_of("b", 2, [6], host="node9")}
    cases["2 on H200 and H100, node0 node1"] = mixed
    for told, other in cases.items():
        one = rows_of("a", 1, [10], device=told.split(",")[0].split()[-1])
        text, _ = tables(write(tmp_path / "a.jsonl", one, other))
        assert "note: machines may differ in speed. 1 on " in text and f"; {told}\n" in text


PAYS = {  # seconds of 1, 2 and 6 processes: log2(6 / 2) = 1.58 doublings must pay, 1.5**1.58 = 1.90
    (12, 7, 4): "up to 2 processes: 6 are 1.75 times as fast as 2 (rule: 1.90 or more pays).",
    (12, 7, 3.5): "It pays up to 6 processes. More were not tried.",
    (12, 10, 3): "up to 1 process: 2 are 1.20 times as fast as 1 (rule: 1.50 or more pays).",
    (12, 4, 2): "Not to be trusted: N processes are over N times as fast",
}


def test_how_far_it_pays(tmp_path):
    for times, told in PAYS.items():
        runs = [rows_of(n, n, [time], nodes=n) for n, time in zip((1, 2, 6), times)]
        runs.append(rows_of("slow", 2, [30]))  # on one node: the fastest run with 2 counts
        assert told in call(report, write(tmp_path / "a.jsonl", *runs)).stdout


SAME = ({}, {"seed": 7}, {"threads": 9}, {"nodes": 2}, {"comm_hook": "bf16"}, {"batch_size": 128})
OTHER = [{"precision": "bf16"}, {"model": "mlp"}, {"compile": True}, {"device": "another"}]
OTHER += [{"parameters": 9}, {"script": "multigpu/text.py"}]
OTHER += [{"settings": {"batch_size": 64, "lr": 2}}]


def test_what_is_compared(tmp_path):
    """Runs that differ in what a user chose have no speedup."""
    for change in (*SAME, *OTHER):
        log = write(tmp_path / "a.jsonl", rows_of("a", 1, [8]), rows_of("b", 2, [2], **change))
        text, group, *_ = tables(log)
        is_other = "## not compared" in text
        assert is_other == (change in OTHER) == ("speedup (x)" not in group[0]), change


def test_a_flag_of_a_task_is_no_column(tmp_path):
    """Whatever its name and value, the tables stay as they are. A script writes columns over it."""
    flags = {"stages": 7, "num_stages": "x", "shard_size": 2, "schedule": [3], "trained": 9}
    flags |= {"comm": "x", "comm_total": 5.0, "bubble": 3, "data": "a/x", "val_part": 0.2}
    runs = list(rows_of("a", 1, [10])), list(rows_of("b", 2, [6]))
    plain = tables(write(tmp_path / "a.jsonl", *runs))[1]
    runs = [[flags | row | {"settings": row["settings"] | flags} for row in run] for run in runs]
    assert tables(write(tmp_path / "a.jsonl", *runs))[1] == plain


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

    Starts with other workers are not averaged. A stage is a GPU: of 2 x 2, half would do. What
    communication holds up FSDP there is not known, so it is not told.
    """
    gpu, gpt = {"device": "H100"}, {"script": "multinode/gpt.py", "grad_accum_steps": 1}
    shards = {"script": "hybrid/gpt_fsdp.py", "shard_size": 2}
    stages = {"script": "hybrid/gpt_pipeline.py", "num_microbatches": 4}
    runs = [rows_of("one", 1, [8], **gpt), rows_of("ddp", 2, [4], **gpt)]
    runs += [rows_of("fsdp", 2, [5], **shards)]
    runs += [rows_of(f"{n} stages", n, [6], **stages, num_stages=n) for n in (2, 4)]
    _, group = tables(write(tmp_path / "a.jsonl", *runs))
    assert [row["split"] for row in group] == ["-", "-", "2 shards", "2 stages", "4 stages"]
    assert column(group, "speedup (x)") == "1.00 2.00 1.60 1.33 1.33"
    for name in "sending (s)", "waiting (s)", "R (x)", "late rank":
        known = [row[name] != "-" for row in group]
        assert known == [False, True, True, False, False], "not of one process, nor of stages"
    stages = {"script": "hybrid/images.py", "num_stages": 2, "stages": [5, 5]}
    runs = [rows_of("one", 1, [8], **gpu), rows_of("fsdp", 2, [4], **shards, **gpu)]
    runs += [rows_of("two", 2, [time], num_workers=n, **gpu) for n, time in ((0, 8), (4, 5))]
    runs += [rows_of("stages", 2, [4], **stages, **gpu)]
    text, group, *alone = tables(write(tmp_path / "b.jsonl", *runs))
    assert column(group, "speedup (x)") == "1.00 1.00 1.60 2.00"
    assert column(group, "efficiency (%)") == "100 50.0 80.0 50.0"
    assert group[3]["device-hours"] == "0.00444", "four devices"
    assert "It pays up to 2 GPUs: 4 are 1.25 times as fast as 2 (rule: 1.50 or more pays)." in text
    assert "num_workers 0 / 4" in text
    names = {name for [row] in alone for name in row}
    assert names and not {"comm (%)", "hidden (%)", "R (x)"} & names
    staged = [rows_of(n, n, [8 / n], **stages, **gpu) for n in (1, 2)]
    text, _ = tables(write(tmp_path / "c.jsonl", *staged))
    assert "It pays up to 4 GPUs. More were not tried." in text


def test_the_last_step_is_drawn(tmp_path, monkeypatch):
    """Rank 1 is 60 ms late: rank 0 waits for it in the all-reduce. Of a folder, each log counts."""
    logged = list(rows_of("a", 2, [1, 1])) + list(rows_of("b", 2, [1, 1]))
    for row in logged:
        late = 0.06 * row["rank"]
        moments = {"data": (0, 0.005), "forward 0": (0.005, 0.03)}
        moments |= {"backward": (0.03, 0.05 + late), "comm": (0.05 + late, 0.12)}
        step = [[name, start - 9, end - 9, 0] for name, (start, end) in moments.items()]
        step.append(["all-reduce", -8.965 + late, -8.88, 4000])
        row["last_step"] = step if (row["run"], row["step"]) == ("b", 20) else step[:3]
    (folder := tmp_path / "logs").mkdir()
    write(folder / "run.jsonl", logged, rows_of("z", 1, [1]))  # killed in the last validation
    write(folder / "none.jsonl", rows_of("a", 1, [1]))
    drawn = []
    monkeypatch.setattr(report, "save", lambda *words, **more: drawn.append(words))
    tables(folder, "--step", "--out", tmp_path)
    [(figure, sentence, path)] = [words for words in drawn if "step" in words[2].name]
    assert path == tmp_path / "run_step.png" and sentence == "Rank 1 comes last: rank 0 waits 60 ms"
    axes = figure.axes[0]
    bars = [(bar.get_x(), bar.get_width()) for bar in axes.patches]
    assert len(bars) == 8 + 2 + 2, "of the last row of the last run: phases, all-reduces, waiting"
    assert bars[:2] == [pytest.approx((0, 5)), pytest.approx((0, 5))], "ms of data"
    assert bars[-2:] == [pytest.approx((35, 60)), pytest.approx((95, 0))], "waiting"
    assert [text.get_text() for text in axes.get_yticklabels()][0] == "rank 0 on node0"


MNIST = "images.py --dataset mnist --data_dir {data} --model mlp --batch_size 24"
GPT = "--dataset {data}/words.txt --d_model 32 --n_heads 2 --num_layers 2 --seq_len 32"
GPT += " --batch_size 24"
RUNS = [  # device, processes, script with its arguments
    ("cpu", 3, f"multinode/{MNIST}"),
    ("emu", 2, f"hybrid/{MNIST}"),
    ("emu", 2, f"hybrid/gpt_pipeline.py {GPT}"),
    ("emu", 2, f"hybrid/gpt_fsdp.py {GPT}"),
]
COLLECTIVES = {"all-reduce", "all-gather", "reduce-scatter"}


@pytest.mark.parametrize(("device", "processes", "words"), RUNS)
def test_the_last_step_in_the_log(logged, request, data, device, processes, words):
    """Its phases follow each other, and add up to the columns of a row that is one step.

    On multinode, one of three processes is 0.6 s late, and has a clock that is 5 s ahead.
    """
    more = {"EMU_DEVICES": "4"} if device == "emu" else {}
    if more:
        request.getfixturevalue("emulator")
    is_late = words.startswith("multinode/")
    if is_late:
        more |= {"before": (ROOT / "tests/helpers/slow.py", "backward", 1, 0.6)}
    script, *words = words.format(data=data).split()
    log = logged(script, *words, "--max_steps", 6, "--eval_every", 1, processes=processes, **more)
    last = {row["rank"]: row for row in rows_in(log) if row["step"] == 6}
    assert len(last) == processes
    ready = {}  # when the last gradient of each process is ready
    for rank, row in last.items():
        phases = [event for event in row["last_step"] if event[0] not in COLLECTIVES]
        sent = [event for event in row["last_step"] if event[0] in COLLECTIVES]
        assert all(phase[2] == pytest.approx(after[1]) for phase, after in zip(phases, phases[1:]))
        sums = Counter()
        for name, start, end, _ in phases:
            sums[name] += end - start
            ready |= {rank: end} if name == "backward" else {}
        comm = sums.pop("comm", 0.0)
        assert {"data", "forward", "backward", "optimizer"} <= sums.keys()
        assert sums == pytest.approx({name: row[name] for name in sums}, abs=1e-6)
        assert comm <= row.get("comm", 0.0)  # the row also has the all-reduce of the look
        assert all(phases[0][1] <= start < end and size > 0 for _, start, end, size in sent)
        assert all(start < phases[-1][2] for _, start, _, _ in sent)
    names = {name for name, *_ in sent}
    expected = COLLECTIVES - {"all-reduce"} if "fsdp" in script else {"all-reduce"}
    assert names and names <= expected
    if is_late:  # float32, once each
        assert sum(size for *_, size in sent) == 4 * row["parameters"] and len(sent) > 1
        assert sent[0][1] < ready[rank] <= sent[-1][1], "the last one as backward() ends"
        assert all(0.3 < ready[1] - ready[rank] < 4 for rank in (0, 2))
