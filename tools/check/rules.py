"""Rules: one function a kind of fault. Records in, findings out."""

import os
import re
from collections import Counter, defaultdict


def seen(items, words):  # the last row of a kind, which is shown if nothing is wrong
    return ("ok", f"{len(items)} {words}") if items else ("not seen", f"no {words}")


def ending(job):
    """The job neither hangs nor fails before the last step that is watched."""
    if job.status is None and not job.has_ended:
        places = [f"rank {rank} at {each.place()}" for rank, each in job.ranks.items()]
        step = min((each.steps for each in job.ranks.values()), default=0)
        yield "ERROR", f"it hangs after step {step}: {'; '.join(places) or '?'}."
    if job.status and not job.has_ended:
        yield "ERROR", f"it ended with status {job.status} after {job.steps} steps"
    for text, count in Counter(x["text"] for x in job.all("trouble")).most_common(3):
        yield "warning", f"check.py failed itself, {count} times: {text}"
    if job.steps:
        yield "ok", f"status {job.status} after {job.steps} steps"
    yield "not seen", "no optimizer of PyTorch takes a step: are weights changed by hand?"


def processes(job):
    """All that train are one group, each with its GPU, and the same flags and versions."""
    starts = [each.start for each in job.ranks.values()]
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


def weights(job):
    """Copies of a weight have the same bits in all ranks, after each step."""
    for family in job.families:
        for number, start in enumerate(job.ranks[family.ranks[0]]["start"]):
            states = {rank: job.ranks[rank].states(number) for rank in family.ranks}
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


def updates(job):
    """Each weight that has a gradient moves, and keeps moving."""
    for start, steps in job.first.optimizers():
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


def gradients(job):
    """Each weight is in an optimizer, and has a gradient when the optimizer steps."""
    for x in [x["names"] for x in job.first["lost"] if x["names"]]:
        words = f"{len(x)} weights with gradients are in no optimizer: {', '.join(x[:3])}."
        yield "warning", words + " Add or freeze them; make none in forward()."
    for start, steps in job.first.optimizers():
        count, a, b = len(start["names"]), start["weights"], [start, *steps][-1]["weights"]
        never = [i for i in range(count) if all(x["grads"][i] is None for x in steps)]
        unused = [start["names"][i] for i in never if start["trainable"][i] and a[i] == b[i]]
        level = "ERROR" if len(unused) == count else "warning"
        if unused and len(never) == count and any(x["had_grads"] for x in steps):
            yield "ERROR", "none is left at step(): zero_grad() came first. Call it afterwards."
        elif unused:
            yield level, f"{len(unused)} of {count} weights never have a gradient: {unused[0]}."
        yield "ok", f"{count - len(never)} weights have gradients"


def accumulation(job):
    """Gradients are zeroed and averaged once a step, not in each micro-batch."""
    for rank, steps in [(i, y) for i, x in job.ranks.items() for _, y in x.optimizers()]:
        late = [x["step"] for x in steps if x["clean"] is False]
        old = [b for a, b in zip(steps, steps[1:]) if a["grads"] == b["grads"]]
        twice = [x["step"] for x in old if x["clean"] is None and any(x["grads"])]
        if late:
            yield "ERROR", f"not zeroed before step {late[0]}, rank {rank}. Call zero_grad()."
        if twice:
            yield "ERROR", f"step {twice[0]} uses the gradients of the last one, rank {rank}."
        if sum(x["wiped"] > 0 for x in steps) > len(steps) / 2:
            yield "ERROR", "zeroed between the micro-batches: only the last one counts."
        if len(job.ranks) > 1 and min(x["averaged"] for x in steps) > 1:
            yield "warning", f"DDP averages {steps[0]['averaged']} times a step. Use no_sync()."
        yield seen([x for x in steps if x["clean"]], "steps from gradients that were zeroed")


def finite(job):
    """Losses and gradients are finite, and unscaled when they are clipped."""
    clips = {x["clipped"] for x in job.first["step"]}
    if 2 in clips:
        yield "ERROR", "clipped while scaled. Call scaler.unscale_(optimizer) before clipping."
    elif clips - {0} == {3} and len(job.first["start"]) == 1:  # no other has stepped between
        yield "warning", "clipped between step() and backward(), in vain. Clip before step()."
    for rank, each in job.ranks.items():
        for x in [x for x in each["loss"] if x["value"] - x["value"] != 0][:1]:
            yield "ERROR", f"the loss is {x['value']} in step {x['step'] + 1}, rank {rank}."
        for x in [x for x in each["step"] if x["infinite"]][:1]:
            name = each["start"][x["number"]]["names"][x["infinite"][0]]
            yield "ERROR", f"inf or nan in {name}'s gradient, step {x['step']}, rank {rank}."
        yield seen(each["loss"], "losses")


