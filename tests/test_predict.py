"""predict.py on logs and links whose answers are known."""

import functools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, call, module
from PIL import Image
from test_report import column, report, rows_of, tables, write

predict = module("tools/predict.py")
run_predict = functools.partial(call, predict)
predicted = functools.partial(tables, script=predict)


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
    text, strong, weak, *_ = predicted(log(), link("l", 2, 0.01, 40e6))
    assert column(strong, "processes") == "2 4 8 16 32 64", "batch 64"
    assert column(weak, "processes") == "2 4 8 16 32 64 128 256 512 1024"
    first, rest = SIZES / 40e6 + 0.01
    comm = max(0.2 * SHARE + first, 0.2) + rest - 0.2
    step = 0.05 + 0.15 + 0.2 + comm + 0.1
    assert float(strong[0]["speedup (x)"]) == about(0.9 / step)
    assert float(strong[0]["R (x)"]) == about(0.35 / (first + rest))
    # Weak: the backward pass stays long; a ring of 4 has 3 times the latency of one of 2.
    first, rest = SIZES * 1.5 / 40e6 + 0.03
    comm = max(0.4 * SHARE + first, 0.4) + rest - 0.4
    assert float(weak[1]["speedup (x)"]) == about(4 * 0.9 / (0.9 + comm))
    assert "It pays up to 2 processes: 4 are 1.32 times as fast as 2 (rule: 1.50 or" in text
    assert "efficiency is 80% or more up to 8." in text


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
    assert [row["link"] for row in two[:4]] == ["from 4", "measured", "measured", "from 8"]
    first, rest = SIZES * 2 * 7 / 8 / 1e8 + 7e-3
    passes = 0.7 / 8 + 0.5 * first  # seconds of half the speed
    assert float(two[2]["R (x)"]) == about(passes / (first + rest))
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
    assert column(by_hand[0], "link") == "by hand by hand"
    for row in sum((*by_file, *by_hand), []):
        row.pop("link", None)
    assert by_file == by_hand
    words = ("--link", "1GB", "--gpus_per_node", 4, "--processes", 8)
    assert "sbatch --nodes=2 --gpus-per-node=4 " in run_predict(gpus, *words).stdout


def test_any_number_of_processes_and_nodes():
    """A link measured with all GPUs of each node is taken as it is, at that number."""
    whole = link("w", 6, 0.01, 1e8, nodes=2, device="H100")
    gpus = log(device="H100", epochs=3)
    text, strong, *_, ask = predicted(gpus, whole, "--processes", 3, 5, 6, 12)
    assert column(strong, "processes") == "3 5 6 12"
    assert column(strong, "local batch (samples)") == "21 13 11 5"
    assert [row["link"] for row in strong] == ["from 6", "from 6", "measured", "from 6"]
    assert column(ask, "nodes") == "1 1 2 2 4"
    # The warmup of 5 s counts, too; validations of 1 s, one for 10 steps, are shared.
    hours = [(n * float(strong[2]["step (ms)"]) / 1000 + 5 + n / 10 / 6) / 3600 for n in (30, 1e5)]
    assert float(ask[3]["device-hours"]) == pytest.approx(6 * hours[0], rel=0.01)
    assert "30 steps (3 epoch(s), --epochs of the log)" in text
    text, *_, ask = predicted(gpus, whole, "--processes", 6, "--steps", 100_000)
    assert float(ask[1]["hours"]) == pytest.approx(hours[1], rel=0.01)
    counts = "--nodes=2 --gpus-per-node=3 --ntasks-per-node=3"
    [[hour, minute]] = re.findall(rf"sbatch {counts} --time=(\d+):(\d+):00 .* 100000", text)
    minutes = 1.2 * 60 * hours[1] + 5  # a fifth, and 5 minutes
    assert 60 * int(hour) + int(minute) == pytest.approx(minutes, rel=0.01)


def test_what_helps():
    """Where an all-reduce is nearly all of a step, half the bytes are twice as fast."""
    words = link("l", 2, 0, 1e5, nodes=2), "--processes", 4, "--out", "o"
    text, _, _, changes, _ = predicted(log(data=0), *words)
    gains = {row["change"]: float(row["gain (x)"]) for row in changes}
    assert [*gains.values()] == sorted(gains.values(), reverse=True) and gains["as it is"] == 1
    for change in "--comm_hook bf16", "twice the batch", "a link twice as fast":
        assert gains[change] == pytest.approx(2, rel=0.02), change
    assert "what would help on 4 processes (predicted)" in text
    assert [path.name for path in Path("o").iterdir()] == ["predicted.png"]
    fast = link("f", 2, 0, 1e12, nodes=2)
    assert predicted(log(data=9), fast)[3][0]["change"] == "no time in data"


def test_doubts():
    """Each for its reason. With two nodes, as with GPUs of one, there is none."""
    short, gpu = log([0.15], steps=3, data=0.001), link("g", device="H100")
    text = run_predict(short, link("c", bandwidth=1e12), "--processes", 2, 3).stdout
    text += run_predict(log(script="hybrid/gpt_fsdp.py"), gpu, "--processes", 4).stdout
    text += run_predict(log(device="H100"), gpu, "--processes", 8).stdout
    assert re.findall(r"^Not to be trusted: (.*)\.$", text, re.M) == [
        "only 3 step(s) after the warmup were timed",
        "steps are shorter than 10 ms from 2 process(es) on",
        "64 is no multiple of 3: that is rounded",
        "the run was on CPU, and a link on H100",
        "FSDP sends weights, too, and this is a prediction of DDP",
        "a node is taken to hold 8 processes, but was measured with 2",
    ]
    note = "note: on CPUs this holds as far as each process has cores and memory of its own\n"
    assert text.startswith(note) and text.count("note: ") == 2
    text = run_predict(log(device="H100"), gpu, "--processes", 2).stdout
    text += run_predict(log(), link("two", nodes=2)).stdout
    assert "Not to be trusted" not in text and "note: " not in text


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
    out = run_predict(log(device=device, script=script, **more), *links, "--processes", 4).stdout
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
