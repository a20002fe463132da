"""Reads programs.toml, runs tools/check on its programs, and tells what it says of them."""

import functools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

import faults

FOLDER = Path(__file__).parent
CHECK = [sys.executable, os.environ.get("CHECK_TOOL", str(faults.ROOT / "tools/check.py"))]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
JUDGED = ("ERROR", "warning", "ok")


@dataclass
class Program:
    """A row of programs.toml, which explains the fields."""

    name: str
    file: str = ""
    processes: int = 1
    flags: str = ""
    against: str | None = None
    resume: bool = False
    steps: int = 20
    may_warn: tuple = ()
    judged: int = 8
    kind: str = ""
    words: str = ""
    not_seen: str = ""
    later: str = ""

    def __post_init__(self):
        folders = ("right", "wrong")
        name = self.file or self.name
        self.path = next(FOLDER / each / f"{name}.py" for each in folders if self.has(each, name))
        self.has_fault = self.path.parent.name == "wrong"

    @staticmethod
    def has(folder, name):
        return (FOLDER / folder / f"{name}.py").exists()

    def command(self, processes, flags):
        """What starts the program. Where it can have several processes, torchrun starts one, too."""
        start = [sys.executable] if self.processes == 1 else [*TORCHRUN, str(processes)]
        return [*start, str(self.path), *shlex.split(flags)]

    def words_for_check(self, fault):
        """The options of tools/check and the command, with the fault or without it."""
        words = ["--steps", str(self.steps)]
        if self.against is not None:
            words += ["--against", shlex.join(self.command(1, self.against))]
        if self.resume:
            words += ["--resume"]
        flags = f"{self.flags} --fault" if fault else self.flags
        return [*words, "--", *self.command(self.processes, flags)]


@dataclass
class Verdict:
    """What tools/check said: its status, its findings (level, kind, words), all that it printed."""

    status: int
    findings: list
    output: str

    def judged(self):
        """The kinds that it judged: they are neither "not seen" nor did their rule fail."""
        return {kind for level, kind, _ in self.findings if level in JUDGED}

    def wrong(self, *levels):
        """The findings of these levels."""
        return [row for row in self.findings if row[0] in levels]

    def names(self, program):
        """Whether an error or a warning is of the program's kind and has its words."""
        wrong = self.wrong("ERROR", "warning")
        return any(
            kind == program.kind and re.search(program.words, text) for _, kind, text in wrong
        )


@functools.cache
def has_json():
    """Whether this tools/check writes its findings to a file."""
    told = subprocess.run([*CHECK, "--help"], capture_output=True, text=True)
    return "--json" in told.stdout


def read_printed(output):
    """Returns the findings of the printed table."""
    lines, _ = faults.table_of(output)
    rows = [re.match(r"(ERROR|warning|ok|not seen) +(\w+) +(.*)", line) for line in lines]
    return [row.groups() for row in rows if row]


def run(program, fault=False):
    """Runs tools/check on a program in a new folder. Returns a Verdict."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "findings.json")
        words = ["--json", str(path)] if has_json() else []
        words = [*CHECK, *words, *program.words_for_check(fault)]
        env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        how = {"cwd": folder, "env": env, "capture_output": True, "text": True, "timeout": 600}
        job = subprocess.run(words, **how)
        if path.exists():
            rows = json.loads(path.read_text())
            findings = [(row["level"], row["kind"], row["words"]) for row in rows]
        else:
            findings = read_printed(job.stdout)
    return Verdict(job.returncode, findings, job.stdout + job.stderr)


def complaints(program, verdict, fault=False):
    """What is not as programs.toml says, in sentences; an empty list if all is."""
    found = []
    errors = verdict.wrong("ERROR")
    if fault and program.kind and not verdict.names(program):
        found.append(f"the fault is not named: no {program.kind} with {program.words!r}")
    if fault and program.not_seen and errors:
        found.append("a fault that was not seen is seen: programs.toml may name its kind")
    if fault:
        return found + ([] if verdict.findings else ["nothing was judged"])
    warnings = [row for row in verdict.wrong("warning") if row[1] not in program.may_warn]
    found += [f"it is accused: {' '.join(row)}" for row in errors if row[1] not in program.may_warn]
    found += [f"it is warned of: {' '.join(row)}" for row in warnings]
    if verdict.status and not errors:
        found.append(f"the status is {verdict.status}")
    failed = [row for row in verdict.findings if "failed itself" in row[2]]
    found += [f"a rule failed: {' '.join(row)}" for row in failed]
    if len(verdict.judged()) < program.judged:
        found.append(f"only {len(verdict.judged())} kinds are judged: {sorted(verdict.judged())}")
    return found


def read_programs():
    """Returns the programs of programs.toml, by their names."""
    with open(FOLDER / "programs.toml", "rb") as file:
        table = tomllib.load(file)
    return {name: Program(name, **row) for name, row in table.items()}


PROGRAMS = read_programs()
