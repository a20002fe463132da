"""Prove and measure the scripts on the GPUs of this machine, part by part and without a network.

    python tests/gpu.py                     # all parts; appends what it ran and found to gpu.md
    python tests/gpu.py --only time,gpt:8   # some of them; of gpt the check at batch 8
    python tests/gpu.py --only ranks:hung   # a check by its name
    python tests/gpu.py --rehearse          # each command, tiny, on emulated GPUs; needs g++

A part takes at most ten minutes on a fast GPU, by estimate.

    mnist      the five mnist.py, on made-up images
    losses     the losses of each script are those of the CPU, in each precision
    time       a stop and a resume; phases and wall time; what the marks cost
    waits      no step waits for the GPU, in the scripts or inside of torch
    ddp        losses, times and a profiler's trace; allreduce.py; a killed and a hung process
    hybrid     shards, a pipeline and stages: the losses and the memory of one process
    ranks      with one GPU: what mnist, ddp and hybrid do with several, by 2 and 4 processes on it
    gpt        GPT-2 at batch 8, 32 and 64, beside a plain loop of the same model
    attention  GPT-2 with FlashAttention and with cuDNN's; texts with and without cuDNN's
    cnn        the cnn at batch 64 and 256: eager, compiled, and with CUDA graphs
    precision  vgg11, resnet18 at 224 pixels: fp32, TF32, bf16, channels_last
    loading    images of 224 pixels by 0, 2 and 4 workers
    quantize   what gpt.py has trained: all rows eager, and one compiled

It needs torch 2.11 or newer. A line says what is left out, and why. Processes share a GPU by NCCL
2.30, which torch 2.14 installs. With an older one, and on AMD, they meet over gloo, which sends
no tensor of a GPU from one process to another: there are no pipelines.
"""

import argparse
import atexit
import contextlib
import functools
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
    "images.py": "--model cnn --batch_size 120 --learning_rate 3e-4",
    "gpt.py": "--d_model 128 --num_layers 2 --seq_len 64 --batch_size 48",
    "text.py": "--model transformer --seq_len 64",
    "translation.py": "--seq_len 16",
    "mnist.py": "--synthetic",
    "allreduce.py": "--max_bytes 67108864 --seconds 0.1",
}
TINY = {  # of a rehearsal. `data` is a folder.
    "images.py": "--dataset {data} --model cnn --batch_size 24 --learning_rate 3e-4",
    "gpt.py": "--dataset {data}/tokens --vocab_size 64 --d_model 16 --num_layers 2 --seq_len 16 "
    "--batch_size 24",
    "text.py": "--dataset tables --data_dir {data} --model transformer --seq_len 8 --batch_size 24",
    "translation.py": "--dataset tables --data_dir {data} --source number --target name "
    "--seq_len 8 --batch_size 24",
    "mnist.py": "--data_dir {data}",
    "allreduce.py": "--max_bytes 65536 --seconds 0.01",
}
SCRIPT = "singlegpu/images.py"
AUTOLOAD = "tests/helpers/autoload"
# Each process takes few blocks of the GPU that they share, the only one.
SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "EMU_DEVICES": "1"}
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "EMU_DEVICES": "0"}
GPT2 = "--vocab_size 50304 --d_model 768 --n_heads 12 --num_layers 12 --seq_len 1024"
TINY_GPT2 = "--vocab_size 64 --d_model 16 --n_heads 2 --num_layers 1 --seq_len 16"
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
LAUNCH["hybrid"] = LAUNCH["multinode"]
failures = []  # names of the checks that did not hold
options = None  # of the command line


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
    process = subprocess.Popen(
        [sys.executable, *command],
        env=os.environ | {"PYTHONUNBUFFERED": "1"} | environment,
        cwd=options.folder,
        start_new_session=True,
        **pipes,
    )
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


