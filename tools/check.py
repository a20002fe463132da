"""Is my training right? Runs any PyTorch training, unchanged, for some steps, and says.

    python tools/check.py -- torchrun --nproc_per_node=2 train.py --batch_size 64
    python tools/check.py --against "python one_gpu.py" -- torchrun --nproc_per_node=2 train.py
    python tools/check.py --resume -- python train.py --snapshot {tmp}/run.pt   # {tmp}: new folder
    CHECK_FOLDER=/shared/new python tools/check.py -- srun python train.py      # several machines

PyTorch itself loads this file in each process of the job, as a plug-in (entry point
"torch.backends"). There it watches optimizers, models, data loaders and files, changes nothing, and
writes what it sees to a file. Then the first process compares the files, and prints a line for
each kind of fault: ok, warning, ERROR, or "not seen" where nothing shows whether it is right.
Status 1: an error; 2: nothing trained; else 0.

On several machines that each start their own torchrun, start this file on each, with CHECK_FOLDER
set to one new folder that all of them share: the machine of rank 0 prints the table.
"""

import argparse
import collections
import faulthandler
import functools
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import weakref
import zlib
from collections import Counter, defaultdict
from pathlib import Path

LEVELS = ["ERROR", "warning", "ok", "not seen"]


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=20, help="optimizer steps to watch; then the job ends")
    add("--epoch_batches", type=int, help="end each pass over a DataLoader after so many batches")
    add("--against", metavar="COMMAND", help="one that should train alike, as on one GPU")
    add("--resume", action="store_true", help="stop the job, start it again, compare")
    add("--timeout", type=float, default=600, help="seconds without progress: it hangs")
    add("--grace", type=float, default=20, help="seconds to end in after the last step")
    add("command", nargs=argparse.REMAINDER, help="after --: what starts the training")
    return parser.parse_args()


