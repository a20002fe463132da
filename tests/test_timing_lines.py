"""timing.py in a DDP script: the lines that tools/README.md gives to paste, and what it prints."""

import json
import re
import shutil

import pytest
from conftest import ROOT, call, module, replaced

README = (ROOT / "tools/README.md").read_text()
PAUSES = {"data": 0.1, "forward": 0.2, "backward": 0.3, "optimizer": 0.4}  # seconds
PAUSES |= {"eval": 0.06, "other": 0.05}
# What a script has in place of the three "..." of the page.
START = """
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

device, pause = torch.device("cpu"), time.sleep
if torch.accelerator.is_available():
    device = torch.accelerator.current_accelerator()
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    pause = torch.emu.sleep  # a kernel: the device pauses, in simulated time; Python goes on
dist.init_process_group(dist.get_default_backend_for_device(device))


class Loader:
    def __iter__(self):
        for _ in range(10):
            pause(0.005)
            yield torch.randn(32, 64), torch.randint(10, (32,))


def validate(model):
    pause(0.03)


num_epochs, loader, loss_function = 2, Loader(), nn.functional.cross_entropy
model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 10)).to(device)
model.register_forward_pre_hook(lambda *_: pause(0.01))
model[1].register_full_backward_hook(lambda *_: pause(0.015))  # before that of the first layer
"""
OPTIMIZER = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.register_step_post_hook(lambda *_: pause(0.02))
"""
PAUSE = "    pause(0.05)\n"
OTHERS = {  # what differs in the train.py of others
    "the device is emulated": {},
    "rank 0 alone validates": {
        "if step % 100 == 0": "if step % 100 == dist.get_rank() * 50",
        "pause(0.03)": "pause(0.5)",
    },
}


def write_train(folder, text):
    """Writes train.py beside a copy of timing.py. Returns the path."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "tools/timing.py", folder)
    (folder / "train.py").write_text(text)
    return folder / "train.py"


def table_of(out):
    """Returns {phase: (seconds of each rank)} of the table of two processes, and the totals."""
    rows = re.findall(r"^(\w+) +[\d.]+ s .*% +([\d.]+) +([\d.]+)$", out, re.M)
    phases = {name: (float(a), float(b)) for name, a, b in rows}
    [total] = re.findall(r"^total +([\d.]+) s 100%$", out, re.M)
    return phases, float(total)


@pytest.mark.parametrize("name", OTHERS)
def test_lines_in_a_script_of_ones_own(run, request, tmp_path, name):
    """They tell each pause by its phase, and phases sum to the total; nothing is read too early.

    The first three steps of twenty are the warmup, with the validation in the first of them. Who
    is late is named.
    """
    [difference] = re.findall(r"^```diff\n(.*?)^```", README, re.M | re.S)
    assert len(re.findall(r"^\+", difference, re.M)) == 11
    lines = re.sub("^[+ ]", "", difference, flags=re.M)
    first, model, loop, end = lines.split("...\n")
    text = first + START + model + OPTIMIZER + loop + PAUSE + end
    train = write_train(tmp_path / "multinode", replaced(text, OTHERS[name]))
    env = {}
    if "emulated" in name:
        request.getfixturevalue("emulator")
        env = {"EMU_DEVICES": "4", "EMU_SIM": "kernel=100,launch=5,comm=1000"}
    out = run(train, processes=2, **env, cwd=tmp_path)
    phases, total = table_of(out)
    sums = [sum(seconds) for seconds in zip(*phases.values())]
    assert sum(sums) / 2 == pytest.approx(total, abs=0.01), "but for rounding"
    of_steps = sum(17 / 20 * PAUSES[phase] for phase in ("data", "forward", "backward"))
    pauses = {phase: 17 / 20 * PAUSES[phase] for phase in STEP}
    pauses |= {"eval": PAUSES["eval"] / 2, "other": 0.05}  # of the second epoch, and between both
    pauses["warmup"] = 3 / 20 * of_steps + PAUSES["eval"] / 2
    if "validates" in name:
        del pauses["eval"]
        validated, _ = phases.pop("eval", (0, 0))
        assert validated >= 0.5 and phases["comm"][1] > phases["comm"][0] + 0.3, "it waits"
        assert re.search(r"^comm: .* Rank 0 on \S+ is late: another one waits 0\.\d+ s", out, re.M)
    else:
        assert "No process is late." in out
    assert phases.keys() == pauses.keys() | {"comm"} and min(phases["comm"]) > 0, out
    for phase, pause in pauses.items():
        assert min(phases[phase]) >= 0.999 * pause, (phase, out)
    rows = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [row["rank"] for row in rows] == [0, 1] and {row["steps"] for row in rows} == {17}


