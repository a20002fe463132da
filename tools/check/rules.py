"""The rules: each kind of fault is a function of a Job's records that yields (level, words).

A rule yields the level "ERROR", "warning", "ok" or "not seen". rows_of() adds "failed" for a rule
that raises an exception. An ERROR is for what a correct training never does. A warning is for what
may be meant. If nothing is wrong, the first "ok" answers the question in the rule's docstring.
`--list` prints these questions. tools/README.md says what to do about each kind. It also says how
to add a kind.
"""

import os
import re
from collections import Counter, defaultdict

from records import UNKNOWN_PLACE

# How many steps, calls or samples make a finding.
STILL_STEPS = 5  # a weight has stopped if its gradients do not move it for so many steps
ZERO_RATE_STEPS = 2  # the last step of a schedule may have the rate 0
SHUFFLED_SAMPLES = 8  # fewer samples may be in order by chance
FETCHES = 3  # so many states of a data set's generator tell two sequences apart
SCHEDULE_CALLS = 1.2  # calls for each step: a scheduler may also step at the end of an epoch
MOST = 2  # if more than 1 of 2 samples is validated, the rest is left out by mistake
IDLE_CALLS = 3  # so many calls of a scheduler whose optimizer takes no step are a finding
KEPT_STEPS = 3  # so many steps with gradients of another loss are no chance
TIMES_REMADE = 2  # a single new optimizer may be wanted, as for the second half of a training
PLACE_STEPS = 3  # the samples of so many steps tell at which place in the data a run goes on

# Rounding may make a weight differ between two runs. The limit is WAY times the way it has moved,
# plus DIGIT times its size. In fp32, another order of sums changes 0.1% of the way. A loss that is
# 5% too large must still be found.
WAY = {"float64": 0.02, "float32": 0.02, "float16": 0.1, "bfloat16": 0.3}
# A share of the weight's size. For 16 bits, it is a few times the last digit of the type.
DIGIT = {"float64": 1e-7, "float32": 1e-7, "float16": 2e-3, "bfloat16": 2e-2}
START_WAY = 0.05  # before the first step, this share of a weight's size counts as its way
COPIES_WAY = 0.01  # for copies on two kinds of machines, which differ only in the last digits
COPIES_DIGIT = 1e-6
SAMPLES_DIGIT = 1e-5  # for samples whose numbers are added up in another order
RATE_DIGIT = 1e-6  # for a rate that is read from a scheduler

TYPES_16 = ("bfloat16", "float16")


def rows_of(rule, *jobs):
    """Returns rows (level, kind, words) of a rule: all that is wrong, or else a single row."""
    kind, found, failed = rule.__name__, {}, []
    try:
        for row in rule(*jobs):
            found[row] = True  # each once
    except Exception as error:  # the rule itself has failed: that is no finding, and never "ok"
        last = error.__traceback__
        while last.tb_next:
            last = last.tb_next
        failed = [("failed", kind, f"the rule failed itself, line {last.tb_lineno}: {error!r}")]
    rows = [(level, kind, words) for level, words in found]
    wrong = [row for row in rows if row[0] in ("ERROR", "warning")]
    right = [row for row in rows if row[0] == "ok"]
    if failed:
        return wrong + failed
    return wrong or right[:1] or rows[:1] or [("not seen", kind, "nothing shows it")]


# == The job and its processes ==
def ending(job):
    """Does the job neither hang nor fail before the last step that is watched?"""
    if job.interrupted_by:
        yield "warning", f"{job.interrupted_by} has ended it after {job.steps_done} steps."
        return
    if job.status is None and not job.has_ended:
        step = min((process.steps_done for process in job.ranks.values()), default=0)
        words = f"it hangs after step {step}: {'; '.join(places_of(job)) or '?'}. "
        yield "ERROR", words + "If it is only slow, give a longer --timeout."
    if job.status and not job.has_ended:
        yield "ERROR", f"it ended with status {job.status} after {job.steps_done} steps."
    if job.steps_done:
        yield "ok", f"{job.steps_done} steps, and no hang"
    elif not job.records.processes:
        words = "PyTorch has loaded the watch in no process. It does so where a process imports "
        words += "torch >= 2.6, and not by python -I or -E, with an environment that lacks "
        yield "not seen", words + "PYTHONPATH, or with TORCH_DEVICE_BACKEND_AUTOLOAD=0."
    else:
        yield "not seen", "no optimizer of PyTorch takes a step: are weights changed by hand?"


def places_of(job):
    """Says where a job hangs: its ranks, or all processes if no optimizer has begun a step."""
    if job.ranks:
        return [f"rank {rank} at {process.place()}" for rank, process in job.ranks.items()]
    counts = Counter(process.place() for process in job.records.processes.values())
    # torchrun and the workers of loaders have no line of the script itself.
    known = {place: count for place, count in counts.items() if place != UNKNOWN_PLACE}
    return [f"{count} process(es) at {place}" for place, count in (known or counts).items()]


def processes(job):
    """Are all processes one group, each with its GPU, with the same flags and versions?"""
    starts = [process.start for process in job.ranks.values()]
    alone = sum(start["world"] == 1 for start in starts)
    if alone > 1 and all(start["shares_memory"] for start in starts):
        yield "ok", f"{len(starts)} share one memory (Hogwild): ranks are not compared"
        return
    if alone > 1:
        yield "ERROR", f"{alone} train, each alone. Call dist.init_process_group(), use DDP."
    counts = Counter(tuple(start["place"]) for start in starts)
    (host, device, num_devices), count = counts.most_common(1)[0]
    if count > 1 and num_devices > 1 and device != "cpu":
        yield "ERROR", f"{count} train on {device} of {host}. Choose it by LOCAL_RANK."
    for start in starts:
        level = level_of_settings(starts[0], start)
        if level:
            yield level, f"other flags or versions in rank {start['rank']}: {start['settings']}."
            break
    if len(starts) > 1:
        yield "ok", f"{len(starts)} in one group, with the same flags and versions"


def level_of_settings(one, two):
    """Returns the level of a finding if two processes have other flags or versions, or else "".

    A process that is started by hand may get its rank, as by --gpu 1, or another number of its own.
    """
    settings = one["settings"], two["settings"]
    if without_numbers(settings[0]) != without_numbers(settings[1]):
        return "ERROR"
    pairs = zip(*[re.split("[ =:]", text) for text in settings])
    other = {pair for pair in pairs if pair[0] != pair[1]}
    return "warning" if other - {(str(one["rank"]), str(two["rank"]))} else ""


# == Weights ==
def weights(job):
    """Are gradients averaged: has each copy of a weight the same bits in all ranks?"""
    compared, equal = 0, []
    for family in job.families:
        # If the job has ended early, some ranks may not have come to a later optimizer.
        count = min(len(job.ranks[rank]["start"]) for rank in family.ranks)
        starts = job.ranks[family.ranks[0]]["start"][:count]
        for number, start in enumerate(starts):
            states = {rank: job.ranks[rank].states(number) for rank in family.ranks}
            steps = sorted(set.intersection(*[{*each} for each in states.values()]))
            found = {step: differences(family, states, step) for step in steps}
            bad = [step for step in steps if found[step]]
            if bad and start["stands_in"] and not bad[0]:
                continue  # each rank has a part of its own
            if bad:
                yield verdict(family, start, states, bad, steps, found[bad[0]])
            elif steps[-1] and has_copies(family, states):
                compared += sum(step > 0 for step in steps)
                equal.append(family.ranks)
    if compared:
        words = f"gradients are averaged: copies are equal in ranks {equal[0]}, compared "
        yield "ok", words + f"{compared} times"
    yield "not seen", "no weight that has a copy in another rank was compared after a step"


def parts_here(family, start):
    """Yields the index of each weight that may have copies, and which part of it is here."""
    for index, part in enumerate(start["parts"]):
        if start["is_whole"][index] or not family.is_split:
            yield index, part


