"""All-reduces over a link of known speed: two network namespaces, joined by a pair of veth that `tc` slows down."""

import json
import math
import os
import subprocess
import sys

import link
import numpy as np
import pytest
from conftest import ROOT, Job, assert_refused, free_port, rows

sys.path.insert(0, str(ROOT / "multigpu"))
import allreduce  # noqa: E402


@pytest.fixture(scope="module")
def run_on_link():
    """run_on_link(script, *arguments, mbit=...) runs it as two nodes of one process; returns all output."""
    if missing := link.what_is_missing():
        assert not os.environ.get("REQUIRE_SLURM"), missing
        pytest.skip(missing)
    with link.two_nodes() as spaces:

        def run_on_link(script, *arguments, mbit, timeout=180):
            link.shape(spaces, mbit)
            commands = link.commands_on(spaces, free_port(), script, *arguments)
            jobs = [Job(command, ROOT, {"GLOO_SOCKET_IFNAME": "veth"}) for command in commands]
            try:
                ended = [job.wait(timeout) for job in jobs]
            finally:
                for job in jobs:
                    job.end()
            for status, _, err in ended:
                assert status == 0, err
            return "".join(out for _, out, _ in ended)

        yield run_on_link


@pytest.mark.alone
@pytest.mark.parametrize("mbit", [200, 1000])
def test_fitted_bandwidth(run_on_link, tmp_path, mbit):
    """That of the link, to 5%; of the fastest of up to three times, for what else this machine does slows them down."""
    out = tmp_path / "link.json"
    sizes = ("--min_bytes", 1 << 20, "--max_bytes", 1 << 24, "--seconds", "2", "--out", out)
    fastest = np.full(5, np.inf)
    for _ in range(3):
        run_on_link("multinode/allreduce.py", *sizes, mbit=mbit)
        found = json.loads(out.read_text())
        assert found["processes"] == found["nodes"] == 2 and found["sizes"] == [1 << bits for bits in range(20, 25)]
        fitted = allreduce.fit_line(found["sizes"], found["seconds"], 2)[1]
        assert found["bandwidth_bytes_per_s"] == pytest.approx(fitted) and fitted * 8 / 1e6 < 1.05 * mbit
        fastest = np.minimum(fastest, found["seconds"])
        measured = allreduce.fit_line(found["sizes"], fastest, 2)[1] * 8 / 1e6
        assert measured < 1.05 * mbit
        if measured > 0.95 * mbit:
            return
    pytest.fail(f"{measured:.1f} Mbit/s of {mbit}")


@pytest.mark.alone
def test_comm_total_is_bytes_over_bandwidth(run_on_link, tmp_path):
    """What a training script says of communication, on a slow link; compressed to bf16, half of it.

    The cnn's first bucket, nearly all of it, is under way when its second one starts and ends: no time must be missing.
    Its steps are long, so that on a busy machine one process waits for the other, which can only add: once in three.
    """

    def share(model, batch, hook):
        """Of bytes over bandwidth."""
        log = tmp_path / "log.csv"
        log.unlink(missing_ok=True)
        arguments = ("--model", model, "--batch_size", batch, "--max_steps", "10", "--epochs", "2")
        run_on_link("multinode/images.py", *map(str, arguments), "--comm_hook", hook, "--log", log, mbit=200)
        later = [row for row in rows(log) if row["epoch"] == 1]
        seconds = np.mean([row["comm_total"] for row in later]) / 10
        return seconds / (later[0]["parameters"] * 4 / (200e6 / 8))

    plain = share("mlp", 32, "none")
    assert plain == pytest.approx(1, rel=0.10)
    assert share("mlp", 32, "bf16") == pytest.approx(plain / 2, rel=0.10)
    for _ in range(3):
        measured = share("cnn", 128, "none")
        assert measured > 0.9
        if measured < 1.1:
            return
    pytest.fail(f"{measured:.2f} times bytes over bandwidth")