def schedule(job):
    """A schedule steps once for each step, after it, and its rate is the one that is used."""
    for start, steps in job.first.optimizers():
        calls = [x for x in job.first["schedule"] if x["number"] == start["number"]]
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
    yield seen(job.first["schedule"], "calls of a scheduler")


def precision(job):
    """Weights are fp32 where a flag says so, and autocast reaches the layers."""
    types = Counter(x for each in job.first["start"] for x in each["dtypes"])
    low = [kind for kind in types if kind in ("bfloat16", "float16")]
    for name, value in [x for flags in job.all("flags") for x in flags["values"].items()]:
        says_fp32 = re.fullmatch(r"(torch\.)?(fp|float)?_?32(-true)?", str(value).lower())
        if low and says_fp32 and re.fullmatch("(model_|torch_)?(precision|dtype)", name):
            yield "ERROR", f"{types[low[0]]} weights are {low[0]}, but {name} is to be {value}."
    if "float32" in types and any(x["stale"] and x["step"] > 1 for x in job.first["step"]):
        yield "ERROR", "one autocast holds all steps, with the first weights. Enter it in each."
    for x in job.all("autocast")[:1]:
        yield "warning", f"autocast is on, but a {x['module']} gives {x['gives']}."
    yield "ok", f"weights are {', '.join(types)}"


def modes(job):
    """Dropout and BatchNorm train in train(), and validate in eval()."""
    trains = [x for x in job.first.training_calls if x["layers"]]
    for x in [x for x in trains if x["in_eval"]][:1]:
        words = f"{x['in_eval']} layers train in eval() from step {x['step'] + 1}. Call train()"
        yield "warning" if trains[0]["in_eval"] else "ERROR", words + ", also after validation."
    for x, is_single in job.first.tests():
        if x["in_eval"] < x["layers"] and not is_single:  # one is as of a GAN's generator
            yield "warning", f"{x['module']} validates in train(). Call model.eval()."
    yield seen(trains, "calls of Dropout or BatchNorm in train()")


def layers(job):
    """Dropout draws other masks in each rank, none in eval(); BatchNorm is the same in all."""
    tests = [x for x, _ in job.first.tests() if x["in_eval"] == x["layers"] > 0]
    firsts = {x["step"]: x["random"] for x in reversed(tests)}  # the first of each validation
    is_seeded = len(firsts) > 1 and len({*map(str, firsts.values())}) == 1
    for x in [x for x in tests if x["random"] and not is_seeded][:1]:
        yield "warning", f"{x['module']} draws random numbers in eval(). Is that wanted?"
    for one, two, *_ in job.data_groups:
        calls = zip(*[job.ranks[rank].training_calls for rank in (one, two)])
        pairs = [(a["random"], b["random"]) for a, b in calls if a["random"] and b["random"]]
        own = [[{x: y for x, y in z.items() if "its" in x} for z in pair] for pair in pairs]
        if pairs and any(a[0][0] and all(x == y for x, y in a) for a in (pairs, own)):
            yield "warning", f"ranks {one}, {two} draw the same masks or noise. Seed by rank."
        calls = zip(*[job.ranks[rank].tests() for rank in (one, two)])
        for step in [x["step"] for (x, _), (y, _) in calls if x["norms"] != y["norms"]][:1]:
            yield "warning", f"BatchNorm's statistics differ in validation after step {step}."
        yield seen(pairs, "calls that draw random numbers in two ranks")


def shares(job):
    """Each rank trains on samples of its own."""
    for first, second in [(ranks[0], rank) for ranks in job.data_groups for rank in ranks[1:]]:
        one, two, who = job.ranks[first], job.ranks[second], f"ranks {first} and {second}"
        mine, theirs = one.samples(), two.samples()
        common = [x for x in mine if mine[x] and theirs.get(x)]
        equal = [x for x in common if sorted(mine[x]) == sorted(theirs[x])]
        a, b = [(each.passes(True) or [{"known": False}])[0] for each in (one, two)]
        alike = a["known"] and b["known"] and same_data(a, b)
        drawn = a["index"][: one.epoch_length(a)] if alike else []
        both = {*drawn} & {*b["index"][: len(drawn)]} if alike else ()
        if len(equal) > len(common) / 2 or drawn and a["index"] == b["index"]:
            yield "ERROR", f"{who} get the same samples in {len(equal)} steps. Split them."
        elif len({*drawn}) == len(drawn) and len(both) >= len(job.ranks) and not a["replaces"]:
            yield "ERROR", f"{who} share {len(both)} of {len(drawn)} samples. Split one order."
        yield seen(common, f"steps in which {who} have other samples")


