"""The five commands from a data set of the Hub to transformers, on one process."""

import test_hub


def test_five_commands_on_one_process(tmp_path):
    test_hub.test_five_commands_from_the_hub_to_elsewhere(tmp_path, "singlegpu")
