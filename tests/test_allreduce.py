"""allreduce.py: its table, file and fit, wrong sums, who is missing; what --pairs finds slow."""

import itertools
import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor

import link
import numpy as np
import pytest
from conftest import LOOPBACK, free_port, module
from fork_server import run_all, torchrun_env

SCRIPT = "tools/allreduce.py"
SIZES = ("--min_bytes", 1 << 12, "--max_bytes", 1 << 14)
CHECK = "        if (buffer !="
THERE = '        progress["moment"] = time.monotonic()\n    dist.'  # after a turn of --pairs


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
    table = [line.split("|")[1:-1] for line in out.splitlines() if line[:1] == "|"]
    assert [cell.strip() for cell in table[0]] == "bytes time_us algbw_GB/s busbw_GB/s".split()
    assert found["sizes"] == [1 << n for n in range(12, 15)]
    for row, size, seconds in zip(table[2:], found["sizes"], found["seconds"], strict=True):
        rate = size / seconds / 1e9
        assert float(row[1]) == pytest.approx(1e6 * seconds, abs=0.06)
        assert list(map(float, row[2:])) == pytest.approx([rate, 4 / 3 * rate], abs=6e-4)
    assert (found["processes"], found["nodes"]) == (3, 1) and 0 < found["compute_rate"] <= 1


def test_fit_finds_the_line():
    """Of exact times, exactly; of noisy ones, nearly; never a negative latency."""
    fit_line, sizes = module(SCRIPT).fit_line, [1 << n for n in range(12, 28)]
    for count in (2, 5):
        exact = np.array([50e-6 + size * 2 * (count - 1) / count / 1.25e9 for size in sizes])
        noisy = exact * np.random.default_rng(0).normal(1, 0.05, len(sizes))
        assert fit_line(sizes, exact, count) == pytest.approx((50e-6, 1.25e9))
        assert fit_line(sizes, noisy, count) == pytest.approx((50e-6, 1.25e9), rel=0.1)
    assert fit_line([1000, 2000], [1e-6, 3e-6], 2)[0] == 0


FAULTS = {  # in one element on one process; a process that hangs, though its threads live
    "buffer[5] += dist.get_rank()": "rank 1: an all-reduce of 4096 bytes gave a wrong sum",
    "time.sleep(100 * dist.get_rank())": "no sign of life for 3 s from the links: all processes",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_the_measurement(attempt, changed, fault):
    copy = changed(SCRIPT, {CHECK: f"        {fault}\n{CHECK}"})
    status, _, err = attempt(copy, *SIZES, "--timeout", 3, processes=2)
    assert status and FAULTS[fault] in err, err


def test_on_an_accelerator(run, changed, emulator):
    """The emulated one, with a smaller matrix, fails where memory is used again too early."""
    copy = changed(SCRIPT, {"4096 if ON_GPU": "256 if ON_GPU"})
    out = run(copy, *SIZES, "--seconds", 0.02, processes=2, EMU_DEVICES="2")
    assert out.startswith("processes 2, nodes 1, device Emulator, ") and "\nbeside an all-re" in out


def test_what_it_needs(refused):
    refused("two processes or more", SCRIPT)
    refused("--pairs two nodes", SCRIPT, "--pairs", processes=2)


def slow_towards(space, number, mbit):
    """Slow what this node sends to the node of this number alone; the rest has 200 Mbit/s."""
    commands = ["qdisc replace dev veth root handle 1: htb default 1"]
    for minor, rate in ((1, 200), (2, mbit)):
        words = f"parent 1: classid 1:{minor} htb rate {rate}mbit burst 100000"
        commands.append(f"class add dev veth {words}")
    words = f"parent 1: protocol ip u32 match ip dst 10.99.0.{number + 1} flowid 1:2"
    for command in [*commands, f"filter add dev veth {words}"]:
        link.command("tc", "-n", space, *command.split())


def test_pairs_name_the_slow_node_and_link():
    """Of five nodes one sends four times slower, and so does a link between two others.

    Each meets each other one. The better of up to three runs counts: others may slow this machine.
    """
    if missing := link.what_is_missing():
        pytest.skip(missing)
    words = (SCRIPT, "--pairs", "--seconds", 0.2, "--expect", 0.015)
    slow = ["n4 sends", "n1 -> n3", "n3 -> n1"]
    with link.nodes(5) as spaces:
        for node, mbit in enumerate((200, 200, 200, 200, 50)):
            link.shape([spaces[node]], mbit)
        slow_towards(spaces[1], 3, 50)
        slow_towards(spaces[3], 1, 50)
        for _ in range(3):
            statuses, outs, errs = zip(*link.run(spaces, *words, timeout=100))
            assert statuses == (1, 0, 0, 0, 0) and not any(outs[1:]), errs
            *lines, limit, a, b, c = outs[0].splitlines()
            named = [re.sub(r"0\.2\d", "0.2x", line) for line in (a, b, c)]
            if named == [f"{name} at 0.2x of the median" for name in slow]:
                break
        else:
            pytest.fail(outs[0])
    assert limit.endswith("slow is what is below 0.015 GB/s:"), "nothing else is slow"
    rates = [{to: float(rate) for to, rate in re.findall(r"n(\d) ([\d.]+)", row)} for row in lines]
    for a, b in itertools.permutations(range(5), 2):
        is_slow = a == 4 or {a, b} == {1, 3}
        assert (rates[a][str(b)] < 0.01) == is_slow, (a, b, outs[0])


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


LOST = [  # processes, those that are started, those that are killed or hang, what is said
    (3, (0, 1), (), "from rank 2 (unseen)"),
    (5, range(5), (2, 3), "from rank 2 ({host}), rank 3 ({host})"),
    (3, range(3), (0,), "from rank 0"),  # it holds the store
]


def test_who_is_missing_is_named(changed, tmp_path):
    """One line, from one process, three seconds after --timeout."""
    fault = """
        if turn == 1 and rank in map(int, os.environ["LOST"].split()):
            if rank == 2:
                os.kill(os.getpid(), 9)
            if os.fork() == 0:  # a child ends what hangs, when the others have ended
                time.sleep(15)
                os.kill(os.getppid(), 9)
                os._exit(0)
            os.kill(os.getpid(), 19)  # SIGSTOP
"""
    words = "--pairs --seconds 0.05 --timeout 4".split()
    command = [changed(SCRIPT, {THERE: fault + THERE}), *words]

    def attempt(count, started, lost, expected):
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} | LOOPBACK
        envs = [torchrun_env(rank, count, 1) | meet for rank in started]
        envs = [env | {"LOST": " ".join(map(str, lost))} for env in envs]
        return run_all([command] * len(envs), envs, tmp_path, 30, ends_others=False)

    with ThreadPoolExecutor(len(LOST)) as pool:
        ended = list(pool.map(lambda fault: attempt(*fault), LOST))
    for (_, started, lost, expected), answers in zip(LOST, ended):
        errs = [err for rank, (*_, err) in zip(started, answers) if err and rank not in lost]
        assert len(errs) == 1 and len(errs[0].splitlines()) == 1, errs
        assert errs[0].endswith(expected.format(host=os.uname().nodename) + "\n"), errs
        statuses = [status for rank, (status, *_) in zip(started, answers) if rank not in lost]
        assert statuses == [1] * len(statuses)
