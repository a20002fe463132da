"""How the scripts are launched, stopped, resumed and misused: with images.py, for all tasks."""

import filecmp
import inspect
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from conftest import ROOT, SCRIPTS, TIMEOUT, assert_same_weights, commands_of, curve, forks_of
from conftest import load, rows, wait_for, wait_for_saves
from fork_server import run_all, torchrun_env
from test_training import arguments_of
from torch.distributed.elastic.multiprocessing import PContext


STEPS = 120  # between validations
STOPS = {  # the last of them asks the run to save and stop
    "singlegpu": [signal.SIGUSR2],
    "multigpu": [signal.SIGKILL, signal.SIGINT],
    "multinode": [signal.SIGTERM],
}


@pytest.fixture
def base(data):
    words = ("--model", "mlp", "--dropout", "0.5", "--dataset", "mnist", "--data_dir", data)
    return (*words, "--eval_every", STEPS, "--batch_size", 48)


@pytest.mark.parametrize("folder", STOPS)
def test_resumed_weights_are_those_of_an_undisturbed_run(
    start, fork, run, base, tmp_path, chance, folder
):
    """Killed, stopped and started again: the weights of one undisturbed run, bit for bit.

    Two workers load its data, and those of the undisturbed run none.
    """
    script, processes = f"{folder}/images.py", 1 if folder == "singlegpu" else 2
    cut, whole, log = (tmp_path / name for name in ("cut.pt", "whole.pt", "log.jsonl"))
    for signum in STOPS[folder]:
        more = ("--epochs", 10_000, "--num_workers", 2, "--snapshot", cut)
        is_real = folder != "singlegpu" and signum != signal.SIGKILL  # the users' launch
        job = (start if is_real else fork)(script, *base, *more, processes=processes)
        wait_for_saves(job, cut, 1 + cut.exists())  # a resumed run may begin with one
        time.sleep(chance.uniform(0, 1))
        if signum == signal.SIGKILL:
            os.kill(chance.choice(job.workers()), signum)
        else:
            job.process.send_signal(signum)
        status, out, err = job.wait()
        is_lost = signum == signal.SIGKILL or folder == "multinode"  # torchrun has its own status
        assert status == (1 if is_lost else os.EX_TEMPFAIL), err
        wait_for(lambda job=job: not job.processes())
    step = load(cut)["step"]
    assert f"stopped at step {step} of" in out and str(cut) in out
    end = (step // STEPS + 1) * STEPS  # the next validation
    base = (*base, "--max_steps", end)
    run(script, *base, "--snapshot", cut, "--log", log, processes=processes)
    last = rows(log)[-1]
    assert (last["step"], last["steps"]) == (end, max(0, end - step - 3)), "it went on at that step"
    run(script, *base, "--snapshot", whole, processes=processes)
    assert_same_weights(cut, whole)
    assert {path.name for path in tmp_path.iterdir()} == {"cut.pt", "whole.pt", "log.jsonl"}
    if folder == "singlegpu":
        log.unlink()
        run(script, *base, "--snapshot", cut, "--log", log)
        assert not log.exists(), "nothing was left to do"


def test_resumed_on_three_to_rounding(run, data, tmp_path):
    """To rounding: the first step after a start adds up the gradients in another order."""
    base = arguments_of("mlp", data)
    for steps, name in ((20, "resumed"), (40, "resumed"), (40, "undisturbed")):
        more = ("--max_steps", steps, "--snapshot", tmp_path / f"{name}.pt")
        run("multigpu/images.py", *base, *more, processes=3)
    assert_same_weights(tmp_path / "resumed.pt", tmp_path / "undisturbed.pt", rounding=1e-5)


def test_other_numbers_of_processes_carry_on(run, data, tmp_path):
    """What two began in hybrid goes on in mid-epoch, there and in all folders, on 1, 2 or 2 x 2."""
    begun, whole = tmp_path / "begun.pt", tmp_path / "whole.jsonl"
    base = ("--model", "mlp", "--batch_size", 48, "--dataset", "mnist", "--data_dir", data)
    more = ("--max_steps", 37, "--snapshot", begun)  # 25 steps are an epoch
    run("hybrid/images.py", *base, *more, processes=2)
    base = (*base, "--max_steps", 50, "--eval_every", 37)
    run("singlegpu/images.py", *base, "--log", whole)
    moves = ("singlegpu", 1), ("multigpu", 2), ("multinode", (2, 2)), ("hybrid", 1)
    for folder, processes in moves:
        snapshot, log = tmp_path / f"{folder}.pt", tmp_path / f"{folder}.jsonl"
        shutil.copy(begun, snapshot)
        more = ("--snapshot", snapshot, "--log", log)
        run(f"{folder}/images.py", *base, *more, processes=processes)
        expected = curve(whole, "val_acc")[-1:]
        np.testing.assert_allclose(curve(log, "val_acc"), expected, rtol=1e-4)


SLOWLY = (ROOT / "tests/helpers/slow.py",)


def test_killed_in_validation_repeats_the_validation_alone(fork, run, data, tmp_path):
    """The run saves before each validation, with which a killed run goes on."""
    cut, log = tmp_path / "cut.pt", tmp_path / "log.jsonl"
    script, base = "singlegpu/images.py", (*arguments_of("mlp", data), "--max_steps", 20)
    before = (*SLOWLY, "eval", 0, TIMEOUT)
    job = fork(script, *base, "--snapshot", cut, before=before)
    wait_for_saves(job, cut, 1)
    job.process.send_signal(signal.SIGKILL)
    job.wait()
    assert load(cut)["progress"]["row_step"] == 0 and load(cut)["step"] == 20
    run(script, *base, "--snapshot", cut, "--log", log)
    assert rows(log)[0]["steps"] == 0 and rows(log)[0]["eval"] > 0


@pytest.mark.parametrize(("what", "rank"), [("read", 0), ("read", 2), ("save", 0)])
def test_a_slow_process_times_nobody_out(run, data, tmp_path, what, rank):
    """One may take longer than --timeout to prepare data, or rank 0 to save: that is not `comm`."""
    log, before = tmp_path / "log.jsonl", (*SLOWLY, what, rank, 5)
    files = ("--snapshot", tmp_path / "s.pt", "--log", log)
    words = (*arguments_of("mlp", data), "--max_steps", 20, "--timeout", 4, *files)
    run("multinode/images.py", *words, processes=3, before=before)
    for row in rows(log):
        assert row["comm"] < 5 and (row["save"] > 4.9) == (what == "save"), row


def test_a_late_process_is_named(run, data, tmp_path):
    """It is named with its host, and the link is not blamed."""
    log, verdicts = tmp_path / "log.jsonl", []
    for seconds in (0, 0.1):
        more = ("--max_steps", 20, "--log", log)
        before = (*SLOWLY, "backward", 2, seconds)
        words = (*arguments_of("mlp", data), *more)
        out = run("multinode/images.py", *words, processes=3, before=before)
        verdicts.append(float(re.search(r"^R = compute / sending = ([\d.]+)", out, re.M)[1]))
        totals = [row["comm_total"] for row in rows(log)[-3:]]
    waiting = f"waiting {sum(totals) / 3 - min(totals):.3f} s for rank 2 on {os.uname().nodename}\n"
    assert f"\nsending {min(totals):.3f} s, {waiting}" in out, (totals, out)
    compute = [row[name] for row in rows(log)[-3:] for name in ("forward", "backward", "optimizer")]
    assert verdicts[1] == pytest.approx(sum(compute) / 3 / min(totals), abs=0.051)
    assert verdicts[1] > verdicts[0]


@pytest.mark.parametrize("folder, processes", [("singlegpu", 1), ("multigpu", 2)])
def test_ctrl_c_before_the_first_step(fork, tmp_path, folder, processes):
    """It ends the run at once: nothing is trained that could be saved."""
    np.save(tmp_path / "train_images.npy", np.full((512, 1, 28, 28), 9, np.uint8))
    np.save(tmp_path / "train_labels.npy", np.arange(512) % 2)
    pipe = tmp_path / "test_images.npy"
    os.mkfifo(pipe)  # nobody writes to it: who reads it waits
    job = fork(f"{folder}/images.py", "--dataset", tmp_path, processes=processes)

    def is_read():  # a pipe that nobody reads cannot be opened
        assert job.process.poll() is None, job.wait()
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return None

    def press():  # again, if Python has not yet begun to wait for the pipe
        job.process.send_signal(signal.SIGINT)
        return job.process.poll() is not None

    writer = wait_for(is_read)
    wait_for(press, pause=0.5)
    status, out, err = job.wait()
    os.close(writer)
    assert status and "steps 0 to" not in out, (status, out, err)


def test_torchrun_is_as_readme_says(start, tmp_path):
    """SIGUSR2 ends it; it kills what a SIGTERM does not end in 30 s; it wants a -- before --log."""
    (script := tmp_path / "multinode/sleeps.py").parent.mkdir()
    script.write_text("import time\nopen('begun', 'w')\ntime.sleep(1000)")
    job = start(script, "--log", "run.jsonl")
    wait_for((tmp_path / "begun").exists)
    job.process.send_signal(signal.SIGUSR2)
    assert job.process.wait(TIMEOUT) == -signal.SIGUSR2  # its process lives on, and has the pipes
    job.end()
    assert inspect.signature(PContext.close).parameters["timeout"].default == 30
    [words] = commands_of(script, ["--log", "run.jsonl"])
    words.remove("--")
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == 2 and "ambiguous option: --log " in done.stderr, done.stderr


class Bomb:
    """Pickled, and then unpickled, it would leave a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_snapshots_that_do_not_fit_are_refused(refused, run, data, tmp_path):
    """Truncated, foreign or hostile: a line of error, and the file stays as it is."""
    base, script = [*arguments_of("mlp", data), "--max_steps", 20], "singlegpu/images.py"
    good, cut, bomb = (tmp_path / name for name in ("good.pt", "cut.pt", "exploded"))
    run(script, *base, "--snapshot", good)
    other = ("--max_steps", 20, "--snapshot", tmp_path / "other.pt")
    run("singlegpu/autoencoder.py", *arguments_of("autoencoder", data), *other)
    content = good.read_bytes()
    cut.write_bytes(content[: len(content) // 2])
    (tmp_path / "empty.pt").touch()
    (tmp_path / "text.pt").write_text("run,epoch\n")
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps(Bomb(bomb)))
    torch.save(torch.load(good, weights_only=True) | {"model": Bomb(bomb)}, tmp_path / "bomb.pt")
    before = {path: path.read_bytes() for path in tmp_path.glob("*.pt")}
    cases = [(str(path), script, *base, "--snapshot", path) for path in {*before} - {good}]
    cases.append((str(cut), "multigpu/images.py", *base, "--snapshot", cut))
    for setting in (("--model", "cnn"), ("--learning_rate", "1e-4")):
        cases.append((setting[0][2:], script, *base, *setting, "--snapshot", good))
    with ThreadPoolExecutor(4) as pool:  # a refusal waits
        list(pool.map(lambda words: refused(*words, processes=2), cases))
    assert len(cases) == 9 and not bomb.exists()
    words = (*base, "--max_steps", 40, "--snapshot")
    due = torch.load(good, weights_only=True)  # as after a crash: it begins with a validation
    due["progress"]["row_step"] = 0
    torch.save(due, tmp_path / "due.pt")
    for path in (good, tmp_path / "due.pt"):
        (one, other), envs = forks_of("multinode/images.py", words, (2, 1))
        answers = run_all([[*one, path], [*other, tmp_path / "none.pt"]], envs, tmp_path)
        told = f"the nodes have different files {path}: use a shared file system"
        assert answers[0][0] == 1 and [told in err for *_, err in answers] == [True, False], answers
    assert before.items() <= {path: path.read_bytes() for path in tmp_path.glob("*.pt")}.items()


def test_other_data_is_no_resume(refused, run, tmp_path):
    """The order of the data, and a random split, would be others than before."""
    words = ("--dataset", f"{tmp_path}/", "--model", "mlp", "--batch_size", 24, "--epochs", 1)
    for count in (96, 95):
        for split in ("train", "test"):
            images = np.full((count, 8, 8), 9, np.uint8)
            np.save(tmp_path / f"{split}_images.npy", images)
            np.save(tmp_path / f"{split}_labels.npy", np.arange(count) % 2)
        if count == 96:
            run("singlegpu/images.py", *words, "--snapshot", tmp_path / "s.pt")
    more = ("--epochs", 2, "--snapshot", tmp_path / "s.pt")
    for dataset in (f"{tmp_path}/", tmp_path):  # a slash at the end means nothing
        there = ("--dataset", dataset, *more)
        refused("the training data has changed", "multigpu/images.py", *words, *there, processes=2)
    there = (*words, *more, "--dataset", "x/")
    refused(f"it was made with --dataset {tmp_path}", "singlegpu/images.py", *there)


def test_data_cannot_run_code(refused, tmp_path):
    """Arrays of pickled objects, and a data set's own script, end in a line of error."""
    bomb = tmp_path / "exploded"
    for name in ("train_images.npy", "train.npy", "val.npy"):
        np.save(tmp_path / name, np.array([Bomb(bomb)], object), allow_pickle=True)
    (tmp_path / f"{tmp_path.name}.py").write_text(f"open({str(bomb)!r}, 'w')")
    for script in ("images", "gpt", "text"):
        refused(f"{tmp_path}", f"singlegpu/{script}.py", "--dataset", tmp_path)
    assert not bomb.exists()


def test_bad_arguments_are_named(attempt, refused, data, tmp_path):
    """Each script names the flag; those of torchrun say that they need it; parts are equal."""
    texts = {script: (ROOT / script).read_text() for script in SCRIPTS}
    found = {name: re.search(r'"(--\w+)", type=int', text) for name, text in texts.items()}
    flags = {script: flag[1] for script, flag in found.items() if flag}
    launched = [torchrun_env(0, 1, 1)] * len(flags)
    commands = [[str(ROOT / script), flag, "many"] for script, flag in flags.items()]
    for script, (status, _, err) in zip(
        flags, run_all(commands, launched, tmp_path, ends_others=False)
    ):
        assert status == 2 and "Traceback" not in err, (script, err)
        assert f"argument {flags[script]}: invalid int value: 'many'" in err, (script, err)
    helps = run_all(
        [[str(ROOT / script), "--help"] for script in SCRIPTS], [{}] * len(SCRIPTS), "."
    )
    for script, (status, out, err) in zip(SCRIPTS, helps):
        named = re.findall(r'add(?:_argument)?\("(--\w+)"', texts[script])
        assert status == 0 and all(f" {flag}" in out for flag in named), (script, out, err)
    commands = [[str(ROOT / name)] for name in SCRIPTS if name.startswith(("multinode", "hybrid"))]
    ended = run_all(commands, [{}] * len(commands), tmp_path, ends_others=False)
    for command, (status, _, err) in zip(commands, ended):
        assert status in (1, 2) and "torchrun " in err and "Traceback" not in err, (command, err)
    words = (*arguments_of("mlp", data), "--batch_size", 25, "--grad_accum_steps", 2)
    cases = [("--batch_size must be", f"{folder}/images.py", *words) for folder in STOPS]
    for flag in ("--snapshot", "--log", "--reconstructions"):
        cases.append(("cannot write none/file", "singlegpu/autoencoder.py", flag, "none/file"))
    cases.append((".png or .jpg", "singlegpu/autoencoder.py", "--reconstructions", "of.mnist"))
    for out in ("none/file", tmp_path):
        cases.append((f"cannot write {out}", "multigpu/allreduce.py", "--out", out))
    cases.append(("cannot write", "singlegpu/images.py", "--log", f"{__file__}/log.jsonl"))
    with ThreadPoolExecutor(4) as pool:  # a refusal waits
        list(pool.map(lambda words: refused(*words, processes=2), cases))
    refused("one process has nobody to send to", "multigpu/allreduce.py", processes=1)
    refused("--expect needs --pairs", "multinode/allreduce.py", "--expect", 2, processes=2)
    status, out, err = attempt("multigpu/images.py", "--log", tmp_path, processes=2)
    assert status == 1 and err.count(f"cannot write {tmp_path}") == 1 and not out, err
    assert err.count("\n") == 1, err


def test_missing_data_is_named(refused, tmp_path):
    """Without the files and a network (the proxy is nobody) one process names it in a line.

    The others, whose store ends with rank 0, say nothing.
    """
    blocked = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    for dataset in ("mnist", "bigmnist", "nowhere"):
        words = ("--dataset", dataset, "--data_dir", tmp_path / "none", "--batch_size", 6)
        told = f"cannot read {dataset}"
        err = refused(told, "multinode/images.py", *words, processes=3, **blocked)
        assert err.count(told) == 1, err


def test_a_full_disk_is_named_and_spoils_nothing(refused, run, data, tmp_path):
    """The snapshot of before stays, no part of the new one does, and one line says why."""
    words, before, small = arguments_of("mlp", data), tmp_path / "run.pt", tmp_path / "small"
    run("singlegpu/images.py", *words, "--max_steps", 20, "--snapshot", before)
    small.mkdir()
    size = f"size={before.stat().st_size * 3 // 2}"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", small], capture_output=True)
    if done.returncode:
        pytest.skip(done.stderr.decode())
    try:
        snapshot = shutil.copy(before, small)
        more = ("--snapshot", snapshot)
        err = refused("No space left", "multigpu/images.py", *words, *more, processes=2)
        assert err.count("cannot save") == 1, err
        assert os.listdir(small) == ["run.pt"] and filecmp.cmp(before, snapshot, shallow=False)
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.parametrize("resumed", (False, True))
def test_two_runs_with_one_snapshot(fork, run, base, tmp_path, resumed):
    """The one that saves later ends, and says why; the other one goes on. So do two that resume."""
    words = (*base, "--max_steps", 3 * STEPS, "--snapshot", tmp_path / "run.pt")
    if resumed:
        run("singlegpu/images.py", *words, "--max_steps", STEPS)
    ended = [job.wait() for job in [fork("singlegpu/images.py", *words) for _ in range(2)]]
    assert sorted(status for status, _, _ in ended) == [0, 1], ended
    [err] = [err for status, _, err in ended if status]
    assert "another run writes it" in err and "Traceback" not in err, err
    assert os.listdir(tmp_path) == ["run.pt"]


READING = "        images, labels = (tensor"
BATCH = "    images, labels = batch\n"
CONNECT = "    try:\n        train_data, val_data"


@pytest.mark.parametrize(("what", "rank", "seconds"), [("read", 1, 1), ("save", 0, 3)])
def test_a_process_that_never_reads_or_saves(attempt, base, tmp_path, what, rank, seconds):
    """The others end after ten times --timeout; in a save, all have shown their stacks."""
    before = (*SLOWLY, what, rank, 1000)
    words = (*base, "--timeout", seconds, "--snapshot", tmp_path / "s.pt")
    status, _, err = attempt("multigpu/images.py", *words, processes=2, before=before)
    assert status == 1 and err.count(f"waited {10 * seconds} s in vain") == 1, err
    assert err.count("Timeout (0:00:30)!") == (2 if what == "save" else 0), err


@pytest.mark.parametrize("folder", ("singlegpu", "multigpu"))
def test_a_second_ctrl_c_ends_a_hung_run(fork, base, changed, tmp_path, folder):
    """The first one waits for a step, which does not come from a data set that hangs."""
    hang = f"        open('hung', 'w'), time.sleep(1000)\n{READING}"
    job = fork(changed(f"{folder}/images.py", {READING: hang}), *base, processes=2)
    wait_for((tmp_path / "hung").exists)
    time.sleep(0.5)
    for _ in range(2):
        job.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    status, _, err = job.wait(30)
    assert status != 0, err
    wait_for(lambda: not job.processes())


HANGS = {  # where, on the ranks but 0: folder, processes, {text: other}, what the stacks name
    "worker": ("singlegpu", 1, {READING: f"        time.sleep(1000)\n{READING}"}, "_try_get_data"),
    "loss": ("multinode", 3, {BATCH: f"    hang_here()\n{BATCH}"}, "hang_here"),
    "data": (
        "multinode",
        2,
        {CONNECT: f"    hang_here()\n{CONNECT}"},
        "in vain for another process",
    ),
}


@pytest.mark.parametrize("where", HANGS)
def test_a_hung_process_ends_the_run_and_says_where(fork, base, changed, tmp_path, where):
    """After --timeout: in batch_loss, or where it waits for a worker's batch, or for another one.

    One that reads its data may take ten times as long.
    """
    folder, processes, changes, told = HANGS[where]
    hang, line = "    time.sleep(1000 * (os.environ.get('RANK') != '0'))", "def create_optimizer"
    changes = changes | {line: f"def hang_here():\n{hang}\n\n\n{line}"}
    seconds = 3 if where == "data" else 5
    words = (changed(f"{folder}/images.py", changes), *base, "--timeout", seconds)
    if where == "worker":
        job = fork(*words, "--num_workers", 2)
        status, _, err = job.wait(90)
        wait_for(lambda: not job.processes(), seconds=30)
        statuses, expected = [status], [signal.SIGALRM]
    else:  # all end by themselves: one that had to be killed would have status -9
        commands, envs = forks_of(words[0], words[1:], processes)
        statuses, _, errs = zip(*run_all(commands, envs, tmp_path))
        # Rank 0 waits for the others in vain. In `data`, SIGTERM then ends the other: status 0.
        expected = [1, *[0 if where == "data" else -signal.SIGALRM] * (processes - 1)]
        err = "".join(errs)
    assert list(statuses) == expected and re.search(told, err), (statuses, err)
    shown = 0 if where == "data" else processes  # to read data may take long
    assert err.count("Timeout (0:00:05)!") == shown, err
