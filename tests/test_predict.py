"""predict.py on logs and links whose answers are known."""

import fcntl
import functools
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, call, module
from PIL import Image
from test_report import column, report, rows_of, tables, write

predict = module("tools/predict.py")
run_predict = functools.partial(call, predict)
predicted = functools.partial(tables, script=predict)  # text, batch kept in all, what would help
all_predicted = functools.partial(predicted, "--all")  # and: batch kept in each process, hours


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def link(name, processes=2, latency=0.0, bandwidth=1e9, rate=1.0, nodes=1, device="CPU"):
    """Writes what allreduce.py would. Returns the path."""
    found = {"processes": processes, "nodes": nodes, "device": device, "latency_s": latency}
    found |= {"bandwidth_bytes_per_s": bandwidth, "compute_rate": rate}
    (path := Path(f"{name}.json")).write_text(json.dumps(found))
    return path


def log(seconds=(10, 10), **changes):
    """Of one process. 10 steps of 0.9 s: data .1, forward .3, backward .4, optimizer .1.

    It has no buckets: its 4 MB are 1 MiB, ready after 26% of the backward pass, and the rest.
    """
    return write(Path("a.jsonl"), rows_of("a", 1, seconds, **{"data": 1} | changes))


SIZES = np.array([1 << 20, 4_000_000 - (1 << 20)])
SHARE = SIZES[0] / 4e6
about = functools.partial(pytest.approx, rel=0.004)


def test_prediction_by_hand():
    text, strong, _, weak, _ = all_predicted(log(), link("l", 2, 0.01, 40e6))
    assert column(strong, "processes") == "2 4 8 16 32 64", "batch 64"
    assert column(weak, "processes") == "2 4 8 16 32 64 128 256 512 1024"
    first, rest = SIZES / 40e6 + 0.01
    comm = max(0.2 * SHARE + first, 0.2) + rest - 0.2
    step = 0.05 + 0.15 + 0.2 + comm + 0.1
    assert float(strong[0]["speedup (x)"]) == about(0.9 / step)
    assert float(strong[0]["comm (%)"]) == about(100 * comm / step)
    # Weak: the backward pass stays long; a ring of 4 has 3 times the latency of one of 2.
    first, rest = SIZES * 1.5 / 40e6 + 0.03
    comm = max(0.4 * SHARE + first, 0.4) + rest - 0.4
    assert float(weak[1]["speedup (x)"]) == about(4 * 0.9 / (0.9 + comm))
    assert "It pays up to 2 processes: 4 are 1.32 times as fast as 2 (rule: 1.50 or" in text
    assert "Efficiency is 80% or more up to 8." in text


# Without buckets in the log frozen weights are not sent, and the last micro-batch sends. Buckets
# of 3 MB and 1 MB: the first is ready after 0.05 s and takes 0.075 s, in which, at half the speed,
# 0.0375 s of 0.15 s are computed.
FROZEN = {"parameters": 100_000}  # that are trained
READY = 0.2 * (1 - (1 - SHARE) / 8)
SENT = [["all-reduce", -0.4, -0.3, 3e6], ["all-reduce", -0.1, 0, 1e6]]
BACKWARD = [  # of two processes, with what ends after it; what is in the log, the link
    ({"parameters": 100_000_000}, (10e6,), 40),
    (FROZEN, (10e6,), 0.2 + 0.04),
    ({"grad_accum_steps": 8}, (10e6,), READY + 0.4),
    ({"last_step": SENT}, (40e6, 0.5), 0.05 + 0.075 + 0.1125 + 0.025),
]


@pytest.mark.parametrize("changes, figures, backward", BACKWARD)
def test_what_is_sent_and_when(changes, figures, backward):
    _, strong, *_ = predicted(log(**changes), link("l", 2, 0, *figures))
    assert float(strong[0]["step (ms)"]) == about(1000 * (0.05 + 0.15 + backward + 0.1))


