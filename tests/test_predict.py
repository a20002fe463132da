"""predict.py on logs and links whose answers are known, and noise_scale.py, which it may read."""

import functools
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, replaced
from PIL import Image
from test_models import module
from test_report import rows_of, run_report, tables, write  # it puts the root on sys.path
from test_slurm import cluster, site  # noqa: F401 - fixtures
from test_training import arguments_of
from torch.utils.data import TensorDataset
import predict

README = (ROOT / "README.md").read_text()

run_predict = functools.partial(run_report, script=predict)
predicted = functools.partial(tables, script=predict)


def link(path, processes=2, latency=0.0, bandwidth=1e9, rate=1.0, nodes=1, device="CPU"):
    found = {"processes": processes, "nodes": nodes, "device": device, "latency_s": latency}
    found |= {"bandwidth_bytes_per_s": bandwidth, "compute_rate": rate}
    path = path.with_suffix(".json")
    path.write_text(json.dumps(found))
    return path


def test_prediction_by_hand(tmp_path):
    """640 samples in 10 s are 10 steps of 1 s: data .1, forward .3, backward .4, optimizer .1."""
    log = write(tmp_path / "a.jsonl", rows_of("a", 1, [10, 10], data=1))
    slow = link(tmp_path / "l.json", 2, 0.01, 40e6)
    text, strong, weak, *_ = predicted(log, slow, "--out", tmp_path)
    assert [row["processes"] for row in strong] == [str(2**n) for n in range(1, 7)], "batch 64"
    assert [row["processes"] for row in weak] == [str(2**n) for n in range(1, 11)]
    # 4 MB: a bucket of 1 MiB, ready after 26% of the backward pass, and one of the rest.
    first, rest = (size / 40e6 + 0.01 for size in (1 << 20, 4_000_000 - (1 << 20)))
    comm = max(0.2 * (1 << 20) / 4e6 + first, 0.2) + rest - 0.2
    step = 0.05 + 0.15 + 0.2 + comm + 0.1
    assert float(strong[0]["speedup"]) == pytest.approx(0.9 / step, rel=0.004)
    assert float(strong[0]["R"]) == pytest.approx(0.45 / (first + rest), rel=0.004)
    # Weak: the backward pass stays long; a ring of 4 has 3 times the latency of one of 2.
    first, rest = (size * 1.5 / 40e6 + 0.03 for size in (1 << 20, 4_000_000 - (1 << 20)))
    comm = max(0.4 * (1 << 20) / 4e6 + first, 0.4) + rest - 0.4
    assert float(weak[1]["speedup"]) == pytest.approx(4 * 0.9 / (0.9 + comm), rel=0.004)
    assert "It pays up to 2 processes: 4 are 1.32 times as fast as 2, less than 1.50." in text
    assert "efficiency is 80% or more up to 8." in text
    assert "Not to be trusted: CPU processes of one node share its cores and memory" in text


def test_what_is_frozen_or_accumulated(tmp_path):
    """Without buckets in the log: frozen weights are not sent, and the last micro-batch sends."""
    slow, speedups = link(tmp_path / "l.json", 2, 0, 10e6), []
    many = {"parameters": 100_000_000}
    for number, more in enumerate((many, many | {"trained": 100_000}, {"grad_accum_steps": 8})):
        log = write(tmp_path / f"{number}.jsonl", rows_of("a", 1, [10, 10], **more))
        speedups.append(float(predicted(log, slow)[1][0]["speedup"]))
    assert speedups[0] < 0.1 and speedups[1] == pytest.approx(1 / (0.55 + 0.04), rel=0.004)
    # The first MiB is ready when a micro-batch has gone through 26% of its backward pass.
    ready = 0.2 * (1 - (1 - (1 << 20) / 4e6) / 8)
    assert speedups[2] == pytest.approx(1 / (0.55 + ready + 0.4 - 0.2), rel=0.004)


def test_the_newest_of_equal_runs_counts(tmp_path):
    """Not that with the most steps. A run without timed steps is none."""
    old, new = rows_of("old", 1, [10, 10]), rows_of("new", 1, [10], steps=5)
    fast = link(tmp_path / "l.json")
    text = run_predict(write(tmp_path / "a.jsonl", old, new), fast, "--processes", 1).stdout
    assert "run new\n" in text and "run old" not in text and "|  |" not in text, text
    short = write(tmp_path / "b.jsonl", rows_of("short", 1, [10], steps=0))
    assert "has steps after its warmup" in run_predict(short, fast).stderr


