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
CHANGES = {  # of predict.py, those that can be made here: flags, and how many times the batch
    "as it is": ([], 1),
    "--comm_hook bf16": (["--comm_hook", "bf16"], 1),
    "twice the batch": ([], 2),
}


class Network:
    """Runs scripts of multinode on nodes of one process, which fork from one that has torch.

    Logs and links are files in `folder`, which a picture can be made of.
    """

    def __init__(self, spaces, folder, options):
        self.spaces = spaces
        self.folder = Path(folder).resolve()
        self.options = options
        self.numbers = itertools.count()
        self.known = {}  # what predict.py knows: the run of one process by model, the link by speed
        (self.folder / "multinode").mkdir(parents=True)
        script = (ROOT / "multinode/images.py").read_text().replace(RUN, SLEEPING)
        for name in ("text", "images", "gpt"):
            (self.folder / f"multinode/{name}.py").write_text(script)
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
        script = self.folder / f"multinode/{model.split(',')[0]}.py"
        self.run(nodes, script, *words, *more)
        return foretell.runs_of(foretell.read_logs([log]))

    def step(self, model, mbit, passes=1):
        """Slows the links. Returns what predict.py needs of one process, and of two nodes' link."""
        link.shape(self.spaces, mbit)
        if (model, passes) not in self.known:
            batch, forward, backward, *_ = MODELS[model]
            words = (passes * batch, passes * (forward + backward), "--grad_accum_steps", passes)
            self.known[model, passes] = self.train(model, 1, *words)
        if mbit not in self.known:
            path = self.folder / f"{next(self.numbers)}.json"
            words = ["--min_bytes", 1 << 20, "--max_bytes", self.options.max_bytes]
            words += ["--seconds", self.options.seconds / 2, "--out", path]
            self.run(2, "tools/allreduce.py", *words)
            # Sending does not slow down who sleeps.
            known = json.loads(path.read_text()) | {"compute_rate": 1.0, "each": 1}
            self.known[mbit] = [known]
        known = self.known[model, passes]
        return foretell.step_of(known.to_dict("records")[0], known, self.known[mbit])


def predict(network, model, mbit, nodes):
    """Speedup of many nodes: as predict.py says it beforehand, and as it is.

    The prediction knows a run of one process, and what tools/allreduce.py measures on two nodes.
    With --grad_accum_steps, the batch grows by that factor, and is sent once.
    """
    for passes in network.options.grad_accum_steps:
        step = network.step(model, mbit, passes)
        row = foretell.predict(step, "strong", [nodes]).iloc[-1]
        words = (nodes * row["local batch (samples)"], row["step (ms)"] / 1000)
        run = network.train(model, nodes, *words, "--grad_accum_steps", passes)
        [speedup] = run["samples/s"] / network.known[model, passes]["samples/s"]
        yield passes, row["speedup (x)"], speedup


def changes(network, model, mbit, nodes):
    """What would help: how many times as fast predict.py says that it is, and as it is."""
    step = network.step(model, mbit)
    batch = round(step["batch"] / nodes) * nodes
    told = foretell.what_helps(step, nodes).set_index("change")
    speeds = {}
    for change, (flags, times) in CHANGES.items():
        seconds = told["step (ms)"][change] / 1000
        [speeds[change]] = network.train(model, nodes, batch * times, seconds, *flags)["samples/s"]
        if change != "as it is":
            yield change, told["gain (x)"][change], speeds[change] / speeds["as it is"]


def compare(options):
    """Prints a row for each case: how many times as fast something was to be, and was.

    The nodes are network namespaces with links of these speeds. Their models sleep as long as those
    of MODELS compute, so that the cores of this machine do not matter, and send as many bytes.
    """
    if missing := link.what_is_missing():
        sys.exit(missing)
    column, measure = {
        "predict": ("micro-batches", predict),
        "changes": ("change", changes),
    }[options.command]
    names = ["model", "Mbit/s", "nodes", column, "predicted", "measured", "error"]
    print("|", " | ".join(names), "|\n|" + " --- |" * len(names), flush=True)
    errors = []
    with tempfile.TemporaryDirectory() as folder, link.nodes(max(options.nodes)) as spaces:
        network = Network(spaces, options.logs or folder, options)
        for case in itertools.product(options.models or MODELS, options.mbit, options.nodes):
            for name, predicted, measured in measure(network, *case):
                errors.append(predicted / measured - 1)
                cells = [*case, name, f"{predicted:.2f}", f"{measured:.2f}", f"{errors[-1]:+.1%}"]
                print("|", " | ".join(map(str, cells)), "|", flush=True)
    errors = pd.Series(errors).abs()
    good = f"{(errors < 0.1).sum()} of {len(errors)} are within 10%"
    print(f"\n{good}, the median is off by {errors.median():.1%}.")
