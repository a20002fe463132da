"""Is my training right? Runs any PyTorch training, unchanged, for some steps, and says.

    python tools/check.py -- torchrun --nproc_per_node=2 train.py --batch_size 64
    python tools/check.py --against "python one_gpu.py" -- torchrun --nproc_per_node=2 train.py
    python tools/check.py --resume -- python train.py --snapshot {tmp}/run.pt   # {tmp}: new folder
    CHECK_FOLDER=/shared/new python tools/check.py -- srun python train.py  # torchrun: on each node

PyTorch loads this file in each process. It changes nothing, and notes what happens. Then it prints
a line for each kind of fault, or "not seen". Status 1: an error; 2: nothing trained; else 0.
"""

import argparse
import contextlib
import faulthandler
import functools
import json
import os
import pickle
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import weakref
import zlib
from collections import Counter, defaultdict, namedtuple
from pathlib import Path

LEVELS = ["ERROR", "warning", "ok", "not seen"]
GRACE = 60  # seconds for the job to end in, after the last step


def main():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=20, help="optimizer steps to watch; then the job ends")
    add("--against", metavar="COMMAND", help="one that should train alike, as on one GPU")
    add("--resume", action="store_true", help="stop the job, start it again, compare")
    add("--timeout", type=float, default=600, help="seconds without progress that count as a hang")
    add("command", nargs=argparse.REMAINDER, help="after --: what starts the training")
    args = parser.parse_args()
    command = shlex.join(args.command).removeprefix("-- ")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, it ends the job
    with tempfile.TemporaryDirectory() as own_folder:
        folder = Path(os.environ.get("CHECK_FOLDER", own_folder)).resolve()
        job = run(command, args, folder / "whole")
        kinds = [kind for name, kind in vars(Kinds).items() if name[0] != "_"]  # first: ending
        rows = [row for kind in kinds[: None if job.steps else 1] for row in findings(kind, job)]
        if job.steps and args.against:
            rows += findings(against, job, run(args.against, args, folder / "against"))
        if job.steps and args.resume:
            stopped = run(command, args, folder / "stopped", stop_at=max(1, args.steps // 2))
            rows += findings(resume, job, stopped, run(command, args, folder / "stopped", life=2))
    rows.sort(key=lambda row: LEVELS.index(row[0]))
    words = f"{job.steps} steps, {len(job.ranks)} process(es) that train: {command}"
    print(f"\n{textwrap.shorten(words, 100)}" if job.prints else "the table is with rank 0")
    for level, name, words in rows if job.prints else ():
        lines = textwrap.wrap(words, 78, break_long_words=False)
        print(f"{level:9}{name:13}" + f"\n{' ' * 22}".join(lines))
    sys.exit(any(row[0] == "ERROR" for row in rows) if job.steps else 2)


def seen(items, words):  # the last row of a kind, which is shown if nothing is wrong
    return ("ok", f"{len(items)} {words}") if items else ("not seen", f"no {words}")


def findings(kind, *jobs):
    """Returns the rows of a kind: all that is wrong or else, in one line, that it is right."""
    try:
        found = sorted(dict.fromkeys(kind(*jobs)), key=lambda row: LEVELS.index(row[0]))
    except Exception as error:  # of this file: it says nothing of the training
        line = error.__traceback__.tb_next.tb_lineno
        found = [("not seen", f"check.py failed itself, line {line}: {error!r}")]
    wrong = [row for row in found if row[0] in LEVELS[:2]]
    found = wrong or found[:1] or [("not seen", f"nothing shows it: {kind.__doc__}")]
    return [(level, kind.__name__, words) for level, words in found]


class Kinds:  # self is a Job. Each method yields (level, words); the worst rows are shown
    def ending(self):
        """The job neither hangs nor fails before the last step that is watched."""
        if self.status is None and not self.has_ended:
            places = [f"rank {rank} at {each.place()}" for rank, each in self.ranks.items()]
            step = min((each.steps for each in self.ranks.values()), default=0)
            yield "ERROR", f"it hangs after step {step}: {'; '.join(places) or '?'}."
        if self.status and not self.has_ended:
            yield "ERROR", f"it ended with status {self.status} after {self.steps} steps"
        for text, count in Counter(x["text"] for x in self.all("trouble")).most_common(3):
            yield "warning", f"check.py failed itself, {count} times: {text}"
        if self.steps:
            yield "ok", f"status {self.status} after {self.steps} steps"
        yield "not seen", "no optimizer of PyTorch takes a step: are weights changed by hand?"

    def processes(self):
        """All that train are one group, each with its GPU, and the same flags and versions."""
        starts = [each.start for each in self.ranks.values()]
        alone = sum(start["world"] == 1 for start in starts)
        if alone > 1 and all(start["shared"] for start in starts):
            yield "ok", f"{len(starts)} share one memory (Hogwild): ranks are not compared"
        elif alone > 1:
            yield "ERROR", f"{alone} train, each alone. Call dist.init_process_group(), use DDP."
        (place, count), *_ = Counter(tuple(start["place"]) for start in starts).most_common()
        if count > 1 and place[2] > 1 and "cpu" not in place:
            yield "ERROR", f"{count} train on {place[1]} of {place[0]}. Choose it by LOCAL_RANK."
        for each in [x for x in starts if x["settings"] != starts[0]["settings"]][:1]:
            yield "ERROR", f"other flags or versions in rank {each['rank']}: {each['settings']}."
        if len(starts) > 1:
            yield "ok", f"{len(starts)} in one group, with the same flags and versions"

    def weights(self):
        """Copies of a weight have the same bits in all ranks, after each step."""
        for family in self.families:
            for number, start in enumerate(self.ranks[family.ranks[0]]["start"]):
                states = {rank: self.ranks[rank].states(number) for rank in family.ranks}
                common = sorted(set.intersection(*[{*each} for each in states.values()]))
                bad = {step: differences(family, states, step) for step in common}
                step = next((step for step in common if bad[step]), None)
                if step is None:
                    yield "ok", f"copies, if any, agree: ranks {family.ranks}, {len(common)} times"
                    continue
                one, two, indices = bad[step]
                index, when = indices[0], f"after step {step}" if step else "at the start"
                words = f"{len(indices)} of {len(start['names'])} tensors differ {when} in ranks"
                words += f" {one} and {two}, first {start['names'][index]}. "
                copies = states[one][0], states[one][common[-1]], states[two][common[-1]]
                first, end, other = (x["sketches"][index] for x in copies)
                near = 0.01 * distance(end, first) + 1e-6 * distance(end)
                machines = {start["machine"], states[two][0]["machine"]}
                if not bad[common[-1]]:
                    yield "warning", words + "Later they are equal: local SGD?"
                elif len(machines) > 1 and distance(end, other) < near:
                    yield "warning", words + f"It is rounding: {' and '.join(machines)}."
                else:
                    a, b = states[one][step], states[two][step]
                    yield "ERROR", words + cause(start, indices, a, b, family)

    def updates(self):
        """Each weight that has a gradient moves, and keeps moving."""
        for start, steps in self.first.optimizers():
            still, moving, rates = [], 0, [max(x["rates"]) for x in steps]
            for i, name in enumerate(start["names"]):
                bits = [x["weights"][i] for x in (start, *steps)]
                moves = [step for step, (a, b) in enumerate(zip(bits, bits[1:]), 1) if a != b]
                pulls = [x["grads"][i] not in (None, 0) and rate for x, rate in zip(steps, rates)]
                moving, last = moving + bool(moves), max(moves, default=0)
                if any(pulls) and not moves or len(pulls[last:]) >= 5 and all(pulls[last:]):
                    still.append((sum(start["shapes"][i]), name, last))
            count, frozen = len(start["names"]), start["trainable"].count(False)
            if not any(rates):
                yield "ERROR", f"the rate is 0 in all {len(steps)} steps. Look at the schedule."
            elif not moving:
                yield "ERROR", f"none of {count} weights changes, {frozen} are frozen. Other model?"
            elif any(x[1][-4:] != "bias" for x in still):  # before a norm a bias has no effect
                _, name, last = max(still)
                words = f"{name} stands still from step {last + 1} on, {len(still)} of {count} do."
                yield "ERROR" if 2 * len(still) >= count else "warning", words + " Steps too small?"
            yield "ok", f"{moving} of the optimizer's tensors change, {frozen} are frozen"

    def gradients(self):
        """Each weight is in an optimizer, and has a gradient when the optimizer steps."""
        for x in [x["names"] for x in self.first["lost"] if x["names"]]:
            words = f"{len(x)} weights with gradients are in no optimizer: {', '.join(x[:3])}."
            yield "warning", words + " Add or freeze them; make none in forward()."
        for start, steps in self.first.optimizers():
            count, a, b = len(start["names"]), start["weights"], [start, *steps][-1]["weights"]
            never = [i for i in range(count) if all(x["grads"][i] is None for x in steps)]
            unused = [start["names"][i] for i in never if start["trainable"][i] and a[i] == b[i]]
            level = "ERROR" if len(unused) == count else "warning"
            if unused and len(never) == count and any(x["had_grads"] for x in steps):
                yield "ERROR", "none is left at step(): zero_grad() came first. Call it afterwards."
            elif unused:
                yield level, f"{len(unused)} of {count} weights never have a gradient: {unused[0]}."
            yield "ok", f"{count - len(never)} weights have gradients"

    def accumulation(self):
        """Gradients are zeroed and averaged once a step, not in each micro-batch."""
        for rank, steps in [(i, y) for i, x in self.ranks.items() for _, y in x.optimizers()]:
            late = [x["step"] for x in steps if x["clean"] is False]
            old = [b for a, b in zip(steps, steps[1:]) if a["grads"] == b["grads"]]
            twice = [x["step"] for x in old if x["clean"] is None and any(x["grads"])]
            if late:
                yield "ERROR", f"not zeroed before step {late[0]}, rank {rank}. Call zero_grad()."
            if twice:
                yield "ERROR", f"step {twice[0]} uses the gradients of the last one, rank {rank}."
            if sum(x["wiped"] > 0 for x in steps) > len(steps) / 2:
                yield "ERROR", "zeroed between the micro-batches: only the last one counts."
            if len(self.ranks) > 1 and min(x["averaged"] for x in steps) > 1:
                yield "warning", f"DDP averages {steps[0]['averaged']} times a step. Use no_sync()."
            yield seen([x for x in steps if x["clean"]], "steps from gradients that were zeroed")

    def finite(self):
        """Losses and gradients are finite, and unscaled when they are clipped."""
        clips = {x["clipped"] for x in self.first["step"]}
        if 2 in clips:
            yield "ERROR", "clipped while scaled. Call scaler.unscale_(optimizer) before clipping."
        elif clips - {0} == {3} and len(self.first["start"]) == 1:  # no other has stepped between
            yield "warning", "clipped between step() and backward(), in vain. Clip before step()."
        for rank, each in self.ranks.items():
            for x in [x for x in each["loss"] if x["value"] - x["value"] != 0][:1]:
                yield "ERROR", f"the loss is {x['value']} in step {x['step'] + 1}, rank {rank}."
            for x in [x for x in each["step"] if x["infinite"]][:1]:
                name = each["start"][x["number"]]["names"][x["infinite"][0]]
                yield "ERROR", f"inf or nan in {name}'s gradient, step {x['step']}, rank {rank}."
            yield seen(each["loss"], "losses")

    def schedule(self):
        """A schedule steps once for each step, after it, and its rate is the one that is used."""
        for start, steps in self.first.optimizers():
            calls = [x for x in self.first["schedule"] if x["number"] == start["number"]]
            calls = [x for x in calls if x["name"] == calls[0]["name"]]  # of a chain, the first
            for x in calls[:1]:
                words = f"{x['name']}.step() is called {len(calls)} times in {len(steps)} steps"
                if x["caller"].startswith("accelerate"):
                    yield "ok", words + ", by Accelerate: plan N times as many steps in it"
                elif len(calls) > 1.2 * len(steps) + 1:
                    yield "ERROR", words + ". Call it once for each step."
                elif x["step"] == 0:
                    yield "warning", "it comes before optimizer.step(): the first rate is not used"
            used = [(x["step"], x["rates"][0], x["said"][0]) for x in steps if x["said"]]
            other = [x for x in used if abs(x[1] - x[2]) > 1e-6 * abs(x[2])]
            for step, rate, said in other[:1]:
                words = f"step {step} uses the rate {rate:.4g}, but the schedule says {said:.4g}."
                yield "ERROR" if len({x[1] for x in used}) == 1 else "warning", words
        yield seen(self.first["schedule"], "calls of a scheduler")

    def precision(self):
        """Weights are fp32 where a flag says so, and autocast reaches the layers."""
        types = Counter(x for each in self.first["start"] for x in each["dtypes"])
        low = [kind for kind in types if kind in ("bfloat16", "float16")]
        for name, value in [x for flags in self.all("flags") for x in flags["values"].items()]:
            says_fp32 = re.fullmatch(r"(torch\.)?(fp|float)?_?32(-true)?", str(value).lower())
            if low and says_fp32 and re.fullmatch("(model_|torch_)?(precision|dtype)", name):
                yield "ERROR", f"{types[low[0]]} weights are {low[0]}, but {name} is to be {value}."
        if "float32" in types and any(x["stale"] and x["step"] > 1 for x in self.first["step"]):
            yield "ERROR", "one autocast holds all steps, with the first weights. Enter it in each."
        for x in self.all("autocast")[:1]:
            yield "warning", f"autocast is on, but a {x['module']} gives {x['gives']}."
        yield "ok", f"weights are {', '.join(types)}"

    def modes(self):
        """Dropout and BatchNorm train in train(), and validate in eval()."""
        trains = [x for x in self.first.training_calls if x["layers"]]
        for x in [x for x in trains if x["in_eval"]][:1]:
            words = f"{x['in_eval']} layers train in eval() from step {x['step'] + 1}. Call train()"
            yield "warning" if trains[0]["in_eval"] else "ERROR", words + ", also after validation."
        for x, is_single in self.first.tests():
            if x["in_eval"] < x["layers"] and not is_single:  # one is as of a GAN's generator
                yield "warning", f"{x['module']} validates in train(). Call model.eval()."
        yield seen(trains, "calls of Dropout or BatchNorm in train()")

    def layers(self):
        """Dropout draws other masks in each rank, none in eval(); BatchNorm is the same in all."""
        tests = [x for x, _ in self.first.tests() if x["in_eval"] == x["layers"] > 0]
        firsts = {x["step"]: x["random"] for x in reversed(tests)}  # the first of each validation
        is_seeded = len(firsts) > 1 and len({*map(str, firsts.values())}) == 1
        for x in [x for x in tests if x["random"] and not is_seeded][:1]:
            yield "warning", f"{x['module']} draws random numbers in eval(). Is that wanted?"
        for one, two, *_ in self.data_groups:
            calls = zip(*[self.ranks[rank].training_calls for rank in (one, two)])
            pairs = [(a["random"], b["random"]) for a, b in calls if a["random"] and b["random"]]
            own = [[{x: y for x, y in z.items() if "its" in x} for z in pair] for pair in pairs]
            if pairs and any(a[0][0] and all(x == y for x, y in a) for a in (pairs, own)):
                yield "warning", f"ranks {one}, {two} draw the same masks or noise. Seed by rank."
            calls = zip(*[self.ranks[rank].tests() for rank in (one, two)])
            for step in [x["step"] for (x, _), (y, _) in calls if x["norms"] != y["norms"]][:1]:
                yield "warning", f"BatchNorm's statistics differ in validation after step {step}."
            yield seen(pairs, "calls that draw random numbers in two ranks")

    def shares(self):
        """Each rank trains on samples of its own."""
        for first, second in [(ranks[0], rank) for ranks in self.data_groups for rank in ranks[1:]]:
            one, two, who = self.ranks[first], self.ranks[second], f"ranks {first} and {second}"
            mine, theirs = one.samples(), two.samples()
            common = [x for x in mine if mine[x] and theirs.get(x)]
            equal = [x for x in common if sorted(mine[x]) == sorted(theirs[x])]
            a, b = [(each.passes(True) or [{"known": False}])[0] for each in (one, two)]
            alike = a["known"] and b["known"] and same_data(a, b)
            drawn = a["index"][: one.epoch_length(a)] if alike else []
            both = {*drawn} & {*b["index"][: len(drawn)]} if alike else ()
            if len(equal) > len(common) / 2 or drawn and a["index"] == b["index"]:
                yield "ERROR", f"{who} get the same samples in {len(equal)} steps. Split them."
            elif len({*drawn}) == len(drawn) and len(both) >= len(self.ranks) and not a["replaces"]:
                yield "ERROR", f"{who} share {len(both)} of {len(drawn)} samples. Split one order."
            yield seen(common, f"steps in which {who} have other samples")

    def order(self):
        """The order of the samples is random, and another one in each epoch."""
        trains = self.first.passes(training=True)
        known = bool(trains) and trains[0]["known"]
        orders = [x["index"] if x["known"] else [*zip(*x["parts"])] for x in trains]
        if known:  # a pass may have several epochs
            length = self.first.epoch_length(trains[0])
            orders = [x[i : i + length] for x in orders for i in range(0, len(x), length)]
        first, second, *_ = [*[x for x in orders if len(x) > 7], [], []]
        if first and not known and len({*first}) <= len(first) / 2:
            yield "ERROR", f"{len({*first})} different samples among {len(first)}: split by worker."
        elif first and known and first == sorted(first):
            yield "warning", f"not shuffled: {str(first[:4])[1:-1]}, ... If not wanted, shuffle."
        elif second and all(a == b for a, b in zip(first, second)):
            yield "ERROR", "the first two epochs have one order. Call sampler.set_epoch(epoch)."
        yield seen(second, "samples of a second epoch, in another order")

    def inputs(self):
        """A batch has a row for each sample, and is not all zeros."""
        for rank, each in self.ranks.items():
            calls, trained = each.training_calls, {x["pass"] for x in each["loss"]}
            empty = [x["step"] + 1 for x in calls if x["zero"]]
            if 0 < len(empty) < len(calls) / 2:
                yield "ERROR", f"the input of step {empty[0]} in rank {rank} is all zeros. Lost?"
            batches = [(x["index"], {*x["rows"]}) for x in each["batch"] if x["pass"] in trained]
            odd = [(len(x), rows - {len(x)}) for x, rows in batches if len(x) in rows]
            if len(odd) > 1 and odd[0][1] and all(rows == odd[0][1] for _, rows in odd):
                yield "warning", f"{odd[0][0]} samples have a tensor of {min(odd[0][1])} row(s)."
            yield seen(calls, "inputs, none all zeros")

    def samples(self):
        """In two validations a data set gives the same sample, unless it draws random numbers."""
        random_ones = {x["data"] for x in self.all("fetch") if x["used"]} | {None}
        old = {}  # (rank, data set, its size, index): the sample's hashes
        tests = [(rank, x) for rank, each in self.ranks.items() for x in each.passes(False)]
        for rank, x in [y for y in tests if y[1]["known"] and y[1]["data"] not in random_ones]:
            for index, *hashes in zip(x["index"], *x["parts"]):
                if old.setdefault((rank, x["data"], x["size"], index), hashes) != hashes:
                    yield "ERROR", f"sample {index} of {x['data']} has other bytes later. Copy it."
                    return
        yield seen(old, "samples were validated, each time with the same bytes")

    def augmentation(self):
        """Random numbers of data sets differ in workers, ranks and epochs."""
        ranks = {each.name: rank for rank, each in self.ranks.items()}
        ours = {(x.name, y["data"]) for x in self.ranks.values() for y in x.passes(training=True)}
        drawn = defaultdict(list)  # (generator, data set, rank, worker): states, by epoch
        for each in self.seen.values():
            calls = [x for x in each["fetch"] if x["used"] and (x["parent"], x["data"]) in ours][:3]
            for one, name in [(calls[0], name) for name in calls[0]["used"]] if calls else ():
                key = (name, one["data"], ranks[one["parent"]], one["worker"])
                drawn[key].append((one["at"], [x["used"].get(name) for x in calls]))
        epochs = {key: [states for _, states in sorted(drawn[key])] for key in sorted(drawn)}
        places = {x: f"worker {x[3]} of " * (x[3] is not None) + f"rank {x[2]}" for x in epochs}
        for key, states in epochs.items():
            alike = [x for x in epochs if x[:2] == key[:2] and epochs[x][0] == states[0]]
            words = f"{places[key]} draws the same numbers"
            if key[3] is not None and len(states) > 1 and states[0] == states[1]:
                yield "ERROR", f"{words} in each epoch ({key[0]}). Seed it by torch.initial_seed()."
            if alike[0] != key:
                level = "ERROR" if alike[0][2] == key[2] else "warning"
                yield level, f"{words} as {places[alike[0]]} ({key[0]}). Seed by rank and worker."
                break
        yield seen(epochs, "places where a data set draws random numbers")

    def validation(self):
        """Validation counts each sample once, and none of those that are trained on."""
        ranks = self.data_groups[0] if self.data_groups else [*self.ranks]
        tests = [x for rank in ranks for x in self.ranks[rank].passes(training=False)[:1]]
        trains = [x for each in self.ranks.values() for x in each.passes(training=True)]
        trains = [x for x in trains if tests and x["split"] and x["split"] == tests[0]["split"]]
        leaked = {i for x in trains for i in x["index"]} & {i for x in tests for i in x["index"]}
        if trains and leaked - {None} and trains[0]["size"] != tests[0]["size"]:
            yield "ERROR", f"{len(leaked)} of its samples are trained on. Seed random_split()."
        tests = [x for x in tests if x["ended"] and x["known"]]
        counts = Counter(i for x in tests for i in x["index"])
        size, twice = tests[0]["size"] if tests else 0, sum(count > 1 for count in counts.values())
        is_shared = all(same_data(tests[0], x) is not False for x in tests[1:])
        is_padded = tests and tests[0]["maker"] == "accelerate"  # it drops them again
        if twice and is_shared and min(counts.values()) < len(tests) and not is_padded:
            yield "warning", f"{twice} of {size} samples count twice. Is it padded?"
        elif size < 2 * len(counts) < 2 * size and is_shared and len(tests) == len(ranks):
            yield "warning", f"{size - len(counts)} of {size} samples are left out. drop_last?"
        yield seen(counts, "samples in whole validations by a DataLoader")

    def snapshot(self):
        """One process writes a snapshot, under another name first."""
        saves, moved = defaultdict(list), {x["path"] for x in self.all("move")}
        for x in self.all("save"):
            saves[x["path"]].append(x["writer"])
        for path, writers in saves.items():
            name, count = os.path.basename(path), len({*writers})
            if count > 1:
                yield "ERROR", f"{count} processes write {name}. Let rank 0 alone write it."
            elif path not in moved and len(writers) > 1:
                yield "warning", f"{name} is written over in place. Write a .tmp, then move it."
        yield seen(saves, "file(s) of torch.save()")


Family = namedtuple("Family", "ranks is_split has_data")  # that train one model; split by hand?


def differences(family, states, step):
    """Returns two ranks whose copies of weights have other bits, and the indices of these."""
    found, copies = defaultdict(list), {}
    for rank in family.ranks:
        start, weights = states[rank][0], states[rank][step]["weights"]
        for index, shard in enumerate(start["shards"]):
            if start["whole"][index] or not family.is_split:
                first, bits = copies.setdefault((index, shard), (rank, weights[index]))
                if bits != weights[index]:
                    found[first, rank].append(index)
    return next(((*ranks, indices) for ranks, indices in found.items()), None)


def distance(one, two=None):  # of two weights, or of one from 0, by their random projections
    return (sum((x - y) ** 2 for x, y in zip(one, two or [0] * len(one))) / len(one)) ** 0.5


def cause(start, indices, one, two, family):
    """Returns the likely cause of weights that differ in two ranks, and what to do."""
    a, b = ([x["grads"][i] for i in indices] if x["step"] else [0] for x in (one, two))
    rates, ddp = (one.get("rates"), two.get("rates")), start["in_ddp"]
    causes = [
        (family.is_split, "This weight is not split: clip and average it alike in all ranks."),
        (start["shared"], "spawn() shared the model's memory. Make it in each process."),
        (one["step"] == 0, "Wrap the model in DDP, or send rank 0's weights to all."),
        (a == b and rates[0] != rates[1], f"The learning rates differ: {rates}."),
        (a == b, "The gradients are equal: give the optimizers one state, the same settings."),
        ((None in a) != (None in b), "Only one of them has a gradient for it. Use it in each."),
        (any(start["shards"]), "A replica was changed, or is not averaged with the others."),
        (not any(ddp), "Nothing averages the gradients. Wrap the model in DDP."),
        (not ddp[indices[0]], "DDP does not know it. Wrap the model when it is complete."),
        (not one.get("ddp"), "The model is called past DDP. Call the DDP object, not .module."),
        (one.get("in_no_sync"), "The last backward before the step was in no_sync()."),
        (True, "Gradients are changed after DDP, or the model was moved after DDP was made."),
    ]
    return next(words for is_so, words in causes if is_so)


def against(job, other, skip=0, advice=""):
    """The samples and the weights are those of another run, as far as rounding lets them."""
    both = common_weights(job.first.start, other.first.start) if other.ranks else []
    if not both:
        yield "not seen", "the other run took no step, or has other tensors"
        return
    mine, theirs, names = job.first.states(0), other.first.states(0), job.first.start["names"]
    level, at, samples = "", 0, job.union("samples")
    others = other.union("samples") if len(both) == len(theirs[0]["weights"]) else {}  # no stages
    for step in sorted(step for step in samples if others.get(step - skip)):
        old, new = Counter(samples[step]), Counter(others[step - skip])
        a, b = sorted(job.union("near")[step]), sorted(other.union("near")[step - skip])
        words = f"data: {(old - new).total()} of {old.total()} samples of step {step} are others"
        if old != new and len(a) == len(b) and distance(a, b) < 1e-5 * distance(a):
            level = "warning"
            words += ", by rounding: other threads, or another processor?"
        elif old != new:
            level, at = "ERROR", step
            words += ". Compare seed, place in the data, and shares."
        if level:
            yield level, words
            break
    steps = sorted(step for step in mine if step - skip in theirs)
    for step, index, place in [(step, *pair) for step in steps for pair in both]:
        own = mine[step]["sketches"][index]
        new, start = (theirs[x]["sketches"][place] for x in (step - skip, 0))
        apart, size = distance(own, new), distance(own)
        way = distance(new, start) if step > skip else 0.05 * size
        is_near = apart <= (0 if skip and level != "warning" else 0.02 * way + 1e-7 * size)
        if not is_near and not 0 < at <= step:
            why = "computation: from equal samples," if step else "start:"
            by = f"after step {step}, by {apart / (way or size or 1):.0%} of its way."
            rates = [x.get("rates", "no step") for x in (mine[step], theirs[step - skip])]
            yield "ERROR", f"{why} {names[index]} differs {by} " + (advice or f"Rates: {rates}.")
            return
    yield "ok", f"the same weights in {len(steps) - 1} steps" + ", to rounding" * (not skip)


def common_weights(one, two):
    """Returns the indices of the weights in two runs. A stage of a pipeline has some of them."""
    if one["shapes"] == two["shapes"]:
        return [(index, index) for index in range(len(one["names"]))]
    mine, theirs = ([*map(str, zip(x["names"], x["shapes"]))] for x in (one, two))
    return [(mine.index(x), theirs.index(x)) for x in mine if x in theirs]


def resume(whole, stopped, again):
    """A job that was stopped and started again takes the steps of the undisturbed one."""
    states, done = whole.first.states(0), stopped.steps
    news = again.first.states(0) if again.ranks else {0: {"weights": None}}
    at = max([step for step, x in states.items() if x["weights"] == news[0]["weights"]], default=-1)
    if done >= max(states):
        yield "not seen", f"stopped only at step {done}: try more --steps"
    elif at < 1 or not again.steps:
        words = ["starts anew", "takes no step", "has weights that the undisturbed run never had"]
        yield "ERROR", f"stopped at step {done}, it {words[at if again.steps else 1]}. Save all."
    else:
        old, new = ({*x[max(x)].get("types", [])} for x in (states, news))
        pairs = [(states[at + step], x) for step, x in news.items() if 0 < step <= max(states) - at]
        (one, two), start = pairs[0], again.first.start
        lost = [name for name, x in one["attributes"].items() if two["attributes"].get(name) != x]
        causes = [
            (old and not stopped.all("saved"), "The optimizer's state is not saved."),
            (old and not start["loads"], "The optimizer's state is saved, but not loaded."),
            (any(a["rates"] != b["rates"] for a, b in pairs), "The rate differs: is it saved?"),
            (old != new, f"The optimizer's state has other types: {', '.join(sorted(old ^ new))}."),
            (lost, f"{', '.join(lost[:3])} of the model differs: is it in no state_dict?"),
            (one["grads"] != two["grads"], "Its gradient differs: random numbers, or a state?"),
            (not start["is_loaded"], "The state is loaded, then the optimizer is made again."),
            (True, "Save all states, also those in no state_dict."),
        ]
        yield from against(whole, again, at, next(words for is_so, words in causes if is_so))


def same_data(one, two):
    """Whether an index means one sample in two passes. None: no index is in both."""
    answers = [False] if one["size"] != two["size"] else []
    for mine, theirs in zip(one["parts"], two["parts"]) if not answers else ():
        a, b = dict(zip(one["index"], mine)), dict(zip(two["index"], theirs))
        both = [i for i in a if i in b]
        several = len({a[i] for i in both}) > 1 or len(both) == 1
        answers += [several and all(a[i] == b[i] for i in both)] if both else []
    return any(answers) if answers else None


def process_name(pid):
    return f"{socket.gethostname()}-{pid}"


def local(tensor):
    return getattr(tensor, "_local_tensor", tensor).detach()  # of a DTensor: the part that is here


def bits(tensor):  # a number for all of them, on their device
    tensor = local(tensor)
    tensor = tensor.coalesce().values() if tensor.is_sparse else tensor
    flat = tensor.contiguous().flatten().view(torch.uint8)
    flat = flat.clone() if flat.storage_offset() % 8 else flat  # else it cannot be viewed so
    flat = flat.view({0: torch.int64, 4: torch.int32}.get(flat.numel() % 8, torch.int8))
    if hash_tensor and flat.numel() and flat.device.type in ("cpu", "cuda"):  # since torch 2.9
        return change(hash_tensor(flat), torch.int64)
    return flat.long().sum()


@functools.lru_cache
def factors(length, device):  # a longer row has the same first ones: zeros after it add nothing
    own = torch.Generator().manual_seed(0)  # the training's generators stay as they are
    return change(torch.randint(2**62, (length,), generator=own) * 2 + 1, device)


@functools.lru_cache
def directions(length, device):  # random numbers of mean 0 and variance 1. Signs might add to 0
    kind = torch.float32 if device.type == "mps" else torch.float64
    rows = [factors(length, torch.device("cpu")) >> shift & 0xFFFF for shift in (9, 29)]
    return (change(torch.stack(rows), device, kind) / 0xFFFF - 0.5) * 12**0.5


def sketch(tensor):  # random projections: about as large as the tensor
    if os.environ["CHECK_COMPARES"] and hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()  # all ranks of its mesh come here
    return project(local(tensor).flatten()[None])[0]


def numbers_of(batch):  # for each tensor, of each sample: a hash, and a random projection
    tensors = [local(x) for x in tensors_of(batch) if x.dim() and not x.is_sparse]
    tensors = [x for x in tensors if len(x) == len(tensors[0]) and x.numel()]
    for rows in [x.reshape(len(x), -1).contiguous() for x in tensors]:
        words = rows.view(getattr(torch, f"int{min(64, 8 * rows.element_size())}")).long()
        yield (words * factors(words.shape[1], words.device)).sum(1), project(rows)[:, 0]


def project(rows):  # each on two random axes, so that similar rows have similar numbers
    axes = directions(rows.shape[1], rows.device)
    return change(rows.abs() if rows.is_complex() else rows, axes.dtype) @ axes.T


def weights_of(optimizer):
    weights = [x for group in optimizer.param_groups for x in group["params"] if not x.is_meta]
    return [x for x in weights if id(x) not in watch.elsewhere] or weights


def tensors_of(tree):
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def random_states(own, in_model=False):  # numbers for those of all generators, by name
    found = {"torch": torch.get_rng_state(), "random": random.getstate()}
    if "numpy" in sys.modules:
        found["numpy"] = sys.modules["numpy"].random.get_state()
    if in_model and torch.accelerator.is_available():
        found["device"] = getattr(torch.get_device_module(), "get_rng_state", torch.get_rng_state)()
    for name, x in own:
        get_state = getattr(x, "getstate", None) or getattr(x, "get_state", None)
        found[f"its {name}"] = get_state() if get_state else x.bit_generator.state
    arrays = {name: x.numpy() if hasattr(x, "numpy") else x for name, x in found.items()}
    return {name: zlib.crc32(pickle.dumps(x)) for name, x in arrays.items()}


def own_generators(data, depth=4):  # the names and random generators that an object holds
    for name, value in [*getattr(data, "__dict__", {}).items()]:
        for x in value[:20] if isinstance(value, (list, tuple)) else [value]:
            if isinstance(x, torch.Generator | random.Random) or hasattr(type(x), "_bit_generator"):
                yield name, x
            elif depth and not isinstance(x, (type, type(os))):
                yield from own_generators(x, depth - 1)


def used(before, after):  # random states: equal ones drew equal numbers
    return {x: [old, after.get(x)] for x, old in before.items() if old != after.get(x)}


def shard_of(weight):  # which part of a DTensor is here; "" if it is all of it
    mesh = getattr(weight, "device_mesh", None)
    places = zip(weight.placements, mesh.get_coordinate()) if mesh else ()
    return " ".join(f"{kind}{place}" for kind, place in places if not kind.is_replicate())


def careful(hook):  # its own errors are reported, and do not end the training
    def safe(*args, **kwargs):
        try:
            if not (torch.compiler.is_compiling() or torch.jit.is_tracing()):  # no hook in a graph
                return hook(*args, **kwargs)
        except Exception as error:
            watch.record("trouble", text=f"{hook.__name__}: {type(error).__name__}: {error}"[:200])

    return safe


def wrap(owner, name, before=lambda *a, **k: None, after=lambda *a, **k: None):
    plain, before, after = getattr(owner, name), careful(before), careful(after)

    @functools.wraps(plain)
    def hooked(*args, **kwargs):
        before(*args, **kwargs)
        result = plain(*args, **kwargs)
        after(result, *args, **kwargs)
        return result

    setattr(owner, name, hooked)


class Watch:  # what is known in a process; its methods are the hooks
    def __init__(self):
        self.optimizers = {}  # id: what is known of an optimizer that took a step
        self.made, self.loaded = weakref.WeakSet(), []  # all optimizers; those with a loaded state
        self.stepping = []  # optimizers that take a step right now
        self.names, self.owners, self.ddps = {}, {}, {}  # by the id of a parameter
        self.modules = weakref.WeakSet()  # that were called
        self.elsewhere = set()  # ids of weights that other processes train, as stages of a pipeline
        self.now = defaultdict(int)  # of the step under way: backward passes, and what DDP did
        self.state = defaultdict(int)  # of this process: depth of modules, passes over data, calls
        self.done, self.limit, self.pid = 0, int(os.environ["CHECK_STEPS"]), 0  # steps

    def record(self, kind, **values):  # here tensors become numbers, so that Python waits
        if self.pid != os.getpid():  # also in a process that was forked
            self.pid = os.getpid()
            path = f"{os.environ['CHECK_SEEN']}/{process_name(self.pid)}"
            self.file, self.stack = open(path, "a", 1), open(f"{path}.stack", "w")
            self.record("process", parent=os.environ["CHECK_PARENT"])
        self.file.write(json.dumps({"kind": kind, **values}, default=lambda x: x.tolist()) + "\n")
        if kind in ("loss", "step", "batch"):  # if no more comes, Python writes where it stands
            faulthandler.dump_traceback_later(float(os.environ["CHECK_STUCK"]), file=self.stack)

    def learn_names(self):  # of weights; and returns what else the modules hold, for resume
        found = {}
        for path, part in [x for module in self.modules for x in module.named_modules()]:
            path = [x for x in path.split(".") if x not in ("", "module", "_orig_mod")]
            for name, weight in part.named_parameters(recurse=False):
                self.names.setdefault(id(weight), ".".join([*path, name]))
                self.owners.setdefault(id(weight), str(type(part).__mro__))
            if isinstance(part, DDP) or not os.environ["CHECK_COMPARES"]:
                continue
            buffers = {name: part._buffers[name] for name in part._non_persistent_buffers_set}
            for name, x in (vars(part) | buffers).items():
                if isinstance(x, (int, float, torch.Tensor)) and name != "training":
                    found[".".join([*path, name])] = bits(x) if isinstance(x, torch.Tensor) else x
        return found

    def before_module(self, module, args):
        self.state["depth"] += 1
        grad = torch.is_grad_enabled()
        if isinstance(module, DDP) and grad and not self.state["in_backward"]:
            self.now["ddp"] += 1
            self.now["averages"] = module.require_backward_grad_sync
            self.now["in_no_sync"] = not module.require_backward_grad_sync
        if self.state["depth"] > 1 or self.state["in_backward"] or self.done >= self.limit:
            return
        self.modules.add(module)
        modules = [*module.modules()]
        norms = [x for x in modules if getattr(x, "running_mean", None) is not None]
        if not grad and any(getattr(x, "momentum", 0) is None for x in norms):
            return  # swa_utils.update_bn() makes statistics
        layers = [x for x in modules if "Dropout" in type(x).__name__ and getattr(x, "p", 0)]
        layers += [x for x in norms if any(y.requires_grad for y in x.parameters()) or not grad]
        kwargs = sys._getframe(2).f_locals.get("kwargs", {})  # global hooks get none from PyTorch
        first = [x for x in tensors_of(args) if x.dim() > 1 and x[:1].numel() > 1][:1]
        self.state["call"] += 1
        values = {"call": self.state["call"], "pass": self.state.get("pass"), "grad": grad}
        values |= {"step": self.done, "module": type(module).__name__, "norms": norms}
        is_off = not (grad and getattr(module, "module", module).training)  # else a part may rest
        values |= {"layers": len(layers), "in_eval": sum(is_off and not x.training for x in layers)}
        values |= {"zero": any(not x.any() for x in first), "samples": 0, "near": 0}
        for i, (hashes, near) in enumerate(numbers_of((args, kwargs))):
            values["samples"] += (i * 2 + 1) * hashes
            values["near"] += near
        own = [x for part in modules for x in own_generators(part, depth=0)]
        module.__dict__["_check"] = values | {"random": random_states(own, in_model=True)}, own

    def after_module(self, module, args, output):
        self.state["depth"] = max(0, self.state["depth"] - 1)
        (values, own), outputs = module.__dict__.pop("_check", (None, ())), tensors_of(output)
        if isinstance(module, (torch.nn.Linear, torch.nn.modules.conv._ConvNd)) and outputs:
            kind, device = outputs[0].dtype, outputs[0].device.type
            if torch.is_autocast_enabled(device) and kind == torch.float32 == module.weight.dtype:
                self.record("autocast", module=type(module).__name__, gives=str(kind)[6:])
        if values:
            norms = [] if values["grad"] else values["norms"]
            values["norms"] = [bits(x.running_mean) for x in norms]  # DDP sent them at its start
            values["random"] = used(values["random"], random_states(own, in_model=True))
            self.record("forward", **values)
            for x in [x for x in outputs if x.grad_fn is not None and values["grad"]]:
                x.register_hook(lambda _, call=values["call"]: self.record("trained", call=call))

    def before_backward(self, tensors, *args, **kwargs):
        self.now["backward"] += 1
        self.now["averaged"] += self.now.pop("averages", 0)
        self.state["backwards"] += 1
        for known in self.optimizers.values():
            weights = weights_of(known["optimizer"])
            clean = not any(bits(x.grad).item() for x in weights if x.grad is not None)
            known["clean"] = clean or bool(known["clean"])  # None: no backward since the step
            if clean and self.now["had_grads"] and len(self.made) == 1 and not self.stepping:
                new = sum(x._version for x in weights), self.state["call"] > self.now["call"]
                self.now["wiped"] += new == (self.now["version"], True)
        loss = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors))
        value = local(loss).item() if loss.numel() == 1 else 0
        if self.done < self.limit:
            self.record("loss", value=value, step=self.done, **{"pass": self.state.get("pass")})
        self.state["in_backward"] = 1

    def after_backward(self, result, *args, **kwargs):
        self.state["in_backward"] = 0
        weights = [x for optimizer in self.made for x in weights_of(optimizer)]
        self.now["had_grads"] = any(x.grad is not None for x in weights)
        self.now |= {"version": sum(x._version for x in weights), "call": self.state["call"]}
        if not self.optimizers and self.state["backwards"] >= 20 * self.limit:
            self.end()  # a script without an optimizer

    def before_step(self, optimizer, args, kwargs):
        if not self.now["backward"] and not any(x.get("lr", 1) for x in optimizer.param_groups):
            return  # by such a step, torch.distributed.checkpoint makes an optimizer's state
        if optimizer in self.stepping:
            self.stepping.clear()  # its last step ended by an error, or a subclass calls its step
        self.stepping.append(optimizer)
        if len(self.stepping) > 1:  # one optimizer calls another, as ZeroRedundancyOptimizer does
            return
        if id(optimizer) not in self.optimizers:
            known = {"number": len(self.optimizers), "step": 0, "clean": True}
            self.optimizers[id(optimizer)] = known | {"optimizer": optimizer}
            self.record_start(optimizer, known["number"])
        known = self.optimizers[id(optimizer)]
        known |= {"backward": self.now["backward"], "values": self.gradients_of(optimizer, known)}

    def gradients_of(self, optimizer, known):
        weights, scheduler = weights_of(optimizer), known.get("scheduler", lambda: None)()
        grads = [None if x.grad is None else local(x.grad) for x in weights]
        finite = [x is None or (x._values() if x.is_sparse else x).isfinite().all() for x in grads]
        values = {x: self.now[x] for x in "ddp averaged in_no_sync wiped clipped had_grads".split()}
        values["grads"] = [None if x is None else bits(x) for x in grads]
        skips = hasattr(optimizer, "found_inf")  # a fused one is called, and leaves such a step out
        values["infinite"] = [i for i, good in enumerate(finite) if not (good or skips)]
        values["rates"] = [float(group.get("lr", 1)) for group in optimizer.param_groups]
        is_new = self.now["autocasts"] or not self.now["backward"]  # another optimizer stepped
        values["stale"] = torch.is_autocast_enabled(weights[0].device.type)
        values["stale"] &= torch.is_autocast_cache_enabled() and not is_new
        values["said"] = [float(x) for x in scheduler.get_last_lr()] if scheduler else []
        return values

    def record_start(self, optimizer, number):
        self.learn_names()
        dist = torch.distributed
        group = dist.is_available() and dist.is_initialized()
        here = {id(x) for module in self.modules for x in module.parameters()}
        far = {id(x) for x in weights_of(optimizer) if x.grad is None} - here
        self.elsewhere |= far if group and not self.ddps else set()
        weights = weights_of(optimizer)
        ddp = next((self.ddps[id(x)]() for x in weights if id(x) in self.ddps), None)
        groups = dist.distributed_c10d._world.pg_group_ranks.values() if group else []
        owners = [self.owners.get(id(x), "") for x in weights]
        split = [getattr(x, "tensor_model_parallel", None) for x in weights]  # Megatron's mark
        device = weights[0].device
        machine = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
        if device.type != "cpu":
            machine = getattr(torch.get_device_module(device), "get_device_name", str)()
        values = {"number": number, "step": 0, "loads": len(self.loaded), "machine": machine}
        values["names"] = [self.names.get(id(x), f"parameter {i}") for i, x in enumerate(weights)]
        rank, world = (dist.get_rank(), dist.get_world_size()) if group else (0, 1)
        values |= {"rank": rank, "world": world, "is_loaded": optimizer in self.loaded}
        values |= {"ddp": dist.get_process_group_ranks(ddp.process_group) if ddp else []}
        values["mesh"] = [x.device_mesh.mesh for x in weights if hasattr(x, "device_mesh")][:1]
        parts = [part for module in self.modules for part in module.modules()]
        values["is_fsdp"] = any("FSDPModule" in str(type(part).__mro__) for part in parts)
        values["in_ddp"] = [id(x) in self.ddps for x in weights]
        values |= {"shapes": [[*x.shape] for x in weights], "shards": [*map(shard_of, weights)]}
        values["whole"] = ["Norm" in x if y is None else not y for x, y in zip(owners, split)]
        values |= {"trainable": [x.requires_grad for x in weights], "groups": [*map(len, groups)]}
        values["dtypes"] = [str(x.dtype).removeprefix("torch.") for x in weights]
        values |= {"weights": [bits(x) for x in weights], "sketches": [sketch(x) for x in weights]}
        values["shared"] = device.type == "cpu" and all(local(x).is_shared() for x in weights)
        values["place"] = [socket.gethostname(), str(device), torch.accelerator.device_count()]
        words = " ".join([*sys.argv[1:], torch.__version__, sys.version])
        self.record("start", **values, settings=re.sub(r"\S*rank\S*( \d+)?", "", words))

    def after_step(self, optimizer, args, kwargs):
        if not self.stepping or optimizer is not self.stepping[0]:
            return
        known = self.optimizers[id(optimizer)]
        known["step"] += 1
        self.done = max(self.done, known["step"])
        self.note_step(optimizer, known)
        self.stepping.clear()
        self.now.clear()
        known["clean"] = None
        if 0 < int(os.environ["CHECK_PAUSE"]) <= known["step"]:
            time.sleep(0.2)  # the signal to stop comes now
        counts = [each["step"] for each in self.optimizers.values()]
        if min(counts) >= self.limit or max(counts) >= 2 * self.limit:
            self.end()

    @careful
    def note_step(self, optimizer, known):
        if known["backward"] != self.now["backward"]:  # a closure ran in it
            known["values"] = self.gradients_of(optimizer, known)
        weights, states = weights_of(optimizer), optimizer.state.values()
        states = [(key, x) for each in states if isinstance(each, dict) for key, x in each.items()]
        values = {name: known[name] for name in ("number", "step", "clean")} | known["values"]
        values["types"] = sorted({f"{key} {x.dtype}" for key, x in states if hasattr(x, "dtype")})
        values |= {"weights": [bits(x) for x in weights], "sketches": [sketch(x) for x in weights]}
        values["attributes"] = self.learn_names()
        self.record("step", **values)
        if known["step"] == 2:
            held = {id(x) for each in self.made for y in each.param_groups for x in y["params"]}
            lost = {x for module in self.modules for x in module.parameters() if x.grad is not None}
            lost = [self.names.get(id(x), "?") for x in lost if id(x) not in held]
            self.record("lost", names=sorted(lost))

    def end(self):
        self.record("end")
        faulthandler.cancel_dump_traceback_later()
        raise SystemExit(0)  # leaves the script as sys.exit() would

    def start_pass(self, iterator, loader):
        own = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        values = {"pass": self.state["passes"], "data": loader.dataset, "size": None}
        values["replaces"] = bool(getattr(loader.sampler, "replacement", False))
        with contextlib.suppress(TypeError, NotImplementedError):  # as of a stream
            values["size"] = len(loader.dataset)
            values["batches"] = len(own)
        iterator._check = {"batches": None} | values | {"maker": type(own).__module__.split(".")[0]}
        self.state["passes"] += 1

    def note_batch(self, batch, iterator):
        one = getattr(iterator, "_check", None)
        if one is None or self.done >= self.limit:
            return
        self.state["pass"], data = one["pass"], one["data"]
        index = iterator._check_at.pop(0)  # workers, too, keep the order
        index = list(index) if hasattr(index, "__iter__") else [index]
        index = [int(x) if hasattr(x, "__index__") else None for x in index]
        while isinstance(data, torch.utils.data.Subset):  # as of random_split()
            index = [None if i is None else int(data.indices[i]) for i in index]
            data = data.dataset
        split = data is not one["data"] and [type(data).__name__, len(data)]
        values = one | {"index": index, "split": split, "data": type(data).__name__}
        parts = [*batch.values()] if isinstance(batch, dict) else batch
        parts = parts if isinstance(parts, (list, tuple)) else [parts]
        rows = [len(x) for x in parts if isinstance(x, torch.Tensor) and x.dim()]
        parts = [hashes for hashes, _ in numbers_of(batch)][:3]
        self.record("batch", **values, rows=rows, parts=parts)

    def before_fetch(self, fetcher, index):  # in a worker, if there are some
        fetcher._check_states = random_states(own_generators(fetcher.dataset))

    def after_fetch(self, result, fetcher, index):
        data, states = fetcher.dataset, random_states(own_generators(fetcher.dataset))
        drawn = used(fetcher._check_states, states)
        while isinstance(data, torch.utils.data.Subset):
            data = data.dataset
        worker = torch.utils.data.get_worker_info()
        values = {"worker": worker and worker.id, "at": time.time(), "used": drawn}
        parent = process_name(os.getppid() if worker else os.getpid())
        self.record("fetch", parent=parent, data=type(data).__name__, **values)

    def note_schedule(self, scheduler, *args, **kwargs):
        module = sys._getframe(3).f_globals.get("__name__", "")
        if module == "torch.optim.lr_scheduler" or getattr(scheduler, "_is_initial", False):
            return
        optimizer = getattr(scheduler, "optimizer", None)
        optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
        known = self.optimizers.get(id(optimizer), {"step": self.done, "number": 0})
        known["scheduler"] = weakref.ref(scheduler)
        values = {"number": known["number"], "step": known["step"] or self.now["scaled"]}
        self.record("schedule", name=type(scheduler).__name__, caller=module, **values)

    def note_clip(self, *args, **kwargs):  # 2: while scaled; 3: not between backward() and step()
        self.now["clipped"] = 1 + (self.now["scaled"] > 0) if self.now["backward"] else 3

    def note_ddp(self, result, ddp, *args, **kwargs):
        self.ddps |= {id(x): weakref.ref(ddp) for x in ddp.module.parameters()}

    def note_file(self, kind, path):
        path = getattr(path, "name", path)
        if isinstance(path, (str, os.PathLike)):
            self.record(kind, writer=process_name(os.getpid()), path=os.path.abspath(path))

    def note_flags(self, result, *args, **kwargs):
        flags = {name: x for name, x in vars(result[0]).items() if isinstance(x, (str, int, float))}
        self.record("flags", values=flags)


