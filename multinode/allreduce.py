r"""Measure what an all-reduce takes between the GPUs of many nodes or, on machines that have none, CPU processes.

    torchrun --standalone --nproc_per_node=2 -- multinode/allreduce.py      # one node, to try it
    torchrun --nnodes=2 --nproc_per_node=1 --rdzv_backend=c10d --rdzv_endpoint=HEAD_NODE:29400 -- \
        multinode/allreduce.py --out link.json              # a process a node: the link between nodes; on both nodes
    sbatch --nodes=4 --gpus-per-node=4 slurm/multinode_allreduce.slurm

Sizes and bandwidths are those of NCCL's tests (github.com/NVIDIA/nccl-tests, PERFORMANCE.md): n bytes that each of N
processes has, algbw = n / time, busbw = algbw x 2 (N - 1) / N, what the slowest link carries in a ring of any N.
A line is fitted, time = latency + n x 2 (N - 1) / N / bandwidth, by least squares of the relative errors.
"""
import argparse
import atexit
import ctypes
import json
import os
import signal
import socket
import statistics
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

GROUPS = 5  # of measurements; their median is told
COLUMNS = {"bytes": "d", "time_us": ".1f", "algbw_GB/s": ".3f", "busbw_GB/s": ".3f", "fit_us": ".1f"}


