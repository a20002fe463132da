"""Start the scripts as a user does: as processes, with files in a folder of the test's own."""

import contextlib
import importlib.util
import io
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fork_server import run_all, torchrun_env
from torch import load
from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("singlegpu", "multigpu", "multinode", "hybrid", "quantize")
SCRIPTS = sorted(f"{name}/{path.name}" for name in FOLDERS for path in (ROOT / name).glob("*.py"))
# One thread a process: tests side by side do not slow each other. No test gives a flag for it.
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
HOME = tempfile.TemporaryDirectory(prefix="hf_home_", ignore_cleanup_errors=True)
os.environ["HF_HOME"] = HOME.name  # caches of `datasets`
# A shell that runs `make test` in the background lets it, and what it starts, ignore these.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
ENVIRONMENT = dict(os.environ)
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}  # where two "nodes" on this machine meet
WORKERS = os.environ.get("TEST_NUM_WORKERS")  # that all training scripts have, if it is set
TRAINING = re.compile(r"(?<!quantize)/(images|text|translation|gpt\w*)\.py$")
RATE = "def learning_rate(args, done):\n"
CONSTANT = {RATE: f"{RATE}    return args.learning_rate\n"}  # so --max_steps shapes no weights
TIMEOUT = 600  # seconds; ends what hangs, and is at least ten times what any command takes
torch.set_num_threads(1)
# Long files are run first, in this order. Those whose tests share nothing are run last: their tests
# are spread over the processes of pytest, so that none waits long at the end.
LONGEST = """test_stops test_slurm test_project test_emulator test_flags test_mnist test_quantize
    test_examples test_copies""".split()
APART = """test_stops test_training test_check test_gpu test_launchers test_hybrid test_hub
    test_check_programs soak_pages""".split()


def module(script):
    """Returns a script as a module."""
    path = ROOT / script
    path = path / "__main__.py" if path.is_dir() else path
    spec = importlib.util.spec_from_file_location("script", path)
    found = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)  # as Python does where it starts a script
        spec.loader.exec_module(found)
    return found


def call(script, *arguments):
    """Runs main() of a script, a module, in this process, since imports take seconds."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", [script.__file__, *map(str, arguments)])
        try:
            script.main()
        except SystemExit as ended:
            status = int(ended.code or 0) if not isinstance(ended.code, str) else 1
            print(ended.code if isinstance(ended.code, str) else "", end="", file=err)
    return SimpleNamespace(returncode=status, stdout=out.getvalue(), stderr=err.getvalue())


def pytest_collection_modifyitems(items):
    """Sorts the tests, so that no worker waits at the end."""

    def place(item):
        name = item.path.stem
        if name in LONGEST:
            return LONGEST.index(name)
        return len(LONGEST) + (1 + APART.index(name) if name in APART else 0)

    items.sort(key=place)


class Scheduler(LoadFileScheduling):
    """A file is one worker's, but for those of APART."""

    def _split_scope(self, nodeid):
        file = super()._split_scope(nodeid)
        return nodeid if Path(file).stem in APART else file


def pytest_xdist_make_scheduler(config, log):
    return Scheduler(config, log)


