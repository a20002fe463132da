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
from conftest import LOOPBACK, ROOT, free_port
from fork_server import run_all, torchrun_env
from test_models import module

SIZES = ("--min_bytes", 1 << 12, "--max_bytes", 1 << 16, "--seconds", "0.05")


def test_table_is_that_of_the_file(run, tmp_path):
    """The columns of NCCL's tests, and the same times in the file."""
    path = tmp_path / "link.json"
    out = run("multigpu/allreduce.py", *SIZES, "--out", path, processes=3)
    table = [line.split("|")[1:-1] for line in out.splitlines() if line[:1] == "|"]
    names = [cell.strip() for cell in table[0][:4]]
    assert names == ["bytes", "time_us", "algbw_GB/s", "busbw_GB/s"]
    found = json.loads(path.read_text())
    assert [int(row[0]) for row in table[2:]] == found["sizes"] == [1 << n for n in range(12, 17)]
    for row, seconds in zip(table[2:], found["seconds"]):
        size, microseconds, algbw, busbw = map(float, row[:4])
        assert microseconds == pytest.approx(1e6 * seconds, abs=0.06)
        assert algbw == pytest.approx(size / seconds / 1e9, abs=6e-4)
        assert busbw == pytest.approx(4 / 3 * size / seconds / 1e9, abs=6e-4)
    assert (found["processes"], found["nodes"]) == (3, 1) and 0 < found["compute_rate"] <= 1


def test_fit_finds_the_line():
    """Of exact times, exactly; of noisy ones, nearly; never a negative latency."""
    fit_line, sizes = module("multigpu/allreduce.py").fit_line, [1 << n for n in range(12, 28)]
    for count in (2, 5):
        exact = [50e-6 + size * 2 * (count - 1) / count / 1.25e9 for size in sizes]
        latency, bandwidth, errors = fit_line(sizes, exact, count)
        assert latency == pytest.approx(50e-6) and bandwidth == pytest.approx(1.25e9)
        noisy = np.array(exact) * np.random.default_rng(0).normal(1, 0.05, len(sizes))
        latency, bandwidth, errors = fit_line(sizes, noisy, count)
        assert (latency, bandwidth) == pytest.approx((50e-6, 1.25e9), rel=0.1)
        assert 0.01 < math.sqrt((errors**2).mean()) < 0.1
    assert fit_line([1000, 2000], [1e-6, 3e-6], 2)[0] == 0


CHECK = "        if (buffer !="


def test_a_wrong_sum_is_found(attempt, changed):
    """A sum that is wrong in one element on one process ends the measurement."""
    wrong = f"        buffer[5] += dist.get_rank()\n{CHECK}"
    copy = changed("multigpu/allreduce.py", {CHECK: wrong})
    status, _, err = attempt(copy, *SIZES, processes=2)
    assert status and "rank 1: an all-reduce of 4096 bytes gave a wrong sum" in err, err


def test_more_seconds_are_more_repeats(run, changed, tmp_path):
    """What the file says that one takes, times their number, is no longer than the whole run."""
    repeats = "        times = [time_all_reduce"
    copy = changed(
        "multigpu/allreduce.py",
        {repeats: f"        dist.get_rank() or print('repeats', repeats)\n{repeats}"},
    )
    counts = []
    for seconds in ("0.001", "0.3"):
        start, path = time.monotonic(), tmp_path / seconds
        out = run(copy, *SIZES[:4], "--seconds", seconds, "--out", path, processes=2)
        took = time.monotonic() - start
        repeats = list(map(int, re.findall(r"^repeats (\d+)", out, re.M)))
        medians = json.loads(path.read_text())["seconds"]
        assert 3 * np.dot(repeats, medians) < took, "three of five took that or longer"
        counts.append(sum(repeats))
    assert counts[1] > 5 * counts[0], counts


def test_a_hung_process_ends_the_measurement(attempt, changed):
    """Of two processes one hangs: the other one ends the run after --timeout, not in 10 minutes."""
    hang = f"        time.sleep(300 * dist.get_rank())\n{CHECK}"
    copy = changed("multigpu/allreduce.py", {CHECK: hang})
    start = time.monotonic()
    status, _, err = attempt(copy, *SIZES, "--timeout", 3, processes=2)
    assert status and "imed out" in err and time.monotonic() - start < 200, err


