"""What every training script promises, as tools/check sees it; and what its log tells."""

import os
import re
import signal
import subprocess
import sys
from subprocess import TimeoutExpired
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, SCRIPTS, TRAINING, assert_same_weights, call, curve, forks_of, load
from conftest import module, rows
from fork_server import Fork

FEW = "--max_steps 13 --eval_every 6 --learning_rate 3e-4"  # of the second epoch, too
MNIST = "--dataset mnist --data_dir {data} --batch_size 120"
TABLES = "--dataset tables --data_dir {data} --batch_size 60"
PAIRS = f"{TABLES} --source number --target name --seq_len 5"
GPT = "--dataset {data}/text.txt --d_model 32 --n_heads 2 --num_layers 4 --seq_len 32"
TASKS = {  # of each model, its script, and flags that make it small
    "mlp": ("images.py", f"{MNIST} --model mlp"),
    "cnn": ("images.py", f"{MNIST} --model cnn"),
    "autoencoder": ("images.py", f"{MNIST} --model autoencoder"),
    "nbow": ("text.py", f"{TABLES} --model nbow"),
    "text": ("text.py", f"{TABLES} --model transformer"),
    "lstm": ("translation.py", f"{PAIRS} --model lstm"),
    "translation": ("translation.py", f"{PAIRS} --model transformer"),
    "gpt": ("gpt.py", f"{GPT} --batch_size 96"),
}
FSDP, PIPELINE = "hybrid/gpt_fsdp.py", "hybrid/gpt_pipeline.py"
TENSOR = "hybrid/gpt_tensor.py"
TWO_PIPELINES = "--num_stages 2 --schedule gpipe --num_microbatches 3"  # on four processes
TWO_GROUPS = "--tensor_size 2 --grad_accum_steps 3 --num_workers 1"
RUNS = [  # processes, script, task, more flags. Its losses are to be those of singlegpu
    (2, "multigpu/images.py", "mlp", "--grad_accum_steps 3"),
    (3, "multigpu/translation.py", "translation", ""),
    (3, "multigpu/gpt.py", "gpt", ""),
    (3, "multinode/text.py", "text", ""),
    (4, "multinode/gpt.py", "gpt", "--grad_accum_steps 3"),
    (3, "hybrid/images.py", "cnn", "--num_stages 4 --grad_accum_steps 2"),
    (2, FSDP, "gpt", "--checkpoint_activations --grad_accum_steps 3"),
    (4, FSDP, "gpt", "--shard_size 2 --num_workers 1"),
    # Of two pipelines, the first has a batch more to validate on.
    (4, PIPELINE, "gpt", TWO_PIPELINES),
    # Of two groups, the first has a sequence more to validate on.
    (4, TENSOR, "gpt", TWO_GROUPS),
]  # the others: the soak
SEEN = "ending processes weights updates gradients accumulation finite shares order inputs samples"
SEEN += " validation"  # kinds of tools/check that must be right, and not only unseen
# What tools/check cannot see: a snapshot that is a folder; shards and stages without a copy, and
# parts of one group.
UNSEEN = {FSDP: "layers snapshot weights", PIPELINE: "layers weights shares"}
UNSEEN[TENSOR] = UNSEEN[PIPELINE]
PHASES = ("data", "forward", "backward", "bubble", "comm", "optimizer")


class Forks:
    """What tools/check starts, in place of subprocess.Popen: N script.py ..., in N forks.

    `python script.py ...` is one fork, and torchrun's command is as many as it says.
    """

    def __init__(self, words, env, **_):
        if words[1] == "-m":  # python -m torch.distributed.run --standalone --nproc_per_node=N
            words = [words[4].rpartition("=")[2], *words[5:]]
        count, script, *arguments = words
        count = 1 if count == sys.executable else int(count)
        commands, envs = forks_of(script, arguments, count, **env)
        self.forks = [Fork(*each) for each in zip(commands, [os.getcwd()] * len(envs), envs)]
        self.pid = self.forks[0].pid

    def poll(self):
        statuses = [fork.child.exitcode for fork in self.forks]
        return None if None in statuses else max(statuses, key=abs)

    def send_signal(self, signum):
        for fork in self.forks:
            os.kill(fork.pid, signum)

    def wait(self, timeout=None):
        if timeout:
            for fork in self.forks:
                fork.child.join(timeout)
        else:
            print(*["".join(fork.end()[1:]) for fork in self.forks])


