"""Train gpt.py's model in a compiled loop that has nothing but a step, and log its samples/s:

    python tests/helpers/plain_gpt.py --d_model 768 ... --log log.jsonl

and the TFLOP/s of a bf16 matmul, which no model is faster than.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from torch.utils.benchmark import Timer

sys.path.append(str(Path(__file__).resolve().parents[2] / "singlegpu"))
import gpt  # noqa: E402

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


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
    model = gpt.GPT(args).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    compiled = torch.compile(model)
    tokens = torch.randint(16, (args.batch_size, args.seq_len + 1), device=device)
    matrix = torch.rand(args.matmul, args.matmul, device=device).bfloat16()

    def step():
        with torch.autocast(device.type, torch.bfloat16):
            loss = compiled(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(args.warmup):
        step()
    seconds = Timer("step()", globals={"step": step}).timeit(args.max_steps).mean
    of_matmul = Timer("matrix @ matrix", globals={"matrix": matrix}).timeit(20).mean
    row = {"samples/s": args.batch_size / seconds}
    row["matmul"] = 2 * args.matmul**3 / of_matmul / 1e12
    args.log.write_text(json.dumps(row))