def test_prediction_takes_the_buckets_of_the_log(run, data, tmp_path):
    sent = [["all-reduce", -0.4, -0.3, 3e6], ["all-reduce", -0.1, 0, 1e6]]
    log = write(tmp_path / "a.jsonl", rows_of("a", 1, [10, 10], data=1, last_step=sent))
    _, strong, *_ = predicted(log, link(tmp_path / "l.json", 2, 0, 40e6, 0.5))
    # The first is ready after 0.05 s and takes 0.075 s, in which 0.0375 s of 0.15 s are computed.
    step = 0.05 + 0.15 + (0.05 + 0.075 + 0.1125) + 0.025 + 0.1
    assert float(strong[0]["speedup"]) == pytest.approx(0.9 / step, rel=0.004)
    words = (*arguments_of("mlp", data), "--max_steps", 5, "--log", tmp_path / "b")
    run("multigpu/images.py", *words, processes=1)
    row = json.loads((tmp_path / "b").read_text())
    sizes = [size for name, *_, size in row["last_step"] if name == "all-reduce"]
    assert sum(sizes) == 4 * row["parameters"] and len(sizes) > 1


def test_prediction_over_nodes(tmp_path):
    """On one node the link inside counts; beyond, that of all processes of two nodes."""
    log = write(tmp_path / "a.jsonl", rows_of("a", 1, [10, 10], data=1))
    links = link(tmp_path / "i", 4, 3e-3, 2e8), link(tmp_path / "b", 8, 7e-3, 1e8, 0.5, 2)
    _, one, *_ = predicted(log, links[0])
    _, two, *_ = predicted(log, *links)
    assert one[:2] == two[:2]
    assert [row["link"] for row in two[:4]] == ["from 4", "measured", "measured", "from 8"]
    comm_total = 2 * 7e-3 + 4e6 * 2 * 7 / 8 / 100e6  # two buckets
    beside = 7e-3 + (1 << 20) * 2 * 7 / 8 / 100e6  # seconds of half the speed
    compute = 0.7 / 8 + 0.1 + 0.5 * beside
    assert float(two[2]["R"]) == pytest.approx(compute / comm_total, rel=0.004)


def test_prediction_of_nccl_and_of_several_links(tmp_path):
    """Trees have 2 log2(nodes) hops, a ring 2 (N - 1); what was measured at an N counts there."""
    log, two = write(tmp_path / "a.jsonl", rows_of("a", 1, [10, 10], data=1)), tmp_path / "2.json"
    seconds = {}
    for device in ("CPU", "H100"):
        _, strong, *_ = predicted(log, link(two, 2, 0.02, 1e15, 1, 2, device))
        assert [row["link"] for row in strong[:2]] == ["measured", "from 2"]
        seconds[device] = [float(row["ms a step"]) for row in strong]
    # Two buckets send one after the other, the first from 26% of the backward pass on.
    count = np.array([8, 16, 32])
    hidden = (1 - (1 << 20) / 4e6) * 400 / count
    for hops, found in zip((count - 1, np.log2(count)), seconds.values()):
        expected = 800 / count + 100 + 2 * 20 * hops - hidden
        assert found[2:5] == pytest.approx(expected, abs=1)
    more = link(tmp_path / "4.json", 4, 0.5, 1e15, 1, 4)
    text, strong, _, *_ = predicted(log, more, link(two, 2, 0.02, 1e15, 1, 2))
    assert [row["link"] for row in strong[:3]] == ["measured", "measured", "from 4"]
    assert float(strong[1]["ms a step"]) > 1000 > float(strong[0]["ms a step"])
    assert "pays up to 2 processes: " in text and "Not to be trusted" not in text


def test_time_to_the_same_loss(tmp_path):
    """A batch of b needs 1 + B / b of the steps: with B = 100, of 64 2.56, and of 128 1.78."""
    log, good = (
        write(tmp_path / "a.jsonl", rows_of("a", 1, [10, 10], data=1)),
        tmp_path / "noise.json",
    )
    good.write_text('{"noise_scale": 100, "half_width": 49}')
    fast = link(tmp_path / "l.json", 2, 0.05, 1e12, nodes=2)
    _, strong, weak, *_ = predicted(log, fast, "--noise", good)
    step = float(weak[0]["ms a step"]) / 900
    assert float(weak[0]["time to loss"]) == pytest.approx(step * 1.78 / 2.56, rel=0.01)
    times = [float(row["time to loss"]) for row in weak]
    assert times.index(min(times)) not in (0, len(times) - 1)
    assert "time to loss" not in strong[0]
    assert run_predict(log, "--noise", good).returncode == 2, "without a link"


