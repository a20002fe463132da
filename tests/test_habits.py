"""PyTorch's own habits work in a first section: each was a silent fault somewhere, once."""

import numpy as np
import pytest
import torch
from conftest import assert_same_weights, curve, load, replaced
from prediction import with_band
from test_examples import LAUNCHES

ORDER = "return np.random.permutation(len(data))"
OPTIMIZER = "return torch.optim.SGD(model.parameters(), args.learning_rate, momentum=0.9)"
NETWORK = "return nn.Sequential(nn.Linear(len(features), 16), nn.ReLU(), nn.Linear(16, 1))"
DATA = "return [Subset(data, part.indices) for part in parts]"
FACTOR = "return (1 + math.cos(math.pi * done)) / 2"
LOSS = "features, targets = batch\n"


@pytest.fixture(scope="module")
def plain(run, table_band, tmp_path_factory):
    """The loss curve of the table as it is."""
    (script := tmp_path_factory.mktemp("plain") / "multigpu/mine.py").parent.mkdir()
    script.write_text(with_band(table_band, "multigpu/images.py"))
    run(script, "--log", script.with_suffix(".jsonl"), processes=2)
    return curve(script.with_suffix(".jsonl"))


def test_a_sampler_of_pytorch_draws_alike(run, table_band, paste, tmp_path):
    """One loss curve on 1, 2 and 3 processes, with workers and without."""
    sampler = """weights = 1.0 / (1 + torch.arange(len(data)) % 3)
    return list(torch.utils.data.WeightedRandomSampler(weights, len(data)))"""
    curves = []
    for (folder, processes), workers in zip(LAUNCHES, (0, 1, 0)):
        script = paste(replaced(table_band, {ORDER: sampler}), folder)
        log = tmp_path / f"{folder}.jsonl"
        run(script, "--log", log, "--num_workers", workers, processes=processes)
        curves.append(curve(log))
    for each in curves[1:]:
        np.testing.assert_allclose(each, curves[0], rtol=1e-5)


SAMPLE = """Sample = __import__("collections").namedtuple("Sample", "features targets")


class Moved(Sample):
    def to(self, device):
        return self._replace(features=-self.features)"""
NAMED = """class Named(torch.utils.data.Dataset):
        def __len__(self):
            return len(data)
        def __getitem__(self, index):
            return Sample(*data[index])
    return [Subset(Named(), part.indices) for part in parts]"""
PACKED = """class Packed(Subset):
        def __getitems__(self, indices):
            features, targets = zip(*super().__getitems__(indices))
            packed = nn.utils.rnn.pack_sequence(features, enforce_sorted=False)
            return packed, torch.stack(targets)
    return [Packed(data, part.indices) for part in parts]"""
MAPPING = """class Mapping(Subset):
        def __getitems__(self, indices):
            features, targets = zip(*super().__getitems__(indices))
            return {"features": torch.stack(features), "targets": torch.stack(targets), "name": "x"}
    return [Mapping(data, part.indices) for part in parts]"""
BARE = """class Bare(Subset):
        def __getitems__(self, indices):
            features, targets = zip(*super().__getitems__(indices))
            return torch.cat((torch.stack(features), torch.stack(targets)), 1)
    return [Bare(data, part.indices) for part in parts]"""
