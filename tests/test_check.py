"""tools/check.py: it names the faults that are put into scripts by hand, and no others."""

import importlib.util
import subprocess
import sys

import faults
import link
import pytest

ROOT, TRAIN = faults.ROOT, faults.FOLDER / "train.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
BY_NAME = {each.name: each for each in faults.FAULTS}
# Several faults in one script, which do not hide each other: the short form of soak/soak_check.py.
GROUPS = {
    "rate_set_afterwards validates_in_train same_dropout_mask same_numbers_in_ranks other_flags "
    "validation_drops_last written_in_place": "--processes 2 --snapshot {tmp}/s.pt",
    "own_order_in_each_rank schedule_n_times eval_after_validation never_used no_zero_grad": None,
    "no_set_epoch samples_change statistics_differ one_row_for_all clipped_while_scaled": None,
    "zeroed_in_micro_batches averaged_in_each_micro_batch": None,
    "loss_nan weights_in_bf16 not_shuffled layer_without_optimizer": None,
    "input_lost dropout_in_eval same_samples": None,
    "split_differs steps_twice clipped_early layer_made_in_forward": None,
    "rate_0 validation_counts_twice clipped_late autocast_around_the_loop": None,
    "all_ranks_save": None,
    "moved_after_ddp": None,
    "same_numbers_in_epochs": None,
    "never_started_group": None,
    "hangs": None,
    "loss_summed": None,
    "state_in_no_state_dict": None,
    "images_written_in_place images_head_without_optimizer images_same_masks images_one_order "
    "images_input_lost images_change images_validation_lacks_some": None,
    "images_past_ddp images_no_zero_grad images_weights_in_bf16 images_same_samples": None,
}


def problems(lines):
    return [line for line in lines if line.startswith(("ERROR", "warning")) or "failed" in line]


@pytest.mark.parametrize("names", GROUPS)
def test_faults_are_named(names, tmp_path):
    """Each fault of a group comes with its sentence, within 100 columns, and the status is 1."""
    group = [BY_NAME[name] for name in names.split()]
    status, lines, before = faults.run(group, tmp_path, GROUPS[names])
    missing = [each.name for each in group if not faults.is_found(each, lines)]
    assert not missing, (missing, lines, before[-2000:])
    assert status == any(line.startswith("ERROR") for line in lines)
    assert not any("failed itself" in line for line in lines), lines


def test_every_kind_has_a_fault():
    spec = importlib.util.spec_from_file_location("check", ROOT / "tools/check.py")
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    kinds = {name for name in vars(check.Kinds) if name[0] != "_"} | {"against", "resume"}
    assert len(kinds) > 15
    assert kinds - {each.kind for each in faults.FAULTS} == set()


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


def is_right(name, tmp_path):
    """A program of right.py has no finding, in two processes."""
    command = [*TORCHRUN, 2, faults.FOLDER / "right.py", name]
    status, lines, before = faults.check(command, tmp_path)
    assert status == 0 and problems(lines) == [], (lines, before[-2000:])


@pytest.mark.parametrize("name", ["ordinary", "closures"])
def test_right_programs_that_look_odd(name, tmp_path):
    """More are in the soak."""
    is_right(name, tmp_path)


SCRIPTS = {
    "multigpu/mnist.py --num_gpus 2": 0,
    "hybrid/mnist.py": 2,
}
LONG_SCRIPTS = {
    "singlegpu/mnist.py": 0,
    "multigpu/mnist.py --num_gpus 1": 0,
    "multigpu/mnist.py --num_gpus 3": 0,
    "multinode/mnist.py": 1,
    "multinode/mnist.py ": 3,
    "hybrid/mnist.py": 4,
}


def start(script, processes):
    """Returns the command, by torchrun if there are processes."""
    words = (f"{ROOT / script} --synthetic").split()
    return [*TORCHRUN, processes, *words] if processes else [sys.executable, *words]


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_right(script, tmp_path):
    status, lines, before = faults.check(start(script, SCRIPTS[script]), tmp_path, "--steps 6")
    assert status == 0 and problems(lines) == [], (lines, before[-2000:])


def test_data_that_round_differently(tmp_path):
    """Numbers that a data set adds up on other threads: a warning (pytorch #88718)."""
    jitter = "        self.jitter = jitter\n"
    total = "        torch.set_num_threads(args.processes)\n"
    total += "        self.images *= torch.rand(2**22, generator=generator).sum() / 2**21\n"
    edits = [(jitter, total + jitter), ("Images(256, 0, 0.01)", "Images(256, 0, 0)")]
    loop = "    for i, (x, y) in enumerate(loader):\n"
    edits += [(loop, "    ddp.eval()\n" + loop)]
    fault = BY_NAME["loss_summed"]._replace(edits=edits)
    status, lines, before = faults.run([fault], tmp_path)
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