def test_bad_links_are_refused(tmp_path):
    one, two = (write(tmp_path / f"{n}.jsonl", rows_of("a", n, [10, 10])) for n in (1, 2))
    good, nan = link(tmp_path / "good.json"), link(tmp_path / "nan.json", bandwidth=math.nan)
    (bad := tmp_path / "bad.json").write_text("[1")
    between = link(tmp_path / "between.json", nodes=2)
    four = link(tmp_path / "four.json", 4, nodes=2)
    (wide := tmp_path / "wide").write_text('{"noise_scale": 100, "half_width": 50}')
    for message, (log, *more) in (
        ("bad.json", (one, bad)),
        ("nan.json", (one, nan)),
        ("of one process", (two, good)),
        ("with all GPUs of each node", (one, good, between)),
        ("with all GPUs of each node", (one, between, four)),
        ("100, give or take 50", (one, good, "--noise", wide)),
    ):
        done = run_predict(log, *more)
        assert done.returncode and message in done.stderr.splitlines()[-1], done.stderr


def test_any_number_of_processes_and_nodes(tmp_path):
    """A link measured with all GPUs of each node is taken as it is, at that number."""
    log = write(tmp_path / "a.jsonl", rows_of("a", 1, [10, 10], data=1, device="H100", epochs=3))
    whole = link(tmp_path / "w", 6, 0.01, 1e8, nodes=2, device="H100")
    text, strong, *_, ask = predicted(log, whole, "--processes", 3, 5, 6, 12)
    assert [row["processes"] for row in strong] == ["3", "5", "6", "12"]
    assert [row["link"] for row in strong] == ["from 6", "from 6", "measured", "from 6"]
    assert [row["local batch"] for row in strong] == ["21", "13", "11", "5"]
    assert [row["nodes"] for row in ask] == ["1", "1", "2", "2", "4"]
    assert "64 is no multiple of 3, 5, 6, 12" in text
    assert text.index("Not to be trusted") < text.index("## predicted"), "doubts come first"
    for nodes in 1, 2, 4:
        words = f"sbatch --nodes={nodes} --gpus-per-node=3 --ntasks-per-node=3 --time="
        assert words in text and "slurm/multinode_images.slurm" in text
    # 30 steps, and the warmup of 5 s; 3 validations of 1 s are shared.
    step = float(strong[2]["ms a step"]) / 1000
    hours = 6 * (30 * step + 5 + 3 / 6) / 3600
    assert float(ask[3]["device-hours"]) == pytest.approx(hours, rel=0.01)
    between = link(tmp_path / "b", 6, 1e-5, 1e8, nodes=2, device="H100")
    _, strong, *_ = predicted(log, between)
    assert [row["processes"] for row in strong] == ["2", "3", "6", "12", "24", "48"]


def test_what_helps(tmp_path):
    """Where an all-reduce is nearly all of a step, half the bytes are twice as fast."""
    log = write(tmp_path / "a.jsonl", rows_of("a", 1, [10, 10], data=0))
    slow = link(tmp_path / "l", 2, 0, 1e5, nodes=2)
    text, _, _, changes, _ = predicted(log, slow, "--processes", 4, "--out", tmp_path / "o")
    gains = {row["change"]: float(row["times as fast"]) for row in changes}
    assert [*gains.values()] == sorted(gains.values(), reverse=True) and gains["as it is"] == 1
    for change in "--comm_hook bf16", "twice the batch", "a link twice as fast":
        assert gains[change] == pytest.approx(2, rel=0.02), change
    assert f"The fastest is {[*gains][0]}: 2.00 times as fast (predicted)." in text
    assert {path.name for path in (tmp_path / "o").iterdir()} == {"predicted.png"}
    slow_data = write(tmp_path / "b.jsonl", rows_of("b", 1, [10, 10], data=9))
    fast = link(tmp_path / "f", 2, 0, 1e12, nodes=2)
    assert "The fastest is no time in data: " in run_predict(slow_data, fast).stdout


def test_measured_beside_predicted(tmp_path):
    """The speedup of runs with the same settings."""
    log = write(tmp_path / "a", rows_of("a", 1, [10, 14]), rows_of("b", 2, [6], comm_hook="none"))
    _, strong, *_ = predicted(log, link(tmp_path / "l", 2, 0, 1e9, nodes=2))
    assert float(strong[0]["measured"]) == pytest.approx(12 / 6, rel=0.01)


