"""Prove and measure the scripts on the GPUs of this machine, part by part and without a network.

    python tests/gpu.py                          # all parts; appends what it finds to gpu.md
    python tests/gpu.py --only time,gpt:8        # some of them; of gpt what runs at batch 8
    python tests/gpu.py --dry_run                # prints what it would run on two GPUs
    python tests/gpu.py --device cpu             # rehearses all parts on CPUs, at tiny sizes

A part takes at most 8 minutes on a fast GPU, by estimate. On one H200, mnist, ddp and hybrid took
1 minute each, time 2, gpt 4. In brackets: seconds on two CPU cores.

    mnist      the five mnist.py, on made-up images (45)
    losses     the losses of each script are those of the CPU, in each precision (170)
    time       a stop and a resume; phases and wall time; what the marks cost (40)
    waits      no step waits for the GPU, in the scripts or inside of torch (60)
    ddp        one process and all; DDP's own timer; the hook (80)
    hybrid     shards, a pipeline and stages: the losses and the memory of one process (55)
    gpt        GPT-2 at batch 8, 32 and 64, beside a plain loop of the same model (70)
    quantize   what gpt.py has trained: all rows eager, and one compiled (75)

It needs torch 2.11 or newer. A line says what is left out: what the GPUs send each other where
there is one; text.py and translation.py without the package datasets; int8 without torchao.
"""

import argparse
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
from pathlib import Path

import torch
from benchmark import module

ROOT = Path(__file__).resolve().parent.parent
SHORT = {  # a small case of each script
    # At the default rate, Adam's first steps turn a rounding into 3% of the cnn's loss.
    "images.py": "--model cnn --batch_size 128 --learning_rate 3e-4",
    "gpt.py": "--d_model 128 --num_layers 2 --seq_len 64 --batch_size 32",
    "text.py": "--model transformer --seq_len 64",
    "translation.py": "--seq_len 16",
}
TINY = {
    "images.py": "--model mlp --batch_size 24",
    "gpt.py": "--d_model 16 --num_layers 1 --seq_len 16 --batch_size 24",
    "text.py": "--seq_len 16 --batch_size 24",
    "translation.py": "--model lstm --seq_len 8 --batch_size 24",
}
SCRIPT = "singlegpu/images.py"
GPT2 = "--vocab_size 50304 --d_model 768 --n_heads 12 --num_layers 12 --seq_len 1024"
PUBLISHED = (
    "Published for GPT-2 (124 M), tokens/s of a GPU: nanoGPT 273,000 (8 x H200), llm.c 468,000",
    "(8 x H100); MFU of nanochat: 41 to 46% (H100).",
)
# bf16 TFLOP/s without sparsity, by the data sheets; the first words that the device's name contains
PEAKS = {"H100 PCIe": 756, "H100 NVL": 835, "H200 NVL": 835, "H100": 989, "H200": 989, "GH200": 989}
PEAKS |= {"A100": 312, "GB200": 2500, "B200": 2250, "L40S": 362, "L4": 121, "A10": 125}
PEAKS |= {"RTX 4090": 165}
LAUNCH = {
    "singlegpu": "",
    "quantize": "",
    "multigpu": "--num_gpus {count}",
    "multinode": "-m torch.distributed.run --standalone --nproc_per_node={count} --",
}
LAUNCH["hybrid"] = LAUNCH["multinode"]
NUMBERS = ("train_loss", "val_loss", "samples/s")  # of logs
failures = []  # names of the checks that did not hold
options = None  # of the command line


def tell(*lines):
    """Prints the lines, and appends them to the report at once."""
    if not options.dry_run:
        print(*lines, sep="\n", flush=True)
        with open(options.out, "a") as file:
            file.writelines(f"{line}\n" for line in lines)


