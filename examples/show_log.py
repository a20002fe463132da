"""Show the --log of a run in TensorBoard. Weights & Biases and Trackio want another last line.

python examples/show_log.py run.jsonl runs/my_run && tensorboard --logdir runs
"""

import argparse
import json

from torch.utils.tensorboard import SummaryWriter

parser = argparse.ArgumentParser(description="Show the --log of a run in TensorBoard.")
parser.add_argument("log", help="what a training script has written to --log")
parser.add_argument("folder", help="what TensorBoard reads")
args = parser.parse_args()
with open(args.log) as lines, SummaryWriter(args.folder) as writer:
    for row in map(json.loads, lines):
        for name, value in row.items():
            if row["rank"] == 0 and isinstance(value, float):
                writer.add_scalar(name, value, row["step"])  # wandb.log({name: value}, row["step"])
