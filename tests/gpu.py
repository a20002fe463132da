"""Prove and measure the scripts on the GPUs of this machine, in one command without a network.

    python tests/gpu.py                # some 8 minutes; writes gpu.md: what held, rows, speeds
    python tests/gpu.py --dry_run      # prints what it would run on two GPUs
    python tests/gpu.py --device cpu   # all of it but CUDA's own checks, at tiny sizes

It needs torch 2.11 or newer. It says what it leaves out: with one GPU nothing is sent, and without
the package `datasets` text.py and translation.py cannot run.
"""

import argparse
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
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
SHORT = {  # a short run of each script
    "images.py": "--model cnn --batch_size 128 --max_steps 24",
    "autoencoder.py": "--batch_size 64 --max_steps 24",
    "gpt.py": "--d_model 128 --num_layers 2 --seq_len 64 --batch_size 32 --max_steps 24",
    "text.py": "--model transformer --seq_len 64 --max_steps 24",
    "translation.py": "--seq_len 16 --max_steps 24",
}
TINY = {
    "images.py": "--model mlp --batch_size 24 --max_steps 9",
    "autoencoder.py": "--batch_size 8 --max_steps 3",
    "gpt.py": "--d_model 16 --num_layers 1 --seq_len 16 --batch_size 24 --max_steps 9",
    "text.py": "--seq_len 16 --batch_size 24 --max_steps 9",
    "translation.py": "--model lstm --seq_len 8 --batch_size 24 --max_steps 9",
}
SCRIPT = "multigpu/images.py"
GPT2 = "--vocab_size 50304 --d_model 768 --n_heads 12 --num_layers 12 --seq_len 1024 --batch_size 8"
LAUNCH = {
    "singlegpu": "",
    "multigpu": "--num_gpus {count}",
    "multinode": "-m torch.distributed.run --standalone --nproc_per_node={count} --",
}
NUMBERS = ("train_loss", "val_loss", "samples/s", "tokens/s", "TFLOP/s", "of_matmul")  # of logs
found, failures = [], []  # lines of the report; names of the checks that did not hold
options = None  # of the command line


def tell(line):
    if not options.dry_run:
        print(line, flush=True)
        found.append(line)


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


