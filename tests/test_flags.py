"""Flags are tested by their effect, as probe.py sees it. A flag of a section is proven once."""

import ast
import fnmatch
import json
import re

import numpy as np
import pytest
from conftest import ROOT, SCRIPTS, rows
from PIL import Image

RUNS = "singlegpu/TASK multigpu/TASK multinode/TASK hybrid/images hybrid/gpt_*"
PARALLEL = RUNS.removeprefix("singlegpu/TASK ")
MNIST = "singlegpu/mnist multigpu/mnist multinode/mnist hybrid/mnist"
TASKS = "gpt images text translation".split()
# The flags, the scripts that have them (without .py), and the tests that show what they do.
FLAGS = f"""
--epochs --max_steps --eval_every | {RUNS} | test_flags.test_steps_and_rows
--batch_size --grad_accum_steps | {RUNS} | test_flags.test_grad_accum_steps
--learning_rate --max_grad_norm | {RUNS} | test_flags.test_rate_and_norm
--precision | {RUNS} | test_flags.test_precision
--compile | */TASK hybrid/images | test_flags.test_compile
--compile | hybrid/gpt_* | soak_training.test_gpt_compile_compiles_all_parts
--num_workers | {RUNS} | test_flags.test_num_workers
--seed | {RUNS} | test_flags.test_seed
--snapshot | */TASK | test_examples.test_what_is_drawn_at_random
--snapshot | hybrid/* | test_hybrid.test_resumed_weights_are_those_of_an_undisturbed_run
--init_from | {RUNS} | test_images.test_other_data_and_weights_to_start_from
--log | {RUNS} | test_training.test_one_loss_curve
--num_gpus | multigpu/TASK | test_training.test_one_loss_curve
--comm_hook | {PARALLEL} | test_flags.test_comm_hook
--num_stages | hybrid/images | test_hybrid.test_images_one_loss_curve
--num_stages --num_microbatches --schedule | hybrid/gpt_pipeline | test_flags.test_pipeline
--shard_size | hybrid/gpt_fsdp | test_hybrid.test_gpt_one_loss_curve
--checkpoint_activations | hybrid/gpt_fsdp | test_flags.test_checkpoint_activations
--dataset --data_dir | */images | test_flags.test_steps_and_rows
--dataset --data_dir | */text | test_data.test_labels_of_text_py
--dataset --data_dir --source --target | */translation | test_data.test_pairs_of_the_hub
--dataset --vocab_size | */gpt* | test_models.test_gpt_token_files
--d_model --n_heads --num_layers --seq_len --model --size | */TASK hybrid/* | test_flags.test_models
--model | */images | test_images.test_models_take_images_of_any_size
--sample | */gpt* | test_models.test_gpt_token_files
--dropout | */TASK hybrid/* | test_flags.test_models
--pretrained | */images | test_project.test_readme_photos
--image_size | */images | test_images.test_photographs
--reconstructions | */images | test_flags.test_reconstructions
--synthetic | */mnist | test_mnist.test_synthetic_needs_no_data
--data_dir --epochs --batch_size | {MNIST} | test_mnist.test_trains_as_one_process
--num_gpus | multigpu/mnist | test_mnist.test_times_add_up
--data_dir --model | quantize/mnist | test_mnist.test_int8_is_small_and_as_good
--num_gpus --min_bytes --max_bytes --seconds --out | */allreduce \
    | test_allreduce.test_table_is_that_of_the_file
--timeout | multigpu/allreduce | test_allreduce.test_a_fault_ends_the_measurement
--timeout | multinode/allreduce | test_allreduce.test_who_is_missing_is_named
--pairs --expect | multinode/allreduce | test_allreduce.test_pairs_name_the_slow_node_and_link
--dataset --data_dir | */make_bigmnist | test_images.test_images_of_mnist
--num_images --versions --copies --out | */make_bigmnist \
    | test_images.test_labels_copies_and_augmented_versions
--size --out | */make_images | test_images.test_each_photograph_once_with_its_class
--grey | */make_images | test_images.test_images_without_label_are_left_out
--snapshot --steps --out | */noise_scale \
    | test_predict.test_noise_scale_takes_scripts_and_snapshots
--snapshot --row --out | quantize/TASK | test_quantize.test_int8_is_smaller_and_as_good
--eager | quantize/TASK | test_quantize.test_compiled_rows
--batch_size --num_samples --rounds --data_dir | quantize/TASK \
    | test_quantize.test_translates_as_the_training_script
--dataset | quantize/gpt | test_quantize.test_all_rows
--out | report | test_report.test_speedup_and_efficiency_by_hand
--step | report | test_report.test_the_last_step_is_drawn_and_written
--out | predict | test_predict.test_what_helps
--processes --steps | predict | test_predict.test_any_number_of_processes_and_nodes
--noise | predict | test_predict.test_time_to_the_same_loss
"""


