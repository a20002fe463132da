"""Functions that users paste, on the runs of three folders: they train; mistakes are told."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import CONSTANT, ROOT, assert_same_weights, call, curve, load, module, replaced
from conftest import rows
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_stops import signalled
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DistilBertConfig, DistilBertForSequenceClassification
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXTS = {path.stem: path.read_text() for path in (ROOT / "examples").glob("*.py")}
README = (ROOT / "examples/README.md").read_text()
[TEXTS["README"]] = re.findall(r"^```python\n(def read_data.*?)^```", README, re.M | re.S)
LAUNCHES = (("multigpu", 2), ("multinode", 3))
WORDS = [f"w{number}" for number in range(40)]  # those of the texts in `data`


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Two tiny networks with their tokenizer, which has no padding, as some of the Hub; a text.

    In the text, each word is followed by the next. The weights of one network have 16 bits.
    """
    folder = tmp_path_factory.mktemp("hub")
    (folder / "text.txt").write_text(" ".join(WORDS * 50))
    vocab = {word: id for id, word in enumerate(["[EOS]", "[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"eos_token": "[EOS]", "unk_token": "[UNK]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    sizes = {"vocab_size": 42, "max_position_embeddings": 16, "num_attention_heads": 2}
    sizes |= {"hidden_size": 16, "num_hidden_layers": 1}
    rates = dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), 0.0)
    torch.manual_seed(0)  # the weights do not depend on what other tests have drawn
    bert = DistilBertForSequenceClassification(DistilBertConfig(**sizes, **rates, hidden_dim=32))
    llama = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=32))
    for name, model in {"bert": bert.half(), "llama": llama}.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A table of a constant, ages, prices, Unix times within minutes, and a target."""
    path = tmp_path_factory.mktemp("table") / "table.csv"
    ages, prices, times, noise = np.random.default_rng(0).standard_normal((4, 600))
    target = 150 + 40 * ages - 20 * prices + 50 * times + 8 * noise
    columns = [0 * ages, 50 + 10 * ages, 9e5 + 1e5 * prices]
    columns += [np.round(1_764_300_000 + 30 * times), target]
    np.savetxt(path, np.stack(columns, axis=1), "%.12g", ",", header="none,age,price,time,target")
    return path


@pytest.fixture
def paste(tmp_path):
    """paste(example, folder) is a copy of images.py of a folder with the example, by paste.py."""

    def paste(example, folder, name="images.py"):
        (task := tmp_path / "task.py").write_text(example)
        done = call(module("tools/paste.py"), task, ROOT / folder / name)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        (script := tmp_path / f"{folder}/mine.py").parent.mkdir(exist_ok=True)
        script.write_text(done.stdout)
        return script

    return paste


def misnamed(script):
    """What ruff says of names that are not defined."""
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", script]
    return subprocess.run(ruff, capture_output=True, text=True).stdout


EXAMPLES = {  # name: its flags
    "README": "",
    "table": "",
    "huggingface": "--network {hub}/bert --texts {data}/tables --seq_len 8 --learning_rate 1e-2",
    "lora": "--network {hub}/llama --text {hub}/text.txt --seq_len 8 --learning_rate 3e-2",
    "segmentation": "--image_size 24",
    "forecast": "--window 48 --horizon 12",
    "ema": "--dataset mnist --data_dir {data}",
    "contrastive": "",
}


def test_each_example_is_tried():
    others = {"README", "muon", "tokens", "show_log", "predict_photo"}  # that by test_project.py
    others |= {"to_hf"}  # test_hub.py
    found = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert found | {"README"} == EXAMPLES.keys() | others


PASTED = {  # a task: the end of what is said, and whether it is refused
    "def read_datas(args): pass": ("the run calls: batch_loss, create_loader, create_mo", True),
    "def create_model(a, b): pass\ndef evaluate(): pass": ("has these names: evaluate", True),
    "def batch_loss(a, b, c): pass\ndef read_dataset(args): pass": (
        "read_dataset is not called by the run: is it meant to be read_data?",
        False,
    ),
    None: ("there is no file", True),
}


@pytest.mark.parametrize("task", PASTED)
def test_what_paste_says(tmp_path, task):
    """It refuses a task of which nothing would be trained, and warns of a near name."""
    path = tmp_path / "task.py"
    if task:
        path.write_text(task)
    done = call(module("tools/paste.py"), path, ROOT / "hybrid/images.py")
    told, is_refused = PASTED[task]
    assert (done.returncode == 1) == is_refused and told in done.stderr, done.stderr
    assert (done.stdout == "") == is_refused


@pytest.mark.parametrize("script", ["singlegpu/gpt.py", "multigpu/images.py", "hybrid/images.py"])
def test_pasted_functions_stand_once(paste, script):
    """The old ones are gone, helpers and all other functions stay, and the run is the same."""
    example = TEXTS["table"]
    folder, name = script.split("/")
    before, after = (ROOT / script).read_text(), paste(example, folder, name).read_text()
    defined = re.findall(r"^def (\w+)", after, re.M)
    assert len({*defined}) == len(defined), "each once"
    assert {*re.findall(r"^def (\w+)", before + example, re.M)} == {*defined}
    start = before.index("# == The run: ")
    assert after.endswith(before[start:]) and after.startswith(before[: before.index("# == Yours")])
    assert example.strip() in after


def test_muon(logged, paste, data, tmp_path):
    """It trains gpt.py; matrices of blocks go to Muon. Resumed, it has undisturbed weights."""
    script = paste(TEXTS["muon"], "multigpu", "gpt.py")
    script.write_text(replaced(script.read_text(), CONSTANT))
    words = "--d_model 16 --n_heads 2 --num_layers 2 --seq_len 16 --batch_size 12 --eval_every 15"
    words = (script, "--dataset", data / "words.txt", *words.split(), "--snapshot")
    cut, whole = tmp_path / "cut.pt", tmp_path / "whole.pt"
    logged(*words, cut, "--max_steps", 15, processes=2)
    for path in cut, whole:
        losses = curve(logged(*words, path, "--max_steps", 30, processes=2))
    assert_same_weights(cut, whole)
    assert losses[-1, 1] < losses[0, 1], "it learns"
    states = load(whole)["optimizer"]["state"].values()
    assert sum("momentum_buffer" in state for state in states) == 2 * 4, "four a block"
    assert sum("exp_avg" in state for state in states) == 2 + 2 * 4 + 2, "embeddings and norms"


GAN = """import torch
from torch import nn


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, noise):
"""


def test_a_generator_leaves_no_gradients_in_its_judge(tmp_path):
    """By the lines of the page, and none is lost for the generator."""
    [lines] = re.findall(r"^```python\n(fake = .*?)^```", README, re.M | re.S)
    lines = "".join(f"        {line}\n" for line in lines.splitlines())
    (path := tmp_path / "gan.py").write_text(f"{GAN}{lines}        return fake, judged\n")
    model = module(path).Gan()
    fake, judged = model(torch.randn(8, 3))
    assert torch.equal(judged, model.discriminator(fake))
    judged.sum().backward()
    assert all(weight.grad is None for weight in model.discriminator.parameters())
    assert all(weight.grad.any() for weight in model.generator.parameters())


def test_tokens(run, tmp_path):
    """gpt.py trains on the files that its docstring's command for a text makes. See test_hub.py."""
    (tmp_path / "my.txt").write_text(README * 5)
    [_, make] = re.findall(r"^    python (\S+ .*)", TEXTS["tokens"], re.M)
    [train] = re.findall(r"^python (\S+ .*)", run(*make.split(), cwd=tmp_path), re.M)
    run(*train.split(), "--batch_size", 4, "--max_steps", 2, processes=2, cwd=tmp_path)
    folder = tmp_path / "my_tokens"  # --out of tokens.py, if it is not given
    ids = np.concatenate([np.load(folder / f"{name}.npy") for name in ("train", "val")])
    text = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(ids.tolist())
    assert text == README * 5, "the tokens to validate on are the last ones"