def has_copies(family, states):
    counts = Counter()
    for rank in family.ranks:
        counts.update(parts_here(family, states[rank][0]))
    return any(count > 1 for count in counts.values())


def differences(family, states, step, name="bits"):
    """Returns two ranks whose copies differ, and the indices of these weights. None: all agree."""
    found, copies = defaultdict(list), {}
    for rank in family.ranks:
        bits = states[rank][step][name]
        for index, part in parts_here(family, states[rank][0]):
            first, other = copies.setdefault((index, part), (rank, bits[index]))
            if other != bits[index]:
                found[first, rank].append(index)
    for (first, second), indices in found.items():
        return first, second, indices
    return None


def verdict(family, start, states, bad, steps, found):
    """Returns the row for weights that differ."""
    first, second, indices = found
    step, index = bad[0], indices[0]
    when = f"after step {step}" if step else "at the start"
    words = f"{len(indices)} of {len(start['names'])} tensors differ {when} in ranks "
    words += f"{first} and {second}, first {start['names'][index]}. "
    # If ranks average their weights after a step, copies are equal only before the next step.
    later = [each for each in steps if each > step]
    if any(not differences(family, states, each, "bits_before") for each in later):
        return "warning", words + "Later they are equal: local SGD?"
    begin = states[first][0]["sketches"][index]
    end = states[first][steps[-1]]["sketches"][index]
    other = states[second][steps[-1]]["sketches"][index]
    limit = COPIES_WAY * distance(end, begin) + COPIES_DIGIT * distance(end)
    machines = {states[first][0]["machine"], states[second][0]["machine"]}
    if len(machines) > 1 and distance(end, other) < limit:
        return "warning", words + f"It is rounding: {' and '.join(sorted(machines))}."
    if start["exchanges"] and not step:
        return "warning", words + "Are they experts, of which each rank has its own?"
    one, two = states[first][step], states[second][step]
    return "ERROR", words + cause(start, indices, one, two, family)


def cause(start, indices, one, two, family):
    """Returns the likely cause of weights that differ in two ranks, and what to do."""
    grads, rates = [[0], [0]], (one.get("rates"), two.get("rates"))
    if one["step"]:
        grads = [[record["gradients"][index] for index in indices] for record in (one, two)]
    is_equal = grads[0] == grads[1]
    in_ddp = start["in_ddp"]
    past_ddp = not one.get("ddp_calls")
    causes = [
        (family.is_split, "This weight is not split: clip and average it alike in all ranks."),
        (start["shares_memory"], "spawn() shared the model's memory. Make it in each process."),
        (one["step"] == 0, "Wrap the model in DDP, or send rank 0's weights to all."),
        (is_equal and rates[0] != rates[1], f"The learning rates differ: {rates}."),
        (is_equal, "The gradients are equal: give the optimizers one state, the same settings."),
        (
            (None in grads[0]) != (None in grads[1]),
            "Only one of them has a gradient for it. Use it in each.",
        ),
        (any(start["parts"]), "A replica was changed, or is not averaged with the others."),
        (not any(in_ddp), "Nothing averages the gradients. Wrap the model in DDP."),
        (not in_ddp[indices[0]], "DDP does not know it. Wrap the model when it is complete."),
        (past_ddp, "The model is called past DDP. Call the DDP object, not .module."),
        (one.get("in_no_sync"), "The last backward before the step was in no_sync()."),
        (True, "Gradients are changed after DDP, or the model was moved after DDP was made."),
    ]
    return next(words for is_so, words in causes if is_so)


def distance(one, two=None):
    """How far two weights are apart, or one is from 0, by their random projections."""
    two = two or [0] * len(one)
    return (sum((x - y) ** 2 for x, y in zip(one, two)) / len(one)) ** 0.5


def updates(job):
    """Does each weight that has a gradient move, and keep moving?"""
    total = frozen = 0
    for start, steps in job.first.optimizers():
        steps = steps_before_nan(steps)
        names = start["names"]
        still, moving = still_weights(start, steps)
        total += moving
        frozen += start["trainable"].count(False)
        rates = [max(record["rates"]) for record in steps]
        if rates and not any(rates):
            yield "ERROR", f"the rate is 0 in all {len(steps)} steps. Look at the schedule."
        elif rates and not moving:
            are_frozen = not any(start["trainable"])
            why = "Do they require gradients?" if are_frozen else "Is it another model's optimizer?"
            count = start["trainable"].count(False)
            yield "ERROR", f"none of {len(names)} weights changes, {count} are frozen. {why}"
        elif any(not name.endswith("bias") for _, name, _ in still):
            # A bias may stand still: right before a norm, it has no effect.
            _, name, last = max(still)
            words = f"{name} stands still from step {last + 1} on, {len(still)} of {len(names)} do."
            level = "ERROR" if 2 * len(still) >= len(names) else "warning"
            yield level, words + " Steps too small?"
        first = first_of_last_zeros(rates)
        if any(rates) and len(rates) - first >= ZERO_RATE_STEPS:
            words = f"the rate is 0 from step {first + 1} on: for how many steps is it planned?"
            yield "warning", words
    yield from findings_of_remaking(job.first)
    if total:
        yield "ok", f"{total} weights of all optimizers change, {frozen} are frozen"
    yield "not seen", "no optimizer has moved a weight"


def findings_of_remaking(process):
    """Yields a finding if an optimizer is made anew for the same data, and loses its state.

    That is right if the weights were changed in between, as in Reptile, or if the data are others.
    """
    samples, found = process.samples(), []
    for record in process["remade"]:
        names = {each.split()[0] for each in record["types"]} - {"step"}
        is_lost = names and record["is_same"] and not record["has_loaded"]
        if is_lost and samples_come_again(samples, record["step"]):
            found.append((record["step"], ", ".join(sorted(names))))
    if len(found) >= TIMES_REMADE:
        step, names = found[0]
        words = f"the optimizer is made anew {len(found)} times, first after step {step}, and "
        yield "warning", words + f"loses {names}. Make it once, before the first epoch."


def samples_come_again(samples, step):
    """Whether at least half of the samples after a step have come before it."""
    before, after = set(), []
    for each, hashes in samples.items():
        if each < step:
            before.update(hashes)
        else:
            after += hashes
    return bool(after) and 2 * sum(number in before for number in after) >= len(after)


def first_of_last_zeros(rates):
    """Returns from which index on all rates are 0."""
    first = len(rates)
    while first and rates[first - 1] == 0:
        first -= 1
    return first


def steps_before_nan(steps):
    """Returns the steps before the first inf or nan. After it, weights stay nan."""
    for place, record in enumerate(steps):
        if record["infinite"]:
            return steps[:place]
    return steps


def still_weights(start, steps):
    """Returns the weights that should move and do not, and how many weights move at all.

    For each weight that does not, there is the sum of its shape, its name, and its last move.
    """
    still, moving = [], 0
    for index, name in enumerate(start["names"]):
        bits = [record["bits"][index] for record in (start, *steps)]
        moves = [step for step in range(1, len(bits)) if bits[step] != bits[step - 1]]
        last = max(moves, default=0)
        moving += bool(moves)
        # A weight need not move in a step in which its gradient is missing or 0.
        pulls = [pull_of(record, index) for record in steps]
        after = [pull for pull in pulls[last:] if pull is not None]
        never_moves = any(pulls) and not moves
        if never_moves or (len(after) >= STILL_STEPS and all(after)):
            still.append((sum(start["shapes"][index]), name, last))
    return still, moving


def pull_of(record, index):
    """Whether a weight's gradient and rate in a step are both other than 0. None: no gradient."""
    gradient = record["gradients"][index]
    return None if gradient is None else bool(gradient and max(record["rates"]))


