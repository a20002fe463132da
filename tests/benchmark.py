"""Speed of the scripts beside what they replace: no test, since times vary. Medians of rounds.

    python tests/benchmark.py ratio "OLD/singlegpu/images.py WORDS" "singlegpu/images.py WORDS"
    python tests/benchmark.py bigmnist --folder EMPTY    # reading by windows; writes 10 GB
    python tests/benchmark.py predict --data_dir DATA    # speedup on slow links; needs root

`ratio` runs its sides in turn and compares the samples/s of their logs. A side is a command without
`python`, or several that run at the same time, joined by " & "; variables may stand before it:

    ratio "MALLOC_TOP_PAD_=268435456 singlegpu/images.py" "singlegpu/images.py"
    ratio "singlegpu/gpt.py --batch_size 8 & singlegpu/gpt.py --batch_size 8" \\
        "multigpu/gpt.py --num_gpus 2 --batch_size 16" --columns forward backward comm

Two commands of others write such a log, too, and so can be a side: the example of pytorch/examples
with the network and the batches of images.py, and train.py of karpathy/nanoGPT in its CPU setting.

    ratio "tests/benchmark.py classic --data_dir DATA" \\
        "singlegpu/images.py --dataset mnist --data_dir DATA"
    ratio "tests/benchmark.py nanogpt --folder NANOGPT" \\
        "singlegpu/gpt.py --dataset TEXT --vocab_size 128 --seq_len 64 --d_model 128 --n_heads 4 \\
        --num_layers 4 --batch_size 12"
"""

import argparse
import importlib.util
import json
import itertools
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent


def module(script):
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("script", ROOT / script)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def last_row(log):
    """The row of rank 0 and the last epoch."""
    rows = map(json.loads, log.read_text().splitlines())
    return [row for row in rows if row["rank"] == 0][-1]


