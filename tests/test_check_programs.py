"""tools/check does not accuse right programs that it once accused."""

import programs
import pytest
from programs import PROGRAMS
from test_check import check_in_forks

# They stand for the others: one process, two, shards, zeros, a schedule, rounding, a resumed run,
# two data sets.
ONCE_ACCUSED = """fsdp_flat path_snapshots hidden_state_zeros local_sgd bf16_and_a_loss_module
    scaler_skips steps_left_out nan_in_both two_data_sets two_data_sets_split""".split()


@pytest.mark.parametrize("name", ONCE_ACCUSED)
def test_a_right_program_is_not_accused(name):
    """The soak starts the commands themselves, and all programs."""
    verdict = programs.run(PROGRAMS[name], check=check_in_forks, torchrun=())
    assert not programs.complaints(PROGRAMS[name], verdict), verdict.output[-6000:]


def test_a_verdict_is_read():
    """A finding against a right program is a complaint, and so is too little that was judged."""
    program = PROGRAMS["reptile"]
    ok = [("ok", f"kind{number}", "fine") for number in range(programs.AT_LEAST)]
    assert not programs.complaints(program, programs.Verdict(0, ok, ""))
    unseen = programs.Verdict(0, [("not seen", *row[1:]) for row in ok], "")
    assert "only 0 kinds" in programs.complaints(program, unseen)[0]
    for level, status in (("ERROR", 1), ("warning", 0)):
        accused = programs.Verdict(status, [*ok, (level, "order", "words")], "")
        assert programs.complaints(program, accused)
    assert programs.complaints(program, programs.Verdict(3, ok, ""))


def test_a_fault_must_be_named_by_its_kind():
    program = PROGRAMS["clipped_in_rank_0"]
    for kind, words, named in (("weights", "norm.bias", True), ("weights", "head", False)):
        verdict = programs.Verdict(1, [("ERROR", kind, words)], "")
        assert bool(programs.complaints(program, verdict, fault=True)) != named
    verdict = programs.Verdict(1, [("ERROR", "order", "norm")], "")
    assert programs.complaints(program, verdict, fault=True)


def test_a_rule_that_fails_is_a_complaint_of_a_fault_too():
    program = PROGRAMS["clipped_in_rank_0"]
    findings = [("ERROR", "weights", "norm.bias"), ("failed", "order", "words")]
    assert not programs.complaints(program, programs.Verdict(1, findings[:1], ""), fault=True)
    assert programs.complaints(program, programs.Verdict(1, findings, ""), fault=True)


@pytest.mark.parametrize("name", ["frozen_backbone_moves", "frozen_rows"])
def test_a_fault_without_a_kind_is_not_named(name):
    """Its row must get the kind: else nothing would notice if it were no longer named."""
    program = PROGRAMS[name]
    assert program.later or program.not_seen
    for level in ("ERROR", "warning"):
        named = programs.Verdict(1, [(level, "modes", "words")], "")
        assert programs.complaints(program, named, fault=True), level
    unseen = programs.Verdict(0, [("ok", "modes", "fine")], "")
    assert not programs.complaints(program, unseen, fault=True)


def test_each_program_says_what_is_expected():
    """Each file has a row; a fault has exactly one of kind, not_seen and later."""
    files = {path for name in ("right", "wrong") for path in (programs.FOLDER / name).glob("*.py")}
    assert files == {program.path for program in PROGRAMS.values()}
    for program in PROGRAMS.values():
        told = [program.kind, program.not_seen, program.later]
        assert sum(map(bool, told)) == program.has_fault, program.name
        assert bool(program.words) == bool(program.kind), program.name
