"""tools/check: it names the faults that are put into scripts by hand, and no others."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys

import faults
import programs
import pytest
import torch
from conftest import LOOPBACK, Job, free_port, module, wait_for
from test_training import check_forks, flags_of

ROOT, TRAIN = faults.ROOT, faults.FOLDER / "train.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]


def problems(lines):
    return [line for line in lines if line.startswith(("ERROR", "warning")) or "failed" in line]


def check_in_forks(command, folder, options=""):
    """As faults.check(), without the seconds of each import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        done = check_forks(*shlex.split(options), "--", *command)
    lines, before = faults.table_of(done.stdout)
    return done.returncode, lines, before + done.stderr


@pytest.mark.parametrize("name", faults.FAULTS)
def test_a_fault_is_named(name, tmp_path, check=check_in_forks):
    """By its sentence; an ERROR has status 1. The soak starts the commands themselves."""
    fault = faults.FAULTS[name]
    status, lines, before = faults.run(fault, tmp_path, check)
    assert faults.is_found(fault, lines), (lines, before[-2000:])
    assert status == any(line.startswith("ERROR") for line in lines), (status, lines)
    assert not any(line.startswith("failed") for line in lines), lines
    assert name != "images_alone" or len(problems(lines)) == 1, lines  # no second cause


MANY = """rate_set_afterwards validates_in_train same_dropout_mask same_numbers_in_ranks other_flags
    validation_drops_last written_in_place""".split()


def test_faults_do_not_hide_each_other(tmp_path):
    group = [faults.FAULTS[name] for name in MANY]
    edits = [edit for each in group for edit in each.edits]
    status, lines, before = faults.run(group[-1]._replace(edits=edits), tmp_path, check_in_forks)
    missing = [each.name for each in group if not faults.is_found(each, lines)]
    assert status == 1 and not missing, (missing, lines, before[-2000:])


def test_every_kind_has_a_fault():
    kinds = {"against", "resume"} | {kind.__name__ for kind in module("tools/check").KINDS}
    assert len(kinds) > 15
    missing = kinds - {each.kind for each in faults.FAULTS.values()}
    assert not missing, f"put a fault of {missing} into tests/faults/faults.txt"


def test_weights_are_the_same_with_and_without(run, tmp_path):
    """A right training has no finding; its weights stay the same bit for bit; the status is 0."""
    words = (TRAIN, "--processes", 2, "--workers", 1, "--epochs", 2, "--weights")
    run(*words, tmp_path / "alone", "--folder", tmp_path)
    watched = [sys.executable, *words, tmp_path / "seen", "--folder", "{tmp}"]
    status, lines, before = check_in_forks(watched, tmp_path, "--steps 12")
    assert status == 0 and problems(lines) == [], (lines, before[-2000:])
    one, two = ((tmp_path / name).read_bytes() for name in ("alone", "seen"))
    # After step 12 the training ends within optimizer.step(), so that it writes 11 of 16.
    assert 0 < len(two) == len(one) // 16 * 11
    assert one.startswith(two)


def test_one_that_does_not_train_is_not_judged(tmp_path):
    """Status 2: no optimizer takes a step, or the command fails before."""
    by_hand = "import torch; w = torch.ones(2, requires_grad=True)\n"
    by_hand += "for _ in range(3): w.sum().backward(); w.data -= w.grad; w.grad = None"
    status, lines, _ = faults.check([sys.executable, "-c", by_hand], tmp_path)
    assert status == 2 and "by hand" in lines[0] and len(lines) == 2
    status, lines, _ = faults.check([sys.executable, "-c", "import torch; exit(3)"], tmp_path)
    assert status == 2 and "status 3" in lines[0]


ODD = """ordinary closures rollouts two_views averaged_weights teacher diffusion lost_window tasks
    shared_weights traced with_replacement""".split()
MNIST = ("1 singlegpu", "1 multigpu", "3 multigpu", "3 multinode", "4 hybrid")
RIGHT = [f"2 tests/faults/hybrid/right.py {name}" for name in ODD]  # in its folder, as of torchrun
RIGHT += [f"{script}/mnist.py --synthetic" for script in MNIST]


