"""Prove what the collection promises of its files.

    python tests/check_copies.py          # exit status 1, and a diff for each broken promise
    python tests/check_copies.py --fix    # carry an edit made in one script to its copies

What bears the same name in two scripts has the same text. Each hunk of `diff singlegpu/x.py
multigpu/x.py` is about distribution. Scripts keep within their lines and 100 columns. The job
files of a folder differ in the script's name and arguments. --fix takes the uncommitted text.
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
LINES = {  # of singlegpu, and of multigpu and multinode
    "images": (485, 670),
    "autoencoder": (400, 585),
    "text": (505, 690),
    "gpt": (525, 705),
    "translation": (585, 775),
}
LINES |= {
    "singlegpu/make_bigmnist.py": 155,
    "singlegpu/make_images.py": 145,
    "report.py": 465,
    "hybrid/images.py": 765,
    "hybrid/gpt_pipeline.py": 855,
    "hybrid/gpt_fsdp.py": 798,
    "quantize/text.py": 355,
    "quantize/gpt.py": 330,
    "quantize/translation.py": 455,
    "multigpu/allreduce.py": 190,
    "multinode/allreduce.py": 180,
}
BANDS = (  # of a training script, in this order, each under a ruler
    "Yours: flags, data, model, loss. Replace.",
    "Where the time goes. Without it, delete this part, each line with watch and the summary.",
    "The run.",
)
MAY_DIFFER = {
    "DTYPES",
    "PHASES",
    "main",
    "parse_args",
    "create_model",
    "batches",
    "validation_batches",
    "train",
}
TASK = {"SAME_ON_RESUME", "SHOWN", "HUB", "SPLITS"}  # constants: the same within a task
DISTRIBUTION = re.compile(
    r"rank|world_size|dist\.|distributed|ddp|comm|all_(reduce|gather)|process|torchrun|node|check|"
    r"num_gpus|launch|init_method|tempfile|timedelta|timeout|singlegpu|GPUs|stop\b|STOP_REQUESTS|is_last|facts",
    re.I,
)


def blocks(source):
    """Returns the text of each top-level function, class and constant: {name: text}."""
    lines, found = source.splitlines(keepends=True), {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            name = node.name
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, first = node.targets[0].id, node.lineno - 1
        else:
            continue
        found[name] = "".join(lines[first : node.end_lineno])
    return found


def drifted(paths):
    """Yields (name, {path: text}) for each block whose copies differ."""
    copies = {}
    for path in paths:
        for block, text in blocks(path.read_text()).items():
            key = block, path.name if block in TASK else "all"
            copies.setdefault(key, {})[path] = text
    for (block, _), texts in copies.items():
        if block not in MAY_DIFFER and len(set(texts.values())) > 1:
            yield block, texts


def fix(name, copies):
    """Writes the one text that is new since the last commit to all copies, if there is one."""
    new = set()
    for path, text in copies.items():
        show = ["git", "show", f"HEAD:{path.relative_to(ROOT).as_posix()}"]
        old = subprocess.run(show, cwd=ROOT, capture_output=True, text=True).stdout
        if text != blocks(old).get(name):
            new.add(text)
    if len(new) != 1:
        return False
    for path in copies:
        path.write_text(path.read_text().replace(copies[path], *new))
    return True


def foreign_hunks(a, b):
    """Yields the hunks between two files in which no line is about distribution."""
    left, right = a.read_text().splitlines(), b.read_text().splitlines()
    matcher = difflib.SequenceMatcher(None, left, right, autojunk=False)
    for tag, i, j, k, m in matcher.get_opcodes():
        text = "\n".join(left[i:j] + right[k:m])
        if tag != "equal" and text.strip() and not DISTRIBUTION.search(text):
            yield f"{a.relative_to(ROOT)}:{i + 1} against {b.relative_to(ROOT)}:{k + 1}\n{text}"


def job_text(path):
    """A job file without its comments, the lines to edit, the script's name and its arguments."""
    folder, script = path.stem.split("_", 1)
    text = path.read_text().replace(script, "SCRIPT")
    text = re.sub(r'(--(snapshot|out) "\$[^"]*" )?"\$@"', '"$@"', text)
    return [line for line in text.splitlines() if "EDIT" not in line and not line.startswith("# ")]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fix", action="store_true", help="carry an edit to its copies")
    args = parser.parse_args()
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]
    problems = []
    for name, copies in drifted(paths):
        where = ", ".join(str(path.relative_to(ROOT)) for path in copies)
        if args.fix and fix(name, copies):
            print(f"{name}: carried to {where}")
        else:
            a, b = [text.splitlines() for text in sorted(set(copies.values()))[:2]]
            diff = difflib.unified_diff(a, b, lineterm="")
            problems.append("\n".join([f"{name} differs between {where}", *diff]))
    for first, second in itertools.pairwise(FOLDERS[:3]):
        for path in sorted((ROOT / first).glob("*.py")):
            other = ROOT / second / path.name
            if other.exists():
                problems += foreign_hunks(path, other)
    for path in paths:
        text = path.read_text()
        rulers = tuple(re.findall(r"^# =+ (.*) =+$", text, re.M))
        if "class Stopwatch" in text and rulers != BANDS:
            problems.append(f"{path.relative_to(ROOT)}: not the rulers of the bands: {rulers}")
    for path in [*paths, ROOT / "report.py"]:
        name, lines = path.relative_to(ROOT).as_posix(), path.read_text().splitlines()
        bound = LINES.get(name) or LINES[path.stem][path.parent.name != "singlegpu"]
        if len(lines) > bound or max(map(len, lines)) > 100:
            problems.append(f"{name}: {len(lines)} lines of {bound}, or more than 100 columns")
    for folder in (*FOLDERS, "singlegpu_make"):  # make_*.py save to a folder, not to a snapshot
        files = sorted((ROOT / "slurm").glob(f"{folder}_*.slurm"))
        if folder == "singlegpu":
            files = [path for path in files if "_make_" not in path.name]
        for path in files[1:]:
            if job_text(path) != job_text(files[0]):
                problems.append(f"slurm/{path.name} and {files[0].name} differ in more than a name")
    print(*problems, sep="\n\n", file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
