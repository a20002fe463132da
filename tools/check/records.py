"""Reads the records of a job. The table at the top of watch.py says what a record holds."""

import json
import os
import re
import socket
from collections import defaultdict, namedtuple

UNKNOWN_PLACE = "an unknown line"

# Ranks that train one model, each a copy or a part of it. `is_split`: a script has split the model
# by hand, and gives all ranks the same data. `has_data`: each rank has samples of its own.
Family = namedtuple("Family", "ranks is_split has_data")


def process_name(pid):
    return f"{socket.gethostname()}-{pid}"


class Process:
    """The records of one process. process["step"] is the list of its records of the kind "step"."""

    def __init__(self, path):
        self.path, self.name = path, path.name
        self.records = defaultdict(list)
        self.offset = 0  # in the file: what was read until now
        self.parent = None

    def __getitem__(self, kind):
        return self.records[kind]

    def read_new(self):
        """Reads the lines that are new and whole. Returns how many there are."""
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            text = file.read()
        lines = text[: text.rfind(b"\n") + 1]
        self.offset += len(lines)
        lines = lines.splitlines()
        for line in lines:
            record = json.loads(line)
            self.records[record["kind"]].append(record)
        return len(lines)

    @property
    def start(self):
        """What was recorded before the first step of its first optimizer."""
        return self["start"][0] if self["start"] else None

    @property
    def steps_done(self):
        return max((record["step"] for record in self["step"]), default=0)

    def optimizers(self):
        """Yields what was recorded at the start of each optimizer's number, and at its steps."""
        for start in self["start"]:
            number = start["optimizer"]
            yield start, [record for record in self["step"] if record["optimizer"] == number]

    def states(self, number):
        """Returns {step: record} of an optimizer and its weights. Step 0 is before all."""
        start, steps = [*self.optimizers()][number]
        return {record["step"]: record for record in [start, *steps]}

    def training_calls(self):
        trained = {record["call"] for record in self["trained"]}
        return [call for call in self["forward"] if call["call"] in trained]

    def sample_calls(self):
        """Those training calls whose inputs are samples.

        Where a loader gives inputs as they are, they are the samples. Else these are the inputs of
        the module that a step calls first, unless they are the results of another one.
        """
        calls = [call for call in self.training_calls() if not call["takes_result"]]
        from_loader = [call for call in calls if call["from_loader"]]
        if from_loader:
            return from_loader
        first = {}  # the module of each step
        for call in calls:
            first.setdefault(call["step"], call["number"])
        return [call for call in calls if call["number"] == first[call["step"]]]

    def samples(self, name="samples", without=()):
        """Returns {step: hashes of the samples that it was trained on}; "near": projections.

        without: the places of columns of a sample that are left out.
        """
        found = defaultdict(list)
        for call in self.sample_calls():
            numbers = call[name] or []
            for place, hashes, near in call["beginnings"]:
                if place in without:
                    numbers = subtract(numbers, hashes if name == "samples" else near)
            found[call["step"]] += numbers
        return found

    def trained_passes(self):
        return {record["loader_pass"] for record in self["loss"]} - {None}

    def tested_passes(self):
        without_grad = [call for call in self["forward"] if not call["has_grad"]]
        tested = {call["loader_pass"] for call in without_grad}
        return tested - self.trained_passes() - {None}

    def passes(self, numbers):
        """Returns what is known of passes over a loader, each as one batch with all indices."""
        found = []
        for number in sorted(numbers):
            batches = [record for record in self["batch"] if record["loader_pass"] == number]
            index = [i for batch in batches for i in batch["index"]]
            columns = zip(*[batch["hashes"] for batch in batches])
            hashes = [sum(column, []) for column in columns]
            whole = batches[0] | {"index": index, "is_known": None not in index}
            whole["hashes"] = [each for each in hashes if len(each) == len(index)]
            whole["has_ended"] = len(batches) == batches[0]["batches"]
            whole["batch_size"] = len(batches[0]["index"])
            found.append(whole)
        return found

    def epoch_length(self, whole):
        """How many samples this process takes in an epoch. A pass may hold several epochs."""
        size, world = whole["size"], self.start["world"]
        of_pass = (whole["batches"] or 0) * whole["batch_size"]
        if of_pass and of_pass * world <= size + world * whole["batch_size"]:
            return of_pass  # the pass is an epoch
        sizes = [len(hashes) for _, hashes in sorted(self.samples().items())]
        size_of_step = sizes[0] if sizes and sizes[0] else whole["batch_size"]
        return size // (size_of_step * world) * size_of_step or size

    def test_calls(self):
        """Yields each call without gradients, and whether it stands alone before a training call.

        A GAN calls its generator like this. Calls in a pass that trains, as of a teacher model, are
        left out. So are calls on zeros, by which a model finds the shapes of its layers.
        """
        trained, calls = self.trained_passes(), self["forward"]
        for call, after in zip(calls, [*calls[1:], {"has_grad": True}]):
            is_test = not call["has_grad"] and call["loader_pass"] not in trained
            if is_test and not call["is_zero"]:
                yield call, call["loader_pass"] is None and after["has_grad"]

    def place(self):
        """Where the process hangs: the innermost line of the script itself."""
        text = self.path.with_name(f"{self.name}.stack").read_text().split("Thread 0x")[-1]
        for path, line, function in re.findall(r'File "(.*)", line (\d+) in (.*)', text):
            is_script = not re.search("site-packages|lib/python|tools_check|<", path)
            if is_script:
                return f"{os.path.basename(path)} line {line} in {function}"
        return UNKNOWN_PLACE


