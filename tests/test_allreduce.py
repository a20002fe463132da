"""allreduce.py: its table, file and fit, wrong sums, who is missing; what --pairs finds slow."""

import itertools
import json
import os
import re
import time

import numpy as np
import pytest
from conftest import forks_of, module
from fork_server import run_all

SCRIPT = "tools/allreduce.py"
SIZES = ("--min_bytes", 1 << 12, "--max_bytes", 1 << 14)


def test_table_is_that_of_the_file(run, changed, tmp_path):
    """The columns of NCCL's tests, and the same times in the file. More --seconds, more repeats.

    What the file says that one takes, times their number, is no longer than the whole run.
    """
    line = "        seconds.append(statistics"
    told = f"        rank or print('repeats', repeats)\n{line}"
    copy, counts = changed(SCRIPT, {line: told}), []
    for seconds in ("0", "0.5"):
        start, path = time.monotonic(), tmp_path / seconds
        out = run(copy, *SIZES, "--seconds", seconds, "--out", path, processes=3)
        took, found = time.monotonic() - start, json.loads(path.read_text())
        repeats = list(map(int, re.findall(r"^repeats (\d+)", out, re.M)))
        assert 3 * np.dot(repeats, found["seconds"]) < took, "three of five took that or longer"
        counts.append(sum(repeats))
    assert counts[0] == 3 < counts[1], "one for each size"
    head, _, *rows = [line.strip("| ").split("|") for line in out.splitlines() if line[:1] == "|"]
    assert [cell.strip() for cell in head] == "bytes time_us algbw_GB/s busbw_GB/s".split()
    sizes, seconds = np.array(found["sizes"]), np.array(found["seconds"])
    rates = sizes / seconds / 1e9
    expected = np.stack((sizes, 1e6 * seconds, rates, 4 / 3 * rates), axis=1)
    assert (abs(np.array(rows, float) - expected) < (0.5, 0.06, 6e-4, 6e-4)).all()
    assert (found["processes"], found["nodes"]) == (3, 1) and 0 < found["compute_rate"] <= 1


def test_fit_finds_the_line():
    """Of exact times, exactly; of noisy ones, nearly; never a negative latency."""
    fit_line, sizes = module(SCRIPT).fit_line, [1 << n for n in range(12, 28)]
    exact = np.array([50e-6 + size * 2 * 4 / 5 / 1.25e9 for size in sizes])
    noisy = exact * np.random.default_rng(0).normal(1, 0.05, len(sizes))
    assert fit_line(sizes, exact, 5) == pytest.approx((50e-6, 1.25e9))
    assert fit_line(sizes, noisy, 5) == pytest.approx((50e-6, 1.25e9), rel=0.1)
    assert fit_line([1000, 2000], [1e-6, 3e-6], 2)[0] == 0


REFUSED = {  # flags, and why
    ("--min_bytes", 0): "--min_bytes must be a multiple of 4, the bytes of a number",
    ("--min_bytes", 6): "--min_bytes must be a multiple of 4, the bytes of a number",
    ("--max_bytes", 8): "--max_bytes must not be less than --min_bytes",
    ("--seconds", -1): "--seconds and --expect must not be negative",
    ("--expect", "nan"): "--seconds and --expect must not be negative",
    ("--timeout", 0): "--timeout must be at least 1",
}


@pytest.mark.parametrize("words", REFUSED)
def test_nonsense_is_refused(monkeypatch, capsys, words):
    monkeypatch.setattr("sys.argv", [SCRIPT, *map(str, words)])
    with pytest.raises(SystemExit, match="2"):
        module(SCRIPT).parse_args()
    assert capsys.readouterr().err.endswith(f"error: {REFUSED[words]}\n")


@pytest.mark.parametrize("words", [("--min_bytes", 6), ("--max_bytes", "many"), ("--such", 1)])
def test_wrong_flags_are_told_once(attempt, words):
    """By one of three processes. The launcher then ends the others."""
    status, out, err = attempt(SCRIPT, *words, processes=3)
    assert (status, out, err.count("error: ")) == (2, "", 1), err


def test_a_missing_folder_is_found_before_the_measurement(attempt, tmp_path):
    """In one line, by one process. The others, which wait for it, end as well."""
    words = (*SIZES, "--out", tmp_path / "missing/link.json")
    status, out, err = attempt(SCRIPT, *words, processes=3)
    told = f"cannot write {words[-1]}: its folder is missing or read-only"
    assert (status, out, err.splitlines()[0]) == (1, "", told)  # PyTorch's store may say more
    assert err.count("cannot write") == 1 and "Traceback" not in err