def flags_of(script):
    """The flags that a script adds to a parser: the first word of `add("--flag", ...)`."""
    for node in ast.walk(ast.parse((ROOT / f"{script}.py").read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("add", "add_argument")):
            words = [word.value for word in node.args if isinstance(word, ast.Constant)]
            yield from (word for word in words if str(word).startswith("--"))


def test_each_flag_has_a_test():
    """Each row of the table names flags that its scripts have, and a test that names them, too."""
    scripts = [script.removesuffix(".py") for script in (*SCRIPTS, "report.py", "predict.py")]
    left = {(script, flag) for script in scripts for flag in flags_of(script)}
    assert len(left) > 300 and ("hybrid/images", "--num_stages") in left
    missing = set(left)
    for row in FLAGS.strip().splitlines():
        flags, patterns, test = (cell.split() for cell in row.split("|"))
        patterns = {each.replace("TASK", task) for each in patterns for task in TASKS}
        found = {
            (script, flag)
            for script, flag in left
            if flag in flags and any(fnmatch.fnmatch(script, pattern) for pattern in patterns)
        }
        assert {flag for _, flag in found} == {*flags}, f"no such flag of these scripts: {row}"
        module, name = test[0].split(".")
        folder = ROOT / ("tests/soak" if module.startswith("soak") else "tests")
        text = (folder / f"{module}.py").read_text()
        names = [each.name for each in ast.parse(text).body if isinstance(each, ast.FunctionDef)]
        assert name in names, f"no such test: {row}"
        assert all(flag in text + (ROOT / "tests/conftest.py").read_text() for flag in flags), row
        missing -= found
    assert not missing, f"flags without a test of what they do: {sorted(missing)}"


@pytest.fixture
def seen(run, data, tmp_path):
    """seen(script, flags, processes): what probe.py saw of each process, and rank 0's rows."""

    def seen(script, flags, processes=1):
        for path in tmp_path.glob("*.json*"):
            path.unlink()
        task = ["--dataset", "mnist", "--data_dir", data, "--model", "mlp", "--batch_size", 24]
        if "gpt" in script:
            words = "--d_model 32 --n_heads 2 --num_layers 2 --seq_len 32 --batch_size 24"
            task = ["--dataset", data / "words.txt", *words.split()]
        elif "images" not in script:
            task = ["--batch_size", 24]
        words = [*task, *flags.split(), "--log", tmp_path / "log.jsonl"]
        words += [] if re.search("max_steps|epochs", flags) else ["--max_steps", 3]
        before = (ROOT / "tests/helpers/probe.py", tmp_path)
        run(script, *words, processes=processes, before=before)
        found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("?.json"))]
        return found, [row for row in rows(tmp_path / "log.jsonl") if row["rank"] == 0]

    return seen


def losses_of(logged):
    return np.array([(row["train_loss"], row["val_loss"]) for row in logged])


