"""Flags are tested by their effect, as probe.py sees it. A flag of a section is proven once."""

import ast
import fnmatch
import functools
import json
import re

import numpy as np
import pytest
from conftest import ROOT, SCRIPTS, curve, rows

RUNS = "singlegpu/TASK multigpu/TASK multinode/TASK hybrid/images hybrid/gpt_*"
PARALLEL = RUNS.removeprefix("singlegpu/TASK ")
MNIST = "singlegpu/mnist multigpu/mnist multinode/mnist hybrid/mnist"
TASKS = "gpt images text translation".split()
# The flags, the scripts that have them (without .py), and the file that tests what they do.
FLAGS = f"""
--epochs --max_steps --eval_every --batch_size --grad_accum_steps | {RUNS} | test_flags
--learning_rate --max_grad_norm --precision --num_workers --seed | {RUNS} | test_flags
--compile | */TASK hybrid/images | test_flags
--compile | hybrid/gpt_* | soak_scripts
--snapshot | */TASK | test_stops
--snapshot | hybrid/* | test_hybrid
--init_from | {RUNS} | test_images
--log | {RUNS} | test_training
--num_gpus | multigpu/* | conftest
--comm_hook | {PARALLEL} | test_flags
--num_stages | hybrid/images | test_hybrid
--num_stages --num_microbatches --schedule | hybrid/gpt_pipeline | test_flags
--shard_size | hybrid/gpt_fsdp | test_hybrid
--checkpoint_activations | hybrid/gpt_fsdp | test_flags
--dataset --data_dir | */images | test_flags
--dataset --data_dir | */text | test_models
--dataset --data_dir --source --target | */translation | test_models
--dataset --vocab_size --sample | */gpt* | test_models
--d_model --n_heads --num_layers --seq_len --model --size | */TASK hybrid/* | test_flags
--dropout | */TASK hybrid/* | test_flags
--pretrained | */images | test_project
--image_size | */images | test_images
--synthetic | */mnist | test_mnist
--data_dir --epochs --batch_size | {MNIST} | test_mnist
--data_dir --model | quantize/mnist | test_mnist
--min_bytes --max_bytes --out --seconds --timeout --pairs --expect | */allreduce | test_allreduce
--data_dir --num_images --versions --copies --out | */make_bigmnist | test_images
--snapshot --row --out --eager --dataset --batch_size | quantize/gpt | test_quantize
--num_samples --rounds | quantize/gpt | test_quantize
--out --step | *report | test_report
--out --processes --steps --link --latency --gpus_per_node | *predict | test_predict
"""


