r"""Measure the time of an all-reduce on GPUs of many machines or, if they have none, CPU processes.

    torchrun --nnodes=2 --nproc_per_node=1 --rdzv_backend=c10d --rdzv_endpoint=HEAD_NODE:29400 -- \
        multinode/allreduce.py --min_bytes 1048576 --out link.json        # on each of two nodes
    python report.py one.jsonl --predict link.json          # what that link would do to a training
    sbatch slurm/multinode_allreduce.slurm                  # on a cluster
    sbatch --nodes=8 slurm/multinode_allreduce.slurm --pairs    # which link is slow

The columns are those of NCCL's tests (github.com/NVIDIA/nccl-tests, PERFORMANCE.md). Each of N
processes has n bytes. algbw = n / time. busbw = algbw x 2 (N - 1) / N is what each link carries in
a ring, and can be compared between different N. One process a node measures the link between them.

With --pairs each pair of nodes is measured on its own, all processes of the two at once. The exit
status is 1 where one is slower than half of the median, or than --expect.
"""

import argparse
import json
import os
import re
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

ON_GPU = torch.accelerator.is_available()  # a GPU of any maker


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--min_bytes", type=int, default=1 << 12, help="smallest size in bytes")
    add("--max_bytes", type=int, default=1 << 30, help="largest size in bytes")
    add("--seconds", type=float, default=1.0, help="for each size, or each direction of a pair")
    add("--out", metavar="FILE.json", help="write the times and the fitted line, for report.py")
    add("--pairs", action="store_true", help="measure each pair of nodes: which link is slow?")
    add("--expect", type=float, default=0.0, help="GB/s that each pair must reach, with --pairs")
    add("--timeout", type=int, default=600, help="seconds after which a hung process ends the run")
    args = parser.parse_args()
    if not 4 <= args.min_bytes <= args.max_bytes // 2:
        parser.error("--min_bytes must be at least 4, and --max_bytes at least twice as large")
    if args.pairs and args.out:
        parser.error("--pairs measures no all-reduce that --out could write")
    return args


