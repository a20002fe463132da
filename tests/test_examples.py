"""Functions that users paste, on the runs of three folders: they train; mistakes are told."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, RUN, curve, load, replaced, rows, uneven_table
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


@pytest.fixture
def paste(tmp_path):
    """paste(example, folder) is a copy of images.py after the steps of examples/README.md."""

    def paste(example, folder):
        text = (ROOT / f"{folder}/images.py").read_text()
        names = re.findall(r"^def (\w+)", example, re.M)
        for name in {*names, "read_images", "read_photo"}:
            text = re.sub(rf"^def {name}\(.*?(?=^\S)", "", text, flags=re.M | re.S)
        (script := tmp_path / f"{folder}/mine.py").parent.mkdir(exist_ok=True)
        script.write_text(replaced(text, {RUN: f"{example}\n\n{RUN}"}))
        return script

    return paste


def misnamed(script):
    """What ruff says of names that are defined twice, or not at all."""
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F811,F821", script]
    return subprocess.run(ruff, capture_output=True, text=True).stdout


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


def test_two_functions_of_one_name_are_found(changed):
    """By ruff, where somebody pastes an example and deletes nothing."""
    example = (ROOT / "examples/table.py").read_text()
    found = misnamed(changed("multigpu/images.py", {RUN: f"{example}\n\n{RUN}"}))
    names = {*re.findall(r"^def (\w+)", example, re.M)}
    assert {*re.findall(r"^F811 .* `(\w+)`", found, re.M)} == names and len(names) == 4


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
    (tmp_path / "my.txt").write_text((ROOT / "README.md").read_text() * 5)
    text = (ROOT / "examples/tokens.py").read_text()
    [make] = re.findall(r"^    python (\S+ .*)", text, re.M)
    [train] = re.findall(r"^python (\S+ .*)", run(*make.split(), cwd=tmp_path), re.M)
    run(*train.split(), "--batch_size", 4, "--max_steps", 2, processes=2, cwd=tmp_path)


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
    """They train on one process and on several, two workers each."""
    example = (ROOT / f"examples/{name}.py").read_text()
    flags = EXAMPLES[name]
    for fixture in re.findall(r"\{(\w+)\}", flags):
        flags = flags.replace(f"{{{fixture}}}", str(request.getfixturevalue(fixture)))
    words = (*flags.split(), "--num_workers", 2, "--batch_size", 12, "--max_steps", 24)
    several = [*EXAMPLES].index(name) % 2  # each has its turn in multigpu or multinode
    curves = []
    for folder, processes in (("singlegpu", 1), LAUNCHES[several]):
        assert "All checks passed" in misnamed(script := paste(example, folder))
        more = ("--eval_every", 8, "--snapshot", path := tmp_path / f"{folder}.pt")
        log = logged(script, *words, *more, processes=processes)
        curves.append(curve(log))
        assert curves[-1][-1, 1] < curves[-1][0, 1], "it learns"
        assert load(path)["step"] == rows(log)[-1]["step"] == 24
        assert {weight.dtype for weight in load(path)["model"].values()} == {torch.float32}
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-5)


def test_a_table_of_unlike_columns(logged, paste, tmp_path):
    """Unix times, which float32 rounds to 128 s, and others: they explain most of the variance."""
    script = paste((ROOT / "examples/table.py").read_text(), "singlegpu")
    words = ("--table", uneven_table(tmp_path / "table.csv"), "--epochs", 10)
    row = rows(logged(script, *words))[-1]
    assert row["val_loss"] < 0.3 and row["val_mae"] < 0.5, row


# What follows changes a copy that has table.py: text that stands there once, and another.
BATCH = "features, targets = batch\n"
DATA = "return [TensorDataset(part[:, :-1], part[:, -1:]) for part in parts]"


@pytest.fixture
def mine(table, paste):
    """mine({text: another, ...}) is the path of a script with table.py, changed so."""
    example = (ROOT / "examples/table.py").read_text().replace("table.csv", str(table))

    def mine(changes, folder="multigpu"):
        script = paste(example, folder)
        script.write_text(replaced(script.read_text(), changes))
        return script

    return mine


UNREADABLE = """data, val = [TensorDataset(part[:, :-1], part[:, -1:]) for part in parts]
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return len(data)
        def __getitem__(self, index):
            if index == 77:
                raise OSError("sample 77 cannot be read")
            return data[index]
    return Data(), val"""


@pytest.mark.parametrize(("folder", "processes"), LAUNCHES)
def test_an_error_of_a_section_ends_all(attempt, mine, tmp_path, folder, processes):
    """With a worker as without. Nothing is saved."""
    words = ("--num_workers", processes % 2, "--snapshot", tmp_path / "s.pt", "--max_steps", 20)
    status, _, err = attempt(mine({DATA: UNREADABLE}, folder), *words, processes=processes)
    assert status == 1 and "sample 77 cannot be read" in err, err
    assert not (tmp_path / "s.pt").exists()


DRAWING = """data, val = [TensorDataset(part[:, :-1], part[:, -1:]) for part in parts]
    class Augmented(torch.utils.data.Dataset):
        def __len__(self):
            return len(data)
        def __getitem__(self, index):
            number = torch.rand(()).item()
            with open(f"FOLDER/{os.getpid()}", "a") as file:
                print(number, file=file)
            return data[index][0] + number, data[index][1]
    return Augmented(), val"""
PERMUTED = """if not isinstance(data, StackDataset):
        return rng.permutation(len(data))"""
ORDER = """with open(f"FOLDER/order{torch.initial_seed()}", "a") as file:
        print(torch.randperm(9).tolist(), rng.permutation(9), file=file)
    return rng.permutation(len(data))"""


@pytest.mark.parametrize("workers", (0, 2))
def test_what_is_drawn_at_random(run, mine, tmp_path, workers):
    """The order of an epoch is drawn alike in all processes, and differs from the next one's.

    Augmentation differs between processes, workers, steps and epochs.
    """
    (drawn := tmp_path / "drawn").mkdir()
    changes = {DATA: DRAWING, PERMUTED: ORDER}
    script = mine({text: new.replace("FOLDER", str(drawn)) for text, new in changes.items()})
    words = ("--batch_size", 240, "--max_steps", 4, "--num_workers", workers)  # two an epoch
    run(script, *words, processes=3)
    orders = [path.read_text().splitlines() for path in drawn.glob("order*")]
    assert len(orders) >= 2 and all(len({*lines}) == 1 and len(lines) == 3 for lines in orders)
    assert len({lines[0] for lines in orders}) == len(orders)
    drawn = [path.read_text().split() for path in drawn.glob("[0-9]*")]
    drawn = [number for numbers in drawn for number in numbers]
    assert len(drawn) >= 4 * 240 and len({*drawn}) > 0.99 * len(drawn), "few are alike by chance"


NESTED = """class Nested(torch.utils.data.Dataset):
        def __init__(self, part):
            self.part = part
        def __len__(self):
            return len(self.part)
        def __getitem__(self, index):  # it computes with its index
            features, targets = self.part[index + 1 - 1]
            return {"features": features, "list": [targets, index % 2]}
    return [Nested(TensorDataset(part[:, :-1], part[:, -1:])) for part in parts]"""
UNNESTED = """features, (targets, odd) = batch["features"], batch["list"]
    assert odd.shape == (len(features),)