def run(script, words, count=1, **environment):
    """Returns the rows of the log, what was printed, and what was written to stderr."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.jsonl")
        process = start(script, words, log, count, environment)
        if not process:
            return [dict.fromkeys(NUMBERS, 1.0) | {"rank": 0}], "", ""
        out, err = process.communicate(timeout=600)
        if process.returncode:
            raise AssertionError(f"{script} {words}: status {process.returncode}\n{err[-2000:]}")
        return list(map(json.loads, log.read_text().splitlines())), out, err


class DryRun(Exception):
    """Ends a check of which nothing was run."""


def rate(rows):
    """Samples/s of the last epoch."""
    return float(rows[-1]["samples/s"])


def losses(rows):
    return [float(row[name]) for row in rows for name in ("train_loss", "val_loss")]


def near(values, others, tolerance):
    return all(abs(a / b - 1) < tolerance for a, b in zip(values, others, strict=True))


def check_losses(script):
    """On a GPU the losses of the CPU, to the rounding of each precision; and compiled."""
    words = f"{options.sizes[script]} --epochs 2"
    script = f"singlegpu/{script}"
    cases = {"CPU": ("", {"CUDA_VISIBLE_DEVICES": ""}, 0)}
    cases["fp32 without TF32"] = "", {"NVIDIA_TF32_OVERRIDE": "0"}, 2e-3
    cases["fp32"] = "", {}, 2e-2
    cases["bf16"] = "--precision bf16", {}, 5e-2
    cases["compiled"] = "--compile", {}, 2e-2
    told, expected, wrong = [], None, []
    for name, (more, environment, tolerance) in cases.items():
        rows = run(script, f"{words} {more}", **environment)[0]
        expected = expected or losses(rows)
        told.append(f"{name} {losses(rows)[-1]:.4f} ({rate(rows):,.0f} samples/s)")
        if name != "CPU" and not near(losses(rows), expected, tolerance):
            wrong.append(name)
    tell(f"- {script} {words}: validation loss {', '.join(told)}")
    assert not wrong, f"other losses than on the CPU: {', '.join(wrong)}"


def check_resume():
    """Stopped by SIGTERM and started again, a run ends with the loss of an undisturbed one."""
    words = f"{options.sizes['images.py']} --epochs 6"
    with tempfile.TemporaryDirectory() as folder:
        snapshot = Path(folder, "run.pt")
        more = f"{words} --snapshot {snapshot} --snapshot_every 4"
        process = start("singlegpu/images.py", more)
        if not process:
            raise DryRun
        while not snapshot.exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=600)
        assert process.returncode in (0, 128 + signal.SIGTERM), process.returncode
        place = torch.load(snapshot, weights_only=True)["progress"]
        resumed = run("singlegpu/images.py", more)[0]
    whole = run("singlegpu/images.py", words)[0]
    tell(
        f"- stopped in epoch {place['epoch']}, step {place['step']}, and resumed: validation loss "
        f"{losses(resumed)[-1]:.6f}, undisturbed {losses(whole)[-1]:.6f}"
    )
    assert near(losses(resumed)[-1:], losses(whole)[-1:], 1e-2)


def check_phases():
    """The phases of the later epochs are the time between the lines that the script prints."""
    words = options.sizes["images.py"].replace("--max_steps 24", "--max_steps 400")
    process = start("singlegpu/images.py", words + " --epochs 6")
    if not process:
        raise DryRun
    seconds, moments = [], []
    for line in process.stdout:
        if re.match(r" +\d+ ", line):
            moments.append(time.perf_counter())
            seconds.append(float(line.split()[5]))
    assert process.wait(timeout=600) == 0, process.stderr.read()
    wall = moments[-1] - moments[0]
    tell(f"- phases of 5 epochs: {sum(seconds[1:]):.2f} s of {wall:.2f} s of wall time")
    assert abs(sum(seconds[1:]) / wall - 1) < 0.02


def check_synchronization(script):
    """No line of a script waits for the GPU in each step; the checks every 8 steps may."""
    words = options.sizes[script].rsplit("--max_steps", 1)[0]
    with tempfile.TemporaryDirectory() as folder:
        wrapper = Path(folder, "watch_synchronization.py")
        wrapper.write_text(
            "import runpy, sys, torch, warnings\nwarnings.simplefilter('always')\n"
            "torch.cuda.set_sync_debug_mode('warn')\nsys.argv = sys.argv[1:]\n"
            "runpy.run_path(sys.argv[0], run_name='__main__')\n"
        )
        more = f"{words} --epochs 1 --max_steps"
        errors = [run(f"{wrapper} singlegpu/{script}", f"{more} {steps}")[2] for steps in (8, 40)]
    pattern = re.compile(rf"{script}:(\d+): UserWarning: called a synchronizing")
    few, many = ([*map(int, pattern.findall(text))] for text in errors)
    lines = sorted(line for line in set(many) if many.count(line) - few.count(line) >= 32)
    tell(f"- {script}: {len(set(many))} lines wait for the GPU, in each step: {lines or 'none'}")
    assert not lines, "a step waits for the GPU"


def check_stopwatch():
    """What the stopwatch costs: samples/s beside a copy that records no events, in turn."""
    text = (ROOT / "singlegpu/images.py").read_text()
    words = options.sizes["images.py"].replace("--max_steps 24", "--max_steps 200") + " --epochs 3"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "singlegpu/images.py")
        copy.parent.mkdir()
        copy.write_text(text.replace('self.cuda = device.type == "cuda"', "self.cuda = False"))
        assert copy.read_text() != text
        ratios = []
        for _ in range(3):
            timed, bare = (rate(run(path, words)[0]) for path in ("singlegpu/images.py", str(copy)))
            ratios.append(timed / bare)
    tell(f"- the stopwatch leaves {statistics.median(ratios):.1%} of the samples/s of images.py")


def check_one_process_of_nccl():
    """DDP with one process has the losses of singlegpu."""
    words = f"{options.sizes['images.py']} --epochs 2"
    one = run("singlegpu/images.py", words)[0]
    for folder in ("multigpu", "multinode"):
        rows = run(f"{folder}/images.py", words)[0]
        assert near(losses(rows), losses(one), 2e-2), folder
    tell("- multigpu and multinode with one process: the losses of singlegpu")


def check_all_processes():
    """All GPUs: one loss curve; comm beside DDP's own logger; what the hook hides is hidden."""
    count, words = options.count, f"{options.sizes['images.py']} --epochs 2"
    one, all_of_them = (run("multigpu/images.py", words, each)[0] for each in (1, count))
    first = [row for row in all_of_them if row["rank"] == "0"]
    assert near(losses(first), losses(one), 2e-2), "another loss curve"
    model = "mlp" if options.device == "cpu" else "vgg11 --learning_rate 1e-4"
    words = f"--model {model} --batch_size {32 * count} --max_steps 40 --epochs 1"
    with tempfile.TemporaryDirectory() as folder:
        rows = run(f"tests/watch.py {folder} multinode/images.py", words, count)[0]
        if options.dry_run:
            raise DryRun
        seen = json.loads(Path(folder, "0.json").read_text())  # of rank 0
    for name in ("comm", "comm_total"):
        ours, ddps = 1000 * float(rows[0][name]) / 40, 1000 * seen[name]
        tell(f"- {count} processes, {model}: {name} {ours:.2f} ms a step; DDP's logger {ddps:.2f}")
    text, words = (ROOT / SCRIPT).read_text(), words[:-1] + "3"
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder, "multigpu/images.py")
        bare.parent.mkdir()
        text = text.replace("    ddp_model.register_comm_hook(None, watch.hook)\n", "")
        bare.write_text(text.replace("at=watch.backward_end if last else None", "at=None"))
        ratios = []
        for _ in range(3):
            hooked, plain = (rate(run(script, words, count)[0]) for script in (SCRIPT, str(bare)))
            ratios.append(hooked / plain)
    ratio = statistics.median(ratios)
    tell(f"- with the hook {ratio:.1%} of the samples/s of DDP without a hook")
    assert options.device == "cpu" or ratio > 0.95, "the hook takes DDP's overlap away"


