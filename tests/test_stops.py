"""Runs that are stopped or killed, and started again: by real commands, where they matter."""

import os
import re
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from conftest import CONSTANT, ROOT, assert_same_weights, curve, load, replaced, rows, wait_for

AGAIN = os.EX_TEMPFAIL  # 75: run me again
GPT = "--d_model 32 --n_heads 2 --num_layers 1 --seq_len 32 --batch_size 24 --dropout 0.5"
STEPS = 20  # between validations, of the runs that get a signal at any moment
STOPS = {  # when, a signal, who gets it, and the status. Only SIGKILL and Ctrl-\ ask for no save
    "singlegpu": [
        ("training", signal.SIGQUIT, "group", -signal.SIGQUIT),
        ("training", signal.SIGINT, "group", AGAIN),
    ],
    "multigpu": [
        ("training", signal.SIGKILL, "parent", -signal.SIGKILL),
        ("torch is imported", signal.SIGTERM, "parent", AGAIN),
    ],
}


NUMPY = "import numpy as np\n"  # torch is next
STARTED = {NUMPY: f'Path(f"started-{{os.getpid()}}").touch()\n{NUMPY}'}


def wait_for_saves(job, path, count):
    """Wait until the job has saved so many times, or has ended."""
    times = set()  # at which it has written the snapshot
    while len(times) <= count and job.process.poll() is None:
        times.add(path.stat().st_mtime_ns if path.exists() else 0)
        time.sleep(0.01)


