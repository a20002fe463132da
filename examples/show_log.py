"""Show the --log of one run, of rank 0, in TensorBoard.

    python examples/show_log.py run.jsonl runs/my_run
    tensorboard --logdir runs

The last line has what Weights & Biases and Trackio want in its place.
"""

import json
import sys

from torch.utils.tensorboard import SummaryWriter

log, folder = sys.argv[1:]
with open(log) as lines, SummaryWriter(folder) as writer:
    for row in map(json.loads, lines):
        for name, value in row.items():
            if row["rank"] == 0 and isinstance(value, float):
                writer.add_scalar(name, value, row["step"])  # wandb.log({name: value}, row["step"])
