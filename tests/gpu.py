"""Prove and measure the scripts on the GPUs of this machine, part by part and without a network.

    python tests/gpu.py                     # all parts; appends what it ran and found to gpu.md
    python tests/gpu.py --only stops gpt:8  # some of them; of gpt the check at batch 8

    check      tools/check watches scripts of each folder
    losses     the losses of each task are those of the CPU, in each precision, and compiled
    stops      a stop and a resume, by tools/check; a killed process ends the others
    processes  with several GPUs: the losses of scripts of each folder are those of the CPU
    ranks      with one GPU: check, stops and processes with 2 and 4 processes on it
    gpt        GPT-2 at batch 8, 32 and 64, beside a plain loop of the same model

In `ranks`, copies of the scripts do not refuse to share a GPU. This needs NCCL 2.30, of torch 2.14
or by LD_PRELOAD. A line says what is left out, and why.
"""

import argparse
import contextlib
import ctypes
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
SIZES = {  # a small case of each script
    # At the default rate, Adam's first steps turn a rounding into 3% of the cnn's loss. Batches
    # divide by up to 6 processes, and by 8.
    "images": "--model cnn --batch_size 120 --learning_rate 3e-4",
    "gpt": "--d_model 128 --num_layers 2 --seq_len 64 --batch_size 48 --dataset tokens",
    "text": "--model transformer --seq_len 64",
    "translation": "--seq_len 16",
    "gpt2": "--vocab_size 50304 --d_model 768 --n_heads 12 --num_layers 12 --seq_len 1024",
}
STEPS = {"loop": "--max_steps 24", "rows": "--max_steps 24 --eval_every 12"}
NUM_TOKENS = 1 << 22  # of a made-up text
RANKS = (2, 4)  # processes that share a GPU
TIMEOUT = 300  # seconds of a command
# A number of bf16 is rounded by up to 2^-9, one of TF32 or fp16 by 2^-12. In the first 24 steps
# such errors do not yet grow by more than 25 times. Later they may.
PRECISIONS = {"fp32": 2e-3, "tf32": 1e-2, "bf16": 5e-2, "fp16": 1e-2}
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
# Each process takes few blocks of the GPU that they share, the only one.
SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}
TOO_FEW = re.compile(r"^    if .*:\n(?=.*GPU\(s\)(?:, not| are too few))", re.M)
TORCHRUN = "-m torch.distributed.run --standalone --nproc_per_node={count} --"
LAUNCH = {"multigpu": "--num_gpus {count}", "multinode": TORCHRUN, "hybrid": TORCHRUN}
PARALLEL = {  # script: more flags
    "multigpu/images.py": "",
    "multinode/images.py": "--comm_hook bf16",
    "multinode/gpt.py": "--grad_accum_steps 3",
    "hybrid/images.py": "--num_stages 2",
    "hybrid/gpt_fsdp.py": "--shard_size 2",
    "hybrid/gpt_pipeline.py": "--num_stages 2",
    "hybrid/gpt_tensor.py": "--tensor_size 2",
}
IMAGES, GPT = "singlegpu/images.py", "singlegpu/gpt.py"
options = None  # of the command line; `sharing` is true in the part `ranks`


# == Commands, in a folder of their own ==
def tell(*lines):
    """Prints the lines, and appends them to the report at once."""
    print(*lines, sep="\n", flush=True)
    with open(options.out, "a") as file:
        file.writelines(f"{line}\n" for line in lines)


def words_of(script, words, count):
    """Returns what follows `python` where a user starts a script with so many processes."""
    folder = Path(script).parent.name
    launch = LAUNCH.get(folder, "").format(count=count).split()
    return [script, *launch, *words] if folder == "multigpu" else [*launch, script, *words]


def execute(script, words, count, environment):
    """Runs a script as a user does. Returns (exit status, stdout, stderr)."""
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    how |= {"env": os.environ | environment, "start_new_session": True}
    process = subprocess.Popen([sys.executable, *words_of(script, words, count)], **how)
    try:
        out, err = process.communicate(timeout=TIMEOUT)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # it took too long, or left something behind
    return process.returncode, out, err


def run(script, words="", count=1, variables=None, status=0):
    """Runs a script to this status (None: any but 0). Returns its log's rows, stdout, stderr."""
    environment = (variables or {}) | (SHARING if options.sharing else {})
    path = changed(script) if options.sharing and count > 1 else str(ROOT / script)
    (log := Path("log.jsonl")).unlink(missing_ok=True)
    more = [] if "check" in script else ["--log", str(log)]
    begin = time.monotonic()
    ended, out, err = execute(path, [*words.split(), *more], count, environment)
    shown = [f"{name}={value!r}" for name, value in environment.items()]
    shown = " ".join([*shown, "python", script, words]).replace(f"{os.getcwd()}/", "")
    seconds = time.monotonic() - begin
    tell(f"- ran `{shown}`, {count} process{'es' * (count > 1)}, {seconds:.0f} s")
    if ended != status and (status is not None or ended == 0):
        raise AssertionError(f"status {ended}\n{(out + err)[-2000:]}")
    rows = list(map(json.loads, log.read_text().splitlines())) if log.exists() else []
    return rows, out, err


