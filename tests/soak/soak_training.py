"""What takes long: real data to a known quality, and all rows of quantize, compiled."""

import os
import shutil
from pathlib import Path

import pytest
from conftest import rows
from test_quantize import SCRIPT, assert_as_good, table, trained  # noqa: F401

PAIRS = "--dataset multi30k --seq_len 16"
SHAKESPEARE = "--dataset {data}/tinyshakespeare/input.txt --seq_len 64"
STEPS = "--dataset mnist --max_steps 300"
FIGURES = {  # command, processes, column: mean and standard deviation over five seeds
    ("images.py", "--dataset mnist --model mlp --epochs 3", 1, "val_acc"): (0.9818, 0.0006),
    ("images.py", STEPS, 2, "val_acc"): (0.9655, 0.0020),
    ("images.py", f"{STEPS} --model autoencoder", 2, "val_loss"): (0.0092, 0.0011),
    ("text.py", "--dataset imdb --epochs 2", 2, "val_acc"): (0.8574, 0.0086),
    ("text.py", "--dataset ag_news --model transformer --epochs 1", 2, "val_acc"): (0.8991, 0.0045),
    ("translation.py", f"{PAIRS} --batch_size 32 --max_steps 60", 2, "val_loss"): (4.675, 0.027),
    ("gpt.py", f"{SHAKESPEARE} --batch_size 12 --max_steps 300", 2, "val_loss"): (2.4107, 0.0035),
}


@pytest.mark.skipif("TEST_DATA_DIR" not in os.environ, reason="no real data: see tests/README.md")
@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: " ".join(figure[:2]))
def test_quality(logged, tmp_path, figure):
    """At most four standard deviations worse than the mean of five seeds."""
    script, command, processes, column = figure
    for entry in Path(os.environ["TEST_DATA_DIR"]).resolve().iterdir():
        (tmp_path / entry.name).symlink_to(entry)  # it may be read-only
    words = command.format(data=tmp_path).split()
    words += ["--data_dir", tmp_path] if "{data}" not in command else []
    folder = "singlegpu" if processes == 1 else "multigpu"
    log = logged(f"{folder}/{script}", *words, processes=processes)
    value, (mean, deviation) = rows(log)[-1][column], FIGURES[figure]
    print("FIGURE", *figure, value)
    worse = (value - mean) * (-1 if column == "val_acc" else 1)
    assert worse < 4 * deviation


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_torchao(attempt, trained, tmp_path):  # noqa: F811
    """All rows keep the quality, compiled, too."""
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    words = ("--snapshot", trained[0], "--dataset", trained[1], "--num_samples", 200, "--rounds", 1)
    status, out, err = attempt(SCRIPT, *words, **cache)  # PyTorch warns of torchao's tensors
    assert status == 0, err
    assert [*tmp_path.glob("**/*.py")], "of torch.compile"
    assert_as_good(table(out))
