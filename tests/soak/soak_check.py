"""tools/check.py on each fault alone: it is named, by the right sentence. `make soak` runs it."""

import faults
import pytest
from test_check import LONG_SCRIPTS, problems, start


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_named(fault, tmp_path):
    status, lines, before = faults.run([fault], tmp_path)
    assert faults.is_found(fault, lines), (lines, before[-2000:])
    assert not any("failed itself" in line for line in lines), lines


@pytest.mark.parametrize("script", LONG_SCRIPTS)
def test_scripts_are_right(script, tmp_path):
    status, lines, before = faults.check(
        start(script, LONG_SCRIPTS[script]), tmp_path, "--steps 20"
    )
    assert status == 0 and problems(lines) == [], (lines, before[-2000:])