def test_the_newest_of_equal_runs_counts():
    """Not that with the most steps. A run without timed steps is none. Two stages are two GPUs."""
    gpu, stages = {"device": "H100"}, {"num_stages": 2, "stages": [5, 5]}
    old, new = rows_of("old", 1, [10, 10], **gpu), rows_of("new", 1, [10], steps=5, **gpu)
    two = [rows_of("two", 2, [4], **gpu), rows_of("bf16", 2, [2], comm_hook="bf16", **gpu)]
    two.append(rows_of("four", 2, [1], script="hybrid/images.py", **stages, **gpu))
    runs = write(Path("b.jsonl"), old, new, *two)
    text, strong, *_ = predicted(runs, link("l"), "--processes", 2)
    assert "run new\n" in text and "run old" not in text
    assert float(strong[0]["measured (x)"]) == pytest.approx(10 / 4, rel=0.01)
    assert "has steps after its warmup" in run_predict(log(steps=0), link("l")).stderr


def test_prediction_over_nodes():
    """On one node the link inside counts; beyond, that of all processes of two nodes.

    Other links are refused, such as one between two processes for nodes of more.
    """
    links = link("i", 4, 3e-3, 2e8), link("b", 8, 7e-3, 1e8, 0.5, 2)
    _, one, *_ = predicted(log(), links[0])
    _, two, *_ = predicted(log(), *links)
    assert one[:2] == two[:2]
    assert [row["link"] for row in two[:4]] == [
        "scaled from 4",
        "as measured",
        "as measured",
        "scaled from 8",
    ]
    first, rest = SIZES * 2 * 7 / 8 / 1e8 + 7e-3
    # The first bucket is sent beside half of the speed: so long the rest of the pass takes twice.
    backward = 0.4 / 8 * SHARE
    left = 0.4 / 8 * (1 - SHARE)
    slowed = min(first, 2 * left)
    backward += slowed + left - slowed / 2
    comm = max(0.4 / 8 * SHARE + first, backward) + rest - backward
    step = (0.1 + 0.3) / 8 + backward + comm + 0.1
    assert float(two[2]["step (ms)"]) == about(1000 * step)
    between = link("between", nodes=2)
    for other in link("inside"), link("four", 4, nodes=2):
        assert "with all GPUs of each node" in run_predict(log(), between, other).stderr


def test_prediction_of_nccl():
    """Trees have 2 log2(nodes) hops, a ring 2 (N - 1)."""
    count = np.array([8, 16, 32])
    hidden = (1 - SHARE) * 400 / count  # two buckets send one after the other
    for device, hops in ("CPU", count - 1), ("H100", np.log2(count)):
        _, strong, *_ = predicted(log(device=device), link("2", 2, 0.02, 1e15, 1, 2, device))
        found = [float(row["step (ms)"]) for row in strong[2:5]]
        assert found == pytest.approx(800 / count + 100 + 2 * 20 * hops - hidden, abs=1)


def test_a_link_by_hand():
    """100 Gbit/s are 12.5 GB/s; a hop takes the latency twice, as in an all-reduce of two."""
    written = link("l", 2, 2 * 5e-6, 12.5e9, 1, 2, "H100")
    gpus = log(device="H100")
    by_file = predicted(gpus, written, "--processes", 4, 8)[1:]
    by_hand = predicted(gpus, "--link", "100Gbit", "--latency", "5us", "--processes", 4, 8)[1:]
    assert column(by_hand[0], "link") == "by hand by hand by hand", "of 2, 4 and 8"
    for row in sum((*by_file, *by_hand), []):
        row.pop("link", None)
    assert by_file == by_hand
    words = ("--link", "1GB", "--gpus_per_node", 4, "--processes", 8, "--all")
    assert "sbatch --nodes=2 --gpus-per-node=4 " in run_predict(gpus, *words).stdout