class Job:
    """A started command. A variable in their environment tells its processes, which a test ends."""

    def __init__(self, command, cwd):
        name = str(time.time_ns())
        self.mark = f"TEST_JOB={name}"
        how = {"cwd": cwd, "env": ENVIRONMENT | {"TEST_JOB": name}, "text": True}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, **how, **pipes, start_new_session=True)

    def wait(self):
        """Returns (exit status, stdout, stderr)."""
        out, err = self.process.communicate(timeout=TIMEOUT)
        return self.process.returncode, out, err

    def processes(self):
        """Its living processes, {id: (id of the parent, command line)}."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.mark in (entry / "environ").read_text(errors="replace").split("\0"):
                    parent = int((entry / "stat").read_text().rsplit(")")[1].split()[1])
                    found[int(entry.name)] = parent, (entry / "cmdline").read_text()
        return found

    def workers(self):
        """The ids of the processes that train: what the command has started, without helpers."""
        found = self.processes().items()
        own = [(pid, words) for pid, (parent, words) in found if parent == self.process.pid]
        return [pid for pid, words in own if "resource_tracker" not in words]

    def end(self):
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process.returncode is None:
            self.process.communicate()


def words_of(script, arguments, processes):
    """Returns the script with its arguments, and the numbers of torchrun agents and processes.

    `processes` (2, 1) is two agents of one process each. Without torchrun there are 0 agents.
    """
    folder = Path(script).parent.name
    count = ["--num_gpus", processes] if folder == "multigpu" else []
    workers = ["--num_workers", WORKERS] if WORKERS and TRAINING.search(str(script)) else []
    words = list(map(str, [ROOT / script, *count, *workers, *arguments]))
    if folder not in ("multinode", "hybrid", "tools", "right", "wrong"):
        return words, 0, 1
    return words, *(processes if isinstance(processes, tuple) else (1, processes))


# Each process of pytest has ports of its own, all below those that the system gives.
PORTS = itertools.count(10_000 + os.getpid() * 499 % 20_000)


def free_port():
    """A port that nobody listens on."""
    for port in PORTS:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@pytest.fixture
def start(tmp_path):
    """start(script, *arguments, processes=1) starts it as a user does: a Job."""
    jobs = []

    def start(script, *arguments, processes=1):
        words, agents, each = words_of(script, arguments, processes)
        torchrun = f"-m torch.distributed.run --nproc_per_node={each} --standalone --".split()
        jobs.append(Job([sys.executable, *(torchrun if agents else ()), *words], tmp_path))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()


def forks_of(script, arguments, processes, before=(), **env):
    """The commands of a script that torchrun does not start, and their environments."""
    words, agents, each = words_of(script, arguments, processes)
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env |= LOOPBACK if agents > 1 else {}
    envs = [torchrun_env(rank, agents, each) | env for rank in range(agents * each)] or [env]
    return [[*map(str, before), *words]] * len(envs), envs


@pytest.fixture(scope="session")
def attempt(tmp_path_factory):
    """attempt(script, *arguments, processes=1) runs it without torchrun and a start's imports.

    Returns (exit status, stdout, stderr); of several processes the worst, and all output. The
    words `before` precede the script. It runs in the folder `cwd`.
    """
    folder = tmp_path_factory.mktemp("cwd")

    def attempt(script, *arguments, processes=1, before=(), cwd=folder, **env):
        commands, envs = forks_of(script, arguments, processes, before, **env)
        statuses, outs, errs = zip(*run_all(commands, envs, cwd, TIMEOUT))
        return max(map(abs, statuses)), "".join(outs), "".join(errs)

    return attempt


@pytest.fixture(scope="session")
def run(attempt):
    """run(script, *arguments, processes=1): an attempt without error or warning; returns stdout.

    A newer library may deprecate a name. pytest shows that at its end, or takes it for an error.
    """

    def run(script, *arguments, **more):
        status, out, err = attempt(script, *arguments, **more)
        not_ours = r"DeprecationWarning|FutureWarning|Warning: barrier\(\): using the device"
        if torch.__version__ < "2.14":  # PyTorch's own: groups of the emulated device, a trace
            not_ours += "|Warning: No backend of type 0 found|UserWarning: Warning: Profiler clears"
        if sys.version_info[:3] == (3, 13, 0):  # of torch.compile
            not_ours += "|RuntimeWarning: Guards may run slower"
        assert status == 0 and "Warning" not in re.sub(not_ours, "", err), err
        for line in re.findall(r".*(?:DeprecationWarning|FutureWarning): .*", err):
            warnings.warn(f"deprecated: {line}", stacklevel=2)
        return out

    return run


@pytest.fixture
def logged(run, tmp_path):
    """logged(script, *arguments, processes=1) runs it, and returns the path of its log."""

    def logged(script, *arguments, **more):
        log = tmp_path / f"log{len([*tmp_path.glob('log*')])}.jsonl"
        run(script, *arguments, "--log", log, **more)
        return log

    return logged


@pytest.fixture(scope="session")
def refused(attempt):
    """refused(message, script, *arguments): it ends, and its error has the message; the errors."""

    def refused(message, *words, **more):
        status, _, err = attempt(*words, **more)
        assert status in (1, 2) and message in err and "Traceback" not in err, (words, err)
        return err

    return refused


def replaced(text, changes):
    """The text with {piece: another} in place of its pieces, each of which must be there once."""
    for piece, other in changes.items():
        assert text.count(piece) == 1, piece
        text = text.replace(piece, other)
    return text


@pytest.fixture
def changed(tmp_path):
    """changed(script, {text: other, ...}) is the path of such a copy."""

    def changed(script, changes):
        (copy := tmp_path / script).parent.mkdir(exist_ok=True)
        copy.write_text(replaced((ROOT / script).read_text(), changes))
        return copy

    return changed


@pytest.fixture(scope="session")
def emulator():
    """Builds the emulated accelerator, once for each torch; half a minute."""
    command = [sys.executable, "-c", "import torch; print(torch.emu.device_count())"]
    env = ENVIRONMENT | {"PYTHONPATH": str(ROOT / "tests/emulator")}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode and not os.environ.get("REQUIRE_EMULATOR"):
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr


@pytest.fixture
def chance():
    """A generator for what happens at any moment. Its seed is printed where a test fails."""
    seed = int(os.environ.get("TEST_SEED", 1))
    print("TEST_SEED", seed)
    return random.Random(seed)


def write_mnist(folder):
    """Writes an MNIST of 1,200 images, and a prime number of them to test on."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    patterns = generator.integers(0, 120, (10, 28, 28))
    for split, size in (("train", 1200), ("t10k", 401)):
        labels = generator.integers(0, 10, size)
        images = patterns[labels] + generator.integers(0, 136, (size, 28, 28))
        for name, kind, array in (("images-idx3", 2051, images), ("labels-idx1", 2049, labels)):
            content = np.array([kind, *array.shape], ">i4").tobytes() + array.astype("u1").tobytes()
            (folder / f"{split}-{name}-ubyte").write_bytes(content)


