"""Prove and measure the scripts on the GPUs of this machine, part by part and without a network.

    python tests/gpu.py                     # all parts; appends what it ran and found to gpu.md
    python tests/gpu.py --only stops,gpt:8  # some of them; of gpt the check at batch 8
    python tests/gpu.py --rehearse          # each kind of command, tiny, on emulated GPUs (g++)

    check      tools/check.py watches scripts of each folder
    losses     the losses of each task are those of the CPU, in each precision, and compiled
    stops      a stop and a resume, by tools/check.py; a killed process ends the others
    processes  with several GPUs: the losses of scripts of each folder are those of the CPU
    ranks      with one GPU: check, stops and processes with 2 and 4 processes on it
    gpt        GPT-2 at batch 8, 32 and 64, beside a plain loop of the same model

In `ranks`, copies of the scripts do not refuse to share a GPU. This needs NCCL 2.30, of torch 2.14
or by LD_PRELOAD. A line says what is left out, and why.
"""

import argparse
import atexit
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
TABLES = "--dataset tables --data_dir {folder}/data --seq_len 8 --batch_size 24"
SIZES = {  # a small case of each script, and one of a rehearsal, whose few steps change the loss
    # At the default rate, Adam's first steps turn a rounding into 3% of the cnn's loss. Batches
    # divide by up to 6 processes, and by 8.
    "images": (
        "--model cnn --batch_size 120 --learning_rate 3e-4",
        "--model cnn --batch_size 24 --learning_rate 3e-3 --dataset mnist --data_dir {folder}/data",
    ),
    "gpt": (
        "--d_model 128 --num_layers 2 --seq_len 64 --batch_size 48 --dataset {folder}/tokens",
        "--d_model 16 --num_layers 2 --seq_len 16 --batch_size 24 --dataset {folder}/tokens "
        "--vocab_size 64 --learning_rate 1e-2",
    ),
    "text": ("--model transformer --seq_len 64", f"{TABLES} --model transformer"),
    "translation": ("--seq_len 16", f"{TABLES} --source number --target name"),
    "gpt2": (
        "--vocab_size 50304 --d_model 768 --n_heads 12 --num_layers 12 --seq_len 1024",
        "--vocab_size 64 --d_model 16 --n_heads 2 --num_layers 1 --seq_len 16",
    ),
    "loop": ("--max_steps 24", "--max_steps 4 --warmup 2 --matmul 64"),
}
# A number of bf16 is rounded by up to 2^-9, one of TF32 or fp16 by 2^-12. In the first 24 steps
# such errors do not yet grow by more than 25 times. Later they may.
PRECISIONS = {"fp32": 2e-3, "tf32": 1e-2, "bf16": 5e-2, "fp16": 1e-2}
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "EMU_DEVICES": "0"}
# Each process takes few blocks of the GPU that they share, the only one.
SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "EMU_DEVICES": "1"}
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
}
IMAGES, GPT = "singlegpu/images.py", "singlegpu/gpt.py"
failures = []  # names of the checks that did not hold
options = None  # of the command line, and what is the same in all commands


