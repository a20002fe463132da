"""allreduce.py: its table, its file, its fit, and that it sees a wrong sum."""

import json
import math

import numpy as np
import pytest
from conftest import ROOT
from test_models import module

SIZES = ("--min_bytes", 1 << 12, "--max_bytes", 1 << 16, "--seconds", "0.05")


def test_table_is_that_of_the_file(run, tmp_path):
    """The columns of NCCL's tests, and the same times in the file."""
    path = tmp_path / "link.json"
    out = run("multigpu/allreduce.py", *SIZES, "--out", path, processes=3)
    table = [line.split("|")[1:-1] for line in out.splitlines() if line[:1] == "|"]
    names = [cell.strip() for cell in table[0][:4]]
    assert names == ["bytes", "time_us", "algbw_GB/s", "busbw_GB/s"]
    found = json.loads(path.read_text())
    assert [int(row[0]) for row in table[2:]] == found["sizes"] == [1 << n for n in range(12, 17)]
    for row, seconds in zip(table[2:], found["seconds"]):
        size, microseconds, algbw, busbw = map(float, row[:4])
        assert microseconds == pytest.approx(1e6 * seconds, abs=0.06)
        assert algbw == pytest.approx(size / seconds / 1e9, abs=6e-4)
        assert busbw == pytest.approx(4 / 3 * size / seconds / 1e9, abs=6e-4)
    assert (found["processes"], found["nodes"]) == (3, 1) and 0 < found["compute_rate"] <= 1
    assert 1e-4 < found["matmul_tflops"]["fp32"] < 1e3 and found["matmul_tflops"]["bf16"] > 0


def test_fit_finds_the_line():
    """Of exact times, exactly; of noisy ones, nearly; never a negative latency."""
    fit_line, sizes = module("multigpu/allreduce.py").fit_line, [1 << n for n in range(12, 28)]
    for count in (2, 5):
        exact = [50e-6 + size * 2 * (count - 1) / count / 1.25e9 for size in sizes]
        latency, bandwidth, errors = fit_line(sizes, exact, count)
        assert latency == pytest.approx(50e-6) and bandwidth == pytest.approx(1.25e9)
        noisy = np.array(exact) * np.random.default_rng(0).normal(1, 0.05, len(sizes))
        latency, bandwidth, errors = fit_line(sizes, noisy, count)
        assert (latency, bandwidth) == pytest.approx((50e-6, 1.25e9), rel=0.1)
        assert 0.01 < math.sqrt((errors**2).mean()) < 0.1
    assert fit_line([1000, 2000], [1e-6, 3e-6], 2)[0] == 0


def test_a_wrong_sum_is_found(attempt, tmp_path):
    """A sum that is wrong in one element on one process ends the measurement."""
    text, check = (ROOT / "multigpu/allreduce.py").read_text(), "        if (buffer !="
    (copy := tmp_path / "multigpu/allreduce.py").parent.mkdir()
    copy.write_text(text.replace(check, f"        buffer[5] += dist.get_rank()\n{check}"))
    status, _, err = attempt(copy, *SIZES, processes=2)
    assert status and "rank 1: an all-reduce of 4096 bytes gave a wrong sum" in err, err
