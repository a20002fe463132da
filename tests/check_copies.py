"""Prove that the copies of a text in the scripts are equal, and record how folders differ.

    python tests/check_copies.py            # status 1, and a diff for each copy that has drifted
    python tests/check_copies.py --fix      # carry an edit of one script to its copies
    python tests/check_copies.py --record   # accept how the folders differ now: folders.diff

A training script has sections, under the titles of SECTIONS. These rules hold:

- "Yours" is the same in the scripts of a task, in all folders.
- The run and the start are the same in the scripts of a folder, and so is the timing. In hybrid,
  where the scripts of a folder split a model in other ways, the start alone is the same.
- What bears the same name in two scripts has the same text: functions, classes, constants, flags
  of the run. OWN and FREE list the names for which this does not hold.
- The marks of tools/timing.py are those of the mnist.py.
- How those differ between one folder and the next is recorded in folders.diff. An edit that
  forgets a folder changes that difference, and is seen.
- The job files of a folder differ in names, and in the lines that are marked EDIT.

--fix carries the text that is new since the last commit, if one copy has the edits of all copies.
"""

import ast
import difflib
import functools
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("singlegpu", "multigpu", "multinode", "hybrid", "quantize")
TASKS = ("images", "text", "translation", "gpt")
SPLIT = "# == How the model is split "  # three scripts of hybrid have it
SECTIONS = {
    "yours": "# == Yours: ",
    "the split": SPLIT,
    "the run": "# == The run: ",
    "the timing": "# == Where the time goes. ",
}
START = 'if __name__ == "__main__":'  # of the file's last block, which is a section, too
FREE = {"main", "parse_args", "parse_run_args"}  # may differ in any two folders
OWN = {  # names whose text may differ from that of the folders before, by folder or by script
    "singlegpu": """check_flags start_or_resume load_weights training_batches evaluate log_row
        STEP_PHASES last_step count_marks columns_of print_marks
        --batch_size --num_workers --log""",
    "multigpu": "check_flags init_process",
    "hybrid/images.py": """init_process set_seed compare_with_rank_0 evaluate now
        timed_hook columns_of
        --num_stages --num_workers""",
    "hybrid/gpt_pipeline.py": """check_flags training_batches sum_over_ranks evaluate
        compare_copies STEP_PHASES timed_hook print_marks print_sending --num_stages""",
    "hybrid/gpt_fsdp.py": """DTYPES init_process start_or_resume save_snapshot
        compare_copies evaluate sent timed_hook count_marks
        --grad_accum_steps --comm_hook --snapshot""",
    "hybrid/gpt_tensor.py": """DTYPES check_flags save_snapshot training_batches compare_copies
        create_groups evaluate log_row sent forget_marks count_marks columns_of
        print_sending""",
    "hybrid/mnist.py": "print_marks",
    "hybrid/mnist_tensor.py": "print_marks",
}
TIMER = {"tools/timing.py": ("ON_GPU", "marks", "mark")}  # are those of the mnist.py
NEIGHBORS = [  # whose differences are recorded: each script, and the one from which it grew
    ("singlegpu/images.py", "multigpu/images.py"),
    ("multigpu/images.py", "multinode/images.py"),
    ("multinode/images.py", "hybrid/images.py"),
    ("multinode/gpt.py", "hybrid/gpt_fsdp.py"),
    ("multinode/gpt.py", "hybrid/gpt_pipeline.py"),
    ("multinode/gpt.py", "hybrid/gpt_tensor.py"),
]
RECORD = "tests/folders.diff"


def read_files(root=ROOT):
    """Returns {path: text} of all files that are compared."""
    paths = [path for folder in (*FOLDERS, "tools") for path in sorted(root.glob(f"{folder}/*.py"))]
    paths += [*sorted(root.glob("slurm/*.slurm")), *root.glob(RECORD)]
    return {str(path.relative_to(root)): path.read_text() for path in paths}


def folder_of(path):
    return path.split("/")[0]


@functools.cache
def task_of(path):
    """Returns images, text, translation, gpt or mnist; None for another file."""
    name = Path(path).stem.split("_")[0]  # that of gpt_fsdp is gpt
    return name if name in (*TASKS, "mnist") and folder_of(path) in FOLDERS else None


def is_training(path):
    return path.endswith(".py") and task_of(path) in TASKS and folder_of(path) in FOLDERS[:4]


@functools.cache
def sections_of(source):
    """Returns {section: text} of a training script. A section that it has not is missing."""
    before, found, rest = source.rpartition(f"\n{START}\n")
    sections = {"the start": found + rest} if found else {}
    before = before or rest  # where there is no start
    titles = "|".join(map(re.escape, SECTIONS.values()))
    _, *parts = re.split(rf"^({titles})", before, flags=re.M)  # title, text, title, text, ...
    names = {title: name for name, title in SECTIONS.items()}
    for title, text in zip(parts[::2], parts[1::2]):
        sections[names[title]] = title + text
    return sections