@pytest.mark.parametrize("command", RIGHT)
def test_right_programs(command, tmp_path):
    """Those of right.py look odd. test_training.py watches all other training scripts."""
    status, lines, before = check_in_forks(command.split(), tmp_path)
    assert status == 0 and problems(lines) == [], (lines, before[-2000:])
    count = sum(line.startswith("ok") for line in lines)
    # mnist.py in one process has no copies, no schedule, no dropout and no flag of a type.
    assert count >= programs.AT_LEAST - command.startswith("1 "), lines


def test_no_process_is_left(request, tmp_path):
    """SIGTERM, as of timeout(1), ends tools/check and its job."""
    words = ["--steps", "1000000", "--", sys.executable, TRAIN, "--processes", "2"]
    words += ["--epochs", "1000000", "--folder", "{tmp}"]
    job = Job([sys.executable, ROOT / "tools/check", *words], tmp_path)
    request.addfinalizer(job.end)
    wait_for(lambda: len(job.processes()) == 4)
    job.process.terminate()
    assert job.wait()[0] != 0
    wait_for(lambda: not job.processes(), 60)


def test_data_that_round_differently(tmp_path):
    """Numbers that a data set adds up on other threads: a warning (pytorch #88718)."""
    jitter = "        self.jitter = jitter\n"
    total = "        torch.set_num_threads(args.processes)\n"
    total += "        self.images *= torch.rand(2**22, generator=generator).sum() / 2**21\n"
    edits = [(jitter, total + jitter), ("Images(256, 0, 0.01)", "Images(256, 0, 0)")]
    loop = "    for i, (x, y) in enumerate(loader):\n"
    edits += [(loop, "    ddp.eval()\n" + loop)]
    fault = faults.FAULTS["loss_summed"]._replace(edits=edits)
    status, lines, before = faults.run(fault, tmp_path, check_in_forks)
    assert status == 0, (lines, before[-2000:])
    assert any("samples of step 1 are others, by rounding" in line for line in lines), lines