def changed(script, old="", new=""):
    """Returns the path of a copy, in which a text is replaced; in `ranks` it may share a GPU."""
    text = (ROOT / script).read_text()
    assert old in text, f"{script} has no {old!r}"
    text = text.replace(old, new) if old else text
    if options.sharing:
        text = TOO_FEW.sub("    if False:\n", text)
        text = text.replace("torch.device(rank if ON_GPU", "torch.device(0 if ON_GPU")
    copy = Path(tempfile.mkdtemp(prefix="changed_", dir=os.getcwd()), *Path(script).parts[-2:])
    copy.parent.mkdir()
    copy.write_text(text)
    return str(copy)


# == Checks. A command is what run() takes: (script, flags, processes, variables). ==
def check_copies(script, words, count, *more):
    """tools/check finds nothing wrong in the first steps: copies, shares, averaging, order."""
    path = changed(script) if options.sharing else str(ROOT / script)
    command = [sys.executable, *words_of(path, f"{words} --max_steps 20".split(), count)]
    out = run("tools/check", " ".join(["--steps 8", *more, "--", *command]))[1]
    found = re.findall(r"^(?:ok|warning|not seen) .*", out, re.M)
    wrong = [f"- {line}" for line in found if line[:2] != "ok"]
    tell(f"- ok: {len(found) - len(wrong)} kinds", *wrong)


def check_losses(*cases):
    """The losses are those of the first command, up to rounding."""
    expected, wrong = None, []
    for tolerance, *command in cases:
        rows, names = run(*command)[0], ("train_loss", "val_loss")
        device = rows[0]["device"]
        told = f"this must run on the CPU, not on {device}"
        assert ON_CPU not in command or device == "CPU", told
        losses = [row[name] for row in rows if row["rank"] == 0 for name in names]
        expected = expected or losses
        first, speed = f"{expected[-1]:.4f} of the first", f"{rows[-1]['samples/s']:,.0f} samples/s"
        peak = f"largest peak {max(row['peak_MB'] for row in rows):.0f} MB"
        tell(f"- validation loss {losses[-1]:.4f} on {device}, {first}; {speed}; {peak}")
        if not np.allclose(losses, expected, rtol=tolerance, atol=0):
            wrong.append(" ".join(command[:2]))
    assert not wrong, f"other losses: {', '.join(wrong)}"


def check_killed(script):
    """A process that is killed ends the run."""
    step_ends = "        bar.update()\n"
    kill = f"        (rank, step) == (1, 4) and os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
    words = f"{SIZES['images']} {STEPS['rows']}"
    err = run(changed(script, step_ends, step_ends + kill), words, 2, status=None)[2]
    told = re.findall(r".*\bSIGKILL\b.*", err) or ["nothing"]
    tell(f"- it said: {told[-1].strip()[:200]}")


def check_gpt(batch):
    """GPT-2 (124 M) in bf16, compiled, beside a loop of the same model without our timers."""
    size = f"{SIZES['gpt2']} --batch_size {batch}"
    loop = ("tests/helpers/plain_gpt.py", f"{size} {STEPS['loop']}")
    steps = "--max_steps 72 --eval_every 24"  # the last row counts
    ours = (GPT, f"{size} --dataset tokens --precision bf16 --compile {steps}")
    before, row, after = (run(*command)[0][-1] for command in (loop, ours, loop))
    of_loop = statistics.mean(each["samples/s"] for each in (before, after)) * row["seq_len"]
    speed = row["samples/s"] * row["seq_len"]  # tokens/s
    # of a token: 6 a parameter, and the attention (Chowdhery et al. 2022, "PaLM", appendix B)
    flops = 6 * row["parameters"] + 12 * row["num_layers"] * row["d_model"] * row["seq_len"]
    tflops = flops * speed / 1e12  # a second
    told = f"{tflops:.3g} TFLOP/s, {tflops / before['matmul']:.1%} of a matmul's"
    tell(f"- {speed:,.0f} tokens/s, {speed / of_loop:.2f} of the loop's {of_loop:,.0f}; {told}")


# == Parts: tables of checks ==
def cases_of(*counts):
    """The scripts of several processes: (script, flags, processes). Two stages take two GPUs."""
    for script, more in PARALLEL.items():
        words = f"{SIZES['gpt' if 'gpt' in script else 'images']} {more}"
        for n in counts:
            yield script, words, n // 2 if script == "hybrid/images.py" else n


