"""How the scripts are launched and misused, and what they tell: with images.py, for all tasks."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import LOOPBACK, ROOT, SCRIPTS, forks_of, free_port, module, rows
from fork_server import run_all
from test_training import FSDP, PIPELINE, TENSOR

GPT = "--d_model 32 --n_heads 2 --num_layers 4 --seq_len 32 --batch_size 48 --dropout 0.1"
WALL = {  # prints what the clock shows from the first mark to the last one
    '    mark("start")\n': '    mark("start")\n    began = marks[0][1]\n',
    "    bar.close()\n": '    print(f"wall {marks[0][1] - began}\\n", end="")\n    bar.close()\n',
}


@pytest.fixture
def flags(base, data):
    """flags(script) are those of a small training."""
    gpt = (*GPT.split(), "--dataset", data / "text.txt")
    return lambda script: gpt if "gpt" in script else base


LATE = {  # script, processes, what one of them is slow at, its rank, and those of a pipeline
    "process": ("multinode/images.py", 3, "backward", 2, 1),
    "stage": (PIPELINE, 4, "step", 1, 2),
    "shard": ("hybrid/gpt_fsdp.py", 2, "backward", 1, 1),
}


@pytest.mark.parametrize("name", LATE)
def test_who_is_late_is_named(run, changed, flags, tmp_path, name):
    """With its host, and the link is not blamed. All phases of a process add up to wall time.

    The times are those of the log. A pipeline comes as late as its stages in the mean.
    """
    script, processes, what, late, stages = LATE[name]
    before = (ROOT / "tests/helpers/slow.py", what, late, 0.1)
    words = (*flags(script), "--max_steps", 14, "--eval_every", 7, "--log", tmp_path / "log")
    words = (*words, "--snapshot", tmp_path / "s.pt")
    out = run(changed(script, WALL), *words, processes=processes, before=before)
    logged = rows(tmp_path / "log")

    def sums(*columns):
        """The sums of these columns for each rank."""
        parts = [[row[column] for column in columns] for row in logged]
        return np.reshape(parts, (2, processes, -1)).sum((0, 2))

    walls = sorted(map(float, re.findall(r"^wall ([\d.]+)", out, re.M)))
    assert sorted(sums("seconds")) == pytest.approx(walls, abs=1e-6) and min(walls) > 1.3
    totals = sums("comm_total")
    sending = totals.reshape(-1, stages).mean(1).min()
    waiting = f"waiting {totals.mean() - sending:.3f} s for rank {late} on {os.uname().nodename}\n"
    assert f"\nsending {sending:.3f} s, {waiting}" in out, (totals, out)
    phases = ("forward", "backward", *(("bubble",) if stages > 1 else ()))
    ratio = float(re.search(r"^R = .* / sending = ([\d.]+): \d processes would", out, re.M)[1])
    assert ratio == pytest.approx(sums(*phases).mean() / sending, abs=0.051)
    table = dict(re.findall(r"^(\w+) +([\d.]+) s +\d+%$", out, re.M))  # of the whole start
    assert {"forward", "backward", "optimizer"} <= table.keys(), out
    for phase, mean in table.items():
        assert float(mean) == pytest.approx(sums(phase).mean(), abs=0.001)
    lines = [line.strip("| ") for line in out.splitlines() if line[:1] == "|"]
    head, line, cells = (line.split(" | ") for line in lines)
    assert {*line} == {"---"} and len(head) == len(line) == len(cells)
    assert cells[head.index("val_loss")] == f"{logged[-processes]['val_loss']:.4g}"


MULTIGPU, STAGES = "multigpu/images.py", "hybrid/images.py"
NORM, EMBEDDING = "stage.get_parameter('norm.bias').data", "stage.embedding.weight.data"
PART = "model.blocks[0].qkv.weight"
DRIFTS = {  # script, processes, flags, what is done after each step, and how the error ends
    "rounding": (MULTIGPU, 3, "", "model[1].weight.data[0, 0] *= 1 + 1e-6 * (rank == 2)", None),
    "copies": (MULTIGPU, 3, "", "model[1].weight.data *= 1 + 0.05 * (rank == 2)", "1.weight"),
    "loss": (MULTIGPU, 3, "", "model[1].weight.data *= math.inf", "nan"),
    "stage": (STAGES, 2, "", "model[-1].bias.data += rank", "6.bias"),
    "shard": (FSDP, 4, "--shard_size 2", "model.norm.bias.to_local().add_(rank // 2)", "norm.bias"),
    "pipelines": (PIPELINE, 4, "", f"if rank == 3: {NORM}.add_(1)", "norm.bias"),
    # Ranks 1 and 3 have the same part, and all have the same norm.
    "parts": (TENSOR, 4, "", f"if rank == 3: {PART}.add_(1)", "blocks.0.qkv.weight"),
    "wholes": (TENSOR, 2, "", "model.norm.bias.add_(rank)", "norm.bias"),  # of one group
    "ends": (PIPELINE, 2, "", f"{EMBEDDING}.add_(rank)", "embedding.weight"),  # of one pipeline
}
STEPS = "        scaler.step(optimizer)\n", "        optimizer.step()\n"  # that of shards and parts


@pytest.mark.parametrize("name", DRIFTS)
def test_copies_that_differ(attempt, changed, flags, tmp_path, name):
    """Rounding is shown as `drift`. More ends the run in all processes, and nothing is saved."""
    script, processes, more, change, told = DRIFTS[name]
    step = STEPS[script in (FSDP, TENSOR)]
    copy = changed(script, {step: f"{step}        with torch.no_grad():\n            {change}\n"})
    words = (*flags(script), *more.split(), "--max_steps", 2)
    files = ("--log", tmp_path / "log", "--snapshot", tmp_path / "s.pt")
    status, _, err = attempt(copy, *words, *files, processes=processes)
    if told:
        [said] = re.findall("step 2: (.*)", err)
        said = said.removesuffix(", or it is not finite")
        assert status == 1 and said.endswith(f" {told}") and "Traceback" not in err, err
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
    bomb, snapshot = tmp_path / "exploded", tmp_path / "bomb.pt"
    torch.save({"model": Bomb(bomb)}, snapshot)
    for name in ("train_images.npy", "train.npy", "val.npy"):
        np.save(tmp_path / name, np.array([Bomb(bomb)], object), allow_pickle=True)
    (tmp_path / f"{tmp_path.name}.py").write_text(f"open({str(bomb)!r}, 'w')")
    commands = [[ROOT / f"singlegpu/{name}.py"] for name in ("images", "gpt", "text")]
    commands = [[*command, "--dataset", tmp_path] for command in commands]
    for flag in ("--snapshot", "--init_from"):
        commands.append([ROOT / "singlegpu/images.py", *base, flag, snapshot])
    answers = run_all(commands, [{}] * len(commands), tmp_path, ends_others=False)
    assert [status for status, *_ in answers] == [1] * 5 and not bomb.exists(), answers


LAUNCHES = {"singlegpu/images.py": 1, MULTIGPU: 2, "multinode/images.py": 2, FSDP: 2}


@pytest.mark.parametrize("script", LAUNCHES)
def test_what_cannot_work_is_said_in_a_line(refused, flags, script):
    """Before the first step, once. test_emulator.py has the line for too few GPUs."""
    processes = LAUNCHES[script]
    for told, more in {
        "multiple of": ("--batch_size", 45, "--grad_accum_steps", 2),
        ", up to ": ("--batch_size", 12_000),
        "cannot write none/s.pt": ("--snapshot", "none/s.pt"),
        "cannot write none/log": ("--log", "none/log"),
    }.items():
        err = refused(told, script, *flags(script), *more, processes=processes)
        assert 1 <= err.count("\n") <= (processes if "cannot" in told else 1), err


WRONG = {  # flags: what is said of them
    "--max_grad_norm -1": "--max_grad_norm must not be negative",
    "--epochs -1": "--epochs must not be negative",
    "--max_steps -3": "--max_steps must not be negative",
    "--seed -1": "--seed must not be negative",
    "--num_gpus -1": "--num_gpus must not be negative",
    "--grad_accum_steps 0": "--batch_size and --grad_accum_steps must be at least 1",
    "--batch_size -8": "--batch_size and --grad_accum_steps must be at least 1",
}


@pytest.mark.parametrize("words", WRONG)
def test_numbers_that_make_no_sense(words, monkeypatch, capsys):
    """argparse refuses them: with status 2, and its usage."""
    monkeypatch.setattr("sys.argv", ["images.py", *words.split()])
    with pytest.raises(SystemExit) as ended:
        module(MULTIGPU).parse_args()
    assert ended.value.code == 2 and f"error: {WRONG[words]}" in capsys.readouterr().err


def test_who_is_late_is_named_where_it_matters(capsys):
    """Where others wait for it for more than a tenth of the steps. Of twice as many: by hand.

    In 10 s of steps, with 6 s in the passes and 1 s in the optimizer, four processes would take
    6 / 2 + 1 + 2 * 3 / 2 = 7 s, and two take 6 + 1 + 2 = 9 s.
    """
    script = module(MULTIGPU)
    mean = {"data": 1, "forward": 2, "backward": 4, "comm": 2, "optimizer": 1}
    for spread, named in (0.9, ""), (1.1, " for rank 1 on b"):
        rows_of_ranks = [{"rank": 0, "host": "a", "comm_total": 2 + spread}]
        rows_of_ranks.append({"rank": 1, "host": "b", "comm_total": 2.0})
        script.print_sending(mean | {"comm_total": 2 + spread / 2}, rows_of_ranks)
        first, second = capsys.readouterr().out.splitlines()
        assert first == f"sending 2.000 s, waiting {spread / 2:.3f} s{named}"
        told = "R = (forward + backward) / sending = 3.0: 4 processes would be 1.29 times as fast"
        assert second == told


def test_few_steps_and_one_process(run, base):
    """Three steps are warmup: no times, and no zeros. One process sends nothing."""
    out = run(MULTIGPU, *base, "--max_steps", 3, processes=2)
    *table, told = [line for line in out.splitlines() if "  step" not in line][-3:]
    assert told == "too few steps to time: the first three after a start are the warmup"
    assert "| script |" not in out and " 0.000 s" not in out and "samples/s" not in out
    out = run(MULTIGPU, *base, "--max_steps", 5, processes=1)
    assert "sending" not in out and "R =" not in out and "| script |" in out
    assert "without --snapshot, nothing is saved\n" in out


def test_a_sum_that_rank_0_has_not(logged, changed, base):
    """Such as that of a rare class. It is in the row."""
    sums = '{"loss": loss * len(images), "acc"'
    rare = '({"rare": 7 * len(images)} if dist.get_rank() == 1 else {})'
    copy = changed(MULTIGPU, {sums: f"{rare} | {sums}"})
    log = logged(copy, *base, "--max_steps", 4, processes=2)
    assert {row["train_rare"] for row in rows(log)} == {3.5}


def test_nodes_that_differ(run, base, changed, tmp_path):
    """In code, flags, data, or the step of a snapshot that one of them does not see."""
    words = (*base, "--max_steps", 4, "--snapshot", tmp_path / "none.pt")
    run("singlegpu/images.py", *base, "--max_steps", 2, "--snapshot", good := tmp_path / "good.pt")
    nodes, envs = forks_of("multinode/images.py", words, (2, 1))
    code = [changed("multinode/images.py", {"if is_stopped:": "if is_stopped :"}), *nodes[1][1:]]
    flags = "flags or data"
    others = [("code", code), (flags, [*nodes[1], "--dropout", 0.1])]
    others.append((flags, [*nodes[1], "--comm_hook", "bf16"]))
    others.append((f"{flags}, step of the snapshot", [*nodes[1][:-2], "--snapshot", good]))
    for told, other in others:
        answers = run_all([nodes[0], other], envs, tmp_path)
        line = f"ranks differ in {told}\n"
        assert any(status == 1 and line in err for status, _, err in answers), answers


def test_each_script_has_help_and_names_its_launch(tmp_path):
    """Without a launcher, multinode and hybrid say how to start them.

    As tasks of torchrun or srun, singlegpu and multigpu name the script that serves.
    """
    told = [(f"{script} --help", "", {}) for script in SCRIPTS]
    told += [(name, "torchrun", {}) for name in SCRIPTS if name.startswith(("multinode", "hybrid"))]
    for script in SCRIPTS:
        if re.match("(single|multi)gpu/(images|gpt|mnist).py", script):
            message = f"use multinode/{Path(script).name}"
            counts = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
            told += [(script, message, {name: "2"}) for name in counts]
    commands = [f"{ROOT}/{words}".split() for words, *_ in told]
    answers = run_all(commands, [env for *_, env in told], tmp_path, ends_others=False)
    for (words, message, _), (status, _, err) in zip(told, answers):
        expected = (1, 2) if message else (0,)
        assert status in expected and message in err and "Traceback" not in err, (words, err)


@pytest.mark.parametrize("script", ["multinode/images.py", "hybrid/gpt_fsdp.py"])
def test_the_usual_variables_are_enough(flags, script, tmp_path):
    """Operators of Kubernetes and others set no more than these of torchrun's variables."""
    log, port = tmp_path / "log.jsonl", free_port()
    words = [f"{ROOT}/{script}", *map(str, flags(script)), "--max_steps", "2", "--log", str(log)]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | LOOPBACK
    envs = [shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    answers = run_all([words] * 2, envs, tmp_path)
    assert [status for status, *_ in answers] == [0, 0], answers
    assert {row["processes"] for row in rows(log)} == {2}