GPU, GPU_NODE = {"device": "H100"}, {"device": "H100", "nodes": 1}
DOUBTS = [  # the doubt, what else is in the rows of the run, the link, words
    ([], {}, {}, ()),
    (["only 3 step(s) after the warmup were timed"], {"steps": 3}, {}, ()),
    (["steps are shorter than 10 ms from 16 process(es) on"], {"seconds": [0.5]}, {}, ()),
    (["the run was on CPU, and a link on H100"], {}, GPU, ()),
    (["CPU processes of one node share its cores and memory"], {}, {"nodes": 1}, ()),
    (["a node is taken to hold 1024 processes, but was measured with 2"], GPU, GPU_NODE, ()),
    ([], GPU, GPU_NODE, ("--processes", 2)),
]


@pytest.mark.parametrize("doubts, changes, kind, words", DOUBTS)
def test_doubts_come_first(doubts, changes, kind, words, tmp_path):
    """Each for its reason alone."""
    log = write(tmp_path / "a.jsonl", rows_of("a", 1, **{"seconds": [10]} | changes))
    path = link(tmp_path / "l.json", **{"bandwidth": 1e12, "nodes": 2} | kind)
    title, _, *lines = run_predict(log, path, *words).stdout.splitlines()
    told = [line for line in lines if line.startswith("Not to be trusted: ")]
    assert title.startswith("# images.py") and told == lines[: len(told)]
    assert told == [f"Not to be trusted: {doubt}." for doubt in doubts]


@pytest.mark.parametrize("script", ("singlegpu/gpt.py", "multigpu/gpt.py", "hybrid/gpt_fsdp.py"))
def test_the_job_file_exists(script):
    """Whatever script wrote the log of one process."""
    row = {"processes": 6, "nodes": 2, "hours": 1.0}
    line = predict.sbatch_line(row, {"script": script, "device": "CPU", "threads": 4})
    words = "sbatch --nodes=2 --gpus-per-node=0 --cpus-per-task=4 --ntasks-per-node=3"
    assert line.split()[:-1] == [*words.split(), "--time=1:17:00"]  # a fifth, and 5 min
    assert (ROOT / line.split()[-1]).exists()


def test_slurm_takes_the_lines(tmp_path, request):
    """Those of a log of CPU processes ask for no GPU, whatever the job file asks for."""
    slurm = request.getfixturevalue("site")
    for device, gpus in ("CPU", 0), ("H100", 2):
        log = write(tmp_path / "a.jsonl", rows_of("a", 1, [10, 10], data=1, device=device))
        inside = link(tmp_path / "i", 2, device=device)
        between = link(tmp_path / "b", 4, nodes=2, device=device)
        told = run_predict(log, inside, between, "--processes", 2, 4).stdout
        lines = [line.split() for line in told.splitlines() if line.startswith("sbatch ")]
        assert [words[1] for words in lines] == ["--nodes=1", "--nodes=1", "--nodes=2"]
        for words in lines:
            slurm.command("sbatch", "--test-only", *words[1:])
        job = slurm.command("sbatch", "--parsable", "--hold", *words[1:])
        assert slurm.show(job)["TresPerNode"].endswith(f"gpu:{gpus}")


def test_pictures_are_made_of_their_files(run, tmp_path):
    """The four of pictures/, drawn again, also in a notebook, whose backend cannot be loaded here.

    Another version of matplotlib may place a letter apart.
    """
    told = (ROOT / "pictures/README.md").read_text()
    backend = {"MPLBACKEND": "module://matplotlib_inline.none"}
    for line in re.findall(r"^python ((?:report|predict)\.py pictures/.*)", told, re.M):
        words = line.replace("pictures/", f"{ROOT}/pictures/").split()[:-1]
        run(*words, tmp_path, **backend)
    kept = sorted((ROOT / "pictures").glob("*.png"))
    assert [path.stem for path in kept] == ["late_step", "phases", "pipeline_step", "predicted"]
    for path in kept:
        old, new = (np.array(Image.open(p).convert("L"), int) for p in (path, tmp_path / path.name))
        assert old.shape == new.shape and old.shape[1] == 800 and path.stat().st_size <= 60_000
        assert abs(old - new).mean() < 3, path


def test_steps_of_a_longer_training(tmp_path):
    """Twice --steps take twice as long."""
    log = write(tmp_path / "a.jsonl", rows_of("a", 1, [10, 10], data=1, warmup=0, eval=0))
    hours = {}
    for steps in (1000, 2000):
        text, *_, ask = predicted(log, link(tmp_path / "l.json"), "--steps", steps)
        assert f"## what to ask for: {steps:,} steps" in text
        hours[steps] = float(ask[1]["device-hours"])
    assert hours[2000] == pytest.approx(2 * hours[1000], rel=0.01)