def check_forks(*words):
    """Runs tools/check in this process. Its jobs, N script.py ..., are forks."""
    tool = module("tools/check")
    tool.subprocess = SimpleNamespace(Popen=Forks, TimeoutExpired=TimeoutExpired)
    if "CHECK_FOLDER" in os.environ:
        tool.OTHERS_GRACE = 0  # no other machine is waited for
    signums = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {signum: signal.getsignal(signum) for signum in signums}
    done = call(tool, *words)
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    return done


@pytest.fixture
def check(tmp_path, monkeypatch):
    """check(words) runs tools/check. Returns kinds that are ok, and what was printed.

    It finds nothing wrong. What the jobs write to {tmp} stays, in tmp_path.
    """
    monkeypatch.setenv("CHECK_FOLDER", str(tmp_path))

    def check(*words):
        done = check_forks("--steps", 14, *words)
        jobs, _, table = done.stdout.rpartition("process(es) that train: ")
        found = re.findall(r"^(ERROR|warning|ok|not seen) +(\w+) +(.*(?:\n {22}.*)*)", table, re.M)
        assert not [each for each in found if each[0] in ("ERROR", "warning")], table
        return {kind for level, kind, _ in found if level == "ok"}, jobs

    return check


def flags_of(task, data):
    return f"{TASKS[task][1].format(data=data)} {FEW}"


def assert_rows(log, script, processes):
    """Of each process, with all times."""
    logged = rows(log)
    places = sorted((row["step"], row["rank"]) for row in logged)
    assert places == [(step, rank) for step in (6, 12, 13) for rank in range(processes)]
    for row in logged:
        assert (row["script"], row["processes"], row["nodes"]) == (script, processes, 1)
        assert row["host"] == os.uname().nodename and row["peak_MB"] > 50
        assert all(row[name] > 0 for name in ("data", "forward", "backward", "optimizer"))
        assert (row["warmup"] > 0) == (row["step"] == 6)
        assert row["steps"] == {6: 3, 12: 6, 13: 1}[row["step"]]
        assert (row.get("comm_total", 0) > 0) == (processes > 1)
        assert ("bubble" in row) == ("pipeline" in script) and row.get("bubble", 1) > 0
        assert [name for name, *_ in row["last_step"]].count("optimizer") == 1
        training = sum(row.get(name, 0) for name in PHASES)
        assert row["samples/s"] == pytest.approx(row["batch_size"] * row["steps"] / training)
        assert ("tokens/s" in row) == bool(re.search("gpt|translation", script))
        if "tokens/s" in row:  # the first token of a translation is given
            tokens = row["seq_len"] - ("translation" in script)
            assert row["tokens/s"] == pytest.approx(tokens * row["samples/s"])
        assert sum(row.get("stages", [row["parameters"]])) == row["parameters"]


@pytest.mark.parametrize(("processes", "script", "task", "more"), RUNS)
def test_one_loss_curve(check, data, tmp_path, processes, script, task, more):
    """Samples and weights are those of one process, losses and gradients, too; the losses fall."""
    one, words = f"singlegpu/{TASKS[task][0]}", f"{flags_of(task, data)} --log {{tmp}}/log"
    command = f"{processes} {script} {words} {more}".split()
    seen, printed = check("--against", f"1 {one} {words}", "--", *command)
    has_copies = more in (TWO_PIPELINES, TWO_GROUPS)
    unseen = {*("" if has_copies else UNSEEN.get(script, "")).split()}
    if "--shard_size" in more:
        unseen -= {"weights"}  # each shard has a copy
    assert {*SEEN.split(), "against"} - unseen <= seen
    assert not unseen & seen, "UNSEEN lists what is seen"
    lines = printed.splitlines()
    told = [line.split()[1] for line in lines if line[:2] == "| " and ".py" in line]
    assert {script, one} == {*told} and all(len(x) <= 100 for x in lines if x[:1] != "|"), printed
    logs = [tmp_path / life / "tmp/log" for life in ("whole", "against")]
    assert_rows(logs[0], script, processes)
    assert_rows(logs[1], one, 1)
    assert rows(logs[0])[0]["parameters"] == rows(logs[1])[0]["parameters"]
    found, expected = (curve(log, "grad_norm") for log in logs)
    assert expected[-1, 1] < expected[0, 1], "it learns"
    np.testing.assert_allclose(found[:, :2], expected[:, :2], rtol=1e-5)
    # AdamW hides that gradients are N times too large, and their norm does not.
    np.testing.assert_allclose(found[:, 2], expected[:, 2], rtol=1e-3)
    if "val_acc" in rows(logs[0])[0]:
        np.testing.assert_allclose(*[curve(log, "val_acc") for log in logs], atol=0.01)


