"""Run a script in which one process is slow at one thing, as on a cluster.

    python tests/helpers/slow.py WHAT RANK SECONDS multinode/images.py ...

WHAT is a name of SLOW. Started by torchrun, this process also has a clock that is 5 s ahead.
"""

import os
import runpy
import sys
import time

import torch
import torch.distributed as dist

SLOW = {
    "backward": (torch.Tensor, "backward"),  # a process that comes late
    "step": (torch.optim.AdamW, "step"),  # a large model
}
_, what, rank, seconds, *sys.argv = sys.argv
owner, name = SLOW[what]
function = getattr(owner, name)


def slow(*args, **kwargs):
    if int(rank) == (dist.get_rank() if dist.is_initialized() else 0):
        time.sleep(float(seconds))
    return function(*args, **kwargs)


setattr(owner, name, slow)
if os.environ.get("RANK") == rank:
    clock = time.perf_counter
    time.perf_counter = lambda: clock() + 5
runpy.run_path(sys.argv[0], run_name="__main__")