def install():
    """PyTorch calls this at the end of `import torch`."""
    global watch, torch, hash_tensor, change, DDP
    import torch
    from torch.nn.modules import module
    from torch.optim import lr_scheduler, optimizer
    from torch.utils.data import DataLoader, _utils, dataloader

    watch, DDP = Watch(), torch.nn.parallel.DistributedDataParallel
    hash_tensor, change = getattr(torch, "hash_tensor", None), torch.Tensor.to  # may be replaced
    optimizer.register_optimizer_step_pre_hook(careful(watch.before_step))
    optimizer.register_optimizer_step_post_hook(watch.after_step)
    module.register_module_forward_pre_hook(careful(watch.before_module))
    module.register_module_forward_hook(careful(watch.after_module), always_call=True)
    kinds = [lr_scheduler.LRScheduler]
    for kind in kinds:
        kinds += kind.__subclasses__()
        if "step" in vars(kind):
            wrap(kind, "step", watch.note_schedule)
    iterator, now = dataloader._BaseDataLoaderIter, watch.now
    wrap(iterator, "__next__", after=watch.note_batch)
    wrap(iterator, "_next_index", after=lambda i, x: vars(x).setdefault("_check_at", []).append(i))
    wrap(iterator, "_reset", lambda x, *a, **k: setattr(x, "_check_at", []))
    wrap(DataLoader, "__iter__", after=watch.start_pass)
    for fetcher in (_utils.fetch._MapDatasetFetcher, _utils.fetch._IterableDatasetFetcher):
        wrap(fetcher, "fetch", watch.before_fetch, watch.after_fetch)
    wrap(torch.autograd, "backward", watch.before_backward, watch.after_backward)
    wrap(DDP, "__init__", after=watch.note_ddp)
    wrap(argparse.ArgumentParser, "parse_known_args", after=watch.note_flags)
    kind = torch.optim.Optimizer
    wrap(kind, "__init__", lambda x, *a, **k: watch.made.add(x))
    wrap(kind, "state_dict", lambda x, *a, **k: x.state and watch.record("saved"))
    wrap(kind, "load_state_dict", after=lambda _, x, *a, **k: x.state and watch.loaded.append(x))
    wrap(torch.autocast, "__enter__", lambda *a: now.update(autocasts=1))
    wrap(torch, "save", lambda obj, f, *a, **k: watch.note_file("save", f))
    for name in ("replace", "rename"):
        wrap(os, name, lambda src, *a, **k: watch.note_file("move", src))
    wrap(torch.amp.GradScaler, "scale", lambda x, *a, **k: now.update(scaled=x.get_scale() != 1))
    wrap(torch.amp.GradScaler, "unscale_", lambda *a, **k: now.update(scaled=now["scaled"] and -1))
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        wrap(torch.nn.utils, name, watch.note_clip)


