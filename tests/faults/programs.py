"""Reads programs.toml, runs tools/check on its programs, and tells what it says of them."""

import json
import re
import shlex
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

import faults

FOLDER = Path(__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
JUDGED = ("ERROR", "warning", "ok")
AT_LEAST = 8  # kinds must be judged, so that a right program is not right by being unseen


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
    timeout: int = 120
    may_warn: tuple = ()
    true_errors: tuple = ()
    kind: str = ""
    words: str = ""
    not_seen: str = ""
    later: str = ""
    at_least: int = AT_LEAST

    def __post_init__(self):
        folders = ("right", "wrong")
        name = self.file or self.name
        self.path = next(FOLDER / each / f"{name}.py" for each in folders if self.has(each, name))
        self.has_fault = self.path.parent.name == "wrong"

    @staticmethod
    def has(folder, name):
        return (FOLDER / folder / f"{name}.py").exists()

    def command(self, processes, flags, torchrun=TORCHRUN):
        """What starts the program: torchrun, where it can have several processes."""
        start = [sys.executable] if self.processes == 1 else [*torchrun, str(processes)]
        return [*start, str(self.path), *shlex.split(flags)]

    def options(self, torchrun=TORCHRUN):
        """The options of tools/check."""
        words = ["--steps", str(self.steps), "--timeout", str(self.timeout)]
        if self.against is not None:
            words += ["--against", shlex.join(self.command(1, self.against, torchrun))]
        return [*words, "--resume"] if self.resume else words


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


def run(program, fault=False, check=faults.check, torchrun=TORCHRUN):
    """Runs tools/check on a program in a new folder. Returns a Verdict.

    check and torchrun: how it is run, and what starts several processes.
    """
    flags = f"{program.flags} --fault" if fault else program.flags
    command = program.command(program.processes, flags, torchrun)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "findings.json")
        options = [*program.options(torchrun), "--json", str(path)]
        status, lines, output = check(command, folder, shlex.join(options))
        findings = []
        if path.exists():
            rows = json.loads(path.read_text())["findings"]
            findings = [(row["level"], row["kind"], row["text"]) for row in rows]
    return Verdict(status, findings, "\n".join([output, *lines]))


def complaints(program, verdict, fault=False):
    """What is not as programs.toml says, in sentences; an empty list if all is."""
    failed = verdict.wrong("failed")
    found = [f"a rule failed: {' '.join(row)}" for row in failed]
    errors = verdict.wrong("ERROR")
    if fault and program.kind and not verdict.names(program):
        found.append(f"the fault is not named: no {program.kind} with {program.words!r}")
    if fault and not program.kind:
        allowed = {*program.may_warn, *program.true_errors}
        named = [row for row in verdict.wrong("ERROR", "warning") if row[1] not in allowed]
        found += [f"it is named, so that programs.toml needs its kind: {row}" for row in named]
    if fault:
        return found + ([] if verdict.findings else ["nothing was judged"])
    warnings = [row for row in verdict.wrong("warning") if row[1] not in program.may_warn]
    false_errors = [row for row in errors if row[1] not in program.true_errors]
    found += [f"it is accused: {' '.join(row)}" for row in false_errors]
    found += [f"it is warned of: {' '.join(row)}" for row in warnings]
    if verdict.status and not errors:
        found.append(f"the status is {verdict.status}")
    if len(verdict.judged()) < program.at_least:
        found.append(f"only {len(verdict.judged())} kinds are judged: {sorted(verdict.judged())}")
    return found


def read_programs():
    """Returns the programs of programs.toml, by their names."""
    with open(FOLDER / "programs.toml", "rb") as file:
        table = tomllib.load(file)
    return {name: Program(name, **row) for name, row in table.items()}


PROGRAMS = read_programs()
