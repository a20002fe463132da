"""Speed of the scripts against what they replace: no test, since times vary. Prints medians and ratios of rounds.

    python tests/benchmark.py feed --data_dir DATA         # batches alone: torchvision's DataLoader against ours
    python tests/benchmark.py epoch --data_dir DATA        # training: the classic MNIST example against ours
    python tests/benchmark.py variants                     # --compile, channels_last and bf16, cnn
    python tests/benchmark.py stopwatch                    # the step with and without stopwatch and hook, 2 processes
    python tests/benchmark.py scaling --models cnn gpt     # 2 processes of 1 thread against 1 of 1 thread
    python tests/benchmark.py predict --data_dir DATA      # on slow links (as root): predicted and measured speedup
    python tests/benchmark.py pipeline                     # hybrid/gpt.py: bubble, speed and memory of its schedules
    python tests/benchmark.py backends                     # int8: linear layers by torch.ao, torchao and pt2e
    python tests/benchmark.py start                        # from the end of the imports to the first step
    python tests/benchmark.py memory --models cnn mlp      # with glibc keeping freed memory, and without
    python tests/benchmark.py padding --data_dir DATA      # text.py: similar lengths together against padding all
    python tests/benchmark.py similar --data_dir DATA      # translation.py: similar lengths together, or random ones
    python tests/benchmark.py bigmnist --data_dir EMPTY    # making it, reading it, training on it: 20 GB are written
    python tests/benchmark.py gpt --nanogpt FOLDER         # gpt.py against the train.py of karpathy/nanoGPT

`--steps` shortens what is timed; DATA holds MNIST/raw, imdb, ag_news, multi30k; FOLDER is nanoGPT's, with
data/shakespeare_char.
"""

