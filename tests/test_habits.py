"""PyTorch's own habits work in a first part: each was a silent fault somewhere, once."""

import numpy as np
import pytest
import torch
from conftest import assert_same_weights, curve, load
from test_examples import LAUNCHES, paste

MODEL = "def create_model("
OPTIMIZER = "return torch.optim.SGD(model.parameters(), args.learning_rate, momentum=0.9)"
NETWORK = "return nn.Sequential(nn.Linear(len(features), 16), nn.ReLU(), nn.Linear(16, 1))"
DATA = "return [Subset(data, part.indices) for part in parts]"
LOSS = "features, targets = batch\n"
WEIGHTED = """weights = 1.0 / (1 + torch.arange(len(data)) % 3)
    return list(torch.utils.data.WeightedRandomSampler(weights, len(data)))"""
DRAWN = {"permutation": "return torch.randperm(len(data))", "sampler": WEIGHTED}


def replaced(band, *changes):
    for text, other in changes:
        assert band.count(text) == 1, text
        band = band.replace(text, other)
    return band


@pytest.mark.parametrize("name", DRAWN)
def test_an_order_without_a_seed_is_the_same_in_all_processes(run, table_band, tmp_path, name):
    """One loss curve on 1, 2 and 3 processes, with workers and without."""
    order = f"def training_order(data, args, epoch):\n    {DRAWN[name]}\n\n\n{MODEL}"
    band = replaced(table_band, (MODEL, order))
    curves = []
    for (folder, processes), workers in zip(LAUNCHES, (0, 1, 0)):
        script = paste(band, folder, tmp_path / folder / "mine.py")
        log = tmp_path / f"{folder}.jsonl"
        run(script, "--log", log, "--num_workers", workers, processes=processes)
        curves.append(curve(log))
    for each in curves[1:]:
        np.testing.assert_allclose(each, curves[0], rtol=1e-5)


@pytest.mark.parametrize("workers", (0, 2))
def test_an_order_without_a_seed_is_the_same_after_a_resume(
    start, run, table_band, tmp_path, workers
):
    """Stopped within an epoch, with dropout: the weights of an undisturbed run, bit for bit."""
    dropout = NETWORK.replace("nn.ReLU()", "nn.Dropout(0.5)")
    order = f"def training_order(data, args, epoch):\n    {DRAWN['sampler']}\n\n\n{MODEL}"
    band = replaced(table_band, (MODEL, order), (NETWORK, dropout))
    stop = "steps = globals().setdefault('steps', [])\n    steps.append(time.sleep(0.1))\n"
    stop += "    if len(steps) == 26:\n        os.kill(os.getpid(), signal.SIGTERM)\n"
    script = tmp_path / "singlegpu/mine.py"
    cut, whole = tmp_path / "cut.pt", tmp_path / "whole.pt"
    words = ("--epochs", 3, "--num_workers", workers, "--snapshot")
    paste(replaced(band, (LOSS, f"{stop}    {LOSS}")), "singlegpu", script)
    status, out, err = start(script, *words, cut).wait()
    assert status == 75 and 20 < load(cut)["step"] < 40, (out, err)
    paste(band, "singlegpu", script)
    run(script, *words, cut)
    run(script, *words, whole)
    assert_same_weights(cut, whole)


