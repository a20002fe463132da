"""Run multinode/images.py with DDP's own runtime logger on in every step; print its exposed communication."""

import importlib.util
import json
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
        self.steps = 0
        models.append(self)

    def forward(self, *inputs):
        self.steps += self.training
        return super().forward(*inputs)


def print_and_clean_up():
    data = models[0]._get_ddp_logging_data()
    exposed = data["avg_backward_comm_time"] - data["avg_backward_compute_comm_overlap_time"]  # nanoseconds
    print(json.dumps({"rank": dist.get_rank(), "seconds": exposed * models[0].steps / 1e9, "steps": models[0].steps}))
    cleanup()


images.DistributedDataParallel, images.cleanup = LoggedDDP, print_and_clean_up
images.main(images.parse_args())