def gradients(job):
    """Is each weight once in an optimizer, and has it a gradient when the optimizer steps?"""
    yield from findings_of_unowned(job.first)
    total = 0
    for start, steps in job.first.optimizers():
        if not steps:
            continue
        end = steps[-1]
        count, unused = len(start["names"]), []
        without = weights_without_gradient(start, steps)
        for index in without:
            if start["trainable"][index] and start["bits"][index] == end["bits"][index]:
                unused.append(start["names"][index])
        total += sum(numbers > 0 for numbers in start["numbers"]) - len(without)
        if unused and len(without) == count and any(record["had_gradients"] for record in steps):
            words = "no gradient is left at step(): zero_grad() came before it. "
            yield "ERROR", words + "Call it after step()."
        elif unused:
            level = "ERROR" if len(unused) == count else "warning"
            yield level, f"{len(unused)} of {count} weights never have a gradient: {unused[0]}."
        empty = [record["step"] for record in steps if are_zeros(record["gradients"])]
        if 2 * len(empty) > len(steps):
            words = f"all gradients are 0 in {len(empty)} of {len(steps)} steps, first in step "
            yield "warning", words + f"{empty[0]}. Has each batch its labels?"
        yield from findings_of_counted_weights(start)
    if total:
        yield "ok", f"{total} weights of all optimizers have gradients"
    yield "not seen", "no weight of an optimizer has a gradient in rank 0"


def findings_of_counted_weights(start):
    """Yields a finding if an optimizer has a weight more than once."""
    twice = [index for index, times in enumerate(start["counts"]) if times > 1]
    if twice:
        words = f"{start['names'][twice[0]]} is {start['counts'][twice[0]]} times in the "
        yield "warning", words + "optimizer, and each step moves it as often. Give it once."


def findings_of_unowned(process):
    """Yields a finding if weights have gradients, and are in no optimizer."""
    old = [*shapes_of_no_module(process)]
    for record in process["unowned"]:
        names = record["names"]
        if not names:
            continue
        words = f"{len(names)} weights with gradients are in no optimizer: {', '.join(names[:3])}"
        if fits(old, record["shapes"]):
            words += f". It has {len(old)} weights of no module in their place: was a layer "
            yield "ERROR", words + "replaced after it was made? Make the optimizer last."
        else:
            words += ". Add or freeze them; make none in forward(), keep no layer in a plain list."
            yield "warning", words


def shapes_of_no_module(process):
    """Yields those of an optimizer's weights that have no gradient, and that no module has."""
    for start, steps in process.optimizers():
        for index in weights_without_gradient(start, steps):
            name = start["names"][index]
            if name == f"parameter {index}" and start["trainable"][index]:
                yield start["shapes"][index]


def fits(old, new):
    """Whether old and new weights form pairs that are alike, but for the first dimension.

    That is the number of outputs. It is the usual reason to replace a last layer.
    """
    return bool(old) and sorted(map(tail_of, old)) == sorted(map(tail_of, new))


def tail_of(shape):
    return [len(shape), *shape[1:]]


def weights_without_gradient(start, steps):
    """Returns the indices of weights in this process that never have a gradient."""
    found = []
    for index, numbers in enumerate(start["numbers"]):
        is_here = numbers > 0  # a weight of a sharded model may be in another rank
        if is_here and all(record["gradients"][index] is None for record in steps):
            found.append(index)
    return found


def are_zeros(hashes):
    present = [number for number in hashes if number is not None]
    return bool(present) and not any(present)


def owners(job):
    """Is each weight in one optimizer alone?"""
    num_weights = num_shared = num_optimizers = 0
    for rank, process in job.ranks.items():
        twice = moved_twice(process)
        if twice:
            name, step = next(iter(twice.values()))
            words = f"two optimizers step on one gradient of {len(twice)} weights, first of {name} "
            words += f"in step {step}, rank {rank}, so that the steps add up. "
            yield "warning", words + "Leave each weight in one optimizer."
            return  # the other ranks have the same finding
        holders = defaultdict(set)  # of each weight: the optimizers that have it
        for record in process["step"]:
            for weight in record["weights"]:
                holders[weight].add(record["object"])
        num_weights = max(num_weights, len(holders))
        num_shared += sum(len(objects) > 1 for objects in holders.values())
        num_optimizers = max(num_optimizers, len(set().union(*holders.values())))
    if num_optimizers > 1 and not num_shared:
        yield "ok", f"{num_optimizers} optimizers have none of {num_weights} weights in common"
    words = "only one optimizer steps, or several share weights, each with its own gradients"
    yield "not seen", words


def moved_twice(process):
    """Returns {weight: (name, step)} of weights that two optimizers move by the same gradient.

    Optimizers may share weights if each has backward passes of its own, as in InfoGAN.
    """
    found, last = {}, {}
    for record in process["step"]:
        names, who = process["start"][record["optimizer"]]["names"], record["object"]
        for index, weight in enumerate(record["weights"]):
            if not pull_of(record, index):
                continue
            gradient = record["gradients"][index]
            before, used = last.get(weight, (who, None))  # who moved it last, and by what
            is_old = gradient == used and not record["had_gradients"]
            if is_old and before != who:
                found.setdefault(weight, (names[index], record["step"]))
            last[weight] = who, gradient
    return found


def accumulation(job):
    """Are gradients zeroed and averaged once a step, not in each micro-batch?"""
    zeroed = 0
    for rank, process in job.ranks.items():
        for _, steps in process.optimizers():
            # Of the first step, it is not known.
            zeroed += sum(record["began"] == "zeroed" for record in steps[1:])
            yield from findings_of_accumulation(rank, steps)
            if len(process["start"]) == 1:
                yield from findings_of_passes(rank, steps)
            if steps and len(job.ranks) > 1 and min(each["averaged"] for each in steps) > 1:
                words = f"DDP averages {steps[0]['averaged']} times a step. Put all passes but "
                yield "warning", words + "the last into no_sync(), forward and backward."
    if zeroed:
        yield "ok", f"gradients are zeroed before each of {zeroed} steps"


def findings_of_accumulation(rank, steps):
    old = [record["step"] for record in steps if record["began"] == "old"]
    if old:
        yield "ERROR", f"not zeroed before step {old[0]}, rank {rank}. Call zero_grad()."
    for before, record in zip(steps, steps[1:]):
        is_same = before["gradients"] == record["gradients"] and any(record["gradients"])
        is_same &= before["object"] == record["object"]  # else owners() judges it
        if is_same and record["began"] == "unchanged":
            words = f"step {record['step']} uses the gradients of the last one, rank {rank}."
            yield "ERROR", words + " Call backward() before it."
            break
    kept = [record["step"] for record in steps if record["keeps"]]
    if len(kept) >= KEPT_STEPS:
        words = f"step {kept[0]} of an optimizer also has gradients of a backward pass after which "
        words += "another one has stepped. Call zero_grad() before its own backward pass, unless "
        yield "warning", words + "they are meant to add up."
    if 2 * sum(record["zeroed_unsynced"] > 0 for record in steps) > len(steps):
        yield "ERROR", "zeroed between the micro-batches: only the last one counts."
    elif 2 * sum(record["zeroed_between"] > 0 for record in steps) > len(steps):
        words = "zeroed between two backward passes. If these are micro-batches, only the last one "
        yield "warning", words + "counts. It is right if steps are left out, or gradients kept."


def findings_of_passes(rank, steps):
    """Yields a finding if a step has more backward passes than others, over two passes of data.

    A step with as many as the others may take them from two passes on purpose. For the first step,
    it is not known whether gradients were zeroed.
    """
    known = steps[1:]
    usual = [len(record["passes"]) for record in known if len({*record["passes"]}) == 1]
    for record in known if 2 * len(usual) > len(known) else ():
        passes = record["passes"]
        if len({*passes}) == 2 and None not in passes and len(passes) > max(usual):
            words = f"step {record['step']} in rank {rank} has gradients of {len(passes)} backward "
            words += f"passes from two passes over the data, others of {max(usual)}: "
            yield "warning", words + "what is left at an epoch's end comes into the next one."
            break


