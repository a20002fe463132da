"""Prove and measure the scripts on the GPUs of this machine, part by part and without a network.

    python tests/gpu.py                     # all parts; appends what it ran and found to gpu.md
    python tests/gpu.py --only time,gpt:8   # some of them; of gpt the check at batch 8
    python tests/gpu.py --rehearse          # each kind of command, tiny, on emulated GPUs (g++)

A part takes at most ten minutes on a fast GPU, by estimate.

    mnist      the five mnist.py, on made-up images
    losses     the losses of each script are those of the CPU, in each precision
    time       a stop and a resume; phases and wall time; what the marks cost
    waits      no step waits for the GPU, in the scripts or inside of torch
    ddp        losses, times and a profiler's trace; allreduce.py; a killed and a hung process
    hybrid     shards, a pipeline and stages: the losses of one process, and memory
    ranks      with one GPU: what mnist, ddp and hybrid do with several, by 2 and 4 processes on it
    gpt        GPT-2 at batch 8, 32 and 64, beside a plain loop of the same model
    attention  texts, whose batches have ever new shapes, with cuDNN's attention and without
    quantize   what gpt.py has trained: all rows eager, and one compiled

It needs torch 2.11 or newer. In `ranks`, processes share a GPU by NCCL 2.30, which torch 2.14
installs; with an older one, and on AMD, they meet over gloo. A line says what is left out, and why.
"""

import argparse
import atexit
import contextlib
import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from datetime import date
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
SHORT = {  # a small case of each script, whose batch divides by up to 6 processes, and by 8
    # At the default rate, Adam's first steps turn a rounding into 3% of the cnn's loss.
    "images": "--model cnn --batch_size 120 --learning_rate 3e-4",
    "gpt": "--d_model 128 --num_layers 2 --seq_len 64 --batch_size 48",
    "text": "--model transformer --seq_len 64",
    "translation": "--model transformer --seq_len 16",
    "mnist": "--synthetic --epochs 1 --batch_size 1200",
    "allreduce": "--max_bytes 67108864 --seconds 0.1",
    "large": "--model vgg11 --learning_rate 1e-4 --batch_size",  # much to send
    "gpt2": "--vocab_size 50304 --d_model 768 --n_heads 12 --num_layers 12 --seq_len 1024",
    "loop": "--max_steps 24",
}
TABLES = "--dataset tables --data_dir {folder}/data --model transformer --seq_len 8 --batch_size 24"
MNIST = "--dataset mnist --data_dir {folder}/data"
TINY = {  # of a rehearsal, whose few steps must change the loss
    "images": f"{MNIST} --model cnn --batch_size 24 --learning_rate 3e-3",
    "gpt": "--dataset {folder}/tokens --vocab_size 64 --d_model 16 --num_layers 2 --seq_len 16 "
    "--batch_size 24 --learning_rate 1e-2",
    "text": TABLES,
    "translation": f"{TABLES} --source number --target name",
    "mnist": "--data_dir {folder}/data --epochs 1 --batch_size 120",
    "allreduce": "--max_bytes 65536 --seconds 0.01",
    "large": f"{MNIST} --batch_size",
    "gpt2": "--vocab_size 64 --d_model 16 --n_heads 2 --num_layers 1 --seq_len 16",
    "loop": "--max_steps 4 --warmup 2 --matmul 64",
}
# A number of bf16 is rounded by up to 2^-9, one of TF32 or fp16 by 2^-12. In the first 24 steps
# such errors do not yet grow by more than 25 times. Later they may.
PRECISIONS = {"fp32": 2e-3, "tf32": 1e-2, "bf16": 5e-2, "fp16": 1e-2}
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "EMU_DEVICES": "0"}
# Each process takes few blocks of the GPU that they share, the only one.
SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "EMU_DEVICES": "1"}
# Where NCCL cannot share a GPU: a script's groups of GPUs take gloo, which takes no device_id.
OVER_GLOO = (
    (
        "import torch.distributed as dist\n",
        "import torch.distributed as dist\n"
        'dist.Backend.default_device_backend_map["cuda"] = "gloo"\n',
    ),
    ("backend = dist.get_default_backend_for_device(device)", 'backend = "cpu:gloo,cuda:gloo"'),
    ("device_id=device if ON_GPU else None", "device_id=None"),
    ("gpu = device if ON_GPU else None", "gpu = None"),
    ("bound = devices if ON_GPU else", "bound ="),
)
PUBLISHED = (
    "Published for GPT-2 (124 M), tokens/s of a GPU: nanoGPT 273,000 (8 x H200), llm.c 468,000 "
    "(8 x H100); MFU of nanochat: 41 to 46% (H100)."
)
# bf16 TFLOP/s without sparsity, by the data sheets; the first words that the device's name contains
PEAKS = {"H100 PCIe": 756, "H100 NVL": 835, "H200 NVL": 835, "H100": 989, "H200": 989, "GH200": 989}
PEAKS |= {"A100": 312, "GB200": 2500, "B200": 2250, "L40S": 362, "L4": 121, "A10": 125}
PEAKS |= {"RTX 4090": 165}
LAUNCH = {
    "multigpu": "--num_gpus {count}",
    "multinode": "-m torch.distributed.run --standalone --nproc_per_node={count} --",
}
LAUNCH["hybrid"] = LAUNCH["tools"] = LAUNCH["multinode"]
IMAGES, GPT = "singlegpu/images.py", "singlegpu/gpt.py"
LOOP = "tests/helpers/plain_gpt.py"  # nothing but steps
STEP_ENDS = "        bar.update()\n"  # a line of the scripts
TRACE = f"""{STEP_ENDS}
        if step == FIRST:
            (profiler := torch.profiler.profile()).start()
        if step == LAST:
            profiler.stop()  # waits for the GPU
            if rank == 0:
                profiler.export_chrome_trace("FOLDER/trace.json")
"""
failures = []  # names of the checks that did not hold
options = None  # of the command line, and what is the same in all commands


