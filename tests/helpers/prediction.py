"""Hold the prediction of predict.py against training on an emulated network."""

import itertools
import json
import os
import sys
import tempfile
from pathlib import Path

import link
import pandas as pd
from sleeping import MODELS

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))
import predict as foretell  # noqa: E402

RUN = "# == The run: "  # begins the second section of a script. A later definition counts
SLEEPING = f"from sleeping import batch_loss, create_model, create_optimizer, read_data\n\n{RUN}"
CHANGES = {  # of predict.py: flags, and how many times the batch and the speed of the links
    "as it is": ([], 1, 1),
    "--comm_hook bf16": (["--comm_hook", "bf16"], 1, 1),
    "twice the batch": ([], 2, 1),
    "a link twice as fast": ([], 1, 2),
}
COLUMNS = ["model", "Mbit/s", "nodes", "micro-batches", "change", "cores busy"]
COLUMNS += ["predicted", "measured", "error"]
MOST = 0.6  # of the cores' time, taken by all-reduces alone: above it, a training waits for cores


class Network:
    """Nodes of one process, which fork from one that has torch. Logs and links are in `folder`."""

    def __init__(self, spaces, folder, options):
        self.spaces, self.options = spaces, options
        self.folder = Path(folder).resolve()
        self.numbers = itertools.count()  # of its files
        self.known = {}  # what predict.py knows: the run of one process by model, the link by speed
        self.script = self.folder / "multinode/sleeper.py"
        self.script.parent.mkdir(parents=True)
        self.script.write_text((ROOT / "multinode/images.py").read_text().replace(RUN, SLEEPING))
        os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def run(self, nodes, script, *words):
        """Runs a script on so many nodes."""
        ended = link.run(self.spaces[:nodes], script, *words)
        if any(status != 0 for status, *_ in ended):
            sys.exit(f"failed: {words}: {ended}")

    def train(self, model, nodes, batch, seconds, *more):
        """Returns what predict.py knows of a training with steps of so many seconds."""
        steps = max(5, min(50, round(self.options.seconds / seconds)))
        log = self.folder / f"{next(self.numbers)}.jsonl"
        words = ["--model", model, "--batch_size", batch, "--max_steps", 3 + steps, "--log", log]
        self.run(nodes, self.script, *words, *more)
        return foretell.timed_steps(foretell.read_logs([log]))

    def one_process(self, model, passes):
        """Returns the run of one process, with so many micro-batches."""
        if (model, passes) not in self.known:
            batch, forward, backward, *_ = MODELS[model]
            words = (passes * batch, passes * (forward + backward), "--grad_accum_steps", passes)
            self.known[model, passes] = self.train(model, 1, *words)
        return self.known[model, passes]

    def link_of(self, nodes):
        """Returns what tools/allreduce.py measures on so many nodes."""
        path = self.folder / f"{next(self.numbers)}.json"
        words = ["--min_bytes", 1 << 20, "--max_bytes", self.options.max_bytes]
        words += ["--seconds", self.options.seconds / 2, "--out", path]
        self.run(nodes, "tools/allreduce.py", *words)
        # Sending does not slow down who sleeps.
        return json.loads(path.read_text()) | {"compute_rate": 1.0, "each": 1}

    def link_of_two(self, mbit):
        """Returns the link that predict.py knows: that of two nodes, at so many Mbit/s."""
        if mbit not in self.known:
            self.known[mbit] = self.link_of(2)
        return self.known[mbit]

    def busy_of(self, mbit, nodes):
        """Returns which share of this machine's cores all-reduces on so many nodes take.

        Nothing else runs. Where they take much, a training must wait for cores, and not for links.
        """
        if (mbit, nodes) not in self.known:
            link.shape(self.spaces, mbit)
            before = ticks_of_cores()
            self.link_of(nodes)
            idle, total = [after - was for after, was in zip(ticks_of_cores(), before)]
            self.known[mbit, nodes] = 1 - idle / total
        return self.known[mbit, nodes]

    def compare(self, model, mbit, nodes, passes, change):
        """Returns the speedup of many nodes: as predict.py says it beforehand, and as it is."""
        flags, times, faster = CHANGES[change]
        link.shape(self.spaces, mbit)
        one = self.one_process(model, passes)
        step = foretell.step_of(one.to_dict("records")[0], one, [self.link_of_two(mbit)])
        told = foretell.what_helps(step, nodes).set_index("change").loc[change]
        link.shape(self.spaces, mbit * faster)
        batch = nodes * round(step["batch"] * times / nodes)
        words = (batch, told["step (ms)"] / 1000, "--grad_accum_steps", passes, *flags)
        speeds = told["samples/s"], self.train(model, nodes, *words)["samples/s"].item()
        return [speed / one["samples/s"].item() for speed in speeds]


def ticks_of_cores():
    """Returns how long all cores were idle, and how long there were cores, since the start."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def predict(options):
    """Prints a row for each case: how many times as fast as one process it was to be, and was.

    The nodes are network namespaces with links of these speeds. Their models sleep as long as those
    of MODELS compute, so that the cores of this machine do not matter, and send as many bytes. With
    --grad_accum_steps, the batch grows by that factor, and is sent once.

    The column "cores busy" tells which share of the cores all-reduces alone take on these links. It
    is measured first. So a row that this machine is too slow for is marked before it is predicted.
    """
    if missing := link.what_is_missing():
        sys.exit(missing)
    cases = [options.mbit, options.nodes, options.grad_accum_steps, options.changes]
    rows = []
    with tempfile.TemporaryDirectory() as folder, link.nodes(max(options.nodes)) as spaces:
        network = Network(spaces, options.logs or folder, options)
        print("|", " | ".join(COLUMNS), "|\n|" + " --- |" * len(COLUMNS), flush=True)
        for case in itertools.product(options.models or MODELS, *cases):
            _, mbit, nodes, _, change = case
            busy = network.busy_of(mbit * CHANGES[change][2], nodes)
            mark = ", too fast" if busy > MOST else ""
            predicted, measured = network.compare(*case)
            error = predicted / measured - 1
            rows.append({"error": abs(error), "is_too_fast": busy > MOST})
            cells = [*case, f"{busy:.0%}{mark}", f"{predicted:.2f}", f"{measured:.2f}"]
            print("|", " | ".join(map(str, [*cells, f"{error:+.1%}"])), "|", flush=True)
    rows = pd.DataFrame(rows)
    for is_too_fast, part in rows.groupby("is_too_fast"):
        which = "too fast for this machine" if is_too_fast else "that this machine can carry"
        good = f"{(part['error'] < 0.1).sum()} of {len(part)} are within 10%"
        print(f"\nLinks {which}: {good}, the median is off by {part['error'].median():.1%}.")
