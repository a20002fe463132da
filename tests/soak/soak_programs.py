"""tools/check on small programs of other people's kinds: right ones, and ones with one fault."""

import programs
import pytest
from programs import PROGRAMS

FAULTY = [name for name, program in PROGRAMS.items() if program.has_fault]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_right_program_is_not_accused(name):
    """Status 0, nothing is said against it, and as many kinds as its row says were judged."""
    verdict = programs.run(PROGRAMS[name])
    assert not programs.complaints(PROGRAMS[name], verdict), verdict.output[-6000:]


@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_is_named(name):
    """By its kind. Where nothing can see it today, programs.toml has the reason."""
    verdict = programs.run(PROGRAMS[name], fault=True)
    assert not programs.complaints(PROGRAMS[name], verdict, fault=True), verdict.output[-6000:]
