"""allreduce.py: its table, its file, its fit, wrong sums; with --pairs, what is slow or missing."""

import itertools
import json
import math
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import link
import numpy as np
import pytest
from conftest import LOOPBACK, free_port
from fork_server import run_all, torchrun_env
from test_models import module

SIZES = ("--min_bytes", 1 << 12, "--max_bytes", 1 << 14)
REPEATS = "        times = [time_all_reduce"
CHECK = "        if (buffer !="


def test_table_is_that_of_the_file(run, changed, tmp_path):
    """The columns of NCCL's tests, and the same times in the file. More --seconds, more repeats.

    What the file says that one takes, times their number, is no longer than the whole run.
    """
    told = f"        dist.get_rank() or print('repeats', repeats)\n{REPEATS}"
    copy, counts = changed("multigpu/allreduce.py", {REPEATS: told}), []
    for seconds in ("0", "0.5"):
        start, path = time.monotonic(), tmp_path / seconds
        out = run(copy, *SIZES, "--seconds", seconds, "--out", path, processes=3)
        took, found = time.monotonic() - start, json.loads(path.read_text())
        repeats = list(map(int, re.findall(r"^repeats (\d+)", out, re.M)))
        assert 3 * np.dot(repeats, found["seconds"]) < took, "three of five took that or longer"
        counts.append(sum(repeats))
    assert counts[0] == 3 < counts[1], "one for each size"
    table = [line.split("|")[1:-1] for line in out.splitlines() if line[:1] == "|"]
    names = [cell.strip() for cell in table[0][:4]]
    assert names == ["bytes", "time_us", "algbw_GB/s", "busbw_GB/s"]
    assert found["sizes"] == [1 << n for n in range(12, 15)]
    for row, size, seconds in zip(table[2:], found["sizes"], found["seconds"], strict=True):
        bytes_, microseconds, *rates = map(float, row[:4])
        assert bytes_ == size and microseconds == pytest.approx(1e6 * seconds, abs=0.06)
        rate = size / seconds / 1e9
        assert rates == pytest.approx([rate, 4 / 3 * rate], abs=6e-4)
    assert (found["processes"], found["nodes"]) == (3, 1) and 0 < found["compute_rate"] <= 1


def test_fit_finds_the_line():
    """Of exact times, exactly; of noisy ones, nearly; never a negative latency."""
    fit_line, sizes = module("multigpu/allreduce.py").fit_line, [1 << n for n in range(12, 28)]
    for count in (2, 5):
        exact = [50e-6 + size * 2 * (count - 1) / count / 1.25e9 for size in sizes]
        assert fit_line(sizes, exact, count)[:2] == pytest.approx((50e-6, 1.25e9))
        noisy = np.array(exact) * np.random.default_rng(0).normal(1, 0.05, len(sizes))
        latency, bandwidth, errors = fit_line(sizes, noisy, count)
        assert (latency, bandwidth) == pytest.approx((50e-6, 1.25e9), rel=0.1)
        assert 0.01 < math.sqrt((errors**2).mean()) < 0.1
    assert fit_line([1000, 2000], [1e-6, 3e-6], 2)[0] == 0


