"""Flags are tested by their effect, as probe.py sees it. A flag of a section is proven once."""

import ast
import functools
import json
import re

import numpy as np
import pytest
from conftest import ROOT, SCRIPTS, curve, rows
from test_project import readme_commands


def strings_of(source):
    """Returns the strings of a source, but for docstrings and what is compared with a text."""
    left_out, strings = set(), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr):
            left_out.add(node.value)
        elif isinstance(node, ast.Compare):
            left_out |= {node.left, *node.comparators}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.append(node)
    return [node.value for node in strings if node not in left_out]


def test_each_flag_is_given_in_a_test():
    """In a string of a test, or in a command of README.md, which test_project.py runs."""
    files = [path for name in ("test_", "soak_") for path in (ROOT / "tests").rglob(f"{name}*.py")]
    given = [text for path in files for text in strings_of(path.read_text())] + readme_commands()
    given = {*re.findall(r"--\w+", " ".join(given))}
    command = ROOT / "tools/check/__main__.py"
    for path in (*map(ROOT.joinpath, SCRIPTS), *ROOT.glob("tools/*.py"), command):
        flags = {*re.findall(r'\badd(?:_argument)?\("(--\w+)"', path.read_text())}
        assert flags <= given, (path, flags - given)
        assert flags or path.name in ("paste.py", "logs.py", "timing.py", "check.py")


@pytest.fixture(scope="module")
def seen(run, data, tmp_path_factory):
    """seen(script, flags, processes) returns what probe.py saw, and rank 0's rows of the log.

    found[rank][step] is what it wrote of a step: a dictionary that its docstring explains.
    """

    @functools.cache
    def seen(script, flags, processes=1):
        folder = tmp_path_factory.mktemp("seen")
        task = ["--dataset", "mnist", "--data_dir", data, "--model", "mlp", "--batch_size", 24]
        if "gpt" in script:
            words = "--d_model 32 --n_heads 2 --num_layers 2 --seq_len 32 --batch_size 24"
            task = ["--dataset", data / "words.txt", *words.split()]
        elif "images" not in script:
            task = ["--batch_size", 24]
        words = [*task, *flags.split(), "--log", folder / "log.jsonl"]
        words += [] if re.search("max_steps|epochs", flags) else ["--max_steps", 3]
        run(script, *words, processes=processes, before=(ROOT / "tests/helpers/probe.py", folder))
        found = [json.loads(path.read_text()) for path in sorted(folder.glob("?.json"))]
        return found, [row for row in rows(folder / "log.jsonl") if row["rank"] == 0]

    return seen


def losses_of(logged):
    return np.array([(row["train_loss"], row["val_loss"]) for row in logged])


def bytes_of(step, operation):
    """The bytes of gradients or weights in collectives of this name."""
    return sum(size for name, _, size in step["sent"] if operation in name and size > 1000)


def computes_in(dtype, matmul="highest"):
    """The types in which layers compute. With tf32, GPUs may round factors of float32."""

    def effect(plain, step):
        assert (plain["dtypes"], plain["matmul"]) == (["float32"], "highest")
        assert (step["dtypes"], step["matmul"]) == ([dtype], matmul)

    return effect


def sends_half(plain, step):
    """Gradients are sent as bf16, in half the bytes, and weights of FSDP as before."""
    large = {kind for name, kind, size in step["sent"] if "reduce" in name and size > 5000}
    assert large == {"bfloat16"}
    assert bytes_of(step, "reduce") == bytes_of(plain, "reduce") / 2 > 50_000
    assert bytes_of(step, "gather") == bytes_of(plain, "gather")


