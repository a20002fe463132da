"""Logs that are cut off, empty, doubled or wrong: report.py and predict.py say so in one line."""

import json
from pathlib import Path

import pytest
from conftest import call
from test_predict import in_a_folder_of_its_own, link, predict  # noqa: F401
from test_report import report, rows_of, write


def texts_of(run, processes=1, seconds=(8, 8), **changes):
    return [json.dumps(row) for row in rows_of(run, processes, seconds, **changes)]


def outputs_of(*paths):
    """What report.py and predict.py answer to these logs."""
    return call(report, *paths), call(predict, *paths, link("l"))


def changed(name, value):
    """A row whose column of this name is another, or is missing."""
    row = json.loads(texts_of("a")[0])
    row.pop(name) if value is None else row.update({name: value})
    if name == "batch_size":
        row["settings"] = {name: value}
    return json.dumps(row)


WRONG = {  # a second line of a log, and what is said of it
    '{"step": 1': 'is not JSON: {"step": 1',
    "[1, 2]": "is no row of a log: it has no settings",
    '{"step": 1}': "is no row of a log: it has no settings",
    changed("settings", 3): "is no row of a log: it has no settings",
    changed("step", None): "step is no number of 0 or more but None",
    changed("step", "many"): "step is no number of 0 or more but many",
    changed("steps", -1): "steps is no number of 0 or more but -1",
    changed("processes", 0): "processes is no number of 1 or more but 0",
    changed("steps_per_epoch", 0): "steps_per_epoch is no number of 1 or more but 0",
    changed("batch_size", 0): "batch_size is no number of 1 or more but 0",
    changed("forward", float("nan")): "forward is no number of 0 or more but nan",
    changed("backward", -0.5): "backward is no number of 0 or more but -0.5",
    changed("comm_total", True): "comm_total is no number of 0 or more but True",
    changed("rank", 1): "rank 1 is none of 1 processes",
    changed("device", None): "device is no text but None",
    changed("stages", 4): "stages is no list but 4",
    changed(
        "last_step", ["data"]
    ): "last_step has data, and each part is [name, start, end, bytes]",
    changed("last_step", [["data", 2, 1, 0]]): "last_step has ['data', 2, 1, 0], and each part is",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_row_is_named(line):
    log = Path("wrong.jsonl")
    log.write_text(f"{texts_of('a')[0]}\n{line}\n")
    for done in outputs_of(log):
        assert done.returncode == 1 and not done.stdout
        assert done.stderr.startswith("wrong.jsonl, line 2") and "\n" not in done.stderr
        assert WRONG[line] in done.stderr


def test_a_file_that_is_no_log_is_named():
    Path("empty.jsonl").write_text("")
    Path("folder").mkdir()
    Path("bytes.jsonl").write_bytes(b"\x80\x00\n")
    for path, told in {
        "empty.jsonl": "empty.jsonl has no row: did its run reach a validation?",
        "folder": "folder is a folder without a log: none of its files ends in .jsonl",
        "missing.jsonl": "missing.jsonl cannot be read: No such file or directory",
        "bytes.jsonl": "bytes.jsonl, line 1 is not JSON: \ufffd\x00",
    }.items():
        for done in outputs_of(path):
            assert (done.returncode, done.stderr, done.stdout) == (1, told, ""), path


def test_a_last_line_that_was_cut_off_is_left_out():
    whole, log = Path("whole.jsonl"), Path("cut.jsonl")
    lines = texts_of("a")
    whole.write_text("\n".join(lines) + "\n")
    log.write_text("\n".join(lines) + "\n" + lines[0][:50])
    for expected, done in zip(outputs_of(whole), outputs_of(log)):
        assert done.stderr == "warning: cut.jsonl, line 3 was cut off, and is left out\n"
        assert done.stdout == expected.stdout and done.returncode == 0
    log.write_text(lines[0][:50])
    for done in outputs_of(log):
        assert done.returncode == 1 and done.stderr.endswith(
            "cut.jsonl has no row: did its run reach a validation?"
        )
    log.write_text("\n".join(lines))  # whole, though its last line has no end
    assert all(not done.stderr for done in outputs_of(log))


def test_a_run_in_two_files_counts_once():
    """In a copy, in a folder and by name, or as the first rows of a log that has more by now."""
    log = write(Path("a.jsonl"), rows_of("a", 1, [8, 8]), rows_of("b", 2, [5, 5]))
    Path("copies").mkdir()
    Path("copies/a.jsonl").write_text(log.read_text())
    Path("copies/early.jsonl").write_text(texts_of("a")[0] + "\n")
    for expected, twice in zip(outputs_of(log), outputs_of(log, log)):
        assert twice == expected, "the same file is read once"
    for expected, done in zip(outputs_of(log), outputs_of(log, "copies")):
        assert done.stdout == expected.stdout, done.stdout
        told = "7 rows are there twice and count once, the first in copies/a.jsonl, line 1"
        assert done.stderr == f"warning: {told}\n"