RESUMED = [  # processes, script, task, more flags
    (1, "singlegpu/images.py", "mlp", "--num_workers 1 --precision fp16"),
    (2, "multigpu/images.py", "mlp", "--num_workers 1 --precision fp16"),
    # Of three, gloo adds up in another order in the first step, before DDP makes its buckets anew.
    (2, "multinode/images.py", "mlp", "--grad_accum_steps 2 --precision fp16"),
    (2, "hybrid/images.py", "mlp", "--num_stages 2 --precision fp16"),
    (2, PIPELINE, "gpt", "--num_stages 2 --precision fp16 --batch_size 24"),
    (2, FSDP, "gpt", "--precision bf16 --batch_size 24"),
]  # another: the soak


@pytest.mark.parametrize(("processes", "script", "task", "more"), RESUMED)
def test_a_resumed_run_has_the_weights_of_an_undisturbed_one(
    check, data, tmp_path, processes, script, task, more
):
    """All processes are told to stop at half. Dropout goes on, and so does the scale of fp16."""
    words = f"{flags_of(task, data)} --max_steps 21 --eval_every 10 --dropout 0.1 {more}"
    words += " --snapshot {tmp}/s --log {tmp}/log"
    seen, _ = check("--steps", 22, "--resume", "--", *f"{processes} {script} {words}".split())
    kinds = {"resume", "snapshot", "modes"} | ({"layers"} if processes > 1 else set())
    assert kinds - {*UNSEEN.get(script, "").split()} <= seen
    stops = [row["step"] for row in rows(tmp_path / "stopped/tmp/log") if "val_loss" not in row]
    assert 10 < max(stops) < 20, "a stop takes no time to validate"
    if script != FSDP:
        cut, whole = (tmp_path / life / "tmp/s" for life in ("stopped", "whole"))
        assert_same_weights(cut, whole)
        assert load(cut)["scaler"] == load(whole)["scaler"]


WORDS = re.compile(r"mark\(|marks\(|timed_hook\(")  # of the lines of the stopwatch
WITHOUT = [name for name in filter(TRAINING.search, SCRIPTS) if re.search("images|hybrid", name)]


@pytest.mark.parametrize("script", WITHOUT)  # the others: the soak
def test_without_its_timing(logged, data, tmp_path, script):
    """Without its last section and these lines, it has the same losses. All names are known."""
    text = (ROOT / script).read_text()
    start = text.index("# == Where the time goes")
    end = text.index('\nif __name__ == "__main__":\n', start)
    lines = (text[:start] + text[end + 1 :]).splitlines(keepends=True)
    (copy := tmp_path / script).parent.mkdir()
    copy.write_text("".join(line for line in lines if not WORDS.search(line)))
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", copy]
    assert subprocess.run(ruff).returncode == 0
    family = script.split("/")[1].split("_")[0].removesuffix(".py")
    task = {"images": "mlp", "text": "nbow", "gpt": "gpt", "translation": "lstm"}[family]
    words = (*flags_of(task, data).split(), "--max_steps", 4, "--eval_every", 2)
    processes = 1 if "singlegpu" in script else 2
    logs = [logged(each, *words, processes=processes) for each in (script, copy)]
    before, after = (curve(log, "grad_norm") for log in logs)
    np.testing.assert_array_equal(before[:, 1:], after[:, 1:])  # train_loss depends on the polls
    assert "forward" in rows(logs[0])[0] and "forward" not in rows(logs[1])[0]


def test_draws_and_bar(attempt, data, changed, tmp_path):
    """What is drawn, as by dropout, differs between processes, steps and micro-batches.

    The bar has the loss of the last poll. Where there is no terminal, it is hardly drawn again.
    """
    loss, log = "    outputs = model(images)", tmp_path / "log.jsonl"
    spy = "    model.training and print(f'drawn {torch.rand(())}\\n', end='')\n"  # in one write
    words = (*flags_of("mlp", data).split(), "--grad_accum_steps", 2, "--log", log)
    script = changed("multigpu/images.py", {loss: spy + loss})
    status, out, err = attempt(script, *words, processes=2)
    drawn = re.findall(r"drawn (\S+)", out)
    assert status == 0 and (len(drawn), len({*drawn})) == (52, 52), out
    shown = re.findall(r"(\d+)/13 .*?loss=([\d.]+)", err)
    assert shown[-1][0] == "13" and len(shown) < 6, err
    assert float(shown[-1][1]) == pytest.approx(rows(log)[-1]["train_loss"], rel=0.2)
