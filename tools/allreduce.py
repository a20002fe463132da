"""Measure the time of an all-reduce on GPUs or, where there are none, CPU processes.

    torchrun --standalone --nproc_per_node=4 tools/allreduce.py --out link.json   # on one machine
    torchrun --nnodes=2 ... tools/allreduce.py --min_bytes 1048576 --out link.json    # on each of 2
    sbatch --nodes=8 slurm/tools_allreduce.slurm --pairs    # which link is slow

As in NCCL's tests, algbw = n / time, and busbw = algbw x 2 (N - 1) / N, for n bytes in each of N
processes. --pairs has status 1 where a pair is slower than half of the median, or than --expect.
"""

import argparse
import json
import math
import os
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

ON_GPU = torch.accelerator.is_available()  # a GPU of any maker


class Parser(argparse.ArgumentParser):
    """Processes of one command read the same flags. One of them says what is wrong with these."""

    def error(self, message):
        rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
        if rank != "0":
            time.sleep(10)  # until then, torchrun or srun ends this process if rank 0 has failed
        super().error(message)


def parse_args():
    parser = Parser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--min_bytes", type=int, default=1 << 12, help="smallest size in bytes")
    add("--max_bytes", type=int, default=1 << 30, help="largest size in bytes")
    add("--seconds", type=float, default=1.0, help="for each size, or each direction of a pair")
    add("--out", metavar="FILE.json", help="write the times and the fitted line, for predict.py")
    add("--pairs", action="store_true", help="measure each pair of nodes: which link is slow?")
    add("--expect", type=float, default=0.0, help="GB/s that each pair must reach, with --pairs")
    add("--timeout", type=int, default=600, help="seconds after which a hung process ends the run")
    args = parser.parse_args()
    if args.min_bytes < 4 or args.min_bytes % 4:
        parser.error("--min_bytes must be a multiple of 4, the bytes of a number")
    if args.max_bytes < args.min_bytes:
        parser.error("--max_bytes must not be less than --min_bytes")
    if not (0 <= args.seconds < math.inf and 0 <= args.expect < math.inf):
        parser.error("--seconds and --expect must not be negative")
    if args.timeout < 1:
        parser.error("--timeout must be at least 1")
    return args


