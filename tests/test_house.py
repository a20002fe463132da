"""Copies, files and commands that the project is made of."""

import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, SCRIPTS


def check_copies(root, *arguments):
    return subprocess.run(
        [sys.executable, root / "tests" / "check_copies.py", *arguments], capture_output=True, text=True
    )


def test_copies_agree():
    done = check_copies(ROOT)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def clone(tmp_path):
    """A copy of the scripts in a repository of its own."""
    for folder in ("singlegpu", "multigpu", "multinode", "hybrid", "quantize", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for command in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "all"],
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def test_drift_is_found_and_fixed(clone):
    script = clone / "multigpu" / "images.py"
    script.write_text(script.read_text().replace("model.eval()", "model.eval()  # no dropout"))
    done = check_copies(clone)
    assert done.returncode == 1 and "evaluate differs" in done.stderr
    assert check_copies(clone, "--fix").returncode == 0
    assert "# no dropout" in (clone / "singlegpu" / "images.py").read_text()
    assert check_copies(clone).returncode == 0


def test_two_different_edits_are_not_fixed(clone):
    for folder, comment in (("multigpu", "one"), ("multinode", "two")):
        script = clone / folder / "images.py"
        script.write_text(script.read_text().replace("model.eval()", f"model.eval()  # {comment}"))
    assert check_copies(clone, "--fix").returncode == 1


def test_a_hunk_that_is_not_about_distribution_is_found(clone):
    script = clone / "multigpu" / "images.py"
    script.write_text(
        script.read_text().replace("    optimizer = torch.optim.AdamW(", "    optimizer = torch.optim.Adam(")
    )
    done = check_copies(clone)
    assert done.returncode == 1 and "optim.Adam(" in done.stderr


def test_readme_names_what_exists():
    text = (ROOT / "README.md").read_text()
    for name in set(re.findall(r"\]\(([\w./]+)\)", text)) | set(
        re.findall(r"(?:python|sbatch|bash) ([\w/]+\.\w+)", text)
    ):
        assert (ROOT / name).exists(), name
    assert len(text.splitlines()) <= 200


def test_help_names_every_flag_with_its_unit_and_default(fork):
    results = fork([[str(ROOT / script), "--help"] for script in SCRIPTS])
    for script, (status, out, err, _) in zip(SCRIPTS, results, strict=True):
        assert status == 0, err
        flags = re.findall(r'add\("(--\w+)"', (ROOT / script).read_text())
        flags_of_many = {"--num_gpus", "--comm_hook", "--timeout"}
        assert len(set(flags) - flags_of_many) <= 20 and all(flag in out for flag in flags)
