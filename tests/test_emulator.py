"""Scripts on an emulated accelerator: they train alike, and what a GPU would punish is told."""

import re
import sys

import numpy as np
import pytest
from conftest import CONSTANT, ROOT, Job, curve, free_port, rows
from fork_server import run_all
from test_training import TASKS as TRAINED

pytestmark = pytest.mark.usefixtures("emulator")


# == They train as on the CPU, and the host waits in no step ==
FEW = "--max_steps 8 --eval_every 4 --learning_rate 3e-4 --precision fp32"
TASKS = {name: f"{script} {flags} {FEW}" for name, (script, flags) in TRAINED.items()}
TASKS["gpt"] += " --max_grad_norm 0.5"
TASKS["fp16"] = f"{TASKS['gpt']} --precision fp16"
RUNS = {  # task, script, processes, more flags. All tasks in all folders: the soak
    "fp16": ("fp16", "singlegpu/gpt.py", 1, "--num_workers 1"),
    "compiled": ("gpt", "singlegpu/gpt.py", 1, "--compile --grad_accum_steps 2"),
    "text": ("nbow", "multinode/text.py", 2, ""),
    "accumulation": ("autoencoder", "multigpu/images.py", 3, "--grad_accum_steps 2"),
    "lstm": ("lstm", "multinode/translation.py", 2, ""),
    "bf16 sent": ("gpt", "multinode/gpt.py", 4, "--comm_hook bf16"),
    "stages": ("mlp", "hybrid/images.py", 2, "--num_stages 2 --grad_accum_steps 3"),
    "pipeline": ("gpt", "hybrid/gpt_pipeline.py", 4, "--num_stages 2"),
    "shards": ("gpt", "hybrid/gpt_fsdp.py", 2, ""),
}
# Prints how often the host has waited in the third and fourth step after a start or a validation:
# before, DDP makes its buckets anew, and a pipeline connects its stages. A line is one write.
WAITS = {
    "        factor = float(": """        waits = torch.emu.host_waits()
        factor = float(""",
    "        bar.update()\n": """        bar.update()
        print(f"waits {torch.emu.host_waits() - waits}\\n", end="") if step % 4 in (3, 0) else None
""",
}
MNIST_WAITS = {  # likewise, in the steps of an epoch
    "        for batch in loader:": """        waits = torch.emu.host_waits()
        for batch in loader:""",
    "        with torch.no_grad():": """
        print(f"waits {torch.emu.host_waits() - waits}\\n", end="")
        with torch.no_grad():""",
}


def waits_of(out):
    return [int(count) for count in re.findall(r"^waits (\d+)$", out, re.M)]


@pytest.fixture(scope="module")
def words(data):
    """words(task) are its flags; their first word is the name of its script."""
    return lambda task: TASKS[task].format(data=data).split()


@pytest.fixture(scope="module")
def on_cpu(run, words, tmp_path_factory):
    """on_cpu(task) is its loss curve on the CPU, in one process."""
    curves = {}

    def on_cpu(task):
        if task not in curves:
            script, *flags = words(task)
            log = tmp_path_factory.mktemp("cpu") / "log.jsonl"
            run(f"singlegpu/{script}", *flags, "--log", log)
            curves[task] = curve(log)
        return curves[task]

    return on_cpu


def task_of(script):
    return "gpt" if "gpt" in script.partition("/")[2] else "mlp"


@pytest.mark.parametrize("name", RUNS)
def test_runs_train_alike(run, words, on_cpu, changed, tmp_path, name):
    """The losses are those of the CPU, nothing is read too early, and no step waits."""
    task, script, processes, more = RUNS[name]
    log = tmp_path / "log.jsonl"
    flags = (*words(task)[1:], *more.split(), "--log", log)
    out = run(changed(script, WAITS), *flags, processes=processes, EMU_DEVICES="4")
    assert {row["device"] for row in rows(log)} == {"Emulator"}
    assert waits_of(out) == [0] * 4 * processes, out
    is_idle = processes < 4 and script.startswith(("multinode", "hybrid/gpt"))  # a device
    assert ("processes do not use all 4 GPUs of a node" in out) == is_idle, out
    rounding = 1e-3 if "16" in name else 1e-5  # gloo adds up in another order
    np.testing.assert_allclose(curve(log), on_cpu(task), rtol=rounding)