STEP = ("data", "forward", "backward", "optimizer")

# A training of ten lines, and six of timing.
TRAIN = """
import torch
import torch.distributed as dist
from timing import mark, print_marks

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
mark("other")
for _ in range(15):
    inputs = torch.randn(64 // dist.get_world_size(), 512)
    mark("data")
    loss = model(inputs).square().mean()
    mark("forward")
    loss.backward()
    mark("comm")
    optimizer.step()
    optimizer.zero_grad()
    mark("optimizer")
print_marks(log="run.jsonl", model=model, batch_size=64, width=512)
"""


def test_an_own_training_is_timed_reported_and_predicted(run, attempt, tmp_path):
    """One process, then what its log says of four, then four: predicted, and measured beside it.

    report.py compares the two, draws a step, and makes a trace of it.
    """
    train = write_train(tmp_path / "multinode", TRAIN)
    report, predict = module("tools/report.py"), module("tools/predict.py")
    log, link = tmp_path / "run.jsonl", tmp_path / "link.json"
    figures = {"processes": 2, "nodes": 2, "latency_s": 1e-4, "bandwidth_bytes_per_s": 1e9}
    link.write_text(json.dumps(figures | {"compute_rate": 1, "device": "CPU"}))
    out = run(train, processes=1, cwd=tmp_path)
    assert re.search(r"^samples/s: [\d.]+$", out, re.M) and "rank" not in out
    told = call(predict, log, link, "--processes", 4).stdout
    assert told.startswith("# train.py, global batch 64, run ") and "measured (x)" not in told
    run(train, processes=4, cwd=tmp_path)
    told = call(predict, log, link, "--processes", 4).stdout
    [row] = re.findall(r"^\| +4 \|.*$", told, re.M)
    assert "measured (x)" in told and row.count(" - ") == 0
    folder = tmp_path / "out"
    done = call(report, log, "--out", folder, "--step", "--trace", tmp_path / "t.json")
    assert done.returncode == 0 and not done.stderr
    assert done.stdout.startswith("## strong scaling, train.py, global batch 64\n\nIt pays up to ")
    assert "width 512" in done.stdout and "parameters 262656" in " ".join(done.stdout.split())
    names = {path.name for path in folder.iterdir()}
    assert names == {"report.md", "epochs.csv", "scaling.png", "run_step.png"}
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}


def test_too_few_steps(run, tmp_path):
    train = write_train(tmp_path / "multinode", replaced(TRAIN, {"range(15)": "range(3)"}))
    out = run(train, processes=1, cwd=tmp_path)
    assert "too few steps to time: the first three are the warmup\n" in out
    assert re.findall(r"^(\w+) +[\d.]+ s", out, re.M) == ["warmup", "total"]


def test_a_log_without_a_model(run, tmp_path):
    """The table and the log are written. predict.py, which needs the gradients' size, says so."""
    train = write_train(tmp_path / "multinode", replaced(TRAIN, {" model=model,": ""}))
    out = run(train, processes=1, cwd=tmp_path)
    assert re.search(r"^samples/s: [\d.]+$", out, re.M)
    log = tmp_path / "run.jsonl"
    assert json.loads(log.read_text())["parameters"] == 0
    told = call(module("tools/predict.py"), log, "--link", "1Gbit")
    assert told.returncode == 1 and "give it to print_marks()" in told.stderr
