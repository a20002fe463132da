"""Break running jobs, at random moments and in every folder, start them again, and see that nothing is lost.

    python tests/chaos.py --kills 100 --stops 12 --jobs 20 --seed 1

A kill: SIGKILL or SIGTERM for a random process of a job or for what launched it, while it starts, between two steps, or
while a snapshot is being written. The same command then goes on, is broken again, and in the end has the weights of an
undisturbed run, bit for bit, a row for each epoch and process in its log, and has left nothing behind: no process, no
shared memory, no temporary file. A stop: SIGSTOP for a random process; the job must name it and end, with a status that
is not 0, within --timeout and 15 s; of two nodes, it must go on by itself. Jobs: that many at the same moment, which
must not meet.
Prints a line for each, and the sums; exit status 1 if anything was lost. The tests run short forms of all this.
"""

import argparse
import collections
import contextlib
import itertools
import math
import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
from conftest import Job, assert_same_weights, commands_of, environment_of, rows, wait_for, write_tiny

IMAGES = "--dataset bigmnist --batch_size 24 --epochs 4 --dropout 0.5".split()
GPT = "--d_model 64 --n_heads 2 --num_layers 4 --seq_len 32 --batch_size 16 --epochs 3 --max_steps 60".split()
SHAPES = {  # of jobs: folder, script, processes (of each agent), arguments
    "singlegpu": ("singlegpu", "images.py", 1, IMAGES),
    "multigpu": ("multigpu", "images.py", 2, IMAGES),
    "multinode": ("multinode", "images.py", 2, IMAGES),
    "multinode, 2 nodes": ("multinode", "images.py", (2, 1), IMAGES),
    "hybrid, stages": ("hybrid", "images.py", 2, [*IMAGES, "--num_stages", "2"]),
    "hybrid, pipeline": ("hybrid", "gpt.py", 2, [*GPT, "--num_stages", "2"]),
}
MOMENTS = ("start", "step", "save")
GRACE = 15  # s after --timeout, until a job with a stopped process has ended