def run(script, words="", count=1, log=True, status=0, **environment):
    """Runs a script, or `before SCRIPT`, which must end with this status (None: any but 0).

    Returns the rows of the log, what was printed, and what was written to stderr.
    """
    *before, script = script.split()
    environment = options.variables | environment
    if not options.rehearse:
        environment.pop("EMU_DEVICES", None)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "log.jsonl")
        more = ["--log", str(path)] if log else []
        paths = [str(ROOT / each) for each in (*before, script)]
        folders = filter(None, (str(ROOT / AUTOLOAD), os.environ.get("PYTHONPATH")))
        ended, out, err = options.execute(
            paths[:-1],
            paths[-1],
            [*words.split(), *more],
            count,
            {"PYTHONPATH": ":".join(folders)} | environment,
        )
        rows = list(map(json.loads, path.read_text().splitlines())) if path.exists() else []
    variables = [f"{name}={value!r}" for name, value in environment.items()]
    shown = " ".join([*variables, "python", *before, script, *words.split()])
    seconds = time.monotonic() - begin
    tell(f"- ran `{shown}`, {count} process{'es' * (count > 1)}, {seconds:.0f} s")
    if ended != status and (status is not None or ended == 0):
        raise AssertionError(f"status {ended}\n{err[-2000:]}")
    return rows, out, err


@functools.cache
def run_alone(script, words):
    """The rows of one process."""
    return run(f"singlegpu/{script}", words)[0]


@contextlib.contextmanager
def copy_of(script, *replacements):
    """The path of a copy of the script, in which texts (old, new) are replaced."""
    with tempfile.TemporaryDirectory() as folder:
        text = (ROOT / script).read_text()
        for old, new in replacements:
            assert old in text, f"{script} has no {old!r}"
            text = text.replace(old, new)
        copy = Path(folder, script)
        copy.parent.mkdir()
        copy.write_text(text)
        yield str(copy)


def write_images(folder, num_images, shape):
    """Makes the folder a --dataset of images (N, C, H, W), each of which is one grey."""
    for split, count in (("train", num_images), ("test", 24)):
        labels = np.arange(count) % 10
        images = np.broadcast_to(labels.reshape(-1, 1, 1, 1), (count, *shape))
        np.save(f"{folder}/{split}_images.npy", images.astype(np.uint8))
        np.save(f"{folder}/{split}_labels.npy", labels)


def write_tokens(folder, count):
    """Makes the folder a --dataset of random tokens, 0 to 15."""
    for name, number in (("train", count), ("val", 1 << 14)):
        np.random.randint(16, size=number).astype(np.uint16).tofile(f"{folder}/{name}.bin")


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


def in_turn(sides, rounds=3):
    """Runs {name: (script, words)} in turn. Returns {name: median samples/s}."""
    rates = {name: [] for name in sides}
    for _ in range(1 if options.rehearse else rounds):
        for name, (script, words) in sides.items():
            rates[name].append(rate(run(script, words)[0]))
    return {name: statistics.median(values) for name, values in rates.items()}


def tell_rates(what, sides, rounds=3):
    rates = in_turn(sides, rounds)
    tell(f"- {what}: {', '.join(f'{name} {value:,.0f}' for name, value in rates.items())}")


def check_mnist(*counts):
    """The five mnist.py, and their rows."""
    data = options.sizes["mnist.py"]
    words = f"{data} --epochs 1 --batch_size {120 if options.rehearse else 1200}"
    cases = [("singlegpu", 1)]
    for count in counts:
        cases += [("multigpu", count), ("multinode", count)]
        if count > 1 and not options.over_gloo:
            cases.append(("hybrid", count - count % 2))
    outs = [run(f"{folder}/mnist.py", words, count, log=False)[1] for folder, count in cases]
    outs.append(run("quantize/mnist.py", data, log=False)[1])  # what they have saved to mnist.pt
    tell(*[f"- {line}" for out in outs for line in out.splitlines() if line.startswith("|")])


