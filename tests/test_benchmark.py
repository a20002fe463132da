"""benchmark.py compares commands, at a tiny size. Its commands on links: tests/soak."""

import sys
from pathlib import Path

from conftest import module

NANOGPT = """
print("iter 1: loss 1.0, time 9.00ms, mfu 0%")
print("iter 2: loss 1.0, time 5.00ms, mfu 0%")
"""
SCRIPT = """
import json, os, sys
for rank in (0, 1):
    row = {"rank": rank, "samples/s": float(os.environ["SPEED"]) / (1 + rank), "forward": 2.5}
    print(json.dumps(row), file=open(sys.argv[-1], "a"))
"""


def test_sides_of_a_ratio(run, tmp_path):
    """They are train.py, whose first steps do not count, two of them at once, and a script."""
    (tmp_path / "train.py").write_text(NANOGPT)
    (tmp_path / "script.py").write_text(SCRIPT)
    nanogpt = f"tests/benchmark.py nanogpt --folder {tmp_path}"
    sides = [nanogpt, f"{nanogpt} & {nanogpt}", f"SPEED=1200 {tmp_path}/script.py"]
    out = run("tests/benchmark.py", "ratio", *sides, "--rounds", 2, "--columns", "forward")
    assert [line.strip("| ").split(" | ") for line in out.splitlines()[-3:]] == [
        [sides[0], "2400.0", "1.000 (1.00 to 1.00)", "nan"],
        [sides[1], "4800.0", "2.000 (2.00 to 2.00)", "nan"],
        [sides[2], "1200.0", "0.500 (0.50 to 0.50)", "2.5"],
    ]


def test_a_python_in_a_folder_with_a_space(monkeypatch, tmp_path):
    """As of a virtual environment, and the log, too."""
    (folder := tmp_path / "my venv").symlink_to(sys.prefix)
    (tmp_path / "script.py").write_text(SCRIPT)
    (logs := tmp_path / "my logs").mkdir()
    monkeypatch.setattr(sys, "executable", str(folder / "bin" / Path(sys.executable).name))
    side = f"SPEED=1200 {tmp_path}/script.py"
    [row] = module("tests/benchmark.py").run_side(side, logs)
    assert row == {"rank": 0, "samples/s": 1200, "forward": 2.5}