def finite(job):
    """Are losses and gradients finite, and is what is clipped theirs, and unscaled?"""
    yield from findings_of_clipping(job.first)
    num_losses = num_steps = 0
    for rank, process in job.ranks.items():
        known = [record for record in process["loss"] if record["value"] is not None]
        num_losses += len(known)
        num_steps += len(process["step"])
        for record in known:
            if record["value"] - record["value"] != 0:  # inf or nan
                words = f"the loss is {record['value']} in step {record['step'] + 1}, rank {rank}."
                yield "ERROR", words
                break
        for record in process["step"]:
            if record["infinite"]:
                name = process["start"][record["optimizer"]]["names"][record["infinite"][0]]
                words = f"inf or nan in {name}'s gradient, step {record['step']}, rank {rank}."
                yield "ERROR", words
                break
    if num_steps:
        losses_too = f"{num_losses} losses and " if num_losses else ""
        yield "ok", f"{losses_too}the gradients of {num_steps} steps are finite"


def findings_of_clipping(process):
    clipped = [record for record in process["step"] if record["clipped"] != "no"]
    clips = {record["clipped"] for record in clipped}
    in_time = [record for record in clipped if record["clipped"] in ("right", "scaled")]
    empty = [record for record in in_time if record["clip_norm"] == 0 and any(record["gradients"])]
    if "negative" in clips:
        words = "the limit of clipping is negative, which reverses the gradients. "
        yield "ERROR", words + "To clip without a limit, pass inf."
    if any(each["clipped"] == "zero" and are_zeros(each["gradients"]) for each in clipped):
        words = "the limit of clipping is 0, which makes all gradients 0. "
        yield "ERROR", words + "To clip without a limit, pass inf."
    if "nothing" in clips:
        words = "clipping is given a generator of weights that is used up, and clips nothing. "
        yield "ERROR", words + "Give it a list."
    elif empty and len(empty) == len(in_time):
        words = f"clipping finds the norm 0 in all {len(empty)} steps, though gradients are not 0. "
        yield "warning", words + "Which weights is it given? A filter is used up after one use."
    if "scaled" in clips:
        yield "ERROR", "clipped while scaled. Call scaler.unscale_(optimizer) before clipping."
    elif clips == {"outside"} and len(process["start"]) == 1:
        # With several optimizers, another one may have stepped between backward() and clipping.
        yield "warning", "clipped between step() and backward(), in vain. Clip before step()."


def losses(job):
    """Is cross_entropy given logits, and other targets than the inputs themselves?"""
    calls = []
    for process in job.ranks.values():
        calls += process["cross_entropy"]
    steps = {call["step"] for call in calls}
    if calls and steps == {call["step"] for call in calls if call["sums_to_1"]}:
        words = "all classes that cross_entropy is given have the sum 1: is softmax applied twice? "
        yield "warning", words + "Give it logits."
    if calls and steps == {call["step"] for call in calls if call["is_input"]}:
        words = "the targets of cross_entropy are the model's inputs in all steps. Shift them by "
        yield "warning", words + "one, if it is a language model."
    if calls:
        yield "ok", f"cross_entropy is given logits, in {len(calls)} calls"
    yield "not seen", "no loss is cross_entropy"


def schedule(job):
    """Does a schedule step once for each step, after it, and is its rate the one that is used?"""
    first, count, used = job.first, 0, 0
    idle = idle_calls(first)
    for calls in idle.values():
        if len(calls) >= IDLE_CALLS:
            words = f"{calls[0]['name']}.step() is called {len(calls)} times, but its optimizer "
            yield "warning", words + "takes no step. Make the schedule of the one that does."
    for start, steps in first.optimizers():
        number = start["optimizer"]
        calls = [call for call in first["schedule"] if call["optimizer"] == number]
        calls = [call for call in calls if call["scheduler"] not in idle]
        # If schedulers of several types form a chain, only those of the first type count.
        calls = [call for call in calls if call["name"] == calls[0]["name"]]
        skipped = sum(record["optimizer"] in (number, None) for record in first["skipped"])
        count += len(calls)
        if calls:
            yield from findings_of_calls(calls, len(steps), skipped)
        yield from findings_of_rates(steps)
        used += sum(uses_schedule(record) for record in steps)
    if count:
        words = f"schedulers step {count} times"
        yield "ok", words + (f", and the rates of {used} steps are theirs" if used else "")
    yield "not seen", "no scheduler of PyTorch steps"


def idle_calls(process):
    """Returns {scheduler: calls} of those whose optimizer has taken no step until the last call."""
    found = defaultdict(list)
    for call in process["schedule"]:
        found[call["scheduler"]].append(call)
    return {number: calls for number, calls in found.items() if not calls[-1]["is_used"]}


def findings_of_calls(calls, steps, skipped):
    words = f"{calls[0]['name']}.step() is called {len(calls)} times in {steps} steps"
    if calls[0]["caller"].startswith("accelerate"):
        yield "ok", words + ", by Accelerate: plan N times as many steps in it"
    elif len(calls) > SCHEDULE_CALLS * (steps + skipped) + 1:
        yield "ERROR", words + ". Call it once for each step."
    elif calls[0]["step"] == 0:
        words = "it comes before optimizer.step(): the first rate is not used."
        yield "warning", words + " Call it afterwards."


def uses_schedule(record):
    """Whether a scheduler says the rates that a step has used."""
    pairs = [*zip(record["rates"], record["scheduled"])]
    return bool(pairs) and all(abs(rate - said) <= RATE_DIGIT * abs(said) for rate, said in pairs)


def findings_of_rates(steps):
    """Yields a finding for the first group whose rates are not those of the schedule."""
    for group in range(max((len(record["rates"]) for record in steps), default=0)):
        known = [x for x in steps if group < min(len(x["rates"]), len(x["scheduled"]))]
        rates = [(x["step"], x["rates"][group], x["scheduled"][group]) for x in known]
        for level, words in findings_of_group(rates):
            # A group beside the first one may have a rate of its own on purpose.
            yield "warning" if group else level, words
            return


def findings_of_group(used):
    other = [each for each in used if abs(each[1] - each[2]) > RATE_DIGIT * abs(each[2])]
    if not other:
        return
    step, rate, said = other[0]
    words = f"step {step} uses the rate {rate:.4g}, but the schedule says {said:.4g}."
    words += " Is it set elsewhere, too?"
    shares = [rate / said for _, rate, said in used if said]
    is_warm_up = shares == sorted(shares) and max(shares, default=0) <= 1 + RATE_DIGIT
    gaps = [abs(rate - said) for _, rate, said in used]
    is_falling = gaps == sorted(gaps, reverse=True)
    num_used = len({rate for _, rate, _ in used})
    num_said = len({said for _, _, said in used})
    # If both stand still, it may be an epoch of a warm-up that is made by hand.
    if num_used == 1 and num_said > 1:
        yield "ERROR", words
    # In a warm-up, the rate may rise to the scheduled one, or fall to it, as for YOLO's biases.
    elif not (is_warm_up or is_falling):
        yield "warning", words


def precision(job):
    """Are weights fp32 where a flag says so, and does autocast reach the layers?"""
    starts = job.first["start"]
    types = Counter(dtype for start in starts for dtype in start["dtypes"])
    low = [dtype for dtype in types if dtype in TYPES_16]
    flags = flags_of_fp32(job)
    for name, value in flags.items() if low else ():
        yield "ERROR", f"{types[low[0]]} weights are {low[0]}, but {name} is to be {value}."
    is_one = any(record["one_autocast"] and record["step"] > 1 for record in job.first["step"])
    if "float32" in types and is_one:
        yield "ERROR", "one autocast holds all steps, with the first weights. Enter it in each."
    for record in job.all("autocast")[:1]:
        yield "warning", f"autocast is on, but a {record['module']} gives {record['gives']}."
    autocasts = sorted({call["autocast"] for call in job.first["forward"]} - {""})
    words = f"weights are {', '.join(types)}"
    if autocasts:
        yield "ok", f"{words}, with autocast to {', '.join(autocasts)}"
    elif flags:
        yield "ok", f"{words}, as a flag says"
    yield "not seen", "no flag says fp32, and autocast is off"