def test_on_each_of_two_nodes(tmp_path):
    """A torchrun each: one table. On two machines: soak_slurm."""
    words = [sys.executable, ROOT / "tools/check", "--steps", "6", "--", *TORCHRUN[:3]]
    words += ["--nnodes=2", f"--master_port={free_port()}", TRAIN]
    env = os.environ | LOOPBACK | {"CHECK_FOLDER": f"{tmp_path}/new"}
    how = {"cwd": tmp_path, "stdout": subprocess.PIPE, "text": True}
    jobs = [subprocess.Popen(words, env=env | {"PET_NODE_RANK": rank}, **how) for rank in "01"]
    outputs = [job.communicate(timeout=300)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outputs
    assert problems(outputs[0].splitlines()) == [] and "2 in one group" in outputs[0], outputs
    assert "rank 0's machine prints the table" in outputs[1]


# == The command, in real processes ==
SMALL = """
import os, sys, torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(int(sys.argv[1]) if len(sys.argv) > 1 else 100):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""


def start_check(*words, **variables):
    """Runs the command. Returns what subprocess.run() does."""
    command = [sys.executable, ROOT / "tools/check", *words]
    how = {"capture_output": True, "text": True, "timeout": 200}
    return subprocess.run([*map(str, command)], env=os.environ | variables, **how)


def test_the_old_name_says_what_to_type():
    done = subprocess.run([sys.executable, ROOT / "tools/check.py"], capture_output=True, text=True)
    assert done.returncode == 2 and "python tools/check --" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_it_hides_no_module_of_a_training(tmp_path):
    """A script has modules of its own with the names of the checker's files."""
    for name in ("rules", "watch", "records", "check"):
        (tmp_path / f"{name}.py").write_text("mine = 1\n")
    lines = "import rules, watch, records, check\n"
    lines += "assert rules.mine + watch.mine + records.mine + check.mine == 4\n"
    (tmp_path / "train.py").write_text(lines + SMALL)
    done = start_check("--steps", 5, "--", sys.executable, tmp_path / "train.py")
    assert done.returncode == 0 and "5 steps, 1 process" in done.stdout, done.stdout + done.stderr


def test_what_is_printed(tmp_path):
    """The start, errors first, one line with what is unseen, a last line with counts; JSON."""
    text = SMALL.replace("    optimizer.zero_grad()\n", "")
    (tmp_path / "train.py").write_text(text)
    file = tmp_path / "found.json"
    command = ["--", sys.executable, tmp_path / "train.py"]
    done = check_forks("--steps", 5, "--json", file, *command)
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and "for 5 optimizer steps" in lines[0]
    levels = [line.split()[0] for line in lines if re.match(r"(ERROR|warning|ok) ", line)]
    assert levels[0] == "ERROR" and levels == sorted(levels, key=["ERROR", "warning", "ok"].index)
    assert sum(line.startswith("not seen: ") for line in lines) == 1
    assert lines[-1] == "1 error, 0 warnings"
    known = json.loads(file.read_text())
    assert known["status"] == 1 and known["steps"] == 5
    [error] = [each for each in known["findings"] if each["level"] == "ERROR"]
    assert error["kind"] == "accumulation"
    done = check_forks("--steps", 5, "--ignore", "accumulation", *command)
    assert done.returncode == 0 and "accumulation" not in done.stdout


def test_a_warning_may_be_a_failure(tmp_path):
    text = SMALL.replace("model.parameters()", "[model.weight]")
    (tmp_path / "train.py").write_text(text)
    command = ["--steps", 5, "--", sys.executable, tmp_path / "train.py"]
    assert check_forks(*command).returncode == 0
    done = check_forks("--fail_on_warning", *command)
    assert done.returncode == 1 and "0 errors, 1 warning" in done.stdout


def test_a_rule_that_fails_is_no_ok(monkeypatch, tmp_path):
    """It is said, and the status is 3."""
    tool = module("tools/check")

    def order(job):
        raise ValueError("of the rule itself")

    rules = [order if rule.__name__ == "order" else rule for rule in tool.RULES]
    monkeypatch.setattr(sys.modules["rules"], "RULES", rules)
    (tmp_path / "train.py").write_text(SMALL)
    done = check_forks("--steps", 5, "--", sys.executable, tmp_path / "train.py")
    assert done.returncode == 3 and "of the rule itself" in done.stdout, done.stdout
    assert re.search(r"^failed +order", done.stdout, re.M) and "1 failure" in done.stdout


def test_each_kind_is_listed():
    done = start_check("--list")
    kinds = [kind.__name__ for kind in module("tools/check").KINDS]
    assert [line.split()[0] for line in done.stdout.splitlines()] == kinds
    page = (ROOT / "tools/README.md").read_text()
    missing = [kind for kind in kinds if f"\n### {kind}\n" not in page]
    assert not missing, f"tools/README.md has no section '### {missing[0]}'"


def test_a_command_that_does_not_exist():
    done = start_check("--", "no-such-command-here")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "no-such-command-here" in done.stderr


@pytest.mark.parametrize("start", ([sys.executable, "-I"], ["env", "-i", sys.executable]))
def test_hooks_that_are_not_loaded(start, tmp_path):
    (tmp_path / "train.py").write_text(SMALL)
    done = start_check("--steps", 5, "--", *start, tmp_path / "train.py", 5)
    assert done.returncode == 2 and "loaded the watch in no" in done.stdout, done.stdout


@pytest.mark.parametrize("signum", (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
def test_interrupted_it_prints_what_was_found(signum, request, tmp_path):
    """SIGHUP comes when a terminal is closed. What nohup starts ignores it."""
    text = SMALL + "    if step == 5:\n        open(sys.argv[2], 'w').close()\n"
    (tmp_path / "train.py").write_text(text)
    sign = tmp_path / "at_step_5"
    words = ["--steps", "1000000", "--", sys.executable, tmp_path / "train.py", "1000000", sign]
    heeds = ["env", "--default-signal=HUP"]
    job = Job([*heeds, sys.executable, ROOT / "tools/check", *words], tmp_path)
    request.addfinalizer(job.end)
    wait_for(sign.exists)
    job.process.send_signal(signum)
    status, *texts = job.wait()
    printed = "".join(texts)
    assert status == 128 + signum and "Traceback" not in printed, printed
    assert f"{signum.name} has ended it" in printed and "0 errors" in printed.splitlines()[-1]
    assert re.search("^ok +finite", printed, re.M), printed


def test_interrupted_while_it_judges(monkeypatch, tmp_path):
    """It ends without a traceback, and the rule is not said to have failed."""
    tool = module("tools/check")

    def order(job):
        os.kill(os.getpid(), signal.SIGINT)
        yield "ok", "too late"

    rules = [order if rule.__name__ == "order" else rule for rule in tool.RULES]
    monkeypatch.setattr(sys.modules["rules"], "RULES", rules)
    (tmp_path / "train.py").write_text(SMALL)
    status, lines, _ = check_in_forks([sys.executable, tmp_path / "train.py"], tmp_path)
    assert status == 128 + signal.SIGINT and not problems(lines), lines


def test_a_comparison_that_cannot_be_made(tmp_path):
    """It was asked for, so the status is 3, and the reason is printed."""
    (tmp_path / "train.py").write_text(SMALL)
    command = ["--", sys.executable, tmp_path / "train.py"]
    done = start_check("--steps", 5, "--against", f"{sys.executable} -c pass", *command)
    assert done.returncode == 3, done.stdout + done.stderr
    assert re.search("^failed +against +the other run took no step", done.stdout, re.M)
    assert done.stdout.splitlines()[-1].endswith("1 failure")


def test_dropout_is_no_difference_of_two_runs(data):
    """No two processes draw alike, so that a comparison cannot be made. Without it, it is."""
    words = f"{flags_of('mlp', data)} --dropout"
    for rate, status in (0.5, 3), (0, 0):
        against = f"1 singlegpu/images.py {words} {rate}"
        job = f"2 multigpu/images.py {words} {rate}".split()
        done = check_forks("--steps", 4, "--against", against, "--", *job)
        assert done.returncode == status and "ERROR" not in done.stdout, done.stdout
        said = re.search("^failed +against +the model draws random numbers", done.stdout, re.M)
        assert bool(said) == (status == 3), done.stdout


def test_inputs_that_no_loader_gave_are_not_compared(tmp_path):
    """If each run draws its own, as they may be meant to. If they draw the same, they are."""
    text = "import torch\ntorch.manual_seed(0)\n" + SMALL
    text = text.replace("for step in", "torch.manual_seed(int(sys.argv[2]))\nfor step in")
    (path := tmp_path / "train.py").write_text(text)
    command = ["--steps", 4, "--", "1", path, 5, 1]
    done = check_forks("--against", f"1 {path} 5 2", *command)
    assert done.returncode == 3 and "ERROR" not in done.stdout, done.stdout
    said = r"^failed +against +8 of 8 inputs of step 1 are others, and no DataLoader gave"
    assert re.search(said, done.stdout, re.M), done.stdout
    done = check_forks("--against", f"1 {path} 5 1", *command)
    assert done.returncode == 0 and re.search("^ok +against", done.stdout, re.M), done.stdout


def test_an_old_folder_is_refused(tmp_path):
    """Its records would count as those of the new run."""
    folder = tmp_path / "whole/seen1"
    folder.mkdir(parents=True)
    (folder / "host-1").write_text('{"kind": "process", "parent": "host-2"}\n')
    module("tools/check").refuse_old_records(tmp_path)  # no: another machine may have begun
    with open(folder / "host-1", "a") as file:
        file.write('{"kind": "step", "optimizer": 0, "step": 1}\n')
    done = start_check("--", sys.executable, "-c", "pass", CHECK_FOLDER=str(tmp_path))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "Give each start a new folder" in done.stderr


def test_no_steps_are_refused():
    done = start_check("--steps", 0, "--", sys.executable, "-c", "pass")
    assert done.returncode == 2 and "--steps must be at least 1" in done.stderr


def test_a_folder_with_a_space(monkeypatch, tmp_path):
    """{tmp} stays one word in --against, too."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    text = "import sys, torch\n_, path = sys.argv\nopen(path, 'w').close()\n"
    text += "sys.argv.pop()\ntorch.manual_seed(0)\n"
    (tmp_path / "train.py").write_text(text + SMALL)
    options = f"--steps 5 --against '{sys.executable} {tmp_path}/train.py {{tmp}}/s'"
    command = [sys.executable, tmp_path / "train.py", "{tmp}/s"]
    status, lines, before = check_in_forks(command, tmp_path, options)
    assert status == 0 and any("against" in line for line in lines), (lines, before[-2000:])


def test_a_hang_before_the_first_step(tmp_path):
    """The lines at which the processes wait are named, though no optimizer is known."""
    waits = "dist.recv(torch.zeros(1), 1 - rank)\ntorch.manual_seed(0)\n"
    edits = [("torch.manual_seed(0)\n", waits)]
    fault = faults.FAULTS["hangs"]._replace(edits=edits, options="--timeout 12")
    _, lines, before = faults.run(fault, tmp_path, check_in_forks)
    hang = r"ERROR +ending +it hangs after step 0: .*2 process\(es\) at train.py line \d"
    assert any(re.match(hang, line) for line in lines), (lines, before[-2000:])


def test_optimizers_that_are_made_anew(tmp_path):
    """All steps count, so that it ends."""
    loop = "for step in range(100):\n    optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
    text = re.sub(r"for step in .*\n", loop, SMALL)
    (tmp_path / "train.py").write_text(text)
    done = check_forks("--steps", 5, "--", sys.executable, tmp_path / "train.py")
    assert done.returncode == 0 and "\n5 steps" in done.stdout, done.stdout


@pytest.fixture
def watch(monkeypatch):
    """The module of the hooks, which are not put in."""
    settings = {"CHECK_STEPS": "1", "CHECK_PAUSE": "0", "CHECK_STUCK": "9", "CHECK_COMPARES": ""}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    tool = module("tools/check/watch.py")
    tool.torch, tool.change_type = torch, torch.Tensor.to
    return tool


def test_names_of_ranks(watch):
    """They are left out of what processes are compared by, and no other words are."""
    for words in ("--local_rank 1", "--node-rank=12", "--rank 0", "rank=3", "--worker-id=3f"):
        assert not re.sub(watch.NAMES_OF_RANKS, "", words), words
    for words in ("--lora_rank 8", "--lora-rank=8", "/home/frank", "--rank_loss 1", "--rank 8b"):
        assert re.sub(watch.NAMES_OF_RANKS, "", words) == words


def test_unlike_tensors_have_unlike_bits(watch):
    """So have tensors with pairs of numbers, other orders, and other signs; only zeros have 0."""
    large = torch.randn(watch.BLOCKS * watch.BLOCK + 3 * watch.BLOCK + 5)
    swapped = torch.cat([large[watch.BLOCK : 2 * watch.BLOCK], large[: watch.BLOCK]])
    swapped = torch.cat([swapped, large[2 * watch.BLOCK :]])
    other = large.clone()
    other[-1] += 1
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8):
        one = torch.arange(1, 9).to(dtype)
        unlike = [one, one.flip(0), torch.ones_like(one), 2 * torch.ones_like(one)]
        if dtype.is_floating_point:
            unlike += [-one, -torch.ones_like(one), *[each.to(dtype) for each in (large, other)]]
        if dtype == torch.float32:
            unlike.append(swapped)
        bits = [watch.bits_of(each).item() for each in unlike]
        assert 0 not in bits and len({*bits}) == len(bits), dtype
        assert watch.bits_of(torch.cat([one[:1], one])[1:]).item() == bits[0], "its place in memory"
        assert watch.bits_of(torch.zeros(5, dtype=dtype)).item() == 0
        assert watch.bits_of(torch.zeros(0, dtype=dtype)).item() == 0
    rows = torch.randn(4, 6, dtype=torch.float64)
    assert len({*watch.hashes_of(torch.cat([rows, -rows])).tolist()}) == 8
    assert watch.bits_of_gradient(torch.ones(16, 16)).item() != 0
    assert watch.bits_of_gradient(-torch.zeros(16)).item() == 0


def test_what_is_multiplied_does_not_grow_with_a_weight(watch):
    """The cached vectors have one length, and zeros at a row's end change no hash."""
    rows = torch.randn(3, 3 * watch.BLOCK + 5)
    longer = torch.cat([rows, torch.zeros(3, 2 * watch.BLOCK)], 1)
    assert torch.equal(watch.hashes_of(rows), watch.hashes_of(longer))
    assert len({*watch.hashes_of(rows).tolist()}) == 3
    assert watch.factors(rows.device)[0].numel() == watch.BLOCK
    apart = torch.randn(3, 3 * watch.BLOCK + 5) * 1e-3
    near = watch.project(rows + apart) - watch.project(rows)
    expected = apart.double().norm(dim=1).mean()
    assert 0.1 * expected < near.norm(dim=1).mean() < 10 * expected
