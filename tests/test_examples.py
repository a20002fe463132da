"""Sections that users paste, on the runs of three folders: they train; mistakes are told."""

import json
import re

import numpy as np
import pytest
import torch
from conftest import ENVIRONMENT, ROOT, assert_same_weights, curve, load, replaced, rows
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DistilBertConfig, DistilBertForSequenceClassification
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LAUNCHES = (("singlegpu", 1), ("multigpu", 2), ("multinode", 3))


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


def test_muon(run, data, tmp_path):
    """It trains gpt.py on one process, two and three, from stop to stop; matrices go to Muon.

    Muon rounds to bf16: curves on several processes agree less than those of AdamW.
    """
    example = (ROOT / "examples/muon.py").read_text()
    small = "--d_model 16 --n_heads 2 --num_layers 2 --seq_len 16 --batch_size 12 --eval_every 20"
    curves = []
    for folder, processes in LAUNCHES:
        script = (ROOT / folder / "gpt.py").read_text()
        new, count = re.subn(
            r"^def create_optimizer.*?\n\n\n", lambda _: f"{example}\n\n", script, flags=re.M | re.S
        )
        assert count == 1
        (copy := tmp_path / folder / "mine.py").parent.mkdir()
        copy.write_text(new)
        log, snapshot = (tmp_path / f"{folder}.{kind}" for kind in ("jsonl", "pt"))
        words = ("--dataset", data / "words.txt", *small.split(), "--log", log)
        for steps in (20, 60):  # the second goes on
            run(copy, *words, "--max_steps", steps, "--snapshot", snapshot, processes=processes)
        curves.append(curve(log))
        assert curves[-1][-1, 1] < curves[-1][0, 1], "it learns"
    states = load(snapshot)["optimizer"]["state"].values()
    assert sum("momentum_buffer" in state for state in states) == 2 * 4, "four a block"
    assert sum("exp_avg" in state for state in states) == 2 + 2 * 4 + 2, "embeddings and norms"
    for each in curves[1:]:
        np.testing.assert_allclose(each, curves[0], rtol=1e-2)


def test_tokens(run, tmp_path):
    """gpt.py trains on the files that its docstring's commands make."""
    (tmp_path / "my.txt").write_text((ROOT / "report.py").read_text() * 5)
    text = (ROOT / "examples/tokens.py").read_text()
    make, train = re.findall(r"^    python (\S+ .*)", text, re.M)
    assert " tokens in my_tokens\n" in run(*make.split(), cwd=tmp_path)
    words = train.replace("multigpu", "singlegpu").split()
    run(*words, "--batch_size", 4, "--max_steps", 2, cwd=tmp_path)


def test_rows_of_a_log_in_tensorboard(run, data, tmp_path):
    """It has what rank 0 has measured, at its step."""
    log = tmp_path / "run.jsonl"
    words = ("--model", "mlp", "--dataset", "mnist", "--data_dir", data, "--batch_size", 24)
    words = (*words, "--max_steps", 8, "--eval_every", 4, "--log", log)
    run("multigpu/images.py", *words, processes=2)
    run("examples/show_log.py", "run.jsonl", "runs/my_run", cwd=tmp_path)
    events = EventAccumulator(str(tmp_path / "runs/my_run")).Reload()
    first = [row for row in rows(log) if row["rank"] == 0]
    assert [row["step"] for row in first] == [4, 8]
    for name in ("train_loss", "val_acc", "lr", "comm", "samples/s"):
        written = {event.step: event.value for event in events.Scalars(name)}
        assert written == pytest.approx({row["step"]: row[name] for row in first})


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_train_with_one_loss_curve(run, request, paste, tmp_path, name):
    """They train on 1, 2 and 3 processes, two workers each, in place of any script's section."""
    band = (ROOT / f"examples/{name}.py").read_text()
    flags = re.sub(
        r"\{(\w+)\}", lambda match: str(request.getfixturevalue(match[1])), EXAMPLES[name]
    )
    words = (*flags.split(), "--num_workers", 2, "--batch_size", 12, "--max_steps", 24)
    curves = []
    for (folder, processes), task in zip(LAUNCHES, ("images", "text", "gpt")):
        log, snapshot = tmp_path / f"{folder}.jsonl", tmp_path / f"{folder}.pt"
        more = ("--eval_every", 8, "--log", log, "--snapshot", snapshot)
        run(paste(band, folder, task), *words, *more, processes=processes)
        assert curve(log)[-1, 1] < curve(log)[0, 1], "it learns"
        assert load(snapshot)["step"] == rows(log)[-1]["step"] == 24
        assert {weight.dtype for weight in load(snapshot)["model"].values()} == {torch.float32}
        curves.append(curve(log))
    for each in curves[1:]:
        np.testing.assert_allclose(each, curves[0], rtol=1e-5)