def test_allreduce_on_a_node(run, tmp_path):
    """The table has the columns of NCCL's tests; the file what the table has."""
    path = tmp_path / "link.json"
    arguments = ("--max_bytes", 1 << 16, "--seconds", "0.05", "--threads", "1", "--out", path)
    status, out, err = run("multigpu", *arguments, processes=3, script="allreduce.py")
    assert status == 0, err
    table = [line.split("|")[1:-1] for line in out.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in table[0][:4]] == ["bytes", "time_us", "algbw_GB/s", "busbw_GB/s"]
    found = json.loads(path.read_text())
    assert [int(row[0]) for row in table[2:]] == found["sizes"] == [1 << bits for bits in range(12, 17)]
    for row, seconds in zip(table[2:], found["seconds"]):
        size, microseconds, algbw, busbw, _ = map(float, row)
        assert microseconds == pytest.approx(1e6 * seconds, abs=0.06)
        assert algbw == pytest.approx(size / seconds / 1e9, abs=6e-4)
        assert busbw == pytest.approx(algbw * 4 / 3, abs=1e-3)
    assert "sums right" in out and found["processes"] == 3 and found["nodes"] == 1


def test_fit_finds_the_line():
    """Of exact times, exactly; of noisy ones, nearly; never a negative latency."""
    sizes = [1 << bits for bits in range(12, 28)]
    for processes in (2, 5):
        exact = [50e-6 + size * 2 * (processes - 1) / processes / 1.25e9 for size in sizes]
        latency, bandwidth, errors = allreduce.fit_line(sizes, exact, processes)
        assert latency == pytest.approx(50e-6) and bandwidth == pytest.approx(1.25e9) and abs(errors).max() < 1e-9
        noisy = np.array(exact) * np.random.default_rng(0).normal(1, 0.05, len(sizes))
        latency, bandwidth, errors = allreduce.fit_line(sizes, noisy, processes)
        assert latency == pytest.approx(50e-6, rel=0.1) and bandwidth == pytest.approx(1.25e9, rel=0.1)
        assert 0.01 < math.sqrt((errors**2).mean()) < 0.1
    latency, bandwidth, _ = allreduce.fit_line([1000, 2000], [1e-6, 3e-6], 2)
    assert latency == 0 and 1000 / 1e-6 > bandwidth > 2000 / 3e-6


def test_a_wrong_sum_is_found(run, tmp_path):
    """A sum that is wrong in one element on one process ends the measurement."""
    text = (ROOT / "multigpu" / "allreduce.py").read_text()
    broken = text.replace("    wrong = (", "    if rank == 1:\n        buffer[5] += 1\n    wrong = (")
    assert broken != text
    (tmp_path / "multigpu").mkdir()
    (tmp_path / "multigpu" / "allreduce.py").write_text(broken)
    command = [sys.executable, tmp_path / "multigpu" / "allreduce.py", "--num_gpus", "2", "--max_bytes", "65536"]
    done = subprocess.run(
        [*map(str, command), "--seconds", "0.01"],
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode != 0 and "1 of 1024 elements wrong on rank 1" in done.stderr, done.stderr


def test_allreduce_bad_input(run_many, tmp_path):
    cases = {
        ("--num_gpus", "1"): "one process has nobody to send to",
        ("--num_gpus", "0"): "--num_gpus 0 is out of range",
        ("--num_gpus", "2", "--min_bytes", "2"): "--min_bytes 2, --max_bytes",
        ("--num_gpus", "2", "--max_bytes", "8192"): "--max_bytes 8192",
        ("--num_gpus", "2", "--seconds", "nan"): "--seconds nan is out of range",
        ("--num_gpus", "2", "--out", tmp_path): "cannot write",
        ("--num_gpus", "2", "--out", tmp_path / "no" / "link.json"): "cannot write",
    }
    assert_refused(run_many("multigpu/allreduce.py", cases), cases)
    assert_refused(run_many("multinode/allreduce.py", [()]), {(): "start it with torchrun"})
