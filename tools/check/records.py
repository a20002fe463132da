"""Records: what a job has noted."""

import json
import os
import re
import socket
from collections import defaultdict, namedtuple

Family = namedtuple("Family", "ranks is_split has_data")  # that train one model; split by hand?


def process_name(pid):
    return f"{socket.gethostname()}-{pid}"


class Job:  # its `ranks` are the Processes that train, `seen` all, `first` is rank 0
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
            if not re.search("site-packages|lib/python|tools_check_loader|not_to_import|<", path):
                return f"{os.path.basename(path)} line {line} in {function}"
