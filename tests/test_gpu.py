"""The GPU check: each kind of its commands runs at a tiny size, on the emulated accelerator."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, Job, module

gpu = module("tests/gpu.py")
NUMBER, RATE = r"\d+\.\d+", r"[\d,]+ \(\d+\.\d%\)"
HIDDEN = r"hidden: by the script -?\d+% of comm_total; by the trace .* for \d+% of that time"
TRACED = rf"2 processes: comm_total {NUMBER} ms .* trace {NUMBER} \([1-9]\d* of them in 3 steps\)"


def ran(command, count, line=""):
    """A pattern of lines: so many processes have run it, and what is told then."""
    return rf"ran `.*{command}.*`, {count} process(es)?, \d+ s\n- {line}"


def lost(folder, count=2):
    return ran(rf"python changed_\w+/{folder}/images.py", count, "it said: ")


def alike(command, count):
    line = rf"validation loss {NUMBER} on Emulator, {NUMBER} of the first; [\d,]+ samples/s; "
    return ran(command, count, line + r"largest peak \d+ MB")


TOLD = {  # part: patterns of lines of gpu.md, without "- "
    "mnist": [rf"\| {each} \| [12] \| .* {NUMBER} \|" for each in (*gpu.LAUNCH, "singlegpu")],
    "losses": [
        ran("EMU_DEVICES='0' .*gpt.py .*", 1, rf"validation loss {NUMBER} on CPU, .*"),
        *[alike(f"gpt.py .* {each}", 1) for each in ("--precision fp16", "--compile")],
    ],
    "time": [
        rf"stopped at step 6 and resumed: {NUMBER}, undisturbed {NUMBER}",
        rf"phases of 5 rows: {NUMBER} s of {NUMBER} s of wall time",
        f"images/s: without events {RATE}, with {RATE}",
    ],
    "waits": ["images: 0 places wait, in each step: none"],
    "ddp": [
        *[alike("multigpu/images.py", count) for count in (1, 2)],
        alike("multinode/images.py .* --comm_hook bf16", 2),
        TRACED,
        HIDDEN,
        ran("tools/allreduce.py", 2, rf"fit: {NUMBER} us \+ .*"),
        lost("multigpu") + ".*SIGKILL",
        lost("multinode") + ".*",
        lost("multigpu") + r"\w+Error: .*",
    ],
    "hybrid": [
        alike("hybrid/images.py .* --num_stages 2", 1),
        alike("hybrid/gpt_fsdp.py", 2),
        alike("hybrid/gpt_pipeline.py .* --num_stages 2", 2),
    ],
    "ranks": [
        rf"\| multigpu \| 4 \| .* {NUMBER} \|",
        alike("EMU_DEVICES='1' .* hybrid/images.py .* --num_stages 2", 2),
        alike("hybrid/gpt_fsdp.py .* --shard_size 2", 4),
    ],
    "gpt": [rf"\| 8 \| [\d,]+ \| .* \| [\d,]+ \| {NUMBER} \|"],
    "attention": [rf"translation, samples/s by cuDNN's attention: without {RATE}, with {RATE}"],
    "quantize": [
        r"emu, .*",
        r"\| int8-weights \| eager \| left out: torchao has no kernels for emu \|",
        # the first score is the emulator's, the second one the CPU's
        r"\| fp32 \| eager \| [\d.]+ \| (?P<score>[\d.]+) (.*\n)*- \| fp32 .* (?P=score) .*",
    ],
}


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("part", TOLD)
def test_each_kind_of_command_runs(monkeypatch, tmp_path, part):
    """Its checks hold, but for a tolerance that is too small, and gpu.md has their lines."""
    monkeypatch.setitem(gpu.PRECISIONS, "bf16", 1e-6)
    with pytest.raises(SystemExit) as end:
        gpu.main(["--rehearse", "--only", part, "--out", str(tmp_path / "gpu.md")])
    told = (tmp_path / "gpu.md").read_text()
    assert end.value.code == ("failed: losses gpt" if part == "losses" else 0), told
    assert re.findall("other losses: .* (.+)", told) == (["bf16"] if part == "losses" else [])
    for pattern in TOLD[part]:
        assert re.search(rf"^(- )?{pattern}$", told, re.M), (pattern, told)


@pytest.mark.usefixtures("emulator")
def test_as_a_user_starts_it(tmp_path):
    """Real commands, with torchrun, on an accelerator of its own: a process is killed."""
    words = [sys.executable, ROOT / "tests/gpu.py", "--only", "ranks:killed"]
    job = Job(words, tmp_path, PYTHONPATH=str(ROOT / "tests/emulator"), EMU_DEVICES="1")
    try:
        status, out, err = job.wait()
    finally:
        job.end()
    assert status == 0, err
    told = (tmp_path / "gpu.md").read_text()
    for folder in ("multigpu", "multinode"):
        assert re.search(f"^- {lost(folder)}.*SIGKILL", told, re.M), told
    assert "- left out of mnist, ddp and hybrid: what several GPUs do." in told


@pytest.mark.parametrize("script", ("multigpu/images.py", "hybrid/images.py", "hybrid/gpt_fsdp.py"))
def test_groups_over_gloo(run, data, monkeypatch, tmp_path, script):
    """Where NCCL cannot share a GPU. There is none here: the copies train, and name no backend."""
    monkeypatch.setattr(gpu, "options", SimpleNamespace(folder=tmp_path))
    flags = ["--dataset", data / "words.txt", *"--d_model 16 --n_heads 2 --num_layers 2".split()]
    images = ["--dataset", "mnist", "--data_dir", data, "--model", "mlp", "--batch_size", 24]
    flags = flags if "gpt" in script else images
    copy = gpu.over_gloo(script)
    text = Path(copy).read_text()
    assert 'backend = "cpu:gloo,cuda:gloo"' in text and "if ON_GPU else None" not in text
    run(copy, *flags, "--max_steps", 2, processes=2)


def test_what_it_cannot_run(refused, tmp_path):
    refused("torch sees no GPU here", "tests/gpu.py", "--out", tmp_path / "gpu.md")
    parts = f"none is no part; they are {', '.join(TOLD)}"
    refused(parts, "tests/gpu.py", "--rehearse", "--only", "none")


def test_without_datasets_all_other_parts_run(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        gpu.main(["--rehearse", "--only", "none", "--out", str(tmp_path / "gpu.md")])
    others = ", ".join(part for part in TOLD if part != "attention")
    assert capsys.readouterr().err.endswith(f"they are {others}\n")


def test_a_trace_of_a_gpu(tmp_path):
    """Kernels of NCCL are told from those that compute; of 5 us, 3 are hidden."""
    spans = {"ncclDevKernel_AllReduce": [(2, 3), (4, 4)], "gemm": [(0, 3), (3, 1), (6, 1)]}
    events = []
    for name, pairs in spans.items():
        events += [{"cat": "kernel", "name": name, "ts": ts, "dur": dur} for ts, dur in pairs]
    events += [{"name": "gloo:all_reduce", "ts": 0, "dur": 9}, {"name": "process_name"}]
    (path := tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    sends, computes = gpu.read_trace(path)
    assert (gpu.length(sends), gpu.length(computes), gpu.length(sends + computes)) == (6, 5, 8)


def test_peaks_are_of_this_card():
    """A name that contains that of another card has no peak of its own."""
    assert gpu.peak_of("NVIDIA H100 80GB HBM3") == 989 and gpu.peak_of("NVIDIA H100 PCIe") == 756
    for name in ("NVIDIA L40", "NVIDIA RTX A1000", "NVIDIA RTX 4090 Laptop GPU"):
        assert gpu.peak_of(name) is None, name
