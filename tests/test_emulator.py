"""Scripts on an emulated accelerator: they train alike, and what a GPU would punish is told."""

import functools
import json
import re

import numpy as np
import pytest
from conftest import CONSTANT, ROOT, curve, free_port, rows
from fork_server import run_all
from test_training import TASKS as TRAINED

pytestmark = pytest.mark.usefixtures("emulator")


# == They train as on the CPU, and the host waits in no step ==
FEW = "--max_steps 8 --eval_every 4 --learning_rate 3e-4 --precision fp32 --batch_size 24"
TASKS = {name: f"{script} {flags} {FEW}" for name, (script, flags) in TRAINED.items()}
TASKS["gpt"] += " --max_grad_norm 0.5 --num_layers 2"
TASKS["fp16"] = f"{TASKS['gpt']} --precision fp16"
# Batches of more than 64 KiB, since CUDA copies what is smaller aside: then no step waits for it
TASKS["long"] = f"{TASKS['gpt']} --seq_len 352 --num_layers 1"
TASKS["mlp"] += " --batch_size 600"
RUNS = {  # task, script, processes, more flags. All tasks in all folders: the soak
    "fp16": ("fp16", "singlegpu/gpt.py", 1, "--num_workers 1"),
    "long": ("long", "singlegpu/gpt.py", 1, ""),
    "accumulation": ("mlp", "multigpu/images.py", 3, "--grad_accum_steps 2"),
    "cnn": ("cnn", "multinode/images.py", 2, "--num_workers 1"),
    "bf16 sent": ("gpt", "multinode/gpt.py", 4, "--comm_hook bf16"),
    "text": ("text", "multinode/text.py", 2, ""),
    "translation": ("translation", "multigpu/translation.py", 2, ""),
    "stages": ("mlp", "hybrid/images.py", 2, "--num_stages 2 --grad_accum_steps 3"),
    "pipeline": ("gpt", "hybrid/gpt_pipeline.py", 4, "--num_stages 2"),
    "shards": ("gpt", "hybrid/gpt_fsdp.py", 2, ""),
    "parts": ("gpt", "hybrid/gpt_tensor.py", 4, "--tensor_size 2"),
}
# Prints how often the host has waited in the third and fourth step after a start or a validation:
# before, DDP makes its buckets anew, and a pipeline connects its stages. A line is one write.
BEGIN = "        rate = learning_rate("
WAITS = {
    BEGIN: f"        waits = torch.emu.host_waits()\n{BEGIN}",
    "        bar.update()\n": """        bar.update()
        print(f"waits {torch.emu.host_waits() - waits}\\n", end="") if step % 4 in (3, 0) else None
""",
}


@pytest.fixture(scope="module")
def words(data):
    """words(task) are its flags; their first word is the name of its script."""
    return lambda task: TASKS[task].format(data=data).split()


@pytest.fixture(scope="module")
def on_cpu(run, words, tmp_path_factory):
    """on_cpu(task) is its loss curve on the CPU, in one process."""

    @functools.cache
    def on_cpu(task):
        script, *flags = words(task)
        log = tmp_path_factory.mktemp("cpu") / "log.jsonl"
        run(f"singlegpu/{script}", *flags, "--log", log)
        return curve(log)

    return on_cpu


@pytest.mark.parametrize("name", RUNS)
def test_runs_train_alike(run, words, on_cpu, changed, tmp_path, name):
    """The losses are those of the CPU, nothing is read too early, and no step waits."""
    task, script, processes, more = RUNS[name]
    log = tmp_path / "log.jsonl"
    flags = (*words(task)[1:], *more.split(), "--log", log)
    out = run(changed(script, WAITS), *flags, processes=processes, EMU_DEVICES="4")
    assert {row["device"] for row in rows(log)} == {"Emulator"}
    assert max(row["peak_MB"] for row in rows(log)) < 100, "more than the device's memory"
    assert re.findall(r"^waits (\d+)$", out, re.M) == ["0"] * 4 * processes, out
    rounding = 1e-3 if "16" in name else 1e-5  # gloo adds up in another order
    np.testing.assert_allclose(curve(log), on_cpu(task), rtol=rounding)


# == Snapshots, and devices that are too few, or shown in part ==
MOVES = {  # script, processes, devices (none: a machine without), more flags; two steps each
    "file": (
        ("multinode/gpt.py", 3, "4", ""),
        ("hybrid/gpt_pipeline.py", 4, None, "--num_stages 2"),
        ("hybrid/gpt_tensor.py", 4, "4", "--tensor_size 2"),
        ("singlegpu/gpt.py", 1, "4", ""),
    ),
    "shards": (
        ("hybrid/gpt_fsdp.py", 4, "4", "--shard_size 2"),
        ("hybrid/gpt_fsdp.py", 2, None, ""),
        ("hybrid/gpt_fsdp.py", 3, "4", ""),
    ),
}