UNPACK = "torch.stack(nn.utils.rnn.unpack_sequence(batch[0]))"
BATCHES = {
    "bare tensor": (BARE, "features, targets = batch[:, :-1], batch[:, -1:]\n"),
    "mapping": (MAPPING, 'features, targets = batch["features"], batch["targets"]\n'),
    "named tuple": (NAMED, "features, targets = batch.features, batch.targets\n"),
    "named tuple with a .to": (
        NAMED.replace("Sample(", "Moved("),
        "features, targets = -batch.features, batch.targets\n",
    ),
    "packed sequence": (PACKED, f"features, targets = {UNPACK}, batch[1]\n"),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_stays_what_the_data_makes_of_it(run, table_band, paste, plain, tmp_path, name):
    data, loss = BATCHES[name]
    changes = {DATA: data, LOSS: loss, "def parse_args": f"{SAMPLE}\n\n\ndef parse_args"}
    script, log = paste(replaced(table_band, changes), "multigpu"), tmp_path / "log.jsonl"
    run(script, "--log", log, processes=2)
    np.testing.assert_allclose(curve(log), plain, rtol=1e-6)


def test_a_group_keeps_its_own_rate(run, table_band, paste, tmp_path):
    """With rate 0 the first layer stays as it is; the second moves. A frozen mask is saved."""
    network = f"""model = {NETWORK.removeprefix("return ")}
    model.mask = nn.Parameter(torch.tensor(-math.inf), requires_grad=False)
    return model"""
    groups = """groups = [{"params": model[0].parameters(), "lr": 0.0}]
    groups.append({"params": model[2].parameters(), "lr": 2 * args.learning_rate})
    return torch.optim.SGD(groups)"""
    script = paste(replaced(table_band, {NETWORK: network, OPTIMIZER: groups}), "multigpu")
    weights = []
    for epochs in (1, 3):
        snapshot = tmp_path / f"{epochs}.pt"
        run(script, "--epochs", epochs, "--snapshot", snapshot, processes=2)
        weights.append(load(snapshot)["model"])
    assert torch.equal(weights[0]["0.weight"], weights[1]["0.weight"])
    assert not torch.equal(weights[0]["2.weight"], weights[1]["2.weight"])
    assert weights[0]["mask"] == -torch.inf


SEVERAL = """class Several(torch.optim.Optimizer):
        def __init__(self, *parts):
            super().__init__([group for part in parts for group in part.param_groups], {})
            self.parts = parts
        def step(self, closure=None):
            for part in self.parts:
                part.step()
        def state_dict(self):
            return {"parts": [part.state_dict() for part in self.parts]}
        def load_state_dict(self, state_dict):
            for part, saved in zip(self.parts, state_dict["parts"]):
                part.load_state_dict(saved)
            self.param_groups = [group for part in self.parts for group in part.param_groups]
    adam = torch.optim.Adam(model[0].parameters(), args.learning_rate)
    return Several(adam, torch.optim.SGD(model[2].parameters(), args.learning_rate))"""


def test_several_optimizers_survive_a_resume(run, table_band, paste, tmp_path):
    """The weights of an undisturbed run, with the rates that the run has set."""
    changes = {OPTIMIZER: SEVERAL, FACTOR: "return 0.5"}
    script = paste(replaced(table_band, changes), "multigpu")
    for steps, name in ((10, "cut"), (40, "cut"), (40, "whole")):
        more = ("--max_steps", steps, "--snapshot", tmp_path / f"{name}.pt")
        run(script, *more, processes=2)
    assert_same_weights(tmp_path / "cut.pt", tmp_path / "whole.pt")
    rates = [
        part["param_groups"][0]["lr"] for part in load(tmp_path / "cut.pt")["optimizer"]["parts"]
    ]
    assert rates == [0.05, 0.05]


def test_a_buffer_whose_rows_share_their_memory(run, table_band, paste, plain, tmp_path):
    """To send it in a validation would overwrite memory. DDP must not, either."""
    network = f"""network = {NETWORK.removeprefix("return ")}
    network.register_buffer("table", torch.arange(64).expand(4096, 64))
    network._ddp_params_and_buffers_to_ignore = ["table"]
    return network"""
    script = paste(replaced(table_band, {NETWORK: network}), "multigpu")
    log = tmp_path / "log.jsonl"
    run(script, "--log", log, processes=3)
    np.testing.assert_allclose(curve(log), plain, rtol=1e-5)


OWN = """class Own(nn.Sequential):
        def train(self, mode=True):
            super().train(mode)
            self[0].eval()
            return self
    return Own(NORM, *LAYERS)"""
NORM = "nn.BatchNorm1d(len(features))"
RESTS = {  # in eval() after create_model: how many batches BatchNorm counts
    "a part": ("return nn.Sequential(NORM.eval(), *LAYERS)", 0),
    "the whole": ("return nn.Sequential(NORM, *LAYERS).eval()", 40),
    "a part, by a train() of its own": (OWN, 0),
}


@pytest.mark.parametrize("name", RESTS)
def test_eval_in_create_model(run, table_band, paste, tmp_path, name):
    """A part that is in eval() stays so, also after a validation. A whole model trains."""
    network, expected = RESTS[name]
    network = network.replace("LAYERS", NETWORK.removeprefix("return ")).replace("NORM", NORM)
    script = paste(replaced(table_band, {NETWORK: network}), "multigpu")
    run(script, "--snapshot", tmp_path / "s.pt", processes=2)
    assert load(tmp_path / "s.pt")["model"]["0.num_batches_tracked"] == expected