def test_rows_of_a_log_in_tensorboard(run, tmp_path):
    """It has what rank 0 has measured, at its step."""
    places = [(step, rank) for step in (4, 8) for rank in (0, 1)]
    logged = [{"rank": rank, "step": step, "lr": step / 8 + rank} for step, rank in places]
    (tmp_path / "run.jsonl").write_text("\n".join(map(json.dumps, logged)))
    run("examples/show_log.py", "run.jsonl", "runs/my_run", cwd=tmp_path)
    events = EventAccumulator(str(tmp_path / "runs/my_run")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("lr")] == [(4, 0.5), (8, 1.0)]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_train_with_one_loss_curve(logged, paste, hub, data, table, tmp_path, name):
    """They train on one process and on several, two workers each."""
    example = TEXTS[name].replace("table.csv", str(table))
    flags = EXAMPLES[name].format(hub=hub, data=data).split()
    words = (*flags, "--num_workers", 2, "--batch_size", 12, "--max_steps", 24)
    several = [*EXAMPLES].index(name) % 2  # each has its turn in multigpu or multinode
    curves = []
    for folder, processes in (("singlegpu", 1), LAUNCHES[several]):
        assert "All checks passed" in misnamed(script := paste(example, folder))
        more = ("--eval_every", 8, "--snapshot", path := tmp_path / f"{folder}.pt")
        curves.append(curve(logged(script, *words, *more, processes=processes)))
        assert curves[-1][-1, 1] < curves[-1][0, 1], "it learns"
        dtypes = {weight.dtype for weight in load(path)["model"].values()}
        assert dtypes - {torch.int64} == {torch.float32}
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-5)


