"""The GPU check: each kind of its commands runs at a tiny size, on the emulated accelerator."""

import os
import re

import pytest
from conftest import module
from test_training import check_forks

gpu = module("tests/gpu.py")
GPT = "--vocab_size 64 --d_model 16 --seq_len 16"
TABLES = "--dataset tables --data_dir {data} --seq_len 8 --batch_size 24"
TINY = {  # the sizes of gpu.py; few steps must change the loss
    "images": "--model cnn --batch_size 24 --learning_rate 3e-3 --dataset mnist --data_dir {data}",
    "gpt": f"{GPT} --num_layers 2 --batch_size 24 --dataset tokens --learning_rate 1e-2",
    "text": f"{TABLES} --model transformer",
    "translation": f"{TABLES} --source number --target name",
    "gpt2": f"{GPT} --n_heads 2 --num_layers 1",
}
STEPS = {"loop": "--max_steps 4 --warmup 2 --matmul 64", "rows": "--max_steps 8 --eval_every 8"}


def on_gpus(command):
    """A pattern: what is told of a run with these words."""
    return rf"- ran `.*{command}.*\n- validation loss \d.* on Emulator, \d.* of the first; .* MB$"


TOLD = {  # part, or a check of it: patterns of lines of gpu.md. "processes": the soak
    "losses:gpt": ["on CPU, .* of the first", on_gpus("--precision fp16"), on_gpus("--compile")],
    "stops:resumed": [r"- ran .*tools/check .* --resume .*\n- ok: \d+ kinds$"],
    "ranks:multigpu/images.py": [
        r"- ran .*tools/check .*`, 1 process, .*\n- ok: 1\d kinds$",
        on_gpus("multigpu/images.py .*`, 4"),
        "- it said: .*SIGKILL",
    ],
    "gpt:8": [r"- [\d,]+ tokens/s, [\d.]+ of the loop's [\d,]+; .* of a matmul's$"],
}


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("part", TOLD)
def test_each_kind_of_command_runs(attempt, monkeypatch, data, tmp_path, part, expected=TOLD):
    """Its checks hold, but for a tolerance that is too small, and gpu.md has their lines."""
    count = 1 if "ranks" in part else 2

    def execute(script, words, processes, environment):
        """Runs a script in forks, without the seconds of each import, on emulated GPUs."""
        is_on_cpu = gpu.ON_CPU.items() <= environment.items()
        env = {"EMU_DEVICES": "0" if is_on_cpu else str(count)} | environment
        if script.endswith("tools/check"):
            with pytest.MonkeyPatch.context() as patch:
                for name, value in env.items():
                    patch.setenv(name, value)
                done = check_forks(*words)
            return done.returncode, done.stdout, done.stderr
        return attempt(script, *words, processes=processes, cwd=os.getcwd(), **env)

    tiny = {name: words.format(data=data) for name, words in TINY.items()}
    sizes = {"SIZES": tiny, "STEPS": STEPS, "NUM_TOKENS": 1 << 14, "RANKS": (4,)}
    for name, value in sizes.items():
        monkeypatch.setattr(gpu, name, value)
    monkeypatch.setattr(gpu, "execute", execute)
    monkeypatch.setattr(gpu, "gpus", lambda: (count, "emulated GPU", 23000))
    monkeypatch.setitem(gpu.PRECISIONS, "bf16", 1e-6)
    with pytest.raises(SystemExit) as end:
        gpu.main(["--only", part, "--out", str(tmp_path / "gpu.md")])
    told = (tmp_path / "gpu.md").read_text()
    assert end.value.code == ("failed: losses gpt" if part == "losses:gpt" else 0), told
    assert re.findall("other losses: .* (.+)", told) == (["bf16"] if "losses" in part else [])
    assert "\n- warning" not in told, told
    for pattern in expected[part]:
        assert re.search(pattern, told, re.M), (pattern, told)


@pytest.mark.parametrize("name", ["losse", "gpt:9", "losses:gp", "processes:gpt"])
def test_a_name_that_selects_nothing_is_refused(monkeypatch, capsys, tmp_path, name):
    """Before the first run: a part, or a check of it, that is not there."""
    monkeypatch.setattr(gpu, "gpus", lambda: (1, "emulated GPU", 23000))
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--only", "gpt:8", name, "--out", str(tmp_path / "gpu.md")])
    assert capsys.readouterr().err.endswith(f"error: there is no {name}\n")
    assert not (tmp_path / "gpu.md").exists()


def test_a_gpu_is_not_compared_with_itself(monkeypatch):
    """Where a variable of CUDA does not hide the GPUs of another maker, the check fails."""
    row = {"rank": 0, "device": "Emulator", "train_loss": 1.0, "val_loss": 1.0}
    monkeypatch.setattr(gpu, "run", lambda *_: ([row], "", ""))
    with pytest.raises(AssertionError, match="must run on the CPU, not on Emulator"):
        gpu.check_losses((1, gpu.IMAGES, "", 1, gpu.ON_CPU))
