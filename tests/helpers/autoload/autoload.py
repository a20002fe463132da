"""What gpu.py changes in a script, also in the processes that it starts, by these variables:

    OVER_GLOO=1            # groups of GPUs take gloo in place of NCCL
    GROUP_TIMEOUT=20       # seconds after which a collective fails
    SIGNAL_AT="9 1 6"      # rank 1 gets signal 9 in its step 6
    TRACE="FOLDER 12 24"   # a profiler's trace of rank 0, after step 12 and up to step 24

A torch that finds this folder on PYTHONPATH does it at the end of its import.
"""

import functools
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

steps = []  # an element for each step of the optimizer


def register():
    if "OVER_GLOO" in os.environ:
        dist.Backend.default_device_backend_map["cuda"] = "gloo"
        init, new = dist.init_process_group, dist.new_group

        # gloo takes no device_id. By this name, a DeviceMesh makes no groups of NCCL.
        def init_group(backend, *args, device_id=None, **kwargs):
            return init("cpu:gloo,cuda:gloo", *args, **kwargs)

        dist.init_process_group = init_group
        dist.new_group = lambda *args, device_id=None, **kwargs: new(*args, **kwargs)
    if "GROUP_TIMEOUT" in os.environ:
        timeout = timedelta(seconds=float(os.environ["GROUP_TIMEOUT"]))
        dist.init_process_group = functools.partial(dist.init_process_group, timeout=timeout)
    if {"SIGNAL_AT", "TRACE"} & {*os.environ}:
        torch.optim.AdamW.step = watched(torch.optim.AdamW.step)


def watched(step):
    signum, signalled, number = map(int, os.environ.get("SIGNAL_AT", "0 0 0").split())
    folder, first, last = os.environ.get("TRACE", " 0 0").split(" ")
    profiler = torch.profiler.profile() if folder else None

    def watched_step(*args, **kwargs):
        rank = dist.get_rank() if dist.is_initialized() else 0
        steps.append(0)
        if len(steps) == number and rank == signalled:
            os.kill(os.getpid(), signum)
        result = step(*args, **kwargs)
        if len(steps) == int(first):
            profiler.start()
        if len(steps) == int(last):
            profiler.stop()  # waits for the GPU
            if rank == 0:
                profiler.export_chrome_trace(str(Path(folder, "trace.json")))
        return result

    return watched_step