def run_side(side, folder):
    """Run the commands of a side at the same time. Returns the last row of each log."""
    started = []
    for number, command in enumerate(side.split(" & ")):
        words, log = shlex.split(command), Path(folder, f"{number}.jsonl")
        count = next(n for n, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
        environment = os.environ | dict(word.split("=", 1) for word in words[:count])
        words = [sys.executable, *words[count:], "--log", log]
        log.unlink(missing_ok=True)
        quiet = {"stdout": subprocess.DEVNULL, "cwd": ROOT, "env": environment}
        started.append((subprocess.Popen(list(map(str, words)), **quiet), log))
    if any([process.wait() for process, _ in started]):
        sys.exit(f"failed: {side}")
    return [last_row(log) for _, log in started]


def ratio(options):
    """Compare the sides, run in turn."""
    rates, columns = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for side in options.sides:
                rows = run_side(side, folder)
                rates.setdefault(side, []).append(sum(float(row["samples/s"]) for row in rows))
                for name in options.columns:
                    columns.setdefault((side, name), []).append(float(rows[0][name]))
    first = rates[options.sides[0]]
    print("| side | samples/s | to the first |", *options.columns, sep=" | ")
    for side, found in rates.items():
        cells = [f"{statistics.median(found):.1f}"]
        rounds = [rate / base for rate, base in zip(found, first)]
        cells.append(f"{statistics.median(rounds):.3f} ({min(rounds):.2f} to {max(rounds):.2f})")
        cells += [f"{statistics.median(columns[side, name]):.4g}" for name in options.columns]
        print("|", " | ".join([side, *cells]), "|")


def write_log(path, epochs, samples_per_second):
    """What `ratio` reads."""
    with open(path, "w") as file:
        for epoch in range(epochs):
            row = {"epoch": epoch, "rank": 0, "samples/s": samples_per_second}
            file.write(json.dumps(row) + "\n")


def classic(options):
    """The MNIST example of pytorch/examples, with AdamW: a DataLoader of transformed images."""
    from torchvision import datasets, transforms

    steps = [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
    data = datasets.MNIST(options.data_dir, train=True, transform=transforms.Compose(steps))
    loader = torch.utils.data.DataLoader(data, batch_size=options.batch_size, shuffle=True)
    images = module("singlegpu/images.py")
    args = argparse.Namespace(model=options.model, dropout=0.0)
    model = images.create_model(args, 1, 28)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    for _ in range(2):
        begin, count = time.perf_counter(), 0
        for x, y in itertools.islice(loader, options.max_steps or None):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            count += len(x)
        rate = count / (time.perf_counter() - begin)
    write_log(options.log, 2, rate)


def nanogpt(options):
    """train.py of karpathy/nanoGPT in the setting that its README gives for a CPU."""
    words = "train.py config/train_shakespeare_char.py --device=cpu --eval_iters=1 "
    words += "--log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 "
    words += "--n_embd=128 --dropout=0.0 "
    words += "--lr_decay_iters=2000 --eval_interval=100000 --dtype=float32 "
    words += f"--compile={options.compile} --max_iters={options.max_steps or 300} "
    words += f"--out_dir={tempfile.gettempdir()}"
    command = [sys.executable, *words.split()]
    pipes = {"capture_output": True, "text": True}
    done = subprocess.run(command, cwd=options.folder, check=True, **pipes)
    times = [float(found) for found in re.findall(r"iter \d+: .* time ([\d.]+)ms", done.stdout)]
    write_log(options.log, 1, 12 * 1000 / statistics.mean(times[20:]))


def resident():
    """Memory of this process without what it maps of files, and with it, in GB."""
    text = Path("/proc/self/status").read_text()
    private, files = (int(text.split(f"Rss{name}:")[1].split()[0]) for name in ("Anon", "File"))
    return private / 1e6, (private + files) / 1e6


def bigmnist(options):
    """Images/s by windows and one by one from a file that is not cached; the data phase; memory."""
    images, folder = module("singlegpu/images.py"), Path(options.folder)
    base = ["--data_dir", folder, "--dataset", "bigmnist", "--epochs", 1]
    for copies in (2, 36):  # 0.6 and 10 GB
        shutil.rmtree(folder / "bigmnist", ignore_errors=True)
        command = [sys.executable, ROOT / "singlegpu/make_bigmnist.py", "--dataset", "synthetic"]
        command += ["--copies", str(copies), "--out", folder / "bigmnist"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        path, labels = (folder / f"bigmnist/train_{what}.npy" for what in ("images", "labels"))
        args = argparse.Namespace(seed=1, batch_size=64, grad_accum_steps=1)
        rates, memory = {}, []
        for name in ("windows", "one by one"):
            forget(path)
            split = np.load(path, "r")[:, None], np.load(labels, "r")  # a new map: no pages of it
            steps = range(len(split[1]) // 64)
            if name == "windows":
                loader = images.batches(split, args, 0, steps, torch.device("cpu"))
            else:
                order = np.random.default_rng(0).permutation(len(steps) * 64).reshape(-1, 64)
                loader = (split[0][each] for each in order)
            begin, count = time.perf_counter(), 0
            for count, _ in enumerate(loader, start=1):
                if time.perf_counter() > begin + options.seconds:
                    break
                if name == "windows" and count % 100 == 0:
                    memory.append(resident())
            rates[name] = count * 64 / (time.perf_counter() - begin)
            size = split[0].nbytes / 1e9
            del split, loader
        private, whole = map(max, zip(*memory))
        by_windows, one_by_one = rates.values()
        print(f"{size:.1f} GB: {by_windows:,.0f} images/s by windows, "
              f"{one_by_one:,.0f} one by one, ratio {by_windows / one_by_one:.1f}; "
              f"{private:.2f} GB resident, {whole:.2f} with the file's pages")  # fmt: skip
    for model, steps in (("cnn", 600), ("mlp", 6000)):
        forget(path)
        words = [ROOT / "singlegpu/images.py", *base, "--model", model, "--max_steps", steps]
        row = run_side(shlex.join(map(str, words)), folder)[0]
        share = float(row["data"]) / (float(row["seconds"]) - float(row["eval"]))
        print(f"{model}: data {share:.2%} of an epoch, {row['samples/s']} images/s")


def forget(path):
    """Take the file out of the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def token_folder(folder):
    """Random token ids, few of them to validate, for gpt.py."""
    for name, count in (("train", 1 << 20), ("val", 1024)):
        ids = np.random.default_rng(0).integers(256, size=count, dtype=np.uint16)
        ids.tofile(f"{folder}/{name}.bin")
    return folder


def image_folder(folder):
    """Random images, few of them to validate, for images.py."""
    random = np.random.default_rng(0)
    Path(folder, "bigmnist").mkdir()
    for name, count in (("train", 20_000), ("test", 64)):
        images = random.integers(256, size=(count, 28, 28), dtype=np.uint8)
        np.save(f"{folder}/bigmnist/{name}_images.npy", images)
        np.save(f"{folder}/bigmnist/{name}_labels.npy", random.integers(10, size=count))
    return f"--dataset bigmnist --data_dir {folder}"


def predict(options):
    """Speedup of two nodes of one thread on links: measured, and as report.py says it beforehand.

    It is told what one process of multigpu takes for the batch and, as both nodes share this
    machine's memory, what each of two takes for half of it that run at once and send nothing.
    """
    import link

    if missing := link.what_is_missing():
        sys.exit(missing)
    sys.path.insert(0, str(ROOT))
    import report

    def summary(log):
        rows, notes = report.read_logs([log])
        return report.runs_of(rows, 1, notes)[0]

    def run(commands, **environment):
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        quiet = {"env": os.environ | environment, "stdout": subprocess.DEVNULL}
        running = [subprocess.Popen(list(map(str, words)), **quiet) for words in commands]
        if any([process.wait() for process in running]):
            sys.exit("failed")

    news = f"--dataset ag_news --data_dir {options.data_dir} --seq_len 128 --model transformer"
    sizes = "--d_model 320 --n_heads 5 --num_layers 8 --seq_len 256 --vocab_size 256"
    results, points = {}, {}
    with tempfile.TemporaryDirectory() as folder, link.two_nodes() as spaces:
        pictures = image_folder(folder)
        models = {
            "text, small": ("text.py", 64, 15, f"{news} --size small"),
            "text, large": ("text.py", 64, 6, f"{news} --size large"),
            "images, mlp": ("images.py", 64, 60, f"--model mlp {pictures}"),
            "images, cnn": ("images.py", 256, 20, f"--model cnn {pictures}"),
            "gpt, 9.9 M": ("gpt.py", 16, 4, f"--dataset {token_folder(folder)} {sizes}"),
        }
        for _, mbit in itertools.product(range(options.rounds), (*options.mbit, None)):
            link.shape(spaces, mbit)
            measured = Path(folder, "link.json")
            words = ("--min_bytes", 1 << 20, "--max_bytes", 1 << 25, "--out", measured)
            on_link = link.commands_on(spaces, 29400, "multinode/allreduce.py", *words)
            run(on_link, GLOO_SOCKET_IFNAME="veth")
            links = report.read_links([measured])
            for name, (script, batch, steps, arguments) in models.items():
                logs = [Path(tempfile.mkdtemp(dir=folder), "log.jsonl") for _ in range(4)]
                one, *halves, two = logs
                common = [*arguments.split(), "--epochs", 3, "--max_steps", steps]
                single = [sys.executable, ROOT / "multigpu" / script, "--num_gpus", 1, *common]
                run([[*single, "--batch_size", batch, "--log", one]])
                run([[*single, "--batch_size", batch // 2, "--log", log] for log in halves])
                words = [*common, "--batch_size", batch, "--log", two]
                on_link = link.commands_on(spaces, 29400, f"multinode/{script}", *words)
                run(on_link, GLOO_SOCKET_IFNAME="veth")
                alone, *half, both = map(summary, logs)
                step = report.step_of(alone, [alone, *half])
                foretold = report.predict(step, "strong", links, 0)[0][0]["speedup"]
                speedup = both["samples/s"] / alone["samples/s"]
                results.setdefault((name, mbit), []).append((foretold, speedup, both["R"]))
    for (name, mbit), values in results.items():
        foretold, speedup, r = (statistics.median(column) for column in zip(*values))
        off = statistics.median(value[0] / value[1] - 1 for value in values)
        where = f"{mbit} Mbit/s" if mbit else "not slowed down"
        print(f"| {name} | {where} | {foretold:.2f} | {speedup:.2f} | {off:+.0%} | {r:.2f} |")
        points.setdefault(where, []).append((r, speedup))
    draw_speedups(points, ROOT / "when_ddp_pays.png")


def draw_speedups(points, path):
    """Speedup of two processes over R, {link: [(R, speedup)]}, and without any overlap."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    found = [r for values in points.values() for r, _ in values]
    line = np.geomspace(min(found) / 1.3, max(found) * 1.3)
    axes.plot(line, 2 * line / (1 + line), color="black", label="2 R / (1 + R): nothing hidden")
    colours = "#D55E00", "#CC79A7", "#0072B2", "#009E73", "#E69F00", "#56B4E9"
    looks = zip(points.items(), "ovs^Dx", colours)
    for (where, values), mark, colour in looks:
        axes.plot(*zip(*values), mark, color=colour, label=where)
    axes.axhline(1, color="grey", linestyle=":")
    axes.axvline(3, color="grey", linestyle=":")
    labels = {"xlabel": "R = compute / sending", "ylabel": "speedup of two processes"}
    axes.set(xscale="log", ylim=(0, 2.4), **labels)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main():
    wide = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=wide)
    commands = parser.add_subparsers(dest="command", required=True)
    found = {}
    for command in (ratio, bigmnist, predict, classic, nanogpt):
        found[command.__name__] = commands.add_parser(command.__name__, help=command.__doc__)
        found[command.__name__].add_argument("--rounds", type=int, default=5)
        found[command.__name__].set_defaults(run=command)
    found["ratio"].add_argument("sides", nargs="+")
    found["ratio"].add_argument("--columns", nargs="+", default=[], help="further means of the log")
    found["bigmnist"].add_argument("--folder", required=True, help="an empty one")
    found["bigmnist"].add_argument("--seconds", type=int, default=20, help="of each measurement")
    found["predict"].add_argument("--data_dir", default="data")
    found["predict"].add_argument("--mbit", type=int, nargs="+", default=[100, 400, 1000])
    found["nanogpt"].add_argument("--folder", default="nanoGPT")
    found["nanogpt"].add_argument("--compile", action="store_true")
    found["classic"].add_argument("--data_dir", default="data")
    found["classic"].add_argument("--model", default="cnn")
    found["classic"].add_argument("--batch_size", type=int, default=64)
    for name in ("classic", "nanogpt"):
        found[name].add_argument("--max_steps", type=int, default=0)
        found[name].add_argument("--log", required=True)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