@pytest.fixture(scope="module")
def pairs():
    """pairs(count, *arguments, limit=...) runs --pairs on so many nodes, each on 200 Mbit/s.

    limit(spaces) may slow them further. Returns rank 0's exit status, its output and all errors.
    """
    if missing := link.what_is_missing():
        pytest.skip(missing)
    with link.nodes(6) as spaces:

        def pairs(count, *arguments, limit=lambda spaces: None):
            link.shape(spaces[:count], 200)
            limit(spaces)
            meet = {"MASTER_ADDR": "10.99.0.1", "MASTER_PORT": str(free_port())}
            envs = [torchrun_env(rank, count, 1) | meet for rank in range(count)]
            for space, env in zip(spaces, envs):
                env |= {"GLOO_SOCKET_IFNAME": "veth", "NETWORK": space}
            command = [ROOT / "multinode/allreduce.py", "--pairs", *map(str, arguments)]
            statuses, outs, errs = zip(*run_all([command] * count, envs, ROOT, 100))
            assert not any(outs[1:]) and not any(statuses[1:]), (outs, errs)
            return statuses[0], outs[0], errs

        yield pairs


def slow_towards(space, number, mbit):
    """Slow what this node sends to the node of this number alone; the rest has 200 Mbit/s."""
    device = ("dev", "veth")
    commands = [f"qdisc replace {' '.join(device)} root handle 1: htb default 1"]
    for minor, rate in ((1, 200), (2, mbit)):
        words = f"parent 1: classid 1:{minor} htb rate {rate}mbit burst 100000"
        commands.append(f"class add {' '.join(device)} {words}")
    words = f"parent 1: protocol ip u32 match ip dst 10.99.0.{number + 1} flowid 1:2"
    commands.append(f"filter add {' '.join(device)} {words}")
    for words in commands:
        link.command("tc", "-n", space, *words.split())


def test_pairs_name_the_slow_node_and_link(pairs):
    """Of six nodes one sends four times slower, and so does a link between two others.

    The better of up to three runs counts, for others may slow this machine down.
    """

    def limit(spaces):
        link.shape(spaces[4:5], 50)
        slow_towards(spaces[2], 5, 50)
        slow_towards(spaces[5], 2, 50)

    for _ in range(3):
        status, out, errs = pairs(6, "--seconds", 0.3, limit=limit)
        assert status == 1, errs
        lines = out.splitlines()
        named = [re.sub(r"0\.2\d", "0.2x", line) for line in lines[-2:]]
        if named == ["n4 sends at 0.2x of the median", "n2 - n5 at 0.2x of the median"]:
            break
    else:
        pytest.fail(out)
    assert max(map(len, lines)) <= 100
    assert lines[-3].endswith("GB/s:"), "nothing else is slow"
    ranks = [line.split() for line in lines if line.endswith(" | gloo, veth")]
    assert [(words[1], words[3]) for words in ranks] == [(str(n), f"n{n}") for n in range(6)]
    table = [line.split("|")[1:-1] for line in lines if re.match(r"\| +n\d", line)]
    assert [row[0].strip() for row in table] == [f"n{n}" for n in range(6)]
    for a, b in itertools.permutations(range(6), 2):
        is_slow = a == 4 or {a, b} == {2, 5}
        assert (float(table[a][1 + b]) < 0.01) == is_slow, (a, b, out)


def test_pairs_of_three_nodes(pairs):
    """One rests in each round. All are alike, but not as fast as expected of them."""
    status, out, errs = pairs(3, "--seconds", 0.3, "--expect", 1)
    assert status == 1 and out.count(" sends at ") == 3 and "below 1 GB/s" in out, (out, errs)


@pytest.mark.parametrize("count", (2, 5, 8))
def test_tournament(count):
    """Each meets each other one once, and nobody has two partners in a round."""
    rounds = module("multinode/allreduce.py").tournament(count)
    assert len(rounds) == count - 1 + count % 2
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert sorted(map(sorted, met)) == sorted(map(list, itertools.combinations(range(count), 2)))
    for pairs in rounds:
        assert len({*sum(pairs, ())}) == 2 * len(pairs) == count - count % 2