def check_losses(script):
    """On a GPU the losses of the CPU, to the rounding of each precision; and compiled.

    A bf16 number is rounded by up to 2^-9, one of TF32 or fp16 by 2^-12. In the first 24 steps such
    errors do not yet grow by more than 25 times: 5% and 1%. Later they may.
    """
    words = f"{options.sizes[script]} {in_rows(1, 24)}"
    script = f"singlegpu/{script}"
    cases = {"CPU": ("--precision fp32", ON_CPU, 1)}
    for precision, tolerance in {"fp32": 2e-3, "tf32": 1e-2, "bf16": 5e-2, "fp16": 1e-2}.items():
        cases[precision] = f"--precision {precision}", {}, tolerance
    cases["compiled"] = "--compile", {}, 1e-2
    told, expected, wrong = [], None, []
    for name, (more, variables, tolerance) in cases.items():
        rows = run(script, f"{words} {more}", **variables)[0]
        expected = expected or losses(rows)
        told.append(f"{name} {losses(rows)[-1]:.4f} ({rate(rows):,.0f} samples/s)")
        if not near(losses(rows), expected, tolerance):
            wrong.append(name)
    tell(f"- {script}: validation loss {', '.join(told)}")
    assert not wrong, f"other losses than on the CPU: {', '.join(wrong)}"


def check_resume(model):
    """Stopped by SIGTERM and started again, a run ends with the loss of an undisturbed one.

    A copy lets cuDNN add up in a fixed order: else two runs of a cnn need not have the same loss.
    """
    words = f"{options.sizes['images.py']} --model {model} --batch_size 24 {in_rows(3, 24)}"
    stop = 6 if options.rehearse else 36
    fixed = ("cudnn.benchmark = torch.version.hip is None", "cudnn.deterministic = True")
    with copy_of(SCRIPT, fixed) as script, tempfile.TemporaryDirectory() as folder:
        more = f"{words} --snapshot {folder}/run.pt"
        run(script, more, status=os.EX_TEMPFAIL, SIGNAL_AT=f"{int(signal.SIGTERM)} 0 {stop}")
        step = torch.load(f"{folder}/run.pt", "cpu", weights_only=True)["progress"]["step"]
        resumed = run(script, more)[0]
        whole = run(script, words)[0]
    tell(
        f"- {model}, stopped at step {step} and resumed: validation loss "
        f"{losses(resumed)[-1]:.6f}, undisturbed {losses(whole)[-1]:.6f}"
    )
    assert near(losses(resumed)[-1:], losses(whole)[-1:], 1e-4)


def check_phases():
    """The phases of the later rows are the time between the moments at which they are written."""
    with tempfile.TemporaryDirectory() as folder:
        script = f"tests/helpers/watch.py {folder} multinode/images.py"
        rows = run(script, f"{options.sizes['images.py']} {in_rows(6, 400)}")[0]
        written = json.loads(Path(folder, "0.json").read_text())["written"]
    wall, total = written[-1] - written[0], sum(row["seconds"] for row in rows[1:])
    tell(f"- phases of 5 rows: {total:.2f} s of {wall:.2f} s of wall time")
    assert options.rehearse or abs(total / wall - 1) < 0.02


def check_marks():
    """What the marks cost: samples/s beside a copy that records no events, in turn."""
    words = f"{options.sizes['images.py']} {in_rows(3, 200)}"
    with copy_of(SCRIPT, ("if HAS_EVENTS", "if False")) as bare:
        rates = in_turn({"timed": (SCRIPT, words), "bare": (bare, words)})
    tell(f"- the marks leave {rates['timed'] / rates['bare']:.1%} of images.py's samples/s")


def check_waits(script):
    """No step waits for the GPU, in a line of the script or in torch; the looks may."""
    counts = []
    for steps in (8, 40):
        more = f"{options.sizes[script]} --max_steps {steps} --eval_every {steps}"
        errors = run(f"tests/helpers/waits.py singlegpu/{script}", more)[2]
        count = Counter()
        for number, place in re.findall(r"WAITS (\d+) (.+)", errors):
            count[place] = int(number)
        # in a thread of C++ no Python code is asked
        count["a thread of C++"] = errors.count("called a synchronizing")
        counts.append(count)
    each_step = [place for place, count in counts[1].items() if count - counts[0][place] >= 32]
    tell(f"- {script}: {len(counts[1]) - 1} places wait, in each step: {each_step or 'none'}")
    assert not each_step, "a step waits for the GPU"


