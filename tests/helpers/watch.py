"""Run multinode/images.py as it is, and write down what its log cannot tell:

    torchrun --standalone --nproc_per_node=2 -- \\
        tests/helpers/watch.py FOLDER multinode/images.py ...

Each process writes FOLDER/<rank>.json: `written`, the moment (s) at which it wrote each of its
rows; `all_reduces`, the seconds of each all-reduce of the script's own that counts as `comm`, that
of its look about once a second; and what DDP's own runtime logger found, the seconds of each step:
`comm_total`, all communication of gradients, and `comm`, what was not hidden behind the backward
pass.
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
models = []
steps = []
written = []
all_reduces = []


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


def watched_all_reduce(tensor, op=dist.ReduceOp.SUM, **kwargs):
    start = time.perf_counter()
    work = plain_all_reduce(tensor, op, **kwargs)
    if sys._getframe(2).f_code.co_name == "main":  # a look. Sums of evaluate() count as eval
        all_reduces.append(time.perf_counter() - start)
    return work


def write_down_and_leave():
    models[0].logger.set_runtime_stats_and_log()  # of the last step
    steps.append(models[0]._get_ddp_logging_data())
    totals = np.array([step["backward_comm_time"] for step in steps[1:]]) / 1e9
    hidden = np.array([step["backward_compute_comm_overlap_time"] for step in steps[1:]]) / 1e9
    found = {"written": written, "all_reduces": all_reduces}
    found |= {"comm_total": totals.tolist(), "comm": (totals - hidden).tolist()}
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    leave()


leave, dist.destroy_process_group = dist.destroy_process_group, write_down_and_leave
torch.nn.parallel.DistributedDataParallel = WatchedDDP
plain_all_reduce, dist.all_reduce = dist.all_reduce, watched_all_reduce
plain_open, builtins.open = builtins.open, watched_open
sys.argv = sys.argv[2:]
runpy.run_path(script, run_name="__main__")
