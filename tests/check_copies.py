"""Prove what the collection promises of its files.

    python tests/check_copies.py          # exit status 1, and a diff for each broken promise
    python tests/check_copies.py --fix    # carry an edit made in one script to its copies

A section is the same in three folders, or in the four scripts of a folder. What bears the same name
has the same text. --fix carries the text of a copy if no other copy is new since the last commit.
No file has more lines than its budget.
"""

import ast
import difflib
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

os.chdir(Path(__file__).resolve().parent.parent)
FOLDERS = ("singlegpu", "multigpu", "multinode", "hybrid", "quantize")
TASKS = ("images", "text", "translation", "gpt")
# The lines that a file or the files of a folder may have. Who adds a line takes one away.
BUDGETS = """
    singlegpu/*.py: mnist 102, images 480, gpt 460, text 510, translation 560, make_bigmnist 130
    multigpu/*.py: mnist 142, images 590, gpt 575, text 620, translation 670
    multinode/*.py: mnist 149, images 590, gpt 575, text 620, translation 670
    hybrid/*.py: mnist 175, images 690, gpt_fsdp 640, gpt_pipeline 750
    quantize/*.py: mnist 68, gpt 300
    tools/*.py: check 1100, report 340, predict 419, allreduce 251
    examples/*.py: * 450
    slurm/*: sweep.sh 134, README.md 100
    *.md: README 230, results 450
    tests/*.py: check_copies 149, conftest 352, gpu 280
    tests/**/*.py: * 5756
    tests/faults/*.txt: * 567
"""
BUDGETS = {
    row.split(":")[0].strip().replace("*", name): int(lines)
    for row in BUDGETS.strip().splitlines()
    for name, lines in re.findall(r"(\S+) (\d+)", row)  # *: all files together
}
PATHS = [path for folder in (*FOLDERS, "tools") for path in sorted(Path(folder).glob("*.py"))]
TITLE = re.compile(r"^(# == .* =+)\n", re.M)
YOURS, RUN, TIMING = TITLE.findall(Path("multigpu/images.py").read_text())
# The names whose text may differ: everywhere, and from multigpu in a folder or in a script.
FREE = "head main parse_args parse_run_args".split()
OWN = {
    "singlegpu": """training_batches evaluate log_row STEP_PHASES last_step mark count_marks
        take_marks print_marks""",
    "hybrid/images": "set_up compare_weights evaluate now timed_hook take_marks",
    "hybrid/gpt_pipeline": """set_up training_batches add_up compare_weights evaluate STEP_PHASES
        print_marks""",
    "hybrid/gpt_fsdp": "DTYPES SENT_TYPES set_up compare_weights evaluate sent count_marks",
    "hybrid/mnist": "print_marks",
    "tools/predict": "runs_of",  # it sums up a step, report.py an epoch
}


def pieces(source):
    """Returns {name: text} of the head, the sections by their titles, and each top-level name."""
    head, *sections = TITLE.split(source.partition("\nif __name__ == ")[0])
    found = {"head": head} | dict(zip(sections[::2], sections[1::2]))
    lines = source.splitlines(keepends=True)
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Assign)):
            name = getattr(node, "name", "") or ast.unparse(node.targets[0])
            starts = [part.lineno for part in (node, *getattr(node, "decorator_list", ()))]
            found[name] = "".join(lines[min(starts) - 1 : node.end_lineno])
    return found


@functools.cache
def task_of(path):
    """Returns the names of the first section of a script."""
    return pieces("".join(TITLE.split(path.read_text())[:3]))


def group_of(path, name):
    """Returns what the copies that have the same text of this name share; None: it may differ."""
    folder, task = path.parent.name, path.stem.split("_")[0]  # that of gpt_fsdp is gpt
    own = f"{OWN.get(folder, '')} {OWN.get(f'{folder}/{path.stem}', '')}".split()
    if name in FREE:
        return None
    if name in (RUN, TIMING):
        return "several" if name == TIMING and folder != "singlegpu" else folder
    if name in own or (name.startswith("#") and name != YOURS):
        return None
    if task in TASKS:
        return task if name == YOURS or name in task_of(path) else "run"
    return "mnist" if task == "mnist" else "others"


def drifted():
    """Returns (name, {path: text}) of what must be the same and differs: sections, then names."""
    copies = {}
    for path in PATHS:
        for name, text in pieces(path.read_text()).items():
            if group := group_of(path, name):
                copies.setdefault((name, group), {})[path] = text
    groups = [(name, texts) for (name, _), texts in copies.items() if len({*texts.values()}) > 1]
    return sorted(groups, key=lambda group: group[0][0] != "#")


def carry(name, copies):
    """Writes the one text that is new since the last commit to all copies, if there is one."""
    old = {p: pieces(subprocess.getoutput(f"git show HEAD:./{p} 2> /dev/null")) for p in copies}
    new = {text for path, text in copies.items() if text != old[path].get(name)}
    for path, text in copies.items() if len(new) == 1 else ():
        path.write_text(path.read_text().replace(f"\n{text}", f"\n{min(new)}", 1))


def job_text(path):
    """A job file without its comments, the lines to edit, the script's name and its arguments."""
    folder, script = path.stem.split("_", 1)
    text = path.read_text().replace(script, "SCRIPT")
    text = re.sub(r'(--snapshot "\$[^"]*" )?"\$@"', '"$@"', text)
    return [line for line in text.splitlines() if "EDIT" not in line and not line.startswith("# ")]


def main():
    for name, copies in drifted() if "--fix" in sys.argv else ():
        carry(name, copies)
    problems = []
    for name, copies in drifted():
        texts = sorted(copies.values(), key=lambda text: ([*copies.values()].count(text), text))
        where = ", ".join(str(path) for path in copies if copies[path] == texts[0])
        a, b = (text.splitlines() for text in (texts[-1], texts[0]))
        diff = difflib.unified_diff(a, b, lineterm="")
        problems.append("\n".join([f"{name}\ndiffers in {where}:", *diff]))
    for folder in FOLDERS[:4]:
        scripts = [path.stem for path in Path(folder).glob("*.py") if path.stem.startswith(TASKS)]
        paths = [Path("slurm", f"{folder}_{script}.slurm") for script in scripts]
        texts = {str(job_text(path)): path for path in paths}
        if len(texts) > 1:
            problems.append(f"{' and '.join(map(str, texts.values()))} differ in more than a name")
    for path, budget in BUDGETS.items():
        lines = sum(each.read_text().count("\n") for each in Path().glob(path))
        if lines > budget:
            problems.append(f"{path} has {lines} lines, and a budget of {budget}")
    problems += [f"{path} has no budget" for path in PATHS if str(path) not in BUDGETS]
    for path in Path("slurm").glob("*.slurm"):
        if len(lines := path.read_text().splitlines()) > 26 or max(map(len, lines)) > 100:
            problems.append(f"{path} has more than 26 lines or a line of more than 100 columns")
    sys.exit("\n\n".join(dict.fromkeys(problems)) or 0)


if __name__ == "__main__":
    main()