PRECISIONS = [
    ("singlegpu/images.py", 1, "tf32 bf16 fp16"),
    ("hybrid/images.py", 1, "bf16"),
    ("hybrid/gpt_pipeline.py", 2, "bf16"),
    ("hybrid/gpt_fsdp.py", 2, "bf16"),
]
DTYPES = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@pytest.mark.parametrize(("script", "processes", "precisions"), PRECISIONS)
def test_precision(seen, script, processes, precisions):
    """The types in which layers compute. With tf32, GPUs may round factors of float32."""
    plain = losses_of(seen(script, "--precision fp32", processes)[1])
    for name in precisions.split():
        found, logged = seen(script, f"--precision {name}", processes)
        losses, steps = losses_of(logged), [step for each in found for step in each]
        assert len(steps) == 3 * processes
        assert losses == pytest.approx(plain, rel=0.02)
        assert (losses != plain).all() == (name[-2:] == "16")
        for step in steps:
            assert step["dtypes"] == [DTYPES[name]]
            assert step["matmul"] == ("high" if name == "tf32" else "highest")
            if "fsdp" in script:  # parameters are sent in bf16, gradients in fp32
                sent = {
                    (op.split("_")[1], kind) for op, kind, _ in step["sent"] if op[4:] != "reduce"
                }
                assert sent == {("gather", "bfloat16"), ("scatter", "float32")}


@pytest.mark.parametrize("script", ("multigpu/images.py", "hybrid/images.py"))
def test_comm_hook(seen, script):
    """Half the bytes are sent, and the loss changes a little."""
    sent, losses = [], []
    for hook in ("none", "bf16", "fp16"):
        found, logged = seen(script, f"--comm_hook {hook}", 2)
        sent.append(sum(size for _, _, size in found[1][1]["sent"] if size > 1000))
        losses.append(logged[-1]["train_loss"])
    assert sent[1] == sent[2] == sent[0] / 2 > 1e6
    assert len({*losses}) == 3 and losses == pytest.approx(losses[:1] * 3, rel=0.02)


ACCUMULATING = [
    ("singlegpu/images.py", 1),
    ("multinode/images.py", 2),
    ("hybrid/images.py", 2),
    ("hybrid/gpt_fsdp.py", 2),
]


@pytest.mark.parametrize(("script", "processes"), ACCUMULATING)
def test_grad_accum_steps(seen, script, processes):
    """Three micro-batches have the gradient of one, and send it as often; layers run thrice.

    --batch_size counts the samples of all micro-batches and processes. To validate, a process
    takes its share of the 401 images.
    """
    counts, norms = [], []
    for parts in (1, 3):
        flags = f"--grad_accum_steps {parts} --max_steps 2 --eval_every 1"
        found, _ = seen(script, flags, processes)
        sent = [name for name, _, size in found[0][1]["sent"] if size > 1000]
        operation = "reduce_scatter" if "fsdp" in script else "all_reduce"
        count = sum(name.startswith(operation) for name in sent)
        counts.append((count, found[0][1]["calls"]))
        norms.append([step["norm"] for each in found for step in each])
        assert found[-1][1]["shape"][0] * parts * processes == 24
        validated = sorted(each[1]["validated"] for each in found)
        assert "gpt" in script or validated == {1: [401], 2: [200, 201]}[processes]
    assert counts[0][0] == counts[1][0] and counts[1][1] == 3 * counts[0][1]
    assert (counts[0][0] > 0) == (processes > 1)
    np.testing.assert_allclose(norms[1], norms[0], rtol=1e-3)


@pytest.mark.parametrize(
    ("script", "processes"),
    [("singlegpu/images.py", 1), ("multigpu/images.py", 2), ("hybrid/gpt_pipeline.py", 2)],
)
def test_num_workers(seen, script, processes):
    """So many processes load data for each that trains, and the losses stay the same."""
    curves = []
    for count in (0, 2):
        found, logged = seen(script, f"--num_workers {count} --max_steps 2", processes)
        curves.append(losses_of(logged))
        assert {each[0]["workers"] for each in found} == {count}
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-6)


