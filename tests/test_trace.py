"""The last step of all processes in a log, by one clock."""

import subprocess

import pytest
from conftest import ROOT, rows

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
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter")
LATE = 0.3  # seconds by which one process comes late


@pytest.mark.parametrize(("device", "processes", "words"), RUNS)
def test_trace_is_the_last_step(run, request, data, tmp_path, device, processes, words):
    """Its phases follow each other, and add up to the columns of a row that is one step."""
    env = {"EMU_DEVICES": "4"} if device == "emu" else {}
    if env:
        request.getfixturevalue("emulator")
    log = tmp_path / "log.jsonl"
    script, *words = words.format(data=data).split()
    words += ["--max_steps", 6, "--eval_every", 1, "--log", log]
    run(script, *words, processes=processes, **env)
    last = {row["rank"]: row for row in rows(log) if row["step"] == 6}
    assert len(last) == processes
    for row in last.values():
        phases = [event for event in row["last_step"] if event[0] not in COLLECTIVES]
        sent = [event for event in row["last_step"] if event[0] in COLLECTIVES]
        assert all(phase[2] == pytest.approx(after[1]) for phase, after in zip(phases, phases[1:]))
        sums = dict.fromkeys((name for name, *_ in phases), 0.0)
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
    assert names <= ({"all-gather", "reduce-scatter"} if "fsdp" in script else {"all-reduce"})
    if script == "multigpu/images.py":  # float32, once each
        assert sum(size for *_, size in sent) == 4 * row["parameters"]


def test_late_process_is_late_by_another_hosts_clock(run, data, tmp_path):
    """Three processes, one of them late and with a clock that is 5 s ahead."""
    if subprocess.run(["unshare", "--time", "true"], capture_output=True).returncode:
        pytest.skip("only root can set a clock ahead, in a time namespace")
    script, *words = f"multinode/{MNIST} --max_steps 8".format(data=data).split()
    more = {"processes": 3, "before": (ROOT / "tests/helpers/slow.py", "backward", 1, LATE)}
    log = tmp_path / "log.jsonl"
    run(script, *words, "--log", log, AHEAD="1", **more)
    ready = [  # when the last gradient of each process is ready
        next(end for name, _, end, _ in row["last_step"] if name == "backward") for row in rows(log)
    ]
    for rank in (0, 2):
        assert LATE / 2 < ready[1] - ready[rank] < 1