def time_all_reduce(buffer, repeats):
    """Returns the seconds of one of `repeats` all-reduces, on the slowest process."""
    dist.barrier()  # all processes start together
    start = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(buffer)
    buffer[0].item()  # waits for the GPU
    mean = (time.perf_counter() - start) / repeats
    slowest = torch.tensor(mean, device=buffer.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def compute_rate(buffer):
    """Returns how fast a process computes beside an all-reduce, as a share of its usual speed."""
    size = 4096 if ON_GPU else 256
    matrix = torch.rand(size, size, device=buffer.device)
    rates = []
    for _ in range(9):
        dist.barrier()
        count = 0  # of matrix products
        work = dist.all_reduce(buffer, async_op=True)
        (matrix @ matrix).sum().item()  # when it has ended, the all-reduce has begun
        start = time.perf_counter()
        while not work.is_completed() or count == 0:
            (matrix @ matrix).sum().item()
            count += 1
        middle = time.perf_counter()
        work.wait()
        for _ in range(count):
            (matrix @ matrix).sum().item()
        end = time.perf_counter()
        rates.append((end - middle) / (middle - start))
    return min(1.0, statistics.median(rates))


def matmul_tflops(device):
    """Returns {precision: TFLOP/s} of products of large matrices. No training is faster."""
    size = 8192 if ON_GPU else 512
    if ON_GPU:
        torch.set_float32_matmul_precision("high")  # TF32, as the training scripts have it
    found = {}
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        matrix = torch.rand(size, size, device=device).to(dtype)
        dist.barrier()  # in a training, too, all compute at the same time
        for repeats in (3, 20):  # the first three warm up
            start = time.perf_counter()
            for _ in range(repeats):
                product = matrix @ matrix
            product[0, 0].item()  # waits for the GPU
            seconds = (time.perf_counter() - start) / repeats
        found[precision] = 2 * size**3 / seconds / 1e12
    return found


def measure(args, device):
    """Returns sizes in bytes, each twice the one before, their seconds, and the compute rate."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sizes = []
    seconds = []
    size = args.min_bytes // 4 * 4
    while size <= args.max_bytes:
        buffer = torch.full((size // 4,), 1.0 + rank, device=device)
        dist.all_reduce(buffer)  # warm-up
        if (buffer != world_size * (world_size + 1) / 2).any():
            sys.exit(f"rank {rank}: an all-reduce of {size} bytes gave a wrong sum")
        buffer.zero_()  # sums of zeros cannot overflow
        repeats = max(1, int(args.seconds / 5 / time_all_reduce(buffer, 1)))
        times = [time_all_reduce(buffer, repeats) for _ in range(5)]
        sizes.append(size)
        seconds.append(statistics.median(times))
        size *= 2
    length = 1 << (28 if ON_GPU else 22)  # 1 GiB or 16 MiB
    return sizes, seconds, compute_rate(buffer[:length])


def fit_line(sizes, seconds, world_size):
    """Fits time = latency + n x 2 (N - 1) / N / bandwidth by least squares of relative errors.

    Returns the latency in s (0 where noise would make it negative), the bandwidth in bytes/s, and
    the relative error at each size.
    """
    seconds = np.array(seconds)
    carried = np.array(sizes) * 2 * (world_size - 1) / world_size  # bytes on each link
    columns = np.stack((1 / seconds, carried / seconds), axis=1)
    latency, per_byte = np.linalg.lstsq(columns, np.ones(len(sizes)), rcond=None)[0]
    if latency < 0 or per_byte <= 0:
        latency = 0.0
        per_byte = columns[:, 1].sum() / (columns[:, 1] ** 2).sum()
    return latency, 1 / per_byte, (latency + carried * per_byte) / seconds - 1


def name_of(device):
    """Returns "CPU", or the name that the GPU's maker gives it."""
    return torch.get_device_module(device).get_device_name(device) if ON_GPU else "CPU"


def print_link(sizes, seconds, rate, tflops, device, nodes):
    """Prints the table and the fitted line. Returns what --out writes."""
    world_size = dist.get_world_size()
    link = {"processes": world_size, "nodes": nodes, "device": name_of(device)}
    link["torch"] = torch.__version__
    print(", ".join(f"{name} {value}" for name, value in link.items()))
    print("|      bytes |    time_us | algbw_GB/s | busbw_GB/s |     fit_us |")
    print("| ---------: | ---------: | ---------: | ---------: | ---------: |")
    latency, bandwidth, errors = fit_line(sizes, seconds, world_size)
    for size, took, error in zip(sizes, seconds, errors):
        algbw = size / took / 1e9
        busbw = algbw * 2 * (world_size - 1) / world_size
        fit = 1e6 * took * (1 + error)
        print(f"| {size:10} | {1e6 * took:10.1f} | {algbw:10.3f} | {busbw:10.3f} | {fit:10.1f} |")
    print(f"fit: {1e6 * latency:.1f} us + n x 2 (N - 1) / N / {bandwidth / 1e9:.4g} GB/s")
    print(f"errors: rms {np.sqrt((errors**2).mean()):.1%}, largest {abs(errors).max():.1%}")
    print(f"beside an all-reduce a process computes at {rate:.0%} of its speed")
    link |= {"latency_s": latency, "bandwidth_bytes_per_s": bandwidth, "compute_rate": rate}
    print("a large matmul: " + ", ".join(f"{name} {x:.3g} TFLOP/s" for name, x in tflops.items()))
    link |= {"sizes": sizes, "seconds": seconds, "matmul_tflops": tflops}
    return link


def main(args):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process without a traceback
    if "SLURM_STEP_NUM_TASKS" in os.environ:  # started by srun, which has other names for these
        os.environ.setdefault("RANK", os.environ["SLURM_PROCID"])
        os.environ.setdefault("WORLD_SIZE", os.environ["SLURM_STEP_NUM_TASKS"])
        os.environ.setdefault("LOCAL_RANK", os.environ["SLURM_LOCALID"])
        os.environ.setdefault("GROUP_RANK", os.environ["SLURM_NODEID"])
        os.environ.setdefault("GROUP_WORLD_SIZE", os.environ["SLURM_STEP_NUM_NODES"])
    needed = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR"}
    if not needed <= {*os.environ}:
        sys.exit("start it with torchrun or by its job file: see the top of this script")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, nodes = int(os.environ["LOCAL_RANK"]), int(os.environ["GROUP_WORLD_SIZE"])
    if world_size == 1:
        sys.exit("one process has nobody to send to: start two or more")
    if nodes == 1:
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # this machine only
    device = torch.device(local_rank % torch.accelerator.device_count() if ON_GPU else "cpu")
    if ON_GPU:  # Slurm may show a process its own GPU alone, which then has number 0
        torch.accelerator.set_device_index(device.index)
    if args.pairs:
        sys.exit(find_slow_links(args, rank, world_size, device))
    backend = dist.get_default_backend_for_device(device)  # nccl for NVIDIA GPUs, gloo for CPUs
    device_id = device if backend == "nccl" else None
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout), device_id=device_id)
    tflops = matmul_tflops(device)
    sizes, seconds, rate = measure(args, device)
    if rank == 0:
        link = print_link(sizes, seconds, rate, tflops, device, nodes)
        if args.out:
            with open(args.out, "w") as file:
                json.dump(link, file, indent=1)
    dist.barrier()
    dist.destroy_process_group()