import argparse
import csv
import functools
import importlib.util
import itertools
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def load(folder, script="images"):
    """The script as a module."""
    spec = importlib.util.spec_from_file_location(script, ROOT / folder / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def alternate(sides, rounds):
    """Run each side in turn, `rounds` times: {name: [seconds]}; the first round warms up and is not counted."""
    times = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            if number:
                times[name].append(time.perf_counter() - start)
    return times


def show(times, unit="s", per=1):
    """Medians, and the median over rounds of the ratio to the first side."""
    first = next(iter(times.values()))
    for name, values in times.items():
        ratio = statistics.median(value / base for value, base in zip(values, first))
        print(f"| {name} | {statistics.median(values) / per:.4g} {unit} | {ratio:.3f} |")


def arguments(**changes):
    """images.py's own defaults, changed."""
    images = load("singlegpu")
    argv, sys.argv = sys.argv, ["images.py"]
    args = images.parse_args()
    sys.argv = argv
    vars(args).update(changes)
    return args


def classic_loader(data_dir):
    """What the MNIST example of pytorch/examples feeds from, with its defaults."""
    from torch.utils.data import DataLoader
    from torchvision import datasets, transforms

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    return DataLoader(datasets.MNIST(data_dir, train=True, transform=transform), batch_size=64, shuffle=True)


def feed(options):
    import torch

    torch.set_num_threads(2)
    images, device = load("singlegpu"), torch.device("cpu")
    args = arguments(dataset="mnist", data_dir=options.data_dir)
    split = images.read_data(args)[0]
    loader, epoch = classic_loader(options.data_dir), iter(range(1000))

    def classic():
        for _ in loader:
            pass

    def ours():
        batches = images.shuffled_batches(split[0], range(60_000 // args.batch_size), args, next(epoch))
        for _ in images.create_dataloader(split, batches, args, device):
            pass

    show(alternate({"classic": classic, "ours": ours}, options.rounds))


def epoch(options):
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(2)
    images, device = load("singlegpu"), torch.device("cpu")
    for name in options.models:
        sides, accuracy = {}, {}
        for label, precision in (("classic", "fp32"), ("fp32", "fp32"), ("bf16", "bf16")):
            args = arguments(
                dataset="mnist", data_dir=options.data_dir, model=name, precision=precision, max_steps=options.steps
            )
            splits = images.read_data(args)
            torch.manual_seed(1)
            model = images.create_model(args, 1, 28)
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
            parts = {"model": model, "optimizer": optimizer, "scaler": torch.amp.GradScaler("cpu", enabled=False)}
            if label == "classic":

                def side(model=model, optimizer=optimizer, loader=classic_loader(options.data_dir)):
                    model.train()
                    for step, (x, y) in enumerate(loader):
                        if step == options.steps:
                            break
                        optimizer.zero_grad()
                        F.cross_entropy(model(x), y).backward()
                        optimizer.step()
            else:
                counter = iter(range(1000))

                def side(args=args, parts=parts, splits=splits, counter=counter):
                    number = next(counter)
                    steps = options.steps or 60_000 // args.batch_size
                    batches = images.shuffled_batches(splits[0][0], range(steps), args, number)
                    state = {"epoch": number, "step": 0, "sums": [0.0] * images.NUM_SUMS}
                    images.train(
                        parts["model"],
                        images.create_dataloader(splits[0], batches, args, device),
                        steps,
                        parts,
                        state,
                        images.Stopwatch(device),
                        [],
                        args,
                        device,
                    )

            sides[label], accuracy[label] = side, (model, args, splits[1])
        print(f"\n{name}, {options.steps or 937} steps of 64, 2 threads")
        show(alternate(sides, options.rounds))
        for label, (model, args, split) in accuracy.items():
            import numpy as np

            loader = images.create_dataloader(split, np.array_split(np.arange(10_000), 79), args, device)
            right = images.evaluate(images.image_loss, model, loader, args, device)[1]
            print(f"{label}: validation accuracy {right / 10_000:.4f}")


def variants(options):
    import torch

    torch.set_num_threads(2)
    images, sides = load("singlegpu"), {}
    x, y = torch.randn(64, 1, 28, 28), torch.randint(10, (64,))
    for precision in ("fp32", "bf16"):
        for layout in (torch.contiguous_format, torch.channels_last):
            for compiled in (False, True):
                args = arguments(precision=precision)
                torch.manual_seed(1)
                model = images.create_model(args, 1, 28).to(memory_format=layout)
                optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
                if compiled:
                    model.compile()

                def side(model=model, optimizer=optimizer, args=args, x=x.to(memory_format=layout)):
                    for _ in range(10):
                        images.image_loss(model, x, y, args)[0].backward()
                        optimizer.step()
                        optimizer.zero_grad()

                name = precision + (" channels_last" if layout == torch.channels_last else "") + " compile" * compiled
                sides[name] = side
    show(alternate(sides, options.rounds), "ms a step", 10 / 1000)


def stopwatch_worker(rank, options, port):
    import torch
    import torch.distributed as dist

    images = load("multigpu")
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    device = torch.device("cpu")

    class NoWatch(images.Stopwatch):
        def mark(self, phase, at=None):
            pass

    for model_name, batch, steps in (("mlp", 64, 48), ("cnn", 64, 8)):
        sides = {}
        for label, timed in (("without", False), ("with", True)):
            args = arguments(model=model_name, num_gpus=2, comm_hook="none", batch_size=batch)
            torch.manual_seed(1)
            model = images.create_model(args, 1, 28)
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
            parts = {"model": model, "optimizer": optimizer, "scaler": torch.amp.GradScaler("cpu", enabled=False)}
            watch = (images.Stopwatch if timed else NoWatch)(device)
            timer = images.CommTimer(watch, images.COMM_HOOKS["none"], None)
            ddp_model = images.DistributedDataParallel(model, gradient_as_bucket_view=True)
            if timed:
                ddp_model.register_comm_hook(None, timer.hook)
            else:
                timer.backward_end = None
            data = [(torch.randn(batch // 2, 1, 28, 28), torch.randint(10, (batch // 2,)))] * steps

            def side(ddp_model=ddp_model, parts=parts, watch=watch, timer=timer, args=args, data=data):
                state = {"epoch": 0, "step": 0, "sums": [0.0] * images.NUM_SUMS}
                images.train(ddp_model, data, len(data), parts, state, watch, timer, [], args, device)

            sides[label] = side
        times = alternate(sides, options.rounds)
        if rank == 0:
            print(f"\n{model_name}, global batch {batch}, 2 processes of 1 thread")
            show(times, "ms a step", steps / 1000)
    dist.barrier()
    dist.destroy_process_group()


def stopwatch(options):
    import socket

    import torch.multiprocessing as mp

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    mp.spawn(stopwatch_worker, (options, port), 2)


def token_folder(folder):
    """Random token ids, few of them to validate, for gpt.py."""
    import numpy as np

    for name, count in (("train", 1 << 20), ("val", 1024)):
        np.random.default_rng(0).integers(256, size=count, dtype=np.uint16).tofile(f"{folder}/{name}.bin")
    return folder


def scaling(options):
    """Also with the single process's batch cut in two, so that both sides work on parts of the same size."""
    with tempfile.TemporaryDirectory() as folder:
        for model in options.models:
            script, arguments, steps = "images", ["--model", model, "--batch_size", "256"], options.steps or 40
            if model == "gpt":  # 9.9 M parameters
                sizes = "--d_model 320 --n_heads 5 --num_layers 8 --seq_len 256 --batch_size 16 --vocab_size 256"
                script, arguments, steps = (
                    "gpt",
                    ["--dataset", token_folder(folder), *sizes.split()],
                    options.steps or 4,
                )
            print(f"\n{model}")
            scale(script, [*arguments, "--threads", "1", "--epochs", "2", "--max_steps", str(steps)], options.rounds)


def scale(script, arguments, rounds):
    """Also with two processes that do not know of each other, on half a batch each: what the machine can do at best."""
    single = [f"singlegpu/{script}.py", *arguments]
    half = str(int(arguments[arguments.index("--batch_size") + 1]) // 2)
    sides = {
        "1 process": [single],
        "1 process, 2 parts": [[*single, "--grad_accum_steps", "2"]],
        "2 processes": [[f"multigpu/{script}.py", *arguments, "--num_gpus", "2"]],
        "2 that do not communicate": [[*single, "--batch_size", half]] * 2,
    }
    rates = {name: [] for name in sides}
    for _ in range(rounds):
        for name, commands in sides.items():
            with ThreadPoolExecutor() as pool:
                rates[name].append(sum(pool.map(rate, commands)))
    for name, values in rates.items():
        count = 2 if name.startswith("2") else 1
        efficiency = [value / base / count for value, base in zip(values, rates["1 process"])]
        print(f"| {name} | {statistics.median(values):.4g} samples/s | {statistics.median(efficiency):.3f} |")
    for name in ("1 process, 2 parts", "2 that do not communicate"):
        count = 2 if name.startswith("1") else 1
        ratio = statistics.median(a / b / count for a, b in zip(rates["2 processes"], rates[name]))
        print(f"2 processes against {name}: efficiency {ratio:.3f}")


def rate(command):
    """The samples/s of the second epoch of a run."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, *command, "--log", f"{folder}/log.csv"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
        )
        with open(f"{folder}/log.csv") as file:
            return float([row for row in csv.DictReader(file) if row["epoch"] == "1"][0]["samples/s"])


def predict(options):
    """Speedup of two nodes of one thread on links of known speed: measured, and as report.py says it beforehand.

    It is told what one process takes for the batch and, as both nodes share this machine's memory, what each of two
    processes takes for half of it that run at once without a word to each other. Draws when_ddp_pays.png.
    """
    import link

    sys.path.insert(0, str(ROOT))
    import report

    def summary(log):
        rows, notes = report.read_logs([log])
        return report.runs_of(rows, 1, notes)[0]

    def run_at_once(commands, **environment):
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment
        commands = [list(map(str, words)) for words in commands]
        running = [subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL) for words in commands]
        if any([process.wait() for process in running]):
            sys.exit(f"failed: {commands[0]}")

    def run_on_link(*command):
        run_at_once(link.commands_on(spaces, 29400, *command), GLOO_SOCKET_IFNAME="veth")

    if missing := link.what_is_missing():
        sys.exit(missing)
    news = ["--dataset", "ag_news", "--data_dir", options.data_dir, "--seq_len", "128", "--model", "transformer"]
    results = {}
    with tempfile.TemporaryDirectory() as folder, link.two_nodes() as spaces:
        sizes = "--d_model 320 --n_heads 5 --num_layers 8 --seq_len 256 --vocab_size 256"
        models = {
            "text, transformer, small": ("text.py", 64, 15, [*news, "--size", "small"]),
            "text, transformer, large": ("text.py", 64, 6, [*news, "--size", "large"]),
            "images, mlp": ("images.py", 64, 60, ["--model", "mlp"]),
            "images, cnn": ("images.py", 256, 10, ["--model", "cnn"]),
            "gpt, 9.9 M parameters": ("gpt.py", 16, 4, ["--dataset", token_folder(folder), *sizes.split()]),
        }
        for _, mbit in itertools.product(range(options.rounds), (100, 400, 1000, None)):
            link.shape(spaces, mbit)
            measured = Path(folder, "link.json")
            sizes_of_buckets = ("--min_bytes", 1 << 20, "--max_bytes", 1 << 25)
            run_on_link("multinode/allreduce.py", *sizes_of_buckets, "--out", measured)
            links = report.read_links([measured])
            for name, (script, batch, steps, arguments) in models.items():
                one, *halves, two = (Path(tempfile.mkdtemp(dir=folder), "log.csv") for _ in range(4))
                common = [*arguments, "--epochs", 2, "--max_steps", options.steps or steps, "--threads", 1]
                single = [sys.executable, ROOT / "singlegpu" / script, *common]
                run_at_once([[*single, "--batch_size", batch, "--log", one]])
                run_at_once([*single, "--batch_size", batch // 2, "--log", log] for log in halves)
                run_on_link(f"multinode/{script}", *common, "--batch_size", batch, "--log", two)
                alone, half, both = map(summary, (one, halves[0], two))
                step = report.step_of(alone, [alone, half])
                predicted = report.predict_step(step, 2, "strong", links, 0)
                speedups = report.predict_speedup(step, 2, "strong", links, 0), both["samples/s"] / alone["samples/s"]
                results.setdefault((name, mbit), []).append((*speedups, predicted["R"], both["R"]))
    points = {}
    for (name, mbit), values in results.items():
        predicted, speedup, r_predicted, r = (statistics.median(column) for column in zip(*values))
        off = statistics.median(value[0] / value[1] - 1 for value in values)
        where = f"{mbit} Mbit/s" if mbit else "not slowed down"
        print(f"| {name} | {where} | {predicted:.2f} | {speedup:.2f} | {off:+.0%} | {r_predicted:.2f} | {r:.2f} |")
        points.setdefault(where, []).append((r, speedup))
    draw_speedups(points, ROOT / "when_ddp_pays.png")


def draw_speedups(points, path):
    """Speedup of two processes over R, {link: [(R, speedup)]}, beside what it is if nothing is hidden."""
    import matplotlib
    import numpy as np

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    lowest, highest = (f(r for values in points.values() for r, _ in values) for f in (min, max))
    line = np.geomspace(lowest / 1.3, highest * 1.3)
    axes.plot(line, 2 * line / (1 + line), color="black", label="2 R / (1 + R): nothing hidden")
    for (where, values), mark, colour in zip(points.items(), "ovs^", ("#D55E00", "#CC79A7", "#0072B2", "#009E73")):
        axes.plot(*zip(*values), mark, color=colour, label=where)
    axes.axhline(1, color="grey", linestyle=":")
    axes.axvline(3, color="grey", linestyle=":")
    axes.set(xscale="log", ylim=(0, 2.1), xlabel="R = compute / communication", ylabel="speedup of two processes")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def pipeline(options):
    """Two stages of one thread against the same model, of 6.4 M parameters, and batch in one process of one thread."""
    runs = [("gpipe", m) for m in (1, 2, 4, 8)] + [("1f1b", 8), ("interleaved", 8)]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        tokens = token_folder(folder)
        sizes = "--d_model 256 --n_heads 4 --num_layers 8 --seq_len 128 --batch_size 32 --vocab_size 256 --threads 1"
        common = ["--dataset", tokens, *sizes.split(), "--epochs", "2", "--max_steps", str(options.steps or 4)]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--", "hybrid/gpt.py"]
        for _ in range(options.rounds):
            for parts in (1, 8):
                single = rate(["singlegpu/gpt.py", *common, "--grad_accum_steps", str(parts)])
                found.setdefault(("one process", parts), []).append(single)
            for schedule, m in runs:
                log = f"{folder}/log.csv"
                command = [*torchrun, *common, "--schedule", schedule, "--num_microbatches", str(m), "--log", log]
                subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True)
                with open(log) as file:
                    rows = [row for row in csv.DictReader(file) if row["epoch"] == "1"]
                os.remove(log)
                numbers = []
                for row in rows:
                    forward, backward, bubble = (float(row[name]) for name in ("forward", "backward", "bubble"))
                    numbers += [bubble / (forward + backward + bubble), float(row["peak_MB"])]
                found.setdefault((schedule, m), []).append((float(rows[0]["samples/s"]), *numbers))
    base = found["one process", 1]
    for (name, m), values in found.items():
        if name == "one process":
            print(f"| {name} | {m} | {statistics.median(values):.2f} | | | | | |")
            continue
        efficiency = statistics.median(value[0] / single / 2 for value, single in zip(values, base))
        rate_, first, first_peak, second, second_peak = (statistics.median(column) for column in zip(*values))
        work = m * (2 if name == "interleaved" else 1)
        print(
            f"| {name} | {m} | {rate_:.2f} | {efficiency:.2f} | {(first + second) / 2:.3f} | {1 / (work + 1):.3f} | "
            f"{first:.3f}, {second:.3f} | {first_peak:.0f}, {second_peak:.0f} |"
        )


def backends(options):
    """Two linear layers, 1024 to 4096 to 1024, one thread: milliseconds, and the largest difference from fp32."""
    import copy

    import torch
    import torch._inductor.config
    import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer as inductor_quantizer
    from torch import nn
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 4096, False), nn.GELU(), nn.Linear(4096, 1024, False)).eval()
    sides = {"fp32": model, "fp32, compiled": torch.compile(copy.deepcopy(model))}
    for engine in ("x86", "onednn"):
        torch.backends.quantized.engine = engine
        qconfig = {nn.Linear: torch.ao.quantization.per_channel_dynamic_qconfig}
        sides[f"torch.ao, {engine}"] = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), qconfig)
    torchao_model = copy.deepcopy(model)
    quantize_(torchao_model, Int8DynamicActivationInt8WeightConfig())
    sides["torchao, compiled"] = torch.compile(torchao_model)
    torch._inductor.config.freezing = True
    with torch.no_grad():
        example, dim = torch.randn(2, 1024), torch.export.Dim("batch", min=1, max=4096)
        exported = torch.export.export(model, (example,), dynamic_shapes=({0: dim},)).module()
        quantizer = inductor_quantizer.X86InductorQuantizer()
        quantizer.set_global(inductor_quantizer.get_default_x86_inductor_quantization_config(is_dynamic=True))
        prepared = prepare_pt2e(exported, quantizer)
        prepared(example)
        sides["pt2e, compiled"] = torch.compile(convert_pt2e(prepared))
        for batch in (1, 16, 256):
            x = torch.randn(batch, 1024)
            calls = {name: functools.partial(side, x) for name, side in sides.items()}
            for call in calls.values():
                call()
            times = alternate(calls, options.rounds)
            for name, values in times.items():
                error = (calls[name]() - model(x)).abs().max().item()
                milliseconds = 1000 * statistics.median(values)
                ratio = statistics.median(values) / statistics.median(times["fp32"])
                print(f"| {name} | {batch} | {milliseconds:.2f} | {ratio:.2f} | {error:.3f} |")


def memory(options):
    code = "import sys; sys.path.insert(0, 'singlegpu'); import images; {}; images.main(images.parse_args())"
    sides = {"as glibc does": "images.keep_freed_memory = lambda: None", "keeping it": "pass"}
    for model in options.models:
        rates = {name: [] for name in sides}
        arguments = ["--model", model, "--batch_size", "256", "--threads", "1", "--epochs", "2"]
        for _ in range(options.rounds):
            for name, change in sides.items():
                command = ["-c", code.format(change), *arguments, "--max_steps", str(options.steps or 30)]
                rates[name].append(rate(command))
        print(f"\n{model}, batch 256, 1 thread")
        base, kept = rates.values()
        for name, values in rates.items():
            print(f"| {name} | {statistics.median(values):.4g} samples/s |")
        print(f"| ratio | {statistics.median(b / a for a, b in zip(base, kept)):.3f} |")


def padding(options):
    """Steps of the transformer on IMDB, in batches of similar length, and in random ones padded to 256 tokens."""
    import numpy as np
    import torch

    torch.set_num_threads(2)
    text, device = load("singlegpu", "text"), torch.device("cpu")
    text.keep_freed_memory()
    settings = {
        "dataset": "imdb",
        "data_dir": options.data_dir,
        "model": "transformer",
        "size": "small",
        "seq_len": 256,
    }
    settings |= {"batch_size": 64, "seed": 1, "dropout": 0.0, "precision": "fp32", "max_steps": options.steps or 40}
    args = argparse.Namespace(**settings, learning_rate=1e-3)
    split, _, vocab_size = text.read_texts(args)
    similar = text.similar_batches(split[1], args, 0)
    random = np.random.default_rng(1).permutation(similar.ravel()).reshape(similar.shape)  # the same texts
    sides = {}
    for name, batches in (("padded", random), ("similar", similar)):
        torch.manual_seed(1)
        model = text.create_model(args, vocab_size)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

        def side(model=model, optimizer=optimizer, batches=batches, padded=name == "padded"):
            for ids, lengths, labels in text.create_dataloader(split, batches, args, device):
                if padded:
                    ids = torch.nn.functional.pad(ids, (0, 256 - ids.shape[1]))
                text.text_loss(model, ids, lengths, labels, args)[0].backward()
                optimizer.step()
                optimizer.zero_grad()

        sides[name] = side
    show(alternate(sides, options.rounds), "ms a step", args.max_steps / 1000)
    print(f"of the padded tokens {np.minimum(np.diff(split[1]), 256)[similar].mean() / 256:.3f} are real")


def similar(options):
    """Steps of the transformer on Multi30k in batches of similar length, and in random ones, the rate falling to 0."""
    import numpy as np
    import torch

    torch.set_num_threads(2)
    translation, device = load("singlegpu", "translation"), torch.device("cpu")
    translation.keep_freed_memory()
    settings = {"dataset": "multi30k", "data_dir": options.data_dir, "source": "de", "target": "en"}
    settings |= {"model": "transformer", "batch_size": 128, "seq_len": 64, "seed": 1, "dropout": 0.0}
    args = argparse.Namespace(**settings, precision="fp32", max_steps=None)
    (train, val, _), words, _ = translation.read_pairs(args)
    order = translation.similar_batches(train[0][1] + train[1][1], args, 0)
    steps = (options.steps or len(order)) // (options.rounds + 1)
    num_tokens, sides, models = translation.tokens_of_a_batch(train, args), {}, {}
    for name, batches in (
        ("random", np.random.default_rng(1).permutation(order.ravel()).reshape(order.shape)),
        ("similar", order),
    ):
        torch.manual_seed(1)
        models[name] = model = translation.create_model(args, *map(len, words))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
        shares = ((indices, num_tokens) for indices in batches)
        loader = translation.create_dataloader(train, shares, args, device)

        def side(model=model, optimizer=optimizer, loader=loader):
            for *batch, num_tokens in itertools.islice(loader, steps):
                translation.translation_loss(model, *batch, num_tokens, args)[0].backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
                optimizer.param_groups[0]["lr"] -= 1e-3 / (steps * (options.rounds + 1))

        sides[name] = side
    show(alternate(sides, options.rounds), "ms a step", steps / 1000)
    whole = translation.whole_batches(val, np.arange(len(val[0][1]) - 1))
    for name, model in models.items():
        loader = translation.create_dataloader(val, whole, args, device)
        total, count = translation.evaluate(translation.translation_loss, model, loader, args, device).tolist()
        print(f"{name}: validation loss {total / count:.4f} after {steps * (options.rounds + 1)} steps")


def gpt(options):
    """Two living processes, a few steps of each in turn: nanoGPT's train.py is stopped meanwhile, ours waits."""
    settings = (
        "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=1 --log_interval=1 --block_size=64 "
        "--batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=100000 --lr_decay_iters=2000 --dropout=0.0 "
        "--dtype=float32 --eval_interval=100000 --out_dir=/tmp"
    )
    code = (
        "import sys, time; sys.path.insert(0, 'singlegpu'); import gpt; inner = gpt.create_dataloader\n"
        "def paced(*args):\n"
        "    for number, batch in enumerate(inner(*args)):\n"
        "        if number % 10 == 0:\n"
        "            print('steps', time.perf_counter() - start if number else 0, flush=True)\n"
        "            sys.stdin.readline()\n"
        "            start = time.perf_counter()\n"
        "        yield batch\n"
        "gpt.create_dataloader = paced; gpt.main(gpt.parse_args())"
    )
    text = Path(options.nanogpt) / "data/shakespeare_char/input.txt"
    sizes = "--vocab_size 128 --seq_len 64 --d_model 128 --n_heads 4 --num_layers 4 --batch_size 12 --epochs 1000"
    command = [sys.executable, "-c", code, "--dataset", str(text.resolve()), *sizes.split()]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    processes = {
        "nanoGPT": subprocess.Popen([sys.executable, "-u", "train.py", *settings.split()], cwd=options.nanogpt, **pipes)
    }

    def steps_of_nanogpt():
        processes["nanoGPT"].send_signal(signal.SIGCONT)
        times = []
        for line in processes["nanoGPT"].stdout:
            if found := re.match(r"iter \d+: .* time ([\d.]+)ms", line):
                times.append(float(found[1]))
            if len(times) == 12:
                break
        else:
            sys.exit("nanoGPT's train.py has ended: is its data/shakespeare_char prepared?")
        processes["nanoGPT"].send_signal(signal.SIGSTOP)
        return statistics.mean(times[2:])  # the first may hold the stop

    def seconds_of(process):
        while not (line := process.stdout.readline()).startswith("steps"):
            pass
        return float(line.split()[1])

    def steps_of_ours(process):
        process.stdin.write("\n")
        process.stdin.flush()
        return seconds_of(process) * 100

    steps_of_nanogpt()
    sides = {"nanoGPT": steps_of_nanogpt}
    for name, more in (("fp32", []), ("compiled", ["--compile"]), ("bf16", ["--precision", "bf16"])):
        processes[name] = subprocess.Popen([*command, *more], cwd=ROOT, **pipes)
        seconds_of(processes[name])
        sides[name] = lambda process=processes[name]: steps_of_ours(process)
    times = {name: [] for name in sides}
    try:
        for number in range(options.rounds + 3):
            for name, side in sides.items():
                milliseconds = side()
                if number >= 3:
                    times[name].append(milliseconds)
    finally:
        for process in processes.values():
            process.kill()
    show(times, "ms a step")


def bigmnist(options):
    """Making it, reading it and training on it, in folders below --data_dir (an empty one: 20 GB are written)."""
    import numpy as np
    import torch
    from torchvision.transforms import v2

    make, images = load("singlegpu", "make_bigmnist"), load("singlegpu")
    torch.set_num_threads(1)
    originals = images.synthetic_images(60_000, seed=0)[0][: make.BLOCK]
    transforms = v2.Compose(
        [
            v2.RandomHorizontalFlip(),
            v2.RandomAffine(15, (2 / 28, 2 / 28), (0.9, 1.1), 10, interpolation=v2.InterpolationMode.BILINEAR),
            v2.ElasticTransform(),
        ]
    )

    def torchvision():
        for image in originals:
            transforms(image[None])

    def ours():
        make.augment(originals.numpy(), np.random.default_rng(0), torch.device("cpu"))

    show(alternate({"torchvision, image by image": torchvision, "ours": ours}, options.rounds), "ms an image", 1)

    folder = Path(options.data_dir)
    command = [sys.executable, ROOT / "singlegpu/make_bigmnist.py", "--dataset", "synthetic", "--out"]
    times = {"make_bigmnist.py": [], "dd": []}
    for _ in range(options.rounds):
        done = subprocess.run([*command, folder / "bigmnist", "--copies", "8"], capture_output=True, text=True)
        print(" ".join(done.stdout.splitlines()[:2]))
        times["make_bigmnist.py"].append(float(done.stdout.split(" s, with fsync")[0].split()[-1]) / 7)  # 1 is there
        dd = ["dd", "if=/dev/zero", f"of={folder / 'dd'}", "bs=8M", "count=238", "conv=fsync"]  # as 7 copies
        begin = time.perf_counter()
        subprocess.run(dd, capture_output=True, check=True)
        times["dd"].append((time.perf_counter() - begin) / 7)
        (folder / "dd").unlink()
        shutil.rmtree(folder / "bigmnist")
    show(times, "s a copy of 282 MB")

    log = folder / "log.csv"
    for copies in (2, 20, 36):
        shutil.rmtree(folder / "bigmnist", ignore_errors=True)
        subprocess.run([*command, folder / "bigmnist", "--copies", str(copies)], capture_output=True, check=True)
        name = folder / "bigmnist" / "train_images.npy"
        array = np.load(name, "r")[:, None]
        args = arguments(batch_size=64)
        steps, random = len(array) // 64, np.random.default_rng(0)

        def read(batches, seconds=20, array=array, name=name):
            with open(name, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            gather, begin, count = images.Gather([array]), time.perf_counter(), 0
            for batch in batches:
                gather[batch]
                count += len(batch)
                if time.perf_counter() > begin + seconds:
                    break
            return count / (time.perf_counter() - begin)

        if copies == 20:
            blocks = read(images.shuffled_batches(array, range(steps), args, 0))
            single = read(random.permutation(len(array))[: steps * 64].reshape(-1, 64))
            print(
                f"{array.nbytes / 1e9:.1f} GB, not cached: {blocks:,.0f} images/s by blocks, {single:,.0f} one by one"
            )
            for model in ("cnn", "mlp"):
                for workers in ("0", "1", "2"):
                    read([])  # forget the file
                    run = [ROOT / "singlegpu/images.py", "--dataset", "bigmnist", "--data_dir", folder, "--epochs", "1"]
                    run += [
                        "--model",
                        model,
                        "--num_workers",
                        workers,
                        "--max_steps",
                        "3000" if model == "mlp" else "600",
                    ]
                    subprocess.run([sys.executable, *run, "--log", log], check=True, capture_output=True)
                    row = list(csv.DictReader(open(log)))[-1]
                    training = float(row["time"]) - float(row["eval"])
                    share = float(row["data"]) / training
                    print(
                        f"{model}, {workers} workers: data {share:.2%} of {training:.1f} s, {row['samples/s']} images/s"
                    )
        read([])
        run = [ROOT / "singlegpu/images.py", "--dataset", "bigmnist", "--data_dir", folder, "--epochs", "1"]
        code = "import runpy, sys, time; import torch, torchvision; begin = time.perf_counter()\n"
        code += (
            "def first(*a, **k):\n    global step; step = step or time.perf_counter() - begin; return adam(*a, **k)\n"
        )
        code += "step, adam, torch.optim.AdamW.step = None, torch.optim.AdamW.step, first\n"
        code += "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')\n"
        code += "print(step, int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) / 1e6)"
        run += ["--model", "mlp", "--batch_size", "512", "--max_steps", "1400"]
        done = subprocess.run([sys.executable, "-c", code, *run], capture_output=True, text=True, check=True)
        seconds, resident = map(float, done.stdout.split()[-2:])
        print(f"{array.nbytes / 1e9:.1f} GB: first step after {seconds:.2f} s, {resident:.2f} GB resident at most")
    shutil.rmtree(folder / "bigmnist")


def start(options):
    code = (
        "import time, sys; import torch, torchvision; t = time.perf_counter(); step = torch.optim.AdamW.step\n"
        "def first(self, *a, **k):\n    print(time.perf_counter() - t); import os; os._exit(0)\n"
        "torch.optim.AdamW.step = first; import runpy; sys.argv = ['images.py', *sys.argv[1:]]\n"
        f"runpy.run_path({str(ROOT / 'singlegpu/images.py')!r}, run_name='__main__')"
    )
    seconds = [
        float(subprocess.run([sys.executable, "-u", "-c", code], capture_output=True, text=True).stdout.split()[-1])
        for _ in range(options.rounds)
    ]
    print(f"imports done to first step taken, cnn on synthetic: {statistics.median(seconds):.2f} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what",
        choices=(
            *("feed", "epoch", "variants", "stopwatch", "scaling", "start", "memory", "padding", "similar", "gpt"),
            *("bigmnist", "pipeline", "backends", "predict"),
        ),
    )
    parser.add_argument("--data_dir", default="data")
    parser.add_argument("--nanogpt", default="nanoGPT")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--models", nargs="+", default=["cnn"])
    options = parser.parse_args()
    globals()[options.what](options)


if __name__ == "__main__":
    main()
