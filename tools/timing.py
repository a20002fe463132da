"""See where the time of your own training goes: copy this file beside your train.py.

    from timing import mark, print_marks

    mark("other")                       # before the first step
    for inputs, targets in loader:
        mark("data")
        loss = loss_function(model(inputs), targets)
        mark("forward")
        loss.backward()
        mark("backward")                # with DDP: mark("comm"), and the hook below
        optimizer.step()
        optimizer.zero_grad()
        mark("optimizer")               # ends a step
    print_marks(log="run.jsonl", model=model, batch_size=64)   # all processes call it

mark(phase) gives the time since the mark before to this phase. DDP averages gradients during the
backward pass. For its comm to begin with the last gradient, let each gradient mark the backward:

    for weights in model.parameters():
        if weights.requires_grad:
            weights.register_post_accumulate_grad_hook(lambda _: mark("backward"))

The phases of a step are data, forward, backward, comm and optimizer. You may mark others, such as
"eval", "save" or "other". report.py and predict.py do not count those in the time of a step.
batch_size is that of all processes together. predict.py needs the model. Pass other settings that
tell your runs apart as keyword arguments.
"""

import itertools
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

ON_GPU = torch.accelerator.is_available()  # a GPU of any maker
STEP_PHASES = ("data", "forward", "backward", "comm", "optimizer")
WARMUP_STEPS = 3  # are slower, and have a phase of their own

marks = []  # (phase, the moment at which it ended)


def mark(phase):
    """Notes that this phase of a step ends here. Python does not wait for the GPU."""
    moment = torch.Event(enable_timing=True) if ON_GPU else time.perf_counter()
    if ON_GPU:
        moment.record()  # queued like all work: the GPU notes the time when it gets here
    marks.append((phase, moment))


def gather(value):
    """Returns the values of all processes, which call it together."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def read_marks():
    """Returns [phase, start, end] of all phases, in seconds, and the number of steps after warmup.

    The clocks of the processes agree: 0 is when all have come here. Waits for the GPU.
    """
    if dist.is_initialized():
        dist.barrier()
    mark("end")
    if ON_GPU:
        torch.accelerator.synchronize()
    _, zero = marks[-1]
    seconds = [-m.elapsed_time(zero) / 1000 if ON_GPU else m - zero for _, m in marks]
    spans, steps = [], 0
    for (phase, _), start, end in zip(marks[1:-1], seconds, seconds[1:]):
        name = phase if steps >= WARMUP_STEPS else "warmup"
        if spans and spans[-1][0] == name and name != "optimizer":
            spans[-1][2] = end  # one span, however many gradients have marked it
        else:
            spans.append([name, start, end])
        steps += phase == "optimizer"
    return spans, max(0, steps - WARMUP_STEPS)


def print_marks(log=None, model=None, batch_size=0, **settings):
    """Prints the seconds by phase, and appends a row for each process to the log, if it has a name.

    Call it in all processes, before dist.destroy_process_group().
    """
    spans, steps = read_marks()
    seconds = {}
    for phase, start, end in spans:
        seconds[phase] = seconds.get(phase, 0.0) + end - start
    rank = dist.get_rank() if dist.is_initialized() else 0
    row = {"rank": rank, "host": os.uname().nodename, "steps": steps} | seconds
    if log:
        row |= columns_of_log(spans, steps, model, {"batch_size": batch_size} | settings)
    rows, phases = gather(row), gather([*seconds])
    if rank > 0:
        return
    print_table(rows, [*dict.fromkeys(itertools.chain(*phases))])
    if steps == 0:
        print("too few steps to time: the first three are the warmup")
    elif batch_size:
        print(f"samples/s: {batch_size * steps / seconds_of_steps(rows):.1f}")
    if log:
        same = {"run": f"{time.time_ns():x}", "processes": len(rows)}
        same["nodes"] = len({each["host"] for each in rows})
        with open(log, "a") as file:
            for each in rows:
                file.write(json.dumps(each | same) + "\n")


def columns_of_log(spans, steps, model, settings):
    """Returns what report.py and predict.py need of a process: its device, model and last step."""
    device = torch.accelerator.current_accelerator() if ON_GPU else torch.device("cpu")
    get_name = getattr(torch.get_device_module(device), "get_device_name", device.type.upper)
    ends = [number + 1 for number, span in enumerate(spans) if span[0] == "optimizer"]
    last_step = spans[slice(*ends[-2:])] if len(ends) > 1 else []
    weights = () if model is None else model.parameters()
    learned = [each for each in weights if each.requires_grad]
    return {
        "settings": settings,
        "script": "/".join(Path(sys.argv[0]).resolve().parts[-2:]),
        "device": get_name(),
        "threads": torch.get_num_threads(),
        "parameters": sum(each.numel() for each in learned),
        "step": steps + WARMUP_STEPS,
        "steps_per_epoch": steps + WARMUP_STEPS,  # as if this were an epoch
        "last_step": [[*span, 0] for span in last_step if span[0] in STEP_PHASES],
    } | {phase: 0.0 for phase in STEP_PHASES if phase not in [span[0] for span in spans]}


def seconds_of_steps(rows):
    """Returns the time of all steps, a mean over the processes."""
    return sum(each.get(phase, 0) for each in rows for phase in STEP_PHASES) / len(rows)


def print_table(rows, phases):
    """Prints the seconds of each phase: their mean over the processes and, of several, each one."""
    shown = range(min(8, len(rows))) if len(rows) > 1 else []  # a line has no room for more
    total = sum(each.get(phase, 0) for each in rows for phase in phases) / len(rows)
    print(f"{'mean':>18}        {''.join(f' rank {rank:>2}' for rank in shown)}".rstrip())
    for phase in phases:
        mean = sum(each.get(phase, 0) for each in rows) / len(rows)
        if mean >= 0.0005:
            columns = "".join(f"{rows[rank].get(phase, 0):8.3f}" for rank in shown)
            print(f"{phase:9} {mean:8.3f} s {mean / total:4.0%} {columns}".rstrip())
    print(f"{'total':9} {total:8.3f} s 100%")
    if len(rows) == 1:
        return
    # The last process waits for no other. Lateness of less than a tenth of the steps is usual.
    waits = [each.get("comm", 0) for each in rows]
    print("comm: averaging that backward() does not hide, and waiting. ", end="")
    if max(waits) - min(waits) > 0.1 * seconds_of_steps(rows):
        late = waits.index(min(waits))
        waited = f"another one waits {max(waits) - min(waits):.3f} s for it"
        print(f"Rank {late} on {rows[late]['host']} is late: {waited}.")
    else:
        print("No process is late.")