class Records:
    """The records of all processes of a job, in a folder to which they still write."""

    def __init__(self, folder):
        self.folder = folder
        self.processes = {}  # by the name of a file

    def read_new(self):
        """Returns how many records are new."""
        for path in sorted(self.folder.glob("*[0-9]")):
            self.processes.setdefault(path.name, Process(path))
        return sum(process.read_new() for process in self.processes.values())

    def all(self, kind):
        return [record for process in self.processes.values() for record in process[kind]]


def subtract(numbers, others):
    """Subtracts lists. Hashes are whole numbers of 64 bits, whose sums may have wrapped around."""
    pairs = [one - two for one, two in zip(numbers, others)]
    return [pair % 2**64 if isinstance(pair, int) else pair for pair in pairs]


class Job:
    """What is known of a job: `ranks` are the processes that train, `first` is rank 0.

    `status` is that of the command, or None where it was ended.
    """

    def __init__(self, records, status, interrupted_by=""):
        self.records, self.status, self.interrupted_by = records, status, interrupted_by
        self.ranks = self.find_ranks()
        self.first = next(iter(self.ranks.values()), None)
        self.steps_done = max((process.steps_done for process in self.ranks.values()), default=0)
        self.has_ended = bool(self.all("end"))
        world = self.first.start["world"] if self.first else 1
        families = [*self.find_families()]
        self.families = [each for each in families if 1 < len(each.ranks) <= world]
        self.data_groups = [family.ranks for family in self.families if family.has_data]

    def all(self, kind):
        return self.records.all(kind)

    def find_ranks(self):
        """Returns {rank: process}. Processes that do not know of each other get free numbers."""
        ranks = {}
        processes = self.records.processes.values()
        for process in sorted(processes, key=lambda each: each.path.stat().st_ctime):
            if process.start is None:
                continue
            rank = process.start["rank"]
            while process.start["world"] == 1 and rank in ranks:
                rank += 1
            ranks[rank] = process
        return dict(sorted(ranks.items()))

    def prints(self):
        """Whether this is the machine of rank 0, whose command prints the table."""
        parent = self.first["process"][0]["parent"] if self.first else ""
        return not self.first or parent == process_name(os.getpid())

    def is_incomplete(self):
        """Whether a process on another machine may still write."""
        world = self.first.start["world"] if self.first else 1
        return len(self.all("end")) < world

    def beginnings(self):
        """Returns the places of columns that may say in each batch where its samples begin."""
        processes = [self.ranks[rank] for rank in self.ranks_of_samples()]
        calls = [call for process in processes for call in process.sample_calls()]
        places = [{place for place, *_ in call["beginnings"]} for call in calls if call["samples"]]
        return set.intersection(*places) if places else set()

    def ranks_of_samples(self):
        return self.data_groups[0] if self.data_groups else [*self.ranks][:1]

    def union(self, name, without=()):
        """Returns {step: the samples of all ranks}, or their projections. Steps begin at 1."""
        steps = defaultdict(list)
        for rank in self.ranks_of_samples():
            for step, numbers in self.ranks[rank].samples(name, without).items():
                steps[step + 1] += numbers
        return steps

    def find_families(self):
        groups = defaultdict(list)
        for rank, process in self.ranks.items():
            start = process.start
            names = ["names", "shapes", "ddp_ranks", "mesh"]
            if start["sharded_by"] == "FSDP1":
                names.remove("shapes")  # of the shards, which may differ
            groups[str([start[name] for name in names])].append(rank)
        for ranks in groups.values():
            yield from self.families_of(ranks)

    def families_of(self, ranks):
        """Yields the families of ranks whose weights have the same names and shapes."""
        start = self.ranks[ranks[0]].start
        alike = defaultdict(list)  # ranks that start with the same weights
        for rank in ranks:
            alike[str(self.ranks[rank].start["bits"])].append(rank)
        is_averaged = start["ddp_ranks"] or start["mesh"] or len(alike) == 1
        batches = [self.ranks[same[0]].samples() for same in alike.values()]
        have_same_data = bool(batches[0]) and batches.count(batches[0]) == len(batches)
        is_split = not is_averaged and have_same_data
        has_small_groups = any(1 < size < start["world"] for size in start["group_sizes"])
        is_fsdp2 = start["sharded_by"] == "FSDP2" and has_one_dimension(start["parts"])
        has_data = is_fsdp2 or start["sharded_by"] == "FSDP1" or not start["mesh"]
        families = [ranks]
        if is_split:
            yield Family(ranks, is_split=True, has_data=False)
        if is_split or (not is_averaged and has_small_groups):
            families = alike.values()
        for one in families:
            yield Family(one, is_split=False, has_data=has_data)


def has_one_dimension(parts):
    """Whether the weights are split along one dimension of a mesh: then each rank has own data."""
    return {len(part.split()) for part in parts} == {1}