def of_check(*counts):
    cases = [(IMAGES, SIZES["images"], 1), (GPT, SIZES["gpt"], 1), *cases_of(*counts)]
    return {case[0]: (check_copies, *case) for case in cases}


def of_losses(name):
    """A script on the CPU, in each precision, and compiled."""
    script, words = f"singlegpu/{name}.py", f"{SIZES[name]} {STEPS['rows']}"
    cases = [(1, script, f"{words} --precision fp32", 1, ON_CPU)]
    cases += [(bound, script, f"{words} --precision {each}") for each, bound in PRECISIONS.items()]
    return check_losses, *cases, (1e-2, script, f"{words} --compile")


def of_processes(*counts):
    """Each script with so many processes on the CPU, and on GPUs."""
    checks = {}
    for script, words, n in cases_of(*counts):
        command = (script, f"{words} {STEPS['rows']} --precision fp32", n)
        checks[f"{script} {n}"] = (check_losses, (1, *command, ON_CPU), (2e-2, *command))
    return checks


def parts_of(count):
    """Returns {part: {name: (check, its arguments)}}, for so many GPUs."""
    several = (count,) if count > 1 else ()
    killed = {f"killed {name}": (check_killed, name) for name in [*PARALLEL][:2]}
    # An mlp: cuDNN adds up in no fixed order, so that two runs of a cnn have not the same weights.
    # A script looks once a second whether it is to stop: 8 steps would be over before.
    more = ("--resume", "--steps 20")
    resumed = (IMAGES, f"{SIZES['images']} --model mlp --snapshot {{tmp}}/s", 1, *more)
    return {
        "check": of_check(*several),
        "losses": {name: of_losses(name) for name in ("images", "gpt", "text", "translation")},
        "stops": {"resumed": (check_copies, *resumed)} | (killed if several else {}),
        "processes": of_processes(*several),
        "ranks": of_check(2) | killed | of_processes(*RANKS),
        "gpt": {str(batch): (check_gpt, batch) for batch in (8, 32, 64)},
    }


def checks_of(parts, name):
    """Returns the checks of a part, or those of part:check. None: there are none of this name."""
    part, _, word = name.partition(":")
    checks = parts.get(part)
    if word and checks:
        checks = {each: check for each, check in checks.items() if word in each.split()}
    return checks or (None if word else checks)


def run_part(name, checks):
    """Runs these checks of a part. Returns the names of those that did not hold."""
    begin, failures = time.monotonic(), []
    for each, (check, *arguments) in checks.items():
        tell("", f"**{name}: {each}**: {check.__doc__.splitlines()[0]}", "")
        try:
            check(*arguments)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            failures.append(f"{name} {each}")
            tell(f"- **failed**: {error}")
    tell(f"- part {name}: {time.monotonic() - begin:.0f} s")
    return failures


def gpus():
    """Returns how many GPUs there are, the name of the first, and the version of NCCL."""
    nccl = ctypes.c_int()  # of the library that is loaded, which may be newer than torch's
    with contextlib.suppress(OSError):  # none, or a part of torch
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(nccl))
    gpu = torch.accelerator.current_accelerator(check_available=True)
    name = gpu and torch.get_device_module(gpu).get_device_name()
    return torch.accelerator.device_count(), name, nccl.value


def main(words=None):
    global options
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="parts to run, or part:check")
    parser.add_argument("--out", type=os.path.abspath, default="gpu.md", help="append to it")
    options = parser.parse_args(words)
    count, gpu, nccl = gpus()
    if not count:
        parser.error("torch sees no GPU here")
    parts, failures = parts_of(count), []
    chosen = {name: checks_of(parts, name) for name in options.only or parts}
    for name, checks in chosen.items():
        if checks is None:
            parser.error(f"there is no {name}")
    tell("", f"## {count} x {gpu}, torch {torch.__version__}, NCCL {nccl}, {date.today()}", "")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("tokens").mkdir()  # random ones, 0 to 15
        for name, size in {"train": NUM_TOKENS, "val": 1 << 14}.items():
            np.save(f"tokens/{name}.npy", np.random.randint(16, size=size, dtype=np.uint16))
        for name, checks in chosen.items():
            part = name.partition(":")[0]
            options.sharing = part == "ranks"
            if options.sharing and (count > 1 or nccl < 23000):
                tell("", "- left out: ranks, which is for one GPU and NCCL 2.30")
            else:
                failures += run_part(part, checks)
    sys.exit(f"failed: {', '.join(failures)}" if failures else 0)


if __name__ == "__main__":
    main()