class Run:
    """A job in a folder of its own, started as often as need be."""

    def __init__(self, name, folder, data):
        self.name, self.folder = name, Path(folder)
        (self.folder / "tmp").mkdir(parents=True)
        self.kind, self.script, self.processes, arguments = SHAPES[name]
        self.snapshot, self.partial, self.log = (self.folder / each for each in ("s.pt", "s.pt.tmp", "log.csv"))
        source = ("--dataset", data / "text.txt") if self.script == "gpt.py" else ("--data_dir", data)
        files = ("--snapshot", self.snapshot, "--snapshot_every", "5", "--log", self.log)
        timeout = () if self.kind == "singlegpu" else ("--timeout", "60")
        self.arguments = [*arguments, *source, *files, "--threads", "1", *timeout]

    def commands(self, *more, restarts=0):
        """Returns what follows `python`, for each agent, and their environment."""
        options = (f"--max_restarts={restarts}", "--rdzv_conf=join_timeout=60") if self.processes == (2, 1) else ()
        commands = commands_of(self.kind, self.script, self.processes, options, [*self.arguments, *more])
        environment = {"TMPDIR": str(self.folder / "tmp"), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return commands, environment_of(commands, environment)

    def start(self, *more, restarts=0):
        """Returns its jobs: one, or one an agent."""
        commands, environment = self.commands(*more, restarts=restarts)
        return [Job([sys.executable, *command], self.folder, environment) for command in commands]

    def finish(self, jobs, seconds=None):
        """Waits until they and all that they started have ended; returns the worst status and all of stderr."""
        seconds = seconds or (400 if len(jobs) > 1 else 240)  # torchrun waits 300 for another node's
        try:
            ended = [job.wait(seconds) for job in jobs]
            wait_for(lambda: not any(job.processes() for job in jobs), 75)
        finally:
            for job in jobs:
                job.end()
        return max(abs(status) for status, _, _ in ended), "".join(err for _, _, err in ended)

    def complete(self):
        """Undisturbed, to its end."""
        status, err = self.finish(self.start())
        assert status == 0, err
        return self


def make_data(folder):
    """What the jobs train on."""
    write_tiny(folder)
    (folder / "text.txt").write_text(Path(__file__).read_text() * 10)
    return folder


def assert_nothing_lost(run, reference):
    """The weights and the log of the undisturbed run, and nothing else."""
    assert_same_weights(run.snapshot, reference.snapshot)
    logs = [sorted((row["epoch"], row["rank"], row["val_loss"]) for row in rows(each.log)) for each in (run, reference)]
    assert logs[0] == logs[1]
    left = {path for path in run.folder.rglob("*") if not path.is_dir()} - {run.snapshot, run.log}
    assert not left, left


def wait_for_moment(run, jobs, moment, chance):
    """Returns at a random time while the job starts, after it has saved, or in which it saves."""

    def ended():
        return all(job.process.poll() is not None for job in jobs)

    def saved():
        return run.snapshot.stat().st_mtime_ns if run.snapshot.exists() else 0

    if moment == "start":
        time.sleep(chance.uniform(0, 8))
        return
    for _ in range(chance.randrange(1, 6)):
        before = saved()
        if moment == "step":
            wait_for(lambda: saved() != before or ended(), 120)
        else:
            wait_for(lambda: run.partial.exists() or ended(), 120, pause=0.0005)
    time.sleep(chance.uniform(0, 0.1 if moment == "step" else 0.02))


def kill(run, reference, chance, kills, counts, victims=("rank", "launcher")):
    """Breaks a run up to so many times, and adds to the counts; then it must end as the undisturbed one."""
    for _ in range(kills):
        moment, whom = chance.choice(MOMENTS), chance.choice(victims)
        signum = chance.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
        jobs = run.start()
        wait_for_moment(run, jobs, moment, chance)
        job, saving = chance.choice(jobs), run.partial.exists()
        victim = chance.choice(whom == "rank" and job.workers() or [job.process.pid])
        if job.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # a rank that has just ended
                os.kill(victim, signum)
            counts[run.name, signum.name, "a rank" if victim != job.process.pid else "the launcher"] += 1
            counts["while a snapshot was written"] += saving
        status, _ = run.finish(jobs)
        print(f"{run.name}: {signum.name}, {whom}, {moment}{', saving' * saving}: status {status}", flush=True)
    assert_nothing_lost(run.complete(), reference)


def stop(run, reference, chance, timeout=5):
    """SIGSTOP for a random process; returns the seconds until all had ended. Then as after a kill.

    Of two nodes, torchrun starts all processes once more, as in the job files: without, the torchrun of a node whose
    processes all hang ends 30 s later or, where it serves the rendezvous, not at all.
    """
    nodes = 2 if run.processes == (2, 1) else 1
    jobs = run.start("--timeout", timeout, restarts=nodes - 1)
    wait_for(run.snapshot.exists, 120)
    time.sleep(chance.uniform(0, 0.5))
    ranks = [pid for job in jobs for pid in job.workers()]
    victim = chance.choice(ranks)
    told = re.search(r"\0RANK=(\d+)\0", Path(f"/proc/{victim}/environ").read_text())  # by torchrun
    rank, begin = int(told[1]) if told else ranks.index(victim), time.monotonic()
    os.kill(victim, signal.SIGSTOP)
    status, err = run.finish(jobs, timeout + GRACE if nodes == 1 else None)
    seconds = time.monotonic() - begin
    print(f"{run.name}: rank {rank} stopped: status {status} after {seconds:.1f} s", flush=True)
    assert (status == 0) == (nodes == 2) and f"no answer of ranks [{rank}]" in err, err
    assert_nothing_lost(run.complete(), reference)
    return seconds


def crowd(count, folder, data):
    """So many jobs of two processes at the same moment: all must finish, those of one command with the same loss."""
    names = [("multigpu", "multinode", "hybrid, pipeline")[number % 3] for number in range(count)]
    runs = [Run(name, folder / f"crowd{number}", data) for number, name in enumerate(names)]
    started = [run.start("--epochs", "1", "--max_steps", "10") for run in runs]
    losses = {}
    for run, jobs in zip(runs, started):
        status, err = run.finish(jobs, 900)
        assert status == 0, err
        losses.setdefault(run.name, set()).update(row["train_loss"] for row in rows(run.log))
    assert all(len(values) == 1 for values in losses.values()), losses


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("seed", 1), ("kills", 100), ("stops", 12), ("jobs", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", nargs="+", choices=tuple(SHAPES), default=tuple(SHAPES))
    options = parser.parse_args()
    chance, counts, lost, seconds = random.Random(options.seed), collections.Counter(), [], {}
    shared, begin = set(os.listdir("/dev/shm")), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        data, number = make_data(folder / "data"), itertools.count()

        def survives(what, *arguments):
            try:
                return what(*arguments)
            except BaseException as error:
                lost.append(f"{what.__name__}: {error}")
                print(f"LOST: {lost[-1]}", flush=True)
                if not isinstance(error, (AssertionError, pytest.fail.Exception)):
                    raise

        references = {name: Run(name, folder / name, data).complete() for name in options.only}
        names = itertools.cycle(options.only)
        while sum(count for key, count in counts.items() if isinstance(key, tuple)) < options.kills:
            run = Run(name := next(names), folder / f"{next(number)}", data)
            survives(kill, run, references[name], chance, 4, counts)
        names = itertools.cycle(name for name in options.only if name != "singlegpu")
        for name in itertools.islice(names, options.stops):
            run = Run(name, folder / f"{next(number)}", data)
            seconds.setdefault(name, []).append(survives(stop, run, references[name], chance) or math.nan)
        survives(crowd, options.jobs, folder, data)
    for key, count in sorted(counts.items(), key=str):
        print(f"| {', '.join(key) if isinstance(key, tuple) else key} | {count} |")
    for name, values in seconds.items():
        print(f"| {name}: stopped, --timeout 5 | ended after {', '.join(f'{value:.0f}' for value in values)} s |")
    left, minutes = set(os.listdir("/dev/shm")) - shared, (time.monotonic() - begin) / 60
    print(f"{options.jobs} jobs at once; seed {options.seed}; {minutes:.0f} minutes")
    print(f"{len(lost)} lost; {len(left)} pieces of shared memory left")
    sys.exit(bool(lost or left))


if __name__ == "__main__":
    main()
