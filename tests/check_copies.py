"""Prove what the collection promises of its files.

    python tests/check_copies.py          # exit status 1, and a diff for each broken promise
    python tests/check_copies.py --fix    # carry an edit made in one script to its copies

A section is the same in three folders or in the five scripts of a folder. What bears the same name
has the same text. --fix carries the text of a copy if no other copy is new since the last commit.
"""

import ast
import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

os.chdir(Path(__file__).resolve().parent.parent)
FOLDERS = ("singlegpu", "multigpu", "multinode", "hybrid", "quantize")
TASKS = ("images", "autoencoder", "text", "translation", "gpt")
SCRIPTS = [Path(folder, f"{task}.py") for folder in FOLDERS[:3] for task in TASKS]
PATHS = [path for folder in FOLDERS for path in sorted(Path(folder).glob("*.py"))]
PATHS += [Path("report.py"), Path("predict.py")]
TITLE = re.compile(r"^(# =+ .* =+)\n", re.M)
YOURS, RUN, TIMING = TITLE.findall(Path("multigpu/images.py").read_text())
OF_FOLDER = "head main parse_args parse_run_args MAY_CHANGE".split()  # differ between folders
OF_SINGLEGPU = """check_args look train_step evaluate training_requests read_snapshot save_snapshot
    log_row restore STEP_PHASES TIMES Stopwatch print_summary""".split()  # differ only there
OF_HYBRID = """check_args connect start_loader evaluate join_launcher load_snapshot log_row look
    print_summary save_snapshot set_seeds train_step training_requests write_snapshot
    STEP_PHASES DTYPES""".split()  # differ in hybrid and from multinode
OF_FSDP = "COMM_HOOKS differ check_weights events count_marks print_marks".split()  # of shards
OF_ROOT = ["runs_of"]  # report.py sums up an epoch, predict.py a step
OF_QUANTIZE = "COLUMNS create_empty load_trained test measure".split()
# The five mnist.py are copies of each other alone. These are the names that differ between them.
OF_MNIST = {"head": None, "main": None, "print_marks": ("singlegpu", "hybrid")}


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


def drifted():
    """Returns (name, {path: text}) of what must be the same and differs: sections, then names."""
    copies = {}
    for path in PATHS:
        source = path.read_text()
        folder = path.parent.name
        common = dict.fromkeys((TIMING, *OF_SINGLEGPU), folder == "singlegpu") | {RUN: folder}
        task = path.stem.split("_")[0]  # that of gpt_fsdp is gpt
        if Path("multinode", f"{task}.py") in SCRIPTS:
            section = pieces(Path("multinode", f"{task}.py").read_text())[YOURS]
            common |= dict.fromkeys((YOURS, *pieces(section)), task)
        own = {
            "hybrid": [*OF_HYBRID, *TITLE.findall(source)[1:]]
            + OF_FSDP * (path.stem == "gpt_fsdp"),
            "quantize": OF_QUANTIZE,
            "": OF_ROOT,
        }.get(folder, [])
        for name, text in pieces(source).items():
            if path.stem == "mnist" and (name.startswith("#") or OF_MNIST.get(name, ()) is None):
                continue
            if path.stem == "mnist":
                group = ("mnist", folder if folder in OF_MNIST.get(name, ()) else "")
                copies.setdefault((name, group), {})[path] = text
            elif name not in [*OF_FOLDER, *own] or (folder, name) == ("quantize", "main"):
                group = common.get(name) if folder else "root"
                copies.setdefault((name, group), {})[path] = text
    groups = [(name, texts) for (name, _), texts in copies.items() if len({*texts.values()}) > 1]
    return sorted(groups, key=lambda group: group[0][0] != "#")


def carry(name, copies):
    """Writes the one text that is new since the last commit to all copies, if there is one."""
    old = {p: pieces(subprocess.getoutput(f"git show HEAD:./{p} 2> /dev/null")) for p in copies}
    new = {text for path, text in copies.items() if text != old[path].get(name)}
    for path, text in copies.items() if len(new) == 1 else ():
        path.write_text(path.read_text().replace(f"\n{text}", f"\n{min(new)}", 1))


def diff(a, b, context=3):
    """Returns the hunks of a diff of two texts."""
    lines = difflib.unified_diff(a.splitlines(), b.splitlines(), n=context, lineterm="")
    return re.split(r"^@@ .*\n", "\n".join(lines), flags=re.M)[1:]


def job_text(path):
    """A job file without its comments, the lines to edit, the script's name and its arguments."""
    folder, script = path.stem.split("_", 1)
    text = path.read_text().replace(script, "SCRIPT")
    text = re.sub(r'(--(snapshot|out) "\$[^"]*" )?"\$@"', '"$@"', text)
    return [line for line in text.splitlines() if "EDIT" not in line and not line.startswith("# ")]


def main():
    for name, copies in drifted() if "--fix" in sys.argv else ():
        carry(name, copies)
    problems = []
    for name, copies in drifted():
        texts = sorted(copies.values(), key=lambda text: ([*copies.values()].count(text), text))
        where = ", ".join(str(path) for path in copies if copies[path] == texts[0])
        problems.append("\n".join([f"{name}\ndiffers in {where}:", *diff(texts[-1], texts[0])]))
    for folder in FOLDERS[:4]:
        scripts = [path.stem for path in Path(folder).glob("*.py") if path.stem.startswith(TASKS)]
        paths = [Path("slurm", f"{folder}_{script}.slurm") for script in scripts]
        texts = {str(job_text(path)): path for path in paths}
        if len(texts) > 1:
            problems.append(f"{' and '.join(map(str, texts.values()))} differ in more than a name")
    sys.exit("\n\n".join(dict.fromkeys(problems)) or 0)


if __name__ == "__main__":
    main()
