"""benchmark.py compares commands, at a tiny size. Its commands on links: tests/soak."""

SCRIPT = """
import json, os, sys
for rank in (0, 1):
    row = {"rank": rank, "samples/s": float(os.environ["SPEED"]) / (1 + rank), "forward": 2.5}
    print(json.dumps(row), file=open(sys.argv[-1], "a"))
"""


def test_sides_of_a_ratio(run, tmp_path):
    """A side may be two commands at once. Not each log has each column."""
    (script := tmp_path / "script.py").write_text(SCRIPT)
    one = f"SPEED=1200 {script}"
    sides = [one, f"{one} & {one}", f"SPEED=600 {script}"]
    out = run("tests/benchmark.py", "ratio", *sides, "--rounds", 2, "--columns", "forward", "comm")
    assert [line.strip("| ").split(" | ") for line in out.splitlines()[-3:]] == [
        [sides[0], "1200.0", "1.000 (1.00 to 1.00)", "2.5", "nan"],
        [sides[1], "2400.0", "2.000 (2.00 to 2.00)", "2.5", "nan"],
        [sides[2], "600.0", "0.500 (0.50 to 0.50)", "2.5", "nan"],
    ]