def test_mnist_trains_alike(run, data, changed, tmp_path):
    """Loss and accuracy are those of one process on the CPU; no step waits."""
    flags = ("--data_dir", data, "--epochs", 1, "--batch_size", 120)

    def results(script, processes=1, **env):
        out = run(script, *flags, processes=processes, cwd=tmp_path, **env)
        [found] = re.findall(r"train_loss ([\d.]+), val_acc ([\d.]+)", out)
        return list(map(float, found)), waits_of(out)

    on_cpu, _ = results("singlegpu/mnist.py")
    for processes, folder in enumerate(("singlegpu", "multigpu", "multinode", "hybrid"), start=1):
        copy = changed(f"{folder}/mnist.py", MNIST_WAITS)
        found, waits = results(copy, processes, EMU_DEVICES="4")
        assert found[0] == pytest.approx(on_cpu[0], abs=2e-4)
        assert found[1] == pytest.approx(on_cpu[1], abs=0.006), "a sample or so"
        assert waits == [2 * (processes > 1)] * processes  # DDP's own, in the second step


def test_a_users_start(data, tmp_path):
    """With PYTHONPATH alone, as README says, for the script and for the processes it starts."""
    words = [sys.executable, "-W", "error::UserWarning", ROOT / "multigpu/mnist.py"]
    words += ["--data_dir", data, "--epochs", 1]  # without --num_gpus, on all devices
    job = Job(words, tmp_path, PYTHONPATH=str(ROOT / "tests/emulator"), EMU_DEVICES="2")
    status, out, err = job.wait()
    assert status == 0 and "epoch 0: train_loss" in out and "| multigpu | 2 |" in out, err


@pytest.mark.parametrize("folder", ("multigpu", "multinode"))
def test_allreduce(run, changed, tmp_path, folder):
    """Its sums are right, and its rows name the device."""
    small = {"1 << (28 if ON_GPU": "1 << (18 if ON_GPU", "size = 4096 if": "size = 256 if"}
    flags = "--min_bytes 4096 --max_bytes 16384 --seconds 0.02".split()
    copy = changed(f"{folder}/allreduce.py", small)
    out = run(copy, *flags, "--out", tmp_path / "link.json", processes=2, EMU_DEVICES="2")
    assert "Emulator" in out and len(re.findall(r"^\| +\d+ \|", out, re.M)) == 3, out


def test_quantize(run, words, tmp_path):
    """fp32 and bf16 have the quality of the CPU; each other row says why it is missing."""
    script, *flags = words("gpt")
    run(f"singlegpu/{script}", *flags, "--snapshot", tmp_path / "gpt.pt")
    more = ("--snapshot", tmp_path / "gpt.pt", "--eager", "--num_samples", 24, "--rounds", 1)
    out = run("quantize/gpt.py", *more, EMU_DEVICES="1")
    assert out.startswith("emu, ")
    row = r"\| (\w+) \| eager \| [\d.]+ \| ([\d.]+) "
    found = re.findall(row, out)
    on_cpu = re.findall(row, run("quantize/gpt.py", *more, "--row", "fp32"))
    assert found[0] == on_cpu[0] and [name for name, _ in found] == ["fp32", "bf16"]
    assert float(found[1][1]) == pytest.approx(float(found[0][1]), rel=0.01)
    assert out.count("left out: torchao has no kernels for emu") == 4
    assert out.count("left out: torch.ao is for CPUs") == 1


# == Snapshots, and devices that are too few ==
MOVES = {  # script, processes, devices (none: a machine without), more flags; four steps each
    "mlp": (
        ("multigpu/images.py", 4, "4", ""),
        ("multinode/images.py", 2, None, ""),
        ("hybrid/images.py", 2, "6", "--num_stages 3"),
    ),
    "gpt": (
        ("hybrid/gpt_fsdp.py", 4, "4", "--shard_size 2"),
        ("hybrid/gpt_fsdp.py", 2, None, ""),
        ("hybrid/gpt_fsdp.py", 3, "4", ""),
    ),
}