CHECK, LAST = "        if (buffer !=", "    link |= {"  # before these lines comes a fault
HANG = "time.sleep(100 * (rank == 1))"  # though its threads live
# A stopped process is ended when the others have ended.
STOP = "(os.system(f'(sleep 14; kill -9 {os.getpid()}) &') or os.kill(os.getpid(), 19))"
FAULTS = [  # of five processes; the last one holds the store
    (CHECK, "buffer[5] += 5 * (rank == 1)", "rank 1: an all-reduce of 4096 bytes gave a wrong sum"),
    (CHECK, HANG, "from the links: all processes live"),
    (LAST, HANG, "from the links: all processes live"),
    (CHECK, f"rank in (2, 3) and {STOP}", "from rank 2 ({host}), rank 3 ({host})"),
    (CHECK, f"rank == 0 and {STOP}", "from rank 0"),
]


@pytest.mark.parametrize("line, fault, expected", FAULTS)
def test_a_fault_ends_the_measurement(changed, tmp_path, line, fault, expected):
    """It is named in one line, by one process, three seconds after --timeout."""
    indent = re.match(" *", line)[0]
    script = changed(SCRIPT, {f"\n{line}": f"\n{indent}{fault}\n{line}"})
    commands, envs = forks_of(script, [*SIZES, "--timeout", 3], 5)
    answers = run_all(commands, envs, tmp_path, 30, ends_others="wrong sum" in expected)
    [told] = [err for status, _, err in answers if status == 1 and err]
    expected = expected.format(host=os.uname().nodename)
    assert told.count("\n") == 1 and told.endswith(f"{expected}\n"), told


def test_on_an_accelerator(run, changed, emulator):
    """The emulated one, with a smaller matrix, fails where memory is used again too early."""
    copy = changed(SCRIPT, {"4096 if ON_GPU": "256 if ON_GPU"})
    out = run(copy, *SIZES, "--seconds", 0.02, processes=2, EMU_DEVICES="2")
    assert out.startswith("processes 2, nodes 1, device Emulator, ") and "\nbeside an all-re" in out


def test_pairs_name_the_slow_node_and_link(attempt, changed):
    """Of five nodes n4 sleeps before it sends, and so do n1 and n3 before they send each other."""
    send = "            there(buffer, peer)\n"
    slow = "is_sender and (dist.get_rank() == 4 or {dist.get_rank(), peer} == {1, 3})"
    copy = changed(SCRIPT, {send: f"            time.sleep(0.1 * ({slow}))\n{send}"})
    words = ("--pairs", "--seconds", 0.05, "--expect", 0.001)
    status, out, err = attempt(copy, *words, processes=(5, 1))
    assert status == 1 and not err, err
    named = {*re.findall(r"^(n\d.*) at 0\.\d\d of the median$", out, re.M)}
    # On a busy machine, others may be slow, too: then all that a node receives.
    for names in ["n4 sends"], ["n1 -> n3", "n3 receives"], ["n3 -> n1", "n1 receives"]:
        assert named.intersection(names), out
    lines = [line for line in out.splitlines() if " sends GB/s to " in line]
    rates = [dict(re.findall(r"n(\d) ([\d.]+)", line)) for line in lines]
    for a, b in [(4, 0), (4, 1), (4, 2), (4, 3), (1, 3), (3, 1)]:
        assert float(rates[a][str(b)]) < 0.011, "1 MiB in 0.1 s"


def test_pairs_of_nodes_with_two_processes(attempt, changed):
    """A node's bandwidth is that of its processes together: each sends 1 MiB in half a second."""
    send = "            there(buffer, peer)\n"
    copy = changed(SCRIPT, {send: f"            time.sleep(0.5 * is_sender)\n{send}"})
    _, out, err = attempt(copy, "--pairs", "--seconds", 0.05, processes=(2, 2))
    rates = [float(rate) for rate in re.findall(r" sends GB/s to n\d ([\d.]+)$", out, re.M)]
    of_one = 2**20 / 0.5 / 1e9
    assert len(rates) == 2 and all(of_one < rate < 2 * of_one for rate in rates), (out, err)


def test_what_is_slow_is_named(capsys):
    script, hosts = module(SCRIPT), [f"host{n}" for n in range(20)]
    rates = dict.fromkeys(itertools.permutations(range(20), 2), 10e9)
    assert [script.print_pairs(rates, hosts, expect) for expect in (0, 9, 11)] == [0, 0, 1]
    capsys.readouterr()
    slow = {pair: rate / 4 if pair[1] == 3 else rate for pair, rate in rates.items()}
    assert script.print_pairs(slow | {(1, 2): 1e9}, hosts, expect=0) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[-2:] == ["n3 receives at 0.25 of the median", "n1 -> n2 at 0.10 of the median"]
    assert out[1].startswith("n1, host1, sends GB/s to n0 10, n2 1, n3 2.5, n4 10, ")
    two = {(0, 1): 10e9, (1, 0): 2e9}  # who is to blame is open
    assert script.print_pairs(two, hosts[:2], expect=0) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "n1 -> n0 at 0.20 of the median"
