"""Hold the prediction of predict.py against training on an emulated network."""

import contextlib
import itertools
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import link
import pandas as pd

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))
import predict as foretell  # noqa: E402

# Batch; seconds of forward, backward and optimizer; bytes of the buckets; shares of the backward
# pass. These are of logs on one core of an AMD EPYC.
MODELS = {
    "text, small": (64, 0.0546, 0.1031, 0.0025, (1053712, 10831872), (0.56, 0.44)),
    "text, large": (64, 0.3144, 0.6103, 0.0060, (1054736, 32161792), (0.23, 0.77)),
    "images, mlp": (64, 0.0015, 0.0021, 0.0006, (1071144, 1607680), (0.54, 0.46)),
    "images, cnn": (256, 0.0947, 0.1549, 0.0012, (4724264, 75264), (0.11, 0.89)),
    "gpt, 10 M": (16, 1.0661, 2.124, 0.0117, (1640960, 26240000, 12139520), (0.03, 0.67, 0.3)),
}
# Of the changes of predict.py those that can be made here: flags, batches, links.
CHANGES = {
    "as it is": ([], 1, 1),
    "--comm_hook bf16": (["--comm_hook", "bf16"], 1, 1),
    "twice the batch": ([], 2, 1),
    "a link twice as fast": ([], 1, 2),
}


def with_band(band, script):
    """Returns the text of a script with this band, a text, in place of its own."""
    text = (ROOT / script).read_text()
    _, yours, _ = re.split(r"(?<=\n)(?=# =)", text, maxsplit=2)
    return text.replace(yours, yours.splitlines()[0] + "\n" + band + "\n\n")


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
        band = (ROOT / "tests/helpers/sleeping.py").read_text()
        for name in ("text", "images", "gpt"):
            script = with_band(band, "multinode/images.py")
            (self.folder / f"multinode/{name}.py").write_text(script)
        os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def run(self, nodes, script, *words):
        """Runs a script on so many nodes."""
        ended = link.run(self.spaces[:nodes], script, *words)
        if any(status != 0 for status, *_ in ended):
            sys.exit(f"failed: {words}: {ended}")

    def train(self, model, nodes, batch, seconds, *more):
        """Returns what predict.py knows of a training with steps of so many seconds."""
        size, forward, backward, optimizer, sizes, shares = MODELS[model]
        words = ["--forward", forward / size, "--backward", backward / size]
        words += ["--optimizer", optimizer, "--bytes", *sizes, "--shares", *shares]
        steps = max(5, min(50, round(self.options.seconds / seconds)))
        log = self.folder / f"{next(self.numbers)}.jsonl"
        words += ["--batch_size", batch, "--max_steps", 3 + steps, "--log", log, *more]
        self.run(nodes, self.folder / f"multinode/{model.split(',')[0]}.py", *words)
        return foretell.runs_of(foretell.read_logs([log]))

    def step(self, model, mbit, passes=1):
        """Slows the links. Returns what predict.py needs of one process, and of two nodes' link."""
        link.shape(self.spaces, mbit)
        if (model, passes) not in self.known:
            batch, forward, backward, *_ = MODELS[model]
            words = (passes * batch, passes * (forward + backward), "--grad_accum_steps", passes)
            self.known[model, passes] = self.train(model, 1, *words)
        if mbit not in self.known:
            words = ["--min_bytes", 1 << 20, "--max_bytes", self.options.max_bytes]
            words += ["--seconds", self.options.seconds / 2]
            words += ["--out", path := self.folder / f"{next(self.numbers)}.json"]
            self.run(2, "tools/allreduce.py", *words)
            # Sending does not slow down who sleeps.
            known = json.loads(path.read_text()) | {"compute_rate": 1.0, "each": 1}
            self.known[mbit] = [known]
        known = self.known[model, passes]
        return foretell.step_of(known.to_dict("records")[0], known, self.known[mbit])


@contextlib.contextmanager
def table_of(options, *columns):
    """Gives a network of as many nodes as the largest case has, the cases, and what adds a row.

    A row has how many times as fast something was to be, and was.
    """
    if missing := link.what_is_missing():
        sys.exit(missing)
    errors = []

    def add(*cells):
        *case, predicted, measured = cells
        errors.append(predicted / measured - 1)
        words = [*map(str, case), f"{predicted:.2f}", f"{measured:.2f}", f"{errors[-1]:+.1%}"]
        print("|", " | ".join(words), "|", flush=True)

    names = ["model", "Mbit/s", "nodes", *columns, "predicted", "measured", "error"]
    print("|", " | ".join(names), "|\n|" + " --- |" * len(names), flush=True)
    cases = itertools.product(options.models or MODELS, options.mbit, options.nodes)
    with tempfile.TemporaryDirectory() as folder, link.nodes(max(options.nodes)) as spaces:
        yield Network(spaces, options.logs or folder, options), cases, add
    errors = pd.Series(errors).abs()
    good = f"{(errors < 0.1).sum()} of {len(errors)} are within 10%"
    print(f"\n{good}, the median is off by {errors.median():.1%}.")


def predict(options):
    """Speedup of many nodes: as predict.py says it beforehand, and as it is.

    The nodes are network namespaces with links of these speeds. Their models sleep as long as those
    of MODELS compute, so that the cores of this machine do not matter, and send as many bytes. The
    prediction knows a run of one process, and what tools/allreduce.py measures on two nodes. With
    --grad_accum_steps, the batch grows by that factor, and is sent once.
    """
    with table_of(options, "micro-batches") as (network, cases, add):
        for (model, mbit, nodes), passes in itertools.product(cases, options.grad_accum_steps):
            step = network.step(model, mbit, passes)
            row = foretell.predict(step, "strong", [nodes]).iloc[-1]
            words = (nodes * row["local batch (samples)"], row["step (ms)"] / 1000)
            run = network.train(model, nodes, *words, "--grad_accum_steps", passes)
            [speedup] = run["samples/s"] / network.known[model, passes]["samples/s"]
            add(model, mbit, nodes, passes, row["speedup (x)"], speedup)


def changes(options):
    """What would help: how many times as fast predict.py says that it is, and as it is."""
    with table_of(options, "change") as (network, cases, add):
        for model, mbit, nodes in cases:
            step = network.step(model, mbit)
            batch = round(step["batch"] / nodes) * nodes
            told = foretell.what_helps(step, nodes).set_index("change")
            for change in ["as it is", *options.changes]:
                flags, times, faster = CHANGES[change]
                link.shape(network.spaces, mbit * faster)
                seconds = told["step (ms)"][change] / 1000
                run = network.train(model, nodes, int(batch * times), seconds, *flags)
                [speed] = run["samples/s"]
                if change == "as it is":
                    before = speed
                else:
                    gain = told["gain (x)"][change]
                    add(model, mbit, nodes, change, gain, speed / before)