def main():
    args = parse_args()
    command = shlex.join(args.command[args.command[:1] == ["--"] :])
    with tempfile.TemporaryDirectory() as own_folder:
        folder = Path(os.environ.get("CHECK_FOLDER", own_folder)).resolve()
        job = run(command, args, folder / "whole")
        found = {"run": [*ending(job, args)]}
        if job.steps:
            found |= {kind.__name__: findings(kind, job) for kind in KINDS}
        if job.steps and args.against:
            found["against"] = findings(against, job, run(args.against, args, folder / "against"))
        if job.steps and args.resume:
            stopped = run(command, args, folder / "stopped", stop_at=max(1, args.steps // 2))
            again = run(command, args, folder / "stopped", lives=2)
            found["resume"] = findings(resume, job, stopped, again)
    rows = [(level, name, words) for name, each in found.items() for level, words in each]
    rows.sort(key=lambda row: LEVELS.index(row[0]))
    if job.prints:
        words = f"{job.steps} steps, {len(job.ranks)} process(es) that train: {command}"
        print(f"\n{textwrap.shorten(words, 100)}")
        for level, name, words in rows:
            print(textwrap.fill(words, 100, initial_indent=f"{level:9}{name:13}", **INDENT))
    sys.exit(1 if rows[0][0] == "ERROR" and job.steps else 0 if job.steps else 2)


INDENT = {"subsequent_indent": 22 * " ", "break_long_words": False}


def findings(kind, *jobs):
    """Returns the lines of a kind: what is wrong or else, in one line, that it is right."""
    try:
        found = list(dict.fromkeys(kind(*jobs)))
    except Exception as error:  # of this file: it says nothing of the training
        place = error.__traceback__.tb_next.tb_lineno
        return [("not seen", f"check.py failed itself: {type(error).__name__}, {error}, {place}")]
    wrong = [row for row in found if row[0] in LEVELS[:2]]
    right = sorted(found, key=lambda row: LEVELS.index(row[0]))
    return wrong or right[:1] or [("not seen", "nothing showed it in these steps")]


# == The kinds of faults. Each takes what the job's processes saw, and yields (level, words). ======


def ending(job, args):
    """The job neither hangs nor fails before the last step that is watched."""
    where = "; ".join(f"rank {rank} at {place}" for rank, place in sorted(job.stacks.items()))
    done = {rank: each.steps for rank, each in job.ranks.items()}
    if job.hangs:
        yield (
            "ERROR",
            f"it hangs after step {min(done.values(), default=0)}: {where or 'no trace'}.",
        )
    elif job.status and job.steps < args.steps:
        words = f"it ended with status {job.status} after {job.steps} steps"
        yield "ERROR" if job.steps else "not seen", words
    elif not job.steps and job.backwards:
        yield "not seen", "no optimizer took a step: the script changes its weights by itself"
    elif not job.steps:
        yield "not seen", "it ended without a step of an optimizer of PyTorch"
    elif len({*done.values()}) > 1:
        yield "warning", f"the ranks took other numbers of steps: {done}"
    else:
        yield "ok", f"status {job.status} after {job.steps} steps"
    texts = Counter(x["text"] for x in job.all("trouble"))
    for text, count in texts.most_common(3):
        yield "not seen", f"check.py failed itself, {count} times: {text}"


def processes(job):
    """All processes that train are in one group, and each has a GPU of its own."""
    starts = [each.start for each in job.ranks.values()]
    alone = [start for start in starts if start["world"] == 1]
    count = max(len(alone), *[start["launched"] for start in alone]) if alone else 0
    if job.is_hogwild:
        yield "ok", f"{len(starts)} share one memory (Hogwild): ranks are not compared"
    elif count > 1:
        yield "ERROR", f"{count} train, each alone. Call dist.init_process_group(), wrap the model."
    elif len(starts) == 1:
        yield "not seen", "one process: what compares several is left out"
    else:
        yield "ok", f"{len(starts)} in one group"
    places = Counter(json.dumps(start["place"]) for start in starts)
    (host, device, devices), count = json.loads(max(places, key=places.get)), max(places.values())
    if count > 1 and devices > 1 and device != "cpu":
        yield "ERROR", f"{count} train on {device} of {host}. Choose the GPU by LOCAL_RANK."


def settings(job):
    """All ranks run the same code, with the same flags and versions."""
    (first, one), *others = job.ranks.items()
    for rank, other in others:
        for name in ("flags", "versions", "code"):
            a, b = one.start[name], other.start[name]
            names = [x for x in a if x in b and a[x] != b[x]] if name == "code" else a != b
            if names:
                words = names if name == "code" else f"{b}, in rank {first}: {a}"
                yield "ERROR", f"other {name} in rank {rank}: {words}. Start all ranks alike."
                return
        yield "ok", f"the same flags, versions and code in {len(job.ranks)} ranks"


def weights(job):
    """Copies of a weight have the same bits in all ranks, after each step."""
    compared = 0
    for family in job.families:
        for number, start in enumerate(job.ranks[family.ranks[0]].starts):
            bad = defaultdict(list)  # step: (index of the tensor, two ranks)
            runs = {rank: job.ranks[rank].states(number) for rank in family.ranks}
            common = sorted(set.intersection(*[{*run} for run in runs.values()]))
            for index in range(len(start["names"])):
                for ranks in family.copies(job, number, index):
                    compared += len(ranks) > 1
                    for step in common:
                        bits = [runs[rank][step]["weights"][index] for rank in ranks]
                        other = [rank for rank, x in zip(ranks, bits) if x != bits[0]]
                        bad[step] += [(index, ranks[0], other[0])] if other else []
            steps = [step for step in common if bad[step]]
            if not steps:
                continue
            step, (index, one, two) = steps[0], bad[steps[0]][0]
            a, b = runs[one][step], runs[two][step]
            words = f"{len(bad[step])} of {len(start['names'])} tensors differ in ranks {one} and {two} "
            words += f"{f'after step {step}' if step else 'at the start'}, first "
            words += f"{start['names'][index]}. "
            last = bad[common[-1]]
            if not last:
                yield "warning", words + "Later they are equal: local SGD?"
            elif is_rounding(job, start, runs, one, two, index, common):
                words += "It is rounding: their machines compute differently"
                yield "warning", f"{words} ({job.ranks[one].kind}; {job.ranks[two].kind})."
            else:
                which = [i for i, *ranks in bad[step] if ranks == [one, two]]
                yield "ERROR", words + cause(job, start, step, which, a, b, family)
    if not compared and len(job.ranks) > 1:
        yield "not seen", "no weight is known to have a copy: all are sharded, or stages"
    elif compared:
        yield "ok", f"{compared} tensors have equal bits in all ranks, after each step"


def is_rounding(job, start, runs, one, two, index, steps):
    """Whether unlike machines differ by no more than their rounding explains."""
    if job.ranks[one].kind == job.ranks[two].kind:
        return False
    a, b, first = (
        runs[rank][step] for rank, step in ((one, steps[-1]), (two, steps[-1]), (one, 0))
    )
    apart, way, size = (distance(a, x, index) for x in (b, first, None))
    return apart < 1e-2 * way + 1e-6 * size


def distance(one, two, index):
    """Returns about how far a weight is in two states (None: from 0), by random projections."""
    a = one["sketches"][index]
    b = two["sketches"][index] if two else [0] * len(a)
    return (sum((x - y) ** 2 for x, y in zip(a, b)) / len(a)) ** 0.5


def cause(job, start, step, which, one, two, family):
    """Returns the likely cause of weights that differ in two ranks, and what to do."""
    if family.is_tensor_parallel:
        return (
            "Other parts are split over the ranks, this is whole in each: clip and average alike."
        )
    if start["shared"]:
        return "The model was given to spawn(), and lies in one memory. Make it in each process."
    if step == 0:
        return "Wrap the model in DDP, or send rank 0's weights to all."
    gradients = [i for i in which if one["grads"][i] != two["grads"][i]]
    rates = f"{one['rates'][0]}, {two['rates'][0]}"
    if not gradients and one["rates"] != two["rates"]:
        return f"The learning rates differ: {rates}. Schedule all alike."
    if not gradients:
        return "The gradients are equal: give the optimizers one state and the same settings."
    if any((one["grads"][i] is None) != (two["grads"][i] is None) for i in gradients):
        return "Only one of them has a gradient for it. Use it in each rank."
    if any(start["shards"]):
        return "One replica was changed, or its gradients were not averaged with the others'."
    if not any(start["in_ddp"]):
        return "Nothing averages the gradients. Wrap the model in DistributedDataParallel."
    if not start["in_ddp"][which[0]]:
        return "DDP does not know it. Wrap the model when it is complete."
    if one["moved"]:
        return "The model was moved or cast after DDP was made. Make DDP last."
    if not one["ddp"]:
        return "The model is called past DDP. Call the DDP object, not its .module."
    if one["in_no_sync"]:
        return "The last backward before the step was in no_sync(). Leave it before."
    return "Gradients changed or were lost after DDP averaged them: by code, or by a link of GPUs."


def updates(job):
    """Each weight that has a gradient moves, and keeps moving."""
    for start, steps in job.optimizers():
        names, count = start["names"], len(start["names"])
        states, moves = [start, *steps], []
        for i in range(count):
            moves.append([a["weights"][i] != b["weights"][i] for a, b in zip(states, steps)])
        pulls = [[x["grads"][i] not in (None, 0) for x in steps] for i in range(count)]
        rates = [max(x["rates"]) for x in steps]
        stuck = [i for i in range(count) if any(pulls[i]) and not any(moves[i])]
        if steps and not any(rates):
            yield "ERROR", f"the rate is 0 in all {len(steps)} steps. Look at the schedule."
        elif not any(start["trainable"]):
            words = f"none of its {count} tensors changes: all have requires_grad False."
            yield "ERROR", words + " Set it True, or give the optimizer others."
        elif not any(map(any, moves)):
            yield "ERROR", f"none of its {count} tensors changes in {len(steps)} steps."
        elif stuck:
            words = f"{len(stuck)} of {count} weights have gradients but never change: {names[stuck[0]]}."
            words += " Steps too small for bf16? A bias before BatchNorm?"
            yield "ERROR" if 2 * len(stuck) >= count else "warning", words
        for i in range(count):
            last = max((k for k, moved in enumerate(moves[i]) if moved), default=len(steps))
            rest = [pull and rate for pull, rate in zip(pulls[i], rates)][last + 1 :]
            if len(rest) >= 5 and all(rest):
                words = f"{names[i]} stands still from step {last + 2} on, though it has gradients."
                yield "ERROR", words + " Look at the optimizer's state, and at the size of a step."
                break
        frozen = count - sum(start["trainable"])
        yield "ok", f"{sum(map(any, moves))} tensors change, {frozen} are frozen"


def gradients(job):
    """Each weight is in an optimizer, and has a gradient when the optimizer steps."""
    for start, steps in job.optimizers():
        never = [all(x["grads"][i] is None for x in steps) for i in range(len(start["names"]))]
        unused = [x for x, no, yes in zip(start["names"], never, start["trainable"]) if no and yes]
        if unused and all(never) and any(x["had_gradients"] for x in steps):
            words = "backward() makes gradients, but none is left at step()."
            yield "ERROR", words + " Call zero_grad() after step()."
        elif unused:
            words = (
                f"{len(unused)} of {len(never)} weights never have a gradient: {unused[0]}. Does"
            )
            words += " the loss use them? Was the model copied after the optimizer was made?"
            yield "ERROR" if len(unused) == len(never) else "warning", words
        yield "ok", f"{len(never) - len(unused)} weights have gradients"
    lost = [name for x in of(job.first.records, "lost") for name in x["names"]]
    if lost:
        words = f"{len(lost)} weights have gradients, but are in no optimizer: {lost[0]}."
        yield "ERROR", words + " Give it all parameters."


def zeroing(job):
    """Gradients are zeroed once a step: not between micro-batches, and not never."""
    for rank, each in job.ranks.items():
        for number in range(len(each.starts)):
            steps = list(each.states(number).values())[1:]
            late = [x["step"] for x in steps if x["clean"] is False]
            twice = [
                b["step"]
                for a, b in zip(steps, steps[1:])
                if b["clean"] is None and any(b["grads"]) and a["grads"] == b["grads"]
            ]
            if late:
                words = (
                    f"gradients are not zeroed before step {late[0]} and {len(late) - 1} others,"
                )
                yield (
                    "ERROR",
                    f"{words} in rank {rank}. Call optimizer.zero_grad() after each step.",
                )
            if twice:
                words = f"step {twice[0]} uses the gradients of the step before, in rank {rank}."
                yield "ERROR", words + " Is step() called twice for one backward()?"
            if any(x["wiped"] for x in steps):
                words = "zeroed between the micro-batches of a step: only the last one counts."
                yield "ERROR", words + " Call zero_grad() after step()."
            if steps and any(x["clean"] for x in steps):
                yield "ok", "gradients are zeroed in each step"


def averaging(job):
    """DDP averages once a step, in the last micro-batch."""
    for start, steps in job.optimizers():
        counts = [x["averaged"] for x in steps]
        if start["world"] > 1 and counts and min(counts) > 1:
            words = f"DDP averaged {counts[0]} times in step {steps[0]['step']}. Use no_sync() for"
            yield "warning", words + " all micro-batches but the last."
        elif start["world"] > 1 and any(counts):
            yield "ok", "DDP averages once in each step"
    yield "not seen", "nothing is called by DDP in several processes"


def finite(job):
    """Losses and gradients are finite."""
    for rank, each in job.ranks.items():
        losses = of(each.records, "loss")
        for x in [x for x in losses if x["value"] - x["value"] != 0][:1]:
            yield (
                "ERROR",
                f"the loss is {x['value']} in step {x['step'] + 1}, rank {rank}. Stop there.",
            )
        for x in of(each.records, "step"):
            if x["infinite"]:
                words = f"a gradient is inf or nan in step {x['step']}, rank {rank}: {x['infinite'][0]}."
                yield "ERROR", words + " Clip, lower the rate, or look at the loss."
                break
        if losses:
            yield "ok", f"losses from {losses[0]['value']:.4f} to {losses[-1]['value']:.4f}"


def clipping(job):
    """Gradients that GradScaler scaled are clipped after unscale_()."""
    steps = of(job.first.records, "step")
    if any(x["clipped"] == "scaled" for x in steps):
        yield "ERROR", "clipped while scaled. Call scaler.unscale_(optimizer) before clipping."
    elif any(x["clipped"] for x in steps):
        yield "ok", "clipped as they are"
    yield "not seen", "clip_grad_norm_() and clip_grad_value_() are not called"


def schedule(job):
    """A schedule steps once for each step, after it, and its rate is the one that is used."""
    for start, steps in job.optimizers():
        calls = of(job.first.records, "schedule", number=start["number"])
        words = f"{calls[0]['name']}.step() is called {len(calls)} times" if calls else ""
        words += f" in {len(steps)} steps"
        if calls and calls[0]["caller"] == "accelerate":
            yield "ok", words + ", by Accelerate: its length is to be N times the steps"
        elif len(calls) > 1.2 * len(steps) + 1:
            yield "ERROR", words + ". Call it once for each step."
        elif calls and calls[0]["step"] == 0:
            yield "warning", "it comes before optimizer.step(): the first rate is never used"
        elif calls:
            yield "ok", words
        said = [x for x in steps if x["said"]]
        other = [
            x
            for x in said
            if any(abs(a - b) > 1e-6 * abs(b) for a, b in zip(x["rates"], x["said"]))
        ]
        if other:
            x = other[0]
            words = f"step {x['step']} uses the rate {x['rates'][0]:.4g}, but the schedule says "
            words += (
                f"{x['said'][0]:.4g} ({len(other)} of {len(said)} steps). What sets it afterwards?"
            )
            yield "ERROR" if len(other) == len(said) else "warning", words
    yield "not seen", "no scheduler of PyTorch is called"


def precision(job):
    """Weights are fp32 where a flag says so, and autocast reaches the layers."""
    types = Counter(x for each in job.first.starts for x in each["dtypes"])
    for x in job.all("flags"):
        for name, value in x["values"].items():
            says = re.fullmatch(r"(torch\.)?(fp|float)?_?32(-true)?", str(value).lower())
            if says and re.search("precision|dtype", name.lower()):
                low = [kind for kind in types if kind in ("bfloat16", "float16")]
                if low:
                    words = (
                        f"{types[low[0]]} weights are {low[0]}, but the flag {name} says {value}."
                    )
                    yield "ERROR", words + " Make the model in float32, use autocast for less."
                yield "ok", f"weights are as the flag {name} says, {value}"
    for x in job.all("autocast")[:1]:
        words = f"autocast is on, but a {x['module']} gives {x['gives']} in step {x['step'] + 1}."
        yield "warning", words + " Does it work in this thread, and in its forward()?"
    yield "ok", f"weights are {', '.join(types)}"


def modes(job):
    """Dropout and BatchNorm train in train(), and validate in eval()."""
    forwards, calls = of(job.first.records, "forward"), job.first.trained_calls
    trains = [x for x in forwards if x["call"] in calls and x["layers"]]
    wrong = [x for x in trains if x["in_eval"]]
    if wrong:
        x = wrong[0]
        words = f"{x['in_eval']} of {x['layers']} layers train in eval() from step {x['step'] + 1}"
        later = not trains[0]["in_eval"]
        words += ": validation did not end with model.train()" if later else ". Call model.train()"
        yield "ERROR" if later else "warning", words + "."
    tests = [x for x in forwards if not x["grad"] and x["layers"]]
    passes = {x["pass"] for x in of(job.first.records, "loss")} - {None}
    alone = [  # not one call in a step, as of a GAN's generator
        x
        for x, after in zip(forwards, [*forwards[1:], None])
        if x in tests and (x["pass"] not in {None, *passes} or after and not after["grad"])
    ]
    noisy = [x for x in alone if x["in_eval"] < x["layers"]]
    if noisy:
        words = f"{noisy[0]['module']} validates in train() after step {noisy[0]['step']}."
        yield "warning", words + " Call model.eval() before."
    early = [x for x in forwards if x["spectral"] and not x["training"] and not x["trained"]]
    if early:
        words = f"{early[0]['module']} has spectral_norm and is called in eval() before it ever was"
        yield "warning", words + " in train(): its norm is not yet known. Call it in train() first."
    if trains:
        words = f"in train() in {len(trains)} calls, in eval() in {len(tests)} without gradients"
        yield "ok", words
    yield "not seen", "no Dropout or BatchNorm is called for training"


def dropout(job):
    """Dropout draws other masks in each rank, and none in eval()."""
    active = job.all("dropout")
    if active:
        words = f"{active[0]['function']} drops values in eval() of {active[0]['module']}"
        yield (
            "warning",
            words + f" after step {active[0]['step']}. Give it p only if self.training.",
        )
    for one, two, *_ in job.data_groups:
        calls = [of(job.ranks[rank].records, "forward") for rank in (one, two)]
        pairs = [(a, b) for a, b in zip(*calls) if a["grad"] and a["random"] and b["random"]]
        if pairs and all(a["random"] == b["random"] for a, b in pairs):
            words = f"ranks {one} and {two} draw the same masks in {len(pairs)} calls. After the"
            yield "warning", words + " model is made, add the rank to the seed."
        elif pairs:
            yield "ok", f"ranks {one} and {two} draw different masks"
    yield "not seen", "no two ranks with random numbers in the model"


def batchnorm(job):
    """BatchNorm's statistics are the same in all ranks when they validate."""
    for one, two, *_ in job.data_groups:
        calls = [of(job.ranks[rank].records, "forward", grad=False) for rank in (one, two)]
        pairs = [(a, b) for a, b in zip(*calls) if a["norms"]]
        bad = [a for a, b in pairs if a["norms"] != b["norms"]]
        if bad:
            words = f"BatchNorm's statistics differ in validation after step {bad[0]['step']} in"
            words += f" ranks {one} and {two}. Send those of rank 0, or use SyncBatchNorm."
            yield "warning", words
        elif pairs:
            yield "ok", f"the same statistics in {len(pairs)} calls"
    yield "not seen", "no two ranks that validate with BatchNorm"


def shares(job):
    """Each rank trains on samples of its own."""
    for one, *others in job.data_groups:
        for two in others:
            yield share_of(job, one, two, 1 + len(others))
    yield "not seen", "no two ranks that should have samples of their own"


def share_of(job, one, two, count):
    """Returns the finding on the samples of two of `count` ranks."""
    samples = [job.ranks[rank].samples() for rank in (one, two)]
    common = [x for x in samples[0] if samples[0][x] and samples[1].get(x)]
    equal = [x for x in common if sorted(samples[0][x]) == sorted(samples[1][x])]
    firsts = [passes_of(job.ranks[rank], training=True)[:1] for rank in (one, two)]
    a, b = (x[0] if x else None for x in firsts)
    by_index = a and b and a["known"] and b["known"]
    alike = by_index and same_data(a, b)
    if common and len(equal) > len(common) / 2 or alike and a["index"] == b["index"]:
        words = f"ranks {one} and {two} get the same samples in {len(equal) or len(common)} steps."
        return "ERROR", words + " Use a DistributedSampler, or slices by rank."
    if by_index:
        whole = epoch_length(job.ranks[one], a, count)
        mine, theirs = a["index"][:whole], b["index"][:whole]
        both = set(mine) & set(theirs)
        left = a["size"] - count * len(set(a["index"]))
        if len(set(mine)) < len(mine):
            return "ok", "drawn with replacement, so that ranks may share some"
        if len(both) >= count and alike:
            words = f"ranks {one} and {two} share {len(both)} of {len(mine)} samples in an epoch."
            return "ERROR", words + " Use a DistributedSampler, or one order for all ranks."
        if both and alike is False:
            return "ok", f"ranks {one} and {two} have data sets of their own"
        if a["ended"] and left > 0.1 * a["size"] and not both:
            return "warning", f"{left} of {a['size']} samples are left out of the first epoch"
        return "ok", f"ranks {one} and {two} share none of {len(mine) + len(theirs)} samples"
    if not common:
        return "not seen", f"the samples of ranks {one} and {two} are not known"
    seen = [Counter(y for x in each.values() for y in x) for each in samples]
    between = sum(seen[0][x] * seen[1][x] for x in seen[0])
    within = sum(x * (x - 1) / 2 for each in seen for x in each.values())
    if between > 2 and between > 5 * within:
        words = f"ranks {one} and {two} share {between} samples of {sum(seen[0].values())}."
        return "ERROR", words + " Draw one order, and give each rank its part."
    return "ok", f"ranks {one} and {two} share {between} of {sum(seen[0].values())} samples"


def order(job):
    """The order of the samples is random, and another one in each epoch."""
    trains = passes_of(job.first, training=True)
    orders = [x["index"] if x["known"] else (x["parts"] or [[]])[0] for x in trains]
    if trains and trains[0]["known"]:  # a pass may have several epochs
        length = epoch_length(job.first, trains[0], job.first.start["world"])
        orders = [x[i : i + length] for x in orders for i in range(0, len(x), length)]
    orders = [x for x in orders if len(x) > 7]
    if not orders:
        yield "not seen", "the samples of an epoch come from no DataLoader, or are fewer than 8"
        return
    first, *later = orders
    if not trains[0]["known"] and len(set(first)) <= len(first) / 2:
        words = f"{len(set(first))} different samples among {len(first)} of a pass."
        yield "ERROR", words + " Workers of an IterableDataset share them: use get_worker_info()."
    elif trains[0]["known"] and first == sorted(first):
        yield "warning", f"not shuffled: {str(first[:4])[1:-1]}, ... If not wanted, shuffle."
    elif later and all(a == b for a, b in zip(first, later[0])):
        words = f"the first two epochs have one order ({min(len(first), len(later[0]))} compared)."
        yield "ERROR", words + " Call sampler.set_epoch(epoch) in each."
    elif later:
        yield "ok", "the first two epochs have different orders"
    yield "not seen", "only one epoch began. Try more --steps, or --epoch_batches 5"


def inputs(job):
    """A batch has a row for each sample, and is not all zeros."""
    for rank, each in job.ranks.items():
        calls = [x for x in of(each.records, "forward") if x["call"] in each.trained_calls]
        empty = [x["step"] + 1 for x in calls if x["zero"]]
        if 0 < len(empty) < len(calls) / 2:
            words = (
                f"the input of step {empty[0]} in rank {rank} is all zeros ({len(empty)} steps)."
            )
            yield "ERROR", words + " Was it lost on its way to the device?"
        batches = [x for x in of(each.records, "batch") if x["rows"]]
        odd = [
            next((rows for rows in x["rows"] if rows != len(x["index"])), None)
            for x in batches
            if len(x["index"]) in x["rows"]
        ]
        if odd and None not in odd and len({*odd}) == 1 and len(odd) > 1:
            words = (
                f"a batch of {len(batches[0]['index'])} samples has a tensor of {odd[0]} row(s)."
            )
            yield "warning", words + " Does collate_fn take one for all of them?"
        if calls:
            yield "ok", f"none of {len(calls)} inputs is all zeros"


def samples(job):
    """A data set gives the same sample for an index in each epoch, unless random numbers change it."""
    random_ones = {x["data"] for x in job.all("fetch") if x["used"]}
    for rank, each in job.ranks.items():
        seen = {}  # (data set, index): (hashes, pass)
        for x in of(each.records, "batch"):
            if x["data"] in random_ones or None in x["index"]:
                continue
            for index, *parts in zip(
                x["index"], *[p for p in x["parts"] if len(p) == len(x["index"])]
            ):
                old, number = seen.setdefault((x["data"], x["size"], index), (parts, x["pass"]))
                if old != parts and number != x["pass"]:
                    words = (
                        f"sample {index} of {x['data']} has other bytes in a later epoch in rank"
                    )
                    words += (
                        f" {rank}, though nothing random was drawn. Copy it before you change it."
                    )
                    yield "ERROR", words
                    return
                if number != x["pass"]:
                    yield "ok", "samples that were read twice have the same bytes"
    if random_ones:
        yield "not seen", f"{', '.join(sorted(random_ones))} draws random numbers"
    yield "not seen", "no sample was read twice. Try more --steps, or --epoch_batches 5"


def augmentation(job):
    """Random numbers of data sets differ in workers, ranks and epochs."""
    pids = {each.name: rank for rank, each in job.ranks.items()}
    drawn = defaultdict(list)  # (generator, data set, rank, worker): its states, by epoch
    for records in job.seen.values():
        fetches = [x for x in of(records, "fetch") if x["used"] and x["parent"] in pids]
        for name in fetches[0]["used"] if fetches else ():
            one = fetches[0]
            key = (name, one["data"], pids[one["parent"]], one["worker"], one["workers"])
            drawn[key].append((one["at"], [x["used"].get(name) for x in fetches[:3]]))
    epochs = {key: [states for _, states in sorted(each)] for key, each in sorted(drawn.items())}
    said = set()
    for key, states in epochs.items():
        name, data, rank, worker, workers = key
        place = f"worker {worker} of rank {rank}" if workers else f"rank {rank}"
        if workers and len(states) > 1 and states[0] == states[1] and "epoch" not in said:
            said.add("epoch")
            words = f"{place} draws the same numbers in each epoch ({name})."
            yield "ERROR", words + " Seed it by torch.initial_seed()."
        for other in epochs:
            level = "ERROR" if other[2] == rank else "warning"
            if other < key and other[:2] == key[:2] and epochs[other][0] == states[0]:
                whose = f"worker {other[3]} of rank {other[2]}" if workers else f"rank {other[2]}"
                if level not in said:
                    said.add(level)
                    words = f"{place} draws the same numbers as {whose} ({name})."
                    yield level, words + " Add worker and rank to the seed."
    if epochs:
        yield "ok", f"different random numbers in {len(epochs)} places"
    yield "not seen", "no data set draws random numbers in a DataLoader"


def split(job):
    """No sample of the validation is trained on."""
    runs = [x for each in job.ranks.values() for x in passes_of(each, training=False)[:1]]
    runs = [x for x in runs if x["known"] and x["split"]]
    trained = [x for each in job.ranks.values() for x in passes_of(each, training=True)]
    same = [x for x in trained if x["known"] and runs and x["split"] == runs[0]["split"]]
    leaked = {i for x in same for i in x["index"]} & {i for x in runs for i in x["index"]}
    if leaked:
        words = f"{len(leaked)} samples of one rank's validation are trained on, such as"
        yield "ERROR", f"{words} {min(leaked)}. Seed random_split()."
    elif same:
        yield "ok", "no sample of the validation was trained on"
    yield "not seen", "training and validation are not known as parts of one data set"


def validation(job):
    """Validation counts each sample once."""
    runs = [x for each in job.ranks.values() for x in passes_of(each, training=False)[:1]]
    runs = [x for x in runs if x["ended"] and x["known"]]
    if not runs:
        yield "not seen", "no whole pass over a DataLoader without gradients ended"
        return
    size = runs[0]["size"]
    counts = Counter(i for x in runs for i in x["index"])
    twice = sum(count > 1 for count in counts.values())
    if any(same_data(runs[0], x) is False for x in runs[1:]):
        yield "ok", f"{len(runs)} ranks have data sets of their own"
    elif len(runs) > 1 and min(counts.values()) == len(runs):
        yield "ok", f"{len(runs)} ranks validate all {size} samples each"
    elif twice and runs[0]["maker"] == "accelerate":
        yield "ok", f"{twice} of {size} samples come twice; gather_for_metrics() drops them"
    elif twice:
        words = f"{twice} of {size} samples count twice: a DistributedSampler fills up."
        yield "warning", words + " Give each rank range(rank, size, world_size)."
    elif len(counts) < size and len(runs) == len(job.ranks):
        yield "warning", f"{size - len(counts)} of {size} samples are left out. drop_last?"
    else:
        yield "ok", f"{len(counts)} of {size} samples once each"


def snapshot(job):
    """One process writes a snapshot, under another name first."""
    saves, moved = defaultdict(list), {x["path"] for x in job.all("move")}
    for x in job.all("save"):
        saves[x["path"]].append(x)
    for path, each in saves.items():
        writers = len({x["writer"] for x in each})
        if writers > 1:
            words = f"{writers} processes write {os.path.basename(path)}."
            yield "ERROR", words + " Let rank 0 alone write it."
        elif path not in moved and len(each) > 1:
            words = f"{os.path.basename(path)} is written over in place: a kill meanwhile leaves no"
            yield "warning", words + " whole file. Write a .tmp, then os.replace() it."
    whole = sum(each[0]["optimizer"] for each in saves.values())
    if saves:
        yield "ok", f"{len(saves)} file(s), {whole} of them with an optimizer's state"
    yield "not seen", "torch.save() is not called"


KINDS = [processes, settings, weights, updates, gradients, zeroing, averaging, finite, clipping]
KINDS += [schedule, precision, modes, dropout, batchnorm, shares, order, inputs, samples]
KINDS += [augmentation, split, validation, snapshot]


def against(job, other):
    """The same samples and the same weights as in another run, as far as rounding lets them."""
    if not other.ranks:
        yield "not seen", "the other command took no step"
        return
    mine, theirs = job.first.states(0), other.first.states(0)
    if job.first.start["shapes"] != other.first.start["shapes"]:
        yield "not seen", "the runs have other tensors: stages, or another model"
        return
    names, way = job.first.start["names"], 0
    step, words, only_rounds = other_samples(job, other)
    for at in sorted(mine.keys() & theirs.keys()):
        for index, name in enumerate(names):
            apart = distance(mine[at], theirs[at], index)
            way = distance(theirs[at], theirs[0] if at else None, index) * (1 if at else 0.05)
            if apart <= 0.02 * way + 1e-7 * distance(theirs[at], None, index):
                continue
            if at and step and step <= at and not only_rounds:
                yield "ERROR", f"data: {words} Compare seed, order and shares."
            elif at:
                share = f"{apart / way:.0%} of its way" if way else f"{apart:.0e}"
                words = f"computation: the samples are the same, but {name} differs after step {at}"
                words += f" by {share}. Compare mean or sum, accumulation, rate, clipping, dropout."
                yield "ERROR", words
            else:
                yield "ERROR", f"start: {name} differs before step 1. Compare seeds and set-up."
            return
    if step and only_rounds:
        yield "warning", f"data: {words} It is rounding: does it depend on the number of threads?"
    elif step:
        yield "ERROR", f"data: {words} Compare seed, order and shares."
    yield "ok", f"the same weights in {len(mine.keys() & theirs.keys()) - 1} steps, to rounding"


def other_samples(job, other, skip=0):
    """Returns the first step with other samples in two runs, words on it, whether it is rounding."""
    mine, theirs = job.union(), other.union()
    for step in sorted(mine):
        if mine[step] and theirs.get(step - skip):
            a, b = (Counter(x for x, _ in each) for each in (mine[step], theirs[step - skip]))
            if a != b:
                count = f"{sum((a - b).values())} of {sum(a.values())}"
                words = f"{count} samples of step {step} are not in the other run's step."
                sizes = [sorted(x for _, x in each) for each in (mine[step], theirs[step - skip])]
                close = [abs(x - y) <= 1e-4 * abs(y) + 1e-6 for x, y in zip(*sizes)]
                return step, words, len(sizes[0]) == len(sizes[1]) and any(sizes[0]) and all(close)
    return 0, "", False


def resume(whole, stopped, again):
    """A job that was stopped and started again takes the steps of the undisturbed one."""
    states = whole.first.states(0)
    done = stopped.steps
    if done >= max(states):
        yield "not seen", f"stopped only at step {done}: the steps are too fast, try more --steps"
        return
    if not again.ranks:
        yield "ERROR", f"stopped at step {done}, the same command takes no step"
        return
    start = again.first.start
    at = [step for step, x in states.items() if x["weights"] == start["weights"]]
    if not at or at[-1] == 0:
        words = "starts anew" if at else "goes on with weights that the undisturbed run never had"
        yield "ERROR", f"stopped at step {done}, it {words}. Save and load all weights."
        return
    at = at[-1]
    other, _, only_rounds = other_samples(whole, again, skip=at)
    before = {
        x["step"]: x["extras"] for x in reversed(of(whole.first.records, "forward", grad=True))
    }
    after = {
        x["step"]: x["extras"] for x in reversed(of(again.first.records, "forward", grad=True))
    }
    changed = [
        name
        for name, value in (before.get(at) or {}).items()
        if value != before[0].get(name, value) and value != (after.get(0) or {}).get(name, value)
    ]
    for step, x in list(again.first.states(0).items())[1:]:
        old = states.get(at + step)
        if old is None:
            break
        words = f"goes on at step {at}, but step {at + step} has other "
        if old["types"] != x["types"]:
            types = sorted({*x["types"]} ^ {*old["types"]})
            yield "ERROR", words + f"types in the optimizer's state: {', '.join(types)}."
            return
        if old["weights"] != x["weights"]:
            if changed:
                words += f"weights: {changed[0]} is in no state_dict, and was not restored."
                yield "ERROR", words + " Register it as a buffer."
            elif other and other <= at + step and not only_rounds:
                yield "ERROR", words + "samples. Save the place in the data, and the order's seed."
            else:
                yield "ERROR", words + "weights. Save optimizer, schedule, scaler, random states."
            return
    yield "ok", f"stopped at step {done}, goes on at {at} with the same weights, bit for bit"


def of(records, kind, **values):
    return [x for x in records if x["kind"] == kind and all(x[k] == v for k, v in values.items())]


def pass_of(records, number):
    """A pass over a DataLoader: its indices, and for each tensor of the batches the hashes."""
    batches = of(records, "batch", **{"pass": number})
    index = [i for x in batches for i in x["index"]]
    parts = [[y for part in column for y in part] for column in zip(*[x["parts"] for x in batches])]
    parts = [x for x in parts if len(x) == len(index)]
    ended = bool(of(records, "ended", **{"pass": number}))
    one = {name: batches[0][name] for name in ("size", "split", "maker")}
    return one | {"index": index, "parts": parts, "ended": ended, "known": None not in index}


def passes_of(process, training):
    """The passes over data from which the model trained, or which it only read."""
    records = process.records
    trained = {x["pass"] for x in of(records, "loss")}
    tested = {x["pass"] for x in of(records, "forward", grad=False)} - trained
    return [pass_of(records, x) for x in sorted((trained if training else tested) - {None})]


def epoch_length(process, one, count):
    """How many samples each of `count` processes takes from a data set in an epoch."""
    sizes = {step: len(each) for step, each in process.samples().items()}
    share = sizes[min(sizes, default=0)] if sizes else len(one["index"])
    return (one["size"] // (share * count) * share if share else 0) or one["size"]


def same_data(one, two):
    """Whether an index means one sample in two passes. None: no index is in both."""
    if one["size"] != two["size"]:
        return False
    answers = []
    for mine, theirs in zip(one["parts"], two["parts"]):
        a, b = dict(zip(one["index"], mine)), dict(zip(two["index"], theirs))
        both = a.keys() & b.keys()
        if both:
            several = len({a[i] for i in both}) > 1 or len(both) == 1
            answers.append(several and all(a[i] == b[i] for i in both))
    return any(answers) if answers else None


# == The hooks: in each process of the job, they write down what it does ===========================

optimizers = {}  # id: what is known of an optimizer that took a step
made = weakref.WeakSet()  # all optimizers
names, alive, owners = {}, {}, {}  # id of a parameter: name, weak reference, class of its module
averaged_by, nodes = {}, {}  # id of a parameter: its DDP, and the node that DDP listens to
calls = weakref.WeakKeyDictionary()  # how often a module was called, and whether for training
now = Counter()  # of the step under way: backward passes, and what DDP did
stepping = []  # optimizers that take a step right now
state = {"depth": 0, "backward": False, "passes": 0, "pass": None, "call": 0, "backwards": 0}
file, file_pid = None, 0


def record(kind, **values):
    """Appends a line to this process's file. Here tensors become numbers, and wait for the GPU."""
    global file, file_pid
    if file_pid != os.getpid():  # also in a process that was forked
        path = f"{os.environ['CHECK_SEEN']}/{process_name(os.getpid())}"
        file, file_pid = open(path, "a", 1), os.getpid()
        record("process", parent=os.environ["CHECK_PARENT"])
        record.stack = open(f"{path}.stack", "w")
    file.write(json.dumps({"kind": kind, **values}, default=lambda x: x.tolist()) + "\n")


def process_name(pid):
    return f"{socket.gethostname()}-{pid}"


def watch_time():
    """Writes down where this process stands if it does not come here again in time."""
    faulthandler.dump_traceback_later(float(os.environ["CHECK_STUCK"]), file=record.stack)


def wrap(owner, name, around):
    """Makes owner.name(...) call around(plain, ...), where plain is what it was."""
    plain = getattr(owner, name)
    setattr(owner, name, functools.wraps(plain)(lambda *a, **k: around(plain, *a, **k)))


def careful(hook):
    """A hook whose own errors are reported, and do not end the training."""

    @functools.wraps(hook)
    def safe(*args):
        try:
            return hook(*args)
        except Exception as error:
            record("trouble", text=f"{hook.__name__}: {type(error).__name__}: {error}"[:200])

    return safe


def local(tensor):
    return getattr(tensor, "_local_tensor", tensor).detach()  # of a DTensor: the part that is here


def bits(tensor):
    """A number for all bits of a tensor, on its device."""
    tensor = local(tensor)
    tensor = tensor.coalesce().values() if tensor.is_sparse else tensor
    ints = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = tensor.contiguous().view(ints[tensor.element_size()]).flatten()
    if hash_tensor and flat.device.type in ("cpu", "cuda"):  # since torch 2.9
        return hash_tensor(flat).to(torch.int64)
    return flat.long().sum()


@functools.lru_cache
def factors(length, device):
    own = torch.Generator().manual_seed(length)  # the training's generators stay as they are
    return change(torch.randint(2**62, (length,), generator=own) * 2 + 1, device)


@functools.lru_cache
def signs(length, device):
    """Four rows of 1 and -1, float64 where the device has it."""
    kind = torch.float32 if device.type == "mps" else torch.float64
    picked = [(factors(length, torch.device("cpu")) >> i & 2).sub(1) for i in (9, 19, 29, 39)]
    return change(torch.stack(picked), device, kind)


def sketch(tensor):
    """Random projections: those of a difference are about as large as the difference."""
    if "CHECK_AGAINST" in os.environ and hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()  # all ranks of its mesh are here
    flat = local(tensor).flatten()
    flat = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
    rows = signs(len(flat), flat.device)[: None if "CHECK_AGAINST" in os.environ else 2]
    return rows @ change(flat, rows.dtype)


def hash_samples(batch):
    """Returns two numbers for each sample, of each tensor of a batch: all bits, about how large."""
    tensors = [x for x in torch.utils._pytree.tree_leaves(batch) if isinstance(x, torch.Tensor)]
    tensors = [local(x) for x in tensors if x.dim() and not x.is_complex() and not x.is_sparse]
    tensors = [x for x in tensors if len(x) == len(tensors[0]) and x.numel()]
    hashes, sizes = [], []
    for tensor in tensors:
        rows = tensor.reshape(len(tensor), -1).contiguous()
        if "CHECK_AGAINST" in os.environ and rows.is_floating_point():
            sizes.append(rows.double() @ signs(rows.shape[1], rows.device)[0].double())
        if rows.shape[1] * rows.element_size() % 8 == 0:
            rows = rows.view(torch.int64)  # faster
        elif rows.is_floating_point():
            rows = rows.float().view(torch.int32)
        hashes.append((rows.long() * factors(rows.shape[1], rows.device)).sum(1))
    return hashes, sizes


def random_states(data=None):
    """Numbers for the states of all random generators, by name."""
    states = {"torch": zlib.crc32(torch.get_rng_state().numpy()), "random": hash(random.getstate())}
    if data is None and torch.accelerator.is_available():
        states["device"] = zlib.crc32(torch.get_device_module().get_rng_state().cpu().numpy())
    if "numpy" in sys.modules:
        _, words, place, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = zlib.crc32(words, place)
    for name, value in own_generators(data) if data is not None else ():
        if hasattr(value, "bit_generator"):
            states[f"its {name}"] = zlib.crc32(repr(value.bit_generator.state).encode())
        elif isinstance(value, random.Random):
            states[f"its {name}"] = hash(value.getstate())
        else:
            states[f"its {name}"] = zlib.crc32(value.get_state().numpy())
    return states


def own_generators(data, depth=4):
    """Yields the random generators that an object holds, with their names."""
    for name, value in [*getattr(data, "__dict__", {}).items()]:
        if isinstance(value, (torch.Generator, random.Random)) or hasattr(value, "bit_generator"):
            yield name, value
        elif depth and isinstance(value, (list, tuple)):
            for part in value[:20]:
                yield from own_generators(part, depth - 1)
        elif depth and hasattr(value, "__dict__") and not isinstance(value, (type, type(os))):
            yield from own_generators(value, depth - 1)


def used(before, after):
    """The states before and after, of those that were used: equal ones drew equal numbers."""
    return {x: [old, after.get(x)] for x, old in before.items() if old != after.get(x)}


def learn_names(module):
    for owner_name, owner in module.named_modules():
        for name, weight in owner.named_parameters(recurse=False):
            parts = [x for x in owner_name.split(".") if x not in ("", "module", "_orig_mod")]
            names.setdefault(id(weight), ".".join([*parts, name]))
            owners.setdefault(id(weight), [x.__name__ for x in type(owner).__mro__])
            alive.setdefault(id(weight), weakref.ref(weight))


def extras(module):
    """Numbers and tensors of a model that its state_dict does not have."""
    found = {}
    for name, part in module.named_modules():
        hidden = {key: part._buffers[key] for key in part._non_persistent_buffers_set}
        if type(part).__module__.partition(".")[0] != "torch":
            hidden |= {key: x for key, x in vars(part).items() if key != "training"}
        for key, x in hidden.items():
            if isinstance(x, torch.Tensor):
                found[f"{name}.{key}".removeprefix("module.").strip(".")] = bits(x)
            elif isinstance(x, (int, float)):
                found[f"{name}.{key}".removeprefix("module.").strip(".")] = x
    return found


@careful
def before_module(module, args):
    if torch.compiler.is_compiling():
        return
    state["depth"] += 1
    grad = torch.is_grad_enabled()
    if isinstance(module, DDP) and grad and not state["backward"]:
        now["ddp"] += 1
        now["averaged"] += module.require_backward_grad_sync
        now["in_no_sync"] = not module.require_backward_grad_sync
    if state["depth"] > 1 or state["backward"] or is_over():
        return
    if next(module.parameters(), None) is None:
        return
    history = calls.setdefault(module, Counter())
    history["calls"] += 1
    if history["calls"] <= 3:
        learn_names(module)
    modules = list(module.modules())
    layers = [x for x in modules if "Dropout" in type(x).__name__ and getattr(x, "p", 0)]
    norms = [x for x in modules if getattr(x, "running_mean", None) is not None]
    layers += [x for x in norms if any(y.requires_grad for y in x.parameters()) or not grad]
    kwargs = sys._getframe(2).f_locals.get("kwargs", {})  # global hooks get none from PyTorch
    hashes, sizes = hash_samples((args, kwargs))
    state["call"] += 1
    values = {"grad": grad, "step": steps_done(), "module": type(module).__name__}
    values |= {"layers": len(layers), "in_eval": sum(not x.training for x in layers)}
    values |= {"samples": sum((i * 2 + 1) * x for i, x in enumerate(hashes)), "sizes": sum(sizes)}
    values |= {"pass": state["pass"], "call": state["call"], "training": module.training}
    values |= {"trained": history["training"], "random": random_states(), "norms": norms}
    values["zero"] = next((not x.any() for x in tensors_of(args)), False)
    values["spectral"] = any(
        hasattr(x, "weight_u") or "_SpectralNorm" in str(type(x)) for x in modules
    )
    values["extras"] = extras(module) if "CHECK_RESUME" in os.environ and grad else {}
    history["training"] |= module.training
    if not (grad or module.training or is_compiled(modules)) and history["watched"] < 3:
        history["watched"] += 1
        values["mode"] = make_mode(values)
        values["mode"].__enter__()
    module.__dict__["_check"] = values


def tensors_of(args):
    """The tensors with more than a number for each sample."""
    leaves = torch.utils._pytree.tree_leaves(args)
    return [x for x in leaves if isinstance(x, torch.Tensor) and x.dim() > 1 and x[0].numel() > 1]


def is_compiled(modules):
    return any(type(x).__name__ == "OptimizedModule" or x._compiled_call_impl for x in modules)


def make_mode(values):
    """Notes the calls of dropout in a model that is in eval()."""

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            name = getattr(function, "__name__", "")
            p = kwargs.get(
                "dropout_p", args[4] if name.startswith("scaled") and len(args) > 4 else 0
            )
            if "dropout" in name:
                given = dict(zip(("input", "p", "training"), args)) | kwargs
                p = given.get("training", True) and given.get("p", 0.5)
            if p and state["dropouts"] < 3:
                state["dropouts"] += 1
                record("dropout", function=name, module=values["module"], step=values["step"])
            return function(*args, **kwargs)

    state.setdefault("dropouts", 0)
    return Mode()


@careful
def after_module(module, args, output):
    if torch.compiler.is_compiling():
        return
    state["depth"] = max(0, state["depth"] - 1)
    if isinstance(module, LAYERS) and isinstance(output, torch.Tensor) and args:
        check_autocast(module, args[0], output)
    values = module.__dict__.pop("_check", None)
    if values:
        if "mode" in values:
            values.pop("mode").__exit__(None, None, None)
        norms = [] if values["grad"] else values["norms"]
        values["norms"] = [bits(x.running_mean) for x in norms]  # DDP sent them at its start
        record("forward", **values | {"random": used(values["random"], random_states())})
        number = values["call"]
        for x in torch.utils._pytree.tree_leaves(output) if values["grad"] else ():
            if isinstance(x, torch.Tensor) and x.requires_grad and x.grad_fn is not None:
                x.register_hook(lambda _: note_training(number))


def note_training(call):
    """A gradient comes to the output of this call."""
    if state.get("noted") != call:
        state["noted"] = call
        record("trained", call=call)


def check_autocast(module, given, output):
    device = output.device.type
    if torch.is_autocast_enabled(device) and "autocast" not in state:
        if output.dtype not in (torch.get_autocast_dtype(device), torch.float64):
            state["autocast"] = True
            kind = str(output.dtype).removeprefix("torch.")
            record("autocast", module=type(module).__name__, gives=kind, step=steps_done())


def weights_of(optimizer):
    return [x for group in optimizer.param_groups for x in group["params"]]


def backward(plain, tensors, *args, **kwargs):
    before_backward(tensors)
    state["backward"] = True
    try:
        plain(tensors, *args, **kwargs)
        each = [weights_of(known["optimizer"]) for known in optimizers.values()]
        each += [] if each else [weights_of(optimizer) for optimizer in made]
        now["had_gradients"] = any(x.grad is not None for weights in each for x in weights)
        now["version"] = sum(x._version for weights in each for x in weights)
    finally:
        state["backward"] = False
    if not optimizers and state["backwards"] >= 20 * int(os.environ["CHECK_STEPS"]):
        end()  # a script without an optimizer


@careful
def before_backward(tensors):
    watch_time()
    now["backward"] += 1
    state["backwards"] += 1
    for known in optimizers.values():
        weights = weights_of(known["optimizer"])
        grads = [x.grad for x in weights if x.grad is not None]
        clean = not grads or not any(torch.stack([bits(x) for x in grads]).tolist())
        known["clean"] = clean or bool(known["clean"])
        if clean and now["had_gradients"] and len(made) == 1 and not stepping:
            now["wiped"] += now["version"] == sum(x._version for x in weights)
    loss = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors))
    if not is_over():
        value = local(loss).double() / (now["scale"] or 1) if loss.numel() == 1 else 0
        record("loss", step=steps_done(), value=value, **{"pass": state["pass"]})


def steps_done():
    return max((known["step"] for known in optimizers.values()), default=0)


def is_over():
    return steps_done() >= int(os.environ["CHECK_STEPS"])


@careful
def before_step(optimizer, args, kwargs):
    if optimizer in stepping:
        stepping.clear()  # its last step ended by an error
    stepping.append(optimizer)
    if len(stepping) > 1:  # one optimizer calls another, as ZeroRedundancyOptimizer does
        return
    if id(optimizer) not in optimizers:
        known = {"number": len(optimizers), "step": 0, "clean": True, "optimizer": optimizer}
        optimizers[id(optimizer)] = known
        record_start(optimizer, known["number"])
    known = optimizers[id(optimizer)]
    known["backward"] = now["backward"]
    known["values"] = gradients_of(optimizer, known)


def gradients_of(optimizer, known):
    """What is known of the gradients with which an optimizer takes its step."""
    weights = weights_of(optimizer)
    grads = [None if x.grad is None else local(x.grad) for x in weights]
    infinite = [
        names.get(id(weight), f"parameter {i}")
        for i, (weight, x) in enumerate(zip(weights, grads))
        if x is not None and not (x._values() if x.is_sparse else x).isfinite().all()
    ]
    scheduler = known.get("scheduler", lambda: None)()
    with torch.enable_grad():
        moved = [x for x in weights if id(x) in nodes and node_of(x) is not nodes[id(x)]]
    counts = ("ddp", "averaged", "in_no_sync", "wiped", "clipped", "had_gradients")
    return {
        "grads": [None if x is None else bits(x) for x in grads],
        "infinite": infinite,
        "rates": [float(group.get("lr", 1)) for group in optimizer.param_groups],
        "said": [float(x) for x in scheduler.get_last_lr()] if scheduler else [],
        "moved": len(moved),
        **{name: now[name] for name in counts},
    }


def node_of(weight):
    """The node that adds up this weight's gradient. DDP listens to it; a move makes another one."""
    return weight.view_as(weight).grad_fn.next_functions[0][0] if weight.requires_grad else None


def record_start(optimizer, number):
    dist = torch.distributed
    weights, group = weights_of(optimizer), dist.is_available() and dist.is_initialized()
    ddp = next((averaged_by[id(x)]() for x in weights if id(x) in averaged_by), None)
    groups = dist.distributed_c10d._world.pg_group_ranks.values() if group else []
    modules = [getattr(x, "__file__", None) or "" for x in list(sys.modules.values())]
    files = [x for x in modules if x.startswith(os.getcwd()) and "site-packages" not in x]
    files += [os.path.abspath(sys.argv[0])]
    device = weights[0].device
    kind = [torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
    if device.type != "cpu":
        kind.append(getattr(torch.get_device_module(device), "get_device_name", str)())
    record(
        "start",
        number=number,
        rank=dist.get_rank() if group else 0,
        world=dist.get_world_size() if group else 1,
        launched=int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS") or 1),
        groups=[len(x) for x in groups],
        ddp=dist.get_process_group_ranks(ddp.process_group) if ddp else [],
        in_ddp=[id(x) in averaged_by for x in weights],
        names=[names.get(id(x), f"parameter {i}") for i, x in enumerate(weights)],
        shapes=[list(x.shape) for x in weights],
        shards=[shard_of(x) for x in weights],
        mesh=next((x.device_mesh.mesh.tolist() for x in weights if hasattr(x, "device_mesh")), []),
        is_fsdp=["FSDPModule" in owners.get(id(x), []) for x in weights],
        whole=[is_whole(x) for x in weights],
        trainable=[x.requires_grad for x in weights],
        dtypes=[str(x.dtype).removeprefix("torch.") for x in weights],
        weights=[bits(x) for x in weights],
        sketches=[sketch(x) for x in weights],
        shared=device.type == "cpu" and all(local(x).is_shared() for x in weights),
        place=[socket.gethostname(), str(device), torch.accelerator.device_count()],
        machine=kind,
        flags=[x for x in sys.argv[1:] if "rank" not in x],
        versions=[sys.version.split()[0], torch.__version__],
        code={x: zlib.crc32(Path(x).read_bytes()) for x in files if os.path.isfile(x)},
    )


def shard_of(weight):
    """Which part of a DTensor is here; "" if it is all of it."""
    if not hasattr(weight, "placements"):
        return ""
    places = zip(weight.placements, weight.device_mesh.get_coordinate())
    return " ".join(f"{kind}{place}" for kind, place in places if not kind.is_replicate())


def is_whole(weight):
    """Whether each rank has all of it, even if other weights are split over them by hand."""
    by_hand = getattr(weight, "tensor_model_parallel", None)
    return not by_hand if by_hand is not None else "Norm" in str(owners.get(id(weight)))


@careful
def note_step(optimizer, known):
    if known["backward"] != now["backward"]:  # a closure ran in it
        known["values"] = gradients_of(optimizer, known)
    weights = weights_of(optimizer)
    types = {
        f"{key} {str(x.dtype).removeprefix('torch.')}"
        for each in optimizer.state.values()
        for key, x in (each.items() if isinstance(each, dict) else ())
        if isinstance(x, torch.Tensor)
    }
    values = {"weights": [bits(x) for x in weights], "sketches": [sketch(x) for x in weights]}
    values |= {"clean": known["clean"], "types": sorted(types), **known["values"]}
    record("step", number=known["number"], step=known["step"], **values)
    if known["step"] == 2:
        held = {id(x) for each in made for x in weights_of(each)}
        lost = [x for x in (each() for each in alive.values()) if x is not None]
        lost = [names[id(x)] for x in lost if id(x) not in held and x.grad is not None]
        record("lost", names=lost)


def after_step(optimizer, args, kwargs):
    if not stepping or optimizer is not stepping[0]:
        return
    known = optimizers[id(optimizer)]
    known["step"] += 1
    watch_time()
    note_step(optimizer, known)
    stepping.clear()
    known["clean"] = None
    now.clear()
    if known["step"] >= int(os.environ.get("CHECK_PAUSE", known["step"] + 1)):
        time.sleep(0.2)  # the signal to stop comes now
    counts = [each["step"] for each in optimizers.values()]
    limit = int(os.environ["CHECK_STEPS"])
    if min(counts) >= limit or max(counts) >= 2 * limit:
        end()


def end():
    """Leaves the script as sys.exit() would, when the other ranks are here, too."""
    record("end")
    faulthandler.cancel_dump_traceback_later()
    dist, folder = torch.distributed, Path(os.environ["CHECK_SEEN"])
    if dist.is_available() and dist.is_initialized():
        (folder / f"rank{dist.get_rank()}.end").touch()
        until = time.time() + 5
        while len(list(folder.glob("*.end"))) < dist.get_world_size() and time.time() < until:
            time.sleep(0.02)
    raise SystemExit(0)


def start_pass(plain, loader):
    iterator = plain(loader)
    size = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
    one = {"pass": state["passes"], "size": size, "data": loader.dataset, "batches": 0}
    one["maker"] = type(loader.batch_sampler).__module__.split(".")[0]
    one["limit"] = int(os.environ["CHECK_EPOCH_BATCHES"])
    if not hasattr(loader.batch_sampler or loader.sampler, "__len__"):
        one["limit"] = -1  # an endless one
    iterator._check = one
    state["passes"] += 1
    return iterator


def restart(plain, iterator, *args, **kwargs):
    iterator._check_indices = collections.deque()
    return plain(iterator, *args, **kwargs)  # with workers, this draws the first indices


def next_index(plain, iterator):
    index = plain(iterator)
    iterator.__dict__.setdefault("_check_indices", collections.deque()).append(index)
    return index


def next_batch(plain, iterator):
    one = getattr(iterator, "_check", None)
    if one is None or is_over():
        return plain(iterator)
    if one["batches"] == one["limit"]:
        raise StopIteration
    try:
        batch = plain(iterator)
    except StopIteration:
        record("ended", **{"pass": one["pass"]})
        raise
    record_batch(one, iterator._check_indices, batch)
    return batch


@careful
def record_batch(one, indices, batch):
    watch_time()
    state["pass"] = one["pass"]
    one["batches"] += 1
    index = indices.popleft()  # workers, too, deliver in the order of the indices
    index = list(index) if hasattr(index, "__iter__") else [index]
    index = [int(x) if hasattr(x, "__index__") else None for x in index]
    data = one["data"]
    while isinstance(data, torch.utils.data.Subset):  # as of random_split()
        index = [None if i is None else int(data.indices[i]) for i in index]
        data = data.dataset
    split = data is not one["data"] and [type(data).__name__, len(data)]
    values = {name: one[name] for name in ("pass", "size", "maker")}
    values |= {"index": index, "split": split, "data": type(data).__name__}
    parts = batch.values() if isinstance(batch, dict) else batch
    parts = parts if isinstance(batch, (dict, list, tuple)) else [batch]
    rows = [len(x) for x in parts if isinstance(x, torch.Tensor) and x.dim()]
    record("batch", **values, rows=rows, parts=hash_samples(batch)[0][:3])


def fetch(plain, fetcher, index):
    """In a worker, or where there is none in the process itself."""
    count = fetcher._check = getattr(fetcher, "_check", 0) + 1
    before = random_states(fetcher.dataset)
    data = plain(fetcher, index)
    drawn = used(before, random_states(fetcher.dataset))
    if count <= 3 or drawn and not state.get("drew"):
        state["drew"] = bool(drawn)
        note_fetch(fetcher.dataset, drawn)
    return data


@careful
def note_fetch(data, drawn):
    worker = torch.utils.data.get_worker_info()
    values = {"worker": worker.id if worker else 0, "workers": bool(worker), "at": time.time()}
    values["parent"] = process_name(os.getppid() if worker else os.getpid())
    while isinstance(data, torch.utils.data.Subset):
        data = data.dataset
    record("fetch", used=drawn, data=type(data).__name__, **values)


def schedule_step(plain, scheduler, *args, **kwargs):
    caller = sys._getframe(2)
    now["schedulers"] += 1  # one may call others
    try:
        result = plain(scheduler, *args, **kwargs)
        if now["schedulers"] == 1 and caller.f_code.co_name not in ("_initial_step", "__init__"):
            note_schedule(scheduler, caller.f_globals.get("__name__", "").split(".")[0])
        return result
    finally:
        now["schedulers"] -= 1


@careful
def note_schedule(scheduler, caller):
    optimizer = getattr(scheduler, "optimizer", None)
    optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
    known = optimizers.get(id(optimizer), {"step": steps_done(), "number": 0})
    known["scheduler"] = weakref.ref(scheduler)
    values = {"number": known["number"], "step": known["step"], "caller": caller}
    record("schedule", name=type(scheduler).__name__, **values)


def save(plain, data, path, *args, **kwargs):
    name = getattr(path, "name", path)
    if isinstance(name, (str, os.PathLike)):
        parts = [data, *data.values()] if isinstance(data, dict) else []
        has_state = any(isinstance(x, dict) and "param_groups" in x for x in parts)
        values = {"writer": process_name(os.getpid()), "path": os.path.abspath(name)}
        record("save", optimizer=has_state, **values)
    return plain(data, path, *args, **kwargs)


def move(plain, source, *args, **kwargs):
    if steps_done() and isinstance(source, (str, os.PathLike)):
        record("move", path=os.path.abspath(source))
    return plain(source, *args, **kwargs)


def make_ddp(plain, ddp, *args, **kwargs):
    plain(ddp, *args, **kwargs)
    learn_names(ddp)
    for x in ddp.module.parameters():
        averaged_by[id(x)], nodes[id(x)] = weakref.ref(ddp), node_of(x)


def make_optimizer(plain, optimizer, *args, **kwargs):
    made.add(optimizer)
    return plain(optimizer, *args, **kwargs)


def scale(plain, scaler, loss):
    now["scaled"] = scaler.is_enabled() and scaler.get_scale() != 1
    now["scale"] = scaler.get_scale() if scaler.is_enabled() else 1
    return plain(scaler, loss)


def unscale(plain, scaler, optimizer):
    now["scaled"] = 0
    return plain(scaler, optimizer)


def clip(plain, *args, **kwargs):
    now["clipped"] = "scaled" if now["scaled"] else "as it is"
    return plain(*args, **kwargs)


def parse(plain, parser, *args, **kwargs):
    found = plain(parser, *args, **kwargs)
    plain_ones = {k: v for k, v in vars(found[0]).items() if isinstance(v, (str, int, float))}
    record("flags", values=plain_ones)
    return found


def install():
    """PyTorch calls this at the end of `import torch`."""
    if "CHECK_SEEN" not in os.environ:
        return
    global torch, DDP, LAYERS, hash_tensor, change
    import torch
    from torch.nn.modules import module
    from torch.nn.modules.conv import _ConvNd
    from torch.optim import lr_scheduler
    from torch.optim.optimizer import register_optimizer_step_post_hook as after
    from torch.optim.optimizer import register_optimizer_step_pre_hook as before
    from torch.utils.data import DataLoader, _utils, dataloader

    DDP, LAYERS = torch.nn.parallel.DistributedDataParallel, (torch.nn.Linear, _ConvNd)
    # These are bound here, since a script may replace them.
    hash_tensor, change = getattr(torch, "hash_tensor", None), torch.Tensor.to
    before(before_step)
    after(after_step)
    module.register_module_forward_pre_hook(before_module)
    module.register_module_forward_hook(after_module, always_call=True)
    kinds = [lr_scheduler.LRScheduler]
    for kind in kinds:
        kinds += kind.__subclasses__()
        if "step" in vars(kind):
            wrap(kind, "step", schedule_step)
    for owner, name, around in (
        (torch.autograd, "backward", backward),
        (DDP, "__init__", make_ddp),
        (torch.optim.Optimizer, "__init__", make_optimizer),
        (DataLoader, "__iter__", start_pass),
        (dataloader._BaseDataLoaderIter, "_reset", restart),
        (dataloader._BaseDataLoaderIter, "_next_index", next_index),
        (dataloader._BaseDataLoaderIter, "__next__", next_batch),
        (_utils.fetch._MapDatasetFetcher, "fetch", fetch),
        (_utils.fetch._IterableDatasetFetcher, "fetch", fetch),
        (torch, "save", save),
        (os, "replace", move),
        (os, "rename", move),
        (torch.amp.GradScaler, "scale", scale),
        (torch.amp.GradScaler, "unscale_", unscale),
        (torch.nn.utils, "clip_grad_norm_", clip),
        (torch.nn.utils, "clip_grad_value_", clip),
        (argparse.ArgumentParser, "parse_known_args", parse),
    ):
        wrap(owner, name, around)
    record("installed")


# == The job: what is started, and what its processes saw ==========================================


def run(command, args, folder, stop_at=0, lives=1):
    """Runs a command under observation. Returns a Job."""
    seen, plugin = folder / f"seen{lives}", folder / "plugin"
    info = plugin / "check-1.dist-info"
    for each in (info, seen, folder / "tmp"):
        each.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: check\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ncheck = check_plugin:install\n")
    shutil.copy(__file__, plugin / "check_plugin.py")
    me = process_name(os.getpid())
    paths = [str(plugin), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"PYTHONPATH": os.pathsep.join(paths), "CHECK_SEEN": str(seen), "CHECK_PARENT": me}
    env |= {"CHECK_STEPS": str(args.steps * (10 if stop_at else 1))}
    env |= {"CHECK_STUCK": str(args.timeout / 2), "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    env |= {"CHECK_EPOCH_BATCHES": str(args.epoch_batches or -1)}
    env |= {"CHECK_AGAINST": "1"} if args.against else {}
    env |= {"CHECK_RESUME": "1"} if args.resume else {}
    env |= {"CHECK_PAUSE": str(stop_at)} if stop_at else {}
    words = shlex.split(command.replace("{tmp}", str(folder / "tmp")))
    process = subprocess.Popen(words, env=os.environ | env, start_new_session=True)
    size, last, ends = 0, time.time(), None
    while process.poll() is None and time.time() < min(last + args.timeout, ends or 1e12):
        time.sleep(0.1)
        texts = [path.read_text() for path in seen.glob("*[0-9]")]
        if sum(map(len, texts)) > size:
            size, last = sum(map(len, texts)), time.time()
        if stop_at and any(f'"number": 0, "step": {stop_at},' in text for text in texts):
            process.send_signal(signal.SIGTERM)
            stop_at = 0
        if not ends and any('{"kind": "end"}' in text for text in texts):
            ends = time.time() + args.grace
    hangs = process.poll() is None and not ends
    status = process.poll()
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)  # what is left of the processes that this started
            time.sleep(1)
        except ProcessLookupError:
            break
    process.wait()
    until = time.time() + args.grace
    while "CHECK_FOLDER" in os.environ and time.time() < until:  # other machines end later
        job = Job(seen, status, hangs, me)
        if job.ranks and len(job.ranks) >= job.first.start["world"]:
            if len(list(seen.glob("*.end"))) >= job.first.start["world"]:
                break
        time.sleep(0.5)
    return Job(seen, status, hangs, me)


class Job:
    """What the processes of a job saw."""

    def __init__(self, folder, status, hangs, me):
        self.seen = {}  # name of a process: its records
        paths = [path for path in folder.iterdir() if path.suffix not in (".stack", ".end")]
        for path in sorted(paths, key=lambda path: path.stat().st_ctime):
            lines = [x for x in path.read_text().splitlines() if x.endswith("}")]
            self.seen[path.name] = [json.loads(x) for x in lines]
        self.ranks = {}
        for name, records in self.seen.items():
            for start in of(records, "start")[:1]:
                rank = start["rank"]
                while start["world"] == 1 and rank in self.ranks:
                    rank += 1  # processes that do not know of each other
                self.ranks[rank] = Process(name, records)
        self.ranks = dict(sorted(self.ranks.items()))
        self.first = next(iter(self.ranks.values()), None)
        self.steps = max([each.steps for each in self.ranks.values()], default=0)
        self.backwards = len(self.all("loss"))
        self.status, self.hangs = status, hangs
        self.prints = not self.first or of(self.first.records, "process")[0]["parent"] == me
        starts = [each.start for each in self.ranks.values()]
        self.is_hogwild = len(starts) > 1 and all(x["shared"] and x["world"] == 1 for x in starts)
        self.stacks = {}
        for rank, each in self.ranks.items():
            text = (folder / f"{each.name}.stack").read_text() if hangs else ""
            lines = re.findall(r'File "(.*)", line (\d+) in (.*)', text.split("Thread 0x")[-1])
            skip = ("site-packages", "lib/python", "check_plugin", "<frozen", "<string")
            lines = [x for x in lines if not any(part in x[0] for part in skip)]
            if lines:
                self.stacks[rank] = "{} line {} in {}".format(
                    os.path.basename(lines[0][0]), *lines[0][1:]
                )
        self.families = [] if self.is_hogwild else self.find_families()
        whole = [each for each in self.families if not each.is_tensor_parallel and each.has_data]
        self.data_groups = [each.ranks for each in whole]

    def all(self, kind):
        return [x for records in self.seen.values() for x in of(records, kind)]

    def optimizers(self):
        """Each optimizer of the first rank: what was recorded at its start, and at its steps."""
        for number, start in enumerate(self.first.starts):
            yield start, list(self.first.states(number).values())[1:]

    def union(self):
        """By step, the samples of all ranks, as (hash, size); ranks that have the same count once."""
        groups, steps = self.data_groups or [[next(iter(self.ranks))]], defaultdict(list)
        for rank in groups[0]:
            for step, each in self.ranks[rank].samples(with_sizes=True).items():
                steps[step + 1] += each
        return steps

    def find_families(self):
        """Ranks that train one model: they average with each other, or split it by hand."""
        groups = defaultdict(list)
        for rank, each in self.ranks.items():
            start = each.start
            key = [start["names"], start["shapes"], start["ddp"], start["mesh"]]
            if not start["ddp"] and not start["mesh"]:
                if any(1 < size < start["world"] for size in start["groups"]):
                    key.append(start["weights"])  # split by hand: those that start alike
            groups[str(key)].append(rank)
        families = [Family(ranks) for ranks in groups.values() if len(ranks) > 1]
        for each in families:
            start = self.ranks[each.ranks[0]].start
            dims = {len(x.split()) for x in start["shards"]}
            each.has_data = not start["mesh"] or dims == {1} and any(start["is_fsdp"])
        # Unlike weights and the same samples: the ranks split the model between them.
        alone = [rank for rank, each in self.ranks.items() if not each.start["ddp"]]
        for one in alone:
            for two in alone[alone.index(one) + 1 :]:
                if self.is_split(self.ranks[one], self.ranks[two]):
                    families = [x for x in families if {one, two} - {*x.ranks}]
                    families.append(Family([one, two], is_tensor_parallel=True))
        return families

    def is_split(self, one, two):
        a, b = one.start, two.start
        same = [a[name] == b[name] for name in ("names", "shapes", "weights", "mesh")]
        if same != [True, True, False, True] or a["mesh"] or a["world"] == 1:
            return False
        mine, theirs = one.samples(), two.samples()
        return bool(mine) and all(sorted(mine[x]) == sorted(theirs.get(x, [])) for x in mine)


class Family:
    def __init__(self, ranks, is_tensor_parallel=False):
        self.ranks, self.is_tensor_parallel, self.has_data = ranks, is_tensor_parallel, True

    def copies(self, job, number, index):
        """Yields the lists of ranks that should have the same bits of this tensor."""
        shards = defaultdict(list)
        for rank in self.ranks:
            start = job.ranks[rank].starts[number]
            if start["whole"][index] or not self.is_tensor_parallel:
                shards[start["shards"][index]].append(rank)
        return [ranks for ranks in shards.values() if len(ranks) > 1]


class Process:
    """What one process saw that trains."""

    def __init__(self, name, records):
        self.name, self.records, self.starts = name, records, of(records, "start")
        self.start = self.starts[0]
        self.kind = " ".join(map(str, self.start["machine"]))
        self.steps = max([x["step"] for x in of(records, "step")], default=0)
        self.trained_calls = {x["call"] for x in of(records, "trained")}

    def states(self, number):
        """By step, what is known of an optimizer and its weights; 0: before the first step."""
        steps = {x["step"]: x for x in of(self.records, "step", number=number)}
        return {0: self.starts[number]} | steps

    def samples(self, with_sizes=False):
        """By step, the hashes of the samples that the model was trained on."""
        found = defaultdict(list)
        for x in of(self.records, "forward", grad=True):
            if x["call"] in self.trained_calls and x["samples"]:
                sizes = x["sizes"] or [0.0] * len(x["samples"])
                found[x["step"]] += zip(x["samples"], sizes) if with_sizes else x["samples"]
        return found


if __name__ == "__main__":
    main()