FAULTS = {
    "buffer[5] += dist.get_rank()": "rank 1: an all-reduce of 4096 bytes gave a wrong sum",
    "time.sleep(100 * dist.get_rank())": "imed out",  # after --timeout, not in 10 minutes
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_the_measurement(attempt, changed, fault):
    """In one element on one process; or a process that hangs."""
    copy = changed("multigpu/allreduce.py", {CHECK: f"        {fault}\n{CHECK}"})
    status, _, err = attempt(copy, *SIZES, "--timeout", 3, processes=2)
    assert status and FAULTS[fault] in err, err


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

    The better of up to three runs counts, for others may slow this machine down.
    """
    if missing := link.what_is_missing():
        pytest.skip(missing)
    words = ("multinode/allreduce.py", "--pairs", "--seconds", 0.2, "--expect", 0.015)
    with link.nodes(5) as spaces:
        for node, mbit in enumerate((200, 200, 200, 200, 50)):
            link.shape([spaces[node]], mbit)
        slow_towards(spaces[1], 3, 50)
        slow_towards(spaces[3], 1, 50)
        for _ in range(3):
            statuses, outs, errs = zip(*link.run(spaces, *words, timeout=100))
            assert statuses == (1, 0, 0, 0, 0) and not any(outs[1:]), errs
            lines = outs[0].splitlines()
            named = [re.sub(r"0\.2\d", "0.2x", line) for line in lines[-2:]]
            if named == ["n4 sends at 0.2x of the median", "n1 - n3 at 0.2x of the median"]:
                break
        else:
            pytest.fail(outs[0])
    assert lines[-3].endswith("slow is what is below 0.015 GB/s:"), "nothing else is slow"
    ranks = [line.split() for line in lines if line.endswith(" | gloo, veth")]
    assert [(words[1], words[3]) for words in ranks] == [(str(n), f"n{n}") for n in range(5)]
    table = [line.split("|")[1:-1] for line in lines if re.match(r"\| +n\d", line)]
    for a, b in itertools.permutations(range(5), 2):
        is_slow = a == 4 or {a, b} == {1, 3}
        assert (float(table[a][1 + b]) < 0.01) == is_slow, (a, b, outs[0])


@pytest.mark.parametrize("count", (2, 5, 8))
def test_tournament(count):
    """Each meets each other one once, and nobody has two partners in a round."""
    rounds = module("multinode/allreduce.py").tournament(count)
    assert len(rounds) == count - 1 + count % 2
    met = [sorted(pair) for pairs in rounds for pair in pairs]
    assert sorted(met) == sorted(map(list, itertools.combinations(range(count), 2)))
    for pairs in rounds:
        assert len({*sum(pairs, ())}) == 2 * len(pairs) == count - count % 2


def test_what_is_slow_is_named(capsys):
    script = module("multinode/allreduce.py")
    rates = dict.fromkeys(itertools.permutations(range(20), 2), 10e9)
    assert [script.print_pairs(rates, 20, expect) for expect in (0, 9, 11)] == [0, 0, 1]
    capsys.readouterr()
    slow = {pair: rate / 4 if pair[1] == 3 else rate for pair, rate in rates.items()}
    assert script.print_pairs(slow | {(1, 2): 1e9}, 20, expect=0) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[-2:] == ["n3 receives at 0.25 of the median", "n1 -> n2 at 0.10 of the median"]
    assert "20 slow links among 380" in out[0] and out[1] == "n1 -> n2: 1" and len(out) == 24
    two = {(0, 1): 10e9, (1, 0): 2e9}  # who is to blame is open
    assert script.print_pairs(two, 2, expect=0) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "n1 -> n0 at 0.20 of the median"


# What NCCL writes, as users have sent it to the issues of NVIDIA/nccl, and aws-ofi-nccl (24). The
# names of the hosts are ours. RCCL's lines go on after the transport.
NCCL_LOGS = {
    "NET/Socket, P2P/IPC/read": """NET/IB : No device found
        n1:919:1150 [0] NCCL INFO NET/IB : No device found.
        n1:919:1150 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [receive] via NET/Socket/0
        n1:919:1150 [0] NCCL INFO Channel 01/0 : 8[0] -> 15[7] via P2P/IPC/read""",
    "NET/AWS Libfabric, NET/IB/GDRDMA, P2P/direct pointer": """see NCCL_DEBUG=INFO
        n1:7:8 [0] NCCL INFO Channel 15 : 5[bc000] -> 6[be000] [send] via NET/IB/5/GDRDMA/Shared
        [1,7]<stdout>:n1:214:223 [7] NCCL INFO Ring 00 : 7 -> 8 [send] via NET/AWS Libfabric/0
        n1:1:1 [0] NCCL INFO Channel 0 : 0[3] -> 1[8] via P2P/direct pointer comm 0x5d nRanks 02""",
    "NET/Socket": """NCCL_IB_DISABLE set by environment to 1
        n1:304:305 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.
        n1:304:305 [0] NCCL INFO Using network Socket""",
}


def test_transport_is_read_from_the_log():
    for taken, words in NCCL_LOGS.items():
        reason, log = words.split("\n", 1)
        assert module("multinode/allreduce.py").read_nccl_log(log) == (taken, reason)


LOST = {  # (processes, those that are started, those that are killed or hang, what is said)
    "never started": (3, (0, 1), (), "from rank 2 (unseen)"),
    "dead and hung": (5, range(5), (2, 3), "from rank 2 ({host}), rank 3 ({host})"),
    "rank 0 is hung": (3, range(3), (0,), "from the node of rank 0"),
}


def test_who_is_missing_is_named(changed, tmp_path):
    """One line, from one process, two seconds after the last sign of life."""
    there = "        progress |= {"
    fault = f"""
        if progress["round"] == 1 and rank in map(int, os.environ["LOST"].split()):
            if rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if os.fork() == 0:  # a child ends what hangs, when the others have ended
                time.sleep(10)
                os.kill(os.getppid(), signal.SIGKILL)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)
{there}"""
    words = "--pairs --seconds 0.05 --timeout 4".split()
    command = [changed("multinode/allreduce.py", {there: fault}), *words]

    def attempt(count, started, lost, expected):
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} | LOOPBACK
        envs = [torchrun_env(rank, count, 1) | meet for rank in started]
        envs = [env | {"LOST": " ".join(map(str, lost))} for env in envs]
        return run_all([command] * len(envs), envs, tmp_path, 30, ends_others=False)

    with ThreadPoolExecutor(len(LOST)) as pool:
        ended = list(pool.map(lambda fault: attempt(*fault), LOST.values()))
    for (_, started, lost, expected), answers in zip(LOST.values(), ended):
        errs = [err for rank, (*_, err) in zip(started, answers) if err and rank not in lost]
        assert len(errs) == 1 and len(errs[0].splitlines()) == 1, errs
        assert errs[0].endswith(expected.format(host=socket.gethostname()) + "\n"), errs
        statuses = [status for rank, (status, *_) in zip(started, answers) if rank not in lost]
        assert statuses == [1] * len(statuses)