# == Which link is slow: --pairs. To remove it: delete up to the main guard, and what names it. ==
def tournament(count):
    """Returns rounds of pairs, so that each of `count` nodes meets each other one once."""
    around = list(range(count + count % 2))  # if they are odd, one rests in each round
    half = len(around) // 2
    rounds = []
    for _ in around[1:]:
        pairs = zip(around[:half], reversed(around[half:]))
        rounds.append([pair for pair in pairs if max(pair) < count])
        around.insert(1, around.pop())
    return rounds


def send_to(peer, buffer, seconds):
    """Sends to a rank that calls receive_from(). Returns the bytes/s at which they arrive there."""
    note = torch.ones(1, dtype=torch.int64, device=buffer.device)  # how many buffers follow
    rates = []
    repeats = 1
    for turn in range(5):  # the first one connects, and the second one says how many take a third
        note.fill_(repeats)
        dist.send(note, peer)
        start = time.perf_counter()
        for _ in range(repeats):
            dist.send(buffer, peer)
        dist.recv(note, peer)  # the answer: all are there
        note.item()  # waits for the GPU
        took = time.perf_counter() - start
        rates.append(repeats * buffer.nbytes / took)
        if turn == 1:
            repeats = max(1, int(seconds / 3 / took))
    return statistics.median(rates[2:])


def receive_from(peer, buffer):
    note = torch.zeros(1, dtype=torch.int64, device=buffer.device)
    for _ in range(5):
        dist.recv(note, peer)
        for _ in range(note.item()):
            dist.recv(buffer, peer)
        dist.send(note, peer)


def measure_pairs(args, rank, device, nodes, progress):
    """Returns {(from, to): bytes/s} of what this rank has sent; `nodes` are lists of ranks."""
    buffer = torch.zeros(1 << (24 if ON_GPU else 18), device=device)  # 64 MiB or 1 MiB
    rates = {}
    for number, pairs in enumerate(tournament(len(nodes)), start=1):
        for a, b in pairs + [(b, a) for a, b in pairs]:  # one direction, then the other
            for sender, receiver in zip(nodes[a], nodes[b]):
                if rank == sender:
                    rates[a, b] = send_to(receiver, buffer, args.seconds)
                elif rank == receiver:
                    receive_from(sender, buffer)
        progress |= {"round": number, "since": time.monotonic()}
    return rates


