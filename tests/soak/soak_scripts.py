"""Each model of each script: tools/check on real launches, emulated GPUs, compiled parts."""

import shutil
import sys

import numpy as np
import pytest
from conftest import ROOT, SCRIPTS, TRAINING, curve, rows
from faults import check
from test_check import problems
from test_emulator import TASKS, on_cpu, words  # noqa: F401
from test_training import FSDP, PIPELINE, TENSOR, flags_of

PROCESSES = {"singlegpu": 1, "multigpu": 4, "multinode": 3, "hybrid": 2}
RUNS = []
for script in filter(TRAINING.search, SCRIPTS):
    folder, name = script.split("/")
    family = "gpt.py" if name.startswith("gpt") else name
    RUNS += [(script, task) for task, flags in TASKS.items() if flags.split()[0] == family]
RUNS.remove((PIPELINE, "long"))  # one layer is not two stages
RUNS.remove((FSDP, "fp16"))  # it has bf16 alone
RUNS.remove((TENSOR, "fp16"))


WATCHED = [run for run in RUNS if run[1] not in ("long", "fp16")]


@pytest.mark.parametrize(("script", "task"), WATCHED)
def test_check_finds_nothing_wrong(data, tmp_path, script, task):
    """Also stopped and resumed, and beside one process."""
    folder, name = script.split("/")
    flags = flags_of(task, data).split()
    one = f"{sys.executable} {ROOT}/singlegpu/{name.split('_')[0].removesuffix('.py')}.py"
    command = [sys.executable, ROOT / script, *flags, "--snapshot", "{tmp}/s"]
    if folder in ("multinode", "hybrid"):
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--")
        command[1:1] = torchrun
    options = f"--steps 20 --resume --against '{one} {' '.join(flags)}'"
    status, lines, before = check(command, tmp_path, options)
    assert status == 0 and problems(lines) == [], (lines, before[-2000:])
    right = {line.split()[1] for line in lines if line.startswith("ok")}
    assert {"resume", "order", "validation"} <= right, lines


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("flags", ("", "--compile", "--precision bf16", "--num_workers 2"))
@pytest.mark.parametrize(("script", "task"), RUNS)
def test_each_script_trains_alike_on_gpus(logged, words, on_cpu, script, task, flags):  # noqa: F811
    """The losses are those of the CPU in one process; those of bf16 to its rounding."""
    more = (*words(task)[1:], *flags.split())
    log = logged(script, *more, processes=PROCESSES[script.split("/")[0]], EMU_DEVICES="4")
    assert {row["device"] for row in rows(log)} == {"Emulator"}
    rounding = 2e-2 if "bf16" in flags else 1e-3 if task == "fp16" else 1e-5
    np.testing.assert_allclose(curve(log), on_cpu(task), rtol=rounding)


KERNELS = {  # of the first and the last stage; of a block, and of the head
    PIPELINE: ("cpp_fused_add_embedding_native_layer_norm", "cpp_fused_native_layer_norm"),
    FSDP: ("gelu", "cpp_fused__log_softmax"),
    TENSOR: ("gelu", "cpp_fused__log_softmax"),
    "singlegpu/gpt.py": ("gelu", "cpp_fused__log_softmax"),
    "multigpu/gpt.py": ("gelu", "cpp_fused__log_softmax"),
}


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
@pytest.mark.parametrize("script", KERNELS)
def test_gpt_compile_compiles_all_parts(logged, data, tmp_path, script):
    """Kernels are generated for each of them, and there is one loss curve."""
    flags, env = flags_of("gpt", data).split(), {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    one = curve(logged("singlegpu/gpt.py", *flags))
    splits = ("--shard_size 1 --grad_accum_steps 2", "--shard_size 2") if script == FSDP else ("",)
    for more in splits:
        log = logged(script, *flags, *more.split(), "--compile", processes=2, **env)
        np.testing.assert_allclose(curve(log), one, rtol=1e-4)
    code = "".join(path.read_text() for path in tmp_path.glob("cache/**/*.py"))
    assert all(name in code for name in KERNELS[script])
