"""The five mnist.py: one loss curve, times that add up, and what else their texts promise."""

import functools
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT

TRAINING = {"singlegpu": 1, "multigpu": 3, "multinode": (2, 1), "hybrid": 4}  # processes
SHORT = ("--batch_size", 48, "--epochs", 3)  # 25 steps an epoch


def losses(out):
    return [float(loss) for loss in re.findall(r"train_loss ([\d.]+)", out)]


def accuracies(out):
    return [float(accuracy) for accuracy in re.findall(r"val_acc ([\d.]+)", out)]


def times(out):
    """The table of times: {phase: (the mean, then of each rank)} in seconds."""
    table = re.findall(r"^(\w+) +([\d.]+) s +\d+%(.*)$", out, re.M)
    return {phase: [float(mean), *map(float, each.split())] for phase, mean, each in table}


@pytest.fixture(scope="module")
def trained(run, data, tmp_path_factory):
    """trained(folder): where its processes have trained, and what was printed."""

    @functools.cache
    def trained(folder):
        words = (f"{folder}/mnist.py", *SHORT, "--data_dir", data)
        place = tmp_path_factory.mktemp(folder)
        return place, run(*words, processes=TRAINING[folder], cwd=place)

    return trained


@pytest.mark.parametrize("folder", [*TRAINING][1:])
def test_trains_as_one_process(trained, folder):
    """Loss, accuracy and the saved weights are those of one process, to rounding."""
    (place, out), (where, expected) = trained(folder), trained("singlegpu")
    assert losses(out) == pytest.approx(losses(expected), abs=2e-4) and len(losses(out)) == 3
    assert losses(out)[2] < losses(out)[0] / 2, "it learns"
    assert accuracies(out) == pytest.approx(accuracies(expected), abs=0.006)
    weights = [torch.load(path / "mnist.pt", weights_only=True) for path in (place, where)]
    assert weights[0].keys() == weights[1].keys()
    for name in weights[0]:
        assert (weights[0][name] - weights[1][name]).abs().max() < 1e-4, name


def test_each_epoch_has_another_order(run, data, changed, tmp_path):
    """No batch of any process, epoch or step has the labels of another one."""
    spy = 'mark("data")\n            print(*labels.tolist(), file=open(f"labels{rank}", "a"))'
    copy = changed("multigpu/mnist.py", {'mark("data")': spy})
    words = ("--batch_size", 600, "--epochs", 2, "--data_dir", data)
    run(copy, *words, processes=2, cwd=tmp_path)
    batches = [(tmp_path / f"labels{rank}").read_text().splitlines() for rank in (0, 1)]
    assert list(map(len, batches)) == [4, 4] and len({*batches[0], *batches[1]}) == 8


@pytest.mark.parametrize("folder", TRAINING)
def test_times_add_up(trained, folder):
    """Phases add up to the total, in the mean and in each process; the row has the same values."""
    _, out = trained(folder)
    processes, table = np.prod(TRAINING[folder]), times(out)
    phases = {"data", "forward", "backward", "optimizer", "eval"}
    phases |= {"singlegpu": set(), "hybrid": {"comm", "bubble"}}.get(folder, {"comm"})
    assert set(table) == phases | {"total"}
    for column in zip(*table.values()):
        assert sum(column[:-1]) == pytest.approx(column[-1], abs=0.01) and min(column[:-1]) >= 0
    assert len(table["total"]) == (1 if folder == "singlegpu" else 1 + processes)
    row = re.search(rf"^\| {folder} \| {processes} \| 48 \| ([\d.]+) \| (.*) \|$", out, re.M)
    head = f"| script | processes | batch_size | val_acc | {' | '.join(table)} |"
    assert out.splitlines()[-2:] == [head, row[0]]
    assert list(map(float, row[2].split(" | "))) == [mean for mean, *_ in table.values()]
    assert float(row[1]) == accuracies(out)[-1]
    assert all(len(line) <= 100 for line in out.splitlines() if not line.startswith("|"))


def test_a_late_process_is_named(run, data, changed, tmp_path):
    """Rank 1 of 3 sleeps in each forward pass: the others wait for it in comm.

    All sleep before the last gradient, that of the first layer: this is backward, not comm.
    """
    sleep = 'time.sleep(0.04 * (rank == 1))\n            mark("forward")'
    ddp = "    model = nn.parallel.DistributedDataParallel(model)"
    slow = "    layers[0].weight.register_hook(lambda _: time.sleep(0.01))\n"
    copy = changed("multigpu/mnist.py", {'mark("forward")': sleep, ddp: slow + ddp})
    out = run(copy, *SHORT, "--data_dir", data, processes=3, cwd=tmp_path)
    comm, forward, backward = (times(out)[name][1:] for name in ("comm", "forward", "backward"))
    slept = 25 * 0.04
    assert forward[1] > slept and min(comm[0], comm[2]) > comm[1] + 0.3 * slept
    assert "Rank 1 came last." in out and min(backward) > 25 * 0.01


