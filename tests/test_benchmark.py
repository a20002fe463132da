"""Each command of benchmark.py runs, at a tiny size, and prints its rows."""

import json

import link
import pytest

BENCHMARK = "tests/benchmark.py"
NANOGPT = """
print("iter 1: loss 1.0, time 9.00ms, mfu 0%")
print("iter 2: loss 1.0, time 5.00ms, mfu 0%")
"""


def test_sides_of_a_ratio_take_turns(run, data, tmp_path):
    """Its sides are train.py, whose first steps do not count, two of them at once, and a script."""
    (tmp_path / "train.py").write_text(NANOGPT)
    nanogpt = f"{BENCHMARK} nanogpt --folder {tmp_path}"
    small = "--d_model 32 --n_heads 2 --num_layers 2 --seq_len 32 --batch_size 12 --max_steps 5"
    script = f"OMP_NUM_THREADS=1 singlegpu/gpt.py --dataset {data}/words.txt {small}"
    sides = [nanogpt, f"{nanogpt} & {nanogpt}", script]
    out = run(BENCHMARK, "ratio", *sides, "--rounds", 1, "--columns", "forward")
    rows = [line.strip("| ").split(" | ") for line in out.splitlines()[-3:]]
    assert rows[0] == [sides[0], "2400.0", "1.000 (1.00 to 1.00)", "nan"]
    assert rows[1] == [sides[1], "4800.0", "2.000 (2.00 to 2.00)", "nan"]
    assert rows[2][0] == script and float(rows[2][1]) > 0 and float(rows[2][3]) > 0


def test_the_example_of_others_trains(run, data, tmp_path):
    log = tmp_path / "log.jsonl"
    run(BENCHMARK, "classic", "--data_dir", data, "--max_steps", 2, "--log", log)
    assert json.loads(log.read_text())["samples/s"] > 0


def test_steps_to_a_loss(run, data):
    """A larger batch needs no more steps; a loss that is not reached is told."""
    words = [f"singlegpu/images.py --dataset mnist --data_dir {data} --model mlp", "--loss", 1.5]
    words += ["--batch_sizes", 8, 256, "--learning_rates", 1e-3, 1e-9, "--max_steps", 200]
    out = run(BENCHMARK, "steps", *words)
    small, large = [float(line.split(" | ")[2]) for line in out.splitlines()[-2:]]
    assert 0 < large < small < 200, out
    assert "inf" in run(BENCHMARK, "steps", *words, "--loss", 0, "--max_steps", 20)


def test_ways_to_read_a_large_file(run, tmp_path):
    """A line tells speed and memory of each way to read, and the file is gone."""
    words = ["--folder", tmp_path, "--image_size", 224, "--gigabytes", 0.02]
    out = run(BENCHMARK, "bigmnist", *words, "--seconds", 0.5, "--rounds", 1)
    assert out.count("\n") == 1 and out.count(" images/s (") == 3, out
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(link.what_is_missing(), reason=f"{link.what_is_missing()}")
def test_predicted_beside_measured(run):
    """Four nodes, from what is measured on one and two. Only a wrong model misses by a quarter."""
    words = "--nodes 4 --mbit 100 --seconds 0.5 --max_bytes 4194304".split()
    words += ["--models", "images, mlp"]
    for _ in range(3):  # other work can disturb a measurement
        out = run(BENCHMARK, "predict", *words)
        rows = [line.strip("| ").split(" | ") for line in out.splitlines() if line[:1] == "|"][2:]
        [row] = rows
        assert row[:3] == ["images, mlp", "100", "4"]
        if (error := abs(float(row[5].rstrip("%")))) < 25:
            break
    assert error < 25, row


@pytest.mark.skipif(link.what_is_missing(), reason=f"{link.what_is_missing()}")
def test_what_would_help_is_tried(run, tmp_path):
    """On such a link each of these is nearly twice as fast. On three nodes, 64 becomes 63."""
    words = "--nodes 3 --mbit 100 --seconds 0.5 --max_bytes 4194304 --models".split()
    names = ["--comm_hook bf16", "twice the batch", "a link twice as fast"]
    logs = ["--logs", tmp_path / "logs"]
    out = run(BENCHMARK, "changes", *words, "images, mlp", "--changes", *names, *logs)
    rows = [line.strip("| ").split(" | ") for line in out.splitlines() if line[:1] == "|"][2:]
    assert [row[:4] for row in rows] == [["images, mlp", "100", "3", name] for name in names]
    assert all(1.8 < float(row[4]) < 2.2 and float(row[5]) > 1.25 for row in rows), rows
    assert " of 3 are within 10%, " in out
    logs = [json.loads(path.read_text().splitlines()[-1]) for path in tmp_path.glob("logs/*.jsonl")]
    found = sorted((row["processes"], row["batch_size"], row["comm_hook"]) for row in logs)
    plain = (3, 63, "none")
    assert found == [(1, 64, "none"), (3, 63, "bf16"), plain, plain, (3, 126, "none")]
    assert {row["script"] for row in logs} == {"multinode/images.py"}