def check_one_process():
    """DDP with one process has the losses of singlegpu."""
    words = f"{options.sizes['images.py']} {in_rows(2, 24)}"
    one = run_alone("images.py", words)
    for folder in ("multigpu", "multinode"):
        rows = run(f"{folder}/images.py", words)[0]
        tell(f"- {folder}, one process: {losses(rows)[-1]:.4f}; singlegpu {losses(one)[-1]:.4f}")
        assert near(losses(rows), losses(one), 2e-2), folder


def check_curve(count):
    """Several processes have the losses of one; also if they send gradients as bf16."""
    words = f"{options.sizes['images.py']} {in_rows(2, 24)}"
    one = run_alone("images.py", words)
    for folder, more in (("multigpu", ""), ("multinode", "--comm_hook bf16")):
        rows = run(f"{folder}/images.py", f"{words} {more}", count)[0]
        told = f"- {folder}, {count} processes {more}: {losses(rows)[-1]:.4f}"
        tell(f"{told}; singlegpu {losses(one)[-1]:.4f}")
        assert near(losses(rows), losses(one), 5e-2 if more else 2e-2), "another loss curve"


def large_model(count):
    """The flags of a model with much to send."""
    words = f"{options.sizes['images.py']} --batch_size {24 * count}"
    return words if options.rehearse else f"{words} --model vgg11 --learning_rate 1e-4"


def check_logger(count):
    """comm and comm_total, beside those of DDP's own logger."""
    with tempfile.TemporaryDirectory() as folder:
        watched = f"tests/helpers/watch.py {folder} multinode/images.py"
        row = run(watched, f"{large_model(count)} {in_rows(1, 40)}", count)[0][0]  # of rank 0
        seen = json.loads(Path(folder, "0.json").read_text())
    steps = int(row["steps"])  # without the first ones
    for name in ("comm", "comm_total"):
        ours, ddps = (1000 * each / steps for each in (row[name], sum(seen[name][-steps:])))
        tell(
            f"- {count} processes: {name} {ours:.2f} ms a step with "
            f"an all-reduce a second; DDP's logger {ddps:.2f} without"
        )


