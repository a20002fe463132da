"""Sections that users paste, on the runs of three folders: they train; mistakes are told."""

import json
import re

import numpy as np
import pytest
import torch
from conftest import ROOT, RUN, assert_same_weights, curve, load, replaced, rows
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DistilBertConfig, DistilBertForSequenceClassification
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LAUNCHES = (("multigpu", 2), ("multinode", 3))


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """A tiny network of 16 bits, and its tokenizer, which has no padding, as some of the Hub."""
    sizes = {"max_position_embeddings": 16, "dim": 16, "hidden_dim": 32}
    rates = dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), 0.0)
    config = DistilBertConfig(**sizes, **rates, vocab_size=12, n_layers=1, n_heads=2)
    torch.manual_seed(0)  # the weights do not depend on what other tests have drawn
    model = DistilBertForSequenceClassification(config).half()
    folder = save(model, tmp_path_factory.mktemp("network"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["eos_token"] = settings.pop("pad_token")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 16}
    config = LlamaConfig(**sizes, vocab_size=12, num_hidden_layers=1, num_attention_heads=2)
    torch.manual_seed(0)
    return save(LlamaForCausalLM(config), tmp_path_factory.mktemp("language_model"))


def save(model, folder):
    """Save it with a tokenizer of the words a to j."""
    vocab = {word: id for id, word in enumerate(["[PAD]", "[UNK]", *"abcdefghij"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder with a data set of texts of five letters; those of class 1 are f to j."""
    folder, generator = tmp_path_factory.mktemp("texts"), np.random.default_rng(0)
    for split, size in (("train", 192), ("test", 48)):
        lines = ["text,label"]
        for label in generator.integers(0, 2, size):
            letters = generator.choice([*("abcde", "fghij")[label]], 5)
            lines.append(f"{' '.join(letters)},{label}")
        (folder / f"{split}.csv").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """A text in which each letter is followed by the next."""
    path = tmp_path_factory.mktemp("letters") / "text.txt"
    path.write_text(" ".join("abcdefghij" * 200))
    return path


EXAMPLES = {  # name: its flags; a word in braces is what the fixture of this name returns
    "table": "--table {table}",
    "huggingface": "--network {network} --texts {texts} --seq_len 8 --learning_rate 1e-2",
    "lora": "--network {language_model} --text {letters} --seq_len 8 --learning_rate 3e-2",
    "segmentation": "--image_size 24",
    "forecast": "--window 48 --horizon 12",
}


def test_each_example_is_tried():
    others = {"muon", "tokens", "show_log", "predict_photo"}  # the last one by test_project.py
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == EXAMPLES.keys() | others


def test_muon(logged, changed, data, tmp_path):
    """It trains gpt.py; matrices of blocks go to Muon."""
    example = (ROOT / "examples/muon.py").read_text()
    script = changed("multigpu/gpt.py", {RUN: f"{example}\n\n{RUN}"})  # a later def counts
    words = "--d_model 16 --n_heads 2 --num_layers 2 --seq_len 16 --batch_size 12 --eval_every 15"
    words = ("--dataset", data / "words.txt", *words.split(), "--max_steps", 30)
    losses = curve(logged(script, *words, "--snapshot", tmp_path / "s.pt", processes=2))
    assert losses[-1, 1] < losses[0, 1], "it learns"
    states = load(tmp_path / "s.pt")["optimizer"]["state"].values()
    assert sum("momentum_buffer" in state for state in states) == 2 * 4, "four a block"
    assert sum("exp_avg" in state for state in states) == 2 + 2 * 4 + 2, "embeddings and norms"


def test_tokens(run, tmp_path):
    """gpt.py trains on the files that its docstring's commands make."""
    (tmp_path / "my.txt").write_text((ROOT / "tools/report.py").read_text() * 5)
    text = (ROOT / "examples/tokens.py").read_text()
    make, train = re.findall(r"^    python (\S+ .*)", text, re.M)
    assert " tokens in my_tokens\n" in run(*make.split(), cwd=tmp_path)
    words = train.replace("multigpu", "singlegpu").split()
    run(*words, "--batch_size", 4, "--max_steps", 2, cwd=tmp_path)


def test_rows_of_a_log_in_tensorboard(run, tmp_path):
    """It has what rank 0 has measured, at its step."""
    places = [(step, rank) for step in (4, 8) for rank in (0, 1)]
    logged = [{"rank": rank, "step": step, "lr": step / 8 + rank} for step, rank in places]
    (tmp_path / "run.jsonl").write_text("\n".join(map(json.dumps, logged)))
    run("examples/show_log.py", "run.jsonl", "runs/my_run", cwd=tmp_path)
    events = EventAccumulator(str(tmp_path / "runs/my_run")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("lr")] == [(4, 0.5), (8, 1.0)]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_train_with_one_loss_curve(logged, request, paste, tmp_path, name):
    """They train on one process and on several, two workers each, in any script's section."""
    band = (ROOT / f"examples/{name}.py").read_text()
    flags = EXAMPLES[name]
    for fixture in re.findall(r"\{(\w+)\}", flags):
        flags = flags.replace(f"{{{fixture}}}", str(request.getfixturevalue(fixture)))
    words = (*flags.split(), "--num_workers", 2, "--batch_size", 12, "--max_steps", 24)
    several = [*EXAMPLES].index(name) % 2  # each has its turn in multigpu or multinode
    places = ("singlegpu", 1, "images"), (("multigpu", 2, "text"), ("multinode", 3, "gpt"))[several]
    curves = []
    for folder, processes, task in places:
        more = ("--eval_every", 8, "--snapshot", path := tmp_path / f"{folder}.pt")
        log = logged(paste(band, folder, task), *words, *more, processes=processes)
        curves.append(curve(log))
        assert curves[-1][-1, 1] < curves[-1][0, 1], "it learns"
        assert load(path)["step"] == rows(log)[-1]["step"] == 24
        assert {weight.dtype for weight in load(path)["model"].values()} == {torch.float32}
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-5)


# What follows changes the section of table.py: text that stands there once, and another.
LOSS = 'return loss, {"loss": loss * len(targets), "mae": errors, "count": len(targets)}'
BATCH = "features, targets = batch\n"
DATA = "return [Subset(data, part.indices) for part in parts]"
FACTOR = "return (1 + math.cos(math.pi * done)) / 2"
LAYERS = "nn.Sequential(nn.Linear(len(features), 16), nn.ReLU(), nn.Linear(16, 1))"
NETWORK = f"return {LAYERS}"
OPTIMIZER = "return torch.optim.SGD(model.parameters(), args.learning_rate, momentum=0.9)"


@pytest.fixture
def mine(table_band, paste):
    """mine({text: another, ...}) is the path of a script with the table's section, changed so."""
    return lambda changes, folder="multigpu": paste(replaced(table_band, changes), folder)


UNREADABLE = """
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return len(data)
        def __getitem__(self, index):
            if index == 77:
                raise OSError("sample 77 cannot be read")
            return data[index]
    return Data(), data"""
AT_LAST = f"""steps = globals().setdefault("steps", [])
    steps.append(loss)
    errors = errors if len(steps) < 20 else math.inf
    {LOSS.replace("loss * len(targets)", "errors")}"""
IN_FORWARD = f"""class Moving(nn.Linear):
        def forward(self, x):
            self.weight.data += 1e-3 * self.training * x.mean()
            return super().forward(x)
    return {LAYERS.replace("nn.Linear", "Moving", 1)}"""
TURNED = IN_FORWARD.replace(
    "+= 1e-3 * self.training * x.mean()", "= self.weight.roll(dist.get_rank(), 0)"
)
FROZEN = f"""model = {LAYERS}
    globals()['late'] = model[0].requires_grad_(False)
    return model"""
THAWED = "late.requires_grad_(done > 0.3)\n    return 1.0"
STOPPED = f"""if done > 0.05:
        os.kill(os.getpid(), signal.SIGUSR2)
    {FACTOR}"""
DIFFERS = "step 20: 0.weight is not the same in all processes. Does forward() change it"
OWN = "[*model.parameters(), nn.Parameter(torch.ones(1))]"
COLUMNS = "np.random.default_rng(os.getpid()).permutation(8)"
OTHERS = "the processes have different code, flags, data or snapshots. Sort what comes from"
MISTAKES = {  # name: (changes of the section, the message)
    "infinite at last": ({LOSS: AT_LAST}, "the loss is not finite at step 20"),
    "a rate that weights_only refuses": (
        {OPTIMIZER: OPTIMIZER.replace("args.learning_rate", "np.sqrt(0.01)")},
        "Weights only load failed",
    ),
    "weights beside the model": (
        {OPTIMIZER: OPTIMIZER.replace("model.parameters()", OWN)},
        "the optimizer has parameters that the model has not",
    ),
    "sample": ({DATA: UNREADABLE}, "sample 77 cannot be read"),
    "in forward": ({NETWORK: IN_FORWARD}, DIFFERS),
    "in forward, at a stop": ({NETWORK: IN_FORWARD, FACTOR: STOPPED}, DIFFERS.replace("20", "2")),
    "places in forward": ({NETWORK: TURNED}, DIFFERS),
    "not known to DDP as trained": ({NETWORK: FROZEN, FACTOR: THAWED}, DIFFERS),
    "columns in another order": ({"table[:, :-1], table": f"table[:, {COLUMNS}], table"}, OTHERS),
    "an order without a seed": ({"np.random.perm": "np.random.default_rng().perm"}, OTHERS),
}


@pytest.mark.parametrize(("folder", "processes"), LAUNCHES)
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_a_section_are_told(attempt, mine, tmp_path, name, folder, processes):
    """Each ends the run with an error, with a worker as without, and nothing is saved."""
    changes, message = MISTAKES[name]
    words = ("--num_workers", processes % 2, "--snapshot", tmp_path / "s.pt", "--max_steps", 20)
    status, _, err = attempt(mine(changes, folder), *words, processes=processes)
    assert status and message in err and not (tmp_path / "s.pt").exists(), err


def test_weights_that_no_optimizer_has(run, logged, mine):
    """They are as if frozen: their gradients neither add up nor clip those of others."""
    frozen = {NETWORK: f"model = {LAYERS}\n    model[0].requires_grad_(False)\n    return model"}
    left_out = {OPTIMIZER: OPTIMIZER.replace("model.", "model[-1].")}
    words, curves = ("--max_steps", 20, "--eval_every", 5, "--max_grad_norm", 0.1), []
    for changes in frozen, left_out:
        curves.append(curve(logged(mine(changes), *words, processes=2), "grad_norm"))
    np.testing.assert_array_equal(*curves)
    out = run(mine(left_out), "--max_steps", 1, processes=2)
    assert out.count("2 parameters are frozen: the optimizer does not have them") == 1


IN_COLUMNS = f"""class Counting(nn.Linear):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.register_buffer("ranks", torch.zeros(2, 3).T)
        def forward(self, x):
            self.ranks += self.training * dist.get_rank()
            assert self.training or self.ranks.max() == 0, "in validation, those of rank 0"
            return super().forward(x)
    return {LAYERS.replace("nn.Linear", "Counting", 1)}"""


def test_buffers_in_any_layout_are_those_of_rank_0(run, mine):
    run(mine({NETWORK: IN_COLUMNS}), "--max_steps", 2, processes=2)


def test_sets_of_strings_have_one_order(run, mine):
    """In all processes that multigpu starts: it tells Python so."""
    told = "print('seed of hashes', os.environ['PYTHONHASHSEED'])"
    out = run(mine({NETWORK: f"{told}\n    {NETWORK}"}), processes=2)
    assert out.count("seed of hashes 0\n") == 2, out


def test_weights_that_are_not_finite(refused, mine, tmp_path):
    """They are not saved over good ones."""
    script = mine({FACTOR: "return math.inf if done > 0.5 else 1.0"})
    words = ("--snapshot", tmp_path / "s.pt", "--max_steps", 4, "--eval_every", 1)
    refused("the weights are not finite at step 3", script, *words, processes=2)
    assert load(tmp_path / "s.pt")["step"] == 2


NOISY = """class Noisy(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            [group] = self.param_groups
            for weight in group["params"]:
                weight.data += group["lr"].square() * torch.randn_like(weight)
    return Noisy(model.parameters(), torch.tensor(args.learning_rate), momentum=0.9)"""


def test_an_optimizer_that_draws_numbers_has_a_tensor_as_rate(logged, mine):
    """It draws the same in all processes, however many. The rate is scaled, and stays a tensor."""
    curves, words = [], ("--max_steps", 15, "--eval_every", 5)
    for folder, processes in LAUNCHES:
        log = logged(mine({OPTIMIZER: NOISY}, folder), *words, processes=processes)
        curves.append(curve(log, "lr"))
        expected = [0.1 * (1 + np.cos(np.pi * step / 15)) / 2 for step in (5, 10, 15)]
        assert curves[-1][:, 2] == pytest.approx(expected)
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-5)


SUMS = """[("ones", torch.ones((), dtype=torch.bfloat16)), ("trues", torch.tensor(True)),
    ("bytes", torch.tensor(200, dtype=torch.uint8))]"""


def test_sums_of_any_type_and_order(logged, mine):
    """300 ones are 256 in bfloat16 and 1 in bool. Each process names its sums in another order."""
    script = mine({'"count"': f'**dict({SUMS}[:: 1 - 2 * dist.get_rank()]), "count"'})
    row, _ = rows(logged(script, "--max_steps", 300, "--eval_every", 300, processes=2))
    found = [row[f"train_{name}"] * row["batch_size"] for name in ("ones", "trues", "bytes")]
    assert found == pytest.approx([2, 2, 400])
    names = [name for name in row if name.startswith("train_")]
    assert names == [f"train_{name}" for name in ("loss", "mae", "ones", "trues", "bytes")]


DRAWING = """
    class Augmented(torch.utils.data.Dataset):
        def __len__(self):
            return len(data)
        def __getitem__(self, index):
            numbers = [np.random.random(), random.random(), torch.rand(()).item()]
            with open(f"FOLDER/{os.getpid()}", "a") as file:
                print(*numbers, file=file)
            return data[index][0] + sum(numbers), data[index][1]
    return Augmented(), data"""
ORDER = """with open(f"FOLDER/order{epoch}", "a") as file:
        print(*np.random.permutation(9), file=file)
    return np.arange(len(data))"""


def test_what_is_drawn_at_random(run, mine, tmp_path):
    """The order of an epoch is drawn alike in all processes, and differs from the next one's.

    Augmentation, by any library, differs between processes, steps and epochs, also where the
    order is fixed. A resumed run draws both again, and ends with the same weights and scale.
    """
    changes = {DATA: DRAWING, "return np.random.permutation(len(data))": ORDER}
    drawn = tmp_path / "drawn"
    changes = {text: new.replace("FOLDER", str(drawn)) for text, new in changes.items()}
    script = mine(changes | {FACTOR: "return 1.0"})
    drawn.mkdir()
    words = ("--batch_size", 240, "--precision", "fp16", "--snapshot")  # two steps an epoch
    for steps, name in ((4, "whole"), (1, "resumed"), (4, "resumed")):
        run(script, *words, tmp_path / f"{name}.pt", "--max_steps", steps, processes=2)
    assert_same_weights(tmp_path / "whole.pt", tmp_path / "resumed.pt")
    whole, resumed = (load(tmp_path / f"{name}.pt")["scaler"] for name in ("whole", "resumed"))
    assert whole == resumed and whole
    orders = [(drawn / f"order{epoch}").read_text().splitlines() for epoch in (0, 1)]
    assert [len({*lines}) for lines in orders] == [1, 1] and orders[0][0] != orders[1][0]
    drawn = [set(path.read_text().split()) for path in drawn.glob("[0-9]*")]
    assert len(drawn) == 3 * 2
    # Three numbers a sample; also of the fingerprint's three, and of that of create_model.
    assert len(set.union(*drawn)) == 3 * (4 * 240 + 3 + 1)


# A named tuple, one with a .to of its own, a packed sequence, what has no .to, or moves in place.
SAMPLE = """Sample = __import__("collections").namedtuple("Sample", "features targets")


class Moved(Sample):
    def to(self, device):
        return self._replace(features=-self.features)


class Placed:
    def to(self, device):
        self.device = device


"""
NESTED = """class Nested(Subset):
        def __getitems__(self, indices):
            features, targets = zip(*super().__getitems__(indices))
            packed = nn.utils.rnn.pack_sequence(features, enforce_sorted=False)
            stacked = torch.stack(features), torch.stack(targets)
            others = [packed, "x", Placed()]
            return {"named": Sample(*stacked), "moved": Moved(*stacked), "list": others}
    return [Nested(data, part.indices) for part in parts]"""
UNNESTED = """features, targets = batch["named"].features, batch["named"].targets
    packed, name, placed = batch["list"]
    assert name == "x" and placed.device and torch.equal(batch["moved"].features, -features)
    features = torch.stack(nn.utils.rnn.unpack_sequence(packed))
"""
BARE = """class Bare(Subset):
        def __getitems__(self, indices):
            features, targets = zip(*super().__getitems__(indices))
            return torch.cat((torch.stack(features), torch.stack(targets)), 1)
    return [Bare(data, part.indices) for part in parts]"""
EXPANDED = f"""network = {LAYERS}
    network.register_buffer("table", torch.arange(64).expand(4096, 64))
    network._ddp_params_and_buffers_to_ignore = ["table"]
    return network"""
HABITS = {  # a batch stays what the data makes of it; a buffer's rows may share their memory
    "nested": {DATA: NESTED, BATCH: UNNESTED},
    "a bare tensor": {DATA: BARE, BATCH: "features, targets = batch[:, :-1], batch[:, -1:]\n"},
    "a buffer": {NETWORK: EXPANDED},
}


@pytest.mark.parametrize("name", HABITS)
def test_habits_change_nothing(logged, mine, name):
    """Of PyTorch: each was a silent fault somewhere, once."""
    changed = HABITS[name] | {"def parse_args": f"{SAMPLE}def parse_args"}
    plain, other = (curve(logged(mine(changes), processes=2)) for changes in ({}, changed))
    np.testing.assert_allclose(other, plain, rtol=1e-6)


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
    found = []
    for steps, name in ((10, "cut"), (40, "cut"), (40, "whole")):
        run(script, "--max_steps", steps, "--snapshot", tmp_path / name, processes=2)
        found.append(load(tmp_path / name))
    first, cut, whole = found
    assert [group["lr"] for group in cut["optimizer"]["param_groups"]] == [0.0, 0.05]
    assert all(torch.equal(cut["model"][name], x) for name, x in whole["model"].items())
    same = {name for name, x in first["model"].items() if torch.equal(cut["model"][name], x)}
    assert same == {"0.weight", "0.bias", "mask"} and whole["model"]["mask"] == -torch.inf


NORM = "nn.BatchNorm1d(len(features))"
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