"""
LIST = "return [[(row[:-1], row[-1:]) for row in part] for part in parts]"
NETWORK = "return nn.Sequential(nn.Linear(len(features), 16), nn.ReLU(), nn.Linear(16, 1))"
HABITS = {  # a batch stays what the data makes of it
    "nested": {DATA: NESTED, BATCH: UNNESTED, "_ = data[0]": "_ = data[0]['features'], 0"},
    "samples one by one": {DATA: LIST},
}


@pytest.mark.parametrize("name", HABITS)
def test_habits_change_nothing(logged, mine, name):
    """Of PyTorch: each was a silent fault somewhere, once."""
    plain, other = (curve(logged(mine(changes), processes=2)) for changes in ({}, HABITS[name]))
    np.testing.assert_allclose(other, plain, rtol=1e-6)


def test_batch_norm_and_several_optimizers_resume(run, mine, tmp_path):
    """Those of muon.py: the weights of an undisturbed run. A frozen layer stays as it is."""
    several = (ROOT / "examples/muon.py").read_text()
    several = re.search(r"^class Several.*?(?=\n\n\n)", several, re.M | re.S)[0]
    optimizer = "return torch.optim.AdamW(model.parameters(), args.learning_rate, fused=True)"
    optimizers = """adam = torch.optim.Adam(model[1].parameters(), 0.1)
    return Several(adam, torch.optim.SGD(model[3].parameters(), 0.1))"""
    network = NETWORK.replace("nn.Linear(len", "nn.BatchNorm1d(len(features)), nn.Linear(len", 1)
    changes = {NETWORK: network, optimizer: optimizers}
    rate = "return args.learning_rate * (20 * done if done < 0.05 else 1.05 - done)"
    script = mine(changes | {rate: f"return 0.05\n\n\n{several}"})
    found = []
    for steps, name in ((10, "cut"), (40, "cut"), (40, "whole")):
        run(script, "--max_steps", steps, "--snapshot", tmp_path / name, processes=2)
        found.append(load(tmp_path / name)["model"])
    first, cut, whole = found
    assert all(torch.equal(cut[name], x) for name, x in whole.items())
    same = {name for name, x in first.items() if torch.equal(cut[name], x)}
    assert same == {"0.weight", "0.bias"} and cut["0.num_batches_tracked"] == 40