def test_any_number_of_processes_and_nodes():
    """A link measured with all GPUs of each node is taken as it is, at that number."""
    whole = link("w", 6, 0.01, 1e8, nodes=2, device="H100")
    gpus = log(device="H100", epochs=3)
    text, strong, *_, ask = all_predicted(gpus, whole, "--processes", 5, 12)
    assert column(strong, "processes") == "2 3 5 6 12", "whole nodes of 3 are tried, too"
    assert re.findall(r"--batch_size (\d+) ", text) == ["64", "64", "63", "65", "66", "60"]
    assert [row["link"] for row in strong] == ["scaled from 6"] * 3 + [
        "as measured",
        "scaled from 6",
    ]
    assert column(ask, "nodes") == "1 1 1 2 2 4"
    # The warmup of 5 s counts, too; validations of 1 s, one for 10 steps, are shared.
    hours = [(n * float(strong[3]["step (ms)"]) / 1000 + 5 + n / 10 / 6) / 3600 for n in (30, 1e5)]
    assert float(ask[4]["device-hours"]) == pytest.approx(6 * hours[0], rel=0.01)
    assert "30 steps (3 epoch(s), --epochs of the log)" in text
    text, *_, ask = all_predicted(gpus, whole, "--processes", 6, "--steps", 100_000)
    assert float(ask[-1]["hours"]) == pytest.approx(hours[1], rel=0.01)
    counts = "--nodes=2 --gpus-per-node=3 --ntasks-per-node=3"
    [[hour, minute]] = re.findall(rf"sbatch {counts} --time=(\d+):(\d+):00 .* 100000", text)
    minutes = 1.2 * 60 * hours[1] + 5  # a fifth, and 5 minutes
    assert 60 * int(hour) + int(minute) == pytest.approx(minutes, rel=0.01)


def test_what_helps():
    """Where an all-reduce is nearly all of a step, half the bytes are twice as fast."""
    words = link("l", 2, 0, 1e5, nodes=2), "--processes", 4, "--out", "o"
    text, _, changes = predicted(log(data=0), *words)
    gains = {row["change"]: float(row["gain (x)"]) for row in changes}
    assert [*gains.values()] == sorted(gains.values(), reverse=True) and gains["as it is"] == 1
    assert "no time in data" not in gains, "there is none"
    for change in "--comm_hook bf16", "twice the batch", "a link twice as fast":
        assert gains[change] == pytest.approx(2, rel=0.02), change
    assert "what would help on 4 processes (predicted; gain in samples/s)" in text
    assert [path.name for path in Path("o").iterdir()] == ["predicted.png"]
    fast = link("f", 2, 0, 1e12, nodes=2)
    assert predicted(log(data=9), fast)[2][0]["change"] == "no time in data"
    text, *_, two, four, _, _ = all_predicted(log(), *words[:2], 2, 4)
    assert "help on 2 processes" in text and "help on 4 processes" in text and two != four


def test_doubts():
    """Each for its reason. With two nodes, as with GPUs of one, there is none."""
    short, gpu = log([0.15], steps=3, data=0.001), link("g", device="H100")
    text = run_predict(short, link("c", bandwidth=1e12), "--processes", 2, 3).stdout
    text += run_predict(log(script="hybrid/gpt_fsdp.py"), gpu, "--processes", 4).stdout
    text += run_predict(log(device="H100"), gpu, "--processes", 8).stdout
    assert re.findall(r"^Not to be trusted: (.*)\.$", text, re.M) == [
        "only 3 step(s) were timed, and 10 are needed",
        "steps are shorter than 10 ms from 2 process(es) on",
        "64 is no multiple of 3: that is rounded",
        "the run was on CPU, and a link on H100",
        "FSDP sends weights, too, and this is a prediction of DDP",
        "a node is taken to hold 8 processes, but was measured with 2",
    ]
    note = "note: each process must have cores and memory of its own, which CPUs share\n"
    assert text.count(note) == text.count("note: ") == 2
    text = run_predict(log(device="H100"), gpu, "--processes", 2).stdout
    text += run_predict(log(), link("two", nodes=2)).stdout
    assert "Not to be trusted" not in text and "note: " not in text
    text = run_predict(log(), link("two", nodes=2), "--processes", 4, 100).stdout
    both = write(Path("both.jsonl"), rows_of("a", 1, [10]), rows_of("b", 2, [9]))
    told = run_predict(both, link("two", nodes=2)).stdout
    said = "Not to be trusted: 2 processes were measured to be 1.11 times as fast, and 1."
    assert told.count("Not to be trusted") == 1 and said in told
    assert "note: a batch of 64 has no samples for 100 processes\n" in text


