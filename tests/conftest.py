"""Start the scripts as a user does: as processes, with files in a folder of the test's own."""

import contextlib
import csv
import fcntl
import json
import os
import re
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
# Launches that give one loss curve: folder, processes (of each torchrun agent), parts of accumulation.
LAUNCHES = [("singlegpu", 1, 1), ("multigpu", 2, 3), ("multigpu", 3, 1), ("multinode", (2, 2), 2)]
# Tests are small: one thread each, so that those side by side do not slow each other.
torch.set_num_threads(1)
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def pytest_collection_modifyitems(items):
    """The longest first, so that nobody waits for one at the end; last those that run alone, which wait for others."""
    long = re.compile("time_limit|real_|preempted")
    items.sort(key=lambda item: (bool(item.get_closest_marker("alone")), not long.search(item.name)))


@pytest.fixture(autouse=True)
def alone(request):
    """Nothing is tested beside a test with this mark, which measures."""
    with open(ROOT / "tests" / "conftest.py") as file:
        fcntl.flock(file, fcntl.LOCK_EX if request.node.get_closest_marker("alone") else fcntl.LOCK_SH)
        yield


def processes_of(mark):
    """The living processes that have `mark` in their environment: {id: command line}."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_text(errors="replace").split("\0"):
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
    return found


def end(mark):
    """Kill the processes of a mark."""
    for pid in processes_of(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Job:
    """A started command; it and its descendants, known by a variable in their environment, end with the test."""

    def __init__(self, command, cwd, env):
        self.mark = f"TEST_JOB={uuid.uuid4()}"
        name, value = self.mark.split("=")
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env=ENVIRONMENT | env | {name: value},
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def wait(self, timeout=180):
        """Returns (exit status, stdout, stderr)."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.end()
            pytest.fail(f"still running after {timeout} s: {self.process.args}")
        return self.process.returncode, out, err

    def processes(self):
        return processes_of(self.mark)

    def workers(self):
        """The ids of the processes that train, where there are several."""
        return sorted(
            pid
            for pid, command in self.processes().items()
            if pid != self.process.pid
            and (
                "spawn_main" in command
                or re.search("(multinode|hybrid)/", command)
                and "distributed.run" not in command
            )
        )

    def end(self):
        end(self.mark)
        if self.process.returncode is None:
            self.process.communicate()


def commands_of(folder, script, processes, options, arguments):
    """What follows `python`, for each agent; multinode takes (agents, processes of each), or the processes of one."""
    path, arguments = str(ROOT / folder / script), list(map(str, arguments))
    if folder == "multigpu":
        return [[path, "--num_gpus", str(processes), *arguments]]
    if folder not in ("multinode", "hybrid"):
        return [[path, *arguments]]
    agents, workers = processes if isinstance(processes, tuple) else (1, processes)
    rendezvous = [f"--nnodes={agents}", "--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{free_port()}"]
    torchrun = ["-m", "torch.distributed.run", *(rendezvous if agents > 1 else ["--standalone"])]
    return [[*torchrun, f"--nproc_per_node={workers}", *options, "--", path, *arguments]] * agents


def environment_of(commands, env):
    """Two "nodes" on one machine meet on its loopback."""
    return ({"GLOO_SOCKET_IFNAME": "lo"} if len(commands) > 1 else {}) | (env or {})


@pytest.fixture
def start(tmp_path):
    """start(folder, *arguments, processes=1) starts <folder>/<script> as a user does: a Job, or one an agent."""
    jobs = []

    def start(folder, *arguments, processes=1, script="images.py", options=(), env=None):
        commands = commands_of(folder, script, processes, options, arguments)
        started = [Job([sys.executable, *each], tmp_path, environment_of(commands, env)) for each in commands]
        jobs.extend(started)
        return started[0] if len(started) == 1 else started

    yield start
    for job in jobs:
        job.end()


@pytest.fixture(scope="session")
def fork():
    """fork(commands) runs them in forks of an interpreter that has torch: see fork_server.py. Returns its answer."""
    command = [sys.executable, ROOT / "tests" / "fork_server.py"]
    with subprocess.Popen(command, env=ENVIRONMENT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:

        def fork(commands, cwd=ROOT, env=None, timeout=180, together=False):
            mark = uuid.uuid4()
            request = {"commands": commands, "together": together, "cwd": str(cwd), "timeout": timeout}
            print(json.dumps(request | {"env": {"TEST_JOB": str(mark), **(env or {})}}), file=server.stdin, flush=True)
            results = json.loads(server.stdout.readline())
            end(f"TEST_JOB={mark}")
            assert all(status is not None for status, *_ in results), f"still running after {timeout} s: {results}"
            return results

        yield fork
        server.stdin.close()


@pytest.fixture
def run(fork, tmp_path):
    """run(folder, *arguments, processes=1) is start without a start's 4 seconds of imports, and waits.

    Returns (exit status, stdout, stderr), of several agents the worst status and all output.
    """

    def run(folder, *arguments, processes=1, script="images.py", options=(), env=None, timeout=180):
        commands = commands_of(folder, script, processes, options, arguments)
        ended = fork(commands, tmp_path, environment_of(commands, env), timeout, together=True)
        statuses, outs, errs, _ = zip(*ended)
        return max(map(abs, statuses)), "".join(outs), "".join(errs)

    return run


@pytest.fixture
def run_many(fork):
    """run_many(script, cases) runs it with each list of arguments in turn, and returns what fork does."""

    def run_many(script, cases, timeout=180, **env):
        return fork([list(map(str, [ROOT / script, *case])) for case in cases], env=env, timeout=timeout)

    return run_many


def assert_refused(results, cases):
    """Each case ended with status 2 and one line on stderr that holds the case's message."""
    for (case, message), (status, _, err, _) in zip(cases.items(), results, strict=True):
        assert status == 2 and message in err, (case, err)
        assert len(err.splitlines()) == 1 and "Traceback" not in err, (case, err)


def write_tiny(folder):
    """Make the folder a --data_dir: a bigmnist of 1,200 training and 101 (a prime number of) validation images."""
    (folder / "bigmnist").mkdir(parents=True)
    random = np.random.default_rng(0)
    patterns = random.integers(0, 120, (10, 28, 28))
    for split, size in (("train", 1200), ("test", 101)):
        labels = random.integers(0, 10, size)
        images = patterns[labels] + random.integers(0, 136, (size, 28, 28))
        np.save(folder / "bigmnist" / f"{split}_images.npy", images.astype(np.uint8))
        np.save(folder / "bigmnist" / f"{split}_labels.npy", labels)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """That folder."""
    return write_tiny(tmp_path_factory.mktemp("data"))


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


def wait_for(condition, seconds=60, pause=0.01):
    """Poll until the condition holds."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(pause)
    return value