def run(command, args, folder, stop_at=0, life=1):  # watches a command, and returns a Job
    seen, info = folder / f"seen{life}", folder / "plugin" / "check-1.dist-info"
    for each in (info, seen, folder / "tmp"):
        each.mkdir(parents=True, exist_ok=True)
    (info / "entry_points.txt").write_text("[torch.backends]\ncheck = check_plugin:install\n")
    (folder / "plugin" / "check_plugin.py").write_text(Path(__file__).read_text())
    paths = [str(folder / "plugin"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"PYTHONPATH": os.pathsep.join(paths), "CHECK_PARENT": process_name(os.getpid())}
    env |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1", "CHECK_STUCK": str(args.timeout / 2)}
    env |= {"CHECK_SEEN": str(seen), "CHECK_COMPARES": "1" if args.against or args.resume else ""}
    env |= {"CHECK_STEPS": str(args.steps * (10 if stop_at else 1)), "CHECK_PAUSE": str(stop_at)}
    words = shlex.split(command.replace("{tmp}", str(folder / "tmp")))
    process = subprocess.Popen(words, env=os.environ | env, start_new_session=True)
    size, until, ends = 0, time.time() + args.timeout, False
    try:
        while process.poll() is None and time.time() < until:
            time.sleep(0.1)
            texts = [path.read_text() for path in seen.glob("*[0-9]")]
            if stop_at and any(f'"number": 0, "step": {stop_at},' in text for text in texts):
                process.send_signal(signal.SIGTERM)
                stop_at = 0
            if sum(map(len, texts)) > size and not ends:
                ends = any('{"kind": "end"}' in text for text in texts)
                size, until = sum(map(len, texts)), time.time() + (GRACE if ends else args.timeout)
    finally:  # also after Ctrl-C
        status = process.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # what is left of the processes of the job
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(40)  # torchrun may need 30 seconds to end its workers
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    job, until = Job(seen, status), time.time() + GRACE
    while "CHECK_FOLDER" in os.environ and job.is_incomplete and time.time() < until:
        time.sleep(0.5)  # other machines end later
        job = Job(seen, status)
    return job


class Job(Kinds):  # its `ranks` are the Processes that train, `seen` all, `first` is rank 0
    def __init__(self, folder, status):
        paths = sorted(folder.glob("*[0-9]"), key=lambda path: path.stat().st_ctime)
        self.seen = {path.name: Process(path) for path in paths}
        self.ranks = {}
        for each in self.seen.values():
            for start in each["start"][:1]:
                rank = start["rank"]
                while start["world"] == 1 and rank in self.ranks:
                    rank += 1  # processes that do not know of each other
                self.ranks[rank] = each
        self.ranks = dict(sorted(self.ranks.items()))
        self.first = next(iter(self.ranks.values()), None)
        self.steps = max([each.steps for each in self.ranks.values()], default=0)
        self.status, self.has_ended = status, bool(self.all("end"))
        starts, me = [each.start for each in self.ranks.values()], process_name(os.getpid())
        self.prints = not starts or self.first["process"][0]["parent"] == me
        self.is_incomplete = len(self.all("end")) < (starts[0]["world"] if starts else 1)
        self.families = [x for x in self.find_families() if 1 < len(x.ranks) <= starts[0]["world"]]
        self.data_groups = [each.ranks for each in self.families if each.has_data]

    def all(self, kind):
        return [x for each in self.seen.values() for x in each[kind]]

    def union(self, kind):  # by step, the samples of all ranks: see Process.samples()
        steps = defaultdict(list)
        for rank in self.data_groups[0] if self.data_groups else [*self.ranks][:1]:
            for step, numbers in self.ranks[rank].samples(kind).items():
                steps[step + 1] += numbers
        return steps

    def find_families(self):  # ranks that average with each other, or split a model by hand
        groups = defaultdict(list)
        for rank, each in self.ranks.items():
            groups[str([each.start[x] for x in ("names", "shapes", "ddp", "mesh")])].append(rank)
        for ranks in groups.values():
            start, alike = self.ranks[ranks[0]].start, defaultdict(list)
            for rank in ranks:
                alike[str(self.ranks[rank].start["weights"])].append(rank)
            together = start["ddp"] or start["mesh"] or len(alike) == 1
            batches = [self.ranks[x[0]].samples() for x in alike.values()]  # of unlike ranks
            is_split = not together and batches[0] and all(x == batches[0] for x in batches)
            in_groups = any(1 < size < start["world"] for size in start["groups"])
            fsdp = start["is_fsdp"] and {len(x.split()) for x in start["shards"]} == {1}
            if is_split:
                yield Family(ranks, is_split=True, has_data=False)
            for one in alike.values() if is_split or not together and in_groups else [ranks]:
                yield Family(one, is_split=False, has_data=fsdp or not start["mesh"])


class Process(defaultdict):  # one process: by kind, what Watch.record() has noted there
    def __init__(self, path):
        super().__init__(list)
        self.path, self.name = path, path.name
        for line in path.read_text().splitlines():
            if line.endswith("}"):
                x = json.loads(line)
                self[x["kind"]].append(x)
        self.start = self["start"][0] if self["start"] else None
        self.steps = max([x["step"] for x in self["step"]], default=0)
        trained = {x["call"] for x in self["trained"]}
        self.training_calls = [x for x in self["forward"] if x["call"] in trained]

    def optimizers(self):  # what was recorded at the start of each, and at its steps
        for start in self["start"]:
            yield start, [x for x in self["step"] if x["number"] == start["number"]]

    def states(self, number):  # of an optimizer and its weights, by step; 0: before all
        start, steps = [*self.optimizers()][number]
        return {x["step"]: x for x in [start, *steps]}

    def samples(self, kind="samples"):  # by step, hashes of those trained on. "near": projections
        found = defaultdict(list)
        for x in self.training_calls:
            found[x["step"]] += x[kind] or []
        return found

    def epoch_length(self, one):  # of a pass: how many samples each process takes in it
        sizes = [len(x) for _, x in sorted(self.samples().items())] or [len(one["index"])]
        return one["size"] // (sizes[0] * self.start["world"]) * sizes[0] or one["size"]

    def passes(self, training):  # over data on which the model trained, or only looked
        trained, found = {x["pass"] for x in self["loss"]}, []
        tested = {x["pass"] for x in self["forward"] if not x["grad"]} - trained
        for number in sorted((trained if training else tested) - {None}):
            batches = [x for x in self["batch"] if x["pass"] == number]
            index = [i for x in batches for i in x["index"]]
            parts = [sum(column, []) for column in zip(*[x["parts"] for x in batches])]
            one = batches[0] | {"index": index, "known": None not in index}
            one["parts"] = [part for part in parts if len(part) == len(index)]
            found.append(one | {"ended": len(batches) == one["batches"]})
        return found

    def tests(self):  # calls without gradients, but those in a pass that trains, as of a teacher
        trained, calls = {x["pass"] for x in self["loss"]} - {None}, self["forward"]
        for x, after in zip(calls, [*calls[1:], {"grad": True}]):
            if not x["grad"] and x["pass"] not in trained:
                yield x, x["pass"] is None and after["grad"]

    def place(self):  # where a process hangs: the innermost line of the script itself
        text = self.path.with_name(f"{self.name}.stack").read_text().split("Thread 0x")[-1]
        for path, line, function in re.findall(r'File "(.*)", line (\d+) in (.*)', text):
            if not re.search("site-packages|lib/python|check_plugin|<", path):
                return f"{os.path.basename(path)} line {line} in {function}"


if __name__ == "__main__":
    main()