def test_the_first_screen():
    """A sentence, a table and what would help: the answer, where it holds, and nothing else."""
    words = link("l", 2, 0.01, 40e6, nodes=2), "--processes", 64
    out = run_predict(log(), *words).stdout
    assert max(map(len, out.splitlines())) <= 100 and out.count("\n") < 30
    title, sentence, heading, rows, helps, *rest = out.strip().split("\n\n")
    assert title == "# images.py, cnn, mnist, fp32, global batch 64, run a" and rest != []
    assert " ".join(sentence.split()) == (
        "It pays up to 2 processes: 4 are 1.32 times as fast as 2 (rule: 1.50 or more pays). This "
        "holds if each process computes as fast as the measured one (CPU of host node0, 4 "
        "threads). For a GPU or another CPU, measure one process there."
    ), "though 64 were asked for"
    assert heading == "## predicted, with a global batch of 64"
    assert re.findall(r"^\| +(\d+) ", rows, re.M) == "2 4 8 16 32 64".split()
    assert (
        helps == "## what would help on 64 processes (predicted; gain in samples/s)"
        and "sbatch" not in out
    )
    gpu = run_predict(log(device="H100"), *words).stdout
    words = "(H100 of host node0). For another GPU, measure one process there."
    assert words in " ".join(gpu.split())


REFUSED = {  # flags, and why
    ("--link", "-1Gbit"): "argument --link: -1Gbit is not above 0",
    ("--link", "nanGbit"): "argument --link: nanGbit is not above 0",
    ("--link", "infGB"): "argument --link: infGB is not above 0",
    ("--link", "5us"): "argument --link: 5us has no unit of Gbit, Mbit, GB, MB",
    ("--link", "fastGbit"): "argument --link: invalid number value: 'fastGbit'",
    ("--link", "1Gbit", "--latency", "1Gbit"): "--latency: 1Gbit has no unit of us, ms",
    ("--link", "1Gbit", "--latency=-5us"): "argument --latency: -5us is not above 0",
    ("--link", "1Gbit", "--processes", 0): "argument --processes: 0 is less than 1",
    ("--link", "1Gbit", "--processes", "2.5"): "--processes: invalid number value: '2.5'",
    ("--link", "1Gbit", "--gpus_per_node=0"): "argument --gpus_per_node: 0 is less than 1",
    ("--link", "1Gbit", "--steps=-1"): "argument --steps: -1 is less than 0",
    (): "give a log of --log, and a link of allreduce.py --out or --link",
}


@pytest.mark.parametrize("words", REFUSED)
def test_nonsense_is_refused(words):
    done = run_predict(log(), *glued(words))
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.splitlines()[-1].endswith(REFUSED[words])


def glued(words):
    """A value that begins with a dash is written after a =, as argparse wants it."""
    words = list(map(str, words))
    if len(words) > 1 and words[1].startswith("-1"):
        return [f"{words[0]}={words[1]}", *words[2:]]
    return words


LINKS = {  # what is in the file, and why it is no link
    "": "Expecting value: line 1 column 1 (char 0)",
    "[]": "its processes is None",
    '{"processes": 2, "nodes": 1}': "its latency_s is None",
    '{"processes": 1}': "its processes is 1",
    '{"processes": 2, "nodes": 1, "latency_s": -1}': "its latency_s is -1",
    '{"processes": 2, "nodes": 1, "latency_s": 0, "bandwidth_bytes_per_s": 0}': (
        "its bandwidth_bytes_per_s is 0"
    ),
}


@pytest.mark.parametrize("text", LINKS)
def test_a_wrong_link_is_named(text):
    Path("wrong.json").write_text(text)
    done = run_predict(log(), "wrong.json")
    told = f"wrong.json is no link of allreduce.py --out: {LINKS[text]}"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", told)


@pytest.mark.parametrize("tool", ["report", "predict"])
def test_a_closed_pipe_is_silent(tool):
    """As in `python tools/predict.py ... | head -1`, however much comes after."""
    links = [link("l")] if tool == "predict" else []
    runs = [rows_of(f"run{n}", 1, [8], samples=64 * (10 + n)) for n in range(300)]
    words = [sys.executable, ROOT / f"tools/{tool}.py", write(Path("many.jsonl"), *runs), *links]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(words, **pipes, text=True)
    fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)  # so that it cannot print all at once
    assert process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == -signal.SIGPIPE, "there was more to print"


