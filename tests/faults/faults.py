"""Reads faults.txt, puts its faults into scripts, and asks tools/check what it finds."""

import os
import re
import shlex
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
TRAIN = "tests/faults/train.py"
TORCHRUN = "-m torch.distributed.run --standalone --nproc_per_node=4".split()  # of hybrid's scripts
Fault = namedtuple("Fault", "name script edits flags options kind words")


def read_faults():
    """Returns the faults of faults.txt. Their edits are pairs (old, new)."""
    for block in (FOLDER / "faults.txt").read_text().split("\n\n")[1:]:
        if odd := re.search(r"\n[^-+$%>\n]|^[^-+\n].*\n\+", block, re.M):
            raise ValueError(f"faults.txt: {odd[0]!r} in {block!r}")
        (first, rest), found = re.split("[: ] *", block, maxsplit=1), {"$": "", "%": "", ">": ""}
        parts = re.findall(r"((?:^-.*\n)+)((?:^\+.*\n?)*)", block + "\n", re.M)
        parts = [[re.sub("^.", "", part, flags=re.M) for part in pair] for pair in parts]
        edits = [[part.removesuffix("\n") for part in pair] for pair in parts]
        if first == "=":
            script, flags = rest.splitlines()[0].split(maxsplit=1)
            common = edits
        else:
            found |= dict(re.findall(r"^([$%>]) (.*)", block, re.M))
            kind, words = found[">"].split(": ", 1)
            more = f"{flags} {found['$']}"
            yield Fault(first, script, common + edits, more, found["%"], kind, words)


def write(script, edits, folder):
    """Writes a script with replacements to a folder, and returns its path."""
    text = (ROOT / script).read_text()
    for old, new in edits:
        if old not in text:
            raise ValueError(f"{script} has no {old!r}")
        text = text.replace(old, new)
    path = Path(folder, Path(script).parent.name, Path(script).name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def table_of(out):
    """Returns the table in what tools/check has printed, a line for each finding; and the rest."""
    before, _, table = out.rpartition("process(es) that train:")
    return re.sub(r"\n {20,}", " ", table).splitlines()[1:], before


def check(command, folder, options=""):
    """Runs tools/check on a command in a folder. Returns its status, its table, what came before.

    In the table each finding is one line.
    """
    words = [sys.executable, ROOT / "tools/check", *shlex.split(options), "--", *command]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    how = {"cwd": folder, "env": env, "capture_output": True, "text": True, "timeout": 600}
    job = subprocess.run(list(map(str, words)), **how)
    lines, before = table_of(job.stdout)
    return job.returncode, lines, before + job.stderr


def run(fault, folder, check=check):
    """Runs tools/check on a script with this fault. Returns what check() returns."""
    path = write(fault.script, fault.edits, folder)
    options = fault.options.replace("PYTHON", sys.executable).replace("ROOT", str(ROOT))
    options = options.replace("SCRIPT", f"{path}" + f" --folder {folder}" * (fault.script == TRAIN))
    words = shlex.split(fault.flags)
    words += ["--folder", "{tmp}"] if fault.script == TRAIN else []
    torchrun = TORCHRUN if fault.script.startswith("hybrid") else []
    return check([sys.executable, *torchrun, path, *words], folder, options)


def is_found(fault, lines):
    """Whether a line of tools/check's table says it."""
    wanted = re.compile(rf"(ERROR|warning)\s+{fault.kind}\s.*({fault.words})")
    return any(wanted.match(line) for line in lines)


FAULTS = {fault.name: fault for fault in read_faults()}
