"""Prove that what bears the same name in two scripts has the same text, and that folders differ by distribution alone.

    python tests/check_copies.py          # exit status 1 and a diff for each drifted copy
    python tests/check_copies.py --fix    # carry an edit made in one file to its copies

With --fix the text that the last commit does not have wins; where two files were edited differently, none does.
"""

import argparse
import ast
import difflib
import itertools
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("singlegpu", "multigpu", "multinode", "hybrid", "quantize")
MAY_DIFFER = {"main", "parse_args", "create_model", "create_dataloader", "train", "__doc__"}
DISTRIBUTION = re.compile(
    r"rank|world_size|dist\.|distributed|ddp|comm_|comm\b|all_reduce|no_sync|nullcontext|process|spawn|torchrun|node|"
    r"num_gpus|launch|cleanup|atexit|leave|socket|import (ctypes|logging|signal|threading)|timedelta|timeout|"
    r"multiprocessing|singlegpu|multigpu|GPUs?\b|to_come|stop\b|seconds_of|SIGNALS = ",
    re.I,
)


def blocks(source):
    """Each top-level function, class and constant: name -> (first line, last line, text), lines counted from 0.

    Comment lines right above a block belong to it.
    """
    lines, found = source.splitlines(keepends=True), {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            name, first = node.name, min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, first = node.targets[0].id, node.lineno - 1
        else:
            continue
        while first and lines[first - 1].startswith("#"):
            first -= 1
        found[name] = first, node.end_lineno, "".join(lines[first : node.end_lineno])
    return found


def committed(path):
    """The file's text in the last commit, or nothing."""
    name = path.relative_to(ROOT).as_posix()
    show = subprocess.run(["git", "show", f"HEAD:{name}"], cwd=ROOT, capture_output=True, text=True)
    return show.stdout if show.returncode == 0 else ""


def drifted(paths):
    """Yields (name, {path: text}) for each block whose copies differ."""
    texts = {}
    for path in paths:
        for name, (_, _, text) in blocks(path.read_text()).items():
            # A constant describes its task: it must agree between folders, not between tasks, nor with hybrids.
            key = name if not name.isupper() else (path.parent.name == "hybrid", path.name, name)
            texts.setdefault(key, {})[path] = text
    for name, copies in texts.items():
        if name not in MAY_DIFFER and len(set(copies.values())) > 1:
            yield name if isinstance(name, str) else name[-1], copies


def fix(name, copies):
    """Write the one text that is new since the last commit to all copies; returns whether there was one."""
    old = {path: blocks(committed(path)).get(name, (0, 0, ""))[2] for path in copies}
    new = {text for path, text in copies.items() if text != old[path]}
    if len(new) != 1:
        return False
    for path in copies:
        lines = path.read_text().splitlines(keepends=True)
        first, last, _ = blocks(path.read_text())[name]
        lines[first:last] = new
        path.write_text("".join(lines))
    return True


def foreign_hunks(a, b):
    """The hunks between two files in which no line is about distribution."""
    left, right = a.read_text().splitlines(), b.read_text().splitlines()
    for tag, i, j, k, m in difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        if tag != "equal" and not DISTRIBUTION.search(text := "\n".join(left[i:j] + right[k:m])) and text.strip():
            yield f"{a.relative_to(ROOT)}:{i + 1} against {b.relative_to(ROOT)}:{k + 1}\n{text}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fix", action="store_true", help="carry an edit made in one file to its copies")
    args = parser.parse_args()
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]
    problems = []
    for name, copies in drifted(paths):
        where = ", ".join(str(path.relative_to(ROOT)) for path in copies)
        if args.fix and fix(name, copies):
            print(f"{name}: carried to {where}")
            continue
        variants = sorted(set(copies.values()))
        problems.append(
            f"{name} differs between {where}\n"
            + "".join(
                difflib.unified_diff(variants[0].splitlines(keepends=True), variants[1].splitlines(keepends=True))
            )
        )
    for first, second in itertools.pairwise(FOLDERS[:3]):
        for path in sorted((ROOT / first).glob("*.py")):
            if (other := ROOT / second / path.name).exists():
                problems += foreign_hunks(path, other)
    print(*problems, sep="\n\n", file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