@pytest.mark.parametrize("name", MOVES)
def test_snapshots_move(run, words, changed, tmp_path, name):
    """From devices to others, to a machine without and back: the losses of one that stayed."""
    flags = words("gpt")[1:]
    flags += ["--log", log := tmp_path / "log.jsonl", "--eval_every", 2, "--max_steps"]
    for number, (mover, processes, devices, more) in enumerate(MOVES[name], start=1):
        env = {"EMU_DEVICES": devices} if devices else {}
        more = (2 * number, "--snapshot", tmp_path / "moved.pt", *more.split())
        run(changed(mover, CONSTANT), *flags, *more, processes=processes, **env)
        assert rows(log)[-1]["device"] == ("Emulator" if devices else "CPU")
    moved = curve(log)
    log.unlink()
    run(changed(mover, CONSTANT), *flags, 2 * number, processes=processes)
    np.testing.assert_allclose(moved, curve(log), rtol=1e-5)


NODE = "1 GPU(s) are too few for the processes of this node"
TOO_FEW = {  # script: what is said of two processes on one device
    "multigpu/images.py": "this machine has 1 GPU(s), not 2",
    "multinode/images.py": NODE,
    "hybrid/gpt_fsdp.py": NODE,
}


@pytest.mark.parametrize("script", TOO_FEW)
def test_too_few_devices(attempt, words, script):
    """One process says so in a line, and all end: under torchrun all see the same devices."""
    flags = words("gpt" if "gpt" in script else "mlp")[1:]
    status, _, err = attempt(script, *flags, processes=2, EMU_DEVICES="1")
    assert status != 0 and err.count(f"{TOO_FEW[script]}\n") == 1 and "Traceback" not in err, err


@pytest.mark.parametrize("shown", (1, 2))
def test_srun_may_show_each_task_its_own_devices(words, tmp_path, shown):
    """Each of two tasks of a node takes its own, also where it sees it alone, as number 0."""
    log = tmp_path / "log.jsonl"
    flags = [*words("mlp")[1:], "--max_steps", "2", "--log", log]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "EMU_DEVICES": str(shown)}
    env |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    own = ("SLURM_PROCID", "SLURM_LOCALID")
    envs = [dict.fromkeys(own, str(n)) | {"EMU_FIRST": str((2 - shown) * n)} for n in (0, 1)]
    commands = [[ROOT / "multinode/images.py", *flags]] * 2
    for status, _, err in run_all(commands, [env | each for each in envs], tmp_path):
        assert status == 0, err
    assert [row["device"] for row in rows(log)] == ["Emulator"] * 2


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


@nn.modules.module.register_module_forward_hook
def slow_down(module, inputs, output):
    return Slow.apply(output) if isinstance(module, LAYER) else None