def flags_of_fp32(job):
    """Returns {name: value} of the flags by which weights are to be fp32."""
    found = {}
    for record in job.all("flags"):
        for name, value in record["values"].items():
            is_fp32 = re.fullmatch(r"(torch\.)?(fp|float)?_?32(-true)?", str(value).lower())
            is_flag = re.fullmatch("(model_|torch_)?(precision|dtype)", name)
            if is_fp32 and is_flag:
                found[name] = value
    return found


# == Layers ==
def modes(job):
    """Do Dropout and BatchNorm train in train(), and validate in eval()?"""
    calls = [call for call in job.first.training_calls() if call["layers"]]
    in_eval = [call for call in calls if call["layers_in_eval"]]
    if in_eval:
        count, step = in_eval[0]["layers_in_eval"], in_eval[0]["step"] + 1
        words = f"{count} layers train in eval() from step {step}. Call train(), also after"
        # If it is so from the start, it may be meant, as in a network with frozen statistics.
        yield "warning" if calls[0]["layers_in_eval"] else "ERROR", words + " validation."
    for call, stands_alone in job.first.test_calls():
        is_training = call["layers_in_eval"] < call["layers"]
        # Before the first step, such a call may set the statistics of BatchNorm.
        if is_training and call["step"] and not stands_alone:
            yield "warning", f"{call['module']} validates in train(). Call model.eval()."
            break
    # What layers within the model do on their own is not looked at.
    count = sum(not call["in_eval"] for call in calls)
    if count:
        yield "ok", f"the model is in train() in {count} calls that train"
    yield "not seen", "no model with Dropout or BatchNorm trains in train()"


def layers(job):
    """Do ranks draw different dropout masks, and none in eval()? Is BatchNorm the same in all?"""
    first = job.first
    tests = [call for call, _ in first.test_calls()]
    tests = [call for call in tests if call["layers_in_eval"] == call["layers"] > 0]
    dropping = [call for call, _ in first.test_calls() if call["drops"]]
    if dropping:
        words = f"{dropping[0]['module']} draws random numbers in eval(), by "
        words += f"{dropping[0]['drops']}(). Give it training=self.training, or the rate 0."
        yield "warning", words
    elif any(call["random"] for call in tests) and not draws_as_before(tests):
        call = next(call for call in tests if call["random"])
        yield "warning", f"{call['module']} draws random numbers in eval(). Is that wanted?"
    for record in first["redrawn"][:1]:
        words = f"random numbers are drawn in the backward pass of step {record['step'] + 1}: "
        yield "warning", words + "recomputed dropout differs. Use preserve_rng_state=True."
    for ranks in job.data_groups:
        yield from findings_of_masks(job, ranks)
        yield from findings_of_norms(job, ranks)
    yield "not seen", "no two ranks draw random numbers in a model"


def draws_as_before(tests):
    """Whether each validation begins with the same random numbers, as by a seed."""
    firsts = {}
    for call in tests:
        firsts.setdefault(call["step"], str(call["random"]))
    return len(firsts) > 1 and len({*firsts.values()}) == 1


def findings_of_masks(job, ranks):
    """Compares the first rank with each other one. One finding is enough, or one row of "ok"."""
    one, total, num_other = ranks[0], 0, 0
    for two in ranks[1:]:
        calls = zip(job.ranks[one].training_calls(), job.ranks[two].training_calls())
        pairs = [(a["random"], b["random"]) for a, b in calls if a["random"] and b["random"]]
        own = [[only_its_own(random) for random in pair] for pair in pairs]
        for each in (pairs, own):
            if each and each[0][0] and all(a == b for a, b in each):
                words = f"ranks {one}, {two} draw the same masks or noise. Seed by rank."
                yield "warning", words
                return
        total += len(pairs)
        num_other += sum(a != b for a, b in pairs)
    if num_other:
        yield "ok", f"ranks {ranks} draw other random numbers in {num_other} of {total} calls"


def findings_of_norms(job, ranks):
    """Yields a finding for the first validation in which another rank has other statistics."""
    for other in ranks[1:]:
        for (a, _), (b, _) in zip(job.ranks[ranks[0]].test_calls(), job.ranks[other].test_calls()):
            if a["norms"] != b["norms"]:
                words = f"BatchNorm's statistics differ in validation after step {a['step']}."
                yield "warning", words + " Call the DDP object, or use SyncBatchNorm."
                return


def only_its_own(random):
    """Returns only the states of the generators that a model holds itself."""
    return {name: states for name, states in random.items() if name.startswith("its ")}


# == Data ==
def shares(job):
    """Does each rank train on samples of its own?"""
    compared = num_equal = 0
    for ranks in job.data_groups:
        for rank in ranks[1:]:
            one, two = job.ranks[ranks[0]], job.ranks[rank]
            mine, theirs = one.samples(), two.samples()
            steps = [step for step in mine if mine[step] and theirs.get(step)]
            equal = [step for step in steps if sorted(mine[step]) == sorted(theirs[step])]
            compared += len(steps)
            num_equal += len(equal)
            yield from findings_of_shares(job, ranks[0], rank, len(equal), len(steps))
    if compared > num_equal:
        yield "ok", f"ranks have other samples in {compared - num_equal} of {compared} steps"
    yield "not seen", "no two ranks get samples of their own"


def findings_of_shares(job, first, second, equal, steps):
    one, two, who = job.ranks[first], job.ranks[second], f"ranks {first} and {second}"
    mine, theirs = first_pass(one), first_pass(two)
    drawn = other = []
    if mine and theirs and is_same_data(mine, theirs):
        drawn = mine["index"][: one.epoch_length(mine)]
        other = theirs["index"][: len(drawn)]
    both = {*drawn} & {*other}
    is_permutation = bool(drawn) and len({*drawn}) == len(drawn) and not mine["replaces"]
    if 2 * equal > steps or (drawn and mine["index"] == theirs["index"]):
        yield "ERROR", f"{who} get the same samples in {equal} steps. Split them."
    elif is_permutation and len(both) >= len(job.ranks):
        # Fewer may be padding, by which all ranks get the same number of samples.
        yield "ERROR", f"{who} share {len(both)} of {len(drawn)} samples. Split one order."


def first_pass(process):
    """Returns the first pass that trains. None: the indices of its samples are not known."""
    for whole in process.passes(process.trained_passes())[:1]:
        return whole if whole["is_known"] else None
    return None


def is_same_data(one, two):
    """Whether an index means the same sample in two passes. None: no index is in both."""
    if one["size"] != two["size"]:
        return False
    return have_same_rows(one, two)


def have_same_rows(one, two):
    """Whether two passes have the same bytes for an index. None: no index is in both."""
    answers = []
    for mine, theirs in zip(one["hashes"], two["hashes"]):
        first, second = dict(zip(one["index"], mine)), dict(zip(two["index"], theirs))
        both = [index for index in first if index in second]
        if both:
            # A column in which all values are equal, as labels may be, tells nothing.
            is_telling = len({first[index] for index in both}) > 1 or len(both) == 1
            answers.append(is_telling and all(first[i] == second[i] for i in both))
    return any(answers) if answers else None


def order(job):
    """Is the order of the samples random, and another one in each epoch?"""
    passes = passes_of_one_data_set(job.first)
    is_known = bool(passes) and passes[0]["is_known"]
    epochs = epochs_of(job.first, passes, is_known)
    first, second, *_ = [*epochs, [], []]
    if first and not is_known and repeats_by_workers(job, passes[0], first):
        words = f"{len({*first})} different samples among {len(first)}. If each worker gives "
        yield "warning", words + "the whole stream, split it by worker."
    elif first and is_known and first == sorted(first) and draws_samples(job, passes[0]):
        yield "not seen", "the data set may draw its samples at random, whatever their order"
    elif first and is_known and first == sorted(first):
        numbers = ", ".join(map(str, first[:4]))
        yield "warning", f"not shuffled: {numbers}, ... If not wanted, shuffle."
    elif second:
        yield compare_epochs(job, first, second, is_known)
    yield "not seen", "no second epoch begins: watch more --steps"


