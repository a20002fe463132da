"""Scripts on an emulated accelerator: they train alike, and what a GPU would punish is told."""

import re
import sys

import numpy as np
import pytest
from conftest import ROOT, Job, curve, rows
from fork_server import run_all
from test_hybrid import srun_envs

MNIST = {"singlegpu": 1, "multigpu": 2, "multinode": 3, "hybrid": 4}  # processes


pytestmark = pytest.mark.usefixtures("emulator")


# == They train as on the CPU, and the host waits in no step ==
FEW = "--batch_size 24 --max_steps 8 --eval_every 4 --learning_rate 3e-4 --precision fp32"
GPT = "--dataset {data}/words.txt --d_model 32 --n_heads 2 --num_layers 2 --seq_len 32"
TASKS = {
    "mlp": f"images.py --dataset mnist --data_dir {{data}} --model mlp {FEW}",
    "cnn": f"images.py --dataset mnist --data_dir {{data}} --model cnn {FEW}",
    "fp16": f"images.py --dataset mnist --data_dir {{data}} --model mlp {FEW} --precision fp16",
    "autoencoder": f"autoencoder.py --dataset mnist --data_dir {{data}} {FEW}",
    "text": f"text.py --dataset texts --data_dir {{data}} --model transformer --seq_len 16 {FEW}",
    "nbow": f"text.py --dataset texts --data_dir {{data}} --model nbow --seq_len 16 {FEW}",
    "translation": f"translation.py --dataset pairs --data_dir {{data}} --seq_len 8 {FEW}",
    "lstm": f"translation.py --dataset pairs --data_dir {{data}} --seq_len 8 --model lstm {FEW}",
    "gpt": f"gpt.py {GPT} --max_grad_norm 0.5 {FEW}",
}
RUNS = {  # task, script, processes, more flags
    "mlp": ("mlp", "singlegpu/images.py", 1, "--num_workers 1"),
    "fp16": ("fp16", "singlegpu/images.py", 1, ""),
    "compiled": ("mlp", "singlegpu/images.py", 1, "--compile"),
    "autoencoder": ("autoencoder", "singlegpu/autoencoder.py", 1, ""),
    "text": ("text", "singlegpu/text.py", 1, ""),
    "nbow": ("nbow", "multinode/text.py", 2, ""),
    "translation": ("translation", "multigpu/translation.py", 2, ""),
    "lstm": ("lstm", "multigpu/translation.py", 2, ""),
    "gpt": ("gpt", "singlegpu/gpt.py", 1, "--grad_accum_steps 2"),
    "accumulation": ("mlp", "multigpu/images.py", 3, "--grad_accum_steps 2 --num_workers 1"),
    "cnn": ("cnn", "multinode/images.py", 2, ""),
    "bf16 sent": ("gpt", "multinode/gpt.py", 3, "--comm_hook bf16"),
    "stages": ("mlp", "hybrid/images.py", 2, "--num_stages 2 --grad_accum_steps 3"),
    "pipeline": ("gpt", "hybrid/gpt_pipeline.py", 4, "--num_stages 2"),
    "shards": ("gpt", "hybrid/gpt_fsdp.py", 2, ""),
}
# Prints how often the host has waited in steps 2, 3, 6 and 7. A line is one write.
WAITS = {
    "        train_step(run, batches, args)\n": """
        waits = torch.emu.host_waits()
        train_step(run, batches, args)
        print(f"waits {torch.emu.host_waits() - waits}\\n", end="") if run.step % 4 > 1 else None
"""
}
MNIST_WAITS = {  # likewise, in the steps of an epoch
    "        for batch in loader:": """
        waits = torch.emu.host_waits()
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
    numbers = "one two three four five six seven".split()
    for folder, names in ("texts", "train test"), ("pairs", "train validation test"):
        (data / folder).mkdir(exist_ok=True)
        for name in names.split():
            generator = np.random.default_rng(len(name))
            lines = ["text,label" if folder == "texts" else "de,en"]
            for _ in range(72):
                drawn = generator.integers(7, size=generator.integers(1, 7))
                text = " ".join(numbers[number] for number in drawn)
                other = drawn[0] % 3 if folder == "texts" else " ".join(map(str, drawn))
                lines.append(f"{text},{other}")
            (data / folder / f"{name}.csv").write_text("\n".join(lines))
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


@pytest.mark.parametrize("name", RUNS)
def test_runs_train_alike(run, words, on_cpu, changed, tmp_path, name):
    """The losses are those of the CPU, nothing is read too early, and no step waits.

    PyTorch itself waits in two of them: in the second, when DDP makes its buckets anew; and
    after each validation, when the stages of a pipeline find out whether they are connected.
    """
    task, script, processes, more = RUNS[name]
    log = tmp_path / "log.jsonl"
    flags = (*words(task)[1:], *more.split(), "--log", log)
    copy = changed(script, WAITS)
    out = run(copy, *flags, processes=processes, EMU_DEVICES="4")
    assert {row["device"] for row in rows(log)} == {"Emulator"}
    assert waits_of(out) == [0] * 4 * processes, out
    is_idle = processes < 4 and script.startswith(("multinode", "hybrid/gpt"))  # a device
    assert ("processes do not use all 4 GPUs of a node" in out) == is_idle, out
    assert "stages use" not in out
    rounding = 1e-3 if "16" in name else 1e-5  # gloo adds up in another order
    np.testing.assert_allclose(curve(log), on_cpu(task), rtol=rounding)


@pytest.mark.parametrize("folder", MNIST)
def test_mnist_trains_alike(run, data, changed, tmp_path, folder):
    """Loss and accuracy are those of the CPU, to the digits printed; no step waits."""
    script, processes = f"{folder}/mnist.py", MNIST[folder]
    flags = ("--data_dir", data, "--epochs", 1, "--batch_size", 120)
    copy = changed(script, MNIST_WAITS)
    out = run(copy, *flags, processes=processes, cwd=tmp_path, EMU_DEVICES="4")
    on_cpu = run(script, *flags, processes=processes, cwd=tmp_path)
    losses = [re.findall(r"train_loss [\d.]+, val_acc [\d.]+", each) for each in (out, on_cpu)]
    assert losses[0] == losses[1] and len(losses[0]) == 1
    assert waits_of(out) == [2 * (processes > 1)] * processes  # DDP's own, in the second step


def test_a_users_start(data, tmp_path):
    """With PYTHONPATH alone, as README says, for the script and for the processes it starts."""
    words = [sys.executable, "-W", "error::UserWarning", ROOT / "multigpu/mnist.py"]
    words += ["--data_dir", data, "--epochs", 1]  # without --num_gpus, on all devices
    job = Job(words, tmp_path, PYTHONPATH=str(ROOT / "tests/emulator"))
    status, out, err = job.wait()
    assert status == 0 and "epoch 0: train_loss" in out and "| multigpu | 4 |" in out, err


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
        ("singlegpu/images.py", 1, "4", ""),
        ("multigpu/images.py", 4, "4", ""),
        ("multinode/images.py", 2, None, ""),
        ("hybrid/images.py", 2, "6", "--num_stages 3"),
        ("multigpu/images.py", 3, "3", ""),
    ),
    "gpt": (
        ("hybrid/gpt_fsdp.py", 4, "4", "--shard_size 2"),
        ("hybrid/gpt_pipeline.py", 2, None, ""),
        ("hybrid/gpt_pipeline.py", 4, "4", ""),
        ("multigpu/gpt.py", 3, "3", ""),
        ("hybrid/gpt_fsdp.py", 2, None, ""),
    ),
}


@pytest.mark.parametrize("task", MOVES)
def test_snapshots_move(run, words, tmp_path, task):
    """From devices to others, to a machine without and back: the losses of one that stayed."""
    script, *flags = words(task)
    moved, stayed = [], []
    for number, (mover, processes, devices, more) in enumerate(MOVES[task], start=1):
        log = tmp_path / f"{number}.jsonl"
        words_of = (*flags, "--max_steps", 4 * number, "--log", log, "--snapshot")
        env = {"EMU_DEVICES": devices} if devices else {}
        moved_words = (*words_of, tmp_path / "moved.pt", *more.split())
        run(mover, *moved_words, processes=processes, **env)
        assert {row["device"] for row in rows(log)} == {"Emulator" if devices else "CPU"}
        moved.append(curve(log)[-1])
        log.unlink()
        run(f"singlegpu/{script}", *words_of, tmp_path / "stayed.pt")
        stayed.append(curve(log)[-1])
    np.testing.assert_allclose(moved, stayed, rtol=1e-5)


TOO_FEW = (  # script, processes, devices, flags, what is said
    ("multigpu/images.py", 5, 4, "", "this machine has 4 GPU(s), not 5\n"),
    ("multinode/images.py", 3, 2, "", "2 GPU(s) are too few for the processes of this node\n"),
    ("multinode/images.py", 2, 1, "", "1 GPU(s) are too few for the processes of this node\n"),
    ("hybrid/images.py", 2, 3, "--num_stages 2", "3 GPU(s) are too few for the processes of this"),
    ("hybrid/images.py", 2, 2, "--num_stages 2", "2 GPU(s) are too few for the processes of this"),
)


@pytest.mark.parametrize(("script", "processes", "devices", "flags", "told"), TOO_FEW)
def test_too_few_devices(attempt, words, script, processes, devices, flags, told):
    """One process says so in a line, and all end: under torchrun all see the same devices."""
    flags = (*words("mlp")[1:], *flags.split())
    status, _, err = attempt(script, *flags, processes=processes, EMU_DEVICES=str(devices))
    assert status != 0 and err.count(told) == 1 and "Traceback" not in err, err


SHORT_TOO_FEW = (  # script, processes, flags, what is said of one device and of two
    ("multigpu/mnist.py", 0, "--synthetic --num_gpus {}", "this machine has {} GPU(s), not {}\n"),
    ("multinode/mnist.py", None, "--synthetic", "{} GPU(s) are too few for the processes of this"),
    ("hybrid/mnist.py", None, "--synthetic", "{} GPU(s) are too few for the processes of this"),
    ("multinode/allreduce.py", None, "", "{} GPU(s) are too few for the processes of this"),
)


@pytest.mark.parametrize("devices", (1, 2))
@pytest.mark.parametrize(("script", "processes", "flags", "told"), SHORT_TOO_FEW)
def test_too_few_devices_for_the_short_scripts(attempt, script, processes, flags, told, devices):
    """The first process without a device says so in a line, and no other says anything."""
    processes = 2 * devices if processes is None else processes
    flags = flags.format(2 * devices).split()
    status, out, err = attempt(script, *flags, processes=processes, EMU_DEVICES=str(devices))
    assert status != 0 and not out and "Traceback" not in err, err
    assert err.count(told.format(devices, 2 * devices)) == 1, err


CONNECTING = "multinode/images hybrid/images hybrid/gpt_pipeline hybrid/gpt_fsdp".split()
AFTER_CONNECT = "    run.num_steps = args.max_steps or"
TELLS = """    all_reduce_sums({"/all": 1})
    print(*getattr(run, "devices", [run.device]))
    dist.destroy_process_group()
    sys.exit(0)
"""


@pytest.mark.parametrize("script", CONNECTING)
def test_srun_may_show_each_task_its_own_devices(run, changed, words, tmp_path, script):
    """Each of two tasks of a node sees what it needs, as number 0, and takes it."""
    copy = changed(f"{script}.py", {AFTER_CONNECT: TELLS + AFTER_CONNECT})
    flags = words("gpt" if "gpt" in script else "mlp")[1:]
    is_split = script == "hybrid/images"
    envs = [env | {"EMU_DEVICES": "2" if is_split else "1"} for env in srun_envs(2)]
    expected = "emu:0 emu:1\n" if is_split else "emu:0\n"
    for answer in run_all([[copy, *flags]] * 2, envs, tmp_path):
        assert answer[:2] == (0, expected), answer
    if is_split:
        out = run(copy, *flags, EMU_DEVICES="4")
        assert out == f"stages use 2 of 4 GPUs of a node\n{expected}"


def test_what_saves_the_memory_of_activations(run, words, tmp_path):
    """--checkpoint_activations and --grad_accum_steps lower the peak."""
    base = (*words("gpt")[1:], "--num_layers", 4, "--batch_size", 48, "--max_steps", 1, "--log")
    peaks = []
    for more in ("", "--checkpoint_activations", "--grad_accum_steps 4"):
        log = tmp_path / f"{more}.jsonl"
        run("hybrid/gpt_fsdp.py", *base, log, *more.split(), EMU_DEVICES="1")
        peaks.append(rows(log)[0]["peak_MB"])
    assert max(peaks[1:]) < 0.6 * peaks[0], peaks


# == The stopwatch, in simulated time ==
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
BUCKETS = {"gradient_as_bucket_view=True": "gradient_as_bucket_view=True, bucket_cap_mb=1e-4"}
DDP = ("multigpu/images.py", 2, {GUARD: SLOW + LAYERS.replace("NUMBER", "3") + GUARD} | BUCKETS)
STAGES = ("hybrid/images.py", 2, {GUARD: SLOW + LAYERS.replace("NUMBER", "1") + GUARD} | BUCKETS)
PIPELINE = ("hybrid/gpt_pipeline.py", 4, {GUARD: SLOW + BLOCKS + GUARD})
SHARDS = ("hybrid/gpt_fsdp.py", 2, {GUARD: SLOW + BLOCKS + GUARD})
PHASES = ("data", "forward", "backward", "bubble", "comm", "optimizer", "comm_total")


@pytest.fixture
def simulated(run, words, changed, tmp_path):
    """simulated(script, processes, changes, flags, times) is {phase: ms in a step}, of each rank.

    `times` are the ms of a layer's forward, its backward pass, and a collective or message. What a
    layer really computes takes no time.
    """

    def simulated(script, processes, changes, flags, times):
        log = tmp_path / "log.jsonl"
        flags = (*words("gpt" if "gpt" in script else "mlp")[1:], *flags.split())
        env = {"EMU_DEVICES": "4", "EMU_SIM": f"comm={1000 * times[2]}"}
        env |= {"FORWARD": str(times[0] / 1000), "BACKWARD": str(times[1] / 1000)}
        more = ("--eval_every", 8, "--log", log)
        run(changed(script, changes), *flags, *more, processes=processes, **env)
        found = []
        for row in rows(log):
            each = {name: 1000 * row.get(name, 0.0) / row["steps"] for name in PHASES}
            found.append({name: ms for name, ms in each.items() if ms > 1e-6})
        return found

    return simulated


TIMES = {  # words of simulated(), and the ms that each phase must have in a step
    "ddp, hidden": (  # only the last of four all-reduces ends after the backward pass
        (*DDP, "", (1, 3, 1)),
        {"forward": 4, "backward": 12, "comm": 1, "comm_total": 4},
    ),
    "ddp, exposed": (  # they begin 1 ms after the backward pass, one after the other
        (*DDP, "--comm_hook bf16", (1, 1, 3)),
        {"forward": 4, "backward": 4, "comm": 9, "comm_total": 12},
    ),
    "accumulation": (
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
    "stages of a pipeline": (  # bubble: 3 (f + b)
        (*PIPELINE, "--num_stages 4 --num_layers 4 --schedule gpipe", (1, 2, 0)),
        {"forward": 4, "backward": 8, "bubble": 9},
    ),
    "stages of a pipeline, 1f1b": (  # the same
        (*PIPELINE, "--num_stages 4 --num_layers 4 --schedule 1f1b", (1, 2, 0)),
        {"forward": 4, "backward": 8, "bubble": 9},
    ),
    "shards": (  # forward waits for 2 of 3 all-gathers. At the end of backward, a block's
        # reduce-scatter, and the head's, with an all-reduce after each, of which two overlap
        (*SHARDS, "", (2, 4, 1)),
        {"forward": 6, "backward": 11, "comm": 1, "comm_total": 11},
    ),
}


@pytest.mark.parametrize("name", TIMES)
def test_times_are_those_that_must_be(simulated, name):
    words, times = TIMES[name]
    for found in simulated(*words):
        assert found == pytest.approx(times, abs=1e-3)


# == Scripts that are wrong ==
MOVED = "        batch = to_device(next(batches), run.device)"
SIDE = """        run.side = getattr(run, "side", None) or torch.Stream(run.device)
        with run.side:
            batch = to_device(next(batches), run.device)"""
SIDE_WAITED = SIDE + "\n        torch.accelerator.current_stream().wait_stream(run.side)"
SAME = "Expected all tensors to be on the same device"
ALONE = "No backend type associated with device type"
MORE = {  # flags that some of them need
    "device in a worker": "--num_workers 1",
    "memory not pinned": "--batch_size 240",
    "pinned in vain": "--seq_len 352 --num_layers 1",
}
ERRORS = {  # name: (script, {text: other}, error)
    "device not set": (
        "multigpu/mnist.py",
        {"torch.accelerator.set_device_index(rank)": "pass"},
        "event not ready",
    ),
    "event read early": (
        "multigpu/mnist.py",
        {"results.tolist()": "(0.0, torch.emu.sleep(1.0) or 0.0)"},
        "event not ready",
    ),
    "model not moved": ("multigpu/mnist.py", {"*layers).to(device)": "*layers)"}, ALONE),
    "CPU tensor sent": (
        "multigpu/mnist.py",
        {"dist.all_reduce(results)": "dist.all_reduce(results.cpu())"},
        ALONE,
    ),
    "CPU's sums sent": (
        "multigpu/images.py",
        {'        backend = f"cpu:gloo,{run.device.type}:{backend}"\n': ""},
        ALONE,
    ),
    "NumPy on the device": (
        "singlegpu/images.py",
        {"(logits.argmax(1) == labels).sum()": "(logits.argmax(1) == labels).numpy().sum()"},
        "can't convert emu",
    ),
    "batch not moved": ("multinode/images.py", {MOVED: "        batch = next(batches)"}, SAME),
    "one device for all": (
        "multinode/images.py",
        {"torch.device(run.local_rank % num_devices)": "torch.device(0)"},
        "Duplicate GPU detected",
    ),
    "event without timing": (
        "multigpu/images.py",
        {"torch.Event(self.device, enable_timing=True)": "torch.Event(self.device)"},
        "enable_timing",
    ),
    "flush without waiting": (
        "multigpu/images.py",
        {"            torch.accelerator.synchronize()\n": "            pass\n"},
        "event not ready",
    ),
    "hook before the gradients": (
        "multigpu/images.py",
        {"stream.wait_stream(torch.accelerator.current_stream())": "pass"},
        "race",
    ),
    "batch of a side stream": ("singlegpu/images.py", {MOVED: SIDE}, "race"),
    "no record_stream": ("multigpu/images.py", {MOVED: SIDE_WAITED}, "record_stream is missing"),
    "device in a worker": (
        "singlegpu/images.py",
        {
            "        seeds, indices = request\n": "        seeds, indices = request\n"
            "        torch.zeros(1, device=0)\n"
        },
        "Cannot re-initialize emu in a forked subprocess",
    ),
    "activations not moved": (
        "hybrid/images.py",
        {"stage(activations.to(stage_device))": "stage(activations)"},
        SAME,
    ),
    "logits not moved": (
        "hybrid/images.py",
        {"return activations.to(images.device)": "return activations"},
        SAME,
    ),
    "buffers by gloo": (
        "hybrid/images.py",
        {
            ", group=run.groups[buffer.device])": ")",
            "nn.Dropout(args.dropout),\n            nn.Linear(512": "nn.BatchNorm1d(512),\n"
            "            nn.Linear(512",
        },
        ALONE,
    ),
    "events of each stage's GPU": (
        "hybrid/images.py",
        {"clock, streams = self.comm_clock, [current]": "return super().now()"},
        "events of two devices",
    ),
    "sums used before they are there": (
        "hybrid/gpt_pipeline.py",
        {"    reducing.wait()\n": ""},
        "race",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_a_gpu_would_punish_is_told(attempt, data, words, changed, tmp_path, name):
    script, changes, told = ERRORS[name]
    task = ("--data_dir", data, "--epochs", 1)
    if "mnist" not in script:
        task = words("gpt" if "gpt" in script else "mlp")[1:]
    processes = 1 if "singlegpu" in script else 2
    words = (changed(script, changes), *task, *MORE.get(name, "").split())
    status, out, err = attempt(*words, processes=processes, cwd=tmp_path, EMU_DEVICES="4")
    assert status and told in err, (out, err)


FORWARD = '        run.watch.mark("forward")\n'
WAITING = {  # name: (script, {text: other}): the host waits in each step
    "loss read": ("multigpu/images.py", {FORWARD: FORWARD + "        loss.item()\n"}),
    "loss of stages read": ("hybrid/images.py", {FORWARD: FORWARD + "        print(loss)\n"}),
    "norm read": (
        "hybrid/gpt_fsdp.py",
        {"    norm = norm.full_tensor()": "    norm = norm.full_tensor()\n        print(norm)"},
    ),
    "GPU waited for in place of a stage": (
        "hybrid/gpt_pipeline.py",
        {"dist.all_reduce(self.zero, group=pipeline_group)": "torch.accelerator.synchronize()"},
    ),
    "memory not pinned": (
        "multigpu/images.py",
        {'pin_memory=run.device.type not in ("cpu", "mps"),': "pin_memory=False,"},
    ),
    "pinned in vain": ("singlegpu/gpt.py", {"ids[:, :-1].contiguous()": "ids[:, :-1]"}),
    "blocking copy": ("singlegpu/gpt.py", {"x.to(device, non_blocking=True)": "x.to(device)"}),
}


@pytest.mark.parametrize("name", WAITING)
def test_a_wait_in_each_step_is_seen(run, words, changed, name):
    script, changes = WAITING[name]
    flags = (*words("gpt" if "gpt" in script else "mlp")[1:], *MORE.get(name, "").split())
    processes = 1 if "singlegpu" in script else 2
    out = run(changed(script, changes | WAITS), *flags, processes=processes, EMU_DEVICES="4")
    assert len(waits_of(out)) == 4 * processes and min(waits_of(out)) > 0


RESUMED = [(script, 4) for script in ("multigpu/images.py", "hybrid/gpt_pipeline.py")]
RESUMED += [("hybrid/gpt_fsdp.py", devices) for devices in (0, 4)]  # elsewhere, CPUs keep views


@pytest.mark.parametrize(("script", "devices"), RESUMED)
def test_a_resumed_run_lets_go_of_the_old_snapshot(run, words, changed, tmp_path, script, devices):
    """The file is replaced at the next save. Mapped, it would take disk space until the end."""
    end = "    print_summary(run.watch)\n"
    told = "    print('mapped', '.pt (deleted)' in open('/proc/self/maps').read())\n"
    flags = words("gpt" if "gpt" in script else "mlp")[1:]
    more = (*flags, "--snapshot", tmp_path / "s.pt", "--max_steps")
    env = {"EMU_DEVICES": "4"} if devices else {}
    script = changed(script, {end: told + end})
    run(script, *more, 4, processes=2, **env)
    assert "mapped False" in run(script, *more, 8, processes=2, **env)


WRONG_TIMES = {  # words of simulated(), {text: other}, times of the last process that this changes
    "side stream left out": (
        (*DDP, "", (1, 1, 3)),
        {"        with stream:\n": "        with contextlib.nullcontext():\n"},
        {"backward": 13, "comm": 3},
    ),
    "sums in each micro-batch": (
        (*DDP, "--grad_accum_steps 3", (1, 3, 1)),
        {"require_backward_grad_sync = is_last": "require_backward_grad_sync = True"},
        {"comm_total": 12},
    ),
    "time counted twice": (
        (*DDP, "", (1, 1, 3)),
        {"            counted_until = max(counted_until, end)\n": ""},
        {"comm_total": 33},
    ),
    "clock of the host": (
        (*DDP, "", (1, 1, 3)),
        {'self.has_events = device.type not in ("cpu", "mps")': "self.has_events = False"},
        {},
    ),
    "bubble not marked": (
        (*PIPELINE, "", (1, 2, 0)),
        {"    run.watch.mark_bubble(run.pipeline_group)\n": ""},
        {"bubble": 1, "comm": 2},
    ),
}


@pytest.mark.parametrize("name", WRONG_TIMES)
def test_a_wrong_script_has_other_times(simulated, name):
    (script, processes, changes, *rest), more, times = WRONG_TIMES[name]
    *_, found = simulated(script, processes, changes | more, *rest)
    assert {name: found.get(name) for name in times} == pytest.approx(times, abs=1e-3), found
