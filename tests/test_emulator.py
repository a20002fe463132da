"""Scripts on an emulated accelerator: they train alike, and what a GPU would punish is told."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import ENVIRONMENT, LOOPBACK, ROOT, commands_of, curve, rows

EMULATED = ENVIRONMENT | LOOPBACK | {"PYTHONPATH": str(ROOT / "tests/emulator")}
PROCESSES = {"singlegpu": 1, "multigpu": 2, "multinode": 3, "hybrid": 4}


def python(words, cwd, env):
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=cwd, env=env, capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    """Builds it, once for each torch; half a minute."""
    status, out, err = python(
        ["-c", "import torch; print(torch.emu.device_count())"], None, EMULATED
    )
    if status and not os.environ.get("REQUIRE_EMULATOR"):
        pytest.skip(err.strip().splitlines()[-1])
    assert (status, out) == (0, "4\n"), err


@pytest.fixture(scope="module")
def short(data):
    """25 steps."""
    return ("--data_dir", data, "--epochs", "1", "--batch_size", "48")


def results(out):
    return re.findall(r"train_loss [\d.]+, val_acc [\d.]+", out)


@pytest.mark.parametrize("folder", PROCESSES)
def test_mnist_trains_alike(emulator, run, short, tmp_path, folder):
    """Loss and accuracy are those of the CPU, to the digits printed; nothing is read too early."""
    [command] = commands_of(f"{folder}/mnist.py", short, PROCESSES[folder])
    status, out, err = python(["-W", "error::UserWarning", *command], tmp_path, EMULATED)
    assert status == 0, err
    on_cpu = run(f"{folder}/mnist.py", *short, processes=PROCESSES[folder], cwd=tmp_path)
    assert results(out) == results(on_cpu) and len(results(out)) == 1


MUTANTS = {  # name: (text of multigpu/mnist.py, what stands there instead, the error)
    "device not set": ("torch.accelerator.set_device_index(rank)", "pass", "events of two devices"),
    "one device for all": ("torch.device(rank if", "torch.device(0 if", "Duplicate GPU detected"),
    "batch not moved": (
        "[x.to(device, non_blocking=True) for x in batch]",
        "batch",
        "Expected all tensors to be on the same device",
    ),
    "model not moved": ("*layers).to(device)", "*layers)", "No backend type associated with"),
    "event without timing": ("torch.Event(enable_timing=True)", "torch.Event()", "enable_timing"),
    "event read early": (
        "results.tolist()",
        "(0.0, torch.emu.sleep(1.0) or 0.0)",
        "event not ready: the host reads its time before it has waited for it",
    ),
    "CPU tensor sent": (
        "dist.all_reduce(results)",
        "dist.all_reduce(results.cpu())",
        "No backend type associated with device type cpu",
    ),
    "NumPy on the device": ("results.tolist()", "results.numpy()", "can't convert emu"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_what_a_gpu_would_punish_is_told(emulator, short, tmp_path, name):
    text, mutant, told = MUTANTS[name]
    source = (ROOT / "multigpu/mnist.py").read_text()
    assert source.count(text) == 1
    (script := tmp_path / "multigpu/mnist.py").parent.mkdir()
    script.write_text(source.replace(text, mutant))
    status, out, err = python([script, "--num_gpus", 2, *short], tmp_path, EMULATED)
    assert status != 0 and told in err, (out, err)


@pytest.mark.parametrize(("read", "waits"), (("loss.detach()", 0), ("loss.item()", 25)))
def test_no_step_waits_for_the_gpu(emulator, short, tmp_path, read, waits):
    """25 steps, and one that reads the loss as a number waits in each."""
    source = (ROOT / "singlegpu/mnist.py").read_text()
    for text, other in (
        ("loss_sum += loss.detach()", f"loss_sum += {read}"),
        ("        for batch in", "        waits = torch.emu.host_waits()\n        for batch in"),
        (
            "        with torch.no_grad",
            "        print('waits', torch.emu.host_waits() - waits)\n        with torch.no_grad",
        ),
    ):
        assert source.count(text) == 1
        source = source.replace(text, other)
    (script := tmp_path / "mnist.py").write_text(source)
    status, out, err = python([script, *short], tmp_path, EMULATED)
    assert status == 0 and f"waits {waits}\n" in out, (out, err)


MLP = "--model mlp --batch_size 24 --max_steps 4"
GPT = "--d_model 32 --n_heads 2 --num_layers 2 --seq_len 32 --batch_size 24 --max_steps 4"
RUNS = {  # script, flags, processes
    "images": ("singlegpu/images.py", f"{MLP} --num_workers 1", 1),
    "gpt": ("singlegpu/gpt.py", f"{GPT} --grad_accum_steps 2", 1),
    "images, 2": ("multigpu/images.py", f"{MLP} --grad_accum_steps 3 --num_workers 1", 2),
    "gpt, 3": ("multinode/gpt.py", f"{GPT} --comm_hook bf16", 3),
    "stages": ("hybrid/images.py", f"{MLP} --num_stages 2", 2),
    "pipeline": ("hybrid/gpt_pipeline.py", f"{GPT} --num_stages 2", 4),
    "shards": ("hybrid/gpt_fsdp.py", GPT, 2),
}


@pytest.mark.parametrize("name", RUNS)
def test_runs_train_alike(emulator, run, data, tmp_path, name):
    """The losses are those of the CPU, and nothing is read too early or on a wrong device."""
    script, flags, processes = RUNS[name]
    words = flags.split()
    words += ["--dataset", data / "words.txt"] if "gpt" in script else ["--data_dir", data]
    words += [] if "gpt" in script else ["--dataset", "mnist"]
    emulated, on_cpu = tmp_path / "emulated.jsonl", tmp_path / "cpu.jsonl"
    [command] = commands_of(script, [*words, "--log", emulated], processes)
    status, _, err = python(command, tmp_path, EMULATED)
    assert status == 0, err
    run(script, *words, "--log", on_cpu, processes=processes)
    assert {row["device"] for row in rows(emulated)} == {"Emulator"}
    rounding = 1e-3 if "bf16" in flags else 1e-5  # gloo adds up in another order
    np.testing.assert_allclose(curve(emulated), curve(on_cpu), rtol=rounding)
