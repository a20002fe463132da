"""Hold the prediction of predict.py against training on an emulated network."""

import contextlib
import itertools
import json
import os
import re
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import link
import pandas as pd

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))
import predict as foretell  # noqa: E402
import report  # noqa: E402
from fork_server import run_all, torchrun_env  # noqa: E402

# Batch; seconds of forward, backward and optimizer; bytes of the buckets; shares of the backward
# pass. These are of logs on one core of an AMD EPYC.
MODELS = {
    "text, small": (64, 0.0546, 0.1031, 0.0025, (1053712, 10831872), (0.56, 0.44)),
    "text, large": (64, 0.3144, 0.6103, 0.0060, (1054736, 32161792), (0.23, 0.77)),
    "images, mlp": (64, 0.0015, 0.0021, 0.0006, (1071144, 1607680), (0.54, 0.46)),
    "images, cnn": (256, 0.0947, 0.1549, 0.0012, (4724264, 75264), (0.11, 0.89)),
    "gpt, 10 M": (16, 1.0661, 2.124, 0.0117, (1640960, 26240000, 12139520), (0.03, 0.67, 0.3)),
}


@dataclass(frozen=True)
class Case:
    """What is measured for a row of the table."""

    model: str
    mbit: int  # of each node's link
    nodes: int
    each: int = 1  # processes of a node
    scaling: str = "strong"
    slow: int = 1  # the link of the second node is so many times slower
    is_late: bool = False  # the last node begins each backward pass late, by half of one
    name: str = ""  # of what is different, for the table