def test_what_is_slow_is_named(capsys):
    script = module("multinode/allreduce.py")
    rates = dict.fromkeys(itertools.permutations(range(20), 2), 10e9)
    assert script.print_pairs(rates, 20, expect=0) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "nothing"
    slow = {pair: rate / 4 if pair[1] == 3 else rate for pair, rate in rates.items()}
    assert script.print_pairs(slow | {(1, 2): 1e9}, 20, expect=0) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[-2:] == ["n3 receives at 0.25 of the median", "n1 -> n2 at 0.10 of the median"]
    assert "20 slow links among 380" in out[0] and out[1] == "n1 -> n2: 1" and len(out) == 24
    assert script.print_pairs(rates, 20, expect=9) == 0 != script.print_pairs(rates, 20, expect=11)
    alone = {(0, 1): 10e9, (1, 0): 2e9}  # who is to blame is open
    assert script.name_slow(alone, 10e9, 5e9) == ["n1 -> n0 at 0.20 of the median"]
    assert script.print_pairs({pair: 1234e5 for pair in rates if max(pair) < 10}, 10, 0) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


# What NCCL writes, as users have sent it to the issues of NVIDIA/nccl, and aws-ofi-nccl (24). The
# names of the hosts are ours. RCCL's lines go on after the transport.
NCCL_LOGS = {
    "NET/Socket, P2P/IPC/read": """NET/IB : No device found
        n1:919:1150 [0] NCCL INFO NET/IB : No device found.
        n1:919:1150 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [receive] via NET/Socket/0
        n1:919:1150 [0] NCCL INFO Channel 01/0 : 8[0] -> 15[7] via P2P/IPC/read""",
    "NET/IB/GDRDMA": """see NCCL_DEBUG=INFO
        n1:120:121 [0] NCCL INFO Channel 01 : 2[c7000] -> 0[87000] [receive] via NET/IB/5/GDRDMA
        n1:7:8 [0] NCCL INFO Channel 15 : 5[bc000] -> 6[be000] [send] via NET/IB/5/GDRDMA/Shared""",
    "NET/IBext_v8, P2P/CUMEM": """see NCCL_DEBUG=INFO
        n1:987:1260 [7] NCCL INFO Channel 03/0 : 47[7] -> 39[7] [receive] via NET/IBext_v8/2
        n1:566:5809 [0] NCCL INFO Channel 04/0 : 0[0] -> 7[7] via P2P/CUMEM""",
    "NET/AWS Libfabric": """see NCCL_DEBUG=INFO
        [1,7]<stdout>:n1:214:223 [7] NCCL INFO Ring 00 : 7 -> 8 [send] via NET/AWS Libfabric/0""",
    "NET/Socket": """NCCL_IB_DISABLE set by environment to 1
        n1:304:305 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.
        n1:304:305 [0] NCCL INFO NET/Socket : Using [0]lo:127.0.0.1<0>
        n1:304:305 [0] NCCL INFO Using network Socket""",
    "P2P/direct pointer": """see NCCL_DEBUG=INFO
        n1:1:1 [0] NCCL INFO Channel 0 : 0[3] -> 1[8] via P2P/direct pointer comm 0x5d nRanks 02""",
}


@pytest.mark.parametrize("taken", NCCL_LOGS)
def test_transport_is_read_from_the_log(taken):
    reason, log = NCCL_LOGS[taken].split("\n", 1)
    assert module("multinode/allreduce.py").read_nccl_log(log) == (taken, reason)


FAULTS = {  # (processes, those that are started, those that are killed or hang, what is said)
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
    words = "--pairs --seconds 0.05 --timeout 2".split()
    command = [changed("multinode/allreduce.py", {there: fault}), *words]

    def attempt(count, started, lost, expected):
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} | LOOPBACK
        envs = [torchrun_env(rank, count, 1) | meet for rank in started]
        envs = [env | {"LOST": " ".join(map(str, lost))} for env in envs]
        return run_all([command] * len(envs), envs, tmp_path, 30, ends_others=False)

    with ThreadPoolExecutor(len(FAULTS)) as pool:
        ended = list(pool.map(lambda fault: attempt(*fault), FAULTS.values()))
    for (_, started, lost, expected), answers in zip(FAULTS.values(), ended):
        errs = [err for rank, (*_, err) in zip(started, answers) if err and rank not in lost]
        assert len(errs) == 1 and len(errs[0].splitlines()) == 1, errs
        assert errs[0].endswith(expected.format(host=socket.gethostname()) + "\n"), errs
        statuses = [status for rank, (status, *_) in zip(started, answers) if rank not in lost]
        assert statuses == [1] * len(statuses)
