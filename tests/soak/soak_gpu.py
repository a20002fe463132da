"""The GPU check's part `processes`: each of its scripts on two emulated GPUs, and on the CPU."""

import pytest
import test_gpu
from test_gpu import gpu, on_gpus

EXPECTED = {"processes": [on_gpus(script) for script in gpu.PARALLEL]}


@pytest.mark.usefixtures("emulator")
def test_processes(attempt, monkeypatch, data, tmp_path):
    test_gpu.test_each_kind_of_command_runs(
        attempt, monkeypatch, data, tmp_path, "processes", EXPECTED
    )
