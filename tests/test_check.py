"""tools/check.py: it names the faults that are put into scripts by hand, and no others."""

import contextlib
import shlex
import subprocess
import sys

import faults
import link
import pytest
from conftest import module
from test_training import check_forks

ROOT, TRAIN = faults.ROOT, faults.FOLDER / "train.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
QUICK = [name for name in faults.FAULTS if name != "images_hangs"]  # that takes a minute


def problems(lines):
    return [line for line in lines if line.startswith(("ERROR", "warning")) or "failed" in line]


def check_in_forks(command, folder, options=""):
    """As faults.check(), without the seconds of each import."""
    with contextlib.chdir(folder):
        done = check_forks(*shlex.split(options), "--", *command)
    lines, before = faults.table_of(done.stdout)
    return done.returncode, lines, before + done.stderr


@pytest.mark.parametrize("name", QUICK)
def test_a_fault_is_named(name, tmp_path, check=check_in_forks, python="1"):
    """By its sentence; an ERROR has status 1. The soak starts the commands themselves."""
    fault = faults.FAULTS[name]
    status, lines, before = faults.run(fault, tmp_path, check, python)
    assert faults.is_found(fault, lines), (lines, before[-2000:])
    assert status == any(line.startswith("ERROR") for line in lines)
    assert not any("failed itself" in line for line in lines), lines
    assert name != "images_alone" or len(problems(lines)) == 1, lines  # no second cause


def test_every_kind_has_a_fault():
    names = ["against", "resume", *vars(module("tools/check.py").Kinds)]
    kinds = {name for name in names if name[0] != "_"}
    assert len(kinds) > 15
    assert kinds - {each.kind for each in faults.FAULTS.values()} == set()


def test_weights_are_the_same_with_and_without(tmp_path):
    """A right training has no finding; its weights stay the same bit for bit; the status is 0."""
    flags = ["--processes", 2, "--workers", 1, "--epochs", 2]
    alone = [sys.executable, TRAIN, *flags, "--folder", tmp_path, "--weights", tmp_path / "alone"]
    subprocess.run(list(map(str, alone)), check=True, capture_output=True, timeout=300)
    watched = [sys.executable, TRAIN, *flags, "--folder", "{tmp}", "--weights", tmp_path / "seen"]
    status, lines, before = faults.check(watched, tmp_path, "--steps 12")
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
    assert status == 2 and "by hand" in lines[0] and len(lines) == 1
    status, lines, _ = faults.check([sys.executable, "-c", "import torch; exit(3)"], tmp_path)
    assert status == 2 and "status 3" in lines[0]


RIGHT = """ordinary closures rollouts two_views averaged_weights teacher diffusion lost_window tasks
    shared_weights traced with_replacement""".split()


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_that_look_odd(name, tmp_path):
    """A program of right.py has no finding, in two processes."""
    (program := tmp_path / "hybrid/right.py").parent.mkdir()  # as of torchrun
    program.symlink_to(faults.FOLDER / "right.py")
    status, lines, before = check_in_forks(["2", program, name], tmp_path)
    assert status == 0 and problems(lines) == [], (lines, before[-2000:])


SCRIPTS = [("singlegpu", 1), ("multigpu", 1), ("multigpu", 3), ("multinode", 3), ("hybrid", 4)]


@pytest.mark.parametrize("folder, processes", SCRIPTS)
def test_mnist_is_right(folder, processes, tmp_path):
    """test_training.py watches all other scripts."""
    command = [f"{processes}", f"{folder}/mnist.py", "--synthetic"]
    status, lines, before = check_in_forks(command, tmp_path, "--steps 20")
    assert status == 0 and problems(lines) == [], (lines, before[-2000:])


@pytest.mark.parametrize("start", [[sys.executable], [*TORCHRUN, 1]])
def test_a_command_as_it_is_typed(start, tmp_path):
    """It starts two processes, by spawn, or one, by torchrun."""
    script = "multigpu/mnist.py --num_gpus 2" if len(start) == 1 else "multinode/mnist.py"
    command = [*start, *f"{ROOT}/{script} --synthetic".split()]
    status, lines, before = faults.check(command, tmp_path, "--steps 6")
    assert status == 0 and problems(lines) == [], (lines, before[-2000:])


def test_data_that_round_differently(tmp_path):
    """Numbers that a data set adds up on other threads: a warning (pytorch #88718)."""
    jitter = "        self.jitter = jitter\n"
    total = "        torch.set_num_threads(args.processes)\n"
    total += "        self.images *= torch.rand(2**22, generator=generator).sum() / 2**21\n"
    edits = [(jitter, total + jitter), ("Images(256, 0, 0.01)", "Images(256, 0, 0)")]
    loop = "    for i, (x, y) in enumerate(loader):\n"
    edits += [(loop, "    ddp.eval()\n" + loop)]
    fault = faults.FAULTS["loss_summed"]._replace(edits=edits)
    status, lines, before = faults.run(fault, tmp_path, check_in_forks, "1")
    assert status == 0, (lines, before[-2000:])
    assert any("samples of step 1 are others, by rounding" in line for line in lines), lines


@pytest.mark.skipif(link.what_is_missing(), reason=f"{link.what_is_missing()}")
def test_two_machines(tmp_path):
    """Two torchruns in two network namespaces, with names of their own: one table."""
    jobs, port = [], next(link.PORTS)
    own_name = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"')
    env = ["env", f"CHECK_FOLDER={tmp_path}/new", "GLOO_SOCKET_IFNAME=veth", "OMP_NUM_THREADS=1"]
    with link.nodes(2) as spaces:
        for rank, space in enumerate(spaces):
            command = [*env, sys.executable, ROOT / "tools/check.py", "--steps", 6, "--"]
            command += [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", 1]
            command += ["--nnodes", 2, "--node_rank", rank, "--master_addr", "10.99.0.1"]
            command += ["--master_port", port, TRAIN]
            command = ["ip", "netns", "exec", space, *own_name, f"node{rank}", *command]
            pipes = {"stdout": subprocess.PIPE, "text": True}
            jobs.append(subprocess.Popen(list(map(str, command)), cwd=tmp_path, **pipes))
        outputs = [job.communicate(timeout=300)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outputs
    assert problems(outputs[0].splitlines()) == [] and "2 in one group" in outputs[0], outputs
    assert "the table is with rank 0" in outputs[1]