@pytest.mark.parametrize("name", MOVES)
def test_snapshots_move(run, words, changed, tmp_path, name):
    """From devices to others, to a machine without and back: the losses of one that stayed."""
    script, *flags = words(name)
    flags += ["--log", log := tmp_path / "log.jsonl", "--max_steps"]
    for number, (mover, processes, devices, more) in enumerate(MOVES[name], start=1):
        env = {"EMU_DEVICES": devices} if devices else {}
        more = (4 * number, "--snapshot", tmp_path / "moved.pt", *more.split())
        run(changed(mover, CONSTANT), *flags, *more, processes=processes, **env)
        assert rows(log)[-1]["device"] == ("Emulator" if devices else "CPU")
    moved = curve(log)
    log.unlink()
    run(changed(f"singlegpu/{script}", CONSTANT), *flags, 12)
    np.testing.assert_allclose(moved, curve(log), rtol=1e-5)


NODE = "GPU(s) are too few for the processes of this node"
TOO_FEW = (  # script, processes, devices, flags, what is said
    ("multigpu/images.py", 5, 4, "", "this machine has 4 GPU(s), not 5"),
    ("multigpu/mnist.py", 3, 2, "--synthetic", "this machine has 2 GPU(s), not 3"),
    ("multinode/mnist.py", 2, 1, "--synthetic", f"1 {NODE}"),
    ("multinode/allreduce.py", 4, 2, "", f"2 {NODE}"),
    ("hybrid/images.py", 2, 3, "--num_stages 2", f"3 {NODE}"),
    ("hybrid/gpt_fsdp.py", 2, 1, "", f"1 {NODE}"),
)


@pytest.mark.parametrize(("script", "processes", "devices", "flags", "told"), TOO_FEW)
def test_too_few_devices(attempt, words, script, processes, devices, flags, told):
    """One process says so in a line, and all end: under torchrun all see the same devices."""
    is_short = "mnist" in script or "allreduce" in script
    flags = [*([] if is_short else words(task_of(script))[1:]), *flags.split()]
    status, _, err = attempt(script, *flags, processes=processes, EMU_DEVICES=str(devices))
    assert status != 0 and err.count(f"{told}\n") == 1 and "Traceback" not in err, err


def test_processes_may_share_a_device(run, words, on_cpu, tmp_path):
    """With NCCL's variable, to rehearse several GPUs on one: the losses are those of the CPU."""
    log = tmp_path / "log.jsonl"
    env = {"EMU_DEVICES": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    run("multigpu/images.py", *words("mlp")[1:], "--log", log, processes=2, **env)
    np.testing.assert_allclose(curve(log), on_cpu("mlp"), rtol=1e-5)


SHOWN = [  # script, the devices of a process, and those that it sees: its own, or all of the node
    ("multinode/images.py", 1, 1),
    ("multinode/images.py", 1, 2),
    ("hybrid/images.py", 2, 2),
]


@pytest.mark.parametrize(("script", "each", "shown"), SHOWN)
def test_srun_may_show_each_task_its_own_devices(words, tmp_path, script, each, shown):
    """Each of two tasks of a node takes its own, also where it sees them as number 0."""
    log = tmp_path / "log.jsonl"
    flags = [*words("mlp")[1:], "--max_steps", "2", "--log", log]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "EMU_DEVICES": str(shown)}
    env |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    own, first = ("SLURM_PROCID", "SLURM_LOCALID"), each if shown == each else 0
    envs = [env | dict.fromkeys(own, str(n)) | {"EMU_FIRST": str(first * n)} for n in (0, 1)]
    for status, _, err in run_all([[ROOT / script, *flags]] * 2, envs, tmp_path):
        assert status == 0, err
    assert [row["device"] for row in rows(log)] == ["Emulator"] * 2


