"""What README gives to paste elsewhere: timing lines for a DDP script, and the rows of a log."""

import re
import shutil

import pytest
from conftest import ROOT, rows
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_project import run_block

README = (ROOT / "README.md").read_text()
PAUSES = {"data": 0.1, "forward": 0.2, "backward": 0.3, "optimizer": 0.4, "other": 0.05}  # seconds
TRAIN = """
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


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 256), nn.Linear(256, 10)

    def forward(self, inputs):
        hidden = self.first(inputs)
        hidden.register_hook(lambda _: pause(0.015))
        pause(0.01)
        return self.last(hidden)


class Loader:
    def __iter__(self):
        for _ in range(10):
            pause(0.005)
            yield torch.randn(32, 64), torch.randint(10, (32,))


num_epochs, loader, loss_function = 2, Loader(), nn.functional.cross_entropy
model = Model().to(device)
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.register_step_post_hook(lambda *_: pause(0.02))
for epoch in range(num_epochs):
    for inputs, targets in loader:
        inputs, targets = inputs.to(device), targets.to(device)
        loss = loss_function(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    pause(0.05)
dist.destroy_process_group()
"""


def paste(difference, script):
    """Returns the script with the lines that have a +, and their number.

    A line stands after the line that it follows or, where "..." is above it, before the next one.
    """
    lines, at, waiting, count = script.splitlines(), 0, None, 0
    for sign, text in re.findall(r"^([+ ])(.*)$", difference, re.M):
        count += sign == "+"
        if text == "...":
            waiting = []
        elif sign == "+" and waiting is not None:
            waiting.append(text)
        elif sign == "+":
            lines.insert(at, text)
            at += 1
        else:
            at = lines.index(text, at)
            lines[at:at] = waiting or []
            at, waiting = at + len(waiting or []) + 1, None
    return "\n".join(lines), count


@pytest.mark.parametrize("place", ["cpu", "emulator"])
def test_lines_in_a_script_of_ones_own(start, attempt, request, tmp_path, place):
    """They tell each pause by its phase, and phases sum to the total; nothing is read too early."""
    [difference] = re.findall(r"^```diff\n(.*?)^```", README, re.M | re.S)
    script, count = paste(difference, TRAIN)
    assert count == 8
    (train := tmp_path / "multinode/train.py").parent.mkdir()  # so that torchrun starts it
    train.write_text(script)
    [source, copy] = re.search(r"^cp (\S+) \S*/(\S+)", README, re.M).groups()
    shutil.copy(ROOT / source, train.with_name(copy))
    if place == "cpu":
        lines = (ROOT / source).read_text().splitlines(keepends=True)
        kept = [line for line in lines if "torchvision" not in line]
        assert len(kept) == len(lines) - 1
        train.with_name(copy).write_text("".join(kept))  # as README says where it is missing
        status, out, err = start(train, processes=2).wait()
    else:
        request.getfixturevalue("emulator")
        env = {"EMU_DEVICES": "4", "EMU_SIM": "kernel=100,launch=5,comm=1000"}
        status, out, err = attempt(train, processes=2, **env)
    assert status == 0, err
    phases = {}
    for name, *seconds in re.findall(r"^(\w+) .* s .*% +([\d.]+) +([\d.]+)$", out, re.M):
        phases[name] = [float(value) for value in seconds]
    totals = phases.pop("total")
    assert phases.keys() == PAUSES.keys() | {"comm"} and min(phases["comm"]) > 0, out
    for rank, total in enumerate(totals):
        assert abs(sum(each[rank] for each in phases.values()) - total) < 0.01, "but for rounding"
    for name, pause in PAUSES.items():
        assert min(phases[name]) >= 0.999 * pause, (name, out)


def test_rows_of_a_log_in_tensorboard(run, data, tmp_path):
    """README's lines write what rank 0 has measured, at its step."""
    log = tmp_path / "run.jsonl"
    words = ("--model", "mlp", "--dataset", "mnist", "--data_dir", data, "--batch_size", 24)
    words = (*words, "--max_steps", 8, "--eval_every", 4, "--log", log)
    run("multigpu/images.py", *words, processes=2)
    run_block(run, "SummaryWriter", tmp_path)
    events = EventAccumulator(str(tmp_path / "runs/my_run")).Reload()
    first = [row for row in rows(log) if row["rank"] == 0]
    assert [row["step"] for row in first] == [4, 8]
    for name in ("train_loss", "val_acc", "lr", "comm", "samples/s"):
        written = {event.step: event.value for event in events.Scalars(name)}
        assert written == pytest.approx({row["step"]: row[name] for row in first})