def passes_of_one_data_set(process):
    """Returns the passes that train. Where indices are known, it leaves out those of other data."""
    found = []
    for whole in process.passes(process.trained_passes()):
        first = found[0] if found else whole
        is_one = first["number"] == whole["number"] or is_same_data(first, whole)
        if is_one or not first["is_known"]:
            found.append(whole)
    return found


def repeats_by_workers(job, whole, samples):
    """Whether a stream gives each sample twice or more, and has several workers."""
    fetches = [fetch for fetch in job.all("fetch") if fetch["data"] == whole["data"]]
    workers = {fetch["worker"] for fetch in fetches} - {None}
    return len(workers) > 1 and 2 * len({*samples}) <= len(samples)


def draws_samples(job, whole):
    """Whether a data set may draw its samples at random. If it draws only crops, labels repeat."""
    fetches = [fetch for fetch in job.all("fetch") if fetch["data"] == whole["data"]]
    are_other = [2 * len({*part}) > len(part) for part in whole["hashes"]]
    return any(fetch["random"] for fetch in fetches) and bool(are_other) and all(are_other)


def epochs_of(process, passes, is_known):
    """Returns the indices of the samples of each epoch. If they are not known: hashes."""
    epochs = []
    for whole in passes:
        if is_known and whole["is_known"]:
            length, index = process.epoch_length(passes[0]), whole["index"]
            epochs += [index[i : i + length] for i in range(0, len(index), length)]
        else:
            epochs.append([*zip(*whole["hashes"])])
    return [samples for samples in epochs if len(samples) >= SHUFFLED_SAMPLES]


def compare_epochs(job, first, second, is_known):
    """Returns a row for the order of the samples of two epochs."""
    if all(a == b for a, b in zip(first, second)):
        words = "the first two epochs have one order. Call sampler.set_epoch(epoch)."
        if not is_known:
            words += " In a stream, leave out persistent_workers: they keep their first epoch."
        return "ERROR", words
    if is_known or come_again(job, first, second):
        return "ok", f"another order in the second epoch, compared for {len(second)} samples"
    return "not seen", "the second epoch has other samples than the first, as of augmentation"


def come_again(job, first, second):
    """Whether an epoch has the samples of another one, of which each rank may take a share."""
    return 2 * len({*first} & {*second}) * job.first.start["world"] >= len(second)


def inputs(job):
    """Does each batch have a row for each sample, and is it not all zeros?"""
    count = num_zeros = 0
    for rank, process in job.ranks.items():
        # A batch may be lost between the loader and the model, so the model's inputs are judged.
        modules = {call["number"] for call in process.sample_calls()}
        calls = [call for call in process.training_calls() if call["number"] in modules]
        calls = [call for call in calls if not call["takes_result"]]
        count += len(calls)
        num_zeros += sum(call["is_zero"] for call in calls)
        zeros = sorted({call["step"] + 1 for call in calls if call["is_zero"]})
        steps = {call["step"] for call in calls}
        if 0 < 2 * len(zeros) < len(steps) and process["batch"]:
            yield "ERROR", f"the input of step {zeros[0]} in rank {rank} is all zeros. Lost?"
        odd = odd_batches(process)
        if len(odd) > 1 and odd[0][1] and all(rows == odd[0][1] for _, rows in odd):
            size, rows = odd[0]
            if min(rows) < size:  # a sample may have several rows, such as its negatives
                words = f"{size} samples have a tensor of {min(rows)} row(s). Is it stacked?"
                yield "warning", words
    if count > num_zeros:
        yield "ok", f"{count - num_zeros} of {count} inputs are not all zeros"
    yield "not seen", "no input of a model is known that is not all zeros"


def odd_batches(process):
    """Returns (number of samples, other lengths of tensors) of batches that are trained on."""
    trained, found = process.trained_passes(), []
    for batch in process["batch"]:
        size = len(batch["index"])
        if batch["loader_pass"] in trained and size in batch["rows"]:
            found.append((size, {*batch["rows"]} - {size}))
    return found


def samples(job):
    """Does a data set give the same sample in two validations?"""
    draws = {record["data"] for record in job.all("fetch") if record["random"]}
    repeated = 0
    for process in job.ranks.values():
        seen = {}  # {(type, size, number) of a data set: {index: (hashes, number)}}
        for whole in process.passes(process.tested_passes()):
            if not whole["is_known"]:
                continue
            rows = [*zip(whole["index"], zip(*whole["hashes"]))]
            known = samples_before(seen, whole, rows)
            for index, hashes in rows:
                repeated += index in known
                before, number = known.setdefault(index, (hashes, whole["number"]))
                if before != hashes:
                    words = f"sample {index} of {whole['data']} has other bytes later. "
                    if whole["data"] in draws:
                        why = "Is it augmented? Augment only what is trained on."
                        yield "warning", words + why
                    elif number != whole["number"]:
                        yield "warning", words + "Is it the same data set, made again?"
                    else:
                        yield "ERROR", words + "Copy it. Something writes to it."
                    return
    if repeated:
        yield "ok", f"{repeated} samples were validated again with the same bytes"
    yield "not seen", "no sample is validated twice by a DataLoader"


def samples_before(seen, whole, rows):
    """Returns what is known of the samples of a data set, also if it was made again.

    Then at least half of the samples must be as before, since it may be another one of its type.
    """
    key = (whole["data"], whole["size"], whole["number"])
    if key in seen:
        return seen[key]
    for other, known in seen.items():
        alike = [known[index][0] == hashes for index, hashes in rows if index in known]
        if other[:2] == key[:2] and 0 < len(alike) <= 2 * sum(alike):
            seen[key] = known
            return known
    seen[key] = {}
    return seen[key]


def augmentation(job):
    """Do the random numbers of data sets differ in workers, ranks and epochs?"""
    epochs, compared = drawn_by_place(job), 0
    for key, states in epochs.items():
        generator, data, rank, worker = key
        places = [k for k in epochs if k[:2] == key[:2]]
        alike = [k for k in places if begin_alike(epochs[k][0], states[0])]
        has_epochs = worker is not None and len(states) > 1
        compared += len(places) > 1 or has_epochs
        words = f"{place_of(key)} draws the same numbers"
        if has_epochs and begin_alike(*states[:2]):
            yield "ERROR", f"{words} in each epoch ({generator}). Seed it by torch.initial_seed()."
        if alike[0] != key:
            level = "ERROR" if alike[0][2] == rank else "warning"
            where = f"{place_of(alike[0])} ({generator})"
            yield level, f"{words} as {where}. Seed by rank and worker."
            break
    if compared:
        words = "other random numbers in other workers, ranks or epochs, compared for "
        yield "ok", words + f"{compared} of {len(epochs)} places of data sets"
    yield "not seen", "no data set draws random numbers in two workers, ranks or epochs"


def begin_alike(one, two):
    """Whether two sequences of states are equal as far as both are known."""
    return all(first == second for first, second in zip(one, two))


def place_of(key):
    generator, data, rank, worker = key
    return f"rank {rank}" if worker is None else f"worker {worker} of rank {rank}"


def drawn_by_place(job):
    """Returns {(generator, data set, rank, worker): its states, in a list for each process}."""
    ranks = {process.name: rank for rank, process in job.ranks.items()}
    ours = set()
    for process in job.ranks.values():
        for whole in process.passes(process.trained_passes()):
            ours.add((process.name, whole["data"]))
    drawn = defaultdict(list)
    for process in job.records.processes.values():
        fetches = [each for each in process["fetch"] if each["random"]]
        fetches = [each for each in fetches if (each["parent"], each["data"]) in ours][:FETCHES]
        for generator in fetches[0]["random"] if fetches else ():
            first = fetches[0]
            key = (generator, first["data"], ranks[first["parent"]], first["worker"])
            states = [each["random"].get(generator) for each in fetches]
            drawn[key].append((first["at"], states))
    found = {}
    for key in sorted(drawn, key=str):
        found[key] = [states for _, states in sorted(drawn[key])]
    return found


