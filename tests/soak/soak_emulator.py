"""Each training script on the emulated accelerator, and what takes long there: compilation."""

import numpy as np
import pytest
from conftest import SCRIPTS, TRAINING, curve, rows
from test_emulator import TASKS, on_cpu, words  # noqa: F401

pytestmark = pytest.mark.usefixtures("emulator")

PROCESSES = {"singlegpu": 1, "multigpu": 4, "multinode": 3, "hybrid": 2}
RUNS = []
for script in filter(TRAINING.search, SCRIPTS):
    folder, name = script.split("/")
    family = "gpt.py" if name.startswith("gpt") else name
    RUNS += [(script, task) for task, flags in TASKS.items() if flags.split()[0] == family]
RUNS.remove(("hybrid/gpt_pipeline.py", "long"))  # one layer is not two stages
RUNS.remove(("hybrid/gpt_fsdp.py", "fp16"))  # it has bf16 alone
FLAGS = ("", "--compile", "--precision bf16", "--num_workers 2")


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize(("script", "task"), RUNS)
def test_each_script_trains_alike(logged, words, on_cpu, script, task, flags):  # noqa: F811
    """The losses are those of the CPU in one process; those of bf16 to its rounding."""
    more = (*words(task)[1:], *flags.split())
    log = logged(script, *more, processes=PROCESSES[script.split("/")[0]], EMU_DEVICES="4")
    assert {row["device"] for row in rows(log)} == {"Emulator"}
    rounding = 2e-2 if "bf16" in flags else 1e-3 if task == "fp16" else 1e-5
    np.testing.assert_allclose(curve(log), on_cpu(task), rtol=rounding)
