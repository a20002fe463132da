"""The rows of test_training.py that take long: more tasks in each folder, and more launches."""

import pytest
import test_training
from conftest import SCRIPTS, TRAINING
from test_training import PIPELINE, TENSOR, WITHOUT, check  # noqa: F401

RUNS = [  # as in test_training.py
    (2, "multigpu/text.py", "nbow", "--grad_accum_steps 2"),
    (3, "multinode/images.py", "mlp", ""),
    (2, "multinode/images.py", "cnn", "--num_workers 1"),
    (3, "multinode/images.py", "autoencoder", ""),
    (2, "multinode/translation.py", "lstm", ""),
    (4, PIPELINE, "gpt", "--num_stages 4 --num_microbatches 6"),
    (2, TENSOR, "gpt", "--tensor_size 2"),
]
RESUMED = [(2, TENSOR, "gpt", "--precision bf16 --dropout 0.1")]
OTHERS = [name for name in filter(TRAINING.search, SCRIPTS) if name not in WITHOUT]


@pytest.mark.parametrize(("processes", "script", "task", "more"), RUNS)
def test_one_loss_curve(check, data, tmp_path, processes, script, task, more):  # noqa: F811
    test_training.test_one_loss_curve(check, data, tmp_path, processes, script, task, more)


@pytest.mark.parametrize(("processes", "script", "task", "more"), RESUMED)
def test_a_resumed_run(check, data, tmp_path, processes, script, task, more):  # noqa: F811
    test_training.test_a_resumed_run_has_the_weights_of_an_undisturbed_one(
        check, data, tmp_path, processes, script, task, more
    )


@pytest.mark.parametrize("script", OTHERS)
def test_without_its_timing(logged, data, tmp_path, script):
    test_training.test_without_its_timing(logged, data, tmp_path, script)
