"""Run multinode/images.py with DDP's own runtime logger on in every step; print its exposed communication."""

import importlib.util
import json
import os
from pathlib import Path

import torch.distributed as dist

path = Path(__file__).resolve().parent.parent / "multinode" / "images.py"
spec = importlib.util.spec_from_file_location("images", path)
images = importlib.util.module_from_spec(spec)
spec.loader.exec_module(images)
models, cleanup = [], images.cleanup


class LoggedDDP(images.DistributedDataParallel):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._set_ddp_runtime_logging_sample_rate(1)
        models.append(self)


class LoggedWatch(images.Stopwatch):
    def mark(self, phase, at=None):
        super().mark(phase, at)
        if phase == "comm":
            (_, start), (_, end) = self.marks[-2:]
            exposed.append(end - start)


def print_and_clean_up():
    data = models[0]._get_ddp_logging_data()
    logged = data["avg_backward_comm_time"] - data["avg_backward_compute_comm_overlap_time"]  # nanoseconds
    # The logger adds a step when the next one begins: it does not know of the last.
    ours = sum(exposed[:-1]) / len(exposed[:-1])
    print(json.dumps({"rank": dist.get_rank(), "logged": logged / 1e9, "ours": ours, "sum": sum(exposed)}), flush=True)
    cleanup()


exposed = []
images.DistributedDataParallel, images.Stopwatch, images.cleanup = LoggedDDP, LoggedWatch, print_and_clean_up
images.main(images.parse_args())
os._exit(0)  # as multinode/images.py
