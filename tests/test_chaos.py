"""Faults: short forms of chaos.py, disks that are full or gone, damaged snapshots, a loss that is not a number."""

import collections
import contextlib
import functools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import chaos
import pytest
import torch
from benchmark import load
from conftest import ROOT, Job, commands_of, rows, wait_for


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return chaos.make_data(tmp_path_factory.mktemp("chaos") / "data")


@pytest.fixture(scope="module")
def undisturbed(fork, data, tmp_path_factory):
    """undisturbed(name) is a job of that name that nothing disturbed."""

    @functools.cache
    def undisturbed(name):
        run = chaos.Run(name, tmp_path_factory.mktemp("whole") / "run", data)
        commands, environment = run.commands()
        for status, _, err, _ in fork(commands, run.folder, environment, together=True):
            assert status == 0, err
        return run

    return undisturbed


@pytest.mark.parametrize("name", ["singlegpu", "multinode, 2 nodes", "hybrid, stages", "hybrid, pipeline"])
def test_killed(data, tmp_path, undisturbed, name):
    """Once, at random; the seed is printed. The others: test_resume_is_bit_identical in test_images.py.

    Not a torchrun of two nodes, for which the other one may wait 300 s.
    """
    seed = random.randrange(1000)
    print("seed", seed)
    run, victims = chaos.Run(name, tmp_path / "broken", data), ("rank",) if "nodes" in name else ("rank", "launcher")
    chaos.kill(run, undisturbed(name), random.Random(seed), 1, collections.Counter(), victims)


@pytest.fixture(scope="module")
def reference(request, undisturbed):
    """With this scope, it runs before its test waits to be alone."""
    return undisturbed(request.param)


@pytest.mark.alone
@pytest.mark.parametrize("reference", ["multigpu", "multinode"], indirect=True)
def test_stopped(data, tmp_path, reference):
    """A process that hangs, here rank 0, is named, and the job ends in time; the same command finishes it."""
    chaos.stop(chaos.Run(reference.name, tmp_path / "broken", data), reference, random.Random(1))


def test_jobs_at_once(data, tmp_path):
    chaos.crowd(5, tmp_path, data)


@pytest.mark.parametrize("folder", ["multigpu", "multinode", "hybrid"])
def test_nothing_outlives_what_launched_it(data, tmp_path, folder):
    """The parent, or torchrun, is killed: the others end."""
    run = chaos.Run("hybrid, stages" if folder == "hybrid" else folder, tmp_path / "run", data)
    (job,) = run.start()
    wait_for(run.snapshot.exists, 120)
    assert len(job.workers()) == 2
    os.kill(job.process.pid, signal.SIGKILL)
    wait_for(lambda: not job.processes(), 30)


@contextlib.contextmanager
def small_disk(folder, megabytes):
    """A file system of so many megabytes, mounted there."""
    if os.geteuid() or sys.platform != "linux":
        assert not os.environ.get("REQUIRE_SLURM")
        pytest.skip("mounting needs root on Linux")
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


ARGUMENTS = ["--dataset", "bigmnist", "--threads", "1", "--batch_size", "24"]


@pytest.mark.parametrize("folder, processes", [("singlegpu", 1), ("multigpu", 2)])
def test_full_disk(run, data, tmp_path, folder, processes):
    """Room for one snapshot and a half: the first one stays whole, no part of another one does, training ends well."""
    with small_disk(tmp_path / "disk", 22) as disk:
        files = ("--snapshot", disk / "s.pt", "--snapshot_every", "10", "--log", disk / "log.csv")
        arguments = [*ARGUMENTS, "--data_dir", data, "--epochs", "2", "--max_steps", "20", *files]
        status, out, err = run(folder, *arguments, processes=processes)
        assert status == 0, err
        assert err.count("warning: snapshot not saved") == 5 and "Traceback" not in err, err  # of 6 that were due
        assert sorted(path.name for path in disk.iterdir()) == ["log.csv", "s.pt"]
        assert torch.load(disk / "s.pt", weights_only=True)["state"]["step"] == 10
        assert len(rows(disk / "log.csv")) == 2 * processes
        (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free))
        status, out, err = run(folder, *arguments[:-1], disk / "other.csv", processes=processes)
        assert status == 0 and "step 10" in out and "warning: log not written" in err, err


def test_folder_disappears(start, data, tmp_path):
    """Training says so, and goes on to its end."""
    (tmp_path / "out").mkdir()
    files = ("--snapshot", tmp_path / "out/s.pt", "--snapshot_every", "5", "--log", tmp_path / "out/log.csv")
    job = start("multigpu", *ARGUMENTS, "--data_dir", data, "--epochs", "3", *files, processes=2)
    wait_for((tmp_path / "out/s.pt").exists)
    (tmp_path / "out").rename(tmp_path / "moved")
    status, out, err = job.wait()
    assert status == 0 and "warning: snapshot not saved" in err and "warning: log not written" in err, err
    assert torch.load(tmp_path / "moved/s.pt", weights_only=True)["state"]["step"] % 5 == 0


