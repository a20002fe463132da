"""Train gpt.py's model in a compiled loop that has nothing but a step, and log its samples/s:

    python tests/helpers/plain_gpt.py --d_model 768 ... --log log.jsonl

and the TFLOP/s of a bf16 matmul, which no model is faster than.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "singlegpu"))
import gpt  # noqa: E402

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def now():
    """The moment (s) at which the GPU has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def matmul_tflops(size):
    matrix = torch.rand(size, size, device=device).bfloat16()
    for count in (3, 20):  # the first three warm up
        begin = now()
        for _ in range(count):
            matrix @ matrix
        seconds = now() - begin
    return 2 * size**3 * count / seconds / 1e12


def samples_per_second(args):
    model = gpt.GPT(args).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    compiled = torch.compile(model)
    tokens = torch.randint(16, (args.batch_size, args.seq_len + 1), device=device)
    for step in range(args.warmup + args.max_steps):
        if step == args.warmup:
            moment = now()
        with torch.autocast(device.type, torch.bfloat16):
            loss = compiled(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return args.max_steps * args.batch_size / (now() - moment)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in "vocab_size d_model n_heads num_layers seq_len batch_size max_steps".split():
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--matmul", type=int, default=8192, help="length of its matrices")
    parser.add_argument("--log", type=Path)
    args = parser.parse_args()
    args.dropout = 0.0
    torch.set_float32_matmul_precision("high")
    row = {"samples/s": samples_per_second(args), "matmul": matmul_tflops(args.matmul)}
    args.log.write_text(json.dumps(row))
