"""tools/check: a rule says "ok" only of what was compared. Records of a right job are changed."""

import sys

import pytest
import torch
from conftest import module
from test_check import TRAIN
from test_training import check_forks

STEPS = 14
rules, records = module("tools/check/rules.py"), module("tools/check/records.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The records of two processes that train, with a validation after the eighth step."""
    folder = tmp_path_factory.mktemp("seen")
    words = f"--processes 2 --workers 1 --epochs 2 --folder {folder}".split()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHECK_FOLDER", str(folder))
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        done = check_forks("--steps", STEPS, "--", sys.executable, TRAIN, *words)
    assert done.returncode == 0, done.stdout
    return folder / "whole/seen1"


@pytest.fixture
def read(folder):
    """read() returns a Job whose records a test may change."""

    def read():
        found = records.Records(folder)
        found.read_new()
        return records.Job(found, 0)

    return read


@pytest.fixture
def job(read):
    return read()


def row_of(rule, *jobs):
    """Returns the level and the words of the first row."""
    level, _, words = rules.rows_of(rule, *jobs)[0]
    return level, words


def steps_of(job):
    return [record for process in job.ranks.values() for record in process["step"]]


def test_inputs_of_zeros(job):
    calls = job.all("forward")
    for call in calls:
        call["is_zero"] = call["step"] % 2 == 0
    level, words = row_of(rules.inputs, job)
    assert level == "ok" and f"{STEPS} of {2 * STEPS} inputs are not all zeros" in words
    for call in calls:
        call["is_zero"] = True
    assert row_of(rules.inputs, job)[0] == "not seen"


def test_validation_without_a_split(job):
    words = "50 samples are validated, by their index, none twice"
    assert row_of(rules.validation, job) == ("ok", words)
    for batch in job.all("batch"):
        batch |= {"split": ["Images", 306], "number": 0}
    assert "are trained on" in row_of(rules.validation, job)[1]
    for batch in job.all("batch"):
        if batch["size"] == 50:
            batch["index"] = [256 + index for index in batch["index"]]
    words = "50 samples are validated, by their index, none twice, and none is trained on"
    assert row_of(rules.validation, job) == ("ok", words)


def test_all_ranks_validate_the_same(job):
    job.ranks[1].records = job.ranks[0].records
    assert row_of(rules.validation, job) == ("ok", "25 samples are validated, by their index")


def test_random_numbers_of_one_place(job, monkeypatch):
    one, two, three = [1, 2], [3, 4], [5, 6]
    first, second = ("numpy", "Data", 0, 0), ("numpy", "Data", 0, 1)
    cases = (
        ("not seen", {("numpy", "Data", 0, None): [[one, two]]}),
        ("ok", {first: [[one, two]], second: [[two, three]]}),
        ("ok", {first: [[one, two], [two]]}),
        # Sequences of two lengths begin alike.
        ("ERROR", {first: [[one, two]], second: [[one, two, three]]}),
        ("ERROR", {first: [[one, two, three], [one, two]]}),
    )
    for level, drawn in cases:
        monkeypatch.setattr(rules, "drawn_by_place", lambda job, drawn=drawn: drawn)
        assert row_of(rules.augmentation, job)[0] == level, drawn


def test_precision_without_a_flag(job):
    assert row_of(rules.precision, job) == ("ok", "weights are float32, as a flag says")
    for process in job.records.processes.values():
        process["flags"].clear()
    assert row_of(rules.precision, job)[0] == "not seen"
    job.first["forward"][0]["autocast"] = "bfloat16"
    words = "weights are float32, with autocast to bfloat16"
    assert row_of(rules.precision, job) == ("ok", words)


def test_the_first_step_is_not_known_to_be_zeroed(job):
    words = f"gradients are zeroed before each of {2 * STEPS - 2} steps"
    assert row_of(rules.accumulation, job) == ("ok", words)
    for process in job.ranks.values():
        del process["step"][1:]
    assert row_of(rules.accumulation, job)[0] == "not seen"


def test_gradients_that_the_loss_of_another_optimizer_has_left(job):
    steps = [process["step"] for process in job.ranks.values()]
    for record in [record for each in steps for record in each[:2]]:
        record["keeps"] = True
    assert row_of(rules.accumulation, job)[0] == "ok", "it may be by chance"
    for each in steps:
        each[-1]["keeps"] = True
    level, words = row_of(rules.accumulation, job)
    assert level == "warning" and "step 1 of an optimizer also has gradients" in words


def test_a_column_of_beginnings_is_one_in_each_batch(job):
    """Labels may rise from 0 in a batch by chance: they stay a part of the sample."""
    calls = [call for process in job.ranks.values() for call in process.sample_calls()]
    whole = job.union("samples")
    for call in calls:
        call["beginnings"] = [[1, [3] * len(call["samples"]), [0.5] * len(call["near"])]]
    assert job.beginnings() == {1} and len(calls) > 2
    without = job.union("samples", {1})
    assert without[1] == [(number - 3) % 2**64 for number in whole[1]] != whole[1]
    calls[0]["beginnings"] = []
    assert job.beginnings() == set() and job.union("samples") == whole


def test_a_loss_of_several_numbers(job):
    words = f"{2 * STEPS} losses and the gradients of {2 * STEPS} steps are finite"
    assert row_of(rules.finite, job) == ("ok", words)
    for record in job.all("loss"):
        record["value"] = None
    assert row_of(rules.finite, job)[1] == f"the gradients of {2 * STEPS} steps are finite"


def test_the_value_of_a_loss(monkeypatch):
    for name in ("STEPS", "PAUSE", "STUCK"):
        monkeypatch.setenv(f"CHECK_{name}", "9")
    monkeypatch.setenv("CHECK_COMPARES", "")
    watch = module("tools/check/watch.py")
    watch.torch = torch
    one, nan, two = torch.ones(()), torch.tensor([torch.nan]), torch.ones(2)
    assert watch.value_of(one) == 1 and watch.value_of([one, one]) == 2
    assert torch.tensor(watch.value_of([one, nan])).isnan()
    assert watch.value_of(two) is watch.value_of((one, two)) is None
    losses = (loss for loss in [one])
    assert watch.value_of(losses) is None and next(losses) is one


def test_rates_that_no_scheduler_says(job):
    assert "the rates of 13 steps are theirs" in row_of(rules.schedule, job)[1]
    for record in steps_of(job):
        record["scheduled"] = []
    level, words = row_of(rules.schedule, job)
    assert level == "ok" and "rates" not in words


def test_rates_of_a_second_group(job):
    for record in steps_of(job):
        record["rates"] *= 2
        record["scheduled"] *= 2
    assert row_of(rules.schedule, job)[0] == "ok"
    for record in steps_of(job):
        record["rates"][1] = 0.4
    level, words = row_of(rules.schedule, job)
    assert level == "warning" and "uses the rate 0.4, but the schedule says 0.0495" in words


def test_weights_are_compared_after_a_step(job):
    words = "gradients are averaged: copies are equal in ranks [0, 1], compared "
    assert row_of(rules.weights, job) == ("ok", f"{words}{STEPS} times")
    # The job has ended before a second optimizer has taken a step in rank 1.
    job.first["start"].append(job.first.start | {"optimizer": 1})
    assert row_of(rules.weights, job) == ("ok", f"{words}{STEPS} times")
    job.ranks[1]["step"].clear()
    assert row_of(rules.weights, job)[0] == "not seen"


def test_some_masks_are_the_same(job):
    one, two = [process.training_calls() for process in job.ranks.values()]
    for mine, theirs in zip(one[:5], two):
        theirs["random"] = mine["random"]
    words = f"ranks [0, 1] draw other random numbers in {STEPS - 5} of {STEPS} calls"
    assert row_of(rules.layers, job) == ("ok", words)


def test_modes_of_the_model(job):
    words = f"the model is in train() in {STEPS} calls that train"
    assert row_of(rules.modes, job) == ("ok", words)


def test_some_samples_are_the_same(job):
    assert row_of(rules.shares, job)[1] == f"ranks have other samples in {STEPS} of {STEPS} steps"
    one, two = [process.training_calls() for process in job.ranks.values()]
    for mine, theirs in zip(one[:5], two):
        theirs["samples"] = mine["samples"]
    words = f"ranks have other samples in {STEPS - 5} of {STEPS} steps"
    assert row_of(rules.shares, job) == ("ok", words)


def test_the_order_of_samples_without_an_index(read):
    """With random noise, no sample comes again. Then nothing is known of the order."""
    for has_noise in (True, False):
        job = read()
        for batch in job.all("batch"):
            if not has_noise:
                batch["hashes"] = [batch["index"]]
            batch["index"] = [None] * len(batch["index"])
        level, words = row_of(rules.order, job)
        assert level == ("not seen" if has_noise else "ok"), words


def test_some_weights_are_in_both_runs(read):
    job, other = read(), read()
    assert row_of(rules.against, job, other)[1].startswith("6 of 6 weights are the same in 14")
    other.first.start["shapes"][0] = [1]
    assert row_of(rules.against, job, other)[1].startswith("5 of 6 weights are the same in 14")


def test_weights_of_other_ranks_have_no_gradient(job):
    assert row_of(rules.gradients, job)[1] == "6 weights of all optimizers have gradients"
    job.first.start["numbers"][:2] = [0, 0]
    assert row_of(rules.gradients, job)[1] == "4 weights of all optimizers have gradients"


def test_weights_are_counted_in_one_rank(job):
    for record in steps_of(job)[::2]:
        record["object"] = 1
        record["weights"] = [-number for number in record["weights"]]
    words = "2 optimizers have none of 12 weights in common"
    assert row_of(rules.owners, job) == ("ok", words)


def test_a_run_that_took_no_step_is_not_resumed(read):
    whole, stopped = read(), read()
    stopped.steps_done = 0
    level, words = row_of(rules.resume, whole, stopped, stopped)
    assert level == "not seen" and "took no step" in words
