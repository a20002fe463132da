"""Each command of benchmark.py runs, at a tiny size, and prints its rows."""

import json

import link
import pytest

BENCHMARK = "tests/benchmark.py"
NANOGPT = """
print("iter 1: loss 1.0, time 9.00ms, mfu 0%")
print("iter 2: loss 1.0, time 5.00ms, mfu 0%")
"""
READS_BY_WINDOWS = """
def batches(split, args, epoch, steps, device):
    yield None
    yield from steps
"""


def test_ratio(run, data, tmp_path):
    """Its sides are train.py, whose first steps do not count, two of them at once, and a script."""
    (tmp_path / "train.py").write_text(NANOGPT)
    nanogpt = f"{BENCHMARK} nanogpt --folder {tmp_path}"
    script = f"OMP_NUM_THREADS=1 singlegpu/gpt.py --dataset {data}/words.txt --max_steps 2"
    sides = [nanogpt, f"{nanogpt} & {nanogpt}", script]
    out = run(BENCHMARK, "ratio", *sides, "--rounds", 1, "--columns", "forward")
    rows = [line.strip("| ").split(" | ") for line in out.splitlines()[-3:]]
    assert rows[0] == [sides[0], "2400.0", "1.000 (1.00 to 1.00)", "nan"]
    assert rows[1] == [sides[1], "4800.0", "2.000 (2.00 to 2.00)", "nan"]
    assert rows[2][0] == script and float(rows[2][1]) > 0 and float(rows[2][3]) > 0


def test_classic(run, data, tmp_path):
    log = tmp_path / "log.jsonl"
    run(BENCHMARK, "classic", "--data_dir", data, "--max_steps", 2, "--log", log)
    assert json.loads(log.read_text())["samples/s"] > 0


@pytest.mark.parametrize("size", [28, 224])
def test_bigmnist(run, tmp_path, size):
    """A line tells speed and memory of each way to read, and the file is gone."""
    (tmp_path / "old/singlegpu").mkdir(parents=True)
    (tmp_path / "old/singlegpu/images.py").write_text(READS_BY_WINDOWS)
    (tmp_path / "files").mkdir()
    words = ["--folder", tmp_path / "files", "--old", tmp_path / "old", "--image_size", size]
    words += ["--gigabytes", 0.02, "--seconds", 0.5, "--rounds", 1]
    out = run(BENCHMARK, "bigmnist", *words)
    assert out.count("\n") == 1 and out.count(" images/s (") == 4, out
    assert not list((tmp_path / "files").iterdir())


@pytest.mark.skipif(link.what_is_missing(), reason=f"{link.what_is_missing()}")
def test_predict(run, tmp_path):
    words = ["--models", "images, mlp", "--max_steps", 2, "--mbit", 0, "--rounds", 1]
    words += ["--seconds", 0.01, "--picture", tmp_path / "picture.png"]
    out = run(BENCHMARK, "predict", *words)
    assert out.splitlines()[-1].startswith("| images, mlp | not slowed down | ")
    assert (tmp_path / "picture.png").exists()
