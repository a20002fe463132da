"""Run multinode/images.py as it is, and write down what its log cannot tell:

    torchrun --standalone --nproc_per_node=2 -- \\
        tests/helpers/watch.py FOLDER multinode/images.py ...

Each process writes FOLDER/<rank>.json: `written`, the moment (s) at which it wrote each of its
rows; and what DDP's own runtime logger found, the seconds of each step: `comm_total`, all
communication of gradients, and `comm`, what was not hidden behind the backward pass.
"""

import builtins
import json
import runpy
import sys
import time
from pathlib import Path

import numpy as np
import torch.distributed as dist
import torch.nn.parallel

folder, script = sys.argv[1:3]
written = []
models = []
steps = []


class WatchedDDP(torch.nn.parallel.DistributedDataParallel):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._set_ddp_runtime_logging_sample_rate(1)
        models.append(self)

    def forward(self, *inputs):
        outputs = super().forward(*inputs)  # first notes the times of the step before
        steps.append(self._get_ddp_logging_data())
        return outputs


def watched_open(file, *args, **kwargs):
    if str(file).endswith(".jsonl"):
        written.append(time.perf_counter())
    return plain_open(file, *args, **kwargs)


def write_down_and_leave():
    models[0].logger.set_runtime_stats_and_log()  # of the last step
    steps.append(models[0]._get_ddp_logging_data())
    totals = np.array([step["backward_comm_time"] for step in steps[1:]]) / 1e9
    hidden = np.array([step["backward_compute_comm_overlap_time"] for step in steps[1:]]) / 1e9
    found = {"written": written, "comm_total": totals.tolist()}
    found["comm"] = (totals - hidden).tolist()
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    leave()


plain_open, builtins.open = builtins.open, watched_open
leave, dist.destroy_process_group = dist.destroy_process_group, write_down_and_leave
torch.nn.parallel.DistributedDataParallel = WatchedDDP
sys.argv = sys.argv[2:]
runpy.run_path(script, run_name="__main__")