def validation(job):
    """Does validation count each sample once, and none of those that are trained on?"""
    ranks = job.data_groups[0] if job.data_groups else [*job.ranks]
    tests = []
    for process in [job.ranks[rank] for rank in ranks]:
        tests += process.passes(process.tested_passes())[:1]
    leaked = leaked_samples(job, tests)
    if leaked:
        level = level_of_leak(job, tests[0])
        yield level, f"{leaked} of its samples are trained on. Seed random_split()."
    tests = [whole for whole in tests if is_whole(whole)]
    counts = Counter(index for whole in tests for index in whole["index"])
    if tests and counts:
        yield from findings_of_counts(tests, counts, len(ranks))
        words = f"{len(counts)} samples are validated, by their index"
        words += ", none twice" if max(counts.values()) == 1 else ""
        yield "ok", words + (", and none is trained on" if leaked == 0 else "")
    yield "not seen", "no whole validation by a DataLoader"


def findings_of_counts(tests, counts, num_ranks):
    """Yields a finding if all ranks together validate samples twice, or leave some out."""
    size, twice = tests[0]["size"], len(counts) - [*counts.values()].count(1)
    are_shares = False not in [is_same_data(tests[0], whole) for whole in tests[1:]]
    if tests[0]["maker"] == "accelerate":
        twice = 0  # Accelerate drops the samples that it has added
    is_most = size < MOST * len(counts) < MOST * size
    if twice and are_shares and min(counts.values()) < len(tests):
        yield "warning", f"{twice} of {size} samples count twice. Is it padded?"
    elif is_most and are_shares and len(tests) == num_ranks:
        yield "warning", f"{size - len(counts)} of {size} samples are left out. drop_last?"


def is_whole(validation):
    return validation["has_ended"] and validation["is_known"]


def leaked_samples(job, tests):
    """Returns how many samples of random_split() are both trained on and validated.

    None: they cannot be compared, because it is not known which are trained on.
    """
    if not tests or not tests[0]["split"]:
        return None
    trains = passes_of_split(job, tests[0])
    if not trains or trains[0]["size"] == tests[0]["size"]:
        return None
    trained = {index for whole in trains for index in whole["index"]} - {None}
    tested = {index for whole in tests for index in whole["index"]} - {None}
    return len(trained & tested) if trained and tested else None


def passes_of_split(job, test):
    """Returns the passes that train on another part of the data set of a validation.

    If none is over this data set itself: those over one that is alike, and has the same samples.
    """
    trains = []
    for process in job.ranks.values():
        trains += process.passes(process.trained_passes())
    alike = [whole for whole in trains if whole["split"] == test["split"]]
    same = [whole for whole in alike if whole["number"] == test["number"]]
    return same or [whole for whole in alike if have_same_rows(whole, test)]


def level_of_leak(job, test):
    numbers = {whole["number"] for whole in passes_of_split(job, test)}
    return "ERROR" if test["number"] in numbers else "warning"


def snapshot(job):
    """Does one process write a snapshot, under another name first?"""
    saves, moved = defaultdict(list), {record["path"] for record in job.all("move")}
    for record in job.all("save"):
        saves[record["path"]].append(record["writer"])
    for path, writers in saves.items():
        name, count = os.path.basename(path), len({*writers})
        hosts = {writer.rpartition("-")[0] for writer in writers}
        if count > len(hosts):
            yield "ERROR", f"{count} processes write {name}. Let rank 0 alone write it."
        elif count > 1:
            yield "warning", f"{count} machines write {name}. Has each a disk of its own?"
        elif path not in moved and len(writers) > 1:
            yield "warning", f"{name} is written over in place. Write a .tmp, then move it."
    if saves:
        yield "ok", f"{len(saves)} file(s) of torch.save(), each written by one process"
    yield "not seen", "torch.save() is not called"


# == Two runs ==
def against(job, other):
    """Are the samples and the weights those of another run, as far as rounding lets them?"""
    yield from compare_runs(job, other)


def resume(whole, stopped, again):
    """Does a job that was stopped and started again take the steps of the undisturbed one?"""
    states, done = whole.first.states(0), stopped.steps_done
    if not done:
        yield "not seen", "the run that was to be stopped took no step"
        return
    if done >= max(states):
        yield "not seen", f"stopped only at step {done}: try more --steps"
        return
    if not again.ranks or not again.steps_done:
        yield "ERROR", f"stopped at step {done}, it takes no step. Save all."
        return
    news = again.first.states(0)
    alike = [step for step, record in states.items() if record["bits"] == news[0]["bits"]]
    at = max(alike, default=-1)  # the step after which the job goes on
    if at < 1:
        what = "starts anew" if at == 0 else what_weights(states, news[0])
        yield "ERROR", f"stopped at step {done}, it {what}. Save all."
        return
    yield from findings_of_files(stopped, again)
    advice, is_certain = cause_of_resume(whole, stopped, again, at)
    rows = [*compare_runs(whole, again, at, advice)]
    where = f"stopped after step {done}, it goes on from step {at}"
    saves = [record["step"] for record in stopped.all("save")]
    if saves:
        where += f"; torch.save() was called last after step {max(saves)}"
    for level, words in rows:
        yield level, f"{words} ({where})"
    are_data_apart = any(level == "ERROR" and words.startswith("data") for level, words in rows)
    if are_data_apart and is_certain:
        yield "warning", advice


def what_weights(states, new):
    """Says which steps the weights come from, if no step of the undisturbed run has all of them."""
    unknown, steps = "has weights that the undisturbed run never had", set()
    if len(new["bits"]) != len(states[0]["bits"]):
        return unknown
    for index, bits in enumerate(new["bits"]):
        alike = [step for step, record in states.items() if record["bits"][index] == bits]
        if not alike:
            return unknown
        if len(alike) == 1:  # a weight that stands still has several, and tells nothing
            steps.add(alike[0])
    names = " and ".join(map(str, sorted(steps)))
    return f"has weights of steps {names} at once: were they saved while they moved?"


def findings_of_files(stopped, again):
    """Yields a finding if a later snapshot exists than the one that is read.

    Snapshots belong together if their names differ only in numbers.
    """
    written = {}
    for record in stopped.all("save") + stopped.all("moved"):
        written[record["path"]] = max(record["step"], written.get(record["path"], 0))
    read = {record["path"] for record in again.all("load")} & written.keys()
    if not read:
        return
    path = max(read, key=written.get)
    alike = [each for each in written if without_numbers(each) == without_numbers(path)]
    newest = max(alike, key=written.get)
    if written[newest] > written[path]:
        old, new = os.path.basename(path), os.path.basename(newest)
        words = f"it reads {old}, of step {written[path]}, though {new} is of step "
        yield "warning", words + f"{written[newest]}. Is the newest chosen by its number?"


def without_numbers(path):
    return re.sub(r"\d+", "#", path)


def cause_of_resume(whole, stopped, again, at):
    """Returns why a resumed run may differ, and whether this holds even if its data differ."""
    states, news = whole.first.states(0), again.first.states(0)
    old_types, new_types = types_of(states), types_of(news)
    last = max(states) - at
    pairs = [(states[at + step], news[step]) for step in news if 0 < step <= last]
    if not pairs:
        return "Is all saved?", False
    one, two = pairs[0]
    lost = [
        name for name, value in one["attributes"].items() if two["attributes"].get(name) != value
    ]
    start = again.first.start
    if old_types and not stopped.all("saved"):
        return "The optimizer's state is not saved.", True
    if old_types and not start["states_loaded"]:
        return "The optimizer's state is saved, but not loaded.", True
    if scales_at(again.first, 0) - scales_at(whole.first, at):
        return "The scale of the loss differs: is the GradScaler saved, and loaded?", True
    if any(a["rates"] != b["rates"] for a, b in pairs):
        return "The rate differs: is it saved?", True
    if old_types != new_types:
        types = ", ".join(sorted(old_types ^ new_types))
        return f"The optimizer's state has other types: {types}.", True
    if lost:
        return f"{', '.join(lost[:3])} of the model differs: is it in no state_dict?", False
    if one["gradients"] != two["gradients"]:
        return "Its gradient differs: random numbers, or a state?", False
    if not start["has_loaded"]:
        return "The state is loaded, then the optimizer is made again.", False
    return "Save all states, also those in no state_dict.", False


