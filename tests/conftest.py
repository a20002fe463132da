"""Start the scripts as a user does: as processes, with files in a folder of the test's own."""

import contextlib
import csv
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("singlegpu", "multigpu", "multinode", "hybrid", "quantize")
    for path in (ROOT / folder).glob("*.py")
)
# Tests are small: one thread each, so that those side by side do not slow each other.
torch.set_num_threads(1)
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


class Job:
    """A started command; it and its descendants, known by a variable in their environment, end with the test."""

    def __init__(self, command, cwd, env=None):
        self.mark = f"TEST_JOB={uuid.uuid4()}"
        name, value = self.mark.split("=")
        self.process = subprocess.Popen(
            list(map(str, command)),
            cwd=cwd,
            env=ENVIRONMENT | (env or {}) | {name: value},
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def wait(self, timeout=300):
        """Returns (exit status, stdout, stderr)."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.end()
            pytest.fail(f"still running after {timeout} s: {self.process.args}")
        return self.process.returncode, out, err

    def processes(self):
        """The living processes: {id: command line}."""
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and self.mark in (entry / "environ").read_text(errors="replace").split("\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        return found

    def workers(self):
        """The ids of the processes that train, where there are several."""
        return sorted(
            pid
            for pid, command in self.processes().items()
            if pid != self.process.pid
            and ("spawn_main" in command or "multinode/" in command and "distributed.run" not in command)
        )

    def end(self):
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process.returncode is None:
            self.process.communicate()


@pytest.fixture
def start(tmp_path):
    """start(folder, *arguments, processes=1) starts <folder>/<script>; multinode takes (agents, processes of each)."""
    jobs = []

    def start(folder, *arguments, processes=1, script="images.py", options=(), cwd=tmp_path, env=None):
        path, commands = ROOT / folder / script, []
        if folder == "multinode":
            agents, workers = processes if isinstance(processes, tuple) else (1, processes)
            rendezvous = (
                ["--standalone"]
                if agents == 1
                else [f"--nnodes={agents}", "--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{free_port()}"]
            )
            torchrun = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                *rendezvous,
                f"--nproc_per_node={workers}",
                *options,
            ]
            commands = [[*torchrun, "--", path, *arguments]] * agents
        elif folder == "multigpu":
            commands = [[sys.executable, path, "--num_gpus", processes, *arguments]]
        else:
            commands = [[sys.executable, path, *arguments]]
        if len(commands) > 1:
            env = {"GLOO_SOCKET_IFNAME": "lo", **(env or {})}  # two "nodes" on one machine
        started = [Job(command, cwd, env) for command in commands]
        jobs.extend(started)
        return started[0] if len(started) == 1 else started

    yield start
    for job in jobs:
        job.end()


@pytest.fixture
def run(start):
    """Like start, but waits; returns (exit status, stdout, stderr), of agents the worst status and all output."""

    def run(*arguments, timeout=300, **options):
        jobs = start(*arguments, **options)
        ended = [job.wait(timeout) for job in (jobs if isinstance(jobs, list) else [jobs])]
        return (
            max(abs(status) for status, _, _ in ended),
            "".join(out for _, out, _ in ended),
            "".join(err for _, _, err in ended),
        )

    return run


@pytest.fixture(scope="session")
def run_many():
    """run_many(script, cases) runs it with each list of arguments, fast: see many.py. Without a script a case names it.

    Returns a list of [exit status, stdout, stderr, peak resident memory in KiB].
    """

    def run_many(script, cases, timeout=300, **options):
        done = subprocess.run(
            [sys.executable, ROOT / "tests" / "many.py"],
            input=json.dumps([list(map(str, [ROOT / script, *case] if script else case)) for case in cases]),
            env=ENVIRONMENT | options,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run_many


def assert_refused(results, cases):
    """Each case ended with status 2 and one line on stderr that holds the case's message."""
    for (case, message), (status, _, err, _) in zip(cases.items(), results, strict=True):
        assert status == 2 and message in err, (case, err)
        assert len(err.splitlines()) == 1 and "Traceback" not in err, (case, err)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A --data_dir whose bigmnist holds 1,200 training and 101 (a prime number of) validation images."""
    folder = tmp_path_factory.mktemp("data") / "bigmnist"
    folder.mkdir()
    random = np.random.default_rng(0)
    patterns = random.integers(0, 120, (10, 28, 28))
    for split, size in (("train", 1200), ("test", 101)):
        labels = random.integers(0, 10, size)
        images = patterns[labels] + random.integers(0, 136, (size, 28, 28))
        np.save(folder / f"{split}_images.npy", images.astype(np.uint8))
        np.save(folder / f"{split}_labels.npy", labels)
    return folder.parent


@pytest.fixture(scope="session")
def real_data():
    """The folder of the real data sets, for --data_dir."""
    folder = Path(os.environ.get("TEST_DATA_DIR", "no folder given"))
    if not folder.is_dir():
        pytest.skip("TEST_DATA_DIR names no folder with the real data sets (MNIST/raw, ...)")
    return folder


def free_port():
    """A port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def rows(path):
    """The rows of a log, numbers as such."""

    def number(text):
        try:
            return float(text)
        except ValueError:
            return text

    with open(path, newline="") as file:
        return [{name: number(value) for name, value in row.items()} for row in csv.DictReader(file)]


def weights(path):
    return torch.load(path, weights_only=True)["model"]


def assert_same_weights(path, other):
    """Bit for bit."""
    a, b = weights(path), weights(other)
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def wait_for(condition, seconds=60):
    """Poll until the condition holds."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
    return value
