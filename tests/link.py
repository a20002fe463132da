"""Two "nodes" of one process each, on a link of known speed: network namespaces joined by a pair of veth."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def what_is_missing():
    """What a slow link needs and this machine does not offer, or nothing."""
    missing = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if os.geteuid() or missing or sys.platform != "linux":
        return f"needs root on Linux, and {' and '.join(missing) or 'ip and tc'}"


def command(*words):
    subprocess.run(list(map(str, words)), check=True)


@contextlib.contextmanager
def two_nodes():
    """Gives the names of the two namespaces, which end with the block."""
    spaces = [f"link{os.getpid()}{side}" for side in "ab"]
    try:
        for space in spaces:
            command("ip", "netns", "add", space)
            command("ip", "-n", space, "link", "set", "lo", "up")
        peer = ("type", "veth", "peer", "name", "veth", "netns", spaces[1])
        command("ip", "-n", spaces[0], "link", "add", "veth", *peer)
        for number, space in enumerate(spaces, start=1):
            command("ip", "-n", space, "address", "add", f"10.99.0.{number}/24", "dev", "veth")
            command("ip", "-n", space, "link", "set", "veth", "mtu", "9000", "up")  # 0.7% are headers; of 1500, 4.4%
        yield spaces
    finally:
        for space in spaces:
            with contextlib.suppress(subprocess.CalledProcessError):
                command("ip", "netns", "del", space)


def shape(spaces, mbit):
    """Slow the link down to so many Mbit/s each way; or, with None, let it be."""
    for space in spaces:
        qdisc, device = ("tc", "-n", space, "qdisc"), ("dev", "veth", "root")
        if mbit:
            rate = ("rate", f"{mbit}mbit", "burst", f"{max(100_000, mbit * 160)}", "latency", "500ms")
            command(*qdisc, "replace", *device, "tbf", *rate)
        else:
            subprocess.run([*qdisc, "del", *device], stderr=subprocess.DEVNULL)  # there may be none


def commands_on(spaces, port, script, *arguments):
    """The commands that run the script of the repository, one in each namespace, under torchrun."""
    for number, space in enumerate(spaces, start=1):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
        torchrun += ["--rdzv_backend=c10d", f"--rdzv_endpoint=10.99.0.1:{port}", f"--local_addr=10.99.0.{number}"]
        torchrun += [f"--rdzv_conf=is_host={number == 1}"]  # which it does not find out where names mean nothing
        enter = ["ip", "netns", "exec", space]
        yield list(map(str, [*enter, *torchrun, "--", ROOT / script, "--threads", "1", *arguments]))