def test_a_known_noise_scale():
    """At least 19 of 20 seeds have it in their 95% interval; a scaled loss changes nothing.

    Of a linear model of D weights, at 0: a sample's gradient is -x y, where x is normal and y = x w
    + noise: G = -w, and tr(S) = (D + 1) |w|^2 + D sigma^2.
    """
    tool, script = module("singlegpu/noise_scale.py"), module("singlegpu/images.py")
    dim, sigma, size = 10, 2.0, 4  # weights, noise, samples of a micro-batch
    model = torch.nn.Linear(dim, 1, bias=False)
    torch.nn.init.zeros_(model.weight)

    def measure(seed, scale=1.0):
        def batch_loss(model, batch, args):
            x, y = batch
            return scale * ((model(x).squeeze(1) - y) ** 2 / 2).mean(), {}

        script.batch_loss, generator = batch_loss, torch.Generator().manual_seed(seed)
        x = torch.randn(20_000, dim, generator=generator)
        y = x[:, 0] + sigma * torch.randn(20_000, generator=generator)
        data, args = TensorDataset(x, y), SimpleNamespace(seed=seed, precision="fp32")
        requests = tool.random_requests(script, data, args, size)
        batches = (data[indices] for _, indices in requests)
        return tool.noise_scale(*tool.gradient_norms(script, model, batches, args, 100), size)

    expected = dim + 1 + sigma**2 * dim  # as |w| = 1
    estimates, widths = np.array([measure(seed) for seed in range(20)]).T
    assert (abs(estimates - expected) < widths).sum() >= 19, estimates
    assert estimates.mean() == pytest.approx(expected, rel=0.15)
    assert measure(0, 7.0) == pytest.approx(measure(0), rel=1e-4)


NOISE = "singlegpu/noise_scale.py"


def test_noise_scale_takes_scripts_and_snapshots(run, table_band, paste, tmp_path):
    """A user's own section, too; it draws the same split as the training. Weights count."""
    split = "parts = random_split(table, [0.8, 0.2])"
    told = f"print('seeds', torch.initial_seed())\n    {split}"
    mine, snapshot = paste(replaced(table_band, {split: told})), tmp_path / "s.pt"
    words = (mine, "--batch_size", 64, "--seed", 7, "--snapshot", snapshot)
    new = run(NOISE, *words, "--steps", 20)
    trained = run(*words, "--epochs", 1)
    more = ("--steps", 20, "--out", tmp_path / "noise.json")
    later = run(NOISE, mine, "--snapshot", snapshot, *more)
    assert "20 batches of 8 x 8 samples" in new and "20 batches of 8 x 8 samples" in later
    assert json.loads((tmp_path / "noise.json").read_text())["noise_scale"]
    seeds = [re.findall(r"^seeds \d+", told, re.M) for told in (trained, new, later)]
    assert seeds[0] == seeds[1] == seeds[2] != []
    estimates = [re.search(r"noise scale .*", told)[0] for told in (new, later)]
    assert estimates[0] != estimates[1] and "twice the batch needs" in new


def test_settings_of_a_snapshot(tmp_path):
    """Switches, numbers and names are those of the training, but for the flags given now."""
    settings = {"frozen": True, "rate": 0.5, "text": "a.txt", "series": "None", "size": 2}
    torch.save({"settings": settings | {"layers": "['q']"}, "model": {}}, tmp_path / "s.pt")
    args = SimpleNamespace(frozen=False, rate=0, text=None, series=None, size=3, layers=["k"])
    module(NOISE).load_weights(tmp_path / "s.pt", args, ["--size", "3"])
    assert vars(args) == settings | {"series": None, "size": 3, "layers": ["k"]}


def test_mistakes_in_measuring_noise_are_told(refused, data, tmp_path):
    torch.save({"settings": {"precision": "fp16"}, "model": {}}, half := tmp_path / "half.pt")
    script, words = ROOT / "singlegpu/images.py", arguments_of("mlp", data)
    for more, message in (
        ((tmp_path / "none.py",), "none.py is no training script"),
        ((ROOT / "report.py",), "report.py is no training script"),
        ((script, *words, "--snapshot", half), "--precision fp16 scales its loss"),
        ((script, *words, "--batch_size", 7), "--batch_size must be 8 or more"),
        ((script, *words, "--steps", 1), "--steps must be at least 20"),
    ):
        refused(message, NOISE, *more)
