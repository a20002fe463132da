"""How the scripts are launched, resumed and misused: with images.py, for all tasks."""

import os
import pickle
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import CONSTANT, ROOT, SCRIPTS, Bomb, assert_same_weights, forks_of, load, rows
from conftest import wait_for, wait_for_saves
from fork_server import run_all

STEPS = 60  # between validations, of the runs that get a signal at any moment
STOPS = {  # signals, who gets them, and the status. Only after SIGKILL is the run not asked to save
    "singlegpu": [(signal.SIGKILL, "parent", 9), (signal.SIGUSR2, "parent", os.EX_TEMPFAIL)],
    "multigpu": [
        (signal.SIGKILL, "rank", 128 + 9),
        (signal.SIGKILL, "parent", 9),
        (signal.SIGTERM, "parent", os.EX_TEMPFAIL),
    ],
    "multinode": [(signal.SIGTERM, "parent", 1)],  # torchrun has a status of its own
}
# A set gives parameters in another order in each start: their moments stay theirs.
TURNED = "[*model.parameters()][:: -1 if os.path.exists(args.snapshot) else 1], args.learning_rate"
TURNED = {"model.parameters(), args.learning_rate": TURNED}


@pytest.mark.parametrize("folder", STOPS)
def test_resumed_weights_are_those_of_an_undisturbed_run(
    start, fork, run, changed, base, tmp_path, chance, folder
):
    """Killed, stopped and started again: the same weights, bit for bit; none is left.

    A worker loads its data, and none those of the undisturbed run. The snapshot is a link.
    """
    script, processes = changed(f"{folder}/images.py", CONSTANT | TURNED), 1 + (folder[0] == "m")
    cut, whole, log = (tmp_path / name for name in ("disk/cut.pt", "whole.pt", "log.jsonl"))
    cut.parent.mkdir()
    (link := tmp_path / "link.pt").symlink_to(cut)
    base = (*base, "--eval_every", STEPS)
    for signum, who, expected in STOPS[folder]:
        more = ("--epochs", 10_000, "--num_workers", 1, "--snapshot", link)
        job = (start if folder == "multinode" else fork)(script, *base, *more, processes=processes)
        wait_for_saves(job, link, 1 + cut.exists())  # a resumed run may begin with one
        time.sleep(chance.uniform(0, 0.3))
        assert len(job.processes()) >= 2 * processes, "workers, too"
        os.kill(job.workers()[-1] if who == "rank" else job.process.pid, signum)
        status, out, err = job.wait()
        assert status == expected, (out, err)
        wait_for(lambda job=job: not job.processes())
    step = load(cut)["step"]
    assert f"stopped at step {step} of" in out and str(link) in out
    end = (step // STEPS + 1) * STEPS  # the next validation
    base = (*base, "--max_steps", end)
    run(script, *base, "--snapshot", link, "--log", log, processes=processes)
    last = rows(log)[-1]
    assert (last["step"], last["steps"]) == (end, max(0, end - step - 3)), "it went on at that step"
    run(script, *base, "--snapshot", whole, processes=processes)
    assert_same_weights(cut, whole)
    assert link.is_symlink() and os.listdir(cut.parent) == ["cut.pt"]


WALL = {  # prints what the clock shows from the first mark to the last one
    '    mark("start")\n': '    mark("start")\n    began = moments[0]\n',
    "    bar.close()\n": '    print(f"wall {moments[0] - began}\\n", end="")\n    bar.close()\n',
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


def test_what_cannot_work_is_said_in_a_line(refused, run, base, tmp_path):
    """Before anything long, and by one process. A snapshot of other settings stays as it is."""
    good = tmp_path / "good.pt"
    run("singlegpu/images.py", *base, "--max_steps", 2, "--snapshot", good)
    before = good.read_bytes()
    for split in ("train", "test"):
        np.save(tmp_path / f"{split}_images.npy", np.zeros((30, 8, 8), np.uint8))
        np.save(tmp_path / f"{split}_labels.npy", np.arange(30) % 2)
    (link := tmp_path / "link.pt").symlink_to(tmp_path / "none/file")
    too_few = ("too few samples: 30 for a batch, 30 to validate on", "--dataset", tmp_path)
    cases = [(f"{folder}/images.py", *too_few) for folder in STOPS]
    for more in (("--model", "cnn"), ("--learning_rate", 1e-4)):
        told = f"{good} was made with {more[0]} "
        cases.append(("multigpu/images.py", told, *base, *more, "--snapshot", good))
    cases += [
        ("multinode/images.py", "--batch_size must be", *base, "--grad_accum_steps", 5),
        ("multinode/images.py", "/none/file: it is a folder", *base, "--snapshot", "none/file"),
        ("singlegpu/images.py", f"cannot write {tmp_path}", *base, "--log", tmp_path),
        ("singlegpu/images.py", f"cannot write {tmp_path}/none", *base, "--snapshot", link),
    ]
    for script, told, *words in cases:
        err = refused(told, script, *words, processes=2)
        assert err.count("\n") == 1, (script, words, err)
    words = (*base, "--max_steps", 4)  # nodes with other files, or flags
    told = "the processes have different code, flags, data or snapshots"
    none = tmp_path / "none.pt"
    others = [("--snapshot", none, "--dropout", 0.1), ("--snapshot", none, "--comm_hook", "bf16")]
    for end in ("--snapshot", good), *others, ():
        nodes, envs = forks_of("multinode/images.py", words, (2, 1))
        answers = run_all([[*nodes[0], "--snapshot", none], [*nodes[1], *end]], envs, tmp_path)
        assert any(status == 1 and told in err for status, _, err in answers), answers
    assert before == good.read_bytes()


def test_each_script_has_help_and_names_its_launch(tmp_path):
    """Each flag is in --help. Without a launcher, multinode and hybrid say how to start them.

    As tasks of srun, those of singlegpu and multigpu name the job file that serves.
    """
    helps = run_all([[ROOT / script, "--help"] for script in SCRIPTS], [{}] * len(SCRIPTS), "/tmp")
    for script, (status, out, err) in zip(SCRIPTS, helps):
        flags = re.findall(r'add(?:_argument)?\("(--\w+)"', (ROOT / script).read_text())
        assert status == 0 and all(f" {flag}" in out for flag in flags), (script, out, err)
    tasks = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    told = {name: "torchrun" for name in SCRIPTS if name.startswith(("multinode", "hybrid"))}
    for script in SCRIPTS:
        if re.match("(single|multi)gpu/(images|text|translation|gpt|mnist).py", script):
            told[script] = f"use slurm/multinode_{Path(script).stem}.slurm"
    envs = [{} if message == "torchrun" else tasks for message in told.values()]
    answers = run_all([[ROOT / name] for name in told], envs, tmp_path, ends_others=False)
    for (script, message), (status, _, err) in zip(told.items(), answers):
        assert status in (1, 2) and message in err and "Traceback" not in err, (script, err)