# == Commands ==
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
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    place = {"cwd": options.folder, "env": os.environ | environment, "start_new_session": True}
    process = subprocess.Popen([sys.executable, *words_of(script, words, count)], **place, **pipes)
    try:
        out, err = process.communicate(timeout=options.timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # it took too long, or left something behind
    return process.returncode, out, err


def execute_in_forks(script, words, count, environment):
    """The same without the seconds of each import, and without torchrun."""
    conftest = sys.modules["conftest"]
    commands, envs = conftest.forks_of(script, words, count, **environment)
    statuses, outs, errs = zip(*conftest.run_all(commands, envs, options.folder, options.timeout))
    return max(map(abs, statuses)), "".join(outs), "".join(errs)


def run(script, words="", count=1, variables=None, status=0):
    """Runs a script to this status (None: any but 0). Returns its log's rows, stdout, stderr."""
    path = str(ROOT / script)
    environment = options.variables | (variables or {})
    if not options.rehearse:
        environment.pop("EMU_DEVICES", None)
    (log := Path(options.folder, "log.jsonl")).unlink(missing_ok=True)
    more = [] if "check" in script else ["--log", str(log)]
    if options.sharing and count > 1:
        path = changed(path)
    begin = time.monotonic()
    ended, out, err = options.execute(path, [*words.split(), *more], count, environment)
    seconds = time.monotonic() - begin
    shown = [f"{name}={value!r}" for name, value in environment.items()]
    shown = " ".join([*shown, "python", script, words]).replace(f"{options.folder}/", "")
    tell(f"- ran `{shown}`, {count} process{'es' * (count > 1)}, {seconds:.0f} s")
    if ended != status and (status is not None or ended == 0):
        raise AssertionError(f"status {ended}\n{(out + err)[-2000:]}")
    rows = list(map(json.loads, log.read_text().splitlines())) if log.exists() else []
    return rows, out, err


def changed(script, *replacements):
    """Returns the path of a copy, in which texts are replaced; in `ranks` it may share a GPU."""
    text = (ROOT / script).read_text()
    for old, new in replacements:
        assert old in text, f"{script} has no {old!r}"
        text = text.replace(old, new)
    if options.sharing:
        text = TOO_FEW.sub("    if False:\n", text)
    copy = Path(tempfile.mkdtemp(prefix="changed_", dir=options.folder), *Path(script).parts[-2:])
    copy.parent.mkdir()
    copy.write_text(text)
    return str(copy)


def in_rows(count, steps):
    """The flags of a run of so many rows, each after so many steps; few in a rehearsal."""
    steps = 4 if options.rehearse else steps
    return f"--max_steps {count * steps} --eval_every {steps}"


# == Checks. A command is what run() takes: (script, flags, processes, variables). ==
def check_copies(script, words, count, *more):
    """tools/check.py finds nothing wrong in the first steps: copies, shares, averaging, order."""
    path = changed(script) if options.sharing else str(ROOT / script)
    command = [sys.executable, *words_of(path, f"{words} --max_steps 20".split(), count)]
    out = run("tools/check.py", " ".join(["--steps 8", *more, "--", *command]))[1]
    found = re.findall(r"^(?:ok|warning|not seen) .*", out, re.M)
    wrong = [f"- {line}" for line in found if line[:2] != "ok"]
    tell(f"- ok: {len(found) - len(wrong)} kinds", *wrong)


def check_losses(*cases):
    """The losses are those of the first command, up to rounding."""
    expected, wrong = None, []
    for tolerance, *command in cases:
        rows, names = run(*command)[0], ("train_loss", "val_loss")
        losses = [row[name] for row in rows if row["rank"] == 0 for name in names]
        expected = expected or losses
        tell(
            f"- validation loss {losses[-1]:.4f} on {rows[0]['device']}, "
            f"{expected[-1]:.4f} of the first; {rows[-1]['samples/s']:,.0f} samples/s; "
            f"largest peak {max(row['peak_MB'] for row in rows):.0f} MB"
        )
        if not np.allclose(losses, expected, rtol=tolerance, atol=0):
            wrong.append(" ".join(command[:2]))
    assert not wrong, f"other losses: {', '.join(wrong)}"


def check_resume(model):
    """Stopped and started again, a run takes the steps of an undisturbed one.

    A copy lets cuDNN add up in a fixed order: else two runs of a cnn need not have equal weights.
    """
    fixed = ("cudnn.benchmark = torch.version.hip is None", "cudnn.deterministic = True")
    words = f"{options.size['images']} --model {model} --batch_size 24 --snapshot {{tmp}}/s"
    check_copies(changed(IMAGES, fixed), words, 1, "--resume")


def check_killed(*folders):
    """A process that is killed ends the run."""
    step_ends = "        bar.update()\n"
    kill = f"        (rank, step) == (1, 4) and os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
    for folder in folders:
        words = f"{options.size['images']} {in_rows(2, 24)}"
        script = changed(f"{folder}/images.py", (step_ends, step_ends + kill))
        err = run(script, words, 2, status=None)[2]
        told = re.findall(r".*\bSIGKILL\b.*", err) or ["nothing"]
        tell(f"- it said: {told[-1].strip()[:200]}")


def check_gpt(batch):
    """GPT-2 (124 M) in bf16, compiled, beside a loop of the same model without our timers."""
    size = f"{options.size['gpt2']} --batch_size {batch}"
    tokens = f"--dataset {options.folder}/tokens --precision bf16 --compile"
    loop = ("tests/helpers/plain_gpt.py", f"{size} {options.size['loop']}")
    ours = (GPT, f"{size} {tokens} {in_rows(3, 24)}")
    before, row, after = (run(*command)[0][-1] for command in (loop, ours, loop))
    of_loop = statistics.mean(each["samples/s"] for each in (before, after)) * row["seq_len"]
    speed = row["samples/s"] * row["seq_len"]  # tokens/s
    # of a token: 6 a parameter, and the attention (Chowdhery et al. 2022, "PaLM", appendix B)
    flops = 6 * row["parameters"] + 12 * row["num_layers"] * row["d_model"] * row["seq_len"]
    tflops = flops * speed / 1e12  # a second
    told = (batch, f"{speed:,.0f}", f"{tflops:.3g}", f"{tflops / before['matmul']:.1%}")
    told = (*told, f"{of_loop:,.0f}", f"{speed / of_loop:.2f}")
    head = "batch | tokens/s | TFLOP/s | of a matmul | plain loop | ours to it".split(" | ")
    tell("", *["| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * 6, told)])


# == Parts: tables of checks ==
def cases_of(*counts):
    """The scripts of several processes: (script, flags, processes). Two stages take two GPUs."""
    for script, more in PARALLEL.items():
        words = options.size["gpt" if "gpt" in script else "images"]
        for n in [n // 2 if script == "hybrid/images.py" else n for n in counts]:
            yield script, f"{words} {more}", n


def of_check(*counts):
    cases = [(IMAGES, options.size["images"], 1), (GPT, options.size["gpt"], 1), *cases_of(*counts)]
    return {script: (check_copies, script, words, n) for script, words, n in cases}


def of_losses(name):
    """A script on the CPU, in each precision, and compiled."""
    script, words = f"singlegpu/{name}.py", f"{options.size[name]} {in_rows(1, 24)}"
    cases = [(1, script, f"{words} --precision fp32", 1, ON_CPU)]
    cases += [(bound, script, f"{words} --precision {each}") for each, bound in PRECISIONS.items()]
    return check_losses, *cases, (1e-2, script, f"{words} --compile")


def of_processes(*counts):
    """Each script with so many processes on the CPU, and on GPUs."""
    checks = {}
    for script, words, n in cases_of(*counts):
        words = f"{words} {in_rows(2, 24)} --precision fp32"
        cases = (1, script, words, n, ON_CPU), (2e-2, script, words, n)
        checks[f"{script} {n}"] = (check_losses, *cases)
    return checks


def parts_of(count):
    """Returns {part: {name: (check, its arguments)}}, for so many GPUs."""
    several = (count,) if count > 1 else ()
    ranks, killed = (4,) if options.rehearse else (2, 4), (check_killed, "multigpu", "multinode")
    resumes = {f"resume {model}": (check_resume, model) for model in ("mlp", "cnn")}
    shared = {f"check {name}": check for name, check in of_check(2).items()}
    shared |= {"killed": killed} | of_processes(*ranks)
    return {
        "check": of_check(*several),
        "losses": {name: of_losses(name) for name in ("images", "gpt", "text", "translation")},
        "stops": resumes | ({"killed": killed} if several else {}),
        "processes": of_processes(*several),
        "ranks": shared,
        "gpt": {str(batch): (check_gpt, batch) for batch in (8, 32, 64)},
    }


def checks_of(parts, name):
    """Returns the checks of a part or, for part:word, those with this word in their name."""
    part, _, word = name.partition(":")
    checks = parts.get(part, {}).items()
    return {each: check for each, check in checks if word in ("", *each.split())}


def set_up(folder):
    """Makes random tokens, 0 to 15. A rehearsal has tiny data, and forks on two emulated GPUs."""
    (folder / "tokens").mkdir()
    for name, count in {"train": 1 << (14 if options.rehearse else 22), "val": 1 << 14}.items():
        np.save(folder / f"tokens/{name}.npy", np.random.randint(16, size=count, dtype=np.uint16))
    if not options.rehearse:
        return
    sys.path.append(str(ROOT / "tests/helpers"))
    import conftest

    atexit.register(conftest.pytest_sessionfinish)
    conftest.write_mnist(folder / "data", num_test=47)  # validations are short
    conftest.write_tables(folder / "data/tables")
    options.execute, options.own_variables = execute_in_forks, {"EMU_DEVICES": "2"}
    options.own_variables["PYTHONPATH"] = str(ROOT / "tests/emulator")  # of what check.py starts


def run_part(name, checks):
    begin, options.sharing = time.monotonic(), name.startswith("ranks")
    if options.sharing and not options.may_share:
        tell("", "- left out: ranks, which is for one GPU and NCCL 2.30")
        return
    options.variables = options.own_variables | (SHARING if options.sharing else {})
    for each, (check, *arguments) in checks.items():
        each = f"{name.partition(':')[0]} {each}".strip()
        tell("", f"**{each}**: {check.__doc__.splitlines()[0]}", "")
        try:
            check(*arguments)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            failures.append(each)
            tell(f"- **{each} failed**: {error}")
    tell(f"- part {name}: {time.monotonic() - begin:.0f} s")


def main(words=None):
    global options
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="PARTS", help="parts to run, or part:check")
    parser.add_argument("--rehearse", action="store_true", help="at tiny sizes, on emulated GPUs")
    parser.add_argument("--out", type=os.path.abspath, default="gpu.md", help="append to it")
    options = parser.parse_args(words)
    failures.clear()
    gpu = torch.accelerator.current_accelerator(check_available=True)
    if not gpu and not options.rehearse:
        parser.error("torch sees no GPU here; --rehearse runs each command on emulated ones")
    count = 2 if options.rehearse else torch.accelerator.device_count()
    name = torch.get_device_module(gpu).get_device_name() if gpu else "emulated GPU"
    options.execute, options.own_variables = execute, {}
    options.sharing, options.timeout = False, 300  # seconds of a command
    nccl = ctypes.c_int()  # of the library that is loaded, which may be newer than torch's
    with contextlib.suppress(OSError):  # none, or a part of torch
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(nccl))
    options.may_share = options.rehearse or (count == 1 and nccl.value >= 23000)
    with tempfile.TemporaryDirectory() as options.folder:
        folder = Path(options.folder)
        sizes = {name: words[options.rehearse] for name, words in SIZES.items()}
        options.size = {name: words.format(folder=folder) for name, words in sizes.items()}
        parts = parts_of(count)
        names = options.only.split(",") if options.only else [*parts]
        if unknown := [name for name in names if not checks_of(parts, name)]:
            parser.error(f"--only: {', '.join(unknown)} is no part; they are {', '.join(parts)}")
        versions = f"torch {torch.__version__}, NCCL {nccl.value}"
        tell("", f"## {count} x {name}, {versions}, {date.today()}", "")
        set_up(folder)
        for part in names:
            run_part(part, checks_of(parts, part))
    sys.exit(f"failed: {', '.join(failures)}" if failures else 0)


if __name__ == "__main__":
    main()