@functools.cache
def names_of(source):
    """Returns {name: text} of what a source defines at its top level, and of its run's flags."""
    lines = source.splitlines(keepends=True)

    def text_of(node):
        decorators = getattr(node, "decorator_list", [])
        first = min(part.lineno for part in (node, *decorators))
        return "".join(lines[first - 1 : node.end_lineno])

    names = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names[node.name] = text_of(node)
        elif isinstance(node, ast.Assign):
            names[ast.unparse(node.targets[0])] = text_of(node)
        elif isinstance(node, ast.If) and node.lineno < len(lines) // 4:
            names[f"if {ast.unparse(node.test)}, at the top"] = text_of(node)
        if getattr(node, "name", "") == "parse_run_args":
            for call in node.body:
                flag = re.match(r"""add\(["'](--\w+)["']""", text_of(call).strip())
                if flag:
                    names[flag[1]] = text_of(call)
    return names


def may_differ(path, name):
    own = f"{OWN.get(folder_of(path), '')} {OWN.get(path, '')}".split()
    return name in own or name in FREE


def pieces_of(path, source):
    """Yields (group, name, text). Of one group and one name, all texts must be the same."""
    folder, task = folder_of(path), task_of(path)
    own_task = names_of(source)  # the names that only scripts of this task share
    if is_training(path):
        sections = sections_of(source)
        own_task = names_of(sections.get("yours", ""))
        yield task, "yours", sections.get("yours")
        yield folder, "the start", sections.get("the start")
        if folder != "hybrid":
            several = "several processes" if folder != "singlegpu" else folder
            yield folder, "the run", sections.get("the run")
            yield several, "the timing", sections.get("the timing")
    for name, text in names_of(source).items():
        if name in TIMER.get(path, ()):
            yield "mnist", name, text
        if may_differ(path, name):
            continue
        if task in TASKS:
            yield task if name in own_task else "training", name, text
        else:
            yield task or "others", name, text


def groups_of(files):
    """Returns {(group, name): {path: text}} of what must be the same."""
    groups = {}
    for path, source in files.items():
        if path.endswith(".py"):
            for group, name, text in pieces_of(path, source):
                groups.setdefault((group, name), {})[path] = text
    return groups


def drifted(files):
    """Returns (name, {path: text}) of what must be the same and is not: sections come first."""
    found = [(name, texts) for (_, name), texts in groups_of(files).items()]
    found = [(name, texts) for name, texts in found if len({*texts.values()}) > 1]
    return sorted(found, key=lambda pair: pair[0] not in (*SECTIONS, "the start"))


def copy_problems(files):
    """A diff for each copy that has drifted from the text that most have."""
    for name, copies in drifted(files):
        texts = [text or "" for text in copies.values()]
        most = max(texts, key=texts.count)
        example = list(copies)[texts.index(most)]
        for path, text in copies.items():
            if text != most:
                lines = most.splitlines(), (text or "").splitlines()
                diff = difflib.unified_diff(*lines, example, path, lineterm="")
                yield "\n".join([f"{name} differs in {path} from {example}:", *diff])


def section_problems(files):
    """Each section must be there, and must be compared with another script's."""
    scripts = [path for path in files if is_training(path)]
    if len(scripts) < 16:
        yield f"{len(scripts)} training scripts are here, and there were 16"
    for path in scripts:
        wanted = {"yours", "the run", "the timing", "the start"}
        missing = wanted - sections_of(files[path]).keys()
        if missing:
            yield f"{path} has no section: {', '.join(sorted(missing))}"
    for (_, name), copies in groups_of(files).items():
        if name in (*SECTIONS, "the start") and len(copies) < 3:
            yield f"{name} is compared in {', '.join(copies)} alone"


def list_problems(files):
    """A name of OWN must be in a script, and must differ from a copy elsewhere."""
    texts = {}  # {(kind of script, name): {path: text}}
    for path, source in files.items():
        kind = "training" if is_training(path) else task_of(path)
        for name, text in names_of(source).items() if path.endswith(".py") else ():
            texts.setdefault((kind, name), {})[path] = text
    for place, names in OWN.items():
        for name in names.split():
            is_there = differs = False
            for (_, each), copies in texts.items():
                own = {text for path, text in copies.items() if path.startswith(place)}
                others = {text for path, text in copies.items() if not path.startswith(place)}
                if each == name and own:
                    is_there = True
                    differs = differs or bool(others and own - others)
            if not is_there:
                yield f"OWN has {name} of {place}, where it is not"
            elif not differs:
                yield f"OWN has {name} of {place}, which has no copy that differs"