@pytest.mark.parametrize("folder", STOPS)
def test_resumed_weights_are_those_of_an_undisturbed_run(
    start, run, changed, data, tmp_path, chance, folder, stops=STOPS
):
    """Bit for bit, with dropout. Each process has a worker to load its data; none is left.

    Signals that come while torch is imported wait for the first step, which is saved. With gpt.py,
    which imports less than images.py. Other stops, and multinode: the soak.
    """
    script = changed(f"{folder}/gpt.py", CONSTANT | STARTED)
    processes = 1 if folder == "singlegpu" else 2
    cut, whole, log = (tmp_path / name for name in ("cut.pt", "whole.pt", "log.jsonl"))
    base = (*GPT.split(), "--dataset", data / "text.txt", "--eval_every", STEPS)
    more = ("--epochs", 10_000, "--num_workers", 1, "--snapshot", cut, "--log", log)
    for moment, signum, who, expected in stops[folder]:
        step = load(cut)["step"] if cut.exists() else 0
        started = len([*tmp_path.glob("started-*")])
        job = start(script, *base, *more, processes=processes)
        if moment == "training":
            wait_for_saves(job, cut, 2)
            time.sleep(chance.uniform(0, 0.3))
            assert len(job.processes()) >= 2 * processes, "workers, too"
        else:  # in all processes, of which one starts the others
            count = started + (3 if folder == "multigpu" else 1)
            wait_for(lambda count=count: len([*tmp_path.glob("started-*")]) == count)
        send = os.killpg if who == "group" else os.kill
        send(job.process.pid, signum)
        status, out, err = job.wait()
        assert status == expected, (out, err)
        assert moment == "training" or load(cut)["step"] == step + 1
        wait_for(lambda job=job: not job.processes())
    step, last = load(cut)["step"], rows(log)[-1]
    assert last["step"] == step and "val_loss" not in last, "a stop takes no time to validate"
    end = (step // STEPS + 1) * STEPS  # the next validation
    base = (*base, "--max_steps", end)
    run(script, *base, "--snapshot", cut, "--log", log, processes=processes)
    last = rows(log)[-1]
    assert (last["step"], last["steps"]) == (end, max(0, end - step - 3)), "it went on at that step"
    run(script, *base, "--snapshot", whole, processes=processes)
    assert_same_weights(cut, whole)
    assert not (tmp_path / "cut.pt.tmp").exists()


def signalled(where):
    """A change: after a step in which this holds, a process gets SIGTERM."""
    step = "        bar.update()\n"
    return {step: f"{step}        if {where}:\n            os.kill(os.getpid(), signal.SIGTERM)\n"}


def test_other_numbers_of_processes_carry_on(attempt, logged, base, changed, tmp_path):
    """One of three, not rank 0, is asked to stop in mid-epoch. In all folders the run goes on."""
    begun, whole = tmp_path / "begun.pt", tmp_path / "whole"
    words = (*base, "--dropout", 0, "--max_steps", 60, "--eval_every", 37, "--snapshot")
    expected = curve(logged("multigpu/images.py", *words, whole, processes=3))
    copy = changed("multinode/images.py", signalled("step == 28 and rank == 2"))
    status, out, err = attempt(copy, *words, begun, processes=3)
    assert status == AGAIN and 28 <= load(begun)["step"] < 37, (out, err)
    others = {"singlegpu": 1, "multigpu": 3, "multinode": (2, 2), "hybrid": 2}
    for folder, processes in others.items():
        snapshot = shutil.copy(begun, tmp_path / f"{folder}.pt")
        log = logged(f"{folder}/images.py", *words, snapshot, processes=processes)
        losses = curve(log)  # the first mean of training is of the steps since the start
        np.testing.assert_allclose(losses[:, 1], expected[:, 1], rtol=1e-4)
        assert losses[1, 0] == pytest.approx(expected[1, 0], rel=1e-4)
    assert_same_weights(tmp_path / "multigpu.pt", whole, rounding=1e-5)


@pytest.mark.parametrize("folder", ("singlegpu", "multigpu"))
def test_stops_that_save_nothing(attempt, base, changed, tmp_path, folder):
    """Status 143 without --snapshot, and 0 at the last step."""
    words = (*base, "--max_steps", 4, "--eval_every", 2, "--log", tmp_path / "log")
    for step, expected in (2, 128 + signal.SIGTERM), (4, 0):
        copy = changed(f"{folder}/images.py", signalled(f"step == {step}"))
        status, _, err = attempt(copy, *words, processes=2)
        assert status == expected, err
    assert ["val_loss" in row for row in rows(tmp_path / "log") if row["step"] == 4][0]


KILLED = [("singlegpu", "True", signal.SIGKILL), ("multigpu", "dist.get_rank() == 1", 1)]


@pytest.mark.parametrize(("folder", "who", "expected"), KILLED)
def test_killed_in_a_validation(attempt, run, base, changed, tmp_path, folder, who, expected):
    """All processes end, and nothing is lost: its step has been saved.

    Typed again at the end, nothing is done.
    """
    words = (*base, "--max_steps", 8, "--eval_every", 4, "--snapshot", tmp_path / "s.pt")
    start, kill = "    model.eval()\n", f"    if {who}:\n        os.kill(os.getpid(), 9)\n"
    copy = changed(f"{folder}/images.py", {start: start + kill})
    status, _, err = attempt(copy, *words, processes=2)
    assert status == expected and load(tmp_path / "s.pt")["step"] == 4, err
    for _ in range(2):
        run(f"{folder}/images.py", *words, "--log", tmp_path / "log", processes=2)
    assert {row["step"] for row in rows(tmp_path / "log")} == {8}


def test_what_a_resume_says(refused, run, base, tmp_path):
    """Other settings are printed. Those that would move the place in the data end the run."""
    words = (*base, "--max_steps", 2, "--snapshot", path := tmp_path / "s.pt")
    run("singlegpu/images.py", *words)
    before = path.read_bytes()
    others = ("--batch_size", 24), ("--dataset", "synthetic"), ("--seed", 2)
    for other in others:  # synthetic has more samples
        told = refused("to start anew", "multigpu/images.py", *words, *other, processes=2)
        assert told.count("\n") == 1 and path.read_bytes() == before
    more = ("--learning_rate", 0.5, "--max_steps", 3)
    out = run("multigpu/images.py", *words, *more, processes=2)
    [line] = re.findall(r"s\.pt was saved with (\{.*\})", out)
    assert "'learning_rate': 0.001" in line and "batch_size" not in line and len(line) < 100, line


@pytest.mark.parametrize(
    ("folder", "mark", "told"),
    [
        ("singlegpu", 'mark("backward")', "the norm of the gradients is nan"),
        ("multigpu", 'mark("comm" if is_last else "backward")', "or it is not finite"),
    ],
)
def test_weights_without_numbers_are_not_saved(
    attempt, changed, base, tmp_path, folder, mark, told
):
    """The loss of step 2 is a number, and a gradient is not. The snapshot of step 1 stays."""
    ruin = "model[1].weight.grad *= math.nan if step == 2 else 1"
    copy = changed(
        f"{folder}/images.py", {f"            {mark}": f"            {ruin}\n            {mark}"}
    )
    words = (*base, "--max_steps", 3, "--eval_every", 1, "--snapshot", tmp_path / "s.pt")
    status, _, err = attempt(copy, *words, processes=2 if folder == "multigpu" else 1)
    assert status == 1 and f"step 2: {'' if folder == 'singlegpu' else 'processes differ'}" in err
    assert told in err and load(tmp_path / "s.pt")["step"] == 1


OLD = "c0e4f83"  # the commit before the scripts were written anew
OPTIMIZER = "torch.optim.AdamW(model.parameters(), args.learning_rate, fused=True)"
GROUPS = """torch.optim.AdamW([
        {"params": model[1].parameters(), "lr": 0.0}, {"params": model[3].parameters()},
        {"params": model[6].parameters(), "lr": 2 * args.learning_rate}], args.learning_rate)"""


def old_script(path, folder):
    """Writes a script of that commit, and returns its path. A clone may have no history."""
    command = ["git", "-C", ROOT, "show", f"{OLD}:{path}"]
    shown = subprocess.run(command, capture_output=True, text=True)
    if shown.returncode:
        pytest.skip(f"this clone has no commit {OLD}")
    (copy := folder / "old" / path).parent.mkdir(parents=True)
    copy.write_text(shown.stdout)
    return copy


@pytest.mark.parametrize("folder", ("singlegpu", "multigpu"))
def test_snapshots_of_older_scripts(run, base, tmp_path, folder):
    """They are resumed, with the weights of an undisturbed run; a log goes on."""
    cut, whole, log = (tmp_path / name for name in ("cut.pt", "whole.pt", "log.jsonl"))
    script = f"{folder}/images.py"
    words = (*base, "--eval_every", 5, "--log", log, "--snapshot")
    old = old_script(script, tmp_path)
    old.write_text(replaced(old.read_text(), CONSTANT))
    new = tmp_path / "new" / script
    new.parent.mkdir(parents=True)
    new.write_text(replaced((ROOT / script).read_text(), CONSTANT))
    run(old, *words, cut, "--max_steps", 10, processes=2)
    out = run(new, *words, cut, "--max_steps", 20, processes=2)
    assert f"{cut} was saved with {{'max_steps': 10}}\n" in out
    assert [row["step"] for row in rows(log) if row["rank"] == 0] == [5, 10, 15, 20]
    run(new, *words, whole, "--max_steps", 20, processes=2)
    assert_same_weights(cut, whole)


def test_groups_keep_their_ratio(run, base, changed, tmp_path):
    """Of three, one has rate 0 and one twice --learning_rate, which the schedule multiplies.

    Also after a resume, and after one of a snapshot whose groups all had one rate.
    """
    script = changed("singlegpu/images.py", {OPTIMIZER: GROUPS})
    cut, whole = tmp_path / "cut.pt", tmp_path / "whole.pt"
    words = (*base, "--eval_every", 5, "--max_steps", 20, "--snapshot")
    run(script, *words, whole)
    snapshot = load(whole)
    rates = [group["lr"] for group in snapshot["optimizer"]["param_groups"]]
    assert rates == pytest.approx([0, 5e-5, 1e-4]), "at the end a twentieth of 1e-3"
    old = old_script("singlegpu/images.py", tmp_path)
    old.write_text(replaced(old.read_text(), {OPTIMIZER: GROUPS}))
    run(old, *words, cut, "--max_steps", 10)
    before = load(cut)["model"]
    run(script, *words, cut)
    after = load(cut)
    assert [group["lr"] for group in after["optimizer"]["param_groups"]] == pytest.approx(rates)
    same = [name for name in before if bool((before[name] == after["model"][name]).all())]
    assert same == ["1.weight", "1.bias"]


POLL = "        recent_sums = sum_over_ranks(own_sums)\n"
BEHIND = """        time.sleep(0.02 * (step - last_poll_step))
        rank or print("polls at", step)
"""


def test_polls_follow_a_device_that_is_behind(run, base, changed):
    """About once a second, though Python starts a thousand steps in this time.

    As for a GPU, a poll waits for all steps since the last one; 50 take a second. A few quick
    steps, as where data comes in bursts, put off the next poll by as many again.
    """
    copy = changed("multigpu/images.py", {POLL: BEHIND + POLL})
    out = run(copy, *base, "--max_steps", 140, "--eval_every", 140, processes=2)
    polls = [0, *map(int, re.findall(r"^polls at (\d+)$", out, re.M))]
    steps = np.diff(polls)
    assert polls[-1] == 140 and 8 <= max(steps) <= 60, polls
    assert (steps[1:] <= 2 * steps[:-1]).all(), polls
