"""The guards of the collection fail where what they guard is broken: a row of guards.py each."""

import ast
import inspect
import re
import shutil
import subprocess
import sys

import pytest
import test_examples
import test_flags
import test_pages
import test_project
from conftest import ROOT
from guards import GUARDS, QUICK

MODULES = {
    "test_project": test_project,
    "test_pages": test_pages,
    "test_examples": test_examples,
    "test_flags": test_flags,
}


def copy_with(guard, folder):
    """A copy of the project with the change of a guard. None: a copy as it is."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "runs")
    shutil.copytree(ROOT, folder, ignore=ignored)
    if guard is None:
        return folder
    path = folder / guard.path
    text = path.read_text() if path.exists() else ""
    if guard.new is None:
        path.unlink()
    elif guard.old:
        assert text.count(guard.old) == 1, f"{guard.path} has another text: {guard.old!r}"
        path.write_text(text.replace(guard.old, guard.new))
    else:
        path.write_text(text + guard.new)
    return folder


def run_tests(copy, *tests):
    """Runs tests in a copy by a pytest of their own. Returns its status, and what it printed."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider"]
    command += ["-o", "python_files=test_*.py soak_*.py", *[f"tests/{test}" for test in tests]]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def call(guard, copy, tmp_path, monkeypatch):
    """Calls the test of a guard on a copy."""
    module, name, parameter = re.fullmatch(r"(\w+)\.py::(\w+)(?:\[(.*)\])?", guard.test).groups()
    monkeypatch.setattr(MODULES[module], "ROOT", copy)
    test = getattr(MODULES[module], name)
    arguments = {"tmp_path": tmp_path, "page": parameter}
    test(**{name: arguments[name] for name in inspect.signature(test).parameters})


@pytest.mark.parametrize("guard", QUICK, ids=lambda guard: guard.change)
def test_a_guard_fails(guard, tmp_path, monkeypatch):
    """On a copy of the project with the change, and on no other."""
    (tmp_path / "whole").mkdir()
    call(guard, copy_with(None, tmp_path / "as it is"), tmp_path / "whole", monkeypatch)
    (tmp_path / "broken").mkdir()
    copy = copy_with(guard, tmp_path / "copy")
    with pytest.raises(AssertionError):
        call(guard, copy, tmp_path / "broken", monkeypatch)


def test_each_guard_has_a_row():
    """Each test of these files has a row of guards.py, and each row one of the page's table."""
    tests = set()
    for name in MODULES:
        tree = ast.parse((ROOT / f"tests/{name}.py").read_text())
        found = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        tests |= {f"{name}.py::{each}" for each in found if each.startswith("test_")}
    assert tests - {guard.test.partition("[")[0] for guard in GUARDS} == set(), "without a row"
    page = (ROOT / "tests/README.md").read_text()
    for guard in GUARDS:
        test = guard.test.partition("[")[0].partition("::")[2]
        assert f"| {guard.guard} | {guard.change} | {test} |" in page


def test_a_change_that_is_not_there_is_told(tmp_path):
    """A row whose text has gone is an error, and no guard that has failed."""
    with pytest.raises(AssertionError, match="another text"):
        copy_with(QUICK[0]._replace(old="no such text"), tmp_path / "copy")


def test_the_changes_fit_the_files():
    """Those of the soak, too: their texts are there once."""
    for guard in GUARDS:
        if guard.old:
            assert (ROOT / guard.path).read_text().count(guard.old) == 1, guard