def test_read_only_disk(run_many, data, tmp_path):
    """Found out before any training."""
    with small_disk(tmp_path / "disk", 1) as disk:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        cases = [[*ARGUMENTS, "--data_dir", data, name, disk / "file"] for name in ("--snapshot", "--log")]
        for status, _, err, _ in run_many("singlegpu/images.py", cases):
            assert status == 2 and "cannot write" in err and len(err.splitlines()) == 1, err


def test_damaged_snapshots(run, data, tmp_path, capsys):
    """Cut short at every 64th of its length, and with a bit flipped in every 64th: refused, and left as it is."""
    images, snapshot = load("singlegpu"), tmp_path / "s.pt"
    arguments = [*ARGUMENTS, "--data_dir", data, "--model", "mlp", "--epochs", "1", "--max_steps", "2"]
    assert run("singlegpu", *arguments, "--snapshot", snapshot)[0] == 0
    content = snapshot.read_bytes()
    settings = dict(model="mlp", dataset="bigmnist", batch_size=24, learning_rate=1e-3, dropout=0.0, seed=1)
    args = type("Arguments", (), settings | {"snapshot": str(snapshot)})
    model = images.create_model(args, 1, 28)
    parts = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), 1e-3, fused=True)}
    assert images.load_snapshot(args, parts)["epoch"] == 1
    chance, flipped = random.Random(0), 0
    for part in range(64):
        begin, end = len(content) * part // 64, len(content) * (part + 1) // 64
        bit = chance.randrange(8 * begin, 8 * end)
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        for damaged in (content[:begin], bytes(changed)):
            snapshot.write_bytes(damaged)
            try:
                images.load_snapshot(args, parts)
                flipped += 1  # in a byte of the container that says nothing, such as a time
                assert len(damaged) == len(content)
            except SystemExit as end_of_it:
                err = capsys.readouterr().err
                assert end_of_it.code == 2 and "cannot resume from" in err and len(err.splitlines()) == 1, err
            assert snapshot.read_bytes() == damaged
    assert flipped < 3


@pytest.mark.parametrize("folder", ["multigpu", "multinode", "hybrid"])
def test_loss_not_finite_on_one_rank(data, tmp_path, folder):
    """All processes stop together; the snapshot is that of before."""
    text = (ROOT / folder / "images.py").read_text()
    broken = text.replace(
        '    with torch.autocast(images.device.type, DTYPES[args.precision], args.precision != "fp32"):\n',
        '    if os.environ["RANK"] == "1" and torch.rand(1) < 0.02:\n        images = images * float("nan")\n'
        '    with torch.autocast(images.device.type, DTYPES[args.precision], args.precision != "fp32"):\n',
    )
    assert broken != text
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "images.py").write_text(broken)
    snapshot = tmp_path / "s.pt"
    arguments = [*ARGUMENTS, "--data_dir", data, "--epochs", "20", "--snapshot", snapshot, "--snapshot_every", "1"]
    (command,) = commands_of(folder, "images.py", 2, (), arguments)
    command = [part.replace(str(ROOT), str(tmp_path)) for part in command]
    job = Job([sys.executable, *command], tmp_path, {})
    status, out, err = job.wait()
    assert status == 1 and err.count("error: loss not finite") == 1 and "no answer" not in err, err
    assert not job.processes()
    (epoch, step) = map(int, re.search(r"not finite in epoch (\d+) by step (\d+)", err).groups())
    saved = torch.load(snapshot, weights_only=True)
    assert (saved["state"]["epoch"], saved["state"]["step"]) in ((epoch, step - 1), (epoch, 0))
    assert all(weight.isfinite().all() for weight in saved["model"].values())


def listeners(pids):
    """The addresses, in hexadecimal, on which these processes accept connections."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    inodes |= set(re.findall(r"^socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{entry}")))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:  # listening
                found.add(words[1].split(":")[0])
    return found


def test_listens_on_loopback_alone(start, data, tmp_path):
    """On a single node; under torchrun that holds for the processes that train, while torchrun's own store does not."""
    loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    seen = set()
    for folder, script in (("singlegpu", "images.py"), ("multigpu", "images.py"), ("multinode", "images.py")):
        snapshot = tmp_path / f"{folder}.pt"
        arguments = [*ARGUMENTS, "--data_dir", data, "--snapshot", snapshot, "--snapshot_every", "5", "--epochs", "9"]
        job = start(folder, *arguments, processes=2, script=script)
        wait_for(snapshot.exists, 120)
        own = job.workers() if folder == "multinode" else job.processes()
        found = listeners(own)
        assert found <= loopback, (folder, found)
        seen |= found
        job.end()
    assert seen, "the processes do listen to each other"
