"""The guards whose tests take seconds or minutes: each is seen to fail, by a pytest of its own."""

import pytest
from guards import SLOW
from test_guards import copy_with, run_tests


@pytest.mark.parametrize("guard", SLOW, ids=lambda guard: guard.change)
def test_a_guard_fails(guard, tmp_path, monkeypatch):
    monkeypatch.setenv("SOAK_KILLS", "2")
    status, printed = run_tests(copy_with(guard, tmp_path / "copy"), guard.test)
    assert status == 1 and f"\nFAILED tests/{guard.test}" in printed, printed[-3000:]


def test_a_copy_as_it_is_passes(tmp_path, monkeypatch):
    """The same tests, so that they fail by the changes alone."""
    monkeypatch.setenv("SOAK_KILLS", "2")
    tests = dict.fromkeys(guard.test for guard in SLOW)
    status, printed = run_tests(copy_with(None, tmp_path / "copy"), *tests)
    assert status == 0, printed[-3000:]