def read_trace(path):
    """Returns the (start, end), in us, of all-reduces and of computation in a profiler's trace."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if "dur" in event]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    sends = [event for event in kernels if event["name"].lower().startswith("nccl")]
    computes = [event for event in kernels if event not in sends]
    if not sends:  # over gloo
        sends = [event for event in events if event["name"] == "gloo:all_reduce"]
        computes = computes or [event for event in events if event["name"].startswith("aten::")]
    return [
        sorted((event["ts"], event["ts"] + event["dur"]) for event in each)
        for each in (sends, computes)
    ]


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
    with tempfile.TemporaryDirectory() as folder:
        variables = {"TRACE": f"{folder} {steps + 1} {2 * steps}"}  # after the first row
        words = f"{large_model(count)} {in_rows(2, steps)}"
        rows = run("multinode/images.py", words, count, **variables)[0]
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


def check_hook(count):
    """What the hook with its times costs: samples/s beside DDP without a hook, in turn."""
    no_hook = ("    ddp_model.register_comm_hook(None, hook)\n", "")
    words = f"{large_model(count)} {in_rows(3, 40)}"
    ratios = []
    with copy_of("multigpu/images.py", no_hook) as bare:
        for _ in range(1 if options.rehearse else 3):
            sides = [rate(run(side, words, count)[0]) for side in ("multigpu/images.py", bare)]
            ratios.append(sides[0] / sides[1])
    ratio = statistics.median(ratios)
    tell(f"- with the hook {ratio:.1%} of the samples/s of DDP without a hook")
    assert options.rehearse or ratio > 0.95, "the hook takes DDP's overlap away"


def check_allreduce(count):
    """allreduce.py, which also proves the sums."""
    for script in ("multigpu/allreduce.py", "multinode/allreduce.py"):
        with copy_of(script, ("size = 4096", "size = 256")) as small:
            script = small if options.rehearse else script
            out = run(script, options.sizes["allreduce.py"], count, log=False)[1]
        tell(*[f"- {line}" for line in out.splitlines() if line.startswith(("fit:", "beside"))])


def check_lost(count, signum, **variables):
    options.timeout = 150  # seconds. Until then, it must have ended by itself.
    variables["SIGNAL_AT"] = f"{int(signum)} 1 4"
    words = f"{options.sizes['images.py']} {in_rows(2, 24)}"
    for folder in ("multigpu", "multinode") if signum == signal.SIGKILL else ("multigpu",):
        err = run(f"{folder}/images.py", words, count, status=None, **variables)[2]
        told = re.findall(r"\w+Error: \w.*|.*\bSIG\w+.*", err) or ["nothing"]
        tell(f"- it said: {told[-1].strip()[:200]}")


def check_killed(count):
    """A process that is killed ends the run."""
    check_lost(count, signal.SIGKILL)


def check_hung(count):
    """A process that hangs ends the run, after a timeout that is made shorter here: 20 s."""
    check_lost(count, signal.SIGSTOP, GROUP_TIMEOUT="2" if options.rehearse else "20")


def check_hybrid(count):
    """Shards, a pipeline and stages: the losses of one process, and peak memory."""
    count = count - count % 2 or 1
    cases = [("gpt_fsdp.py", "", count)]
    if count > 2:
        cases.append(("gpt_fsdp.py", "--shard_size 2", count))
    cases.append(("images.py", f"--num_stages {min(2, count)}", max(1, count // 2)))
    if count > 1 and not options.over_gloo:
        cases.append(("gpt_pipeline.py", "--num_stages 2", count))
    for script, more, processes in cases:
        base = "images.py" if script == "images.py" else "gpt.py"
        words = f"{options.sizes[base]} {in_rows(2, 24)}"
        one = run_alone(base, words)
        rows = run(f"hybrid/{script}", f"{words} {more}", processes)[0]
        peak = max(row["peak_MB"] for row in rows)
        tell(
            f"- hybrid/{script} {more}, {processes} processes: validation loss "
            f"{losses(rows)[-1]:.4f}, one process {losses(one)[-1]:.4f}; largest peak "
            f"{peak:.0f} MB, one process {one[-1]['peak_MB']:.0f}"
        )
        assert near(losses(rows), losses(one), 2e-2), script


def plain_gpt(size, steps, more=""):
    """What tests/helpers/plain_gpt.py finds: tokens/s of a loop of nothing but a step, ..."""
    words = f"{size} --max_steps {steps} {more}"
    words += " --warmup 2 --matmul 64" if options.rehearse else ""
    return json.loads(run("tests/helpers/plain_gpt.py", words, log=False)[1])


def check_gpt(batch):
    """GPT-2 (124 M) in bf16, compiled, beside a loop of the same model without our timers."""
    size, steps = f"{GPT2} --batch_size {batch}", 24
    if options.rehearse:
        size, steps = f"{TINY_GPT2} --batch_size {batch}", 4
    plain = [plain_gpt(size, steps)]
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(folder, 1 << 13 if options.rehearse else 1 << 22)
        words = f"{size} --dataset {folder} --precision bf16 {in_rows(3, steps)} --compile"
        row = run("singlegpu/gpt.py", words)[0][-1]
    if not options.rehearse:
        plain.append(plain_gpt(size, steps))  # before and after
    speed = row["samples/s"] * row["seq_len"]  # tokens/s
    of_loop = statistics.mean(each["tokens/s"] for each in plain)
    # of a token: 6 a parameter, and the attention (Chowdhery et al. 2022, "PaLM", appendix B)
    flops = 6 * row["parameters"] + 12 * row["num_layers"] * row["d_model"] * row["seq_len"]
    tflops = flops * speed / 1e12  # a second
    peak = peak_of(options.name)
    mfu = f"{tflops / peak:.1%} of {peak}" if peak else "-"
    tell(
        "",
        "| batch | tokens/s | TFLOP/s | MFU | of a matmul | plain loop | ours to it |",
        "|" + " --- |" * 7,
        f"| {batch} | {speed:,.0f} | {tflops:.3g} | {mfu} | {tflops / plain[0]['matmul']:.1%} | "
        f"{of_loop:,.0f} | {speed / of_loop:.2f} |",
        "",
        *([PUBLISHED, ""] if batch == 8 else []),
    )


def peak_of(name):
    """The TFLOP/s of a device of this name by its data sheet. None: not known."""
    found = [peak for card, peak in PEAKS.items() if re.search(rf"\b{card}\b", name)]
    return found[0] if found and "Laptop" not in name else None


def check_attention():
    """GPT-2 (124 M) at batch 32, with FlashAttention and with cuDNN's attention, in turn."""
    size, steps, rounds = f"{GPT2} --batch_size 32", 24, 2
    rates = {"FLASH_ATTENTION": [], "CUDNN_ATTENTION": []}
    if options.rehearse:
        size, steps, rounds, rates = f"{TINY_GPT2} --batch_size 8", 2, 1, {"MATH": []}
    for _ in range(rounds):
        for backend, values in rates.items():
            values.append(plain_gpt(size, steps, f"--attention {backend}")["tokens/s"])
    told = [f"{backend} {statistics.mean(values):,.0f}" for backend, values in rates.items()]
    tell(f"- tokens/s: {', '.join(told)}")


