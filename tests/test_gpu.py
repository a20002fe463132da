"""The GPU check: each of its commands runs at a tiny size, on the emulated accelerator."""

import json
import re
import sys

import pytest
from benchmark import module
from conftest import ROOT, Job

gpu = module("tests/gpu.py")
NUMBER, RATE = r"\d+\.\d+", r"[\d,]+"
LOSS = rf"validation loss {NUMBER}, one process {NUMBER}; largest peak \d+ MB, one process \d+"
SEVERAL = (  # what is told of so many processes
    rf"multigpu, {{0}} processes : {NUMBER}; singlegpu {NUMBER}",
    rf"multinode, {{0}} processes --comm_hook bf16: {NUMBER}; singlegpu {NUMBER}",
    rf"{{0}} processes: comm {NUMBER} ms a step with .* DDP's logger {NUMBER} without",
    rf"{{0}} processes: comm_total {NUMBER} ms .* trace {NUMBER} \([1-9]\d* of them in 3 steps\)",
    r"hidden: by the script -?\d+% of comm_total; by the trace .* for \d+% of that time",
    rf"ran `.*/multinode/allreduce.py .*`, {{0}} processes, \d+ s\n- fit: {NUMBER} us \+ .*",
)
SPLIT = (
    f"hybrid/gpt_fsdp.py , {{0}} processes: {LOSS}",
    f"hybrid/gpt_pipeline.py --num_stages 2, {{0}} processes: {LOSS}",
    rf"hybrid/images.py --num_stages 2, {{1}} processes: {LOSS}",
)
LOST = r"ran `.* SIGNAL_AT='{} 1 4' .*python multigpu/images.py .*`, 2 processes, \d+ s"
TOLD = {  # part: patterns of lines of gpu.md, without "- "
    "mnist": [rf"\| {each} \| [124] \| .* \| {NUMBER} \|" for each in (*gpu.LAUNCH, "singlegpu")],
    "losses": [
        rf"singlegpu/{each}.py: validation loss CPU .*, fp32 {NUMBER} .*, compiled {NUMBER} .*"
        for each in ("images", "gpt", "text", "translation")
    ],
    "time": [
        rf"cnn, stopped at step 6 and resumed: validation loss {NUMBER}, undisturbed {NUMBER}",
        rf"phases of 5 rows: {NUMBER} s of {NUMBER} s of wall time",
        rf"the marks leave {NUMBER}% of images.py's samples/s",
    ],
    "waits": [r"translation.py: 0 places wait, in each step: none"],
    "ddp": [each.format(2) for each in SEVERAL] + [LOST.format(9), LOST.format(19)],
    "hybrid": [each.format(2, 1) for each in SPLIT],
    "ranks": [
        *[each.format(4) for each in SEVERAL],
        *[each.format(4, 2) for each in SPLIT],
        rf"hybrid/gpt_fsdp.py --shard_size 2, 4 processes: {LOSS}",
        *[LOST.format(9), LOST.format(19)],
    ],
    "gpt": [rf"\| 8 \| {RATE} \| .* \| {RATE} \| {NUMBER} \|"],
    "attention": [
        rf"tokens/s: MATH {RATE}",
        rf"text.py, samples/s by cuDNN's attention: without {RATE}, with {RATE}",
    ],
    "cnn": [rf"cnn, batch 64, images/s: eager {RATE}, compiled {RATE}, CUDA graphs {RATE}"],
    "precision": [rf"resnet18, images/s: fp32 {RATE}, tf32 {RATE}, .*, bf16, channels_last {RATE}"],
    "loading": [rf"resnet18 .* by the number of workers: 0 {RATE}, 2 {RATE}, 4 {RATE}"],
    "quantize": [r"\| int8-weights \| eager \| [\d.]+ \| .* \|"],
}


def test_all_parts_are_rehearsed():
    assert list(TOLD) == list(gpu.parts_of([], 2, {"ranks": [], "gpt": [], "cnn": []}))


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("part", TOLD)
def test_each_command_runs(tmp_path, part):
    """Its checks hold, and gpu.md has their lines."""
    with pytest.raises(SystemExit) as end:
        gpu.main(["--rehearse", "--only", part, "--out", str(tmp_path / "gpu.md")])
    assert end.value.code == 0
    told = (tmp_path / "gpu.md").read_text()
    for pattern in TOLD[part]:
        assert re.search(rf"^(- )?{pattern}$", told, re.M), (pattern, told)


@pytest.mark.usefixtures("emulator")
def test_as_a_user_starts_it(tmp_path):
    """Real commands, with torchrun, on an accelerator of its own: a process is killed."""
    words = [ROOT / "tests/gpu.py", "--only", "ranks:killed"]
    env = {"PYTHONPATH": str(ROOT / "tests/emulator"), "EMU_DEVICES": "1"}
    job = Job([sys.executable, *words], tmp_path, **env)
    try:
        assert job.wait()[0] == 0, job.wait()
    finally:
        job.end()
    told = (tmp_path / "gpu.md").read_text()
    assert re.search("^- ran `.* python multinode/images.py .*`, 2 processes,", told, re.M), told
    assert "- left out of mnist, ddp and hybrid: what several GPUs do." in told


def test_what_it_cannot_run(refused, tmp_path):
    refused("torch sees no GPU here", "tests/gpu.py", "--out", tmp_path / "gpu.md")
    refused("none is no part; they are mnist, ", "tests/gpu.py", "--only", "none")


OVER_GLOO = """import sys, torch, torch.distributed as dist
backend, device = dist.get_default_backend_for_device("cuda"), torch.device("cuda", 0)
dist.init_process_group(backend, f"file://{sys.argv[1]}", rank=0, world_size=1, device_id=device)
print(backend, dist.get_backend())
"""


def test_groups_over_gloo(run, tmp_path):
    """The way out where NCCL lets no processes share a GPU."""
    (script := tmp_path / "script.py").write_text(OVER_GLOO)
    env = {"PYTHONPATH": str(ROOT / "tests/helpers/autoload"), "OVER_GLOO": "1"}
    assert run(script, tmp_path / "store", **env) == "gloo cpu:gloo,cuda:gloo\n"


def test_a_trace_of_a_gpu(tmp_path):
    """Kernels of NCCL are told from those that compute; of 5 us, 3 are hidden."""
    spans = {"ncclDevKernel_AllReduce": [(2, 3), (4, 4)], "gemm": [(0, 3), (3, 1), (6, 1)]}
    events = [
        {"cat": "kernel", "name": name, "ts": start, "dur": duration}
        for name, pairs in spans.items()
        for start, duration in pairs
    ]
    events += [{"name": "gloo:all_reduce", "ts": 0, "dur": 9}, {"name": "process_name"}]
    (path := tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    sends, computes = gpu.read_trace(path)
    assert (gpu.length(sends), gpu.length(computes), gpu.length(sends + computes)) == (6, 5, 8)


def test_peaks_are_of_this_card():
    """A name that contains that of another card has no peak of its own."""
    assert gpu.peak_of("NVIDIA H100 80GB HBM3") == 989 and gpu.peak_of("NVIDIA H100 PCIe") == 756
    assert gpu.peak_of("NVIDIA L40S") == 362 and gpu.peak_of("NVIDIA A100-SXM4-80GB") == 312
    for name in ("NVIDIA L40", "NVIDIA RTX A1000", "NVIDIA A10G", "NVIDIA RTX 4090 Laptop GPU"):
        assert gpu.peak_of(name) is None, name
