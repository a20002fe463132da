"""How the scripts are launched and misused, and what they tell: with images.py, for all tasks."""

import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, SCRIPTS, forks_of, rows
from fork_server import run_all

WALL = {  # prints what the clock shows from the first mark to the last one
    '    mark("start")\n': '    mark("start")\n    began = marks[0][1]\n',
    "    bar.close()\n": '    print(f"wall {marks[0][1] - began}\\n", end="")\n    bar.close()\n',
}


def test_a_late_process_is_named(run, changed, base, tmp_path):
    """With its host, and the link is not blamed. All phases of a process add up to wall time."""
    before = (ROOT / "tests/helpers/slow.py", "backward", 2, 0.1)
    words = (*base, "--max_steps", 14, "--eval_every", 7, "--log", tmp_path / "log")
    words = (*words, "--snapshot", tmp_path / "s.pt")
    out = run(changed("multinode/images.py", WALL), *words, processes=3, before=before)
    logged = rows(tmp_path / "log")
    walls = sorted(map(float, re.findall(r"^wall ([\d.]+)", out, re.M)))
    seconds = [sum(row["seconds"] for row in logged if row["rank"] == rank) for rank in range(3)]
    assert sorted(seconds) == pytest.approx(walls, abs=1e-6) and min(walls) > 1.4
    totals = [sum(row["comm_total"] for row in logged[rank::3]) for rank in range(3)]
    waiting = f"waiting {sum(totals) / 3 - min(totals):.3f} s for rank 2 on {os.uname().nodename}\n"
    assert f"\nsending {min(totals):.3f} s, {waiting}" in out, (totals, out)
    compute = sum(row[name] for row in logged for name in ("forward", "backward", "optimizer"))
    ratio = float(re.search(r"^R = compute / sending = ([\d.]+)", out, re.M)[1])
    assert ratio == pytest.approx(compute / 3 / min(totals), abs=0.051)
    table = dict(re.findall(r"^(\w+) +([\d.]+) s +\d+%$", out, re.M))  # of the whole start
    for phase, mean in table.items():
        assert float(mean) == pytest.approx(sum(row[phase] for row in logged) / 3, abs=0.001)
    head, line, cells = [
        line.strip("| ").split(" | ") for line in out.splitlines() if line[:1] == "|"
    ]
    assert {*line} == {"---"} and len(head) == len(line) == len(cells)
    assert cells[head.index("val_loss")] == f"{logged[-3]['val_loss']:.4g}"


STEP = "        scaler.step(optimizer)\n"
DRIFTS = {  # what is done to a weight of rank 2 after each step, and what is said
    "model[1].weight.data[0, 0] *= 1 + 1e-6 * (rank == 2)": "",
    "model[1].weight.data *= 1 + 0.05 * (rank == 2)": "step 4: processes differ in 1.weight",
    "model[1].weight.data *= math.inf": "step 2: the loss is nan",
}


@pytest.mark.parametrize("folder", ("multigpu", "multinode"))
@pytest.mark.parametrize("change", DRIFTS)
def test_copies_that_differ(attempt, changed, base, tmp_path, folder, change):
    """Rounding is shown as `drift`. More ends the run in all processes, and nothing is saved."""
    copy = changed(f"{folder}/images.py", {STEP: f"{STEP}        {change}\n"})
    words = (*base, "--max_steps", 4, "--log", tmp_path / "log", "--snapshot", tmp_path / "s.pt")
    status, _, err = attempt(copy, *words, processes=3)
    if told := DRIFTS[change]:
        assert status == 1 and err.count(told) == 1 and "Traceback" not in err, err
        assert not (tmp_path / "s.pt").exists()
    else:
        assert status == 0 and {0 < row["drift"] < 1e-4 for row in rows(tmp_path / "log")} == {True}


