"""Each command of benchmark.py runs, at a tiny size, and prints its rows. On links: tests/soak."""

import json

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
    """A line tells the speed of each way to read, and the file is gone."""
    words = ["--folder", tmp_path, "--image_size", 224, "--gigabytes", 0.02]
    out = run(BENCHMARK, "bigmnist", *words, "--seconds", 0.5, "--rounds", 1)
    assert out.count("\n") == 1 and out.count(" images/s") == 3, out
    assert not list(tmp_path.iterdir())