def test_what_saves_the_memory_of_activations(run, words, tmp_path):
    """--checkpoint_activations and --grad_accum_steps lower the peak."""
    base = (*words("gpt")[1:], "--num_layers", 4, "--batch_size", 48, "--max_steps", 1, "--log")
    peaks = []
    for more in ("", "--checkpoint_activations", "--grad_accum_steps 4"):
        log = tmp_path / f"{more}.jsonl"
        run("hybrid/gpt_fsdp.py", *base, log, *more.split(), EMU_DEVICES="1")
        peaks.append(rows(log)[0]["peak_MB"])
    assert max(peaks[1:]) < 0.6 * peaks[0], peaks


# == The timing, in simulated time ==
GUARD = 'if __name__ == "__main__":\n'
SLOW = """class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        torch.emu.sleep(float(os.environ["FORWARD"]))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        torch.emu.sleep(float(os.environ["BACKWARD"]))
        return gradient.clone()


"""
LAYERS = """class Layer(nn.Linear):
    def forward(self, x):
        return Slow.apply(super().forward(x))


def create_model(args, data):
    first = Layer(784, 16, bias=False)
    return nn.Sequential(nn.Flatten(), first, *[Layer(16, 16, bias=False) for _ in range(NUMBER)])


"""
BLOCKS = """fast_forward = GPTBlock.forward
GPTBlock.forward = lambda self, x: Slow.apply(fast_forward(self, x))


"""
VIEW = "gradient_as_bucket_view=True"
# Between two rows there is no look after the warmup. That of a row takes so many collectives:
LOOKS = {"min(int(speed), longest)": "0 if step < 3 else 100"}
IN_A_LOOK = {"hybrid/images.py": 0, "hybrid/gpt_pipeline.py": 3}  # by gloo; of all stages. Else: 1
DDP = LOOKS | {VIEW: f"{VIEW}, bucket_cap_mb=1e-4"}
DDP = ("multigpu/images.py", 2, DDP | {GUARD: SLOW + LAYERS.replace("NUMBER", "3") + GUARD})
VIEW = '"gradient_as_bucket_view": True'
STAGES = LOOKS | {VIEW: f'{VIEW}, "bucket_cap_mb": 1e-4'}
STAGES = ("hybrid/images.py", 2, STAGES | {GUARD: SLOW + LAYERS.replace("NUMBER", "1") + GUARD})
PIPELINE = ("hybrid/gpt_pipeline.py", 4, LOOKS | {GUARD: SLOW + BLOCKS + GUARD})
SHARDS = ("hybrid/gpt_fsdp.py", 2, LOOKS | {GUARD: SLOW + BLOCKS + GUARD})
PHASES = ("data", "forward", "backward", "bubble", "comm", "optimizer", "comm_total")
TIMES = {  # script, processes, changes; flags; the ms of a layer's forward, of its backward pass,
    # and of a collective or message; and the ms that each phase must have in a step
    "ddp, exposed": (  # they begin 1 ms after the backward pass, one after the other
        (*DDP, "--comm_hook bf16", (1, 1, 3)),
        {"forward": 4, "backward": 4, "comm": 9, "comm_total": 12},
    ),
    "accumulation": (  # only the last of four all-reduces ends after the backward pass
        (*DDP, "--grad_accum_steps 3", (1, 3, 1)),
        {"forward": 12, "backward": 36, "comm": 1, "comm_total": 4},
    ),
    "stages": (
        (*STAGES, "", (1, 3, 1)),
        {"forward": 2, "backward": 6, "comm": 1, "comm_total": 2},
    ),
    "pipelines": (  # bubble: f + b, 4 messages there and 4 back, and the all-reduce that ends it.
        (*PIPELINE, "", (1, 2, 1)),  # comm: of the embedding and the norm
        {"forward": 4, "backward": 8, "bubble": 12, "comm": 2, "comm_total": 3},
    ),
    "shards": (  # forward waits for 2 of 3 all-gathers. At the end of backward, a block's
        # reduce-scatter, and the head's, with an all-reduce after each, of which two overlap.
        (*SHARDS, "", (2, 4, 1)),  # optimizer: the norm
        {"forward": 6, "backward": 11, "optimizer": 1, "comm_total": 10},
    ),
}


