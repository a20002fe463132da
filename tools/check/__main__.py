"""Is my training right? Runs any PyTorch training, unchanged, for some steps, and says.

    python tools/check -- torchrun --nproc_per_node=2 train.py --batch_size 64
    python tools/check --against "python one_gpu.py" -- torchrun --nproc_per_node=2 train.py
    python tools/check --resume -- python train.py --snapshot {tmp}/run.pt   # {tmp}: a new folder
    CHECK_FOLDER=/shared/new python tools/check -- srun python train.py  # torchrun: on each node

It changes nothing in the training. After the last step it ends it by SystemExit, so `finally`
blocks still run and may write: name {tmp} where the script saves. Then it prints what is wrong,
what is right, and which kinds of faults nothing has shown. tools/README.md explains each kind.

Status 0: no error; 1: an error; 2: nothing trained, or it could not start; 3: some kinds were not
judged, because a part of the checker failed, or --against or --resume had nothing to compare.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from records import Job, Records, process_name
from rules import KINDS, RULES, against, resume, rows_of

GRACE = 60  # seconds for the job to end in, after the last step
OTHERS_GRACE = 60  # and then, for those of other machines
TERM_SECONDS = 40  # torchrun may need 30 seconds to end its workers
WIDTH = 100
LOADER = '''"""Loads the watch of tools/check by its path: it hides no module of a training."""

import importlib.util
import pathlib


def load():
    """PyTorch calls this at the end of `import torch`, since entry_points.txt names it."""
    path = pathlib.Path(__file__).with_name("tools_check_files") / "watch.py"
    spec = importlib.util.spec_from_file_location("tools_check_watch", path)
    watch = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(watch)
    watch.install()
'''


class Interrupted(BaseException):
    """Ctrl-C, SIGTERM or SIGHUP, by its number; and what is known of the job until then."""

    job = None


def parse_args():
    names = [kind.__name__ for kind in KINDS]
    parser = argparse.ArgumentParser(
        prog="python tools/check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=int, default=20, help="optimizer steps to watch (20); then the job ends")
    add("--against", metavar="COMMAND", help="one that should train alike, as on one GPU")
    add("--resume", action="store_true", help="stop the job, start it again, compare")
    add("--timeout", type=float, default=600, help="seconds without progress: a hang (600)")
    add("--ignore", action="append", default=[], metavar="KIND", choices=names, help="not judged")
    add("--fail_on_warning", action="store_true", help="status 1 also for a warning")
    add("--json", metavar="FILE", help="write what is found to this file, too")
    add("--list", action="store_true", help="print all kinds, and end")
    add("command", nargs=argparse.REMAINDER, help="after --: what starts the training")
    args = parser.parse_args()
    args.command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not args.command and not args.list:
        parser.error("no command: type what starts the training after --")
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    if args.json:
        try:
            open(args.json, "a").close()  # now, and not after the job
        except OSError as error:
            parser.error(f"--json: {error}")
    return args


def main():
    args = parse_args()
    if args.list:
        for kind in KINDS:
            print(f"{kind.__name__:13}{kind.__doc__}")
        return
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # as by nohup
            signal.signal(signum, on_signal)
    try:
        sys.exit(check(args))
    except Interrupted as error:  # while it judged or printed
        sys.exit(128 + error.args[0])


def check(args):
    """Runs the commands, prints what is found, and returns the status."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own_folder:
        folder = Path(os.environ.get("CHECK_FOLDER", own_folder)).resolve()
        try:
            job, rows, signum = judge(args, folder)
        except OSError as error:  # the command does not exist, or a folder cannot be written
            print(f"tools/check: cannot start it: {error}", file=sys.stderr)
            return 2
    print_table(args, job, rows)
    if args.json and job.prints():
        write_json(args, job, rows)
    return 128 + signum if signum else status_of(args, job, rows)


def on_signal(signum, frame):
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # the job is being ended now
    raise Interrupted(signum)


