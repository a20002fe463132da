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


def test_report(tmp_path):
    """Speedup, efficiency and R of two runs whose rows are known."""
    columns = (
        "run,epoch,rank,model,dataset,precision,processes,batch_size,nodes,device,threads,grad_accum_steps,comm_hook,"
        "compile,time,samples/s,comm,comm_total,R,skew"
    )
    lines = [
        columns,
        "a,0,0,cnn,synthetic,fp32,1,64,1,CPU,1,1,,False,9,10,0,0,nan,0",
        "a,1,0,cnn,synthetic,fp32,1,64,1,CPU,1,1,,False,4,100,0,0,nan,0",
    ]
    lines += [f"b,1,{rank},cnn,synthetic,fp32,2,64,1,CPU,1,1,none,False,2,180,0.1,0.5,3.5,0.1" for rank in (0, 1)]
    (tmp_path / "log.csv").write_text("\n".join([*lines, "b,2,0,cnn,syn"]))
    done = subprocess.run([sys.executable, ROOT / "report.py", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "| cnn | strong | 2 | 1 | 64 | none | 2 | 180 | 1.8 | 0.9 | 0.1 | 0.5 | 3.5 | 0.1 |" in done.stdout
    assert subprocess.run([sys.executable, ROOT / "report.py", tmp_path / "none.csv"]).returncode != 0