def with_faults(case):
    """Returns the cases in which something is wrong or different."""
    return [
        replace(case, is_late=True, name=", the last node late"),
        replace(case, slow=4, name=", one link 4 times slower"),
        replace(case, nodes=case.nodes // 2, each=2, name=", 2 processes a node"),
        replace(case, scaling="weak", name=", weak scaling"),
    ]


def with_band(band, script):
    """Returns the text of a script with this band, a text, in place of its own."""
    text = (ROOT / script).read_text()
    _, yours, _ = re.split(r"(?<=\n)(?=# =)", text, maxsplit=2)
    return text.replace(yours, yours.splitlines()[0] + "\n" + band + "\n\n")


class Network:
    """Runs scripts of multinode on nodes: forks of an interpreter that has imported torch.

    Logs and links are files in `folder`, which a picture can be made of.
    """

    def __init__(self, spaces, folder, options):
        self.spaces = spaces
        self.folder = Path(folder).resolve()
        self.options = options
        self.ports = itertools.count(29400)
        self.numbers = itertools.count()
        self.alone = {}  # the run of one process of each model
        self.links = {}
        band = (ROOT / "tests/helpers/sleeping.py").read_text()
        (self.folder / "multinode").mkdir(parents=True)
        for model in MODELS:
            self.sleeper(model).write_text(with_band(band, "multinode/images.py"))
        os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def sleeper(self, model):
        """Returns the script that sleeps in place of this model, named after its task."""
        return self.folder / f"multinode/{model.split(',')[0]}.py"

    def run(self, words, spaces, each):
        """Runs a command with `each` processes on each of these nodes."""
        address = f"10.99.0.{self.spaces.index(spaces[0]) + 1}"
        common = {"MASTER_ADDR": address, "MASTER_PORT": str(next(self.ports))}
        common["GLOO_SOCKET_IFNAME"] = "veth"
        envs = []
        for rank in range(len(spaces) * each):
            network = {"NETWORK": spaces[rank // each]}
            envs.append(torchrun_env(rank, len(spaces), each) | common | network)
        ended = run_all([words] * len(envs), envs, ROOT)
        if any(status != 0 for status, *_ in ended):
            sys.exit(f"failed: {words}: {ended}")

    def measure_link(self, spaces, each=1):
        """Returns what allreduce.py measures. Sending does not slow down who sleeps."""
        words = [ROOT / "multinode/allreduce.py", "--min_bytes", 1 << 20]
        words += ["--max_bytes", self.options.max_bytes, "--seconds", self.options.seconds / 2]
        words += ["--out", path := self.folder / f"{next(self.numbers)}.json"]
        self.run(words, spaces, each)
        measured = json.loads(path.read_text()) | {"compute_rate": 1.0}
        path.write_text(json.dumps(measured))
        return foretell.read_links([path])[0]

    def single(self, model):
        """Returns the run of one process of a model."""
        if model not in self.alone:
            batch, forward, backward, *_ = MODELS[model]
            self.alone[model] = self.train(model, batch, forward + backward, self.spaces[:1])
        return self.alone[model]

    def link(self, mbit, slow=1):
        """Limits the nodes to so many Mbit/s, the second to less; returns what is then measured."""
        link.shape(self.spaces, mbit)
        link.shape(self.spaces[1:2], mbit / slow)
        if (mbit, slow) not in self.links:
            self.links[mbit, slow] = self.measure_link(self.spaces[:2])
        return self.links[mbit, slow]

    def train(self, model, batch, seconds, spaces, each=1, late=0.0, more=()):
        """Returns what report.py knows of a training with steps of so many seconds.

        Its `table` is what predict.py knows of it.
        """
        size, forward, backward, optimizer, sizes, shares = MODELS[model]
        words = ["--forward", forward / size, "--backward", backward / size]
        words += ["--optimizer", optimizer, "--bytes", *sizes, "--shares", *shares]
        steps = self.options.max_steps or max(5, min(50, round(self.options.seconds / seconds)))
        log = self.folder / f"{next(self.numbers)}.jsonl"
        words += ["--batch_size", batch, "--max_steps", 3 + steps, "--log", log, *more]
        last = len(spaces) * each - 1
        slowly = [ROOT / "tests/helpers/slow.py", "backward", last, late] if late else []
        self.run([*slowly, self.sleeper(model), *words], spaces, each)
        rows, notes = report.read_logs([log])
        summary = report.runs_of(rows, notes).iloc[0].to_dict()
        return summary | {"table": foretell.runs_of(rows)}


@contextlib.contextmanager
def network_of(options):
    """Gives a network of as many nodes as the largest case has."""
    if missing := link.what_is_missing():
        sys.exit(missing)
    with tempfile.TemporaryDirectory() as folder, link.nodes(max(options.nodes)) as spaces:
        yield Network(spaces, options.logs or folder, options)


def step_of(single, links):
    """Returns what predict.py needs of this run of one process."""
    [run] = single["table"].to_dict("records")
    return foretell.step_of(run, single["table"], links)


def print_row(*cells):
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def print_errors(errors):
    """Prints the sentence on the relative errors of a table."""
    errors = pd.Series(errors).abs()
    good = f"{(errors < 0.1).sum()} of {len(errors)} are within 10%"
    print(f"\n{good}, the median is off by {errors.median():.1%}.")


def cases_of(options, *columns):
    """Prints the head of a table. Returns the cases without a fault."""
    print_row("model", "Mbit/s", "nodes", *columns)
    print_row(*["---"] * (3 + len(columns)))
    cases = itertools.product(options.mbit, options.nodes, options.models or MODELS)
    return [Case(model, mbit, nodes) for mbit, nodes, model in cases]


def predict(options):
    """Speedup of many nodes: as predict.py says it beforehand, and as it is.

    The nodes are network namespaces with links of these speeds. Their models sleep as long as those
    of MODELS compute, so that the cores of this machine do not matter, and send as many bytes. The
    prediction knows a run of one process, and what multinode/allreduce.py measures on two nodes.
    """
    errors = []
    with network_of(options) as network:
        cases = cases_of(options, "predicted", "measured", "error", "R", "late rank")
        if options.faults:  # on the slowest link, with the most nodes
            cases += with_faults(replace(cases[-1], mbit=options.mbit[0]))
        for case in cases:
            _, _, backward, *_ = MODELS[case.model]
            single, links = network.single(case.model), [network.link(case.mbit, case.slow)]
            if case.each > 1:
                links = [network.measure_link(network.spaces[:2], case.each)]
            processes = case.nodes * case.each
            row = foretell.predict(step_of(single, links), case.scaling, [processes]).iloc[-1]
            late = 0.5 * backward / processes if case.is_late else 0.0
            where = (network.spaces[: case.nodes], case.each, late)
            batch = processes * row["local batch"]
            run = network.train(case.model, batch, row["ms a step"] / 1000, *where)
            speedup = run["samples/s"] / single["samples/s"]
            error = row["speedup"] / speedup - 1
            errors += [error] * (not case.is_late)  # of which the prediction cannot know
            late_rank = run["late rank"] if run["waiting"] > 0.1 * run["sending"] else "-"
            found = (f"{row['speedup']:.2f}", f"{speedup:.2f}", f"{error:+.1%}", f"{run['R']:.2f}")
            print_row(case.model + case.name, case.mbit, case.nodes, *found, late_rank)
    print_errors(errors)


# Of the changes of predict.py those that can be made here: flags, batches, links.
CHANGES = {
    "--comm_hook bf16": (["--comm_hook", "bf16"], 1, 1),
    "twice the batch": ([], 2, 1),
    "a link twice as fast": ([], 1, 2),
}


def changes(options):
    """What would help: how many times as fast predict.py says that it is, and as it is."""
    errors = []
    with network_of(options) as network:
        for case in cases_of(options, "change", "predicted", "measured", "error"):
            step = step_of(network.single(case.model), [network.link(case.mbit)])
            batch = foretell.share_of(step["batch"], case.nodes) * case.nodes
            told, _ = foretell.what_helps(step, case.nodes)
            told = told.set_index("change")
            seconds = told["ms a step"] / 1000
            spaces = network.spaces[: case.nodes]
            now = network.train(case.model, batch, seconds["as it is"], spaces)["samples/s"]
            for change in options.changes:
                flags, times, faster = CHANGES[change]
                link.shape(spaces, case.mbit * faster)
                size = int(batch * times)
                run = network.train(case.model, size, seconds[change], spaces, more=flags)
                gains = told["times as fast"][change], run["samples/s"] / now
                errors.append(gains[0] / gains[1] - 1)
                found = (*(f"{gain:.2f}" for gain in gains), f"{errors[-1]:+.1%}")
                print_row(case.model, case.mbit, case.nodes, change, *found)
    print_errors(errors)
