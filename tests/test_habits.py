"""PyTorch's own habits work in a first part: each was a silent fault somewhere, once."""

import re

import numpy as np
import pytest
import torch
from conftest import assert_same_weights, curve, load, replaced
from prediction import with_band
from test_examples import LAUNCHES
from test_project import block_with

MODEL = "def create_model("
OPTIMIZER = "return torch.optim.SGD(model.parameters(), args.learning_rate, momentum=0.9)"
NETWORK = "return nn.Sequential(nn.Linear(len(features), 16), nn.ReLU(), nn.Linear(16, 1))"
DATA = "return [Subset(data, part.indices) for part in parts]"
LOSS = "features, targets = batch\n"
WEIGHTED = """weights = 1.0 / (1 + torch.arange(len(data)) % 3)
    return list(torch.utils.data.WeightedRandomSampler(weights, len(data)))"""
DRAWN = {"permutation": "return torch.randperm(len(data))", "sampler": WEIGHTED}


@pytest.fixture(scope="module")
def plain(run, table_band, tmp_path_factory):
    """The loss curve of the table as it is."""
    (script := tmp_path_factory.mktemp("plain") / "multigpu/mine.py").parent.mkdir()
    script.write_text(with_band(table_band, "multigpu/images.py"))
    run(script, "--log", script.with_suffix(".jsonl"), processes=2)
    return curve(script.with_suffix(".jsonl"))


@pytest.mark.parametrize("name", DRAWN)
def test_an_order_without_a_seed_is_the_same_in_all_processes(
    run, table_band, paste, tmp_path, name
):
    """One loss curve on 1, 2 and 3 processes, with workers and without."""
    order = f"def training_order(data, args, epoch):\n    {DRAWN[name]}\n\n\n{MODEL}"
    band = replaced(table_band, {MODEL: order})
    curves = []
    for (folder, processes), workers in zip(LAUNCHES, (0, 1, 0)):
        log = tmp_path / f"{folder}.jsonl"
        run(paste(band, folder), "--log", log, "--num_workers", workers, processes=processes)
        curves.append(curve(log))
    for each in curves[1:]:
        np.testing.assert_allclose(each, curves[0], rtol=1e-5)


@pytest.mark.parametrize("workers", (0, 2))
def test_an_order_without_a_seed_is_the_same_after_a_resume(
    attempt, run, table_band, paste, tmp_path, workers
):
    """Stopped within an epoch, with dropout: the weights of an undisturbed run, bit for bit."""
    dropout = NETWORK.replace("nn.ReLU()", "nn.Dropout(0.5)")
    order = f"def training_order(data, args, epoch):\n    {DRAWN['sampler']}\n\n\n{MODEL}"
    band = replaced(table_band, {MODEL: order, NETWORK: dropout})
    stop = "steps = globals().setdefault('steps', [])\n    steps.append(time.sleep(0.1))\n"
    stop += "    if len(steps) == 26:\n        os.kill(os.getpid(), signal.SIGTERM)\n"
    cut, whole = tmp_path / "cut.pt", tmp_path / "whole.pt"
    words = ("--epochs", 3, "--num_workers", workers, "--snapshot")
    status, out, err = attempt(paste(replaced(band, {LOSS: f"{stop}    {LOSS}"})), *words, cut)
    assert status == 75 and 20 < load(cut)["step"] < 40, (out, err)
    script = paste(band)
    run(script, *words, cut)
    run(script, *words, whole)
    assert_same_weights(cut, whole)


def test_a_group_keeps_its_own_rate(run, table_band, paste, tmp_path):
    """With rate 0 the first layer stays as it is; without groups it moves."""
    groups = """groups = [{"params": model[0].parameters(), "lr": 0.0}]
    groups.append({"params": model[2].parameters(), "lr": 2 * args.learning_rate})
    return torch.optim.SGD(groups)"""
    script = paste(replaced(table_band, {OPTIMIZER: groups}), "multigpu")
    weights = []
    for epochs in (1, 3):
        snapshot = tmp_path / f"{epochs}.pt"
        run(script, "--epochs", epochs, "--snapshot", snapshot, processes=2)
        weights.append(load(snapshot)["model"])
    assert torch.equal(weights[0]["0.weight"], weights[1]["0.weight"])
    assert not torch.equal(weights[0]["2.weight"], weights[1]["2.weight"])


NAMED = """class Named(torch.utils.data.Dataset):
        def __len__(self):
            return len(data)
        def __getitem__(self, index):
            return Sample(*data[index])
    return [Subset(Named(), part.indices) for part in parts]"""
