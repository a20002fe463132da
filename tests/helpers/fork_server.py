"""Run commands in forks of one process that has imported torch: that takes four seconds.

Processes that a command starts by torch.multiprocessing are forks, too. A command whose environment
has NETWORK runs in the network namespace of this name (ip netns). One that has EMU_DEVICES runs on
the emulated accelerator, as with PYTHONPATH=tests/emulator; one that has CHECK_SEEN is watched by
tools/check.
"""

import contextlib
import ctypes
import functools
import gc
import importlib
import multiprocessing.connection
import os
import runpy
import select
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

os_fork = os.fork
CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = """datasets numpy sacrebleu tokenizers torch._dynamo torchvision tqdm
    transformers.models.distilbert.modeling_distilbert transformers.models.llama.modeling_llama"""
CONTEXT.set_forkserver_preload(PRELOADED.split())


def torchrun_env(rank, agents, each):
    """What torchrun tells the process of this rank."""
    env = {"RANK": rank, "LOCAL_RANK": rank % each}
    env |= {"GROUP_RANK": rank // each, "GROUP_WORLD_SIZE": agents}
    env |= {"WORLD_SIZE": agents * each, "LOCAL_WORLD_SIZE": each, "TORCHELASTIC_RUN_ID": "test"}
    env |= {"TORCHELASTIC_MAX_RESTARTS": 0, "TORCHELASTIC_USE_AGENT_STORE": False}
    return {name: str(value) for name, value in env.items()}


def fork():
    """os.fork(). In Python 3.11 a child may wait for a lock for ever: then another one starts.

    This is github.com/python/cpython/issues/112275, of processes with threads: those with loaders.
    """
    while True:
        reads, writes = os.pipe()
        if not (pid := os_fork()):
            os.close(reads)
            os.close(writes)  # says that it is there
            return 0
        os.close(writes)
        is_there = select.select([reads], [], [], 30)[0]
        os.close(reads)
        if is_there:
            return pid
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def run(command, cwd, env, files):
    """Do in a fork what the interpreter does with the command; multiprocessing ends it alike."""
    import torch.multiprocessing  # here, as the tests need not wait for it

    gc.freeze()  # no collection looks at what the imports have made, and copies its pages
    os.setsid()  # run_all() ends the group of this process
    if sys.version_info < (3, 12):
        os.fork = fork
    methods = multiprocessing.get_all_start_methods()  # the first one is that of this Python
    multiprocessing.set_start_method(methods[0], force=True)  # in place of the fork server
    start = torch.multiprocessing.start_processes
    torch.multiprocessing.spawn = functools.partial(start, start_method="fork")
    for number, path in enumerate((os.devnull, *files)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    os.chdir(cwd)
    os.environ.update(env)
    if "NETWORK" in env:
        with open(f"/run/netns/{env['NETWORK']}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000):  # CLONE_NEWNET
                raise OSError(ctypes.get_errno(), env["NETWORK"])
    # As torch does at its import, where it finds one of these.
    if "EMU_DEVICES" in env:
        sys.path.insert(0, str(Path(__file__).parents[1] / "emulator"))
        importlib.import_module("emu").register()
    if "CHECK_SEEN" in env:
        sys.path.insert(0, env["PYTHONPATH"].split(os.pathsep)[0])
        importlib.import_module("tools_check_loader").load()
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__")
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")


class Fork:
    """A command in a fork."""

    def __init__(self, command, cwd, env):
        self.folder = tempfile.mkdtemp()
        self.files = [Path(self.folder, name) for name in ("out", "err")]
        for file in self.files:
            file.touch()  # a process that is ended at once has not made them
        words = (list(map(str, command)), cwd, env, self.files)
        self.child = CONTEXT.Process(target=run, args=words)
        self.child.start()
        self.pid = self.child.pid

    def end(self):
        """Ends it with all that it has left behind. Returns (exit status, stdout, stderr)."""
        self.child.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.child.join()
        texts = [file.read_text() for file in self.files]
        shutil.rmtree(self.folder, ignore_errors=True)
        return self.child.exitcode, *texts


def run_all(commands, envs, cwd, timeout=600, ends_others=True):
    """Run the commands at the same time. Returns [(exit status, stdout, stderr), ...].

    Where one fails, the others get SIGTERM, as from torchrun, and 4 s later SIGKILL. The status of
    one that SIGTERM has ended is 0.
    """
    forks = [Fork(command, cwd, env) for command, env in zip(commands, envs, strict=True)]
    left, end = {fork.child.sentinel: fork.child for fork in forks}, time.monotonic() + timeout
    failed = []  # the first one is why the others were ended
    try:
        while left and time.monotonic() < end:
            for sentinel in multiprocessing.connection.wait(left, end - time.monotonic()):
                child = left.pop(sentinel)
                child.join()
                if child.exitcode and not failed:
                    end = min(end, time.monotonic() + 4)
                    for other in left.values() if ends_others else ():
                        other.terminate()
                failed += [child] if child.exitcode else []
    finally:
        ended = [fork.end() for fork in forks]
    answers = []
    for fork, (status, *texts) in zip(forks, ended):
        is_ended = fork.child in failed[1:] and status == -signal.SIGTERM
        answers.append((0 if is_ended else status, *texts))
    assert failed or not left, f"no end after {timeout} s: {commands}, {answers}"
    return answers
