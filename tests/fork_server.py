"""Run commands, each in a fork of this interpreter, which has paid for the imports: those of torch take four seconds.

Each line of stdin is a request, as JSON:

    {"commands": [["singlegpu/gpt.py", "--epochs", "1"], ["-m", "torch.distributed.run", "--help"]],
     "together": false, "cwd": "/tmp", "env": {"OMP_NUM_THREADS": "1"}, "timeout": 300}

Its answer is a line of JSON, too: [[exit status, stdout, stderr, peak resident memory in KiB], ...], in the same order.
What has not ended after `timeout` seconds is killed, and has the status null. What a command spawns by
torch.multiprocessing or starts as torchrun is a fork of it, too; other processes are new interpreters, as ever.
"""

import functools
import importlib
import json
import math
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback

import torch.multiprocessing
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler


def run(command, cwd, env):
    """In a fork: what the interpreter does with the command."""
    status = 0
    torch.multiprocessing.spawn = functools.partial(torch.multiprocessing.start_processes, start_method="fork")
    SubprocessHandler._popen = lambda handler, command, env: Worker(command, env)
    try:
        os.chdir(cwd)
        os.environ.update(env)
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Worker:
    """What subprocess.Popen is to torchrun: a process of `python -u SCRIPT ARGUMENTS...`."""

    def __init__(self, command, env):
        self.returncode, self.pid = None, os.fork()
        if not self.pid:
            os.setsid()
            run(list(command[2:]), os.getcwd(), env)

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout=math.inf):
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("worker", timeout)
            time.sleep(0.01)
        return self.returncode


def start(command, cwd, env):
    """Returns the fork's id, and the files that its output goes to."""
    out, err = (tempfile.TemporaryFile("w+") for _ in range(2))
    child = os.fork()
    if not child:
        for number, file in enumerate((open(os.devnull), out, err)):
            os.dup2(file.fileno(), number)
        run(command, cwd, env)
    return child, out, err


def finish(child, out, err, timeout):
    """Waits for the fork; returns its row of the answer."""
    end = time.monotonic() + timeout
    while not (ended := os.wait4(child, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.01)
    in_time = ended[0]
    if not in_time:
        os.kill(child, signal.SIGKILL)
        ended = os.wait4(child, 0)
    for file in (out, err):
        file.seek(0)
    return os.waitstatus_to_exitcode(ended[1]) if in_time else None, out.read(), err.read(), ended[2].ru_maxrss


def main():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name in ("numpy", "sacrebleu", "tokenizers", "torch._dynamo", "torch.distributed.run", "torchvision", "tqdm"):
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        place, timeout = (request["cwd"], request["env"]), request["timeout"]
        if request["together"]:
            started = [start(command, *place) for command in request["commands"]]
            results = [finish(*job, timeout) for job in started]
        else:
            results = [finish(*start(command, *place), timeout) for command in request["commands"]]
        print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
