"""Run commands in forks of this interpreter, which has imported torch: that takes four seconds.

Each line of stdin is a request in JSON, and its commands run at the same time:

    {"commands": [["singlegpu/gpt.py", "--epochs", "1"], ["singlegpu/text.py", "--help"]],
     "envs": [{"OMP_NUM_THREADS": "1"}, {}], "cwd": "/tmp", "timeout": 300}

The answer is a line of JSON: [[exit status, stdout, stderr], ...], in the order of the commands.
Where one fails, the others are killed 20 s later, as torchrun would do. The status is null if the
timeout ended the command. Processes that a command starts by torch.multiprocessing are forks, too.
A command whose environment has NETWORK runs in the network namespace of this name (ip netns).
"""

import ctypes
import functools
import importlib
import json
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback

import torch.multiprocessing

IMPORTS = "datasets numpy sacrebleu tokenizers torch._dynamo torchvision tqdm".split()


def torchrun_env(rank, agents, each):
    """What torchrun tells the process of this rank."""
    env = {"RANK": rank, "LOCAL_RANK": rank % each}
    env |= {"GROUP_RANK": rank // each, "GROUP_WORLD_SIZE": agents}
    env |= {"WORLD_SIZE": agents * each, "LOCAL_WORLD_SIZE": each, "TORCHELASTIC_RUN_ID": "test"}
    env |= {"TORCHELASTIC_MAX_RESTARTS": 0, "TORCHELASTIC_USE_AGENT_STORE": False}
    return {name: str(value) for name, value in env.items()}


def enter(network):
    with open(f"/run/netns/{network}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000):  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), network)


def run(command, cwd, env):
    """Do in a fork what the interpreter does with the command."""
    status, start = 0, torch.multiprocessing.start_processes
    torch.multiprocessing.spawn = functools.partial(start, start_method="fork")
    try:
        os.chdir(cwd)
        os.environ.update(env)
        if "NETWORK" in env:
            enter(env["NETWORK"])
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


def start(command, cwd, env):
    """Returns the id of the fork, and the files that receive its stdout and stderr."""
    files = [tempfile.TemporaryFile("w+") for _ in range(2)]
    child = os.fork()
    if not child:
        for number, file in enumerate((open(os.devnull), *files)):
            os.dup2(file.fileno(), number)
        run(command, cwd, env)
    return child, files


def wait(children, timeout):
    """Returns {child: exit status}, with None for those that had to be killed."""
    statuses, end = {}, time.monotonic() + timeout
    while len(statuses) < len(children):
        for child in children - statuses.keys():
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                statuses[child] = os.waitstatus_to_exitcode(status)
                end = min(end, time.monotonic() + 20) if status else end
            elif time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                statuses[child] = -signal.SIGKILL if any(statuses.values()) else None
        time.sleep(0.005)
    return statuses


def main():
    for name in IMPORTS:
        importlib.import_module(name)
    for line in sys.stdin:
        request, answer = json.loads(line), []
        pairs = zip(request["commands"], request["envs"])
        forks = [start(command, request["cwd"], env) for command, env in pairs]
        statuses = wait({child for child, _ in forks}, request["timeout"])
        for child, files in forks:
            for file in files:
                file.seek(0)
            answer.append((statuses[child], *(file.read() for file in files)))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