def judge(args, folder):
    """Runs the commands. Returns a Job, the rows of all kinds, and the signal that ended it."""
    refuse_old_records(folder)
    command, jobs, pairs, signum = shlex.join(args.command), [], [], 0
    try:
        jobs.append(run(command, args, folder / "whole"))
        if jobs[0].steps_done and args.against:
            pairs.append((against, jobs[0], run(args.against, args, folder / "against")))
        if jobs[0].steps_done and args.resume:
            half = max(1, args.steps // 2)
            stopped = run(command, args, folder / "stopped", stop_at=half)
            again = run(command, args, folder / "stopped", life=2)
            pairs.append((resume, jobs[0], stopped, again))
    except Interrupted as error:
        signum = error.args[0]
        name = signal.Signals(signum).name
        jobs.append(error.job or Job(Records(folder / "whole"), None, interrupted_by=name))
    job = jobs[0]  # if a later one was interrupted, it is not judged
    rules = RULES if job.steps_done else RULES[:1]
    asked = [(rule, job) for rule in rules] + pairs
    rows = rows_of_watch(job)
    for rule, *known in asked:
        if rule.__name__ not in args.ignore:
            found = rows_of(rule, *known)
            if rule in (against, resume):  # a comparison that was asked for, and cannot be made
                found = [("failed" if row[0] == "not seen" else row[0], *row[1:]) for row in found]
            rows += found
    return job, rows, signum


def refuse_old_records(folder):
    """Other machines of this start may write already, but take no step before this one is there."""
    records = Records(folder / "whole" / "seen1")
    records.read_new()
    if records.all("step"):
        raise FileExistsError(f"{folder} has steps of another run. Give each start a new folder")


def rows_of_watch(job):
    """Returns rows for what the watch could not do in the job."""
    rows = []
    troubles = sorted({record["text"] for record in job.all("trouble")})
    for text in troubles[:3]:
        rows.append(("failed", "watch", f"a hook failed: {text}"))
    missing = {(record["name"], *record["kinds"]) for record in job.all("missing")}
    for name, *kinds in sorted(missing):
        words = f"this PyTorch has no {name}: {', '.join(kinds) or 'a part'} may go unseen"
        rows.append(("failed", "watch", words))
    return rows


def status_of(args, job, rows):
    levels = {level for level, *_ in rows}
    if "ERROR" in levels and job.steps_done:
        return 1
    if "failed" in levels:
        return 3
    if not job.steps_done:
        return 2
    return int(args.fail_on_warning and "warning" in levels)


# == What is printed ==
def print_table(args, job, rows):
    if not job.prints():
        print("rank 0's machine prints the table")
        return
    words = f"{job.steps_done} steps, {len(job.ranks)} process(es) that train: "
    print("\n" + textwrap.shorten(words + shlex.join(args.command), WIDTH))
    shown = ["ERROR", "warning", "failed", "ok"]
    if not job.steps_done:
        shown.append("not seen")  # why nothing was seen
    for level in shown:
        for _, kind, words in [row for row in rows if row[0] == level]:
            lines = textwrap.wrap(words, WIDTH - 22, break_long_words=False)
            print(f"{level:9}{kind:13}" + f"\n{' ' * 22}".join(lines))
    unseen = [kind for level, kind, _ in rows if level == "not seen"]
    if unseen and job.steps_done:
        print(textwrap.fill(f"not seen: {', '.join(unseen)}", WIDTH, subsequent_indent=" " * 10))
    print(summary_of(rows))


def summary_of(rows):
    words = []
    for level, name in (("ERROR", "error"), ("warning", "warning"), ("failed", "failure")):
        count = sum(row[0] == level for row in rows)
        if level != "failed" or count:
            words.append(f"{count} {name}{'s' * (count != 1)}")
    return ", ".join(words)


def write_json(args, job, rows):
    known = {
        "command": shlex.join(args.command),
        "steps": job.steps_done,
        "processes": len(job.ranks),
        "status": status_of(args, job, rows),
        "findings": [{"level": level, "kind": kind, "text": text} for level, kind, text in rows],
    }
    Path(args.json).write_text(json.dumps(known, indent=2) + "\n")


# == A job ==
def run(command, args, folder, stop_at=0, life=1):
    """Runs a command until its last step that is watched, and returns a Job."""
    records = Records(folder / f"seen{life}")
    for path in (records.folder, folder / "tmp"):
        path.mkdir(parents=True, exist_ok=True)
    install_watch(plugin_of(folder))
    words = [word.replace("{tmp}", str(folder / "tmp")) for word in shlex.split(command)]
    what = f"for {args.steps} optimizer steps"
    if stop_at:
        what = f"to step {stop_at}, then sends SIGTERM"
    print(textwrap.shorten(f"tools/check runs this {what}: {command}", WIDTH), flush=True)
    environment = os.environ | environment_of(args, folder, records.folder, stop_at)
    process = subprocess.Popen(words, env=environment, start_new_session=True)
    try:
        wait_for_end(process, records, args.timeout, stop_at)
        status = process.poll()
    except Interrupted as error:
        name = signal.Signals(error.args[0]).name
        end_job(process)
        records.read_new()
        error.job = Job(records, None, interrupted_by=name)
        raise
    except BaseException:
        end_job(process)
        raise
    end_job(process)
    return read_job(records, status)


def plugin_of(folder):
    """Each machine has its own, since one may write it while the processes of another import it."""
    return folder / f"plugin-{process_name(os.getpid())}"


def install_watch(folder):
    """Makes a folder which, on PYTHONPATH, lets PyTorch load the watch in each process.

    Nothing in it has a name that a training might import.
    """
    info, files = folder / "tools_check_loader-1.dist-info", folder / "tools_check_files"
    for each in (info, files):
        each.mkdir(parents=True, exist_ok=True)
    entry = "[torch.backends]\ntools_check = tools_check_loader:load\n"
    (info / "entry_points.txt").write_text(entry)
    (info / "METADATA").write_text("Name: tools-check-loader\nVersion: 1\n")
    (folder / "tools_check_loader.py").write_text(LOADER)
    (files / "watch.py").write_text(Path(__file__).with_name("watch.py").read_text())


def environment_of(args, folder, seen, stop_at):
    paths = [str(plugin_of(folder)), *filter(None, [os.environ.get("PYTHONPATH")])]
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        print("tools/check sets TORCH_DEVICE_BACKEND_AUTOLOAD to 1: PyTorch loads it so")
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        "CHECK_PARENT": process_name(os.getpid()),
        "CHECK_SEEN": str(seen),
        "CHECK_STEPS": str(args.steps * (10 if stop_at else 1)),  # it is stopped before
        "CHECK_PAUSE": str(stop_at),
        "CHECK_STUCK": str(args.timeout / 2),
        "CHECK_COMPARES": "1" if args.against or args.resume else "",
    }


def wait_for_end(process, records, timeout, stop_at):
    """Waits until the job ends, or makes no progress. Sends SIGTERM at the step `stop_at`."""
    until, has_ended = time.time() + timeout, False
    while process.poll() is None and time.time() < until:
        time.sleep(0.1)
        count = records.read_new()
        steps = [record["step"] for record in records.all("step") if record["optimizer"] == 0]
        if stop_at and max(steps, default=0) >= stop_at:
            process.send_signal(signal.SIGTERM)
            stop_at = 0
        if count and not has_ended:
            has_ended = bool(records.all("end"))
            until = time.time() + (GRACE if has_ended else timeout)


def end_job(process):
    """Ends what is left of the processes of the job."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TERM_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_job(records, status):
    until = time.time() + OTHERS_GRACE
    records.read_new()
    job = Job(records, status)
    while "CHECK_FOLDER" in os.environ and job.is_incomplete() and time.time() < until:
        time.sleep(0.5)  # other machines end later
        records.read_new()
        job = Job(records, status)
    return job


if __name__ == "__main__":
    main()