def test_the_factor_of_doubling(capsys):
    """What a script prints at its end is what predict.py says, where nothing can be hidden.

    One bucket is ready as the backward pass ends, over a link without latency.
    """
    scripts = module("multigpu/images.py")
    seconds = {"data": 0, "forward": 3, "backward": 4, "optimizer": 1}  # of 10 steps
    one = log([8], last_step=[["all-reduce", -0.1, 0, 4e6]], **seconds)
    for bandwidth in 1e6, 1e7, 1e8:
        _, strong, *_ = predicted(one, link("l", 2, 0, bandwidth, nodes=2), "--processes", 8)
        steps = [float(row["step (ms)"]) for row in strong]
        for n, step, twice in zip((2, 4), steps, steps[1:]):
            sending = 10 * 2 * (n - 1) / n * 4e6 / bandwidth
            row = {"forward": 3 / n, "backward": 4 / n, "optimizer": 1, "comm_total": sending}
            row |= {"data": 0, "comm": sending, "host": "node0"}
            scripts.print_sending(row, [row | {"rank": rank} for rank in range(n)])
            [factor] = re.findall(r"would be ([\d.]+) times as fast", capsys.readouterr().out)
            assert float(factor) == pytest.approx(step / twice, abs=0.011)


def test_flags_of_a_task_of_ones_own(monkeypatch, tmp_path):
    """Also if it declares them by add_argument(), and if multinode does not have the script yet."""
    tool = module("tools/predict.py")
    monkeypatch.setattr(tool, "__file__", str(tmp_path / "tools/predict.py"))
    (path := tmp_path / "singlegpu/mine.py").parent.mkdir()
    path.write_text('parser.add_argument("--width")\nadd("--batch_size")\nadd("--epochs")\n')
    run = {"script": "singlegpu/mine.py", "settings": {"width": 16, "batch_size": 8}, "epochs": 3}
    found = tool.arguments_of(run, "multinode/mine.py", {"batch_size": 32})
    assert found == "--width 16 --batch_size 32 --epochs 3"


ASKED = {"CPU": "0 --cpus-per-task=4", "H100": "2"}  # GPUs of a node: of CPUs, none
JOBS = [  # device, script, job file, and its first arguments: those that the script has
    ("CPU", "singlegpu/images.py", "multinode_images", "--model 'my net' --pretrained"),
    ("H100", "hybrid/gpt_fsdp.py", "hybrid_gpt_fsdp", "--dataset mnist --dropout 0.0"),
    ("H100", "singlegpu/mine.py", "multinode_mine", "--model 'my net' --batch_size 64"),
]


@pytest.mark.parametrize("device, script, job, arguments", JOBS)
def test_jobs(device, script, job, arguments):
    """It has the run's own arguments, as far as its script has them, and the batch of its row."""
    links = link("i", device=device), link("b", 4, nodes=2, device=device)
    flags = {"model": "my net", "batch_size": 66, "dropout": 0.0, "pretrained": True, "mine": None}
    more = {"settings": flags, "batch_size": 66, "epochs": 3, "max_steps": 9, "log": "a.jsonl"}
    out = run_predict(
        log(device=device, script=script, **more), *links, "--processes", 4, "--all"
    ).stdout
    counts = f"--nodes=2 --gpus-per-node={ASKED[device]} --ntasks-per-node=2 --time=0:06:00"
    assert f"\nsbatch {counts} slurm/{job}.slurm {arguments}" in out
    assert "--batch_size 64 " in out, "66 is no multiple of 4"
    assert ("--epochs 3" in out) == ("mine" not in script), "it is not here"
    assert not {"--max_steps", "--log", "--mine", "True"} & {*out.split()}


def test_pictures_are_made_of_their_files():
    """Those of pictures/, drawn again. Another matplotlib may place a letter apart."""
    told = (ROOT / "pictures/README.md").read_text()
    for name, line in re.findall(r"^python tools/(report|predict)\.py (pictures/.*)", told, re.M):
        words = line.replace("pictures/", f"{ROOT}/pictures/").split()
        assert call({"report": report, "predict": predict}[name], *words).returncode == 0
    for path in (ROOT / "pictures").glob("*.png"):
        name = "imdb/scaling.png" if path.stem == "imdb" else path.name
        old, new = (np.array(Image.open(p).convert("L"), int) for p in (path, f"report/{name}"))
        assert old.shape == new.shape and abs(old - new).mean() < 3, path