LOSS = 'return loss, {"loss": loss * len(targets), "mae": errors, "count": len(targets)}'
DATA = "return [Subset(data, part.indices) for part in parts]"
FACTOR = "return (1 + math.cos(math.pi * done)) / 2"
NETWORK = "return nn.Sequential(nn.Linear(len(features), 16), nn.ReLU(), nn.Linear(16, 1))"
OPTIMIZER = "return torch.optim.SGD(model.parameters(), args.learning_rate, momentum=0.9)"
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
MISTAKES = {  # name: (text of the table's section, what stands there instead, the message)
    "no sums": (LOSS, "return loss", "0-d tensor"),
    "infinite": (LOSS, LOSS.replace("loss * len(targets)", "math.inf"), "not finite at step 1"),
    "infinite at last": (LOSS, AT_LAST, "the loss is not finite at step 20"),
    "sample": (DATA, UNREADABLE, "sample 77 cannot be read"),
    "too little": ("[0.8, 0.2]", "[10, 590]", "samples are too few"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_a_section_are_told(attempt, table_band, paste, tmp_path, name):
    """Each ends the run with an error, with workers as without, and nothing is saved."""
    text, mistake, message = MISTAKES[name]
    for (folder, processes), workers in zip(LAUNCHES[:2], (0, 2)):
        script = paste(replaced(table_band, {text: mistake}), folder)
        words = ("--num_workers", workers, "--snapshot", tmp_path / "s.pt")
        status, _, err = attempt(script, *words, processes=processes)
        assert status and message in err and not (tmp_path / "s.pt").exists(), err


def test_flags_named_like_results(run, table_band, paste):
    """They are none in the summary."""
    line = '    parser.add_argument("--table"'
    more = '    parser.add_argument("--val_names", nargs="+", default=["a"])\n'
    for folder, processes in LAUNCHES[:2]:
        script = paste(replaced(table_band, {line: more + line}), folder)
        out = run(script, "--max_steps", 2, processes=processes)
        assert "| val_loss |" in out and "val_names" not in out


def test_batches_in_which_nothing_counts(run, table_band, paste):
    """A run goes on if a process has no labelled sample in a batch, or none at all."""
    nothing = 'return 0 * loss, {"loss": 0 * loss, "mae": 0 * errors, "count": 0}'
    for folder, processes in LAUNCHES[:2]:
        script = paste(replaced(table_band, {LOSS: nothing}), folder)
        out = run(script, "--epochs", 1, processes=processes)
        assert re.search(r"^step 20 +lr", out, re.M), out


def test_weights_that_are_not_finite(refused, run, table_band, paste, tmp_path):
    """They are not saved over good ones."""
    for folder, processes in LAUNCHES[:2]:
        words = ("--snapshot", snapshot := tmp_path / f"{folder}.pt", "--max_steps")
        run(paste(table_band, folder), *words, 20, processes=processes)
        before = snapshot.read_bytes()
        script = paste(replaced(table_band, {FACTOR: "return math.inf"}), folder)
        refused("the weights are not finite at step 21", script, *words, 21, processes=processes)
        assert snapshot.read_bytes() == before


IN_FORWARD = """class Moving(nn.Linear):
        def forward(self, x):
            self.weight.data += 1e-3 * self.training * x.mean()
            return super().forward(x)
    return nn.Sequential(Moving(len(features), 16), nn.ReLU(), nn.Linear(16, 1))"""
FROZEN = NETWORK.replace("return", "model =")
FROZEN += "\n    globals()['late'] = model[0].requires_grad_(False)\n    return model"
THAWED = "late.requires_grad_(done > 0.3)\n    return 1.0"
DIFFERING = {"in forward": {NETWORK: IN_FORWARD}, "thawed": {NETWORK: FROZEN, FACTOR: THAWED}}


@pytest.mark.parametrize("name", DIFFERING)
def test_copies_that_differ_end_the_run(refused, table_band, paste, tmp_path, name):
    """Parameters that forward() changes, and those that DDP does not know as trained."""
    band = replaced(table_band, DIFFERING[name])
    words = ("--max_steps", 20, "--eval_every", 10, "--snapshot", tmp_path / "s.pt")
    for folder, processes in LAUNCHES[1:]:
        told = "step 10: 0.weight is not the same in all processes. Does forward() change it"
        refused(told, paste(band, folder), *words, processes=processes)
    assert not (tmp_path / "s.pt").exists()


NOISY = """class Noisy(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            [group] = self.param_groups
            for weight in group["params"]:
                weight.data += group["lr"].square() * torch.randn_like(weight)
    return Noisy(model.parameters(), torch.tensor(args.learning_rate), momentum=0.9)"""


def test_an_optimizer_that_draws_numbers_has_a_tensor_as_rate(run, table_band, paste, tmp_path):
    """It draws the same in all processes, however many. The rate is scaled, and stays a tensor."""
    curves, log = [], tmp_path / "log.jsonl"
    for folder, processes in LAUNCHES[1:]:
        script = paste(replaced(table_band, {OPTIMIZER: NOISY}), folder)
        run(script, "--max_steps", 15, "--eval_every", 5, "--log", log, processes=processes)
        curves.append(curve(log))
        expected = [0.1 * (1 + np.cos(np.pi * step / 15)) / 2 for step in (5, 10, 15)]
        assert [row["lr"] for row in rows(log)[::processes]] == pytest.approx(expected)
        log.unlink()
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-5)


def test_a_set_numbers_the_columns(start, table_band, paste, tmp_path, monkeypatch):
    """Python orders a set of strings anew in each process, but for those that multigpu starts."""
    columns = "[int(name[1:]) for name in {f'x{number}' for number in range(8)}]"
    band = replaced(table_band, {"table[:, :-1], table": f"table[:, {columns}], table"})
    status, _, err = start(paste(band, "multinode"), processes=2).wait()
    told = "the processes have different data or snapshots. Sort what comes from a set"
    assert status == 1 and told in err, err
    for folder, processes in LAUNCHES[1::-1]:
        words = ("--max_steps", 10, "--log", tmp_path / f"{folder}.jsonl")
        assert start(paste(band, folder), *words, processes=processes).wait()[0] == 0
        monkeypatch.setitem(ENVIRONMENT, "PYTHONHASHSEED", "0")  # as multigpu sets it
    one, two = (curve(tmp_path / f"{folder}.jsonl") for folder, _ in LAUNCHES[:2])
    np.testing.assert_allclose(two, one, rtol=1e-5)


def test_an_order_from_a_generator_without_a_seed(start, table_band, paste):
    """Each process would draw another order: some samples twice, others never."""
    band = replaced(table_band, {"np.random.perm": "np.random.default_rng().perm"})
    status, _, err = start(paste(band, "multigpu"), processes=2).wait()
    assert status == 1 and "the processes have different data" in err, err


def test_sums_in_bfloat16(run, table_band, paste, tmp_path):
    """Added up in bfloat16, 300 ones would be 256."""
    ones = '"ones": torch.ones((), dtype=torch.bfloat16), "count"'
    script = paste(replaced(table_band, {'"count"': ones}), "singlegpu")
    run(script, "--max_steps", 300, "--eval_every", 300, "--log", tmp_path / "log.jsonl")
    (row,) = rows(tmp_path / "log.jsonl")
    assert row["train_ones"] * row["batch_size"] == pytest.approx(1)


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


@pytest.mark.parametrize(("folder", "processes"), LAUNCHES[:2])
def test_what_is_drawn_at_random(run, table_band, paste, tmp_path, folder, processes):
    """The order of an epoch is drawn alike in all processes, and differs from the next one's.

    Augmentation, by any library, differs between processes, steps and epochs, also where the
    order is fixed. A resumed run draws both again, and ends with the same weights.
    """
    changes = {DATA: DRAWING, "return np.random.permutation(len(data))": ORDER}
    changes = {
        text: new.replace("FOLDER", str(tmp_path / "drawn")) for text, new in changes.items()
    }
    script = paste(replaced(table_band, changes | {FACTOR: "return 1.0"}), folder)
    (tmp_path / "drawn").mkdir()
    words = ("--batch_size", 240, "--snapshot")  # two steps an epoch
    for steps, name in ((4, "whole"), (1, "resumed"), (4, "resumed")):
        run(script, *words, tmp_path / f"{name}.pt", "--max_steps", steps, processes=processes)
    assert_same_weights(tmp_path / "whole.pt", tmp_path / "resumed.pt")
    orders = [(tmp_path / f"drawn/order{epoch}").read_text().splitlines() for epoch in (0, 1)]
    assert [len({*lines}) for lines in orders] == [1, 1] and orders[0][0] != orders[1][0]
    drawn = [set(path.read_text().split()) for path in (tmp_path / "drawn").glob("[0-9]*")]
    assert len(drawn) == 3 * processes
    # Three numbers a sample; also of the fingerprint's three, and of that of create_model.
    assert len(set.union(*drawn)) == 3 * (4 * 240 + 3 + 1)


def test_fp16_resumes_with_its_scale(run, table_band, paste, tmp_path):
    """A loss so large that the first steps are left out, until the scale of fp16 fits."""
    band = replaced(table_band, {LOSS: LOSS.replace("loss,", "1e4 * loss,", 1)})
    script = paste(replaced(band, {FACTOR: "return 1.0"}), "multigpu")
    words = ("--precision", "fp16", "--learning_rate", 1e-6, "--snapshot")
    for steps, name in ((24, "whole"), (12, "resumed"), (24, "resumed")):
        run(script, *words, tmp_path / f"{name}.pt", "--max_steps", steps, processes=2)
    assert load(tmp_path / "whole.pt")["scaler"]["scale"] < 2**16 / 2**5
    assert_same_weights(tmp_path / "whole.pt", tmp_path / "resumed.pt")