PROFILED = """import os, runpy, sys, torch
sys.argv = sys.argv[1:]
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit:
        pass
if os.environ["RANK"] == "0":
    profiler.export_chrome_trace(os.path.join(os.path.dirname(__file__), "trace.json"))
"""


def check_overlap():
    """A profiler's trace: the share of NCCL's kernels during which others run on the same GPU."""
    words = f"--model vgg11 --learning_rate 1e-4 --batch_size {32 * options.count}"
    with tempfile.TemporaryDirectory() as folder:
        wrapper = Path(folder, "profiled.py")
        wrapper.write_text(PROFILED)
        more = f"{words} --max_steps 20 --epochs 1"
        row = run(f"{wrapper} multinode/images.py", more, options.count)[0][0]
        if options.dry_run:
            raise DryRun
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    spans = {True: [], False: []}  # of NCCL's kernels, and of the others
    for event in kernels:
        spans["nccl" in event["name"].lower()].append((event["ts"], event["ts"] + event["dur"]))
    both, others = 0.0, sorted(spans[False])
    for start, end in spans[True]:
        for first, last in others:
            both += max(0.0, min(end, last) - max(start, first))
    share = both / sum(end - start for start, end in spans[True])
    told = 1 - float(row["comm"]) / float(row["comm_total"])
    tell(
        f"- in a profiler's trace other kernels run for {share:.0%} of the time of NCCL's; the "
        f"script says that {told:.0%} is hidden"
    )
    assert share > 0.1, "nothing overlaps"


def check_gpt2():
    """GPT-2 (124 M) in bf16, compiled, beside a loop of the same model without our timers."""
    size, steps = GPT2, 40
    if options.device == "cpu":
        size, steps = options.sizes["gpt.py"].rsplit("--max_steps", 1)[0], 9
    words = f"{size} --precision bf16 --max_steps {steps} --epochs 2 --compile"
    with tempfile.TemporaryDirectory() as folder:
        for name, count in (("train", 1 << 20), ("val", 1 << 14)):
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(16, (count,), generator=generator, dtype=torch.int16)
            ids.numpy().tofile(f"{folder}/{name}.bin")
        row = run("singlegpu/gpt.py", f"{words} --dataset {folder}")[0][-1]
    if options.dry_run:
        raise DryRun
    plain = plain_gpt(size, steps)
    tell(
        f"- gpt.py {size}: {row['tokens/s']:,.0f} tokens/s, {row['TFLOP/s']:.1f} TFLOP/s, "
        f"{row['of_matmul']:.0%} of a plain matmul; a plain loop {plain:,.0f} tokens/s"
    )