@functools.cache
def changed_lines(old, new):
    """Returns the lines of a diff, without the numbers of lines."""
    diff = difflib.unified_diff(old.splitlines(), new.splitlines(), n=0)
    lines = [line.rstrip("\n") for line in diff][2:]
    return ["@@" if line.startswith("@@") else line for line in lines]


def differences_of(files):
    """Returns {title: lines}: how each name that may differ does so from one folder to the next."""
    found = {}
    for before, after in NEIGHBORS:
        old, new = names_of(files[before]), names_of(files[after])
        for name in new:
            if name.startswith("--") or old.get(name, new[name]) == new[name]:
                continue  # a flag is a part of parse_run_args()
            found[f"== {name}: {before} -> {after}"] = changed_lines(old[name], new[name])
    return found


def record_of(files):
    """Returns the text of folders.diff."""
    lines = []
    for title, difference in differences_of(files).items():
        lines += [title, *difference]
    return "\n".join(lines) + "\n"


def record_problems(files):
    recorded, title = {}, None
    for line in files.get(RECORD, "").splitlines():
        if line.startswith("== "):
            title = line
            recorded[title] = []
        else:
            recorded[title].append(line)
    found = differences_of(files)
    for title in {**recorded, **found}:
        old, new = recorded.get(title, []), found.get(title, [])
        if old != new:
            diff = difflib.unified_diff(old, new, RECORD, "now", lineterm="")
            told = f"{title[3:]} differ in another way than is recorded. "
            told += "Make the same edit in both, or accept the difference by --record:"
            yield "\n".join([told, *diff])


def job_text(path, text):
    """A job file without its comments, the lines to edit, the script's name and its arguments."""
    script = Path(path).stem.split("_", 1)[1]
    text = text.replace(script, "SCRIPT")
    text = re.sub(r'(--snapshot "\$[^"]*" )?"\$@"', '"$@"', text)
    return [line for line in text.splitlines() if "EDIT" not in line and not line.startswith("# ")]


def job_problems(files):
    """The job files of a folder's training scripts differ in names, and in the lines to edit."""
    for folder in FOLDERS[:4]:
        texts = {}
        for script in (path for path in files if is_training(path) and folder_of(path) == folder):
            path = f"slurm/{folder}_{Path(script).stem}.slurm"
            if path in files:
                texts[path] = job_text(path, files[path])
            else:
                yield f"{script} has no job file {path}"
        first = next(iter(texts.values()), [])
        for path, text in texts.items():
            if text != first:
                diff = difflib.unified_diff(first, text, lineterm="")
                yield "\n".join([f"{path} differs in more than a name:", *diff])


def problems_of(files):
    """Returns what does not hold, as texts."""
    checks = section_problems, copy_problems, list_problems, record_problems, job_problems
    return [problem for check in checks for problem in check(files)]


def fixed(files, old):
    """Returns the files with each edit carried to its copies. `old`: those of the last commit."""
    files, tried = dict(files), set()
    while True:
        left = [pair for pair in drifted(files) if (pair[0], *pair[1]) not in tried]
        if not left:
            return files
        name, copies = left[0]
        tried.add((name, *copies))
        edits = {}  # of each text that is new
        for path, text in copies.items():
            pieces = {piece: text for _, piece, text in pieces_of(path, old.get(path, ""))}
            if text and text != pieces.get(name):
                edits[text] = edits_between(pieces.get(name) or "", text)
        # An edit may have been carried before another one was made in one of the copies.
        all_edits = set().union(*edits.values())
        whole = [text for text, some in edits.items() if some == all_edits]
        if len(whole) == 1 and all(copies.values()):
            for path in copies:
                files[path] = files[path].replace(copies[path], whole[0], 1)


def edits_between(old, new):
    """Returns the edits that make one text of the other: the lines that are left out, and added."""
    old, new = old.splitlines(), new.splitlines()
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    edits = [edit for edit in matcher.get_opcodes() if edit[0] != "equal"]
    return {(first, last, *new[start:end]) for _, first, last, start, end in edits}


def committed(files):
    """Returns the files as they are in the last commit."""
    old = {}
    for path in files:
        command = ["git", "-C", ROOT, "show", f"HEAD:./{path}"]
        shown = subprocess.run(command, capture_output=True, text=True)
        if shown.returncode == 0:
            old[path] = shown.stdout
    return old


def main():
    files = read_files()
    new = dict(files)
    if "--fix" in sys.argv:
        new = fixed(files, committed(files))
    if "--record" in sys.argv:
        new[RECORD] = record_of(new)
    for path, text in new.items():
        if text != files.get(path):
            (ROOT / path).write_text(text)
            print(f"wrote {path}")
    sys.exit("\n\n".join(problems_of(new)) or 0)


if __name__ == "__main__":
    main()
