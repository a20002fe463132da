"""report.py on logs whose answers are known, and the last step that the scripts log."""

import csv
import io
import itertools
import json
import math
import re
import subprocess
import sys
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

import pytest
from conftest import ROOT, rows as rows_in

sys.path.append(str(ROOT))
import report  # noqa: E402


def rows_of(run, processes, seconds, batch_size=64, samples=640, steps=10, **changes):
    """The rows of a run: for each a validation of 1 s, and steps, of whose time 10% is exposed.

    `seconds` are those of an epoch of so many samples. A row is so many steps after its warmup.
    """
    for (number, time), rank in itertools.product(enumerate(seconds, start=1), range(processes)):
        settings = {"model": "cnn", "dataset": "mnist", "precision": "fp32", "seed": f"{run}"}
        row = {**settings, "batch_size": batch_size, "run": str(run), "step": steps * number}
        row |= {"script": f"{'multi' if processes > 1 else 'single'}gpu/images.py"}
        row |= {"settings": settings | {"batch_size": str(batch_size)}, "steps": steps}
        row |= {"processes": processes, "nodes": 1, "rank": rank, "device": "CPU", "last_step": []}
        row |= {"threads": max(1, 4 // processes), "parameters": 1_000_000, "compile": False}
        row |= {"host": f"node{rank}", "peak_MB": 1000 + rank}
        row |= {"steps_per_epoch": samples // batch_size, "train_loss": 2, "val_loss": 2 / number}
        row |= {
            "lr": 1e-3,
            "grad_norm": 0.5,
            "val_acc": 0.9,
            "warmup": 5 if number == 1 else 0,
            "eval": 1,
            "save": 0,
        }
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


def run_report(*arguments, script=report):
    """What a command prints, and its exit status, run in this process: imports take seconds."""
    out, err = io.StringIO(), io.StringIO()
    words = [f"{script.__name__}.py", *map(str, arguments)]
    status = 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", words)
        try:
            script.main()
        except SystemExit as ended:
            status = ended.code
            if isinstance(status, str):
                print(status, file=err)
                status = 1
    return SimpleNamespace(returncode=status, stdout=out.getvalue(), stderr=err.getvalue())


def tables(*arguments, script=report):
    """What is printed, and the rows {column: text} of each table; those of measured runs in one."""
    done, found = run_report(*arguments, script=script), []
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
    """Speedup, efficiency and hidden share by hand. The warmup counts apart."""
    runs = [rows_of(n, n, [time, time]) for n, time in ((1, 10), (2, 6), (4, 4))]
    runs.append(rows_of("d", 2, [5, 5], batch_size=128))  # of half as many steps an epoch
    out = tmp_path / "out"
    text, strong, weak = tables(write(tmp_path / "a.jsonl", *runs), "--out", out)
    assert [row["speedup"] for row in strong + weak] == ["1.00", "1.67", "2.50", "1.00", "2.00"]
    assert "steps_per_epoch 10 / 5. Times are those of an epoch." in " ".join(text.split())
    assert [weak[1][name] for name in ("seconds", "sending")] == ["5.00", "1.00"]
    assert [row["efficiency"] for row in strong] == ["1.00", "0.833", "0.625"]
    assert "Not to be trusted" not in text and "note:" not in text
    fast = write(tmp_path / "fast.jsonl", rows_of("a", 1, [10, 10]), rows_of("b", 2, [4, 4]))
    assert "more than N times as fast" in run_report(fast).stdout
    assert strong[1]["hidden %"] == "50.0" and strong[1]["R"] == "4.00" and strong[0]["R"] == "-"
    assert [row["comm %"] for row in strong] == ["0.00", "10.0", "10.0"]
    assert [row["seconds"] for row in strong] == ["10.0", "6.00", "4.00"], "without the validation"
    assert [row["device-hours"] for row in strong] == ["0.00278", "0.00333", "0.00444"]
    beside = [strong[2][name] for name in ("steps", "warmup", "eval", "save", "val_acc")]
    assert beside == ["20", "5.00", "1.00", "0.00", "0.900"]
    assert strong[0]["hidden %"] == strong[0]["waiting"] == "-"
    assert "threads 4 / 2 / 1" in " ".join(text.split())
    assert (out / "report.md").read_text().strip() == text.strip()
    found = csv.DictReader((out / "measured.csv").read_text().splitlines())
    assert [row["speedup"][:6] for row in found] == ["1.0", "1.6666", "2.5", "1.0", "2.0"]
    assert len([path for path in out.glob("*.png") if path.read_bytes()[1:4] == b"PNG"]) == 2


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
    assert "run none has only 0 step(s) after its warmup" in text
    assert "run short has only 3 step(s)" in text and text.count("note: ") == 2
    alone = write(tmp_path / "b.jsonl", rows_of("none", 1, [0], steps=0))
    done = run_report(alone)
    assert done.returncode and "no runs to report" in done.stderr


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
    measured = csv.DictReader((tmp_path / "measured.csv").read_text().splitlines())
    assert len({row["group"] for row in measured}) == 2, "a name for each group"


def test_a_flag_of_a_task_is_no_column(tmp_path):
    """Whatever its name and value: the tables stay as they are, and runs that differ stay apart."""
    flags = {"stages": 7, "num_stages": "x", "shard_size": 2, "schedule": [3], "trained": 9}
    flags |= {"num_microbatches": 4, "comm": "x", "comm_total": 5.0, "bubble": 3, "lr": "x"}
    flags |= {"data": "a/x", "device": "x", "val_acc": 0.5, "val_part": 0.2, "val_names": ["a"]}

    def log_of(*runs):
        """The log of runs with flags. A script writes its columns over them."""
        runs = [
            [flags | row | {"settings": row["settings"] | flags} for row in rows]
            for rows, flags in runs
        ]
        return write(tmp_path / "a.jsonl", *runs)

    one, two = list(rows_of("a", 1, [10])), list(rows_of("b", 2, [6]))
    assert tables(log_of((one, flags), (two, flags)))[1] == tables(log_of((one, {}), (two, {})))[1]
    for name in "schedule", "device", "data":
        told = run_report(log_of((one, flags), (two, flags | {name: "b/x"}))).stdout
        assert "## not compared" in told and "## strong" not in told, name


def test_what_is_one_run(tmp_path):
    """Two starts with one snapshot and one hook. A copy of a snapshot keeps the id of its run."""
    parts = [("a.pt", 8, "none"), ("a.pt", 4, "none"), ("b.pt", 2, "none"), ("a.pt", 1, "bf16")]
    runs = [rows_of("b", 2, [time], snapshot=path, comm_hook=hook) for path, time, hook in parts]
    log = write(tmp_path / "a.jsonl", rows_of("a", 1, [6], snapshot=None), *runs)
    text, *found = tables(log)
    assert re.findall(r"^## strong .* 64(.*)", text, re.M) == [", comm_hook bf16", ""], text
    speedups = [[row["speedup"] for row in group] for group in found]
    assert speedups == [["1.00", "6.00"], ["1.00", "1.00", "3.00"]]


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
    for name in "sending", "waiting", "R", "late rank", "late host":
        known = [row[name] != "-" for row in group]
        assert known == [False, True, True, False, False], "not of one process, nor of stages"
    assert [row["hidden %"] for row in group] == ["-", *["50.0"] * 4]
    assert alone[0]["device-hours"] == "0.00333", "two devices"


def test_damaged_rows_are_left_out(tmp_path):
    """What is left out is said, and the rest reported."""
    whole = write(tmp_path / "whole.jsonl", rows_of("a", 1, [8, 8]), rows_of("b", 2, [4]))
    text = whole.read_text()
    torn = text.splitlines()[0][:400]  # within the settings; the next append goes on in its line
    assert '"settings": {"' in torn
    older = json.dumps({"epoch": 0, "run": "older"})
    whole.write_text(f"{torn}{text}{older}\n{text.splitlines()[-1][:-1]}")
    changes = {"eval": math.inf}, {"data": "a"}, {"rank": "b"}, {"settings": 1}
    wrong = [rows_of("d", 1, [9], **change) for change in changes]
    huge = rows_of("c", 4, [2], train_loss=10**400)  # no float: it counts as infinite
    write(tmp_path / "wrong.jsonl", huge, *wrong)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "binary.jsonl").write_bytes(bytes(range(256)) * 20)
    text, group = tables(tmp_path)
    assert [row["speedup"] for row in group] == ["1.00", "2.00", "4.00"]
    for note in "whole.jsonl: 3", "wrong.jsonl: 4", "empty.jsonl: 0", "binary.jsonl: ":
        assert note in text, text
    missing = run_report(tmp_path / "missing.jsonl")
    assert missing.returncode == 1 and missing.stderr.startswith("cannot read ")


def test_the_last_step_is_drawn_and_written(tmp_path):
    """Rank 1 is 60 ms late: rank 0 waits for it in the all-reduce. Of a folder, each log counts."""
    log = tmp_path / "run.jsonl"
    logged = list(rows_of("a", 2, [1, 1])) + list(rows_of("b", 2, [1, 1]))
    for row in logged:
        late = 0.06 * row["rank"]
        moments = {"data": (0, 0.005), "forward 0": (0.005, 0.03)}
        moments |= {"backward": (0.03 + late, 0.1), "comm": (0.1, 0.12)}
        step = [[name, start - 9, end - 9, 0] for name, (start, end) in moments.items()]
        row["last_step"] = [*step, ["optimizer", -8.88, -8.875, 0]]
        row["last_step"] += [["all-reduce", -8.965 + late, -8.88, 4000]]
    write(log, logged)
    phases, sent = report.events_of(report.read_logs([log])[0])
    assert set(phases["process"]) == {"rank 0 on node0", "rank 1 on node1"}
    assert len(phases) == 10 and len(sent) == 2, "of the last row of the last run"
    figure = report.draw_step(phases, sent, tmp_path / "step.png")
    assert figure.get_suptitle() == "Rank 0 waits 60 ms in all-reduces for rank 1, 20 ms exposed"
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    phases = ["data", "forward", "backward", "comm (exposed)", "optimizer"]
    assert words == [*phases, "all-reduce", "waiting in it"]
    done = run_report(log, "--step", "--out", tmp_path / "out")
    assert done.returncode == 0 and not done.stderr, done.stderr
    trace = json.loads((tmp_path / "out/run_step.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in trace if event["ph"] == "M"}
    assert names == {"rank 0 on node0", "rank 1 on node1"}
    late = [event for event in trace if event["pid"] == 1 and event.get("tid") == 1]
    assert [event["ts"] for event in late] == [pytest.approx(95_000)], "microseconds"
    assert "needs --out" in run_report(log, "--step").stderr
    (folder := tmp_path / "logs").mkdir()
    killed = [*logged, *rows_of("z", 1, [1])]  # in the validation after its last step
    write(folder / "run.jsonl", killed)
    write(folder / "none.jsonl", rows_of("a", 1, [1]))
    write(folder / "torn.jsonl", rows_of("a", 1, [1], last_step=[1]))
    done = run_report(folder, log, "--step", "--out", tmp_path / "x")
    assert done.stderr.count("cannot read the last step in ") == 2, done.stderr
    assert "none.jsonl: its rows hold no step" in done.stderr
    drawn = {path.name for path in (tmp_path / "x").glob("*_step.png")}
    assert drawn == {"logs_run_step.png", f"{tmp_path.name}_run_step.png"}


MNIST = "images.py --dataset mnist --data_dir {data} --model mlp --batch_size 24"
GPT = "--dataset {data}/words.txt --d_model 32 --n_heads 2 --num_layers 2 --seq_len 32"
GPT += " --batch_size 24"
RUNS = [  # device, processes, script with its arguments
    ("cpu", 1, f"singlegpu/{MNIST}"),
    ("cpu", 3, f"multigpu/{MNIST}"),
    ("emu", 3, f"multigpu/{MNIST}"),
    ("emu", 2, f"hybrid/{MNIST}"),
    ("emu", 2, f"hybrid/gpt_pipeline.py {GPT}"),
    ("emu", 2, f"hybrid/gpt_fsdp.py {GPT}"),
]
COLLECTIVES = {"all-reduce", "all-gather", "reduce-scatter"}


@pytest.mark.parametrize(("device", "processes", "words"), RUNS)
def test_the_last_step_in_the_log(run, request, data, tmp_path, device, processes, words):
    """Its phases follow each other, and add up to the columns of a row that is one step."""
    env = {"EMU_DEVICES": "4"} if device == "emu" else {}
    if env:
        request.getfixturevalue("emulator")
    log = tmp_path / "log.jsonl"
    script, *words = words.format(data=data).split()
    words += ["--max_steps", 6, "--eval_every", 1, "--log", log]
    run(script, *words, processes=processes, **env)
    last = {row["rank"]: row for row in rows_in(log) if row["step"] == 6}
    assert len(last) == processes
    for row in last.values():
        phases = [event for event in row["last_step"] if event[0] not in COLLECTIVES]
        sent = [event for event in row["last_step"] if event[0] in COLLECTIVES]
        assert all(phase[2] == pytest.approx(after[1]) for phase, after in zip(phases, phases[1:]))
        sums = Counter()
        for name, start, end, _ in phases:
            sums[name] += end - start
        comm = sums.pop("comm", 0.0)
        assert {"data", "forward", "backward", "optimizer"} <= sums.keys()
        assert sums == pytest.approx({name: row[name] for name in sums}, abs=1e-6)
        assert comm <= row.get("comm", 0.0)  # the row also has the all-reduce of the look
        assert bool(sent) == (processes > 1)
        assert all(phases[0][1] <= start < end and size > 0 for _, start, end, size in sent)
        assert all(start < phases[-1][2] for _, start, _, _ in sent)
    names = {name for name, *_ in sent}
    assert names <= (COLLECTIVES - {"all-reduce"} if "fsdp" in script else {"all-reduce"})
    if script == "multigpu/images.py":  # float32, once each; the last one as backward() ends
        assert sum(size for *_, size in sent) == 4 * row["parameters"]
        [end] = [end for name, _, end, _ in phases if name == "backward"]
        assert sent[0][1] < end <= sent[-1][1]


def test_a_late_process_is_late_by_another_hosts_clock(run, data, tmp_path):
    """Three processes, one of them 0.3 s late, and with a clock that is 5 s ahead."""
    if subprocess.run(["unshare", "--time", "true"], capture_output=True).returncode:
        pytest.skip("only root can set a clock ahead, in a time namespace")
    script, *words = f"multinode/{MNIST} --max_steps 8".format(data=data).split()
    late = {"before": (ROOT / "tests/helpers/slow.py", "backward", 1, 0.3), "AHEAD": "1"}
    run(script, *words, "--log", log := tmp_path / "log.jsonl", processes=3, **late)
    ready = [  # when the last gradient of each process is ready
        end for row in rows_in(log) for name, _, end, _ in row["last_step"] if name == "backward"
    ]
    assert all(0.15 < ready[1] - ready[rank] < 1 for rank in (0, 2))