def parse_args():
    parser = argparse.ArgumentParser(description="Measure all-reduces over nodes, under torchrun.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = fail
    add = parser.add_argument
    add("--min_bytes", type=int, default=1 << 12, help="smallest size, in bytes")
    add("--max_bytes", type=int, default=1 << 30, help="largest size, in bytes; each is twice the one before")
    add("--seconds", type=float, default=1.0, help="for the measurements of a size, if that is enough for five")
    add("--threads", type=int, help="CPU threads of a process; its share of the cores if not given")
    add("--out", metavar="FILE.json", help="write the times and the fitted line")
    add("--timeout", type=int, default=600, help="seconds without a word from a process that end the job")
    args = parser.parse_args()
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        fail(f"start it with torchrun, for example: torchrun --standalone --nproc_per_node=2 -- {sys.argv[0]}")
    check_sizes(args, int(os.environ["WORLD_SIZE"]))
    return args


def fail(message):
    """End on a user's mistake: one line on stderr, exit status 2."""
    print(f"{sys.argv[0]}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def check_sizes(args, world_size):
    """Refuse what cannot be measured."""
    for name in ("num_gpus", "threads", "timeout", "seconds"):
        value = getattr(args, name, None)
        if value is not None and not 0 < value < float("inf"):
            fail(f"--{name} {value} is out of range")
    if world_size < 2:
        fail("one process has nobody to send to: start two or more")
    if not 4 <= args.min_bytes <= args.max_bytes // 4:
        fail(f"--min_bytes {args.min_bytes}, --max_bytes {args.max_bytes}: take at least 4, and four times that")
    if args.out and (os.path.isdir(args.out) or not os.access(os.path.dirname(os.path.abspath(args.out)), os.W_OK)):
        fail(f"cannot write {args.out}: it is a folder, or its folder is missing or read-only")


def setup(args):
    """Join the other processes; returns rank, world_size and device."""
    rank, world_size, local_rank, local_world_size = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    torch.set_num_threads(args.threads or max(1, len(os.sched_getaffinity(0)) // local_world_size))
    device, place = torch.device("cpu"), f"process {os.getpid()}"
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())  # Slurm may show a task its own GPU only
        torch.cuda.set_device(device)
        place = f"{device} {torch.cuda.get_device_properties(device).uuid}"
    if local_world_size == world_size:  # one node: nothing needs to listen to the network
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    elif "GLOO_SOCKET_IFNAME" not in os.environ and socket.gethostbyname(socket.gethostname()).startswith("127."):
        fail(f"the name {socket.gethostname()} means this machine only (127...), which no other node can reach: set "
             "GLOO_SOCKET_IFNAME to the network interface that the nodes share, such as eth0")
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                            timeout=timedelta(seconds=args.timeout))
    places = [None] * world_size
    dist.all_gather_object(places, f"{socket.gethostname()}, {place}")
    if len(set(places)) < world_size:
        fail(f"two processes share a GPU: {places}")
    dist.all_reduce(torch.ones(1, device=device), async_op=True).wait(timedelta(seconds=min(60, args.timeout)))
    if rank == 0:
        print(*(f"rank {number}: {place}" for number, place in enumerate(places)), sep="\n")
    return rank, world_size, device


def cleanup():
    dist.all_reduce(torch.zeros(1))  # a process that leaves early can abort the others
    dist.destroy_process_group()


def leave(status=0):
    """End without Python's own end: a thread of gloo's that frees its last tensor meanwhile would abort the process."""
    atexit._run_exitfuncs()
    os._exit(status)


def measure(buffer, seconds):
    """Seconds of an all-reduce of the buffer: the median of groups of them, on the slowest process."""
    device, groups, repeats = buffer.device, [], 1
    for number in range(-2, GROUPS):  # the first one warms up, the second one tells how many fit in
        dist.all_reduce(torch.zeros(1, device=device))  # all begin together
        if buffer.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            dist.all_reduce(buffer)
        if buffer.is_cuda:
            torch.cuda.synchronize()
        slowest = torch.tensor([(time.perf_counter() - start) / repeats], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if number >= 0:
            groups.append(slowest.item())
        if number == -1:
            repeats = int(min(1000, max(1, seconds / GROUPS / slowest.item())))
    return statistics.median(groups)


def assert_right(buffer, rank, world_size):
    """End unless the sum over the processes is right, in every element: small whole numbers, so to the last bit."""
    pattern = torch.arange(7, dtype=torch.float32, device=buffer.device).repeat(len(buffer) // 7 + 1)[:len(buffer)]
    buffer.copy_(pattern).add_(rank)
    dist.all_reduce(buffer)
    wrong = (buffer != pattern.mul_(world_size).add_(world_size * (world_size - 1) // 2)).sum().item()
    if wrong:
        sys.exit(f"{sys.argv[0]}: error: {wrong} of {len(buffer)} elements wrong on rank {rank}")


def fit_line(sizes, seconds, world_size):
    """Latency in s, bandwidth in bytes/s, and the relative errors of time = latency + n 2 (N - 1) / N / bandwidth.

    Neither can be negative: where noise wants that, the latency is 0.
    """
    carried, seconds = np.array(sizes) * 2 * (world_size - 1) / world_size, np.array(seconds)
    columns = np.stack((1 / seconds, carried / seconds), 1)
    latency, per_byte = np.linalg.lstsq(columns, np.ones(len(sizes)), rcond=None)[0]
    if latency < 0 or per_byte <= 0:
        latency, per_byte = 0.0, (carried / seconds).sum() / ((carried / seconds) ** 2).sum()
    return latency, 1 / per_byte, (latency + carried * per_byte) / seconds - 1


def main(args):
    sys.stdout.reconfigure(line_buffering=True)
    rank, world_size, device = setup(args)
    nodes = world_size // int(os.environ["LOCAL_WORLD_SIZE"])
    sizes, seconds = [], []
    while not sizes or sizes[-1] * 2 <= args.max_bytes:
        sizes.append(sizes[-1] * 2 if sizes else args.min_bytes // 4 * 4)
        buffer = torch.zeros(sizes[-1] // 4, device=device)
        seconds.append(measure(buffer, args.seconds))
        assert_right(buffer, rank, world_size)
    latency, bandwidth, errors = fit_line(sizes, seconds, world_size)
    if rank == 0:
        name, backend = (torch.cuda.get_device_name(), "NCCL") if device.type == "cuda" else ("CPU", "gloo")
        print(f"{world_size} processes on {nodes} node(s), {name}, {backend}, torch {torch.__version__}; sums right")
        print("|", " | ".join(COLUMNS), "|\n|" + " --- |" * len(COLUMNS))
        factor = 2 * (world_size - 1) / world_size
        for size, took in zip(sizes, seconds):
            fitted = latency + factor * size / bandwidth
            cells = size, 1e6 * took, size / took / 1e9, factor * size / took / 1e9, 1e6 * fitted
            print("|", " | ".join(format(cell, spec) for cell, spec in zip(cells, COLUMNS.values())), "|")
        print(f"fit: {1e6 * latency:.1f} us + bytes x 2 (N - 1) / N / {bandwidth / 1e9:.4g} GB/s; errors: rms "
              f"{np.sqrt((errors ** 2).mean()):.1%}, largest {abs(errors).max():.1%}")
        if args.out:
            link = {"processes": world_size, "nodes": nodes, "device": name, "backend": backend,
                    "torch": torch.__version__, "latency_s": latency, "bandwidth_bytes_per_s": bandwidth,
                    "rms_error": np.sqrt((errors ** 2).mean()), "sizes": sizes, "seconds": seconds}
            with open(args.out, "w") as file:
                json.dump(link, file, indent=1)
    cleanup()


def end_the_silent(rank, world_size):
    """After a failed collective: name the processes that do not report within 5 s that theirs has failed, too.

    Those of this node are killed, as torchrun would do 30 s after its own signal.
    """
    silent = [0] if rank else []  # which serves the store, or its torchrun does

    def ask():
        with suppress(dist.DistError):
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(*address, timeout=timedelta(seconds=5))
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # it knows of failures before a restart
                store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
            store.set(f"failed/{rank}", "")
            time.sleep(5)
            silent[:] = [other for other in range(world_size) if not store.check([f"failed/{other}"])]

    asking = threading.Thread(target=ask, daemon=True)  # which a store that hangs keeps for ever, whatever its timeout
    asking.start()
    asking.join(8)
    if silent:
        print(f"{sys.argv[0]}: error: rank {rank} failed; no answer of ranks {silent}", file=sys.stderr, flush=True)
    torchrun, job = os.getppid(), f"MASTER_PORT={os.environ['MASTER_PORT']}"
    with suppress(OSError), open(f"/proc/{torchrun}/task/{torchrun}/children") as children:  # OSError: not Linux
        for pid in children.read().split():
            with open(f"/proc/{pid}/environ", errors="replace") as environ:
                told = environ.read().split("\0")
            if job in told and any(f"RANK={other}" in told for other in silent):
                os.kill(int(pid), signal.SIGKILL)


def run_under_torchrun(args):
    """main, in a process that is told to stop when torchrun ends, however that ends."""
    with suppress(OSError, AttributeError):  # this is not Linux
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    try:
        main(args)
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError):  # of which the others know nothing yet
            end_the_silent(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        raise
    leave()


if __name__ == "__main__":
    run_under_torchrun(parse_args())
