"""More signals at any moment: for one process that starts, for a group, and for torchrun."""

import signal

import pytest
import test_stops
from test_stops import AGAIN

STOPS = {  # as in test_stops.py
    "singlegpu": [("torch is imported", signal.SIGUSR2, "parent", AGAIN)],
    "multigpu": [("training", signal.SIGUSR2, "group", AGAIN)],
    "multinode": [("training", signal.SIGTERM, "parent", 1)],  # torchrun's status
}


@pytest.mark.parametrize("folder", STOPS)
def test_resumed_weights_are_those_of_an_undisturbed_run(
    start, run, changed, data, tmp_path, chance, folder
):
    test_stops.test_resumed_weights_are_those_of_an_undisturbed_run(
        start, run, changed, data, tmp_path, chance, folder, STOPS
    )