@pytest.mark.parametrize("name", ["README", "table"])
def test_a_table_of_unlike_columns(logged, paste, table, name):
    """Unix times, which float32 rounds to 128 s, and others: they explain most of the variance.

    Four fifths of the rows are trained on.
    """
    script = paste(TEXTS[name].replace("table.csv", str(table)), "singlegpu")
    words = ("--batch_size", 24, "--epochs", 10, "--learning_rate", 0.01)
    row = rows(logged(script, *words))[-1]
    assert row["val_loss"] < 0.3, "in squared deviations"
    assert row["num_samples"] == 480


def test_an_average_survives_a_resume(logged, paste, data, tmp_path):
    """It has the bits of an undisturbed run, and is what is validated."""
    script = paste(TEXTS["ema"], "multigpu")
    script.write_text(replaced(script.read_text(), CONSTANT))
    words = (script, "--dataset", "mnist", "--data_dir", data, "--batch_size", 48, "--snapshot")
    cut, whole = tmp_path / "cut.pt", tmp_path / "whole.pt"
    for path, num_steps in (cut, 10), (cut, 20), (whole, 20):
        more = ("--eval_every", 10, "--max_steps", num_steps)
        logged(*words, path, *more, processes=2)
    assert_same_weights(cut, whole)
    weights = load(cut)["model"]
    assert weights["average.n_averaged"] == 20
    assert (weights["network.1.weight"] != weights["average.module.1.weight"]).any()


ROW = "            row = log_row(row, model, device, settings)\n"
LOOP = "    for step in range(start_step + 1, num_steps + 1):\n"


def lines_of_the_page(folder, tmp_path):
    """Returns what stands above the loop, and what follows a row: early stopping, live logging."""
    page = (ROOT / "examples/README.md").read_text()
    lines = "".join(re.findall(r"^```python\n(            if .*?)^```", page, re.M | re.S))
    if folder == "singlegpu":
        lines = lines.replace(" and rank == 0", "").replace("rank == 0 and ", "")
    lines = lines.replace('"best.pt"', f'"{tmp_path}/best.pt"')
    start = "    from torch.utils.tensorboard import SummaryWriter\n"
    start += "    best_loss, bad_rows = math.inf, 0\n"
    start += f'    writer = SummaryWriter("{tmp_path}/runs")\n'
    return start + LOOP, lines


@pytest.mark.parametrize(("folder", "processes"), [("singlegpu", 1), *LAUNCHES])
def test_early_stopping_and_live_logging(logged, changed, base, tmp_path, folder, processes):
    """The lines of the page: all processes stop after the third row without a better loss.

    best.pt has the weights of the best row, and the log is in TensorBoard.
    """
    loop, lines = lines_of_the_page(folder, tmp_path)
    worse = f"{ROW}            row['val_loss'] = [3, 2, 4, 3, 2, 1][step // 2 - 1]\n"
    script = changed(f"{folder}/images.py", {LOOP: loop, ROW: worse + lines})
    log = logged(script, *base, "--max_steps", 12, "--eval_every", 2, processes=processes)
    assert max(row["step"] for row in rows(log)) == 10, "the fifth row is the third bad one"
    assert load(tmp_path / "best.pt")["model"]
    events = EventAccumulator(str(tmp_path / "runs")).Reload()
    steps = [event.step for event in events.Scalars("val_loss")]
    assert steps == [2, 4, 6, 8], "the last row breaks before"


@pytest.mark.parametrize(("folder", "processes"), [("singlegpu", 1), ("multigpu", 2)])
def test_a_stop_with_the_lines_of_the_page(attempt, changed, base, tmp_path, folder, processes):
    """The row of a stop has no validation, and the run still ends with "run me again"."""
    loop, lines = lines_of_the_page(folder, tmp_path)
    changes = {LOOP: loop, ROW: ROW + lines} | signalled("step == 5")
    script = changed(f"{folder}/images.py", changes)
    more = ("--epochs", 10_000, "--eval_every", 1000, "--snapshot", tmp_path / "s.pt")
    status, out, err = attempt(script, *base, *more, processes=processes)
    assert status == os.EX_TEMPFAIL and load(tmp_path / "s.pt")["step"] < 1000, out + err


DATA = "return [TensorDataset(part[:, :-1], part[:, -1:]) for part in parts]"
DRAWING = """class Drawing(TensorDataset):
        def __getitem__(self, indices):  # of a whole batch
            if torch.utils.data.get_worker_info():
                print(f"drawn {torch.rand(())}\\n", end="", flush=True)
            return super().__getitem__(indices)
    return [Drawing(part[:, :-1], part[:, -1:]) for part in parts]"""


def test_what_workers_draw(run, paste, table):
    """Augmentation differs between processes, workers, steps and epochs."""
    script = paste(replaced(TEXTS["table"], {DATA: DRAWING}), "multigpu")
    words = ("--batch_size", 120, "--max_steps", 8, "--num_workers", 2)  # four steps an epoch
    drawn = re.findall("^drawn (.*)", run(script, "--table", table, *words, processes=3), re.M)
    assert len({*drawn}) == len(drawn) > 8 * 3