def name_slow(rates, median, limit):
    """Returns a line for each node or link of {(from, to): bytes/s} that is below the limit."""
    slow = {pair for pair, rate in rates.items() if rate < limit}
    lines = []
    for end, verb in ((0, "sends"), (1, "receives")):
        for node in sorted({pair[end] for pair in slow}):
            links = [pair for pair in rates if pair[end] == node]
            if len(links) > 1 and 2 * len(slow.intersection(links)) > len(links):
                share = statistics.median(rates[pair] for pair in links) / median
                lines.append(f"n{node} {verb} at {share:.2f} of the median")
                slow.difference_update(links)  # they are explained
    for a, b in sorted(slow, key=rates.get):
        if (b, a) not in slow:
            lines.append(f"n{a} -> n{b} at {rates[a, b] / median:.2f} of the median")
        elif a < b:
            share = (rates[a, b] + rates[b, a]) / 2 / median
            lines.append(f"n{a} - n{b} at {share:.2f} of the median")
    return lines


def print_pairs(rates, count, expect):
    """Prints the bandwidths, and what is slow. Returns the exit status."""
    median = statistics.median_high(rates.values())  # of two, the faster one
    limit = max(1e9 * expect, median / 2)
    print("GB/s from the node of a row to that of a column")
    if count <= 10:
        print("| from |" + "".join(f" to n{node:<2} |" for node in range(count)))
        print("| ---: |" + " -----: |" * count)
        for a in range(count):
            cells = [f"{rates[a, b] / 1e9:.3g}"[:6] if a != b else "-" for b in range(count)]
            print(f"| {f'n{a}':>4} |" + "".join(f" {cell:>6} |" for cell in cells))
    else:
        slow = sorted((pair for pair in rates if rates[pair] < limit), key=rates.get)
        for a, b in slow[:20]:
            print(f"n{a} -> n{b}: {rates[a, b] / 1e9:.3g}")
        print(f"{len(rates)} pairs, {len(slow)} of them slow")
    print(f"median {median / 1e9:.3g} GB/s; slow is what is below {limit / 1e9:.3g} GB/s:")
    lines = name_slow(rates, median, limit)
    print("\n".join(lines[:20] or ["nothing"]))
    return 1 if lines else 0


def read_nccl_log(text):
    """Returns what NCCL has taken, such as "NET/IB/GDRDMA, P2P/CUMEM", and why it has no IB."""
    found = set()
    for via in re.findall(r"NCCL INFO (?:Channel|Ring) .* via (.+?)(?: comm 0x.*)?$", text, re.M):
        found.add(re.sub(r"/\d+(\(\d+\))?|\(PCI\)|/Shared|/flush=\w+", "", via.strip()))
    if not any(via.startswith("NET/") for via in found):
        found |= {f"NET/{name.strip()}" for name in re.findall(r"Using network (.+)", text)}
    reasons = r"NET/IB : No device found|Failed to open libibverbs|NCCL_IB_DISABLE set .*to 1"
    why = re.search(reasons, text)
    return ", ".join(sorted(found)), why[0] if why else ""


def sent_bytes():
    """Returns {network interface: bytes that it has sent}."""
    with open("/proc/net/dev") as file:
        pairs = [line.split(":") for line in file.readlines()[2:]]  # two lines are its head
    return {name.strip(): int(numbers.split()[8]) for name, numbers in pairs}


