"""Measure the time of an all-reduce on all GPUs of a machine or, if it has none, two CPU processes.

    python multigpu/allreduce.py                            # from 4 KiB to 1 GiB
    python multigpu/allreduce.py --num_gpus 4 --min_bytes 1048576 --out link.json
    python predict.py one.jsonl link.json                   # what that link would do to a training
    sbatch slurm/multigpu_allreduce.slurm

The columns are those of NCCL's tests (github.com/NVIDIA/nccl-tests, PERFORMANCE.md). Each of N
processes has n bytes. algbw = n / time. busbw = algbw x 2 (N - 1) / N is what each link carries in
a ring, and can be compared between different N. For many nodes there is multinode/allreduce.py.
"""

import argparse
import json
import logging
import os
import signal
import statistics
import sys
import tempfile
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

ON_GPU = torch.accelerator.is_available()  # a GPU of any maker


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    gpus = torch.accelerator.device_count()
    add("--num_gpus", type=int, default=gpus or 2, help="processes to start")
    add("--min_bytes", type=int, default=1 << 12, help="smallest size in bytes")
    add("--max_bytes", type=int, default=1 << 30, help="largest size in bytes")
    add("--seconds", type=float, default=1.0, help="time to spend on each size")
    add("--out", metavar="FILE.json", help="write the times and the fitted line, for predict.py")
    add("--timeout", type=int, default=600, help="seconds after which a hung process ends the run")
    args = parser.parse_args()
    if args.num_gpus < 2:
        parser.error("--num_gpus must be 2 or more: one process has nobody to send to")
    may_share = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"  # a GPU, as a rehearsal
    if ON_GPU and args.num_gpus > gpus and not may_share:
        parser.error(f"--num_gpus must be at most {gpus}, the GPUs of this machine")
    if not 4 <= args.min_bytes <= args.max_bytes // 2:
        parser.error("--min_bytes must be at least 4, and --max_bytes at least twice as large")
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


def main(rank, args, init_method):  # runs in each process: spawn() passes rank 0, 1, ...
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process without a traceback
    nodes, world_size = 1, args.num_gpus
    device = torch.device(rank % torch.accelerator.device_count() if ON_GPU else "cpu")
    if ON_GPU:
        torch.accelerator.set_device_index(device.index)
    backend = dist.get_default_backend_for_device(device)  # nccl for NVIDIA GPUs, gloo for CPUs
    device_id = device if backend == "nccl" else None
    timeout = timedelta(seconds=args.timeout)
    dist.init_process_group(backend, init_method, timeout, world_size, rank, device_id=device_id)
    sizes, seconds, rate = measure(args, device)
    if rank == 0:
        link = print_link(sizes, seconds, rate, device, nodes)
        if args.out:
            with open(args.out, "w") as file:
                json.dump(link, file, indent=1)
    dist.barrier()
    dist.destroy_process_group()


def launch_all(args):
    """Starts the processes, and exits with their exit status."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // args.num_gpus)))
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # this machine only
    logging.disable(logging.WARNING)  # this process would report each one that it ends
    with tempfile.TemporaryDirectory() as folder:  # the processes meet by a file in it
        try:
            words = (args, f"file://{folder}/store")
            torch.multiprocessing.spawn(main, words, args.num_gpus)
        except torch.multiprocessing.ProcessExitedException as error:
            sys.exit(error.exit_code if error.exit_code > 0 else str(error))


if __name__ == "__main__":
    launch_all(parse_args())
