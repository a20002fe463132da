"""Nodes on links of known speed: network namespaces, each with a veth to one bridge."""

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from fork_server import run_all, torchrun_env

ROOT = Path(__file__).resolve().parents[2]
PORTS = itertools.count(29400)


def what_is_missing():
    """What a slow link needs and this machine does not offer, or nothing."""
    missing = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if os.geteuid() or missing or sys.platform != "linux":
        return f"needs root on Linux, and {' and '.join(missing) or 'ip and tc'}"


def command(words):
    subprocess.run(words.split(), check=True)


@contextlib.contextmanager
def nodes(count):
    """Gives the names of so many namespaces, which end with the block. The bridge has its own."""
    hub, *spaces = [f"link{os.getpid()}n{number}" for number in range(count + 1)]
    try:
        for space in (hub, *spaces):
            command(f"ip netns add {space}")
            command(f"ip -n {space} link set lo up")
        # Of packets of 9000 bytes, 0.7% are headers; of 1500 bytes 4.4%.
        command(f"ip -n {hub} link add bridge mtu 9000 up type bridge")
        for number, space in enumerate(spaces, start=1):
            veth = f"port{number} mtu 9000 type veth peer name veth mtu 9000 netns {space}"
            command(f"ip -n {hub} link add {veth}")
            command(f"ip -n {hub} link set port{number} master bridge up")
            command(f"ip -n {space} address add 10.99.0.{number}/24 dev veth")
            command(f"ip -n {space} link set veth up")
        yield spaces
    finally:
        for space in (hub, *spaces):
            with contextlib.suppress(subprocess.CalledProcessError):
                command(f"ip netns del {space}")


def shape(spaces, mbit):
    """Slow what these nodes send down to so many Mbit/s."""
    limit = f"rate {mbit}mbit burst {max(100_000, int(mbit * 160))} latency 500ms"
    for space in spaces:
        command(f"tc -n {space} qdisc replace dev veth root tbf {limit}")


def run(spaces, script, *arguments, timeout=600):
    """Run a script of multinode, a process on each of these nodes: [(exit status, out, err)]."""
    common = {"MASTER_ADDR": "10.99.0.1", "MASTER_PORT": str(next(PORTS))}
    common["GLOO_SOCKET_IFNAME"] = "veth"
    envs = [torchrun_env(rank, len(spaces), 1) | common for rank in range(len(spaces))]
    envs = [env | {"NETWORK": space} for env, space in zip(envs, spaces)]
    return run_all([[ROOT / script, *arguments]] * len(spaces), envs, ROOT, timeout)
