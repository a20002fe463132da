"""What README gives to paste into a DDP script: the lines that take its times."""

import re

import pytest
from conftest import ROOT, replaced

README = (ROOT / "README.md").read_text()
PAUSES = {"data": 0.1, "forward": 0.2, "backward": 0.3, "optimizer": 0.4}  # seconds
PAUSES |= {"eval": 0.06, "other": 0.05}
# What a script has in place of the three "..." of README.
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
    "the first epoch warms up": {PAUSE: "    if epoch == 0:\n        marks.clear()\n"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_lines_in_a_script_of_ones_own(run, request, tmp_path, name):
    """They tell each pause by its phase, and phases sum to the total; nothing is read too early.

    Who comes last is named. timing.py works without torchvision, as README says.
    """
    [difference] = re.findall(r"^```diff\n(.*?)^```", README, re.M | re.S)
    assert len(re.findall(r"^\+", difference, re.M)) == 11
    lines = re.sub("^[+ ]", "", difference, flags=re.M)
    first, model, loop, end = lines.split("...\n")
    (train := tmp_path / "multinode/train.py").parent.mkdir()
    text = first + START + model + OPTIMIZER + loop + PAUSE + end
    train.write_text(replaced(text, OTHERS[name]))
    source, copy = re.search(r"`cp (\S+) \S*/(\S+)`", README).groups()
    timing = {"from torchvision.datasets import MNIST\n": ""}
    train.with_name(copy).write_text(replaced((ROOT / source).read_text(), timing))
    env = {}
    if "emulated" in name:
        request.getfixturevalue("emulator")
        env = {"EMU_DEVICES": "4", "EMU_SIM": "kernel=100,launch=5,comm=1000"}
    out = run(train, processes=2, **env)
    table = re.findall(r"^(\w+) .* s .*% +([\d.]+) +([\d.]+)$", out, re.M)
    phases = {name: (float(a), float(b)) for name, a, b in table}  # seconds of ranks 0 and 1
    total = phases.pop("total")
    sums = [sum(seconds) for seconds in zip(*phases.values())]
    assert sums == pytest.approx(total, abs=0.01), "but for rounding"
    pauses = dict(PAUSES)
    if "warms up" in name:  # the second epoch is left, and nothing between the two
        pauses = {phase: pause / 2 for phase, pause in PAUSES.items() if phase != "other"}
    if "validates" in name:
        del pauses["eval"]
        validated, other = phases.pop("eval")
        assert validated >= 1 and other == 0, out
        assert phases["comm"][1] > phases["comm"][0] + 0.3, "it waits"
        assert "Rank 0 came last." in out
    assert phases.keys() == pauses.keys() | {"comm"} and min(phases["comm"]) > 0, out
    for phase, pause in pauses.items():
        assert min(phases[phase]) >= 0.999 * pause, (phase, out)
