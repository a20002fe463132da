r"""Measure the time of an all-reduce on GPUs of many machines or, if they have none, CPU processes.

    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HEAD_NODE:29400 -- \
        multinode/allreduce.py --min_bytes 1048576 --out link.json        # on each of two nodes
    python predict.py one.jsonl link.json                   # what that link would do to a training
    sbatch slurm/multinode_allreduce.slurm                  # on a cluster
    sbatch --nodes=8 slurm/multinode_allreduce.slurm --pairs    # which link is slow

The columns are those of NCCL's tests (github.com/NVIDIA/nccl-tests, PERFORMANCE.md). Each of N
processes has n bytes. algbw = n / time. busbw = algbw x 2 (N - 1) / N is what each link carries in
a ring, and can be compared between different N. One process a node measures the link alone. For
predict.py, start one for each GPU.

With --pairs each pair of nodes is measured on its own, all processes of the two at once. The exit
status is 1 where one is slower than half of the median, or than --expect.
"""

import argparse
import contextlib
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
    add("--out", metavar="FILE.json", help="write the times and the fitted line, for predict.py")
    add("--pairs", action="store_true", help="measure each pair of nodes: which link is slow?")
    add("--expect", type=float, default=0.0, help="GB/s that each pair must reach, with --pairs")
    add("--timeout", type=int, default=600, help="seconds after which a hung process ends the run")
    args = parser.parse_args()
    if not 4 <= args.min_bytes <= args.max_bytes // 2:
        parser.error("--min_bytes must be at least 4, and --max_bytes at least twice as large")
    if args.pairs and args.out:
        parser.error("--pairs measures no all-reduce that --out could write")
    if args.expect and not args.pairs:
        parser.error("--expect needs --pairs")
    folder = os.path.join(os.path.dirname(args.out or ""), ".")
    if args.out and (os.path.isdir(args.out) or not os.access(folder, os.W_OK)):
        where = "it is a folder, or its folder is missing or read-only"
        parser.error(f"cannot write {args.out}: {where}")
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


def print_link(sizes, seconds, rate, device, nodes):
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
    link |= {"sizes": sizes, "seconds": seconds}
    return link


def main(args):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process without a traceback
    if "SLURM_STEP_NUM_TASKS" in os.environ and not dist.is_torchelastic_launched():  # by srun
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["WORLD_SIZE"] = os.environ["SLURM_STEP_NUM_TASKS"]
        os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
        os.environ["GROUP_RANK"] = os.environ["SLURM_NODEID"]
        os.environ["GROUP_WORLD_SIZE"] = os.environ["SLURM_STEP_NUM_NODES"]
    needed = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR"}
    if not needed <= {*os.environ}:
        sys.exit("start it with torchrun or by its job file: see the top of this script")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, nodes = int(os.environ["LOCAL_RANK"]), int(os.environ["GROUP_WORLD_SIZE"])
    if world_size == 1:
        sys.exit("one process has nobody to send to: start two or more")
    if nodes == 1 and args.pairs:
        sys.exit("--pairs needs two nodes or more" if rank == 0 else 1)
    if nodes == 1:
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # this machine only
    num_gpus = torch.accelerator.device_count()
    may_share = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"  # a GPU, as a rehearsal
    if local_rank == num_gpus > 0 and dist.is_torchelastic_launched() and not may_share:
        sys.exit(f"{num_gpus} GPU(s) are too few for the processes of this node")
    device = torch.device(local_rank % num_gpus if ON_GPU else "cpu")
    if ON_GPU:  # Slurm may show a process its own GPU alone, which then has number 0
        torch.accelerator.set_device_index(device.index)
    if args.pairs:
        sys.exit(find_slow_links(args, rank, world_size, device))
    backend = dist.get_default_backend_for_device(device)  # nccl for NVIDIA GPUs, gloo for CPUs
    device_id = device if backend == "nccl" else None
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout), device_id=device_id)
    sizes, seconds, rate = measure(args, device)
    if rank == 0:
        link = print_link(sizes, seconds, rate, device, nodes)
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


def transfer(buffer, peer, is_sender, seconds):
    """Sends the buffer to this rank, or gets it from there, again and again. Returns bytes/s."""
    there, back = (dist.send, dist.recv) if is_sender else (dist.recv, dist.send)
    note = torch.ones(1, dtype=torch.int64, device=buffer.device)  # from the sender: how many come
    rates = []
    for turn in range(5):  # the first one connects, the second one says how many take a third
        there(note, peer)
        repeats = note.item()
        start = time.perf_counter()
        for _ in range(repeats):
            there(buffer, peer)
        back(note, peer)  # the answer: all are there
        note.item()  # waits for the GPU
        rates.append(repeats * buffer.nbytes / (time.perf_counter() - start))
        if turn == 1:
            note.fill_(max(1, int(seconds / 3 * rates[1] / buffer.nbytes)))
    return statistics.median(rates[2:])