def test_rate_and_norm(seen):
    """The optimizer gets that rate and no longer gradient; the row has both.

    The norm in the row is that before clipping, the mean over the steps, and the same on two
    processes as on one. With fp16, it is that of the gradient without its scale.
    """
    rates = 1e-3 * (1.05 - np.array([1, 2, 3]) / 3)  # after each third of the steps
    norms, means = [], []
    for more in ("1e9", "0.01 --precision fp16"):
        for script, processes in ("singlegpu/images.py", 1), ("multigpu/images.py", 2):
            found, [row] = seen(script, f"--learning_rate 1e-3 --max_grad_norm {more}", processes)
            assert [step["rate"] for step in found[-1]] == pytest.approx(rates)
            assert (row["lr"], row["epoch"]) == pytest.approx((rates[-1], 3 / 50))
            norms.append([step["norm"] for step in found[-1]])
            means.append(row["grad_norm"])
    np.testing.assert_allclose(norms[1], norms[0], rtol=1e-4)
    np.testing.assert_allclose(means[:2], np.mean(norms[0]), rtol=1e-4)
    np.testing.assert_allclose(norms[2:], 0.01, rtol=0.01)
    np.testing.assert_allclose(means[2:], np.mean(norms[0]), rtol=0.05)


@pytest.mark.parametrize("script", ("hybrid/gpt_pipeline.py", "hybrid/gpt_fsdp.py"))
def test_rate_and_norm_of_parts(seen, script):
    """A stage of a pipeline has a part of the gradient."""
    norms = []
    for more in ("", "--max_grad_norm 0.01"):
        found, _ = seen(script, f"--learning_rate 0.25 {more}", 2)
        parts = [[step["norm"] for step in each] for each in found]
        norms.append(np.hypot(*parts) if "pipeline" in script else np.array(parts[-1]))
    assert found[0][1]["rate"] / 0.25 == pytest.approx(1.05 - 2 / 3)  # after 2/3 of the steps
    most = 0.0142 if "pipeline" in script else 0.0101  # the embedding is in two stages
    assert norms[0].min() > 0.02 and norms[1].max() < most and norms[1].max() > 0.0099


def test_seed(seen, refused):
    """The same losses, or others."""
    flags = [f"--max_steps 2 --seed {seed}" for seed in (1, 1, 2)]
    one, again, other = (losses_of(seen("singlegpu/images.py", each)[1]) for each in flags)
    assert (one == again).all() and (one != other).all()
    refused("--seed must not be negative", "multigpu/images.py", "--seed", "-1", processes=2)


@pytest.mark.parametrize("script", ("images.py", "gpt_pipeline.py", "gpt_fsdp.py"))
def test_steps_and_rows(seen, script):
    """1,200 images are 5 steps of 240, and the text is 4. --max_steps is the total."""
    end = 5 if script == "images.py" else 4  # of an epoch
    script, processes = f"hybrid/{script}", 2
    cases = [("--epochs 2 --eval_every 3", [*range(3, 2 * end, 3), 2 * end])]
    if end == 5:
        script, processes = "singlegpu/images.py", 1
        cases += [("--epochs 2", [5, 10]), ("--epochs 2 --max_steps 2", [2])]
        cases += [("--max_steps 7 --eval_every 3", [3, 6, 7])]
    for flags, at in cases:
        found, logged = seen(script, f"{flags} --batch_size 240", processes)
        assert len(found[0]) == at[-1] and [row["step"] for row in logged] == at


@pytest.mark.parametrize("folder", ("multigpu", "hybrid"))
def test_compile(run, data, tmp_path, folder):
    """Kernels are generated for a network of torch.nn's layers, and the loss is the eager one."""
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    words = ("--model", "mlp", "--dataset", "mnist", "--data_dir", data)
    words = (*words, "--batch_size", 401, "--max_steps", 4)  # no other length is validated
    losses, made = [], []
    for more in ((), ("--compile",)):
        log = tmp_path / f"{len(more)}.jsonl"
        run(f"{folder}/images.py", *words, *more, "--log", log, **env)
        made.append(len([*tmp_path.glob("**/*.py")]))
        losses.append(losses_of(rows(log)))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    assert made[0] == 0 and made[1] >= 2, "forward and backward"


