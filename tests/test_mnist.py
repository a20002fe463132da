"""The six mnist scripts: one loss curve, times that add up, and what else their texts promise."""

import functools
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT

TENSOR = "hybrid, tensor"  # hybrid/mnist_tensor.py, as its row calls it
# Processes, by what the first cell of the row says: the folder.
TRAINING = {"singlegpu": 1, "multigpu": 3, "multinode": (2, 1), "hybrid": 4, TENSOR: 4}
SHORT = ("--batch_size", 48, "--epochs", 3)  # 25 steps an epoch


def script_of(folder):
    return "hybrid/mnist_tensor.py" if folder == TENSOR else f"{folder}/mnist.py"


def numbers(name, out):
    """What is printed after this name, in each epoch."""
    return [float(value) for value in re.findall(rf"{name} ([\d.]+)", out)]


def times(out):
    """The table of times: {phase: (the mean, then of each rank)} in seconds."""
    table = re.findall(r"^(\w+) +([\d.]+) s +\d+%(.*)$", out, re.M)
    return {phase: [float(mean), *map(float, each.split())] for phase, mean, each in table}


@pytest.fixture(scope="module")
def trained(run, data, tmp_path_factory):
    """trained(folder): where its processes have trained, and what was printed."""

    @functools.cache
    def trained(folder, **env):
        words = (script_of(folder), *SHORT, "--data_dir", data)
        place = tmp_path_factory.mktemp(folder)
        processes = int(np.prod(TRAINING[folder])) if env else TRAINING[folder]  # on one node
        return place, run(*words, processes=processes, cwd=place, **env)

    return trained


@pytest.mark.parametrize("env", ({}, {"EMU_DEVICES": "4"}))
@pytest.mark.parametrize("folder", TRAINING)
def test_trains_as_one_process_and_times_add_up(trained, request, folder, env):
    """Loss, accuracy and the saved weights are those of one process, to rounding.

    Phases add up to the total, in the mean and in each process; the row has the same values.
    """
    if env:
        request.getfixturevalue("emulator")
    (place, out), (where, expected) = trained(folder, **env), trained("singlegpu")
    losses, accuracies = numbers("train_loss", out), numbers("val_acc", out)
    assert losses == pytest.approx(numbers("train_loss", expected), abs=2e-4)
    assert losses[2] < losses[0] / 2, "it learns"
    assert accuracies == pytest.approx(numbers("val_acc", expected), abs=0.006)
    weights, others = [torch.load(path / "mnist.pt", "cpu") for path in (place, where)]
    torch.testing.assert_close(weights, others, rtol=0, atol=1e-4)
    processes, table = np.prod(TRAINING[folder]), times(out)
    phases = {"data", "forward", "backward", "optimizer", "eval", "total"}
    phases |= {"singlegpu": set(), "hybrid": {"comm", "bubble"}}.get(folder, {"comm"})
    assert set(table) == phases
    for column in zip(*table.values()):
        assert sum(column[:-1]) == pytest.approx(column[-1], abs=0.01) and min(column[:-1]) >= 0
    assert len(table["total"]) == (1 if folder == "singlegpu" else 1 + processes)
    head = f"| script | processes | batch_size | val_acc | {' | '.join(table)} |"
    cells = [f"{mean:.3f}" for mean, *_ in table.values()]
    row = [folder, str(processes), "48", f"{accuracies[-1]:.4f}", *cells]
    assert out.splitlines()[-2:] == [head, f"| {' | '.join(row)} |"]


@pytest.mark.parametrize("folder", ("multigpu", "hybrid", TENSOR))
def test_without_its_timing(run, data, trained, tmp_path, folder):
    """Without the last section, and each line with mark, the rest trains alike; it tells no times.

    It names nothing that is not there.
    """
    script = script_of(folder)
    (copy := tmp_path / script).parent.mkdir()
    lines = (ROOT / script).read_text().splitlines(keepends=True)
    *_, start = [number for number, line in enumerate(lines) if line.startswith("# ==")]
    end = lines.index('if __name__ == "__main__":\n')
    copy.write_text("".join(line for line in lines[:start] + lines[end:] if "mark" not in line))
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", copy]
    assert subprocess.run(ruff).returncode == 0
    words = (*SHORT, "--data_dir", data)
    out = run(copy, *words, processes=TRAINING[folder], cwd=tmp_path)
    assert numbers("train_loss", out) == numbers("train_loss", trained(folder)[1])
    assert not times(out)


def assert_quantized(out, printed):
    """int8 is smaller, and as good. fp32 has the accuracy that the training has printed."""
    found = re.findall(r"^\| quantize \| (\w+) \| (.*) \|$", out, re.M)
    rows = {precision: list(map(float, cells.split(" | "))) for precision, cells in found}
    (fp32_size, fp32_acc, *speeds), (int8_size, int8_acc, *_) = rows["fp32"], rows["int8"]
    assert int8_size < fp32_size / 3 and abs(int8_acc - fp32_acc) < 0.02 and min(speeds) > 0
    assert fp32_acc == pytest.approx(numbers("val_acc", printed)[-1], abs=1e-4)


def test_int8_where_pytorch_has_none(run, data, tmp_path, trained):
    """A PyTorch without torch.ao.quantization: torchao's int8 is as small, and as good."""
    hide = "import sys\nsys.modules['torch.ao.quantization'] = None\n"
    (copy := tmp_path / "quantize/mnist.py").parent.mkdir()
    text = (ROOT / "quantize/mnist.py").read_text().replace("range(20)", "range(1)")
    copy.write_text(text.replace("import argparse\n", f"import argparse\n{hide}"))
    place, _ = trained("singlegpu")
    out = run(copy, "--data_dir", data, "--model", place / "mnist.pt", cwd=tmp_path)
    found = re.findall(r"^\| quantize \| (\w+) \| ([\d.]+) \| ([\d.]+) \|", out, re.M)
    (_, fp32_size, fp32_acc), (_, int8_size, int8_acc) = found
    assert float(int8_size) < float(fp32_size) / 3
    assert float(int8_acc) == pytest.approx(float(fp32_acc), abs=0.02)


def test_int8(run, changed, data, tmp_path, trained):
    """Quantized, the images and the network are those of the training. Speeds are measured once."""
    place, printed = trained("singlegpu")
    script = changed("quantize/mnist.py", {"range(20)": "range(1)"})
    out = run(script, "--data_dir", data, "--model", place / "mnist.pt", cwd=tmp_path)
    assert_quantized(out, printed)
