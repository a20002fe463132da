"""Hold report.py's prediction against training on a network that this machine pretends to have."""

import itertools
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import link
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))
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

    def name(self):
        words = [self.model]
        words += [f"{self.each} processes a node"] * (self.each > 1)
        words += ["weak scaling"] * (self.scaling == "weak")
        words += [f"one link {self.slow} times slower"] * (self.slow > 1)
        words += ["the last node late"] * self.is_late
        return ", ".join(words)


def with_band(band, script):
    """Returns the text of a script with this band, a text, in place of its own."""
    text = (ROOT / script).read_text()
    _, yours, _ = re.split(r"(?<=\n)(?=# =)", text, maxsplit=2)
    return text.replace(yours, yours.splitlines()[0] + "\n" + band + "\n\n")


class Network:
    """Runs scripts of multinode on nodes: forks of an interpreter that has imported torch."""

    def __init__(self, spaces, folder, options):
        self.spaces = spaces
        self.options = options
        self.ports = itertools.count(29400)
        self.files = map("{}/{}".format, itertools.repeat(folder), itertools.count())
        self.sleeper = Path(folder, "multinode/images.py")
        self.sleeper.parent.mkdir()
        band = (ROOT / "tests/bands/sleeping.py").read_text()
        self.sleeper.write_text(with_band(band, "multinode/images.py"))
        os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

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
        words += ["--out", path := next(self.files)]
        self.run(words, spaces, each)
        return report.read_links([path])[0] | {"compute_rate": 1.0}

    def train(self, model, batch, seconds, spaces, each=1, late=0.0):
        """Returns report.py's summary of a training whose steps take about so many seconds."""
        size, forward, backward, optimizer, sizes, shares = MODELS[model]
        words = ["--forward", forward / size, "--backward", backward / size]
        words += ["--optimizer", optimizer, "--bytes", *sizes, "--shares", *shares]
        steps = self.options.max_steps or max(5, min(50, round(self.options.seconds / seconds)))
        words += ["--batch_size", batch, "--max_steps", steps, "--log", log := next(self.files)]
        last = len(spaces) * each - 1
        slowly = [ROOT / "tests/slow.py", "backward", last, late] if late else []
        self.run([*slowly, self.sleeper, *words], spaces, each)
        rows, notes = report.read_logs([Path(log)])
        return report.runs_of(rows, notes)[0]


def cases_of(options):
    """Yields the cases, those with faults last."""
    models = options.models or list(MODELS)
    for mbit, nodes, model in itertools.product(options.mbit, options.nodes, models):
        yield Case(model, mbit, nodes)
    if options.faults:
        most, model = options.nodes[-1], models[-1]
        yield Case(model, options.mbit[0], most, is_late=True)
        yield Case(model, options.mbit[0], most, slow=4)
        yield Case(model, options.mbit[0], most // 2, each=2)
        yield Case(model, options.mbit[0], most, scaling="weak")


def predict(options):
    """Speedup of many nodes: as report.py says it beforehand, and as it is.

    The nodes are network namespaces with links of these speeds. Their models sleep as long as those
    of MODELS compute, so that the cores of this machine do not matter, and send as many bytes. The
    prediction knows a run of one process, and what multinode/allreduce.py measures on two nodes.
    """
    if missing := link.what_is_missing():
        sys.exit(missing)
    cases = list(cases_of(options))
    alone = {}  # the run of one process of each model
    links = {}
    points = {}  # of the picture
    print("| model | Mbit/s | nodes | predicted | measured | error | R | late rank |")
    print("|" + " --- |" * 8, flush=True)
    with tempfile.TemporaryDirectory() as folder, link.nodes(max(options.nodes)) as spaces:
        network = Network(spaces, folder, options)
        start = time.monotonic()
        for number, case in enumerate(cases, start=1):
            batch, forward, backward, *_ = MODELS[case.model]
            if case.model not in alone:
                alone[case.model] = network.train(case.model, batch, forward + backward, spaces[:1])
            single = alone[case.model]
            link.shape(spaces, case.mbit)
            link.shape(spaces[1:2], case.mbit / case.slow)
            if (case.mbit, case.slow) not in links:
                links[case.mbit, case.slow] = network.measure_link(spaces[:2])
            used = [links[case.mbit, case.slow]]
            if case.each > 1:
                used.append(network.measure_link(spaces[:1], case.each))
            gpus_per_node = case.each if case.each > 1 else 0
            step = report.step_of(single, [single])
            foretold = report.predict(step, case.scaling, used, gpus_per_node)
            processes = case.nodes * case.each
            row = foretold[foretold["processes"] == processes].iloc[0]
            batch *= processes if case.scaling == "weak" else 1
            late = 0.5 * backward / processes if case.is_late else 0.0
            where = (spaces[: case.nodes], case.each, late)
            run = network.train(case.model, batch, row["ms a step"] / 1000, *where)
            speedup = run["samples/s"] / single["samples/s"]
            error = row["speedup"] / speedup - 1
            is_late = run["waiting"] > 0.1 * run["sending"]
            late_rank = run["late rank"] if is_late else "-"
            cells = [case.name(), case.mbit, case.nodes, f"{row['speedup']:.2f}", f"{speedup:.2f}"]
            cells += [f"{error:+.1%}", f"{run['R']:.2f}", late_rank]
            print("|", " | ".join(map(str, cells)), "|", flush=True)
            left = (time.monotonic() - start) / number * (len(cases) - number) / 60
            print(f"{number} of {len(cases)}, about {left:.0f} min left", file=sys.stderr)
            if case == Case(case.model, case.mbit, case.nodes):
                points.setdefault(case.nodes, []).append((run["R"], speedup))
    draw_speedups(points, options.picture)


def draw_speedups(points, path):
    """Draws speedups over R, {nodes: [(R, speedup)]}, beside those without overlap."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    found = [r for values in points.values() for r, _ in values]
    line = np.geomspace(min(found) / 1.3, max(found) * 1.3)
    styles = ("o", "#D55E00"), ("^", "#0072B2"), ("s", "#009E73")
    for (nodes, values), (mark, colour) in zip(points.items(), styles):
        axes.plot(line, nodes * line / (1 + line), color=colour)
        axes.plot(*zip(*values), mark, color=colour, label=f"{nodes} nodes")
    axes.plot([], [], color="grey", label="N R / (1 + R): nothing hidden")
    axes.axhline(1, color="grey", linestyle=":")
    axes.axvline(3, color="grey", linestyle=":")
    axes.set(xscale="log", xlabel="R = compute / sending", ylabel="speedup")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
