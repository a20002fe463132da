"""The commands of each page, typed one after another in a copy of the project, at small sizes."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import pyarrow.parquet as parquet
from conftest import ROOT, Job, free_port
from test_examples import TEXTS, hub  # noqa: F401
from test_guards import copy_with
from test_pages import PAGES, commands_of, in_one_line, made_small, not_typed
from test_project import write_own_files

# A train.py of a reader's own, which torchrun may start.
TRAIN = """import os
import runpy

folder = "multinode" if "RANK" in os.environ else "singlegpu"
runpy.run_path(f"{folder}/images.py", run_name="__main__")
"""
OF_DEVELOPERS = ("CONTRIBUTING.md", "tests/README.md")  # readers who change this project
REPLACED = {  # what stands for something on a page: what is there in the copy
    r"--nnodes=2 --nproc_per_node=4": "--nnodes=1 --nproc_per_node=2",
    r"\bNODES\b": "--standalone --nproc_per_node=2",
    r"torchrun \.\.\. ": "torchrun --standalone --nproc_per_node=2 -- ",
    r"/shared/new": "shared_new",  # a folder that all machines see
    r"\bDATA\b": "data",
    r"\bTEXT\b": "my.txt",
    r"\bstudy NAME\b": "study gpt",
    r"in 1 2 4 8\b": "in 1 2",
    r"slurm/sweep\.sh ": "slurm/sweep.sh --dry_run ",
    r"tensorboard --logdir": "tensorboard --inspect --logdir",  # it would serve for ever
    r"^make ": "make -o .venv/installed DEMO='--synthetic --epochs 1 --batch_size 6000' ",
    r"/path/to/this/repository": str(ROOT),  # with its emulator
}
SHELL = f"""set -e
export PATH="{Path(sys.executable).parent}:$PATH" HF_HUB_OFFLINE=1 TORCH_HOME=weights
"""


def prepare(folder):
    """Makes a copy of the project with the environment that a reader has made, and a train.py."""
    copy_with(None, folder)
    commit = "git -c user.name=a -c user.email=a@localhost commit -qm copy"
    subprocess.run(f"git init -q && git add . && {commit}", shell=True, check=True, cwd=folder)
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "train.py").write_text(TRAIN)


def write_files(folder, page):
    """Writes the other files that a page takes for granted."""
    write_own_files(folder)
    task = folder / "task.py"
    if page == "examples/README.md":
        task.write_text(TEXTS["README"])
    if page == "hybrid/README.md":
        shutil.copy(folder / "multigpu/my_model.py", folder / "hybrid")
        finish = re.search("`(def finish.*?)`", (ROOT / page).read_text())[1]
        task.write_text(f"{task.read_text()}\n\n{finish}\n")
    shutil.copy(folder / "train.py", folder / "one_gpu.py")
    shutil.copy(folder / "my.txt", folder / "input.txt")
    shutil.copy(folder / "path/to/photos/val/cat/0.png", folder / "photo.jpg")
    for name in ("inside.json", "between.json"):
        shutil.copy(folder / "pictures/link.json", folder / name)
    rows = [f"{number},{number % 7},{number % 3}" for number in range(100)]
    (folder / "table.csv").write_text("\n".join(["a,b,target", *rows]))
    (folder / "cells/one").mkdir(parents=True)
    for number in range(12):
        (folder / f"cells/one/{number}.tif").write_text("a cell")


def link_data(folder, page, hub, data):  # noqa: F811
    """Puts data where names of the Hub are read, and for results.md a part of the real ones."""
    links = {"distilbert/distilbert-base-uncased": hub / "bert"}
    links["stanfordnlp/imdb"] = data / "tables"
    if page == "results.md":
        real = Path(os.environ["TEST_DATA_DIR"]).resolve()
        links["data/MNIST"] = real / "MNIST"
        for path in real.glob("*/*.parquet"):
            rows = parquet.read_table(path)
            some = folder / "data" / path.relative_to(real)
            some.parent.mkdir(parents=True, exist_ok=True)
            parquet.write_table(rows.take([*range(0, len(rows), 20)]), some)
    for name, path in links.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(path)


def type_in(folder, command):
    """Types a command in a shell of its own. Returns its status, output and errors."""
    job = Job(["bash", "-c", SHELL + command], folder)
    try:
        return job.wait()
    finally:
        job.end()


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_end_well(request, tmp_path, page, hub, data):  # noqa: F811
    """Those that pages.toml does not list. Variables that one sets hold for the later ones."""
    if page == "results.md" and "TEST_DATA_DIR" not in os.environ:
        pytest.skip("no real data: see tests/README.md")
    if page == "tests/README.md":
        request.getfixturevalue("emulator")
    prepare(tmp_path / "copy")
    if page not in OF_DEVELOPERS:
        write_files(tmp_path / "copy", page)
        link_data(tmp_path / "copy", page, hub, data)
    replaced = REPLACED | {"HEAD_NODE:29400": f"localhost:{free_port()}"}
    listed, variables, failed = not_typed(), "", []
    for command in commands_of((ROOT / page).read_text()):
        if in_one_line(command) in listed:
            continue
        typed = made_small(command)
        assert typed is not None, f"nobody knows {command}: see test_pages.py"
        for words, others in replaced.items():
            typed = re.sub(words, lambda _, others=others: others, typed)
        if re.match("[a-z]+=", typed):
            variables += f"{typed}\n"
        start = time.monotonic()
        status, out, err = type_in(tmp_path / "copy", variables + typed)
        print(f"TYPED {page}: {time.monotonic() - start:.0f} s, status {status}: {typed}")
        if status != (1 if typed.startswith("diff ") else 0):
            failed.append(f"{typed}\n{out[-1000:]}\n{err[-2000:]}")
    assert not failed, f"{len(failed)} failed:\n\n" + "\n\n".join(failed)
