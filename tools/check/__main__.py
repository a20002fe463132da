"""Is my training right? Runs any PyTorch training, unchanged, for some steps, and says.

    python tools/check -- torchrun --nproc_per_node=2 train.py --batch_size 64
    python tools/check --against "python one_gpu.py" -- torchrun --nproc_per_node=2 train.py
    python tools/check --resume -- python train.py --snapshot {tmp}/run.pt   # {tmp}: new folder
    CHECK_FOLDER=/shared/new python tools/check -- srun python train.py  # torchrun: on each node

PyTorch loads this file in each process. It changes nothing, and notes what happens. Then it prints
a line for each kind of fault, or "not seen". Status 1: an error; 2: nothing trained; else 0.
"""

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from records import Job, process_name
from rules import KINDS, against, resume

LEVELS = ["ERROR", "warning", "ok", "not seen"]
GRACE = 60  # seconds for the job to end in, after the last step


def main():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=20, help="optimizer steps to watch; then the job ends")
    add("--against", metavar="COMMAND", help="one that should train alike, as on one GPU")
    add("--resume", action="store_true", help="stop the job, start it again, compare")
    add("--timeout", type=float, default=600, help="seconds without progress that count as a hang")
    add("command", nargs=argparse.REMAINDER, help="after --: what starts the training")
    args = parser.parse_args()
    command = shlex.join(args.command).removeprefix("-- ")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, it ends the job
    with tempfile.TemporaryDirectory() as own_folder:
        folder = Path(os.environ.get("CHECK_FOLDER", own_folder)).resolve()
        job = run(command, args, folder / "whole")
        kinds = KINDS  # first: ending
        rows = [row for kind in kinds[: None if job.steps else 1] for row in findings(kind, job)]
        if job.steps and args.against:
            rows += findings(against, job, run(args.against, args, folder / "against"))
        if job.steps and args.resume:
            stopped = run(command, args, folder / "stopped", stop_at=max(1, args.steps // 2))
            rows += findings(resume, job, stopped, run(command, args, folder / "stopped", life=2))
    rows.sort(key=lambda row: LEVELS.index(row[0]))
    words = f"{job.steps} steps, {len(job.ranks)} process(es) that train: {command}"
    print(f"\n{textwrap.shorten(words, 100)}" if job.prints else "the table is with rank 0")
    for level, name, words in rows if job.prints else ():
        lines = textwrap.wrap(words, 78, break_long_words=False)
        print(f"{level:9}{name:13}" + f"\n{' ' * 22}".join(lines))
    sys.exit(any(row[0] == "ERROR" for row in rows) if job.steps else 2)


def findings(kind, *jobs):
    """Returns the rows of a kind: all that is wrong or else, in one line, that it is right."""
    try:
        found = sorted(dict.fromkeys(kind(*jobs)), key=lambda row: LEVELS.index(row[0]))
    except Exception as error:  # of this file: it says nothing of the training
        line = error.__traceback__.tb_next.tb_lineno
        found = [("not seen", f"check.py failed itself, line {line}: {error!r}")]
    wrong = [row for row in found if row[0] in LEVELS[:2]]
    found = wrong or found[:1] or [("not seen", f"nothing shows it: {kind.__doc__}")]
    return [(level, kind.__name__, words) for level, words in found]


LOADER = '''"""Loads the watch of tools/check by its path: it hides no module of a training."""

import importlib.util
import pathlib


def load():
    """PyTorch calls this at the end of `import torch`, since entry_points.txt names it."""
    path = pathlib.Path(__file__).with_name("not_to_import") / "watch.py"
    spec = importlib.util.spec_from_file_location("tools_check_watch", path)
    watch = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(watch)
    watch.install()
'''


def install_watch(folder):
    """Makes a folder which, on PYTHONPATH, lets PyTorch load the watch in each process."""
    info, copy = folder / "tools_check_loader-1.dist-info", folder / "not_to_import"
    for each in (info, copy):
        each.mkdir(parents=True, exist_ok=True)
    entry = "[torch.backends]\ntools_check = tools_check_loader:load\n"
    (info / "entry_points.txt").write_text(entry)
    (info / "METADATA").write_text("Name: tools-check-loader\nVersion: 1\n")
    (folder / "tools_check_loader.py").write_text(LOADER)
    (copy / "watch.py").write_text(Path(__file__).with_name("watch.py").read_text())


def run(command, args, folder, stop_at=0, life=1):  # watches a command, and returns a Job
    seen, plugin = folder / f"seen{life}", folder / "plugin"
    for each in (seen, folder / "tmp"):
        each.mkdir(parents=True, exist_ok=True)
    install_watch(plugin)
    paths = [str(plugin), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"PYTHONPATH": os.pathsep.join(paths), "CHECK_PARENT": process_name(os.getpid())}
    env |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1", "CHECK_STUCK": str(args.timeout / 2)}
    env |= {"CHECK_SEEN": str(seen), "CHECK_COMPARES": "1" if args.against or args.resume else ""}
    env |= {"CHECK_STEPS": str(args.steps * (10 if stop_at else 1)), "CHECK_PAUSE": str(stop_at)}
    words = shlex.split(command.replace("{tmp}", str(folder / "tmp")))
    process = subprocess.Popen(words, env=os.environ | env, start_new_session=True)
    size, until, ends = 0, time.time() + args.timeout, False
    try:
        while process.poll() is None and time.time() < until:
            time.sleep(0.1)
            texts = [path.read_text() for path in seen.glob("*[0-9]")]
            if stop_at and any(f'"number": 0, "step": {stop_at},' in text for text in texts):
                process.send_signal(signal.SIGTERM)
                stop_at = 0
            if sum(map(len, texts)) > size and not ends:
                ends = any('{"kind": "end"}' in text for text in texts)
                size, until = sum(map(len, texts)), time.time() + (GRACE if ends else args.timeout)
    finally:  # also after Ctrl-C
        status = process.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # what is left of the processes of the job
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(40)  # torchrun may need 30 seconds to end its workers
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    job, until = Job(seen, status), time.time() + GRACE
    while "CHECK_FOLDER" in os.environ and job.is_incomplete and time.time() < until:
        time.sleep(0.5)  # other machines end later
        job = Job(seen, status)
    return job


if __name__ == "__main__":
    main()