# == Commands ==
def tell(*lines):
    """Prints the lines, and appends them to the report at once."""
    print(*lines, sep="\n", flush=True)
    with open(options.out, "a") as file:
        file.writelines(f"{line}\n" for line in lines)


def execute(before, script, words, count, environment):
    """Runs a script as a user does. Returns (exit status, stdout, stderr)."""
    folder = Path(script).parent.name
    launch = LAUNCH.get(folder, "").format(count=count).split()
    is_last = folder == "multigpu"  # else they are torchrun's
    command = [*([] if is_last else launch), *before, script, *(launch if is_last else []), *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | environment
    place = {"cwd": options.folder, "env": environment, "start_new_session": True}
    process = subprocess.Popen([sys.executable, *command], **place, **pipes)
    try:
        out, err = process.communicate(timeout=options.timeout)
    finally:
        if process.returncode is None:  # it took too long, or Ctrl-C was pressed
            process.terminate()  # multigpu's script and torchrun pass it on
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


def execute_in_forks(before, script, words, count, environment):
    """The same without the seconds of each import, and without torchrun."""
    import conftest

    commands, envs = conftest.forks_of(script, words, count, before, **environment)
    statuses, outs, errs = zip(*conftest.run_all(commands, envs, options.folder, options.timeout))
    return max(map(abs, statuses)), "".join(outs), "".join(errs)


def run(script, words="", count=1, variables=None, status=0):
    """Runs a script, or `before SCRIPT`, which must end with this status (None: any but 0).

    Returns the rows of its log, what was printed, and what was written to stderr.
    """
    *before, path = [str(ROOT / each) for each in script.split()]
    environment = options.variables | (variables or {})
    if not options.rehearse:
        environment.pop("EMU_DEVICES", None)
    (log := Path(options.folder, "log.jsonl")).unlink(missing_ok=True)
    more = [] if re.search("mnist|allreduce|quantize", script) else ["--log", str(log)]
    if options.over_gloo and count > 1:
        path = over_gloo(path)
    begin = time.monotonic()
    ended, out, err = options.execute(before, path, [*words.split(), *more], count, environment)
    variables = [f"{name}={value!r}" for name, value in environment.items()]
    shown = " ".join([*variables, "python", script, words]).replace(f"{options.folder}/", "")
    seconds = time.monotonic() - begin
    tell(f"- ran `{shown}`, {count} process{'es' * (count > 1)}, {seconds:.0f} s")
    if ended != status and (status is not None or ended == 0):
        raise AssertionError(f"status {ended}\n{err[-2000:]}")
    rows = list(map(json.loads, log.read_text().splitlines())) if log.exists() else []
    return rows, out, err


def changed(script, *replacements):
    """Returns the path of a copy of the script, in which texts (old, new) are replaced."""
    text = (ROOT / script).read_text()
    for old, new in replacements:
        assert old in text, f"{script} has no {old!r}"
        text = text.replace(old, new)
    folder = tempfile.mkdtemp(prefix="changed_", dir=options.folder)
    copy = Path(folder, *Path(script).parts[-2:])
    copy.parent.mkdir()
    copy.write_text(text)
    return str(copy)


def over_gloo(script):
    text = (ROOT / script).read_text()
    return changed(script, *[pair for pair in OVER_GLOO if pair[0] in text])


def in_rows(count, steps):
    """The flags of a run of so many rows, each after so many steps; few in a rehearsal."""
    steps = 4 if options.rehearse else steps
    return f"--max_steps {count * steps} --eval_every {steps}"


def rate(rows):
    """Samples/s of the last row."""
    return rows[-1]["samples/s"]


def losses(rows):
    return [row[name] for row in rows if row["rank"] == 0 for name in ("train_loss", "val_loss")]


def near(values, others, tolerance):
    return all(abs(a / b - 1) < tolerance for a, b in zip(values, others, strict=True))


# == Checks. A command is what run() takes: (script, flags, processes, variables). ==
def check_lines(start, *commands):
    """The commands end well; this is what they print."""
    for command in commands:
        out = run(*command)[1]
        tell(*[f"- {line}" for line in out.splitlines() if line.startswith(start)])


def check_losses(*cases):
    """The losses are those of the first command, up to rounding."""
    expected, wrong = None, []
    for tolerance, *command in cases:
        rows = run(*command)[0]
        expected = expected or losses(rows)
        tell(
            f"- validation loss {losses(rows)[-1]:.4f} on {rows[0]['device']}, "
            f"{expected[-1]:.4f} of the first; {rate(rows):,.0f} samples/s; "
            f"largest peak {max(row['peak_MB'] for row in rows):.0f} MB"
        )
        if not near(losses(rows), expected, tolerance):
            wrong.append(" ".join(command[:2]))
    assert not wrong, f"other losses: {', '.join(wrong)}"


def check_speeds(what, sides, least=0.0, rounds=3):
    """The median samples/s of commands that run in turn, and what they are of the first's."""
    rates = {name: [] for name in sides}
    for _ in range(1 if options.rehearse else rounds):
        for name, command in sides.items():
            rates[name].append(rate(run(*command)[0]))
    rates = {name: statistics.median(values) for name, values in rates.items()}
    base = [*rates.values()][0]
    told = [f"{name} {value:,.0f} ({value / base:.1%})" for name, value in rates.items()]
    tell(f"- {what}: {', '.join(told)}")
    assert options.rehearse or min(rates.values()) > least * base, "too slow"


def check_resume(model):
    """Stopped by SIGTERM and started again, a run ends with the loss of an undisturbed one.

    A copy lets cuDNN add up in a fixed order: else two runs of a cnn need not have the same loss.
    """
    words = f"{options.size['images']} --model {model} --batch_size 24 {in_rows(3, 24)}"
    fixed = ("cudnn.benchmark = torch.version.hip is None", "cudnn.deterministic = True")
    stop = f"step == {6 if options.rehearse else 36} and os.kill(os.getpid(), signal.SIGTERM)"
    script, stopped = changed(IMAGES, fixed), (STEP_ENDS, f"{STEP_ENDS}        {stop}\n")
    path = tempfile.mktemp(".pt", dir=options.folder)
    more = f"{words} --snapshot {path}"
    run(changed(IMAGES, fixed, stopped), more, status=os.EX_TEMPFAIL)
    step = torch.load(path, "cpu", weights_only=True)["progress"]["step"]
    resumed, whole = (losses(run(script, each)[0])[-1] for each in (more, words))
    tell(f"- stopped at step {step} and resumed: {resumed:.6f}, undisturbed {whole:.6f}")
    assert near([resumed], [whole], 1e-4)


def check_phases():
    """The phases of the later rows are the time between the moments at which they are written."""
    marks = "row |= take_marks(args)"
    script = changed(IMAGES, (marks, f'{marks} | {{"written": time.perf_counter()}}'))
    rows = run(script, f"{options.size['images']} {in_rows(6, 400)}")[0]
    wall, total = rows[-1]["written"] - rows[0]["written"], sum(r["seconds"] for r in rows[1:])
    tell(f"- phases of 5 rows: {total:.2f} s of {wall:.2f} s of wall time")
    assert options.rehearse or abs(total / wall - 1) < 0.02


def check_waits(name):
    """No step waits for the GPU, in a line of the script or in torch; the looks may."""
    counts = []
    for steps in (8, 40):
        more = f"{options.size[name]} --max_steps {steps} --eval_every {steps}"
        errors = run(f"tests/helpers/waits.py singlegpu/{name}.py", more)[2]
        count = Counter()
        for number, place in re.findall(r"WAITS (\d+) (.+)", errors):
            count[place] = int(number)
        # in a thread of C++ no Python code is asked
        count["a thread of C++"] = errors.count("called a synchronizing")
        counts.append(count)
    each_step = [place for place, count in counts[1].items() if count - counts[0][place] >= 32]
    tell(f"- {name}: {len(counts[1]) - 1} places wait, in each step: {each_step or 'none'}")
    assert not each_step, "a step waits for the GPU"


def read_trace(path):
    """Returns the (start, end), in us, of all-reduces and of computation in a profiler's trace."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if "dur" in event]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    sends = [event for event in kernels if event["name"].lower().startswith("nccl")]
    computes = [event for event in kernels if event not in sends]
    if not kernels:  # of an emulated GPU
        sends = [event for event in events if event["name"] == "gloo:all_reduce"]
        computes = [event for event in events if event["name"].startswith("aten::")]
    return [[(event["ts"], event["ts"] + event["dur"]) for event in e] for e in (sends, computes)]


def length(spans):
    """Returns the time in which any of the spans runs."""
    total, until = 0.0, 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def check_trace(count):
    """comm_total and what of it is hidden, beside a profiler's trace."""
    steps = 4 if options.rehearse else 20
    folder = tempfile.mkdtemp(dir=options.folder)
    values = {"FIRST": steps + 1, "LAST": 2 * steps, "FOLDER": folder}  # after the first row
    trace = TRACE
    for name, value in values.items():
        trace = trace.replace(name, str(value))
    words = f"{options.size['large']} {24 * count} {in_rows(2, steps)}"
    rows = run(changed("multinode/images.py", (STEP_ENDS, trace)), words, count)[0]
    sends, computes = read_trace(Path(folder, "trace.json"))
    row = [row for row in rows if row["rank"] == 0][-1]
    ours, traced = 1000 * row["comm_total"] / steps, length(sends) / 1000 / (steps - 1)
    both = length(sends) + length(computes) - length(sends + computes)
    tell(
        f"- {count} processes: comm_total {ours:.2f} ms a step, all-reduces in the profiler's "
        f"trace {traced:.2f} ({len(sends)} of them in {steps - 1} steps)",
        f"- hidden: by the script {1 - row['comm'] / row['comm_total']:.0%} of comm_total; by the "
        f"trace the process computes for {both / length(sends):.0%} of that time",
    )
    assert options.rehearse or options.over_gloo or 0.8 < ours / traced < 1.5, "they differ"


def check_lost(signum, *folders):
    """A process that is killed or hangs ends the run, after a timeout that is made shorter here."""
    options.timeout = 150  # seconds. Until then, it must have ended by itself.
    kill = f"(rank, step) == (1, 4) and os.kill(os.getpid(), {int(signum)})"
    changes = [(STEP_ENDS, f"{STEP_ENDS}        {kill}\n")]
    if signum == signal.SIGSTOP:
        timeout = f'__import__("datetime").timedelta(seconds={2 if options.rehearse else 20})'
        changes.append(("device_id=gpu)", f"device_id=gpu, timeout={timeout})"))
    for folder in folders:
        words = f"{options.size['images']} {in_rows(2, 24)}"
        err = run(changed(f"{folder}/images.py", *changes), words, 2, status=None)[2]
        line = r".*\bSIGKILL\b.*" if signum == signal.SIGKILL else r"\w+Error: .*"
        told = re.findall(line, err) or ["nothing"]
        tell(f"- it said: {told[-1].strip()[:200]}")


def peak_of(name):
    """The TFLOP/s of a device of this name by its data sheet. None: not known."""
    found = [peak for card, peak in PEAKS.items() if re.search(rf"\b{card}\b", name)]
    return found[0] if found and "Laptop" not in name else None


def check_gpt(batch):
    """GPT-2 (124 M) in bf16, compiled, beside a loop of the same model without our timers."""
    size = f"{options.size['gpt2']} --batch_size {batch}"
    tokens = f"--dataset {options.folder}/tokens --precision bf16 --compile"
    loop = (LOOP, f"{size} {options.size['loop']}")
    ours = (GPT, f"{size} {tokens} {in_rows(3, 24)}")
    before, row, after = (run(*command)[0][-1] for command in (loop, ours, loop))
    of_loop = statistics.mean(each["samples/s"] for each in (before, after)) * row["seq_len"]
    speed = row["samples/s"] * row["seq_len"]  # tokens/s
    # of a token: 6 a parameter, and the attention (Chowdhery et al. 2022, "PaLM", appendix B)
    flops = 6 * row["parameters"] + 12 * row["num_layers"] * row["d_model"] * row["seq_len"]
    tflops = flops * speed / 1e12  # a second
    peak = peak_of(options.name)
    mfu = f"{tflops / peak:.1%} of {peak}" if peak else "-"
    tell(
        "",
        "| batch | tokens/s | TFLOP/s | MFU | of a matmul | plain loop | ours to it |",
        "|" + " --- |" * 7,
        f"| {batch} | {speed:,.0f} | {tflops:.3g} | {mfu} | {tflops / before['matmul']:.1%} | "
        f"{of_loop:,.0f} | {speed / of_loop:.2f} |",
        "",
        *([PUBLISHED, ""] if batch == 8 else []),
    )


# == Parts: tables of checks ==
def of_mnist(*counts):
    words = options.size["mnist"]
    commands = [("singlegpu/mnist.py", words)]
    for count in counts:
        commands += [(f"{folder}/mnist.py", words, count) for folder in ("multigpu", "multinode")]
        if count > 1 and not options.over_gloo:
            commands.append(("hybrid/mnist.py", words, count - count % 2))
    data = words.partition(" --epochs")[0]
    return check_lines, "|", *commands, ("quantize/mnist.py", data)  # reads what they have saved


def of_losses(name):
    """A script on the CPU, in each precision, and compiled."""
    script, words = f"singlegpu/{name}.py", f"{options.size[name]} {in_rows(1, 24)}"
    cases = [(1, script, f"{words} --precision fp32", 1, ON_CPU)]
    cases += [(bound, script, f"{words} --precision {each}") for each, bound in PRECISIONS.items()]
    return check_losses, *cases, (1e-2, script, f"{words} --compile")


def of_ddp(*counts):
    words = f"{options.size['images']} {in_rows(2, 24)}"
    cases = [(1, IMAGES, words)]
    for count in counts:
        cases.append((2e-2, "multigpu/images.py", words, count))
        cases.append((5e-2, "multinode/images.py", f"{words} --comm_hook bf16", count))
    return check_losses, *cases


def of_stages(*counts):
    words = f"{options.size['images']} {in_rows(2, 24)}"
    cases = [(1, IMAGES, words)]
    for count in counts:
        more = f"{words} --num_stages {min(2, count)}"
        cases.append((2e-2, "hybrid/images.py", more, max(1, count // 2)))
    return check_losses, *cases


def of_shards(*counts):
    words = f"{options.size['gpt']} {in_rows(2, 24)}"
    cases = [(1, GPT, words)]
    for count in counts:
        cases.append((2e-2, "hybrid/gpt_fsdp.py", words, count))
        if count > 2:
            cases.append((2e-2, "hybrid/gpt_fsdp.py", f"{words} --shard_size 2", count))
        if count > 1 and not options.over_gloo:
            cases.append((2e-2, "hybrid/gpt_pipeline.py", f"{words} --num_stages 2", count))
    return check_losses, *cases


def of_allreduce(*counts):
    """It also proves the sums."""
    small = [("4096 if ON_GPU", "256 if ON_GPU")] if options.rehearse else []
    script = changed("tools/allreduce.py", *small)
    words = options.size["allreduce"]
    return check_lines, ("fit:", "beside"), *[(script, words, n) for n in counts]


def of_hook(count):
    """What the hook with its times costs."""
    words = f"{options.size['large']} {24 * count} {in_rows(3, 40)}"
    bare = changed("multigpu/images.py", ("    ddp_model.register_comm_hook(None, hook)\n", ""))
    sides = {"without the hook": (bare, words, count), "with": ("multigpu/images.py", words, count)}
    return check_speeds, "DDP, images/s", sides, 0.95


def of_marks():
    words = f"{options.size['images']} {in_rows(3, 200)}"
    bare = changed(IMAGES, ("if HAS_EVENTS", "if False"))
    return check_speeds, "images/s", {"without events": (bare, words), "with": (IMAGES, words)}


def of_shapes(name):
    """A transformer, whose batches have ever new shapes."""
    words = f"{options.size[name]} --precision bf16 {in_rows(3, 24)}"
    script = f"singlegpu/{name}.py"
    on = changed(script, ("enable_cudnn_sdp(False)", "enable_cudnn_sdp(True)"))
    what = f"{name}, samples/s by cuDNN's attention"
    return check_speeds, what, {"without": (script, words), "with": (on, words)}


def of_quantize():
    snapshot = f"--snapshot {options.folder}/gpt.pt"
    training = f"{options.size['gpt']} {in_rows(1, 24)} {snapshot}"
    words = f"{snapshot} --batch_size 32 --rounds 2"
    one = (f"{words} --row int8-weights",)  # to compile all rows takes too long
    if options.rehearse:  # emulated, there are no kernels for int8
        one = (f"{words} --row int8-weights --eager", 1, ON_CPU)
    scripts = ("quantize/gpt.py", f"{words} --eager"), ("quantize/gpt.py", *one)
    return check_lines, ("|", "cuda", "emu"), (GPT, training), *scripts


def parts_of(count, scripts):
    """Returns {part: {name: (check, its arguments)}}, for so many GPUs."""
    several = {"trace": (check_trace, count), "hook": of_hook(count)}
    several["allreduce"] = of_allreduce(count)
    lost = {"killed": (check_lost, signal.SIGKILL, "multigpu", "multinode")}
    lost["hung"] = (check_lost, signal.SIGSTOP, "multigpu")
    ranks = (4,) if options.rehearse else (2, 4)
    shared = {"mnist": of_mnist(*ranks)[:-1], "stages": of_stages(*ranks)}
    shared |= {"shards": of_shards(*ranks), "images": of_ddp(*ranks)}
    shared |= {"allreduce": of_allreduce(*ranks)}
    shared |= {f"trace {each}": (check_trace, each) for each in ranks}
    parts = {
        "mnist": {"": of_mnist(count)},
        "losses": {name: of_losses(name) for name in scripts},
        "time": {
            "resume mlp": (check_resume, "mlp"),
            "resume cnn": (check_resume, "cnn"),
            "phases": (check_phases,),
            "marks": of_marks(),
        },
        "waits": {name: (check_waits, name) for name in scripts},
        "ddp": {"images": of_ddp(*{1, count})} | (several | lost if count > 1 else {}),
        "hybrid": {"stages": of_stages(count), "shards": of_shards(count - count % 2 or 1)},
        "ranks": shared | lost,
        "gpt": {str(batch): (check_gpt, batch) for batch in (8, 32, 64)},
        "attention": {name: of_shapes(name) for name in scripts if name[0] == "t"},
        "quantize": {"": of_quantize()},
    }
    return {name: checks for name, checks in parts.items() if checks}  # without datasets, some


TWICE = {  # what a rehearsal leaves out: commands of which it runs one of the same kind
    "losses": ("images", "text", "translation"),
    "time": ("resume mlp",),
    "waits": ("gpt", "text", "translation"),
    "ranks": ("images", "trace 4", "killed", "hung"),
    "gpt": ("32", "64"),
}


def checks_of(parts, name):
    """Returns the checks of a part or, for part:word, those with this word in their name."""
    part, _, word = name.partition(":")
    left_out = TWICE.get(part, ()) if options.rehearse and not word else ()
    checks = parts.get(part, {}).items()
    return {each: c for each, c in checks if each not in left_out and word in ("", *each.split())}


def attempt(name, check, *arguments):
    tell("", f"**{name}**: {check.__doc__.splitlines()[0]}", "")
    try:
        check(*arguments)
    except Exception as error:
        if not isinstance(error, AssertionError):
            traceback.print_exc()
        failures.append(name)
        tell(f"- **{name} failed**: {error}")


def write_tokens(folder):
    """Makes a --dataset of random tokens, 0 to 15."""
    folder.mkdir()
    for name, count in {"train": 1 << 14 if options.rehearse else 1 << 22, "val": 1 << 14}.items():
        np.random.randint(16, size=count).astype(np.uint16).tofile(folder / f"{name}.bin")


def set_up_rehearsal(folder):
    """Lets commands run in forks, with tiny data, on two emulated GPUs."""
    sys.path.append(str(ROOT / "tests/helpers"))
    if "conftest" not in sys.modules:
        import conftest

        atexit.register(conftest.pytest_sessionfinish)
    from conftest import write_mnist, write_tables

    write_mnist(folder / "data", num_test=47)  # validations are short
    write_tables(folder / "data/tables")
    options.execute, options.own_variables = execute_in_forks, {"EMU_DEVICES": "2"}


def run_parts(names, parts, count):
    for name in names or parts:
        begin, is_shared = time.monotonic(), name.startswith("ranks")
        if is_shared and count > 1 and not options.rehearse:
            tell("", "- left out: ranks, which is for one GPU")
            continue
        if is_shared and options.over_gloo:
            tell("", "- ranks runs over gloo: only NCCL 2.30 lets processes share a GPU")
            tell("- left out: pipelines and hybrid/mnist.py, as gloo cannot send from a GPU")
        if name == "quantize" and not importlib.util.find_spec("torchao"):
            tell("", "- left out: quantize, which needs the package torchao")
            continue
        options.variables = options.own_variables | (SHARING if is_shared else {})
        options.timeout = 150 if is_shared else 600  # seconds
        for each, check in checks_of(parts, name).items():
            attempt(f"{name.partition(':')[0]} {each}".strip(), *check)
        tell(f"- part {name}: {time.monotonic() - begin:.0f} s")


def main(words=None):
    global options
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="PARTS", help="parts to run, or part:check")
    parser.add_argument("--rehearse", action="store_true", help="at tiny sizes, on emulated GPUs")
    parser.add_argument("--out", default="gpu.md", help="file to append to")
    options = parser.parse_args(words)
    failures.clear()
    gpu = torch.accelerator.current_accelerator(check_available=True)
    if not gpu and not options.rehearse:
        parser.error("torch sees no GPU here; --rehearse runs each command on emulated ones")
    options.out = os.path.abspath(options.out)
    if not os.access(os.path.dirname(options.out), os.W_OK):
        parser.error(f"cannot write {options.out}: its folder is missing or read-only")
    count = 2 if options.rehearse else torch.accelerator.device_count()
    options.name = torch.get_device_module(gpu).get_device_name() if gpu else "emulated GPU"
    options.execute, options.own_variables = execute, {}
    nccl = gpu and gpu.type == "cuda" and torch.cuda.nccl.version()
    options.over_gloo = count == 1 and nccl and (nccl < (2, 30) or torch.version.hip is not None)
    scripts = ["images", "gpt", "text", "translation"]
    has_datasets = importlib.util.find_spec("datasets")
    with tempfile.TemporaryDirectory() as options.folder:
        folder = Path(options.folder)
        sizes = (TINY if options.rehearse else SHORT).items()
        options.size = {name: words.format(folder=folder) for name, words in sizes}
        parts = parts_of(count, scripts if has_datasets else scripts[:2])
        names = options.only.split(",") if options.only else [*parts]
        if unknown := [name for name in names if not checks_of(parts, name)]:
            parser.error(f"--only: {', '.join(unknown)} is no part; they are {', '.join(parts)}")
        versions = f"torch {torch.__version__}" + (f", NCCL {nccl}" if nccl else "")
        tell("", f"## {count} x {options.name}, {versions}, {date.today()}", "")
        write_tokens(folder / "tokens")
        if options.rehearse:
            set_up_rehearsal(folder)
            tell("- a rehearsal: kinds of commands at a tiny size. Its times mean nothing")
        if not has_datasets:
            tell("- left out: text.py and translation.py, which need the package datasets")
        if count == 1:
            several = "what several GPUs do. The part ranks does it"
            tell(f"- left out of mnist, ddp and hybrid: {several}")
        run_parts(names, parts, count)
    sys.exit(f"failed: {', '.join(failures)}" if failures else 0)


if __name__ == "__main__":
    main()