PACKED = """class Packed(torch.utils.data.Dataset):
        def __init__(self, part):
            self.part = part
        def __len__(self):
            return len(self.part)
        def __getitem__(self, index):
            return self.part[index]
        def __getitems__(self, indices):
            features, targets = zip(*(self.part[index] for index in indices))
            packed = nn.utils.rnn.pack_sequence(features, enforce_sorted=False)
            return packed, torch.stack(targets)
    return [Packed(Subset(data, part.indices)) for part in parts]"""
BARE = """class Bare(Subset):
        def __getitems__(self, indices):
            features, targets = zip(*super().__getitems__(indices))
            return torch.cat((torch.stack(features), torch.stack(targets)), 1)
    return [Bare(data, part.indices) for part in parts]"""
BATCHES = {
    "bare tensor": (BARE, "features, targets = batch[:, :-1], batch[:, -1:]\n"),
    "named tuple": (NAMED, "features, targets = batch.features, batch.targets\n"),
    "packed sequence": (
        PACKED,
        "packed, targets = batch\n"
        "    features = torch.stack(nn.utils.rnn.unpack_sequence(packed))\n",
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_stays_what_the_data_makes_of_it(run, table_band, paste, plain, tmp_path, name):
    data, loss = BATCHES[name]
    sample = "Sample = __import__('collections').namedtuple('Sample', 'features targets')\n\n\n"
    changes = {DATA: data, LOSS: loss, "def parse_args": f"{sample}def parse_args"}
    script, log = paste(replaced(table_band, changes), "multigpu"), tmp_path / "log.jsonl"
    run(script, "--log", log, processes=2)
    np.testing.assert_allclose(curve(log), plain, rtol=1e-6)


FACTOR = "return (1 + math.cos(math.pi * done)) / 2"
TWO = """class Two(torch.optim.Optimizer):
        def __init__(self, *parts):
            super().__init__([group for part in parts for group in part.param_groups], {})
            self.parts = parts
        def step(self, closure=None):
            for group in self.param_groups:
                group["lr"] *= (1 + math.cos(math.pi * args.done)) / 2
            for part in self.parts:
                part.step()
    layers = [layer.parameters() for layer in (model[0], model[2])]
    return Two(*(torch.optim.SGD(each, args.learning_rate, momentum=0.9) for each in layers))"""


def test_an_optimizer_of_several_with_rates_of_its_own(run, table_band, paste, plain, tmp_path):
    """learning_rate_factor notes how far the training is, and step() scales the rates."""
    changes = {FACTOR: "args.done = done\n    return 1.0", OPTIMIZER: TWO}
    script, log = paste(replaced(table_band, changes), "multigpu"), tmp_path / "log.jsonl"
    run(script, "--log", log, processes=2)
    np.testing.assert_allclose(curve(log), plain, rtol=1e-6)


def test_several_optimizers_survive_a_resume(run, table_band, paste, tmp_path):
    """README's class: the weights of an undisturbed run, with the rates that the run has set."""
    several = """layers = [layer.parameters() for layer in (model[0], model[2])]
    adam = torch.optim.Adam(layers[0], args.learning_rate)
    return Several(adam, torch.optim.SGD(layers[1], args.learning_rate, momentum=0.9))"""
    first = f"{block_with('class Several')}\n\ndef parse_args"
    noted = "args.done, args.note = done, lambda: done\n    return 0.5"
    changes = {OPTIMIZER: several, FACTOR: noted, LOSS: f"assert args.done > 0\n    {LOSS}"}
    script = paste(replaced(table_band, changes | {"def parse_args": first}), "multigpu")
    for steps, name in ((20, "cut"), (40, "cut"), (40, "whole")):
        more = ("--max_steps", steps, "--snapshot", tmp_path / f"{name}.pt")
        run(script, *more, processes=2)
        if steps == 20:  # it goes on with a validation, as after a crash in the one before
            due = torch.load(tmp_path / "cut.pt", weights_only=True)
            due["progress"] |= {"row_step": 0, "totals": {"loss": 1.0, "mae": 1.0, "count": 1.0}}
            torch.save(due, tmp_path / "cut.pt")
    assert_same_weights(tmp_path / "cut.pt", tmp_path / "whole.pt")
    assert len(load(tmp_path / "cut.pt")["optimizer"]["state"]) == 4  # of two layers
    assert "done" not in load(tmp_path / "cut.pt")["settings"]


def test_sparse_gradients_train(run, table_band, paste, tmp_path):
    """Two processes as one, though the stopwatch counts the bytes of gradients."""
    bag = """class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.EmbeddingBag(100, 1, mode="sum", sparse=True)
        def forward(self, features):
            return self.embedding((features * 10).long().clamp(-50, 49) + 50)
    return Bag()"""
    plain = OPTIMIZER.replace(", momentum=0.9", "")
    band = replaced(table_band, {NETWORK: bag, OPTIMIZER: plain})
    curves = []
    for folder, processes in LAUNCHES[:2]:
        log = tmp_path / f"{folder}.jsonl"
        run(paste(band, folder), "--log", log, processes=processes)
        curves.append(curve(log))
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-5)


def test_buffers_that_ddp_ignores_are_left_alone(run, table_band, paste, plain, tmp_path):
    """One of a type that gloo cannot send, and one whose rows share their memory."""
    network = f"""network = {NETWORK.removeprefix("return ")}
    network.register_buffer("table", torch.arange(64).expand(4096, 64))
    network.register_buffer("short", torch.arange(8, dtype=torch.int16))
    network._ddp_params_and_buffers_to_ignore = ["table", "short"]
    return network"""
    script = paste(replaced(table_band, {NETWORK: network}), "multigpu")
    log = tmp_path / "log.jsonl"
    run(script, "--log", log, processes=3)
    np.testing.assert_allclose(curve(log), plain, rtol=1e-5)


CENTRE = """class Centre(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(len(features)))
        def forward(self, x):
            if self.training:
                self.mean.lerp_(x.mean(0), 0.1)
            return x - self.mean
    return nn.Sequential(Centre(), *LAYERS)"""


def test_a_buffer_that_training_reads(run, table_band, paste, tmp_path):
    """DDP sends that of rank 0 before each step, in place of each validation, as README says."""
    network = CENTRE.replace("LAYERS", NETWORK.removeprefix("return "))
    script, weights = paste(replaced(table_band, {NETWORK: network}), "multigpu"), []
    whole = script.read_text()
    sends = re.sub(".*broadcast_buffers = False.*\n", "", whole)
    for text in (whole, sends):
        script.write_text(text)
        for steps in (10, 20):
            path = tmp_path / f"{steps}{text == sends}.pt"
            run(script, "--eval_every", steps, "--snapshot", path, processes=2)
            weights.append(load(path)["model"]["1.weight"])
    assert not torch.equal(weights[0], weights[1]) and torch.equal(weights[2], weights[3])


@pytest.mark.parametrize("whole", (False, True), ids=("part", "whole"))
def test_eval_in_create_model(run, table_band, paste, tmp_path, whole):
    """A part that is in eval() stays so: its BatchNorm counts nothing. A whole model trains."""
    network = f"""network = {NETWORK.removeprefix("return ")}
    network.insert(0, nn.BatchNorm1d(len(features)))
    {"network" if whole else "network[0]"}.eval()
    return network"""
    script = paste(replaced(table_band, {NETWORK: network}), "multigpu")
    run(script, "--snapshot", tmp_path / "s.pt", processes=2)
    counted = load(tmp_path / "s.pt")["model"]["0.num_batches_tracked"]
    assert counted == (40 if whole else 0)


OWN = """class Own(nn.Sequential):
        def train(self, mode=True):
            print("train", mode)
            super().train(mode)
            self[0].eval()
            return self
    return Own(nn.BatchNorm1d(len(features)), *LAYERS)"""


@pytest.mark.parametrize("folder", ("singlegpu", "hybrid"))
def test_a_model_may_define_train_anew(run, table_band, paste, tmp_path, folder):
    """As one that keeps BatchNorm frozen, or merges weights to validate. It is called each time."""
    network = OWN.replace("LAYERS", NETWORK.removeprefix("return "))
    script = paste(replaced(table_band, {NETWORK: network}), folder)
    out = run(script, "--epochs", 2, "--snapshot", tmp_path / "s.pt", processes=1)
    calls = [line.split()[1] for line in out.splitlines() if line.startswith("train ")]
    assert calls[:5] == ["True", "False", "True", "False", "True"], out
    assert load(tmp_path / "s.pt")["model"]["0.num_batches_tracked"] == 0


def test_compile_compiles(run, data, tmp_path):
    """Kernels are generated for a network of torch.nn's layers, and the loss is the eager one."""
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    words = ("--model", "mlp", "--dataset", "mnist", "--data_dir", data, "--max_steps", 5)
    for script, size in ("multigpu/images.py", 48), ("hybrid/images.py", 60):  # no kernel for both
        losses, made = [], []
        for number, more in enumerate(((), ("--compile",))):
            log = tmp_path / f"{size}.{number}.jsonl"
            before = len([*tmp_path.glob("**/*.py")])
            run(script, *words, *more, "--batch_size", size, "--log", log, **env)
            made.append(len([*tmp_path.glob("**/*.py")]) - before)
            losses.append(curve(log))
        np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
        assert made[0] == 0 and made[1] >= 2, "forward and backward"