class Bomb:
    """Pickled, and then unpickled, it would leave a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_files_cannot_run_code(base, tmp_path):
    """Neither a snapshot, nor arrays of pickled objects, nor a data set's own script."""
    bomb = tmp_path / "exploded"
    snapshots = [tmp_path / name for name in ("bomb.pt", "pickle.pt")]
    torch.save({"model": Bomb(bomb)}, snapshots[0])
    snapshots[1].write_bytes(pickle.dumps(Bomb(bomb)))
    for name in ("train_images.npy", "train.npy", "val.npy"):
        np.save(tmp_path / name, np.array([Bomb(bomb)], object), allow_pickle=True)
    (tmp_path / f"{tmp_path.name}.py").write_text(f"open({str(bomb)!r}, 'w')")
    commands = [[ROOT / f"singlegpu/{name}.py"] for name in ("images", "gpt", "text")]
    commands = [[*command, "--dataset", tmp_path] for command in commands]
    for flag in ("--snapshot", "--init_from"):
        commands += [[ROOT / "singlegpu/images.py", *base, flag, path] for path in snapshots]
    answers = run_all(commands, [{}] * len(commands), tmp_path, ends_others=False)
    assert [status for status, *_ in answers] == [1] * 7 and not bomb.exists(), answers


@pytest.mark.parametrize("folder", ("singlegpu", "multigpu", "multinode"))
def test_what_cannot_work_is_said_in_a_line(refused, base, tmp_path, folder):
    """Before the first step, once. test_emulator.py has the line for too few GPUs."""
    processes = 1 if folder == "singlegpu" else 2
    for name, more in {
        "multiple of": ("--batch_size", 45, "--grad_accum_steps", 2),
        "at most 1200": ("--batch_size", 1202),
        "cannot write none/s.pt": ("--snapshot", "none/s.pt"),
    }.items():
        err = refused(name, f"{folder}/images.py", *base, *more, processes=processes)
        assert 1 <= err.count("\n") <= (processes if "cannot" in name else 1), err


def test_nodes_that_differ(run, base, changed, tmp_path):
    """In code, flags, data, or the step of a snapshot that one of them does not see."""
    words = (*base, "--max_steps", 4, "--snapshot", tmp_path / "none.pt")
    run("singlegpu/images.py", *base, "--max_steps", 2, "--snapshot", good := tmp_path / "good.pt")
    (nodes, envs), told = forks_of("multinode/images.py", words, (2, 1)), "ranks differ in code"
    code = [changed("multinode/images.py", {"if is_stopped:": "if is_stopped :"}), *nodes[1][1:]]
    others = [code, [*nodes[1], "--dropout", 0.1], [*nodes[1], "--comm_hook", "bf16"]]
    others.append([*nodes[1][:-2], "--snapshot", good])
    for other in others:
        answers = run_all([nodes[0], other], envs, tmp_path)
        assert any(status == 1 and told in err for status, _, err in answers), answers


def test_each_script_has_help_and_names_its_launch(tmp_path):
    """Each flag is in --help. Without a launcher, multinode and hybrid say how to start them.

    As tasks of torchrun or srun, singlegpu and multigpu name the script that serves.
    """
    helps = run_all([[ROOT / script, "--help"] for script in SCRIPTS], [{}] * len(SCRIPTS), "/tmp")
    for script, (status, out, err) in zip(SCRIPTS, helps):
        flags = re.findall(r'add(?:_argument)?\("(--\w+)"', (ROOT / script).read_text())
        assert status == 0 and all(f" {flag}" in out for flag in flags), (script, out, err)
    told = [(name, "torchrun", {}) for name in SCRIPTS if name.startswith(("multinode", "hybrid"))]
    for script in SCRIPTS:
        if re.match("(single|multi)gpu/(images|gpt|mnist).py", script):
            message = f"use multinode/{Path(script).name}"
            told += [(script, message, {name: "2"}) for name in ("WORLD_SIZE", "SLURM_PROCID")]
    envs = [env for *_, env in told]
    answers = run_all([[ROOT / name] for name, *_ in told], envs, tmp_path, ends_others=False)
    for (script, message, _), (status, _, err) in zip(told, answers):
        assert status in (1, 2) and message in err and "Traceback" not in err, (script, err)