def order(job):
    """The order of the samples is random, and another one in each epoch."""
    trains = job.first.passes(training=True)
    known = bool(trains) and trains[0]["known"]
    orders = [x["index"] if x["known"] else [*zip(*x["parts"])] for x in trains]
    if known:  # a pass may have several epochs
        length = job.first.epoch_length(trains[0])
        orders = [x[i : i + length] for x in orders for i in range(0, len(x), length)]
    first, second, *_ = [*[x for x in orders if len(x) > 7], [], []]
    if first and not known and len({*first}) <= len(first) / 2:
        yield "ERROR", f"{len({*first})} different samples among {len(first)}: split by worker."
    elif first and known and first == sorted(first):
        yield "warning", f"not shuffled: {str(first[:4])[1:-1]}, ... If not wanted, shuffle."
    elif second and all(a == b for a, b in zip(first, second)):
        yield "ERROR", "the first two epochs have one order. Call sampler.set_epoch(epoch)."
    yield seen(second, "samples of a second epoch, in another order")


def inputs(job):
    """A batch has a row for each sample, and is not all zeros."""
    for rank, each in job.ranks.items():
        calls, trained = each.training_calls, {x["pass"] for x in each["loss"]}
        empty = [x["step"] + 1 for x in calls if x["zero"]]
        if 0 < len(empty) < len(calls) / 2:
            yield "ERROR", f"the input of step {empty[0]} in rank {rank} is all zeros. Lost?"
        batches = [(x["index"], {*x["rows"]}) for x in each["batch"] if x["pass"] in trained]
        odd = [(len(x), rows - {len(x)}) for x, rows in batches if len(x) in rows]
        if len(odd) > 1 and odd[0][1] and all(rows == odd[0][1] for _, rows in odd):
            yield "warning", f"{odd[0][0]} samples have a tensor of {min(odd[0][1])} row(s)."
        yield seen(calls, "inputs, none all zeros")


def samples(job):
    """In two validations a data set gives the same sample, unless it draws random numbers."""
    random_ones = {x["data"] for x in job.all("fetch") if x["used"]} | {None}
    old = {}  # (rank, data set, its size, index): the sample's hashes
    tests = [(rank, x) for rank, each in job.ranks.items() for x in each.passes(False)]
    for rank, x in [y for y in tests if y[1]["known"] and y[1]["data"] not in random_ones]:
        for index, *hashes in zip(x["index"], *x["parts"]):
            if old.setdefault((rank, x["data"], x["size"], index), hashes) != hashes:
                yield "ERROR", f"sample {index} of {x['data']} has other bytes later. Copy it."
                return
    yield seen(old, "samples were validated, each time with the same bytes")


def augmentation(job):
    """Random numbers of data sets differ in workers, ranks and epochs."""
    ranks = {each.name: rank for rank, each in job.ranks.items()}
    ours = {(x.name, y["data"]) for x in job.ranks.values() for y in x.passes(training=True)}
    drawn = defaultdict(list)  # (generator, data set, rank, worker): states, by epoch
    for each in job.seen.values():
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


def validation(job):
    """Validation counts each sample once, and none of those that are trained on."""
    ranks = job.data_groups[0] if job.data_groups else [*job.ranks]
    tests = [x for rank in ranks for x in job.ranks[rank].passes(training=False)[:1]]
    trains = [x for each in job.ranks.values() for x in each.passes(training=True)]
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


def snapshot(job):
    """One process writes a snapshot, under another name first."""
    saves, moved = defaultdict(list), {x["path"] for x in job.all("move")}
    for x in job.all("save"):
        saves[x["path"]].append(x["writer"])
    for path, writers in saves.items():
        name, count = os.path.basename(path), len({*writers})
        if count > 1:
            yield "ERROR", f"{count} processes write {name}. Let rank 0 alone write it."
        elif path not in moved and len(writers) > 1:
            yield "warning", f"{name} is written over in place. Write a .tmp, then move it."
    yield seen(saves, "file(s) of torch.save()")


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


KINDS = [
    ending,
    processes,
    weights,
    updates,
    gradients,
    accumulation,
    finite,
    schedule,
    precision,
    modes,
    layers,
    shares,
    order,
    inputs,
    samples,
    augmentation,
    validation,
    snapshot,
]
