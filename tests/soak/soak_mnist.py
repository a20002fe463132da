"""`make demo`, as a user types it."""

import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, replaced
from test_mnist import assert_quantized, numbers


def test_make_demo(tmp_path):
    """One process, two, the speedup, and int8. The images can be learned, not at once.

    There are a fifth as many images as for a user, and speeds are measured once. The environment is
    there already (-o).
    """
    (folder := tmp_path / "my folder").mkdir()
    for name in ("singlegpu", "multigpu", "quantize"):
        (folder / name).mkdir()
        text = replaced((ROOT / name / "mnist.py").read_text(), {"60_000 if": "12_000 if"})
        (folder / name / "mnist.py").write_text(text.replace("range(20)", "range(1)"))
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "tests/helpers").mkdir(parents=True)
    shutil.copy(ROOT / "tests/helpers/demo.awk", folder / "tests/helpers")
    (folder / ".venv").symlink_to(sys.prefix)
    command = "make -o .venv/installed demo".split()
    command.append("DEMO=--synthetic --epochs 1 --batch_size 120")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    totals = re.findall(r"^total +([\d.]+)", done.stdout, re.M)
    [told] = numbers("Two processes are", done.stdout)
    assert told == pytest.approx(float(totals[0]) / float(totals[1]), abs=0.01)
    assert 0.5 < numbers("train_loss", done.stdout)[0]
    assert 0.9 < numbers("val_acc", done.stdout)[-1] < 0.999
    assert_quantized(done.stdout, done.stdout)