def measure_pairs(args, rank, device, nodes, progress):
    """Returns {(from, to): bytes/s} of what this rank has sent; `nodes` are lists of ranks."""
    buffer = torch.zeros(1 << (24 if ON_GPU else 18), device=device)  # 64 MiB or 1 MiB
    rates = {}
    for pairs in tournament(len(nodes)):
        for a, b in pairs + [(b, a) for a, b in pairs]:  # one direction, then the other
            for sender, receiver in zip(nodes[a], nodes[b]):
                if rank == sender:
                    rates[a, b] = transfer(buffer, receiver, True, args.seconds)
                elif rank == receiver:
                    transfer(buffer, sender, False, args.seconds)
        progress |= {"round": progress["round"] + 1, "since": time.monotonic()}
    return rates


def name_slow(rates, median, limit):
    """Returns a line for each node or link of {(from, to): bytes/s} that is below the limit."""
    slow = {pair for pair, rate in rates.items() if rate < limit}
    found = []
    for end, verb in ((0, "sends"), (1, "receives")):
        for node in sorted({pair[end] for pair in slow}):
            links = [pair for pair in rates if pair[end] == node]
            if len(links) > 1 and 2 * len(slow.intersection(links)) > len(links):
                found.append((f"n{node} {verb}", links))
                slow.difference_update(links)  # they are explained
    for a, b in sorted(slow, key=rates.get):
        if (b, a) not in slow:
            found.append((f"n{a} -> n{b}", [(a, b)]))
        elif a < b:
            found.append((f"n{a} - n{b}", [(a, b), (b, a)]))
    shares = [statistics.median(rates[pair] for pair in links) / median for _, links in found]
    return [f"{name} at {share:.2f} of the median" for (name, _), share in zip(found, shares)]


def print_pairs(rates, count, expect):
    """Prints the bandwidths, and what is slow. Returns the exit status."""
    median = statistics.median_high(rates.values())  # of two, the faster one
    limit = max(1e9 * expect, median / 2)
    slow = sorted((pair for pair in rates if rates[pair] < limit), key=rates.get)
    if count <= 10:
        print("GB/s from the node of a row to that of a column:")
        print("| from |" + "".join(f" to n{node:<2} |" for node in range(count)))
        print("| ---: |" + " -----: |" * count)
        for a in range(count):
            cells = [f"{rates[a, b] / 1e9:.3g}"[:6] if a != b else "-" for b in range(count)]
            print(f"| {f'n{a}':>4} |" + "".join(f" {cell:>6} |" for cell in cells))
    else:
        print(f"GB/s of the slowest of {len(slow)} slow links among {len(rates)}:")
        print("".join(f"n{a} -> n{b}: {rates[a, b] / 1e9:.3g}\n" for a, b in slow[:20]), end="")
    print(f"median {median / 1e9:.3g} GB/s; slow is what is below {limit / 1e9:.3g} GB/s:")
    print("\n".join(name_slow(rates, median, limit)[:20] or ["nothing"]), flush=True)
    return 1 if slow else 0


def read_nccl_log(text):
    """Returns what NCCL has taken, such as "NET/IB/GDRDMA, P2P/CUMEM", and why it has no IB."""
    lines = re.findall(r"NCCL INFO (?:Channel|Ring) .* via (.+?)(?: comm 0x.*)?$", text, re.M)
    found = {re.sub(r"/\d+(\(\d+\))?|\(PCI\)|/Shared|/flush=\w+", "", via) for via in lines}
    if not any("NET/" in via for via in found):
        found |= {f"NET/{name}" for name in re.findall(r"NCCL INFO Using network (\S+)", text)}
    reasons = r"NET/IB : No device found|Failed to open libibverbs|NCCL_IB_DISABLE set .*to 1"
    return ", ".join(sorted(found)), (re.findall(reasons, text) or ["see NCCL_DEBUG=INFO"])[0]


def sent_bytes():
    """Returns {network interface: bytes that it has sent}."""
    with open("/proc/net/dev") as file:
        pairs = [line.split(":") for line in file.readlines()[2:]]  # two lines are its head
    return {name.strip(): int(numbers.split()[8]) for name, numbers in pairs}