def check_shapes(script):
    """A transformer, whose batches have ever new shapes, without and with cuDNN's attention."""
    words = f"{options.sizes[script]} --model transformer --precision bf16 {in_rows(3, 24)}"
    cudnn = ("enable_cudnn_sdp(False)", "enable_cudnn_sdp(True)")
    with copy_of(f"singlegpu/{script}", cudnn) as on:
        sides = {"without": (f"singlegpu/{script}", words), "with": (on, words)}
        tell_rates(f"{script}, samples/s by cuDNN's attention", sides)


def check_cnn(batch):
    """The cnn, whose steps are launches of kernels: eager, compiled, and with CUDA graphs."""
    words = f"{options.sizes['images.py']} --batch_size {batch} {in_rows(3, 400)}"
    compiled = "torch.compile(model"
    with copy_of(SCRIPT, (compiled, f'{compiled}, mode="reduce-overhead"')) as graphs:
        sides = {"eager": (SCRIPT, words), "compiled": (SCRIPT, f"{words} --compile")}
        sides["CUDA graphs"] = (graphs, f"{words} --compile")
        tell_rates(f"cnn, batch {batch}, images/s", sides)


@contextlib.contextmanager
def photos(count):
    """The flags of a data set of images of 224 pixels, and of a network for them."""
    with tempfile.TemporaryDirectory() as folder:
        pixels = 28 if options.rehearse else 224
        write_images(folder, 32 if options.rehearse else count, (3, pixels, pixels))
        words = f"{options.sizes['images.py']} --dataset {folder} --num_workers 2"
        yield words if options.rehearse else f"{words} --model resnet18 --batch_size 256"


def check_precision(model):
    """A network of many convolutions: fp32, TF32, bf16, channels_last."""
    to_device = "create_model(args, train_data).to(device"
    channels_last = f"{to_device}, memory_format=torch.channels_last"
    flags = photos(8192) if model == "resnet18" else contextlib.nullcontext(large_model(8))
    with flags as words, copy_of(SCRIPT, (to_device, channels_last)) as last:
        words = f"{words} {in_rows(2, 30)}"
        sides = {"fp32": (SCRIPT, f"{words} --precision fp32")}
        for precision in ("tf32", "bf16"):
            sides[precision] = (SCRIPT, f"{words} --precision {precision}")
            sides[f"{precision}, channels_last"] = (last, f"{words} --precision {precision}")
        tell_rates(f"{model}, images/s", sides, rounds=2)


