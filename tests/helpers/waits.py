"""Run a script, and print to stderr where it has waited for a CUDA device, and how often:

python tests/helpers/waits.py singlegpu/images.py ...
"""

import runpy
import sys
import traceback
import warnings
from collections import Counter

import torch

sys.argv = sys.argv[1:]
script = sys.argv[0]
waits = Counter()  # by line of the script, and place in torch


def note(message, category, *place):
    if "called a synchronizing" not in str(message):
        return
    frames = traceback.extract_stack()[:-1]
    ours = [frame.lineno for frame in frames if frame.filename == script] or ["a thread"]
    inner = [frame for frame in frames if not frame.filename.endswith("warnings.py")][-1]
    waits[f"{ours[-1]} in {inner.filename.split('site-packages/')[-1]}:{inner.lineno}"] += 1


warnings.simplefilter("always")
warnings.showwarning = note
if torch.cuda.is_available():
    torch.cuda.set_sync_debug_mode("warn")
try:
    runpy.run_path(script, run_name="__main__")
finally:
    for place, count in waits.items():
        print("WAITS", count, place, file=sys.stderr)