def start(script, words, log=None, count=1, environment=()):
    """Starts a script (or the words `before SCRIPT`) as a user does. Returns the process."""
    *before, script = script.split()
    folder = Path(script).parent.name
    launch = LAUNCH[folder].format(count=count).split()
    if folder == "multigpu":
        command = [*before, script, *launch, *words.split()]
    else:
        command = [*launch, *before, script, *words.split()]
    command += ["--log", str(log)] if log else []
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | dict(environment)
    if options.device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if options.dry_run:
        print("python", *command)
        return None
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    return subprocess.Popen([sys.executable, *command], env=environment, **pipes)


def end_of(process):
    """Returns what it has printed, and written to stderr. If that takes too long, it stops it."""
    try:
        return process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        process.terminate()  # multigpu's script and torchrun pass it on
        process.communicate(timeout=60)
        raise


def run(script, words, count=1, log=True, **environment):
    """Returns the rows of the log, what was printed, and what was written to stderr."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.jsonl") if log else None
        process = start(script, words, log, count, environment)
        if not process:
            return [dict.fromkeys(NUMBERS, 1.0) | {"rank": 0}], "", ""
        out, err = end_of(process)
        if process.returncode:
            raise AssertionError(f"{script} {words}: status {process.returncode}\n{err[-2000:]}")
        return list(map(json.loads, log.read_text().splitlines())) if log else [], out, err


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


class DryRun(Exception):
    """Ends a check of which nothing was run."""


def in_rows(count, steps):
    """The flags of a run of so many rows, each after so many steps; few steps on a CPU."""
    steps = steps if options.device == "cuda" else 6
    return f"--max_steps {count * steps} --eval_every {steps}"


def rate(rows):
    """Samples/s of the last row."""
    return rows[-1]["samples/s"]


def losses(rows):
    return [row[name] for row in rows for name in ("train_loss", "val_loss")]


def near(values, others, tolerance):
    return all(abs(a / b - 1) < tolerance for a, b in zip(values, others, strict=True))


def in_turn(sides):
    """Runs {name: (script, words)} three times in turn. Returns {name: median samples/s}."""
    rates = {name: [] for name in sides}
    for _ in range(1 if options.device == "cpu" else 3):
        for name, (script, words) in sides.items():
            rates[name].append(rate(run(script, words)[0]))
    return {name: statistics.median(values) for name, values in rates.items()}


def check_mnist():
    """The five mnist.py, on made-up images: the row of each."""
    words = "--synthetic" if options.device == "cuda" else "--synthetic --epochs 1"
    counts = dict.fromkeys(("singlegpu", "multigpu", "multinode"), options.count)
    if options.count > 1:
        counts["hybrid"] = options.even_count
    for folder, count in counts.items():
        out = run(f"{folder}/mnist.py", f"{words} --batch_size 1200", count, log=False)[1]
        tell(*[line for line in out.splitlines() if line.startswith("|")])
    out = run("quantize/mnist.py", "--synthetic", log=False)[1]  # what they have saved to mnist.pt
    tell(*[line for line in out.splitlines() if line.startswith("|")])


def check_losses(script):
    """On a GPU the losses of the CPU, to the rounding of each precision; and compiled.

    A bf16 number is rounded by up to 2^-9, one of TF32 or fp16 by 2^-12. In the first 24 steps such
    errors do not yet grow by more than 25 times: 5% and 1%. Later they may.
    """
    words = f"{options.sizes[script]} {in_rows(1, 24)}"
    script = f"singlegpu/{script}"
    cases = {"CPU": ("", {"CUDA_VISIBLE_DEVICES": ""}, 0)}
    tolerances = {"fp32": 2e-3, "tf32": 1e-2, "bf16": 5e-2}
    if options.device == "cuda":  # some CPUs have no LSTM in fp16
        tolerances["fp16"] = 1e-2
    for precision, tolerance in tolerances.items():
        cases[precision] = f"--precision {precision}", {}, tolerance
    cases["compiled"] = "--compile", {}, 1e-2
    told, expected, wrong = [], None, []
    for name, (more, environment, tolerance) in cases.items():
        rows = run(script, f"{words} {more}", **environment)[0]
        expected = expected or losses(rows)
        told.append(f"{name} {losses(rows)[-1]:.4f} ({rate(rows):,.0f} samples/s)")
        if name != "CPU" and not near(losses(rows), expected, tolerance):
            wrong.append(name)
    tell(f"- {script} {words}: validation loss {', '.join(told)}")
    assert not wrong, f"other losses than on the CPU: {', '.join(wrong)}"


def check_resume(model):
    """Stopped by SIGTERM and started again, a run ends with the loss of an undisturbed one.

    A copy lets cuDNN add up in a fixed order: else two runs of a cnn need not have the same loss.
    """
    words = f"--model {model} --batch_size 24 {in_rows(6, 24)}"
    fixed = ("cudnn.benchmark = torch.version.hip is None", "cudnn.deterministic = True")
    with copy_of(SCRIPT, fixed) as script, tempfile.TemporaryDirectory() as folder:
        snapshot = Path(folder, "run.pt")
        more = f"{words} --snapshot {snapshot}"
        process = start(script, more)
        if not process:
            raise DryRun
        while not snapshot.exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        end_of(process)
        assert process.returncode in (0, os.EX_TEMPFAIL), process.returncode
        step = torch.load(snapshot, weights_only=True)["progress"]["step"]
        resumed = run(script, more)[0]
        whole = run(script, words)[0]
    tell(
        f"- {model}, stopped at step {step} and resumed: validation loss "
        f"{losses(resumed)[-1]:.6f}, undisturbed {losses(whole)[-1]:.6f}"
    )
    assert near(losses(resumed)[-1:], losses(whole)[-1:], 1e-4)


def check_phases():
    """The phases of the later rows are the time between the lines that the script prints."""
    with tempfile.TemporaryDirectory() as folder:
        log, moments = Path(folder, "log.jsonl"), []
        process = start(SCRIPT, f"{options.sizes['images.py']} {in_rows(6, 400)}", log)
        if not process:
            raise DryRun
        for line in process.stdout:
            if re.match(r"step \d+  train_loss", line):
                moments.append(time.perf_counter())
        assert process.wait(timeout=600) == 0, process.stderr.read()
        seconds = [json.loads(line)["seconds"] for line in log.read_text().splitlines()]
    wall, total = moments[-1] - moments[0], sum(seconds[1:])
    tell(f"- phases of 5 rows: {total:.2f} s of {wall:.2f} s of wall time")
    assert abs(total / wall - 1) < 0.02


def check_marks():
    """What the marks cost: samples/s beside a copy that records no events, in turn."""
    words = f"{options.sizes['images.py']} {in_rows(3, 200)}"
    with copy_of(SCRIPT, ("if HAS_EVENTS", "if False")) as bare:
        rates = in_turn({"timed": (SCRIPT, words), "bare": (bare, words)})
    tell(f"- the marks leave {rates['timed'] / rates['bare']:.1%} of images.py's samples/s")


WATCH_WAITS = """import collections, runpy, sys, torch, traceback, warnings
waits, script = collections.Counter(), sys.argv[1]
def note(message, category, *place):
    if "called a synchronizing" not in str(message):
        return
    frames = traceback.extract_stack()[:-1]
    ours = [frame.lineno for frame in frames if frame.filename == script] or ["a thread"]
    inner = [frame for frame in frames if not frame.filename.endswith("warnings.py")][-1]
    waits[f"{ours[-1]} in {inner.filename.split('site-packages/')[-1]}:{inner.lineno}"] += 1