@pytest.mark.parametrize("folder", TRAINING)
def test_the_timing_can_be_cut_off(run, data, tmp_path, trained, folder):
    """As its first line says. What is left trains alike, and names nothing that is not there."""
    lines = (ROOT / folder / "mnist.py").read_text().splitlines(keepends=True)
    start = next(number for number, line in enumerate(lines) if line.startswith("# =="))
    end = lines.index('if __name__ == "__main__":\n')
    (tmp_path / folder).mkdir()
    (copy := tmp_path / folder / "mnist.py").write_text(
        "".join(line for line in lines[:start] + lines[end:] if "mark" not in line)
    )
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", copy]
    assert subprocess.run(ruff).returncode == 0
    words = (*SHORT, "--data_dir", data)
    out = run(copy, *words, processes=TRAINING[folder], cwd=tmp_path)
    assert losses(out) == pytest.approx(losses(trained("singlegpu")[1]), abs=2e-4) and not times(
        out
    )


def test_a_table_of_many_processes_fits(run, data, tmp_path):
    """Of ten processes, the first eight and the late one are shown."""
    words = ("--batch_size", 600, "--epochs", 1, "--data_dir", data)
    out = run("multigpu/mnist.py", *words, processes=10, cwd=tmp_path)
    late = re.search(r"Rank (\d) came last", out)[1]
    assert {*map(str, range(8)), late} == {*re.findall(r"rank +(\d)", out)}
    assert all(len(line) <= 100 for line in out.splitlines() if not line.startswith("|"))


def test_int8_is_small_and_as_good(run, data, tmp_path, trained):
    place, printed = trained("singlegpu")
    words = ("--data_dir", data, "--model", place / "mnist.pt")
    out = run("quantize/mnist.py", *words, cwd=tmp_path)
    found = re.findall(r"^\| quantize \| (\w+) \| (.*) \|$", out, re.M)
    rows = {precision: list(map(float, cells.split(" | "))) for precision, cells in found}
    (fp32_size, fp32_acc, *speeds), (int8_size, int8_acc, *_) = rows["fp32"], rows["int8"]
    assert int8_size < fp32_size / 3 and abs(int8_acc - fp32_acc) < 0.02 and min(speeds) > 0
    assert fp32_acc == pytest.approx(accuracies(printed)[-1], abs=1e-4)


def test_synthetic_needs_no_data(tmp_path):
    """`make demo`: one process, two, the speedup, and int8. The images can be learned, not at once.

    The environment is there already (-o). Quantized, the images are those of the training.
    """
    (folder := tmp_path / "my folder").mkdir()
    for name in ("Makefile", "requirements.txt", "singlegpu", "multigpu", "quantize"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    words = ["make", "-o", ".venv/installed", "demo"]
    words.append("DEMO=--synthetic --epochs 1 --batch_size 600")  # half as many images
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    totals = re.findall(r"^total +([\d.]+)", done.stdout, re.M)
    told = float(re.search(r"Two processes are ([\d.]+) times as fast as one", done.stdout)[1])
    assert told == pytest.approx(float(totals[0]) / float(totals[1]), abs=0.01)
    assert 0.5 < losses(done.stdout)[0] and 0.9 < accuracies(done.stdout)[-1] < 0.999
    rows = re.findall(r"(fp32|int8) \| [\d.]+ \| ([\d.]+)", done.stdout)
    assert [name for name, _ in rows] == ["fp32", "int8"]
    assert float(rows[0][1]) == pytest.approx(accuracies(done.stdout)[-1], abs=1e-4)


SIZES = "needs --epochs >= 1, and --batch_size"  # of 1,200 images
REFUSED = [
    ("singlegpu", 1, ("--batch_size", 1201), f"{SIZES} from 1 to 1200"),
    ("multigpu", 2, ("--batch_size", 47), f"{SIZES} a multiple of 2 processes, up to 1200"),
    ("multigpu", 2, ("--epochs", 0), SIZES),
    ("multinode", 3, ("--batch_size", 1203), f"{SIZES} a multiple of 3 processes, up to 1200"),
    ("hybrid", 3, (), "each replica needs two processes"),
    ("hybrid", 4, ("--batch_size", 47), f"{SIZES} a multiple of 2 replicas"),
    ("quantize", 1, ("--model", "none.pt"), "cannot load none.pt, which the other mnist.py write"),
]


@pytest.mark.parametrize(("folder", "processes", "words", "message"), REFUSED)
def test_a_mistake_ends_in_one_line(refused, data, folder, processes, words, message):
    words = (f"{folder}/mnist.py", "--data_dir", data, *words)
    err = refused(message, *words, processes=processes)
    assert [message in line for line in err.splitlines()].count(True) == 1, err


@pytest.mark.parametrize("folder", ("multinode", "hybrid"))
def test_started_by_nobody(attempt, folder):
    """Also in the shell of a Slurm job, where variables of tasks are set, but no task runs."""
    env = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
    status, _, err = attempt(f"{folder}/mnist.py", "--synthetic", processes=0, **env)
    assert status == 1 and err.startswith("start it with torchrun"), err