def flags_of(script):
    """The flags that a script adds to a parser: the first word of `add("--flag", ...)`."""
    for node in ast.walk(ast.parse((ROOT / script).read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("add", "add_argument")):
            words = [word.value for word in node.args if isinstance(word, ast.Constant)]
            yield from (word for word in words if str(word).startswith("--"))


def test_each_flag_is_listed():
    """Each flag of a script is in the table, and the test file named there has it, too."""
    scripts = [*SCRIPTS, *[str(path.relative_to(ROOT)) for path in ROOT.glob("tools/[!c]*.py")]]
    missing = {(script[:-3], flag) for script in scripts for flag in flags_of(script)}
    assert len(missing) > 250 and ("hybrid/images", "--num_stages") in missing
    all_flags = set(missing)
    for row in FLAGS.strip().splitlines():
        flags, patterns, [test] = (cell.split() for cell in row.split("|"))
        patterns = {each.replace("TASK", task) for each in patterns for task in TASKS}
        found = {
            (script, flag)
            for script, flag in all_flags
            if flag in flags and any(fnmatch.fnmatch(script, pattern) for pattern in patterns)
        }
        folder = ROOT / ("tests/soak" if test.startswith("soak") else "tests")
        text = (folder / f"{test}.py").read_text()
        tested = [flag for flag in flags if re.search(rf"{flag}\b", text)]
        assert {flag for _, flag in found} <= {*tested}, f"not tested there: {row}"
        missing -= found
    assert not missing, f"flags without a test of what they do: {sorted(missing)}"


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


PRECISIONS = [
    ("singlegpu/images.py", 1, "tf32 bf16 fp16"),
    ("hybrid/gpt_pipeline.py", 2, "bf16"),
    ("hybrid/gpt_fsdp.py", 2, "bf16"),
]
DTYPES = {"tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@pytest.mark.parametrize(("script", "processes", "precisions"), PRECISIONS)
def test_precision(seen, script, processes, precisions):
    """The types in which layers compute. With tf32, GPUs may round factors of float32."""
    found, logged = seen(script, "", processes)
    plain = losses_of(logged)
    kinds = {(*step["dtypes"], step["matmul"]) for step in sum(found, [])}
    assert kinds == {("float32", "highest")}
    for name in precisions.split():
        found, logged = seen(script, f"--precision {name}", processes)
        losses, steps = losses_of(logged), sum(found, [])
        assert len(steps) == 3 * processes
        assert losses == pytest.approx(plain, rel=0.02)
        assert (losses != plain).all() == (name[-2:] == "16")
        for step in steps:
            assert step["dtypes"] == [DTYPES[name]]
            assert step["matmul"] == ("high" if name == "tf32" else "highest")
            if "fsdp" in script:  # parameters are sent in bf16, gradients in fp32
                sent = {(operation.split("_")[1], kind) for operation, kind, _ in step["sent"]}
                sent = {each for each in sent if each[0] != "reduce"}
                assert sent == {("gather", "bfloat16"), ("scatter", "float32")}


@pytest.mark.parametrize("script", ("multigpu/images.py", "hybrid/images.py", "hybrid/gpt_fsdp.py"))
def test_comm_hook(seen, script):
    """Gradients are sent in bf16, in half the bytes, and the loss stays nearly the same."""
    sent, gathered, losses = [], [], []
    for flags, kind in {"": "float32", "--comm_hook bf16": "bfloat16"}.items():
        found, logged = seen(script, flags, 2)
        large = [each for each in found[1][1]["sent"] if each[2] > 1000]
        assert {each[1] for each in large if "reduce" in each[0]} == {kind}
        sent.append(sum(size for name, _, size in large if "reduce" in name))
        gathered.append(sum(size for name, _, size in large if "gather" in name))  # FSDP's weights
        losses.append(logged[-1]["train_loss"])
    assert sent[1] == sent[0] / 2 > 50_000
    assert len({*gathered}) == 1 and (gathered[0] > 0) == ("fsdp" in script)
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


ACCUMULATING = [
    ("singlegpu/images.py", 1),
    ("multinode/images.py", 2),
    ("hybrid/images.py", 2),
    ("hybrid/gpt_fsdp.py", 2),
]


@pytest.mark.parametrize(("script", "processes"), ACCUMULATING)
def test_grad_accum_steps(seen, script, processes):
    """Three micro-batches are sent as often as one; layers run thrice as often.

    --batch_size counts the samples of all micro-batches and processes.
    """
    counts = []
    for parts in (1, 3):
        flags = f"--grad_accum_steps {parts} --max_steps 2"
        found, _ = seen(script, flags, processes)
        sent = [name for name, _, size in found[0][1]["sent"] if size > 1000]
        operation = "reduce_scatter" if "fsdp" in script else "all_reduce"
        count = sum(name.startswith(operation) for name in sent)
        counts.append((count, found[0][1]["calls"]))
        assert found[-1][1]["shape"][0] * parts * processes == 24
    assert counts[0][0] == counts[1][0] and counts[1][1] == 3 * counts[0][1]
    assert (counts[0][0] > 0) == (processes > 1)


WORKING = [("singlegpu/images.py", 1), ("multigpu/images.py", 2), ("hybrid/gpt_pipeline.py", 2)]


@pytest.mark.parametrize(("script", "processes"), WORKING)
def test_num_workers(seen, script, processes):
    """Each process that trains has so many that load data."""
    found, _ = seen(script, "", processes)
    loaded, _ = seen(script, "--num_workers 2", processes)
    assert [{each[0]["workers"] for each in some} for some in (found, loaded)] == [{0}, {2}]


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
    one, other = (
        losses_of(seen(start, f"{more} {seed} --init_from {tmp_path}/s.pt")[1]) for seed in (1, 2)
    )
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


@pytest.mark.parametrize("folder", ("singlegpu", "multigpu", "hybrid"))
def test_compile(logged, data, tmp_path, folder):
    """Kernels are generated for forward and backward, and the loss is the eager one."""
    settings = {"CACHE_DIR": str(tmp_path), "COMPILE_THREADS": "1"}
    # Without what takes half a minute: trials of the compiler, and headers that are compiled first.
    settings |= {"VEC_ISA_OK": "0", "CPP_CACHE_PRECOMPILE_HEADERS": "0"}
    env = {f"TORCHINDUCTOR_{name}": value for name, value in settings.items()}
    words = ("--model", "mlp", "--dataset", "mnist", "--data_dir", data)
    words = (*words, "--batch_size", 401, "--max_steps", 4)  # no other length is validated
    words += ("--num_stages", 1) if folder == "hybrid" else ()
    losses, made = [], []
    for more in ((), ("--compile",)):
        losses.append(curve(logged(f"{folder}/images.py", *words, *more, **env)))
        made.append(len([*tmp_path.glob("**/*.py")]))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    assert made[0] == 0 and made[1] >= 2, "forward and backward"


def test_pipeline(seen):
    """A process runs its part of the layers. gpipe runs all micro-batches forward, then backward.

    1f1b alternates, so that stage s of S holds at most S - s micro-batches.
    """
    for num_stages, count, schedule, order in (2, 4, "gpipe", "FB"), (4, 6, "1f1b", "FBFBFB"):
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


def test_checkpoint_activations(seen):
    """The backward pass runs each of the two blocks forward again."""
    one, _ = seen("hybrid/gpt_fsdp.py", "", 2)
    two, _ = seen("hybrid/gpt_fsdp.py", "--checkpoint_activations", 2)
    assert re.fullmatch("F{8}B{8}", one[0][1]["order"])
    assert re.fullmatch("F{8}(BF+B+){2}", two[0][1]["order"])


TABLES = "--dataset tables --data_dir {data} --seq_len"
PAIRS = f"{TABLES} 5 --source number --target name --model"
MODELS = {  # flags, and the shapes of the queries (B, H, T, D / H) of each attention
    "gpt": ("--d_model 32 --n_heads 4 --num_layers 3 --seq_len 16", [[24, 4, 16, 8]] * 3),
    "text large": (f"{TABLES} 4 --model transformer --size large", [[24, 8, 4, 32]] * 4),
    "translation transformer": (
        f"{PAIRS} transformer",
        [[24, 8, 5, 32]] * 3 + [[24, 8, 4, 32]] * 6,  # the decoder reads all but the last word
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(seen, data, name):
    """The network has as many attentions as it must, each of this shape.

    With --dropout, this share of values becomes zero.
    """
    flags, shapes = MODELS[name]
    flags = f"{flags.format(data=data)} --dropout 0.3 --max_steps 1"
    found, _ = seen(f"singlegpu/{name.split()[0]}.py", flags)
    [step] = found[0]
    assert step["attention"] == shapes
    assert np.mean(step["dropped"]) == pytest.approx(0.3, abs=0.03)