@pytest.mark.parametrize("name", TIMES)
def test_times_are_those_that_must_be(run, words, changed, tmp_path, name):
    """In each process. What a layer really computes takes no time. The look is taken off."""
    (script, processes, changes, flags, (forward, backward, comm)), times = TIMES[name]
    log = tmp_path / "log.jsonl"
    flags = (*words(task_of(script))[1:], *flags.split(), "--eval_every", 8, "--log", log)
    env = {"EMU_DEVICES": "4", "EMU_SIM": f"comm={1000 * comm}"}
    env |= {"FORWARD": str(forward / 1000), "BACKWARD": str(backward / 1000)}
    run(changed(script, changes), *flags, processes=processes, **env)
    for row in rows(log):
        for phase in ("comm", "comm_total"):
            row[phase] -= IN_A_LOOK.get(script, 1) * comm / 1000
        found = {phase: 1000 * row.get(phase, 0.0) / row["steps"] for phase in PHASES}
        found = {phase: ms for phase, ms in found.items() if ms > 1e-6}
        assert found == pytest.approx(times, abs=1e-3)


# == Scripts that are wrong ==
NEXT = "            batch = next(batches)\n"
SIDE = """            side = globals().setdefault("side", torch.Stream())
            with side:
                batch = next(batches)
            torch.accelerator.current_stream().wait_stream(side)
"""
MOVED = "part.to(device, non_blocking=True)"
FORWARD = '            mark("forward")\n'
WRONG = {  # name: (script, flags, text, other, error; none: the host waits in each step)
    "batch not moved": ("multinode/images.py", "", MOVED, "part", "to be on the same device"),
    "one device for all": (
        "multinode/images.py",
        "",
        "torch.device(local_rank % num_gpus if",
        "torch.device(0 if",
        "Duplicate GPU detected",
    ),
    "event without timing": (
        "multigpu/images.py",
        "",
        "torch.Event(enable_timing=True)",
        "torch.Event()",
        "enable_timing",
    ),
    "times read early": (
        "multigpu/images.py",
        "",
        "        torch.accelerator.synchronize()\n",
        "        pass\n",
        "event not ready",
    ),
    "hook before the gradients": (
        "multigpu/images.py",
        "",
        "stream.wait_stream(torch.accelerator.current_stream())",
        "pass",
        "race",
    ),
    "no record_stream": ("multigpu/images.py", "", NEXT, SIDE, "record_stream is missing"),
    "device in a worker": (
        "singlegpu/images.py",
        "--num_workers 1",
        "        seeds, indices = request\n",
        "        seeds, indices = request\n        torch.zeros(1, device=0)\n",
        "Cannot re-initialize emu in a forked subprocess",
    ),
    "events of two devices": (
        "hybrid/images.py",
        "",
        "    return clocks[is_computing].record_event(torch.Event(clocks[0].device, ",
        "    return current.record_event(torch.Event(current.device, ",
        "events of two devices",
    ),
    "sums used before they are there": (
        "hybrid/gpt_pipeline.py",
        "",
        "        reducing.wait()\n",
        "",
        "race",
    ),
    "loss read": ("multigpu/images.py", "", FORWARD, f"{FORWARD}            loss.item()\n", None),
    "memory not pinned": (
        "multigpu/images.py",
        "--batch_size 240",
        "pin_memory=ON_GPU",
        "pin_memory=False",
        None,
    ),
    "pinned in vain": (
        "singlegpu/gpt.py",
        "--seq_len 352 --num_layers 1",
        "ids[:, :-1].contiguous()",
        "ids[:, :-1]",
        None,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_gpu_would_punish_is_told(attempt, words, changed, name):
    script, flags, text, other, told = WRONG[name]
    words = (*words(task_of(script))[1:], *flags.split())
    changes = {text: other} | (LOOKS if told else WAITS)
    processes = 1 if "singlegpu" in script else 2
    status, out, err = attempt(
        changed(script, changes), *words, processes=processes, EMU_DEVICES="4"
    )
    if told:
        assert status and told in err, (out, err)
    else:
        assert len(waits_of(out)) == 4 * processes and min(waits_of(out)) > 0, (out, err)
