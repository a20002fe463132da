"""Two "nodes" on a link of known speed: network namespaces that are joined by a pair of veth."""

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
            # At this size 0.7% of what is sent are headers; at 1500 bytes 4.4%.
            command("ip", "-n", space, "link", "set", "veth", "mtu", "9000", "up")
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
            burst = max(100_000, mbit * 160)
            rate = ("rate", f"{mbit}mbit", "burst", burst, "latency", "500ms")
            command(*qdisc, "replace", *device, "tbf", *rate)
        else:
            subprocess.run([*qdisc, "del", *device], stderr=subprocess.DEVNULL)  # if any


def commands_on(spaces, port, script, *arguments):
    """The commands that run the script, one in each namespace, under torchrun."""
    for number, space in enumerate(spaces, start=1):
        enter = ["ip", "netns", "exec", space, sys.executable, "-m", "torch.distributed.run"]
        torchrun = ["--nnodes=2", "--nproc_per_node=1", f"--local_addr=10.99.0.{number}"]
        torchrun += ["--rdzv_backend=c10d", f"--rdzv_endpoint=10.99.0.1:{port}"]
        torchrun += [f"--rdzv_conf=is_host={number == 1}"]  # names mean nothing there
        yield list(map(str, [*enter, *torchrun, "--", ROOT / script, *arguments]))