warnings.simplefilter("always")
warnings.showwarning = note
if torch.cuda.is_available():
    torch.cuda.set_sync_debug_mode("warn")
sys.argv = sys.argv[1:]
try:
    runpy.run_path(script, run_name="__main__")
finally:
    for place, count in waits.items():
        print("WAITS", count, place, file=sys.stderr)
"""


def check_waits(script):
    """No step waits for the GPU, in a line of the script or in torch; the looks may."""
    with tempfile.TemporaryDirectory() as folder:
        wrapper = Path(folder, "watch_waits.py")
        wrapper.write_text(WATCH_WAITS)
        counts = []
        for steps in (8, 40):
            more = f"{options.sizes[script]} --max_steps {steps} --eval_every {steps}"
            errors = run(f"{wrapper} singlegpu/{script}", more)[2]
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
    one = run(SCRIPT, words)[0]
    for folder in ("multigpu", "multinode"):
        rows = run(f"{folder}/images.py", words)[0]
        tell(f"- {folder}, one process: {losses(rows)[-1]:.4f}; singlegpu {losses(one)[-1]:.4f}")
        assert near(losses(rows), losses(one), 2e-2), folder


def check_all_processes():
    """All GPUs: one loss curve; comm beside DDP's own logger; what the hook hides is hidden."""
    count, words = options.count, f"{options.sizes['images.py']} {in_rows(2, 24)}"
    one, all_of_them = (run("multigpu/images.py", words, each)[0] for each in (1, count))
    first = [row for row in all_of_them if row["rank"] == 0]
    assert options.dry_run or near(losses(first), losses(one), 2e-2), "another loss curve"
    model = "mlp" if options.device == "cpu" else "vgg11 --learning_rate 1e-4"
    words = f"--model {model} --batch_size {32 * count}"
    with tempfile.TemporaryDirectory() as folder:
        watched = f"tests/helpers/watch.py {folder} multinode/images.py"
        row = run(watched, f"{words} {in_rows(1, 40)}", count)[0][0]  # of rank 0
        if not options.dry_run:
            seen = json.loads(Path(folder, "0.json").read_text())
            steps = int(row["steps"])  # without the first ones
            for name in ("comm", "comm_total"):
                ours, ddps = (1000 * each / steps for each in (row[name], sum(seen[name][-steps:])))
                tell(
                    f"- {count} processes, {model}: {name} {ours:.2f} ms a step with "
                    f"an all-reduce a second; DDP's logger {ddps:.2f} without"
                )
    no_hook = ("    ddp_model.register_comm_hook(None, hook)\n", "")
    words = f"{words} {in_rows(3, 40)}"
    with copy_of("multigpu/images.py", no_hook) as bare:
        ratios = []
        for _ in range(3):
            sides = [rate(run(side, words, count)[0]) for side in ("multigpu/images.py", bare)]
            ratios.append(sides[0] / sides[1])
    ratio = statistics.median(ratios)
    tell(f"- with the hook {ratio:.1%} of the samples/s of DDP without a hook")
    assert options.device == "cpu" or ratio > 0.95, "the hook takes DDP's overlap away"


