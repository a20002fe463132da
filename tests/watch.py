"""Run multinode/images.py as it is, and write down what its log cannot tell:

    torchrun --standalone --nproc_per_node=2 -- tests/watch.py FOLDER multinode/images.py ...

Each process writes FOLDER/<rank>.json: `written`, the moment (s) at which it wrote each epoch's
rows; and what DDP's own runtime logger found, in seconds a step: `comm_total`, all of the
communication, and `comm`, what was not hidden behind the backward pass.
"""

import builtins
import json
import runpy
import sys
import time
from pathlib import Path

import torch.distributed as dist
import torch.nn.parallel

folder, script = sys.argv[1:3]
models, written = [], []


class WatchedDDP(torch.nn.parallel.DistributedDataParallel):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._set_ddp_runtime_logging_sample_rate(1)
        models.append(self)


def watched_open(file, *args, **kwargs):
    if str(file).endswith(".jsonl"):
        written.append(time.perf_counter())
    return plain_open(file, *args, **kwargs)


def write_down_and_leave():
    logged = models[0]._get_ddp_logging_data()  # it does not know of the last step
    comm_total = logged["avg_backward_comm_time"] / 1e9
    comm = comm_total - logged["avg_backward_compute_comm_overlap_time"] / 1e9
    found = {"written": written, "comm_total": comm_total, "comm": comm}
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    leave()


leave, dist.destroy_process_group = dist.destroy_process_group, write_down_and_leave
torch.nn.parallel.DistributedDataParallel = WatchedDDP
plain_open, builtins.open = builtins.open, watched_open
sys.argv = sys.argv[2:]
runpy.run_path(script, run_name="__main__")