def scales_at(process, step):
    """Returns the scales of the losses after a step. After step 0, only the first one counts."""
    scales = [record["scale"] for record in process["loss"] if record["step"] == step]
    return {*(scales if step else scales[:1])}


def types_of(states):
    return {*states[max(states)].get("types", [])}


def compare_runs(job, other, skip=0, advice=""):
    """Compares steps of two runs. The other one has begun after `skip` steps of the first."""
    pairs = common_weights(job.first.start, other.first.start) if other.ranks else []
    if not pairs:
        yield "not seen", "the other run took no step, or has other tensors"
        return
    theirs = other.first.states(0)
    level = ""
    if len(pairs) == len(theirs[0]["bits"]):  # else it is a stage of a pipeline
        level, step_of_data, words = compare_samples(job, other, skip)
        if level:
            yield level, words
        if level == "not seen":
            return
    else:
        step_of_data = None
    is_exact = bool(skip) and level != "warning"
    yield compare_weights(job, other, pairs, skip, step_of_data, is_exact, advice)


def compare_samples(job, other, skip):
    """Returns (level, step, words) for the first step whose samples differ.

    The step is None if they differ by rounding. The level is "" if none differs.
    """
    # Where a sample begins in its batch depends on how the batch is split.
    without = job.beginnings() & other.beginnings()
    mine, theirs = job.union("samples", without), other.union("samples", without)
    for step in sorted(step for step in mine if theirs.get(step - skip)):
        old, new = Counter(mine[step]), Counter(theirs[step - skip])
        if old == new:
            continue
        near = sorted(job.union("near", without)[step])
        other_near = sorted(other.union("near", without)[step - skip])
        if old.total() != new.total():
            words = f"data: step {step} takes {new.total()} samples in place of {old.total()}."
            return "ERROR", step, words + " Compare the batch, and steps that a GradScaler skips."
        count = (old - new).total()
        words = f"data: {count} of {old.total()} samples of step {step} are others"
        if distance(near, other_near) < SAMPLES_DIGIT * distance(near):
            return "warning", None, words + ", by rounding: other threads, or another processor?"
        if not skip and not (from_loader(job, step) and from_loader(other, step)):
            words = f"{count} of {old.total()} inputs of step {step} are others, and no DataLoader "
            return "not seen", step, words + "gave them. Let both runs draw the same ones"
        place = place_in_data(mine, theirs) if skip else skip
        if place not in (None, skip):
            words += f". It has the weights of step {skip}, and goes on with the data after step "
            return "ERROR", step, words + f"{place}. Save both at one moment."
        return "ERROR", step, words + ". Compare seed, place in the data, and shares."
    return "", None, ""


def from_loader(job, step):
    """Whether a loader has given the samples of a step, as they are."""
    calls = [call for process in job.ranks.values() for call in process.sample_calls()]
    return all(call["from_loader"] for call in calls if call["step"] + 1 == step)


def draws_of(job, step):
    """Returns what the forward passes of all processes have drawn at random up to a step."""
    calls = [call for call in job.all("forward") if call["has_grad"] and call["step"] < step]
    return {str(call["random"]) for call in calls if call["random"]}


def place_in_data(mine, theirs):
    """Returns the one step after which a run has the samples with which another one begins."""
    steps = sorted(theirs)[:PLACE_STEPS]
    places = []
    for place in range(max(mine)):
        pairs = [(mine.get(place + step, []), theirs[step]) for step in steps]
        if all(sorted(one) == sorted(two) for one, two in pairs):
            places.append(place)
    return places[0] if len(places) == 1 else None


def compare_weights(job, other, pairs, skip, step_of_data, is_exact, advice):
    """Returns a row for the first weight that differs. It stops where the samples differ."""
    compared, found = first_apart(job, other, pairs, skip, step_of_data, is_exact)
    names = job.first.start["names"]
    if found:
        step, index, words = found
        if step and not skip and draws_of(job, step) != draws_of(other, step):
            words = "the model draws random numbers, which are others in the other run. Turn "
            return "not seen", words + "off dropout and noise in both"
        why = "computation: from equal samples," if step else "start:"
        states = job.first.states(0)[step], other.first.states(0)[step - skip]
        rates = [[f"{rate:.6g}" for rate in state.get("rates", ())] for state in states]
        if rates[0] != rates[1]:
            advice = advice or f"Rates: {' and '.join(', '.join(each) for each in rates)}."
        words = f"{why} {names[index]} differs after step {step}{words}"
        advice = advice or "Is a mean taken over unlike shares? Is noise drawn outside?"
        return "ERROR", words + advice
    if not compared:
        return "not seen", "no step of both runs could be compared"
    rounding = "" if skip else ", to rounding"
    count = f"{len(pairs)} of {len(names)} weights"
    return "ok", f"{count} are the same in {compared} steps{rounding}"


def first_apart(job, other, pairs, skip, step_of_data, is_exact):
    """Returns the number of compared steps, and (step, index, words) of the first weight that
    differs, or None.
    """
    mine, theirs = job.first.states(0), other.first.states(0)
    compared = 0
    calls = job.first["forward"] + other.first["forward"]
    autocasts = {call["autocast"] for call in calls}
    for step in sorted(step for step in mine if step - skip in theirs):
        one, two = mine[step], theirs[step - skip]
        if step_of_data and step >= step_of_data:
            break
        if one.get("infinite") and two.get("infinite"):
            break  # from here on both are nan
        compared += step > 0
        before = theirs[0] if step > skip else None
        for index, place in pairs:
            dtype = "exact" if is_exact else job.first.start["dtypes"][index]
            share = share_apart((one, index), (two, place), before, (dtype, *autocasts))
            if share is not None:
                return compared, (step, index, words_of_share(share, before))
    return compared, None


def words_of_share(share, before):
    """Says how far a weight is apart. At the start it has not moved, and there is no `before`."""
    return f", by {share:.0%} of the distance that it has moved. " if before else ". "


def share_apart(mine, theirs, before, types):
    """How far a weight is apart in two runs, as a share of its way. None: by rounding at most.

    `before` is the record of the other run's start. The first type is the weight's own, or "exact"
    if no rounding is allowed. The other types are those of autocast.
    """
    (one, index), (two, place) = mine, theirs
    if one["bits"][index] == two["bits"][place]:
        return None
    own, new = one["sketches"][index], two["sketches"][place]
    size, apart = distance(own), distance(own, new)
    way = distance(new, before["sketches"][place]) if before else START_WAY * size
    share = max(WAY.get(name, WAY["float32"]) for name in types)
    limit = share * way + DIGIT.get(types[0], DIGIT["float32"]) * size
    if types[0] == "exact":
        limit = 0
    return None if apart <= limit else apart / (way or size or 1)


def common_weights(one, two):
    """Returns pairs of indices of weights that both runs have. A pipeline's stage has only some."""
    if one["shapes"] == two["shapes"]:
        return [(index, index) for index in range(len(one["names"]))]
    mine = [str(pair) for pair in zip(one["names"], one["shapes"])]
    theirs = [str(pair) for pair in zip(two["names"], two["shapes"])]
    return [(mine.index(name), theirs.index(name)) for name in mine if name in theirs]


# The rules that judge one job, in this order.
RULES = [
    ending,
    processes,
    weights,
    updates,
    gradients,
    owners,
    accumulation,
    finite,
    losses,
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
KINDS = [*RULES, against, resume]