"""
# Between two rows there is no poll after the warmup. That of a row takes so many collectives:
POLLS = {"min(int(steps_a_second), 2 * num_steps)": "100"}
IN_A_POLL = {"hybrid/images.py": 0}  # by gloo. Else: 4
# Of three layers, each weight and each bias is a bucket. That of the last one, 40 bytes, joins its
# weight's: five buckets.
VIEW = "gradient_as_bucket_view=True"
DDP = ("multigpu/images.py", 2, {VIEW: f"{VIEW}, bucket_cap_mb=1e-4"})
STAGES = ("hybrid/images.py", 2, {VIEW: f"{VIEW}, bucket_cap_mb=1e-4"})
PIPELINE, SHARDS = ("hybrid/gpt_pipeline.py", 4, {}), ("hybrid/gpt_fsdp.py", 2, {})
PARTS = ("hybrid/gpt_tensor.py", 2, {})
PHASES = ("data", "forward", "backward", "bubble", "comm", "optimizer", "comm_total")
TIMES = {  # a run; flags; the ms of a layer's forward and backward pass and of a collective or
    # message; and the ms that each of these phases must have in a step
    # They begin 1 ms after the backward pass, one after the other.
    "ddp, exposed": (DDP, "--comm_hook bf16", (1, 1, 3), (0, 3, 3, 0, 13, 0, 15)),
    # Only the last two of five all-reduces end after the backward pass.
    "accumulation": (DDP, "--grad_accum_steps 3", (1, 3, 1), (0, 9, 27, 0, 2, 0, 5)),
    "stages": (STAGES, "", (1, 3, 1), (0, 3, 9, 0, 2, 0, 5)),
    # bubble: f + b, 4 messages there and 4 back, and the all-reduce that ends it. comm: of the
    # embedding and the norm.
    "pipelines": (PIPELINE, "", (1, 2, 1), (0, 4, 8, 12, 2, 0, 3)),
    # Four sums for each of two layers, and the all-reduce of a group's own gradients. optimizer:
    # the norm.
    "parts": (PARTS, "", (1, 2, 3), (0, 2, 4, 0, 27, 3, 27)),
    # Forward waits for 2 of 3 all-gathers. At the end of backward, a block's reduce-scatter, and
    # the head's, with an all-reduce after each, of which two overlap. optimizer: the norm.
    "shards": (SHARDS, "", (2, 4, 1), (0, 6, 11, 0, 0, 1, 10)),
}


@pytest.mark.parametrize("name", TIMES)
def test_times_are_those_that_must_be(logged, words, changed, name):
    """In each process. What a layer really computes takes no time. The poll is taken off."""
    (script, processes, changes), flags, (forward, backward, comm), times = TIMES[name]
    slow = SLOW.replace("LAYER", "GPTBlock" if "gpt" in script else "nn.Linear")
    changes = changes | POLLS | {GUARD: slow + GUARD}
    flags = (*words("gpt" if "gpt" in script else "mlp")[1:], *flags.split(), "--eval_every", 8)
    env = {"EMU_DEVICES": "4", "EMU_SIM": f"comm={1000 * comm}"}
    env |= {"FORWARD": str(forward / 1000), "BACKWARD": str(backward / 1000)}
    for row in rows(logged(changed(script, changes), *flags, processes=processes, **env)):
        for phase in ("comm", "comm_total"):
            row[phase] -= IN_A_POLL.get(script, 4) * comm / 1000
        found = [1000 * row.get(phase, 0.0) / row["steps"] for phase in PHASES]
        assert found == pytest.approx(times, abs=1e-3)


# == What is wrong on a GPU ==
MISTAKES = """import json, os, sys, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
other = f"emu:{1 - rank}"
torch.accelerator.set_device_index(rank)
dist.init_process_group(dist.get_default_backend_for_device("emu"))
large = torch.ones(50_000)  # CUDA copies what is smaller aside
for name, (code, _) in json.loads(sys.argv[1]).items():
    x, side = torch.ones(50_000, device=rank), torch.Stream()
    current, events = torch.accelerator.current_stream(), [torch.Event(), torch.Event()]
    before, told = torch.emu.host_waits(), "nothing"
    try:
        exec(code)
        told = f"waits {torch.emu.host_waits() - before}"
    except Exception as error:
        told = " ".join(str(error).split())
    print(f"{name}: {told}\\n", end="")
"""
TIMED = "events = [torch.Event(enable_timing=True) for _ in range(2)]; "
READ = "; events[0].elapsed_time(events[1])"
SENT = "work = dist.all_reduce(x, async_op=True); "
WRONG = {  # name: (what it does, what is said)
    "batch not moved": ("x + large", "to be on the same device"),
    "two devices": ("x + torch.ones(9, device=other)", "to be on the same device"),
    "untimed": (f"[e.record() for e in events]{READ}", "enable_timing"),
    "early": (f"{TIMED}[e.record() for e in events]{READ}", "ready"),
    "two clocks": (
        f"{TIMED}events[0].record(); torch.Stream(other).record_event(events[1]){READ}",
        "two devices",
    ),
    "read before it is written": ("x.add_(1)\nwith side: x + 1", "race"),
    "written before it is read": ("x + 1\nwith side: x.add_(1)", "race"),
    "sum used early": (f"{SENT}x + 1", "race"),
    "sum used": (f"{SENT}work.wait(); x + 1", "waits 0"),
    "not recorded": (
        "with side: y = large.to(rank)\ncurrent.wait_stream(side); y.add_(1); del y\n"
        "with side: torch.ones(1, device=rank)",
        "record_stream is missing",
    ),
    "one device for all": (
        "dist.all_reduce(torch.ones(1, device=0), group=dist.new_group())",
        "Duplicate GPU detected",
    ),
    "fork": (
        "import warnings\nwith warnings.catch_warnings(action='ignore'):  # of Python 3.12 on\n"
        "    child = os.fork()\nif not child:\n    try: x + 1\n"
        "    except RuntimeError as error: os._exit('forked' in str(error))\n"
        "assert os.waitpid(child, 0)[1] == 256",
        "waits 0",
    ),
    "number read": ("x.sum().item()", "waits 1"),
    "not pinned": ("large.to(rank, non_blocking=True)", "waits 1"),
    "pinned": ("large.pin_memory().to(rank, non_blocking=True)", "waits 0"),
    "small": ("large[:9].to(rank, non_blocking=True)", "waits 0"),
    "fresh memory": ("assert torch.empty(9, device=rank).isnan().all()", "waits 1"),
}


def test_what_a_gpu_would_punish_is_told(run, tmp_path):
    """Each in both processes, and nothing that is right."""
    (script := tmp_path / "multinode/mistakes.py").parent.mkdir()
    script.write_text(MISTAKES)
    out = run(script, json.dumps(WRONG), processes=2, EMU_DEVICES="2")
    for name, (_, told) in WRONG.items():
        found = re.findall(rf"^{name}: (.*)$", out, re.M)
        assert len(found) == 2 and all(told in each for each in found), (name, found)
