"""Run a training script as it is, and write down what its log cannot tell:

    python tests/helpers/probe.py FOLDER multigpu/images.py ...

Each process writes FOLDER/<rank>.json, a list with an object for each step: `dtypes` of linear
layers and convolutions, in the validation before it, too; their `calls`; `shape` of their first
input; `order` of their calls, an F each, and of the gradients of their outputs, a B each;
`attention`, the shape of the queries of each attention; `dropped`, the share of zeros that dropout
made; `norm` of the gradients that the optimizer gets, `rate`, the learning rate; `matmul`,
PyTorch's precision of float32 products; `workers`, the processes that load data; `sent`,
(operation, dtype, bytes) of each collective.
"""

import json
import multiprocessing
import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import optimizer

folder, script = sys.argv[1:3]
steps = []
seen = {}


def forget():
    seen.update(dtypes=set(), calls=0, shape=None, dropped=[], sent=[], order="", attention=[])


def note_gradient(gradient):
    seen["order"] += "B"


def note_layer(module, inputs, output):
    if isinstance(module, (nn.Linear, nn.Conv2d)):
        seen["dtypes"].add(str(output.dtype).removeprefix("torch."))
    if not module.training:
        return
    if isinstance(module, nn.Dropout) and module.p > 0:
        zeros = (output == 0)[inputs[0] != 0]
        seen["dropped"].append(zeros.float().mean().item())
    if isinstance(module, (nn.Linear, nn.Conv2d)):
        seen["calls"] += 1
        seen["shape"] = seen["shape"] or list(inputs[0].shape)
        seen["order"] += "F"
        if output.requires_grad:
            output.register_hook(note_gradient)


def note_step(optimizer, args, kwargs):
    [group, *_] = optimizer.param_groups
    news = {"rate": group["lr"], "workers": len(multiprocessing.active_children())}
    news["matmul"] = torch.get_float32_matmul_precision()
    norm = nn.utils.get_total_norm([p.grad for p in group["params"] if p.grad is not None])
    news["norm"] = getattr(norm, "full_tensor", lambda: norm)().item()
    steps.append(seen | news | {"dtypes": sorted(seen["dtypes"])})
    forget()
    rank = dist.get_rank() if dist.is_initialized() else 0
    Path(folder, f"{rank}.json").write_text(json.dumps(steps))


def note_sent(name):
    send = getattr(dist, name)

    def sends(*args, **kwargs):
        tensor = kwargs.get("input", args[0] if args else kwargs.get("tensor"))
        seen["sent"].append((name, str(tensor.dtype).removeprefix("torch."), tensor.nbytes))
        return send(*args, **kwargs)

    setattr(dist, name, sends)


def attend(query, *args, **kwargs):
    if torch.is_grad_enabled():
        seen["attention"].append(list(query.shape))
    return plain_attention(query, *args, **kwargs)


forget()
plain_attention = nn.functional.scaled_dot_product_attention
nn.functional.scaled_dot_product_attention = attend
nn.modules.module.register_module_forward_hook(note_layer)
optimizer.register_optimizer_step_pre_hook(note_step)
SENDING = """all_reduce reduce_scatter_tensor reduce_scatter_single all_gather_into_tensor
    all_gather_single""".split()
for name in {*SENDING} & {*dir(dist)}:
    note_sent(name)
sys.argv = sys.argv[2:]
runpy.run_path(script, run_name="__main__")