def plain_gpt(size, steps):
    """Tokens/s of gpt.py's model in a loop of nothing but a training step."""
    spec = importlib.util.spec_from_file_location("gpt", ROOT / "singlegpu/gpt.py")
    gpt = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpt)
    device = torch.device(options.device)
    sizes = dict(re.findall(r"--(\w+) (\d+)", size))
    args = {"vocab_size": 50304, "n_heads": 4} | {name: int(value) for name, value in sizes.items()}
    args = argparse.Namespace(**args, dropout=0.0)
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # on GPUs, fp32 is TF32
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
    return steps * args.batch_size * args.seq_len / (now() - moment)


def now():
    """The moment (s) at which the GPU has done what it was given."""
    if options.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def check_images():
    """Rows for results.md: images/s of the cnn and of vgg11."""
    cases = [f"{options.sizes['images.py']} --epochs 2"]
    if options.device == "cuda":
        cases = [
            f"--model {model} --batch_size 256 --epochs 3 --precision {precision} {more}"
            for model, more in (("cnn", ""), ("vgg11", "--learning_rate 1e-4 --max_steps 100"))
            for precision in ("fp32", "bf16")
        ]
    for words in cases:
        _, out, _ = run("singlegpu/images.py", words)
        lines = [line for line in out.splitlines() if line.startswith("|")]
        found.extend(["", f"    python singlegpu/images.py {words}", "", *lines])


def check_quantize():
    """quantize/gpt.py runs on what gpt.py has trained."""
    with tempfile.TemporaryDirectory() as folder:
        snapshot = Path(folder, "gpt.pt")
        run("singlegpu/gpt.py", f"{options.sizes['gpt.py']} --snapshot {snapshot}")
        words = [sys.executable, "quantize/gpt.py", "--snapshot", str(snapshot), "--rounds", "1"]
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if options.device == "cpu" else {})
        if options.dry_run:
            print(*words)
            raise DryRun
        pipes = {"capture_output": True, "text": True, "cwd": ROOT, "env": environment}
        done = subprocess.run(words, timeout=600, **pipes)
    assert done.returncode == 0, done.stderr[-2000:]
    found.extend(["", *[line for line in done.stdout.splitlines() if line.startswith("|")]])


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


def main():
    global options
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--dry_run", action="store_true", help="print the commands, run none")
    parser.add_argument("--out", default="gpu.md", help="file to write")
    options = parser.parse_args()
    options.device = options.device or ("cuda" if options.dry_run else device)
    if options.device == "cuda" and device == "cpu" and not options.dry_run:
        sys.exit("torch sees no GPU here; --device cpu runs what needs none")
    options.sizes = SHORT if options.device == "cuda" else TINY
    options.count = torch.cuda.device_count() if device == "cuda" else 2
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    tell(f"{max(1, torch.cuda.device_count())} x {name}, torch {torch.__version__}")
    scripts = list(options.sizes)
    if not importlib.util.find_spec("datasets"):
        tell("- left out: text.py and translation.py, which need the package `datasets`")
        scripts = scripts[:3]
    for script in scripts:
        attempt(f"losses of {script}", check_losses, script)
    attempt("resume", check_resume)
    attempt("phases", check_phases)
    for script in scripts if options.device == "cuda" else []:
        attempt(f"synchronization in {script}", check_synchronization, script)
    attempt("stopwatch", check_stopwatch)
    attempt("one process of DDP", check_one_process_of_nccl)
    if options.count > 1:
        attempt("all processes", check_all_processes)
        if options.device == "cuda":
            attempt("overlap", check_overlap)
    else:
        tell("- left out: all that several GPUs send each other, as there is one")
    attempt("GPT-2", check_gpt2)
    attempt("images/s", check_images)
    attempt("quantize", check_quantize)
    if not options.dry_run:
        Path(options.out).write_text("\n".join(found) + "\n")
    sys.exit(f"failed: {', '.join(failures)}" if failures else 0)


if __name__ == "__main__":
    main()