def check_loading():
    """Images of 224 pixels from a file, for resnet18 in bf16: without workers, with 2 and 4."""
    with photos(2048) as words:
        words = f"{words} --precision bf16 {in_rows(3, 16)} --num_workers"
        sides = {str(workers): (SCRIPT, f"{words} {workers}") for workers in (0, 2, 4)}
        tell_rates("resnet18 at 224 pixels, images/s by the number of workers", sides)


def check_quantize():
    """quantize/gpt.py runs on what gpt.py has trained: all rows eager, and one compiled."""
    if not importlib.util.find_spec("torchao"):
        tell("- left out: quantize, which needs the package torchao")
        return
    with tempfile.TemporaryDirectory() as folder:
        words = f"--snapshot {folder}/gpt.pt"
        run("singlegpu/gpt.py", f"{options.sizes['gpt.py']} {in_rows(1, 24)} {words}")
        words = f"{words} --batch_size 32 --rounds 2"
        for more in ("--eager", "--row int8-weights"):  # to compile all rows takes too long
            variables = {}
            if options.rehearse:  # emulated, there are no kernels for int8
                more, variables = f"{more} --eager", ON_CPU
            out = run("quantize/gpt.py", f"{words} {more}", log=False, **variables)[1]
            tell("", *[line for line in out.splitlines() if line.startswith("|")], "")


def attempt(part, check, arguments):
    words = (part, check.__name__.removeprefix("check_"), *map(str, arguments))
    name = " ".join(dict.fromkeys(words))  # a part's only check has its name
    tell("", f"**{name}**: {check.__doc__.splitlines()[0]}", "")
    try:
        check(*arguments)
    except Exception as error:
        if not isinstance(error, AssertionError):
            traceback.print_exc()
        failures.append(name)
        tell(f"- **{name} failed**: {error}")


def parts_of(scripts, count, several):
    """Returns {part: its checks, each with its arguments}, for so many GPUs.

    `several` are the numbers of ranks, and the batches of gpt and cnn, that are tried in turn.
    """
    by_ranks = (check_curve, check_logger, check_trace, check_hybrid, check_allreduce)
    parts = {"mnist": [(check_mnist, count)]}
    parts["losses"] = [(check_losses, script) for script in scripts]
    parts["time"] = [(check_resume, model) for model in ("mlp", "cnn")]
    parts["time"] += [(check_phases,), (check_marks,)]
    parts["waits"] = [(check_waits, script) for script in scripts]
    parts["ddp"] = [(check_one_process,)]
    if count > 1:
        checks = (check_curve, check_logger, check_trace, check_hook, check_allreduce)
        parts["ddp"] += [(check, count) for check in (*checks, check_killed, check_hung)]
    parts["hybrid"] = [(check_hybrid, count)]
    parts["ranks"] = [(check, ranks) for ranks in several["ranks"] for check in by_ranks]
    parts["ranks"] += [(check_mnist, *several["ranks"]), (check_killed, 2), (check_hung, 2)]
    parts["gpt"] = [(check_gpt, batch) for batch in several["gpt"]]
    parts["attention"] = [(check_attention,)]
    parts["attention"] += [(check_shapes, each) for each in scripts if each[0] == "t"]
    parts["cnn"] = [(check_cnn, batch) for batch in several["cnn"]]
    parts["precision"] = [(check_precision, model) for model in ("vgg11", "resnet18")]
    parts["loading"] = [(check_loading,)]
    parts["quantize"] = [(check_quantize,)]
    return parts


def checks_of(parts, name):
    """Returns the checks of a part or, for part:word, those of this name or argument."""
    part, _, word = name.partition(":")
    found = []
    for check, *arguments in parts.get(part, []):
        if word in ("", check.__name__.removeprefix("check_"), *map(str, arguments)):
            found.append((check, arguments))
    return found