def test_a_group_keeps_its_own_rate(run, table_band, tmp_path):
    """With rate 0 the first layer stays as it is; without groups it moves."""
    groups = """groups = [{"params": model[0].parameters(), "lr": 0.0}]
    groups.append({"params": model[2].parameters(), "lr": 2 * args.learning_rate})
    return torch.optim.SGD(groups)"""
    band = replaced(table_band, (OPTIMIZER, groups))
    script = paste(band, "multigpu", tmp_path / "multigpu/mine.py")
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
BATCHES = {
    "named tuple": (NAMED, "features, targets = batch.features, batch.targets\n"),
    "packed sequence": (
        PACKED,
        "packed, targets = batch\n"
        "    features = torch.stack(nn.utils.rnn.unpack_sequence(packed))\n",
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_stays_what_the_data_makes_of_it(run, table_band, tmp_path, name):
    data, loss = BATCHES[name]
    sample = "Sample = __import__('collections').namedtuple('Sample', 'features targets')\n\n\n"
    band = replaced(
        table_band, (DATA, data), (LOSS, loss), ("def parse_args", f"{sample}def parse_args")
    )
    script = paste(band, "multigpu", tmp_path / "multigpu/mine.py")
    log, plain = tmp_path / "log.jsonl", tmp_path / "plain.jsonl"
    run(script, "--log", log, processes=2)
    run(paste(table_band, "multigpu", script), "--log", plain, processes=2)
    np.testing.assert_allclose(curve(log), curve(plain), rtol=1e-6)


def test_sparse_gradients_train(run, table_band, tmp_path):
    """Two processes as one, though the stopwatch counts the bytes of gradients."""
    bag = """class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.EmbeddingBag(100, 1, mode="sum", sparse=True)
        def forward(self, features):
            return self.embedding((features * 10).long().clamp(-50, 49) + 50)
    return Bag()"""
    plain = OPTIMIZER.replace(", momentum=0.9", "")
    band = replaced(table_band, (NETWORK, bag), (OPTIMIZER, plain))
    curves = []
    for folder, processes in LAUNCHES[:2]:
        script = paste(band, folder, tmp_path / folder / "mine.py")
        run(script, "--log", tmp_path / f"{folder}.jsonl", processes=processes)
        curves.append(curve(tmp_path / f"{folder}.jsonl"))
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-5)


def test_buffers_that_ddp_ignores_are_left_alone(run, table_band, tmp_path):
    """One of a type that gloo cannot send, and one whose rows share their memory."""
    network = f"""network = {NETWORK.removeprefix("return ")}
    network.register_buffer("table", torch.arange(64).expand(4096, 64))
    network.register_buffer("short", torch.arange(8, dtype=torch.int16))
    network._ddp_params_and_buffers_to_ignore = ["table", "short"]
    return network"""
    script = paste(replaced(table_band, (NETWORK, network)), "multigpu", tmp_path / "multigpu/m.py")
    log, plain = tmp_path / "log.jsonl", tmp_path / "plain.jsonl"
    run(script, "--log", log, processes=3)
    run(paste(table_band, "multigpu", script), "--log", plain, processes=3)
    np.testing.assert_allclose(curve(log), curve(plain), rtol=1e-6)


@pytest.mark.parametrize("whole", (False, True), ids=("part", "whole"))
def test_eval_in_create_model(run, table_band, tmp_path, whole):
    """A part that is in eval() stays so: its BatchNorm counts nothing. A whole model trains."""
    network = f"""network = {NETWORK.removeprefix("return ")}
    network.insert(0, nn.BatchNorm1d(len(features)))
    {"network" if whole else "network[0]"}.eval()
    return network"""
    script = paste(replaced(table_band, (NETWORK, network)), "multigpu", tmp_path / "multigpu/m.py")
    run(script, "--snapshot", tmp_path / "s.pt", processes=2)
    counted = load(tmp_path / "s.pt")["model"]["0.num_batches_tracked"]
    assert counted == (40 if whole else 0)


@pytest.mark.parametrize("script", ("multigpu/images.py", "hybrid/images.py"))
def test_compile_compiles(run, tmp_path, script):
    """Kernels are generated for a network of torch.nn's layers, and the loss is the eager one."""
    words = ("--model", "mlp", "--batch_size", 48, "--max_steps", 5)
    losses = []
    for more in ((), ("--compile",)):
        log = tmp_path / f"log{len(more)}.jsonl"
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"cache{len(more)}")}
        run(script, *words, *more, "--log", log, **cache)
        losses.append(curve(log))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    assert not list(tmp_path.glob("cache0/**/*.py"))
    assert len(list(tmp_path.glob("cache1/**/*.py"))) >= 2, "forward and backward"