def time_all_reduce(buffer, repeats):
    """Returns the seconds of one of `repeats` all-reduces, on the slowest process."""
    dist.barrier()  # all processes start together
    start = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(buffer)
    buffer[0].item()  # waits for the GPU
    slowest = torch.tensor((time.perf_counter() - start) / repeats, device=buffer.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def compute_rate(buffer):
    """Returns how fast a process computes beside an all-reduce, as a share of its usual speed."""
    matrix = torch.rand([4096 if ON_GPU else 256] * 2, device=buffer.device)
    rates = []
    for _ in range(9):
        dist.barrier()
        work = dist.all_reduce(buffer, async_op=True)
        moments = []
        while len(moments) < 2 or not work.is_completed():  # in the first one it may not have begun
            (matrix @ matrix).sum().item()
            moments.append(time.perf_counter())
        work.wait()
        start = time.perf_counter()
        for _ in moments[1:]:
            (matrix @ matrix).sum().item()
        rates.append((time.perf_counter() - start) / (moments[-1] - moments[0]))
    return min(1.0, statistics.median(rates))


def fit_line(sizes, seconds, world_size):
    """Returns the latency (s) and bandwidth (bytes/s) of the line with least relative errors."""
    carried = np.array(sizes) * 2 * (world_size - 1) / world_size  # bytes on each link
    columns = np.stack((np.ones(len(sizes)), carried), axis=1) / np.array(seconds)[:, None]
    latency, per_byte = np.linalg.lstsq(columns, np.ones(len(sizes)), rcond=None)[0]
    if latency < 0 or per_byte <= 0:  # noise
        latency, per_byte = 0.0, columns[:, 1].sum() / (columns[:, 1] ** 2).sum()
    return latency, 1 / per_byte


def measure(args, device, nodes, progress):
    """Prints a row for each size, and the fitted line. Returns what --out writes."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    name = torch.get_device_module(device).get_device_name(device) if ON_GPU else "CPU"
    link = {"processes": world_size, "nodes": nodes, "device": name, "torch": torch.__version__}
    tell = print if rank == 0 else lambda line: None
    tell(", ".join(f"{name} {value}" for name, value in link.items()))
    tell("|      bytes |    time_us | algbw_GB/s | busbw_GB/s |")
    tell("| ---------: | ---------: | ---------: | ---------: |")
    sizes = [args.min_bytes << n for n in range(64) if args.min_bytes << n <= args.max_bytes]
    seconds = []
    for size in sizes:
        buffer = torch.full((size // 4,), 1.0 + rank, device=device)
        dist.all_reduce(buffer)  # warm-up
        if (buffer != world_size * (world_size + 1) / 2).any():
            sys.exit(f"rank {rank}: an all-reduce of {size} bytes gave a wrong sum")
        buffer.zero_()  # sums of zeros cannot overflow
        repeats = max(1, int(args.seconds / 5 / time_all_reduce(buffer, 1)))
        seconds.append(statistics.median(time_all_reduce(buffer, repeats) for _ in range(5)))
        algbw = size / seconds[-1] / 1e9
        busbw = algbw * 2 * (world_size - 1) / world_size
        tell(f"| {size:10} | {1e6 * seconds[-1]:10.1f} | {algbw:10.3f} | {busbw:10.3f} |")
        progress["moment"] = time.monotonic()
    latency, bandwidth = fit_line(sizes, seconds, world_size)
    tell(f"fit: {1e6 * latency:.1f} us + n x 2 (N - 1) / N / {bandwidth / 1e9:.4g} GB/s")
    rate = compute_rate(buffer[: 1 << (28 if ON_GPU else 22)])  # 1 GiB or 16 MiB
    tell(f"beside an all-reduce a process computes at {rate:.0%} of its speed")
    link |= {"latency_s": latency, "bandwidth_bytes_per_s": bandwidth, "compute_rate": rate}
    return link | {"sizes": sizes, "seconds": seconds}


def transfer(buffer, peer, is_sender, seconds):
    """Sends the buffer to the rank `peer`, or gets it from there, many times. Returns bytes/s."""
    there, back = (dist.send, dist.recv) if is_sender else (dist.recv, dist.send)
    note = torch.ones(1, dtype=torch.int64, device=buffer.device)  # from the sender: how many come
    for _ in range(3):  # the first one connects, and each one says how many the next has time for
        there(note, peer)
        repeats = note.item()
        start = time.perf_counter()
        for _ in range(repeats):
            there(buffer, peer)
        back(note, peer)  # the answer: all are there
        note.item()  # waits for the GPU
        rate = repeats * buffer.nbytes / (time.perf_counter() - start)
        note.fill_(max(1, int(seconds * rate / buffer.nbytes)))
    return rate


def measure_pairs(args, device, ranks_of, progress):
    """Returns {(from, to): bytes/s} of nodes, each a list of its ranks."""
    buffer = torch.zeros(1 << (24 if ON_GPU else 18), device=device)  # 64 MiB or 1 MiB
    rank, nodes, own = dist.get_rank(), range(len(ranks_of)), {}
    for turn in range(1, 1 << (len(nodes) - 1).bit_length()):
        # In each turn a node has at most one partner, and over all turns each other one once.
        pairs = [(node, node ^ turn) for node in nodes if node ^ turn in nodes]
        for a, b in sorted(pairs, key=lambda pair: pair[0] > pair[1]):  # first one direction
            for sender, receiver in zip(ranks_of[a], ranks_of[b]):
                if rank == sender:
                    own[a, b] = transfer(buffer, receiver, True, args.seconds)
                elif rank == receiver:
                    transfer(buffer, sender, False, args.seconds)
        progress["moment"] = time.monotonic()
    by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, own)
    rates = {}
    for pair in [(a, b) for a in nodes for b in nodes if a != b]:
        found = [each[pair] for each in by_rank if pair in each]
        rates[pair] = len(found) * min(found)  # beside the slowest, others may have ended early
    return rates


def print_pairs(rates, hosts, expect):
    """Prints the bandwidths of {(from, to): bytes/s}, and what is slow. Returns the status."""
    median = statistics.median_high(rates.values())  # of two, the faster one
    limit = max(1e9 * expect, median / 2)
    slow = {pair for pair, rate in rates.items() if rate < limit}
    named = {}
    for node, host in enumerate(hosts):
        links = [[pair for pair in rates if pair[end] == node] for end in (0, 1)]
        cells = [f"n{pair[1]} {rates[pair] / 1e9:.3g}" for pair in links[0]]
        print(f"n{node}, {host}, sends GB/s to {', '.join(cells)}")
        for pairs, verb in zip(links, ("sends", "receives")):
            if len(pairs) > 1 and 2 * len(slow.intersection(pairs)) > len(pairs):
                named[f"n{node} {verb}"] = pairs
    named |= {f"n{a} -> n{b}": [(a, b)] for a, b in sorted(slow.difference(*named.values()))}
    print(f"median {median / 1e9:.3g} GB/s; slow (below {limit / 1e9:.3g} GB/s): {len(named)}")
    for name, pairs in named.items():
        share = statistics.median(rates[pair] for pair in pairs) / median
        print(f"{name} at {share:.2f} of the median")
    return 1 if slow else 0


def watch_for_hang(store, rank, world_size, timeout, progress, done):
    """Runs in a thread. Ends this process if nothing goes on; one process says who is missing."""
    beats = [f"beat {each}" for each in range(world_size)]
    pool = ThreadPoolExecutor(1)  # it asks the store, which is rank 0's and may not answer

    def read(names):
        store.set(beats[rank], f"{time.monotonic()} {os.uname().nodename}")  # this one lives
        return [store.get(name).decode() if store.check([name]) else "0 unseen" for name in names]

    try:
        while time.monotonic() < progress["moment"] + timeout + 5 * rank:  # rank 0 is the first
            if pool.submit(read, ["over"]).result(timeout) != ["0 unseen"]:
                os._exit(1)
            if done.wait(0.5):
                return
        before = pool.submit(read, beats).result(timeout)
        time.sleep(3)
        pairs = enumerate(zip(before, pool.submit(read, beats).result(timeout)))
        names = [f"rank {n} ({old.split()[1]})" for n, (old, new) in pairs if old == new]
        found = ", ".join(names[:8]) or "the links: all processes live"
        store.set("over", "")
    except (TimeoutError, RuntimeError) as error:  # of the store: rank 0 hangs, or has ended
        found = "rank 0" if rank == 1 and isinstance(error, TimeoutError) else ""
    if found:
        print(f"no sign of life for {timeout} s from {found}", file=sys.stderr)
        time.sleep(2)  # so that all others see that it is over
    os._exit(1)


def number_of(name, of_slurm):
    """Returns a number, such as the rank: `name` is torchrun's variable, `of_slurm` srun's."""
    by_srun = "SLURM_STEP_NUM_TASKS" in os.environ and not dist.is_torchelastic_launched()
    found = os.environ.get(f"SLURM_{of_slurm}" if by_srun else name)
    return int(found or sys.exit("start it with torchrun or srun: see the top of this script"))


def main(args):
    # The processes, and their devices.
    rank, world_size = number_of("RANK", "PROCID"), number_of("WORLD_SIZE", "STEP_NUM_TASKS")
    node, nodes = number_of("GROUP_RANK", "NODEID"), number_of("GROUP_WORLD_SIZE", "STEP_NUM_NODES")
    local_rank = number_of("LOCAL_RANK", "LOCALID")
    if world_size == 1 or nodes == 1 and args.pairs:
        sys.exit("it needs two processes or more, and --pairs two nodes")
    if nodes == 1:
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # this machine only
    device = torch.device(local_rank % torch.accelerator.device_count() if ON_GPU else "cpu")
    if ON_GPU:  # Slurm may show a process its own GPU alone, which then has number 0
        torch.accelerator.set_device_index(device.index)
    backend = dist.get_default_backend_for_device(device)  # nccl for NVIDIA GPUs, gloo for CPUs

    # They meet at a store. A thread of each watches whether all of them go on.
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_server = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    wait = timedelta(seconds=args.timeout)  # the group waits longer, so that watch() comes first
    store = dist.TCPStore(*address, world_size, is_server, wait, wait_for_workers=False)
    progress, done = {"moment": time.monotonic()}, threading.Event()
    words = store.clone(), rank, world_size, args.timeout, progress, done
    watcher = threading.Thread(target=watch_for_hang, args=words, daemon=True)
    watcher.start()
    if rank == 0 and args.out and not os.access(Path(args.out).absolute().parent, os.W_OK):
        sys.exit(f"cannot write {args.out}: its folder is missing or read-only")

    # The measurement.
    try:
        dist.init_process_group(backend, None, 9 * wait, world_size, rank, store)
        places = [None] * world_size
        dist.all_gather_object(places, (node, os.uname().nodename))
        if args.pairs:
            of_nodes = [[r for r in range(world_size) if places[r][0] == n] for n in range(nodes)]
            rates = measure_pairs(args, device, of_nodes, progress)
        else:
            link = measure(args, device, nodes, progress)
        dist.barrier()  # until here each process is watched
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        time.sleep(1e9)  # a peer is gone: watch_for_hang() says which one, and ends this process

    # The end.
    done.set()
    watcher.join()  # nobody asks the store any more when rank 0, which may hold it, ends
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0 and args.pairs:
        sys.exit(print_pairs(rates, [dict(places)[n] for n in range(nodes)], args.expect))
    if rank == 0 and args.out:
        Path(args.out).write_text(json.dumps(link, indent=1))


if __name__ == "__main__":
    main(parse_args())
