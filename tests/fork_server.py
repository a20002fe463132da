"""Run commands in forks of this interpreter, which has imported torch: that takes four seconds.

Each line of stdin is a request in JSON, and its commands run at the same time:

    {"commands": [["singlegpu/gpt.py", "--epochs", "1"], ["-m", "torch.distributed.run", "--help"]],
     "cwd": "/tmp", "env": {"OMP_NUM_THREADS": "1"}, "timeout": 300}

The answer is a line of JSON: [[exit status, stdout, stderr], ...], in the order of the commands.
The status is null if the timeout ended the command. Processes that a command starts by
torch.multiprocessing or as torchrun are forks, too.
"""

import functools
import importlib
import json
import math
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback

import torch.multiprocessing
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

IMPORTS = "numpy sacrebleu tokenizers torch._dynamo torch.distributed.run torchvision tqdm".split()


def run(command, cwd, env):
    """Do in a fork what the interpreter does with the command."""
    status = 0
    start = functools.partial(torch.multiprocessing.start_processes, start_method="fork")
    torch.multiprocessing.spawn = start
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
    """A process of torchrun, which would start `python -u SCRIPT ARGUMENTS...`."""

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
    """Returns the id of the fork, and the files that receive its stdout and stderr."""
    files = [tempfile.TemporaryFile("w+") for _ in range(2)]
    child = os.fork()
    if not child:
        for number, file in enumerate((open(os.devnull), *files)):
            os.dup2(file.fileno(), number)
        run(command, cwd, env)
    return child, files


def finish(child, files, end):
    """Wait for the fork until the time `end`; returns its part of the answer."""
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.01)
    status = os.waitstatus_to_exitcode(ended[1]) if ended[0] else None
    if status is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    for file in files:
        file.seek(0)
    return status, *(file.read() for file in files)


def main():
    for name in IMPORTS:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        end = time.monotonic() + request["timeout"]
        forks = [start(command, request["cwd"], request["env"]) for command in request["commands"]]
        print(json.dumps([finish(*fork, end) for fork in forks]), flush=True)


if __name__ == "__main__":
    main()
