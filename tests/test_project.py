"""Copies, imports, commands and files that the project is made of."""

import ast
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, SCRIPTS

LIBRARIES = set("numpy torch torchao torchvision datasets tokenizers sacrebleu tqdm".split())


def check_copies(root, *arguments):
    """Returns the exit status and all output."""
    command = [sys.executable, root / "tests/check_copies.py", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stderr + done.stdout


def test_copies_agree():
    assert check_copies(ROOT)[0] == 0


def test_scripts_stand_alone():
    """They import the standard library and installed packages, and nothing of ours."""
    for script in SCRIPTS:
        for node in ast.walk(ast.parse((ROOT / script).read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [each.name for each in node.names] if isinstance(node, ast.Import) else []
            tops = {name.split(".")[0] for name in names}
            assert tops <= LIBRARIES | sys.stdlib_module_names, (script, tops)


@pytest.fixture
def clone(tmp_path):
    """A copy of the scripts, committed to a repository of its own."""
    ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, tmp_path / "clone", ignore=ignored)
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    for words in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "all"]):
        subprocess.run(["git", *words], cwd=tmp_path / "clone", check=True)
    return tmp_path / "clone"


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_a_drift_is_found_and_fixed(clone):
    """An edit in one copy is carried to the others; of two different edits none wins."""
    edit(clone / "multigpu/images.py", "model.eval()", "model.eval()  # no dropout")
    status, told = check_copies(clone)
    assert status and "evaluate" in told
    assert check_copies(clone, "--fix")[0] == check_copies(clone)[0] == 0
    assert "# no dropout" in (clone / "singlegpu/images.py").read_text()
    for folder in ("multigpu", "multinode"):
        edit(clone / folder / "images.py", "model.eval()", f"model.eval()  # {folder}")
    assert check_copies(clone, "--fix")[0]


def test_other_broken_promises_are_found(clone):
    """A hunk that is not about distribution, a long line, a job file of another text."""
    edit(clone / "multigpu/images.py", "torch.optim.AdamW(", "torch.optim.Adam(")
    edit(clone / "multinode/images.py", "import csv", f"import csv  # {'x' * 100}")
    edit(clone / "slurm/multigpu_gpt.slurm", "set -euo pipefail", "set -eu")
    status, told = check_copies(clone)
    assert status and "optim.Adam(" in told and "columns" in told and "multigpu_gpt.slurm" in told


def test_each_script_has_its_job_file():
    """The two have the same name, and Bash can read the job file."""
    files = sorted((ROOT / "slurm").glob("*.slurm"))
    names = [script.removesuffix(".py").replace("/", "_") for script in SCRIPTS]
    assert [path.stem for path in files] == names
    for path in [*files, ROOT / "slurm/sweep.sh"]:
        assert subprocess.run(["bash", "-n", path]).returncode == 0, path


def test_readme_names_what_exists():
    text = (ROOT / "README.md").read_text()
    names = re.findall(r"\]\(([\w./]+)\)|(?:python|sbatch|bash) ([\w/]+\.\w+)", text)
    assert [name for pair in names for name in pair if not (ROOT / name).exists()] == []


def test_help(fork_server):
    """It names each flag, and there are no more than a person reads."""
    answers = fork_server([[str(ROOT / script), "--help"] for script in SCRIPTS])
    for script, (status, out, _) in zip(SCRIPTS, answers):
        flags = re.findall(r'add\("(--\w+)"', (ROOT / script).read_text())
        assert status == 0 and all(flag in out for flag in flags) and len(flags) <= 26, script