def watch(store, rank, world_size, timeout, progress, done):
    """A thread. It ends this process where nothing goes on, and one for all says who is missing."""
    keys = [f"beat {each}" for each in range(world_size)]

    def beat():  # as long as the time changes, this process lives
        progress["answer"] = time.monotonic()  # the store has answered until now
        words = f"{progress['answer']} {progress['round']} {socket.gethostname()}"
        store.set(keys[rank], words)

    def read():  # the time, round and host of each rank
        found = [store.get(key) if store.check([key]) else b"0 0 unseen" for key in keys]
        return [words.decode().split() for words in found]

    with contextlib.suppress(dist.DistError):  # then guard() ends this process
        beat()
        while not done.wait(0.5):
            beat()
            if store.check(["over"]):
                os._exit(1)
            if time.monotonic() < progress["since"] + timeout + 5 * rank:
                continue
            before = read()  # rank 0 comes here or, if that is the hung one, the next
            time.sleep(3)
            beat()
            after = read()
            silent = [each for each in range(world_size) if after[each] == before[each]]
            least = min((words[1] for words in after), key=int)
            stuck = silent or [each for each in range(world_size) if after[each][1] == least]
            names = ", ".join(f"rank {each} ({after[each][2]})" for each in stuck[:8])
            what = "no sign of life from" if silent else f"all live; after {least} rounds waits"
            print(f"no progress in {timeout} s: {what} {names}", file=sys.stderr, flush=True)
            store.set("over", "1")
            time.sleep(2)  # so that all others see it
            os._exit(1)


def guard(timeout, progress, done):
    """A thread. It ends this process where watch() hangs or has ended: the store is rank 0's."""
    while not done.wait(0.5):
        if time.monotonic() > progress["answer"] + timeout + 5:
            if (os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"]) == ("1", "0"):
                print("no sign of life from the node of rank 0", file=sys.stderr, flush=True)
            os._exit(1)


def find_slow_links(args, rank, world_size, device):
    """Measures all pairs of nodes. Returns the exit status."""
    log = tempfile.TemporaryFile("r+")  # NCCL's, of this process
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV"}
    os.environ["NCCL_DEBUG_FILE"] = f"/proc/self/fd/{log.fileno()}"
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    is_server = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    timeout = timedelta(seconds=args.timeout)
    try:
        store = dist.TCPStore(*address, world_size, is_server, timeout, wait_for_workers=False)
    except dist.DistError:
        return f"no answer from {address[0]}, the node of rank 0" if rank == 1 else 1
    now, done = time.monotonic(), threading.Event()
    progress = {"round": 0, "since": now, "answer": now}
    words = (store.clone(), rank, world_size, args.timeout, progress, done)
    threads = [threading.Thread(target=watch, args=words, daemon=True)]
    threads.append(threading.Thread(target=guard, args=words[3:], daemon=True))
    for thread in threads:
        thread.start()
    before = sent_bytes()
    backend = dist.get_default_backend_for_device(device)
    try:
        dist.init_process_group(
            backend,
            timeout=2 * timeout + timedelta(seconds=60),  # watch() comes first
            world_size=world_size,
            rank=rank,
            store=dist.PrefixStore("group", store),
            device_id=device if backend == "nccl" else None,
        )
        node_of = [None] * world_size
        dist.all_gather_object(node_of, int(os.environ["GROUP_RANK"]))
        numbers = sorted({*node_of})
        nodes = [[each for each in range(world_size) if node_of[each] == n] for n in numbers]
        rates = measure_pairs(args, rank, device, nodes, progress)
        taken, why = read_nccl_log(log.read())
        if backend == "gloo":
            sent = {name: count - before.get(name, 0) for name, count in sent_bytes().items()}
            taken = f"gloo, {max(sent, key=sent.get)}"
        with open("/proc/self/status") as file:
            cores = re.search(r"Cpus_allowed_list:\s*(\S+)", file.read())[1]
        host = socket.gethostname().split(".")[0]
        row = (host, name_of(device), cores, taken or backend, why, rates)
        rows = [None] * world_size if rank == 0 else None
        dist.gather_object(row, rows)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        time.sleep(1e9)  # a peer is gone: watch() says which one, and ends this process
    done.set()
    for thread in threads:
        thread.join(5)
    dist.destroy_process_group()
    if rank > 0:
        return 0
    print("| rank | node | host           | device                | cores       | transport")
    print("| ---: | ---: | -------------- | --------------------- | ----------- | ---------")
    of_pair = {}
    for each, (host, name, cores, taken, _, rates) in enumerate(rows):
        cells = f"{host[-14:]:14} | {name[:21]:21} | {cores[:11]:11} | {taken[:32]}"
        print(f"| {each:4} | {f'n{numbers.index(node_of[each])}':>4} | {cells}")
        for pair, rate in rates.items():
            of_pair.setdefault(pair, []).append(rate)
    for why in sorted({row[4] for row in rows if "NET/Socket" in row[3]}):
        print(f"NCCL has taken sockets, the slowest way: {why}")
    # The slowest process sets the pace of all. Beside it, others may have ended early.
    rates = {pair: len(found) * min(found) for pair, found in of_pair.items()}
    return print_pairs(rates, len(nodes), args.expect)


if __name__ == "__main__":
    main(parse_args())
