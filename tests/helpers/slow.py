"""Run a script in which one process is slow at one thing, as on a cluster.

    python tests/helpers/slow.py WHAT RANK SECONDS multigpu/images.py ...

WHAT is a name of SLOW. RANK is a rank, or -1 for all processes.
"""

import os
import runpy
import sys
import time

import torch
import torch.distributed as dist
from torchvision import datasets

SLOW = {
    "read": (datasets.MNIST, "__init__"),  # data that is still to be prepared
    "backward": (torch.Tensor, "backward"),  # a process that comes late
    "step": (torch.optim.AdamW, "step"),  # a large model
    "eval": (torch.nn.Module, "eval"),  # a long validation
    "save": (os, "replace"),  # a slow disk
}


def slow_down(what, rank, seconds):
    """Make this sleep for some seconds, in the process of this rank, before it does its work.

    If STEPS names a file, a line is appended to it each time, with the time in seconds.
    """
    owner, name = SLOW[what]
    function = getattr(owner, name)

    def slow(*args, **kwargs):
        own_rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
        if rank in (own_rank, -1):
            if own_rank == 0 and "STEPS" in os.environ:
                with open(os.environ["STEPS"], "a") as file:
                    file.write(f"{time.time()}\n")
            time.sleep(seconds)
        return function(*args, **kwargs)

    setattr(owner, name, slow)


if __name__ == "__main__":
    what, rank, seconds = sys.argv[1:4]
    slow_down(what, int(rank), float(seconds))
    sys.argv = sys.argv[4:]
    runpy.run_path(sys.argv[0], run_name="__main__")