def watch(store, rank, world_size, timeout, progress):
    """A thread, which ends this process when the measurement comes no further."""
    names = [f"beat {other}" for other in range(world_size)]
    host = socket.gethostname()

    def read():
        return [store.get(name).decode() if store.check([name]) else "" for name in names]

    def say(line):
        print(line, file=sys.stderr, flush=True)

    while not progress["done"]:
        try:
            beat = f"{time.monotonic()} {progress['round']} {host}"
            store.set(names[rank], beat)  # as long as it changes, this process lives
            if store.check(["over"]):
                os._exit(1)
            # The first one to see it speaks for all: rank 0, or the next if that is the hung one.
            if time.monotonic() > progress["since"] + timeout + 5 * rank:
                before = read()
                time.sleep(3)
                beats = read()
                beats[rank] = beat
                silent = [n for n in range(world_size) if n != rank and beats[n] == before[n]]
                behind = min(int(beat.split()[1]) if beat else 0 for beat in beats)
                waiting = [n for n in range(world_size) if beats[n].split()[1:2] == [str(behind)]]
                who = ", ".join(
                    f"rank {n} ({beats[n].split()[2] if beats[n] else 'never started'})"
                    for n in (silent or waiting)[:8]
                )
                what = "no sign of life from" if silent else f"stuck in round {behind + 1}:"
                say(f"ended after {timeout} s without progress: {what} {who}")
                store.set("over", "1")
                time.sleep(2)  # so that all others see it
                os._exit(1)
        except dist.DistError:
            if progress["done"]:
                return
            if (os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"]) == ("1", "0"):
                say(f"ended: no answer from {os.environ['MASTER_ADDR']}, the node of rank 0")
            os._exit(1)
        time.sleep(0.5)


def find_slow_links(args, rank, world_size, device):
    """Measures all pairs of nodes. Returns the exit status."""
    log = tempfile.NamedTemporaryFile("r", prefix="nccl_")  # NCCL's, of this process
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV"}
    os.environ["NCCL_DEBUG_FILE"] = log.name
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    is_server = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    timeout = timedelta(seconds=args.timeout)
    try:
        store = dist.TCPStore(*address, world_size, is_server, timeout, wait_for_workers=False)
    except dist.DistError:
        line = f"no answer from {address[0]}:{address[1]}, the node of rank 0"
        return line if rank == 1 else 1
    progress = {"round": 0, "since": time.monotonic(), "done": False}
    words = (store, rank, world_size, args.timeout, progress)
    threading.Thread(target=watch, args=words, daemon=True).start()
    before = sent_bytes()
    try:
        backend = dist.get_default_backend_for_device(device)
        dist.init_process_group(
            backend,
            timeout=2 * timeout + timedelta(seconds=60),  # watch() comes first
            world_size=world_size,
            rank=rank,
            store=dist.PrefixStore("group", store),
            device_id=device if backend == "nccl" else None,
        )
        node_of = torch.zeros(world_size, dtype=torch.int64, device=device)
        node_of[rank] = int(os.environ["GROUP_RANK"])
        dist.all_reduce(node_of)
        ranks = {}
        for each, node in enumerate(node_of.tolist()):
            ranks.setdefault(node, []).append(each)
        nodes = [ranks[node] for node in sorted(ranks)]
        if len(nodes) == 1:
            return "--pairs needs two nodes or more" if rank == 0 else 1
        rates = measure_pairs(args, rank, device, nodes, progress)
        taken, why = read_nccl_log(log.read())
        if backend == "gloo":
            sent = {name: count - before.get(name, 0) for name, count in sent_bytes().items()}
            taken = f"gloo, {max(sent, key=sent.get)}"
        with open("/proc/self/status") as file:
            cores = re.search(r"Cpus_allowed_list:\s*(\S+)", file.read())[1]
        row = (socket.gethostname().split(".")[0], name_of(device), cores, taken, why, rates)
        rows = [None] * world_size if rank == 0 else None
        dist.gather_object(row, rows)
        progress["done"] = True
        dist.barrier()
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        threading.Event().wait()  # a peer is gone: watch() says which one, and ends this process
    status = 0
    if rank == 0:
        print("| rank | node | host           | device                | cores       | transport")
        print("| ---: | ---: | -------------- | --------------------- | ----------- | ---------")
        total = {}
        for each, (host, name, cores, taken, why, rates) in enumerate(rows):
            node = f"n{next(n for n, ranks in enumerate(nodes) if each in ranks)}"
            cells = f"{host[-14:]:14} | {name[:21]:21} | {cores[:11]:11} | {taken[:32]}"
            print(f"| {each:4} | {node:>4} | {cells}")
            for pair, rate in rates.items():
                total[pair] = total.get(pair, 0) + rate
        for why in {row[4] for row in rows if ON_GPU and "NET/Socket" in row[3]}:
            print(f"NCCL has taken sockets, the slowest way: {why or 'see NCCL_DEBUG=INFO'}")
        status = print_pairs(total, len(nodes), args.expect)
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    main(parse_args())