def sums_half(plain, step):
    """The sums of parts are sent as bf16, forwards and backwards, and gradients in fp32."""
    computes_in("bfloat16")(plain, step)
    size = 24 * 32 * 32 * 4  # B, T, D and the bytes of a number
    in_fp32 = [each for each in plain["sent"] if each[1:] == ["float32", size]]
    in_bf16 = [each for each in step["sent"] if each[1:] == ["bfloat16", size // 2]]
    assert len(in_fp32) == len(in_bf16) >= 4 * 2, "four for each of two layers"
    assert bytes_of(step, "reduce") > 50_000


def gathers_half(plain, step):
    """Weights are sent in bf16, gradients in fp32."""
    computes_in("bfloat16")(plain, step)
    assert bytes_of(step, "gather") == bytes_of(plain, "gather") / 2 > 10_000
    assert bytes_of(step, "scatter") == bytes_of(plain, "scatter") > 10_000


def accumulates(plain, step):
    """Three micro-batches are sent as often as one. Layers run thrice, each on a third."""
    assert bytes_of(step, "reduce") == bytes_of(plain, "reduce")
    assert step["calls"] == 3 * plain["calls"] and 3 * step["shape"][0] == plain["shape"][0]


def has_workers(plain, step):
    """Each process that trains has two that load data."""
    assert (plain["workers"], step["workers"]) == (0, 2)


def runs_again(plain, step):
    """The backward pass runs each of the two blocks forward again."""
    assert re.fullmatch("F{8}B{8}", plain["order"])
    assert re.fullmatch("F{8}(BF+B+){2}", step["order"])


EFFECTS = {  # flags: what they change in the second step of each process, and in which scripts
    "--precision tf32": (computes_in("float32", "high"), "singlegpu/images"),
    "--precision bf16": (computes_in("bfloat16"), "singlegpu/images hybrid/gpt_pipeline"),
    "--precision bf16 --tensor_size 2": (sums_half, "hybrid/gpt_tensor"),  # 2: the default
    "--precision fp16": (computes_in("float16"), "singlegpu/images"),
    "--precision bf16 --grad_accum_steps 1": (gathers_half, "hybrid/gpt_fsdp"),  # 1: the default
    "--comm_hook bf16": (
        sends_half,
        "multigpu/images multinode/images hybrid/images hybrid/gpt_fsdp",
    ),
    "--grad_accum_steps 3": (accumulates, "singlegpu/images multinode/images hybrid/gpt_fsdp"),
    "--num_workers 2": (has_workers, "singlegpu/images multigpu/images hybrid/gpt_pipeline"),
    "--checkpoint_activations": (runs_again, "hybrid/gpt_fsdp"),
}
EACH = "--eval_every 1"
CASES = [(flags, script) for flags, (_, scripts) in EFFECTS.items() for script in scripts.split()]


@pytest.mark.parametrize(("flags", "script"), CASES)
def test_effects(seen, flags, script):
    """The losses stay nearly the same. There is a validation before the second step."""
    processes = 1 if "singlegpu" in script else 2
    runs = [seen(f"{script}.py", f"{EACH} {more}", processes) for more in ("", flags)]
    (plain, expected), (found, logged) = runs
    assert losses_of(logged) == pytest.approx(losses_of(expected), rel=0.02)
    assert len(plain) == len(found) == processes
    for before, after in zip(plain, found):
        EFFECTS[flags][0](before[1], after[1])


def test_rate_and_norm(seen):
    """The optimizer gets the rate, which falls, and a gradient of at most --max_grad_norm.

    The row has the rate and the norm before clipping of its step, the same on two processes as on
    one. With fp16, it is that of the gradient without its scale.
    """
    rates = 1e-3 * (1.05 - np.array([1, 2, 3]) / 3)  # images.py's, after each third of the steps
    norms, last = [], []
    for more in ("1e9", "0.01 --precision fp16"):
        for script, processes in ("singlegpu/images.py", 1), ("multigpu/images.py", 2):
            found, [row] = seen(script, f"--learning_rate 1e-3 --max_grad_norm {more}", processes)
            assert [step["rate"] for step in found[-1]] == pytest.approx(rates)
            assert (row["lr"], row["epoch"]) == pytest.approx((rates[-1], 3 / 50))
            norms.append([step["norm"] for step in found[-1]])
            last.append(row["grad_norm"])
    np.testing.assert_allclose(norms[1], norms[0], rtol=1e-4)
    np.testing.assert_allclose(last[:2], norms[0][-1], rtol=1e-4)
    np.testing.assert_allclose(norms[2:], 0.01, rtol=0.01)
    np.testing.assert_allclose(last[2:], norms[0][-1], rtol=0.05)


def test_seed(seen, tmp_path):
    """Another seed gives other weights. From the same weights, its order gives other losses."""
    start, more = "singlegpu/images.py", "--learning_rate 0 --max_steps 3 --seed"
    one, other = (losses_of(seen(start, f"{more} {seed}")[1]) for seed in (1, 2))
    assert (one != other).all()
    seen(start, f"{more} 3 --snapshot {tmp_path}/s.pt")
    from_it = f"--init_from {tmp_path}/s.pt"
    one, other = (losses_of(seen(start, f"{more} {seed} {from_it}")[1]) for seed in (1, 2))
    assert one[0, 0] != other[0, 0] and one[0, 1] == other[0, 1]


STEPS = [  # 1,200 images are 5 steps of 240, and the text is 4. --max_steps is the total
    ("singlegpu/images.py", 1, "--epochs 2 --eval_every 3", [3, 6, 9, 10]),
    ("singlegpu/images.py", 1, "--epochs 2 --max_steps 7", [5, 7]),
    ("hybrid/gpt_pipeline.py", 2, "--epochs 2 --eval_every 3", [3, 6, 8]),
]


@pytest.mark.parametrize(("script", "processes", "flags", "at"), STEPS)
def test_steps_and_rows(seen, script, processes, flags, at):
    found, logged = seen(script, f"{flags} --batch_size 240", processes)
    assert len(found[0]) == at[-1] and [row["step"] for row in logged] == at


FINISH = '    """Rank 0 calls it'
GRAPHS = '    print("graphs", torch._dynamo.utils.counters["stats"]["unique_graphs"])\n'


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("folder", ("singlegpu", "multigpu", "multinode", "hybrid"))
def test_compile(run, changed, data, tmp_path, folder):
    """Graphs are traced, and the loss is the eager one. The emulated accelerator runs the graphs.

    Kernels that are generated: the soak.
    """
    words = ("--model", "mlp", "--dataset", "mnist", "--data_dir", data)
    words = (*words, "--batch_size", 401, "--max_steps", 4)  # no other length is validated
    words = (*words, "--eval_every", 4, "--log", tmp_path / "log")
    script = changed(f"{folder}/images.py", {FINISH: GRAPHS + FINISH})
    outs = [run(script, *words, *more, EMU_DEVICES="4") for more in ((), ("--compile",))]
    before, after = (int(re.search(r"^graphs (\d+)", out, re.M)[1]) for out in outs)
    assert before == 0 < after
    eager, compiled = curve(tmp_path / "log")
    np.testing.assert_allclose(compiled, eager, rtol=1e-4)


def test_pipeline(seen):
    """A process runs its part of the layers. gpipe runs all micro-batches forward, then backward.

    1f1b alternates, so that stage s of S holds at most S - s micro-batches.
    """
    for num_stages, count, schedule, order in (4, 2, "gpipe", "FB"), (4, 6, "1f1b", "FBFBFB"):
        flags = f"--num_stages {num_stages} --num_microbatches {count} --schedule {schedule}"
        found, _ = seen("hybrid/gpt_pipeline.py", f"--num_layers 4 {flags}", 4)
        first = found[0][1]
        assert first["calls"] == 4 * 4 / num_stages * count, "a block has four linear layers"
        assert first["shape"][0] == 24 * num_stages / 4 / count
        assert re.sub(r"(.)\1+", r"\1", first["order"]) == order
        for rank, (_, step, _) in enumerate(found):
            held = np.cumsum([{"F": 1, "B": -1}[each] for each in step["order"]])  # calls
            most = num_stages - rank % num_stages if schedule == "1f1b" else count
            assert held.max() == most * step["calls"] / count and held[-1] == 0


TABLES = "--dataset tables --data_dir {data} --seq_len"
PAIRS = f"{TABLES} 5 --source number --target name --model"
MODELS = {  # flags; the shapes of the queries (B, H, T, D / H) of each attention; how many dropouts
    "gpt": (
        "--d_model 32 --n_heads 4 --num_layers 3 --seq_len 16",
        [[24, 4, 16, 8]] * 3,
        1 + 3 * 2,
    ),
    "text large": (
        f"{TABLES} 4 --model transformer --size large",
        [[24, 8, 4, 32]] * 4,
        1 + 4 * 2 + 1,
    ),
    "translation transformer": (
        f"{PAIRS} transformer",
        [[24, 8, 5, 32]] * 3 + [[24, 8, 4, 32]] * 6,  # the decoder reads all but the last word
        2 + 3 * 2 + 3 * 3,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(seen, data, name):
    """The network has as many attentions as it must, each of this shape.

    With --dropout, this share of values becomes zero.
    """
    flags, shapes, dropouts = MODELS[name]
    flags = f"{flags.format(data=data)} --dropout 0.3 --max_steps 1"
    found, _ = seen(f"singlegpu/{name.split()[0]}.py", flags)
    [step] = found[0]
    assert step["attention"] == shapes
    assert len(step["dropped"]) == dropouts
    assert np.mean(step["dropped"]) == pytest.approx(0.3, abs=0.03)