def set_up_rehearsal(folder):
    """Makes tiny data, and lets commands run in forks, on two emulated GPUs."""
    sys.path.append(str(ROOT / "tests/helpers"))
    if "conftest" not in sys.modules:
        import conftest

        atexit.register(conftest.pytest_sessionfinish)
    from conftest import write_mnist, write_tables

    write_mnist(folder)
    write_tables(folder / "tables")
    write_images(folder, 192, (1, 28, 28))
    (folder / "tokens").mkdir()
    write_tokens(folder / "tokens", 1 << 14)
    options.sizes = {script: words.format(data=folder) for script, words in TINY.items()}
    options.execute, options.variables = execute_in_forks, {"EMU_DEVICES": "2"}


def main(words=None):
    global options
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="PARTS", help="parts to run, or part:check")
    parser.add_argument("--rehearse", action="store_true", help="at tiny sizes, on emulated GPUs")
    parser.add_argument("--out", default="gpu.md", help="file to append to")
    options = parser.parse_args(words)
    failures.clear()
    gpu = torch.accelerator.current_accelerator(check_available=True)
    count = 2 if options.rehearse else torch.accelerator.device_count()
    scripts = ["images.py", "gpt.py", "text.py", "translation.py"]
    has_datasets = importlib.util.find_spec("datasets")
    several = {"ranks": (2, 4), "gpt": (8, 32, 64), "cnn": (64, 256)}
    if options.rehearse:  # each command once
        several = {"ranks": (4,), "gpt": (8,), "cnn": (64,)}
    parts = parts_of(scripts if has_datasets else scripts[:2], count, several)
    names = options.only.split(",") if options.only else [*parts]
    if unknown := [name for name in names if not checks_of(parts, name)]:
        parser.error(f"--only: {', '.join(unknown)} is no part; they are {', '.join(parts)}")
    if not os.access(os.path.join(os.path.dirname(options.out), "."), os.W_OK):
        parser.error(f"cannot write {options.out}: its folder is missing or read-only")
    if not gpu and not options.rehearse:
        parser.error("torch sees no GPU here; --rehearse runs each command on emulated ones")
    options.out = os.path.abspath(options.out)
    options.name = torch.get_device_module(gpu).get_device_name() if gpu else "emulated GPU"
    options.execute, options.variables, options.sizes = execute, {}, SHORT
    nccl = gpu and gpu.type == "cuda" and torch.cuda.nccl.version()
    versions = f"torch {torch.__version__}" + (f", NCCL {'.'.join(map(str, nccl))}" if nccl else "")
    tell("", f"## {count} x {options.name}, {versions}, {date.today()}", "")
    if options.rehearse:
        tell("- a rehearsal: each command runs at a tiny size, and its times mean nothing")
    if not has_datasets:
        tell("- left out: text.py and translation.py, which need the package datasets")
    if count == 1:
        tell("- left out of mnist, ddp and hybrid: what several GPUs do. The part ranks does it")
    with tempfile.TemporaryDirectory() as folder:
        options.folder = folder
        if options.rehearse:
            set_up_rehearsal(Path(folder, "data"))
        own_variables = options.variables
        for name in names:
            begin = time.monotonic()
            is_shared = name.startswith("ranks")
            if is_shared and count > 1 and not options.rehearse:
                tell("", "- left out: ranks, which is for a machine with one GPU")
                continue
            options.variables = own_variables | (SHARING if is_shared else {})
            options.timeout = 150 if is_shared else 600  # seconds
            options.over_gloo = bool(is_shared and nccl and (nccl < (2, 30) or torch.version.hip))
            if options.over_gloo:
                options.variables["OVER_GLOO"] = "1"
                tell("", "- ranks runs over gloo: only NCCL 2.30 lets processes share a GPU")
                tell("- left out: pipelines and hybrid/mnist.py, as gloo cannot send from a GPU")
            for check, arguments in checks_of(parts, name):
                attempt(name.partition(":")[0], check, arguments)
            tell(f"- part {name}: {time.monotonic() - begin:.0f} s")
    sys.exit(f"failed: {', '.join(failures)}" if failures else 0)


if __name__ == "__main__":
    main()
