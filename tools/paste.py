"""Paste your own task into a training script: its functions replace those of the same names.

    python tools/paste.py task.py multigpu/images.py > multigpu/mine.py

task.py has functions such as read_data, create_model and batch_loss, and what they need: imports,
classes, helpers. examples/ has some. The rest of the script stays, with its other functions.
"""

import argparse
import ast
import difflib
import re
import sys
from pathlib import Path


def lines_of(source):
    """Returns {name: its lines, from 0} of what a source defines at its top level."""
    found = {}
    for node in ast.parse(source).body:
        decorators = getattr(node, "decorator_list", [])
        first = min(part.lineno for part in (node, *decorators))
        targets = [part.id for part in getattr(node, "targets", []) if isinstance(part, ast.Name)]
        for name in [node.name] if hasattr(node, "name") else targets:
            found[name] = range(first - 1, node.end_lineno)
    return found


def paste(task, script):
    """Returns the script with the task, and warnings. SystemExit: it would not train the task."""
    head, title, rest = re.split(r"^(# == Yours: .*\n)", script, flags=re.M)
    yours, next_title = re.split(r"^(?=# == )", rest, maxsplit=1, flags=re.M)
    old, new = lines_of(yours), lines_of(task)
    called = {name for name in old if f" {name}(" in next_title}  # by the run
    if not called & new.keys():
        sys.exit(f"the task has none of what the run calls: {', '.join(sorted(called))}")
    taken = new.keys() & lines_of(head + next_title).keys()
    if taken:
        sys.exit(f"the run of the script has these names: {', '.join(sorted(taken))}")
    warnings = []
    for name in new.keys() - old.keys():
        for close in difflib.get_close_matches(name, called - new.keys(), 1, 0.7):
            warnings.append(f"{name} is not called by the run: is it meant to be {close}?")
    dropped = {line for name in old.keys() & new.keys() for line in old[name]}
    lines = yours.splitlines(keepends=True)
    kept = "".join(line for number, line in enumerate(lines) if number not in dropped)
    text = f"{title}\n\n{task.strip()}\n\n\n{kept.strip()}\n\n\n"
    return head + text + next_title, warnings


def main():
    parser = argparse.ArgumentParser(description="Paste your own task into a training script.")
    parser.add_argument("task", type=Path, help="your functions, such as examples/table.py")
    parser.add_argument("script", type=Path, help="a training script, such as multigpu/images.py")
    args = parser.parse_args()
    for path in (args.task, args.script):
        if not path.is_file():
            sys.exit(f"there is no file {path}")
    text, warnings = paste(args.task.read_text(), args.script.read_text())
    print(*warnings, sep="\n", end="\n" * bool(warnings), file=sys.stderr)
    print(re.sub(r"\n{4,}", "\n\n\n", text), end="")


if __name__ == "__main__":
    main()
