"""The GPU check: each kind of its commands runs at a tiny size, on the emulated accelerator."""

import re

import pytest
from conftest import module

gpu = module("tests/gpu.py")
NUMBER, RATE = r"\d+\.\d+", r"[\d,]+"


def ran(command, count, line=""):
    """A pattern of lines: so many processes have run it, and what is told then."""
    return rf"ran `.*{command}.*`, {count} process(es)?, \d+ s\n- {line}"


def alike(command, count):
    line = rf"validation loss {NUMBER} on Emulator, {NUMBER} of the first; {RATE} samples/s; "
    return ran(command, count, line + r"largest peak \d+ MB")


TOLD = {  # part, or a check of it: patterns of lines of gpu.md, without "- "
    "check:multigpu/images.py": [ran("tools/check.py --steps 8 -- .*", 1, r"ok: 1\d kinds")],
    "losses:gpt": [
        ran("EMU_DEVICES='0' .*gpt.py .*", 1, rf"validation loss {NUMBER} on CPU, .*"),
        *[alike(f"gpt.py .* {each}", 1) for each in ("--precision fp16", "--compile")],
    ],
    "stops:cnn": [ran("tools/check.py --steps 8 --resume -- .*", 1, r"ok: \d+ kinds")],
    "processes": [
        alike("multigpu/images.py", 2),
        alike("multinode/gpt.py", 2),
        alike("hybrid/gpt_fsdp.py", 2),
        alike("hybrid/images.py", 1),
    ],
    "ranks:multigpu/images.py": [alike("EMU_DEVICES='1' .*multigpu/images.py", 4)],
    "ranks:killed": [ran("changed_.*/multigpu/images.py", 2, "it said: .*SIGKILL.*")],
    "gpt:8": [rf"\| 8 \| {RATE} \| .* \| {RATE} \| {NUMBER} \|"],
}


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("part", TOLD)
def test_each_kind_of_command_runs(monkeypatch, tmp_path, part):
    """Its checks hold, but for a tolerance that is too small, and gpu.md has their lines."""
    monkeypatch.setitem(gpu.PRECISIONS, "bf16", 1e-6)
    with pytest.raises(SystemExit) as end:
        gpu.main(["--rehearse", "--only", part, "--out", str(tmp_path / "gpu.md")])
    told = (tmp_path / "gpu.md").read_text()
    assert end.value.code == ("failed: losses gpt" if part == "losses:gpt" else 0), told
    assert re.findall("other losses: .* (.+)", told) == (["bf16"] if "losses" in part else [])
    for pattern in TOLD[part]:
        assert re.search(rf"^(- )?{pattern}$", told, re.M), (pattern, told)


def test_what_it_cannot_run(refused, tmp_path):
    refused("torch sees no GPU here", "tests/gpu.py", "--out", tmp_path / "gpu.md")
    told = "none is no part; they are "
    refused(told, "tests/gpu.py", "--rehearse", "--only", "none")
