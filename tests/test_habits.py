"""PyTorch's own habits work in a first section: each was a silent fault somewhere, once."""

import re

import numpy as np
import pytest
import torch
from conftest import ROOT, curve, load, replaced
from prediction import with_band

OPTIMIZER = "return torch.optim.SGD(model.parameters(), args.learning_rate, momentum=0.9)"
NETWORK = "return nn.Sequential(nn.Linear(len(features), 16), nn.ReLU(), nn.Linear(16, 1))"
DATA = "return [Subset(data, part.indices) for part in parts]"
FACTOR = "return (1 + math.cos(math.pi * done)) / 2"
LOSS = "features, targets = batch\n"
LAYERS = NETWORK.removeprefix("return ")
NORM = "nn.BatchNorm1d(len(features))"


@pytest.fixture(scope="module")
def plain(run, table_band, tmp_path_factory):
    """The loss curve of the table as it is."""
    (script := tmp_path_factory.mktemp("plain") / "multigpu/mine.py").parent.mkdir()
    script.write_text(with_band(table_band, "multigpu/images.py"))
    run(script, "--log", script.with_suffix(".jsonl"), processes=2)
    return curve(script.with_suffix(".jsonl"))


@pytest.fixture
def mine(table_band, paste):
    """mine({text: another, ...}) is the path of a script with the table's section, changed so."""
    return lambda changes: paste(replaced(table_band, changes), "multigpu")


# A named tuple, one with a .to of its own, a packed sequence, and what has no .to.
SAMPLE = """Sample = __import__("collections").namedtuple("Sample", "features targets")


class Moved(Sample):
    def to(self, device):
        return self._replace(features=-self.features)


"""
NESTED = """class Nested(Subset):
        def __getitems__(self, indices):
            features, targets = zip(*super().__getitems__(indices))
            packed = nn.utils.rnn.pack_sequence(features, enforce_sorted=False)
            stacked = torch.stack(features), torch.stack(targets)
            return {"named": Sample(*stacked), "moved": Moved(*stacked), "list": [packed, "x"]}
    return [Nested(data, part.indices) for part in parts]"""
UNNESTED = """features, targets = batch["named"].features, batch["named"].targets
    packed, name = batch["list"]
    assert name == "x" and torch.equal(batch["moved"].features, -features)
    features = torch.stack(nn.utils.rnn.unpack_sequence(packed))
"""
BARE = """class Bare(Subset):
        def __getitems__(self, indices):
            features, targets = zip(*super().__getitems__(indices))
            return torch.cat((torch.stack(features), torch.stack(targets)), 1)
    return [Bare(data, part.indices) for part in parts]"""
NAMED = """class Named(torch.utils.data.Dataset):
        def __len__(self):
            return len(data)
        def __getitem__(self, index):
            return Sample(*data[index])
    return [Subset(Named(), part.indices) for part in parts]"""
BATCHES = {
    "nested": (NESTED, UNNESTED),
    "a bare tensor": (BARE, "features, targets = batch[:, :-1], batch[:, -1:]\n"),
    "named samples": (NAMED, "features, targets = batch.features, batch.targets\n"),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_stays_what_the_data_makes_of_it(run, mine, plain, tmp_path, name):
    data, loss = BATCHES[name]
    script = mine({DATA: data, LOSS: loss, "def parse_args": f"{SAMPLE}def parse_args"})
    run(script, "--log", tmp_path / "log.jsonl", processes=2)
    np.testing.assert_allclose(curve(tmp_path / "log.jsonl"), plain, rtol=1e-6)


def test_several_optimizers_survive_a_resume(run, mine, tmp_path):
    """Those of muon.py: the weights of an undisturbed run. The rate of each group is scaled.

    With rate 0 the first layer stays as it is. A frozen mask is saved.
    """
    several = (ROOT / "examples/muon.py").read_text()
    several = re.search(r"^class Several.*?(?=\n\n\n)", several, re.M | re.S)[0]
    optimizers = """adam = torch.optim.Adam(model[0].parameters(), 0.0)
    return Several(adam, torch.optim.SGD(model[2].parameters(), args.learning_rate))"""
    network = f"""model = {LAYERS}
    model.mask = nn.Parameter(torch.tensor(-math.inf), requires_grad=False)
    return model"""
    changes = {NETWORK: network, OPTIMIZER: optimizers, FACTOR: "return 0.5"}
    script = mine(changes | {"def create_optimizer": f"{several}\n\ndef create_optimizer"})
    for steps, name in ((10, "cut"), (10, "first"), (40, "cut"), (40, "whole")):
        run(script, "--max_steps", steps, "--snapshot", tmp_path / f"{name}.pt", processes=2)
    first, cut, whole = (load(tmp_path / f"{name}.pt") for name in ("first", "cut", "whole"))
    assert [group["lr"] for group in cut["optimizer"]["param_groups"]] == [0.0, 0.05]
    assert all(torch.equal(cut["model"][name], x) for name, x in whole["model"].items())
    same = {name for name, x in first["model"].items() if torch.equal(cut["model"][name], x)}
    assert same == {"0.weight", "0.bias", "mask"} and whole["model"]["mask"] == -torch.inf


def test_a_buffer_whose_rows_share_their_memory(run, mine, plain, tmp_path):
    """To send it in a validation would overwrite memory. DDP must not, either."""
    network = f"""network = {LAYERS}
    network.register_buffer("table", torch.arange(64).expand(4096, 64))
    network._ddp_params_and_buffers_to_ignore = ["table"]
    return network"""
    log = tmp_path / "log.jsonl"
    run(mine({NETWORK: network}), "--log", log, processes=3)
    np.testing.assert_allclose(curve(log), plain, rtol=1e-5)


OWN = f"""class Own(nn.Sequential):
        def train(self, mode=True):
            super().train(mode)
            self[0].eval()
            return self
    return Own({NORM}, *{LAYERS})"""
RESTS = {  # in eval() after create_model: how many batches BatchNorm counts
    "a part": (f"return nn.Sequential({NORM}.eval(), *{LAYERS})", 0),
    "the whole": (f"return nn.Sequential({NORM}, *{LAYERS}).eval()", 40),
    "a part, by a train() of its own": (OWN, 0),
}


@pytest.mark.parametrize("name", RESTS)
def test_eval_in_create_model(run, mine, tmp_path, name):
    """A part that is in eval() stays so, also after a validation. A whole model trains."""
    network, expected = RESTS[name]
    run(mine({NETWORK: network}), "--snapshot", tmp_path / "s.pt", processes=2)
    assert load(tmp_path / "s.pt")["model"]["0.num_batches_tracked"] == expected
