"""torch.emu: the emulated accelerator of emu.cpp. A torch that finds this folder has it.

    PYTHONPATH=tests/emulator python script.py
    EMU_DEVICES=4                  # so many; 0: as if there were none
    EMU_FIRST=2                    # those of a node from its third one on
    EMU_SIM=kernel=1000,comm=3000  # simulated microseconds; else time is real

A script may ask for torch.emu.host_waits(), how often the host has waited for a device, and for
torch.emu.sleep(seconds), a kernel.
"""

import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from torch import Event, Stream  # noqa: F401  torch expects them of torch.<device type>
from torch.accelerator import current_device_index as current_device  # noqa: F401
from torch.accelerator import current_stream, empty_cache, max_memory_allocated  # noqa: F401
from torch.accelerator import memory_allocated, memory_stats, set_stream, synchronize  # noqa: F401
from torch.accelerator import set_device_index as set_device  # noqa: F401

SOURCE = Path(__file__).with_name("emu.cpp")


# == The library ==
def build():
    """Returns the path of the library for this source and torch. Makes it where there is none."""
    home = Path(torch.__file__).parent
    source = SOURCE.read_bytes() + f"{torch.__version__} {sys.version}".encode()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_emu"
    library = cache / f"{torch.__version__}-{hashlib.sha256(source).hexdigest()[:16]}.so"
    if library.exists():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    folders = [home / "include", home / "include/torch/csrc/api/include"]
    command = ["g++", "-O0", "-std=c++20", "-fPIC", "-shared", SOURCE, "-o", f"{library}.new"]
    command += [f"-I{folder}" for folder in (*folders, sysconfig.get_path("include"))]
    command += f"-L{home}/lib -ltorch -ltorch_cpu -lc10 -ltorch_python".split()
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process builds, the others wait
        if not library.exists():
            if not shutil.which("g++"):
                sys.exit("torch.emu needs g++, which is not installed (Debian: apt install g++)")
            with open(library.with_suffix(".log"), "w") as log:
                if subprocess.run(command, stderr=log).returncode:
                    sys.exit(f"torch.emu does not build with torch {torch.__version__}: {log.name}")
            os.replace(f"{library}.new", library)
    return library


spec = importlib.util.spec_from_file_location("emu_C", build())
spec.loader.exec_module(_C := importlib.util.module_from_spec(spec))
host_waits, sleep = _C.host_waits, _C.sleep
device_count, _is_in_bad_fork = _C.device_count, _C.is_bad_fork


# == What torch expects of torch.<device type> ==
def is_available():
    return device_count() > 0


is_initialized = is_available


def _lazy_init():
    """Without it, synchronize() of torch 2.11 does nothing."""


def get_device_name(device=None):
    return "Emulator"


def get_amp_supported_dtype():
    return [torch.float16, torch.bfloat16]


def get_rng_state(device=None):
    return torch.get_rng_state()  # random numbers are the CPU's


def set_rng_state(state, device=None):
    torch.set_rng_state(state)


manual_seed = manual_seed_all = torch.default_generator.manual_seed


def stream(stream):
    return stream if stream is not None else torch.accelerator.device_index(None)


def device(device):
    index = torch.accelerator._utils._get_device_index(device, optional=True)
    return torch.accelerator.device_index(index)


# == What torch has for CUDA alone ==
def lstm_cell(input_gates, hidden_gates, c, *biases):
    """A kernel of CUDA, which torch takes for other accelerators, too: h, c, and what it saves."""
    gates = sum(filter(torch.is_tensor, biases), input_gates + hidden_gates)
    i, f, g, o = gates.chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c, gates


def compile_graph(self, graph, inputs):
    """torch.compile() traces as ever. Then, as Inductor knows no emu, the graph runs by itself."""
    from torch._dynamo.backends.debugging import aot_eager

    return aot_eager(graph, inputs)


def create_group(store, rank, size, timeout):
    return _C.wrap(torch.distributed.ProcessGroupGloo(store, rank, size, timeout=timeout))


def register():
    """torch calls it at the end of its import, as emu-0.1.dist-info names it."""
    torch.utils.rename_privateuse1_backend("emu")
    torch._register_device_module("emu", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    aten = torch.emu._aten = torch.library.Library("aten", "IMPL")
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        aten.impl("_thnn_fused_lstm_cell", lstm_cell, key)
    torch._TorchCompileInductorWrapper.__call__ = compile_graph
    # By default it forks the random states of CUDA: torch 2.12's pipelining does not name a device.
    torch.random.fork_rng = functools.partial(torch.random.fork_rng, device_type="emu")
    if torch.distributed.is_available():
        torch.distributed.Backend.register_backend("emu_ccl", create_group, devices=["emu"])
