"""Nodes on links of known speed: network namespaces, each with a veth to one bridge."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def what_is_missing():
    """What a slow link needs and this machine does not offer, or nothing."""
    missing = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if os.geteuid() or missing or sys.platform != "linux":
        return f"needs root on Linux, and {' and '.join(missing) or 'ip and tc'}"


def command(*words):
    subprocess.run(list(map(str, words)), check=True)


@contextlib.contextmanager
def nodes(count):
    """Gives the names of so many namespaces, which end with the block. The bridge has its own."""
    hub, *spaces = [f"link{os.getpid()}n{number}" for number in range(count + 1)]
    try:
        for space in (hub, *spaces):
            command("ip", "netns", "add", space)
            command("ip", "-n", space, "link", "set", "lo", "up")
        command("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        command("ip", "-n", hub, "link", "set", "bridge", "mtu", 9000, "up")
        for number, space in enumerate(spaces, start=1):
            peer = ("type", "veth", "peer", "name", "veth", "netns", space)
            command("ip", "-n", hub, "link", "add", f"port{number}", *peer)
            port = ("link", "set", f"port{number}", "master", "bridge", "mtu", 9000, "up")
            command("ip", "-n", hub, *port)
            command("ip", "-n", space, "address", "add", f"10.99.0.{number}/24", "dev", "veth")
            # At this size 0.7% of what is sent are headers; at 1500 bytes 4.4%.
            command("ip", "-n", space, "link", "set", "veth", "mtu", 9000, "up")
        yield spaces
    finally:
        for space in (hub, *spaces):
            with contextlib.suppress(subprocess.CalledProcessError):
                command("ip", "netns", "del", space)


def shape(spaces, mbit):
    """Slow what these nodes send down to so many Mbit/s; or, with None or 0, let it be."""
    for space in spaces:
        qdisc, device = ("tc", "-n", space, "qdisc"), ("dev", "veth", "root")
        if mbit:
            burst = max(100_000, int(mbit * 160))
            rate = ("rate", f"{mbit}mbit", "burst", burst, "latency", "500ms")
            command(*qdisc, "replace", *device, "tbf", *rate)
        else:
            subprocess.run([*qdisc, "del", *device], stderr=subprocess.DEVNULL)  # if any


def commands_on(spaces, port, script, *arguments):
    """The commands that run the script, one in each namespace, under torchrun."""
    for number, space in enumerate(spaces, start=1):
        enter = ["ip", "netns", "exec", space, sys.executable, "-m", "torch.distributed.run"]
        torchrun = [f"--nnodes={len(spaces)}", "--nproc_per_node=1"]
        torchrun += [f"--local_addr=10.99.0.{number}"]
        torchrun += ["--rdzv_backend=c10d", f"--rdzv_endpoint=10.99.0.1:{port}"]
        torchrun += [f"--rdzv_conf=is_host={number == 1}"]  # names mean nothing there
        yield list(map(str, [*enter, *torchrun, "--", ROOT / script, *arguments]))
