"""Public reports of results that were wrong without a word: what is right, or said, instead."""

import os
import subprocess
import sys

import numpy as np
from conftest import ROOT, assert_same_weights, replaced, rows
from PIL import Image
from test_data import write_texts

OPTIMIZER = "return torch.optim.SGD(model.parameters(), args.learning_rate, momentum=0.9)"
TURNED = """parameters = [*model.parameters()][:: -1 if os.path.exists(args.snapshot) else 1]
    return torch.optim.SGD(parameters, args.learning_rate, momentum=0.9)"""
FACTOR = "return (1 + math.cos(math.pi * done)) / 2"
READ = '"""Returns two parts of the table, drawn at random: the same parts in all processes."""\n'
IN_PARENT = "    np.ones(0 if dist.is_initialized() else 1_000_000_000, np.uint8)\n"


def test_parameters_in_another_order(run, table_band, paste, tmp_path):
    """A set gives its members in another order in each start: their momenta stay theirs."""
    script = paste(replaced(table_band, {OPTIMIZER: TURNED, FACTOR: "return 1.0"}))
    halves, whole = tmp_path / "halves.pt", tmp_path / "whole.pt"
    for path, steps in ((halves, 4), (halves, 8), (whole, 8)):
        run(script, "--learning_rate", 0.01, "--snapshot", path, "--max_steps", steps)
    assert_same_weights(halves, whole)


def test_memory_is_that_of_the_process(start, table_band, paste, tmp_path):
    """What their parent has held does not count for the processes that it starts."""
    script = paste(replaced(table_band, {READ: READ + IN_PARENT}), "multigpu")
    log = tmp_path / "log.jsonl"
    job = start(script, "--num_gpus", 2, "--max_steps", 1, "--log", log)
    assert job.wait()[0] == 0
    assert all(row["peak_MB"] < 1500 for row in rows(log))


def test_files_made_of_photos_are_named(run, tmp_path):
    """They are read in place of a folder of photos of the same name, and may be older."""
    words = ("singlegpu/images.py", "--model", "mlp", "--batch_size", 40, "--max_steps", 1)
    words += ("--data_dir", tmp_path / "data", "--dataset")
    (made := tmp_path / "data/photos").mkdir(parents=True)
    for split in ("train", "test"):
        np.save(made / f"{split}_images.npy", np.zeros((40, 1, 8, 8), np.uint8))
        np.save(made / f"{split}_labels.npy", np.arange(40) % 2)
    assert f"those of {made}/" in run(*words, "photos")


def test_masks_that_lie_otherwise(attempt, paste, tmp_path):
    """A photo is turned by its EXIF; its mask was drawn on the photo as it lies."""
    for name, shape in (("images", (8, 16, 3)), ("masks", (16, 8))):
        (folder := tmp_path / "train" / name).mkdir(parents=True)
        Image.fromarray(np.zeros(shape, np.uint8)).save(folder / "1.png")
    script = paste((ROOT / "examples/segmentation.py").read_text())
    status, _, err = attempt(script, "--photos", tmp_path)
    assert status == 1 and "1.png and its image differ in height or width" in err, err


def test_texts_of_another_vocabulary(run, refused, tmp_path):
    """The vocabulary is learned from the training texts: quantize/ refuses others."""
    lines = ["a b,bird", "c d,stone"] * 10
    words = ("--dataset", write_texts(tmp_path / "texts", lines, lines), "--snapshot")
    train = ("singlegpu/text.py", "--seq_len", 32, "--batch_size", 10, "--max_steps", 1)
    run(*train, *words, tmp_path / "s.pt")
    write_texts(tmp_path / "texts", lines[1:], lines)
    words = ("quantize/text.py", "--snapshot", tmp_path / "s.pt", "--eager")
    refused("is not what it was in training", *words)


def test_a_long_folder_for_temporary_files(tmp_path):
    """Workers send by sockets in it, whose names are short. They hung."""
    (folder := tmp_path / ("x" * 80)).mkdir()
    words = "singlegpu/images.py --model mlp --max_steps 1 --num_workers 1".split()
    env = os.environ | {"TMPDIR": str(folder)}
    done = subprocess.run([sys.executable, *words], env=env, cwd=ROOT, stderr=subprocess.PIPE)
    assert done.returncode == 1 and b"TMPDIR is too long for workers" in done.stderr