def check_hybrid():
    """Shards, a pipeline and stages on all GPUs: the losses of one process, and peak memory."""
    count = options.even_count
    cases = {"gpt_fsdp.py": ("gpt.py", "", count)}
    cases["images.py"] = ("images.py", f"--num_stages {min(2, count)}", max(1, count // 2))
    if count > 1:
        cases["gpt_pipeline.py"] = ("gpt.py", "--num_stages 2", count)
    for script, (base, more, count) in cases.items():
        words = f"{options.sizes[base]} {in_rows(2, 24)}"
        if base == "gpt.py":
            words += " --num_layers 2"  # at least one for each stage
        one = run(f"singlegpu/{base}", words)[0]
        rows = run(f"hybrid/{script}", f"{words} {more}", count)[0]
        if not options.dry_run:
            rows = [row for row in rows if row["rank"] == 0]
            peaks = f"{one[-1]['peak_MB']:.0f} and {rows[-1]['peak_MB']:.0f} MB"
            tell(f"- hybrid/{script} {more} on {count}: validation loss {losses(rows)[-1]:.4f}")
            tell(f"  (one process: {losses(one)[-1]:.4f}); peak of one process and rank 0: {peaks}")
            assert near(losses(rows), losses(one), 2e-2), script


def check_gpt(batch):
    """GPT-2 (124 M) in bf16, compiled, beside a loop of the same model without our timers."""
    size, steps = f"{GPT2} --batch_size {batch}", 24
    if options.device == "cpu":
        size = f"--d_model 16 --num_layers 1 --seq_len 16 --batch_size {batch}"
    words = f"{size} --precision bf16 {in_rows(3, steps)} --compile"
    plain = [plain_gpt(size, steps)]
    with tempfile.TemporaryDirectory() as folder:
        for name, count in (("train", 1 << 22), ("val", 1 << 14)):
            ids = torch.randint(16, (count,), dtype=torch.int16)
            ids.numpy().tofile(f"{folder}/{name}.bin")
        row = run("singlegpu/gpt.py", f"{words} --dataset {folder}")[0][-1]
    plain.append(plain_gpt(size, steps))  # before and after
    if options.dry_run:
        raise DryRun
    speed = row["samples/s"] * row["seq_len"]  # tokens/s
    ratio = speed / statistics.mean(plain)
    # of a token: 6 a parameter, and the attention (Chowdhery et al. 2022, "PaLM", appendix B)
    flops = 6 * row["parameters"] + 12 * row["num_layers"] * row["d_model"] * row["seq_len"]
    tflops = flops * speed / 1e12  # a second
    peak = peak_of(options.name)
    mfu = f"{tflops / peak:.1%} of {peak}" if peak else "-"
    if batch == 8:
        tell("", "| batch | tokens/s | TFLOP/s | MFU | of a matmul | plain loop | ours to it |")
        tell("|" + " --- |" * 7)
    tell(
        f"| {batch} | {speed:,.0f} | {tflops:.3g} | {mfu} | "
        f"{tflops / matmul_tflops():.1%} | {statistics.mean(plain):,.0f} | {ratio:.2f} |"
    )
    if batch == 64:
        tell("", *PUBLISHED, "")


def peak_of(name):
    """The TFLOP/s of a device of this name by its data sheet. None: not known."""
    found = [peak for card, peak in PEAKS.items() if re.search(rf"\b{card}\b", name)]
    return found[0] if found and "Laptop" not in name else None


def matmul_tflops():
    """The TFLOP/s of a plain bf16 matmul, which no model is faster than."""
    size = 8192 if options.device == "cuda" else 512
    matrix = torch.rand(size, size, device=options.device).bfloat16()
    for count in (3, 20):  # the first three warm up
        begin = now()
        for _ in range(count):
            matrix @ matrix
        seconds = now() - begin
    return 2 * size**3 * count / seconds / 1e12


def plain_gpt(size, steps):
    """Returns the tokens/s of gpt.py's model, compiled, in a loop of nothing but a step."""
    if options.dry_run:
        return 1.0
    gpt = module("singlegpu/gpt.py")
    device = torch.device(options.device)
    sizes = dict(re.findall(r"--(\w+) (\d+)", size))
    args = {"vocab_size": 50304, "n_heads": 4} | {name: int(value) for name, value in sizes.items()}
    args = argparse.Namespace(**args, dropout=0.0)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch._dynamo.reset()  # the next shape is compiled anew
    model = gpt.GPT(args).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    compiled = torch.compile(model)
    tokens = torch.randint(16, (args.batch_size, args.seq_len + 1), device=device)
    for step in range(steps + 10):
        if step == 10:
            moment = now()
        with torch.autocast(device.type, torch.bfloat16):
            loss = compiled(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    rate = steps * args.batch_size * args.seq_len / (now() - moment)
    del model, optimizer, compiled, loss
    if options.device == "cuda":
        torch.cuda.empty_cache()  # the script that runs next needs this memory
    return rate


def now():
    """The moment (s) at which the GPU has done what it was given."""
    if options.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def check_quantize():
    """quantize/gpt.py runs on what gpt.py has trained: all rows eager, and one compiled."""
    if options.device == "cuda" and not importlib.util.find_spec("torchao"):
        tell("- left out: int8 on GPUs, which needs the package torchao")
        raise DryRun
    with tempfile.TemporaryDirectory() as folder:
        words = f"--snapshot {folder}/gpt.pt"
        run("singlegpu/gpt.py", f"{options.sizes['gpt.py']} {in_rows(1, 24)} {words}")
        words = f"{words} --batch_size 32 --rounds 2"
        for more in ("--eager", "--row int8-weights"):  # to compile all rows takes too long
            out = run("quantize/gpt.py", f"{words} {more}", log=False)[1]
            tell("", *[line for line in out.splitlines() if line.startswith("|")])


def attempt(name, check, *arguments):
    begin = time.monotonic()
    print(f"\n{name}: {check.__doc__}", flush=True)
    try:
        check(*arguments)
    except DryRun:
        return
    except Exception as error:
        if not isinstance(error, AssertionError):
            traceback.print_exc()
        failures.append(name)
        tell(f"- **{name} failed**: {error}")
    if not options.dry_run:
        print(f"{time.monotonic() - begin:.0f} s", flush=True)


def parts_of(scripts):
    """Returns {part: its checks, each with its arguments}."""
    parts = {"mnist": [(check_mnist,)]}
    parts["losses"] = [(check_losses, script) for script in scripts]
    parts["time"] = [
        (check_resume, "mlp"),
        (check_resume, "cnn"),
        (check_phases,),
        (check_marks,),
    ]
    parts["waits"] = [(check_waits, script) for script in scripts]
    parts["ddp"] = [(check_one_process,), (check_all_processes,)]
    parts["hybrid"] = [(check_hybrid,)]
    parts["gpt"] = [(check_gpt, batch) for batch in (8, 32, 64)]
    parts["quantize"] = [(check_quantize,)]
    return parts


def checks_of(parts, name):
    """Returns the checks of a part or, for part:argument, those of them with this argument."""
    part, _, argument = name.partition(":")
    return [each for each in parts.get(part, []) if argument in ("", *map(str, each[1:]))]


def main():
    global options
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = parts_of(SHORT)
    parser.add_argument("--only", metavar="PARTS", default=",".join(parts), help="parts to run")
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--dry_run", action="store_true", help="print the commands, run none")
    parser.add_argument("--out", default="gpu.md", help="file to append to")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := [name for name in names if not checks_of(parts, name)]:
        parser.error(f"--only: {', '.join(unknown)} is no part; they are {', '.join(parts)}")
    if not os.access(os.path.join(os.path.dirname(options.out), "."), os.W_OK):
        parser.error(f"cannot write {options.out}: its folder is missing or read-only")
    options.device = options.device or ("cuda" if options.dry_run else device)
    if options.device == "cuda" and device == "cpu" and not options.dry_run:
        sys.exit("torch sees no GPU here; --device cpu runs what needs none")
    options.sizes = SHORT if options.device == "cuda" else TINY
    has_gpu = options.device == device == "cuda"
    options.count = torch.cuda.device_count() if has_gpu else 2
    options.even_count = options.count - options.count % 2 or 1  # of three GPUs, two
    options.name = torch.cuda.get_device_name() if has_gpu else "CPU"
    tell("", f"{options.count if has_gpu else 1} x {options.name}, torch {torch.__version__}", "")
    if not importlib.util.find_spec("datasets"):
        tell("- left out: text.py and translation.py, which need the package datasets")
        parts = parts_of(["images.py", "gpt.py"])
    if options.count == 1:
        tell("- left out: what GPUs send each other, and pipelines, as there is one GPU")
        parts["ddp"] = [(check_one_process,)]
    if options.device == "cpu":
        torch.set_num_threads(1)  # as many as the scripts have
        tell("- a rehearsal: what needs a GPU runs, but says nothing")
    for name in names:
        begin = time.monotonic()
        for check, *arguments in checks_of(parts, name):
            attempt(" ".join([name.split(":")[0], *map(str, arguments)]), check, *arguments)
        tell(f"- part {name}: {time.monotonic() - begin:.0f} s")
    sys.exit(f"failed: {', '.join(failures)}" if failures else 0)


if __name__ == "__main__":
    main()