def test_pipeline(seen):
    """A process has its part of the layers, and passes and holds micro-batches by the schedule."""
    for num_stages, count, schedule, order in (
        (2, 4, "gpipe", "FB"),
        (2, 4, "1f1b", "FBFBFB"),
        (4, 6, "1f1b", "FBFBFB"),
    ):
        flags = f"--num_stages {num_stages} --num_microbatches {count} --schedule {schedule}"
        flags = f"--num_layers 4 {flags}"
        found, _ = seen("hybrid/gpt_pipeline.py", flags, 4)
        first = found[0][1]
        assert first["calls"] == 4 * 4 / num_stages * count, "a block has four linear layers"
        assert first["shape"][0] == 24 * num_stages / 4 / count
        assert re.sub(r"(.)\1+", r"\1", first["order"]) == order
        for rank, (_, step, _) in enumerate(found):
            held = np.cumsum([{"F": 1, "B": -1}[each] for each in step["order"]])  # calls
            most = num_stages - rank % num_stages if schedule == "1f1b" else count
            assert held.max() == most * step["calls"] / count and held[-1] == 0


def test_checkpoint_activations(seen):
    """The backward pass computes the blocks again, and the losses stay the same."""
    orders, curves = [], []
    for flags in ("", "--checkpoint_activations"):
        found, logged = seen("hybrid/gpt_fsdp.py", flags, 2)
        orders.append(found[0][1]["order"])
        curves.append(losses_of(logged))
    assert re.fullmatch("F{8}B{8}", orders[0]) and re.fullmatch("F{8}(BF+B+){2}", orders[1])
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-6)


TABLES = "--dataset tables --data_dir {data} --seq_len"
PAIRS = f"{TABLES} 5 --source number --target name --model"
MODELS = {  # flags, and the shapes of the queries (B, H, T, D / H) of each attention
    "images": ("", []),
    "gpt": ("--d_model 32 --n_heads 4 --num_layers 3 --seq_len 16", [[24, 4, 16, 8]] * 3),
    "text small": (f"{TABLES} 4 --model transformer", [[24, 4, 4, 32]] * 2),
    "text large": (f"{TABLES} 4 --model transformer --size large", [[24, 8, 4, 32]] * 4),
    "text nbow": (f"{TABLES} 4 --model nbow", []),
    "translation lstm": (f"{PAIRS} lstm", []),
    "translation transformer": (
        f"{PAIRS} transformer",
        [[24, 8, 5, 32]] * 3 + [[24, 8, 4, 32]] * 6,  # the decoder reads all but the last word
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(seen, data, name):
    """The network has so many attentions, of this width, for sequences of this length.

    With --dropout, this share of values becomes zero.
    """
    flags, shapes = MODELS[name]
    flags = f"{flags.format(data=data)} --dropout 0.3 --max_steps 1"
    found, _ = seen(f"singlegpu/{name.split()[0]}.py", flags)
    [step] = found[0]
    assert step["attention"] == shapes
    assert np.mean(step["dropped"]) == pytest.approx(0.3, abs=0.03)


def test_reconstructions(run, data, tmp_path):
    """16 images of 28 pixels, 2 pixels around each, above what the network makes of them."""
    path = tmp_path / "drawn.png"
    words = ("--model", "autoencoder", "--dataset", "mnist", "--data_dir", data, "--max_steps", 200)
    run("multigpu/images.py", *words, "--batch_size", 24, "--reconstructions", path, processes=2)
    drawn = np.asarray(Image.open(path).convert("L"), int)
    assert drawn.shape == (2 * 30 + 2, 16 * 30 + 2)
    above, below = drawn[2:30], drawn[32:60]
    content = np.fromfile(data / "MNIST/raw/t10k-images-idx3-ubyte", "u1")[16 : 16 + 784]
    assert (above[:, 2:30] == content.reshape(28, 28)).all()
    assert 0 < abs(above - below).mean() < 0.8 * above.std()