def write_tables(folder):
    """Writes a data set of texts of four classes, and of numbers and their names."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    names = "zero one two three four five six seven eight nine".split()
    for split, size in (("train", 600), ("validation", 120), ("test", 120)):
        lines = ["text,label,number,name"]
        for row in range(size):
            digits = generator.integers(10, size=6 + row % 7)
            text = " ".join(f"w{10 * (row % 4) + digit}" for digit in digits)
            name = " ".join(names[digit] for digit in digits)
            lines.append(f"{text},{row % 4},{' '.join(map(str, digits))},{name}")
        (folder / f"{split}.csv").write_text("\n".join(lines))


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A --data_dir with that MNIST, those tables, and a text for gpt.py."""
    folder = tmp_path_factory.mktemp("data")
    write_mnist(folder / "MNIST/raw")
    write_tables(folder / "tables")
    generator = random.Random(0)
    lengths = [generator.randint(2, 7) for _ in range(40)]
    words = ["".join(generator.choices("abcdefghij", k=length)) for length in lengths]
    text = " ".join(generator.choices(words, k=10_000))
    (folder / "words.txt").write_text(text[:40_000])
    (folder / "text.txt").write_text(text[:31_050])  # to validate on, an odd number of sequences
    return folder


@pytest.fixture
def base(data):
    """Flags of a training of images.py. An epoch has 25 steps."""
    words = ("--model", "mlp", "--dropout", 0.5, "--dataset", "mnist", "--data_dir", data)
    return (*words, "--batch_size", 48)


def rows(path):
    """The rows of a log; of a repeated step the last."""
    every = map(json.loads, Path(path).read_text().splitlines())
    return list({(row["run"], row["step"], row["rank"]): row for row in every}.values())


def curve(path, *more):
    """Training and validation loss, and further columns, of each validation (E, 2 + ...)."""
    first = [row for row in rows(path) if row["rank"] == 0 and "val_loss" in row]
    return np.array([[row[name] for name in ("train_loss", "val_loss", *more)] for row in first])


def assert_same_weights(path, other, rounding=0):
    """Bit for bit, or up to such a difference."""
    weights, others = (load(each)["model"] for each in (path, other))
    torch.testing.assert_close(weights, others, rtol=0, atol=rounding)


def wait_for(condition, seconds=TIMEOUT, pause=0.01):
    """Poll until the condition holds; returns its value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(pause)
    return value
