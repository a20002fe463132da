"""Run a script in which one process is slow at one thing, as on a cluster.

    python tests/helpers/slow.py WHAT RANK SECONDS multigpu/images.py ...

WHAT is a name of SLOW.
"""

import runpy
import sys
import time

import torch
import torch.distributed as dist

SLOW = {
    "backward": (torch.Tensor, "backward"),  # a process that comes late
    "step": (torch.optim.AdamW, "step"),  # a large model
}


what, rank, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
owner, name = SLOW[what]
function = getattr(owner, name)


def slow(*args, **kwargs):
    if rank == (dist.get_rank() if dist.is_initialized() else 0):
        time.sleep(seconds)
    return function(*args, **kwargs)


setattr(owner, name, slow)
sys.argv = sys.argv[4:]
runpy.run_path(sys.argv[0], run_name="__main__")
