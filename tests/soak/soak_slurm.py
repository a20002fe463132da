"""Every job file on a real Slurm, and what happens to a job on a cluster."""

import os
import re
import signal
import subprocess
import time

import pytest
from conftest import ROOT, assert_same_weights, saved_at, wait_for
from PIL import Image
from test_slurm import ENDED, SMALL, cluster, signal_of_the_limit, site  # noqa: F401
from test_slurm import wait_for_restart
from test_training import arguments_of

COMMON = SMALL[2:]
WORDS = {  # what makes a job of each script small
    "images": SMALL,
    "autoencoder": COMMON,
    "text": ["--seq_len", "32", *COMMON],
    "translation": ["--seq_len", "16", "--model", "lstm", *COMMON],
    "allreduce": ["--max_bytes", "65536", "--seconds", "0.05"],
    "make_bigmnist": ["--dataset", "synthetic", "--versions", "1", "--copies", "1"],
    "make_images": ["photos", "--size", "20"],
    "mnist": ["--synthetic", "--epochs", "1", "--batch_size", "6000"],
    "noise_scale": ["singlegpu/images.py", "--model", "mlp", "--steps", "20"],
}
GPT = ["--d_model", "16", "--n_heads", "2", "--num_layers", "2", "--seq_len", "32", *COMMON]
# Those of quantize need what a training has written, and have a test of their own.
JOBS = sorted(path.stem for path in (ROOT / "slurm").glob("[!q]*_*.slurm"))
PROCESSES = {"singlegpu": 1, "multigpu": 2, "multinode": 2, "hybrid": 2}


def options(folder):
    """Counts of a node, so that a job has as many processes as PROCESSES tells."""
    gpus = {"multigpu": 2, "multinode": 1, "hybrid": 2}.get(folder)
    found = [f"--cpus-per-task={gpus or 1}", *([f"--gpus-per-node={gpus}"] if gpus else [])]
    return [*found, "--ntasks-per-node=1"] if folder in ("multinode", "hybrid") else found


@pytest.mark.parametrize("name", JOBS)
def test_job_completes(site, name):  # noqa: F811
    folder, script = name.split("_", 1)
    words = WORDS.get(script, GPT)
    for number in range(12):  # for make_images
        path = site.folder / f"photos/{number % 2}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (30, 40)).save(path)
    job = site.submit(name, *words, options=options(folder))
    state, out = site.wait(job), site.output(job)
    assert state == "COMPLETED", out
    if folder in PROCESSES and not script.startswith(("allreduce", "make_", "mnist", "noise_")):
        assert re.search(rf"^\| *{folder}/{script}\.py ", out, re.M), "the row for results.md"
        assert (site.folder / f"{name}-{job}.pt").exists()


@pytest.mark.parametrize("script", ["gpt", "text", "translation"])
def test_quantize_job_completes(site, run, script):  # noqa: F811
    words = WORDS | {"gpt": GPT, "text": ["--model", "transformer", *WORDS["text"]]}
    run(
        f"singlegpu/{script}.py",
        *words[script],
        "--snapshot",
        site.folder / "s.pt",
    )
    more = ("--snapshot", "s.pt", "--rounds", 1, "--row", "int8-torch.ao", "--eager")
    job = site.submit(f"quantize_{script}", *more, options=["--cpus-per-task=1"])
    assert site.wait(job) == "COMPLETED", site.output(job)
    assert len(re.findall(r"^\| (?:fp32|int8-torch.ao) \|", site.output(job), re.M)) == 2


def test_default_counts(site):  # noqa: F811
    """Without any option a job takes what its file says: four tasks on each of two nodes."""
    job = site.submit("multinode_images", *SMALL, "--log", "a.jsonl")
    assert site.wait(job) == "COMPLETED", site.output(job)
    assert len((site.folder / "a.jsonl").read_text().splitlines()) == 2 * 8


def test_pairs_of_nodes(site):  # noqa: F811
    """A job of two nodes lists what each sends to the other. It fails if one seems slow."""
    words = ("--pairs", "--seconds", 0.05)
    job = site.submit("multinode_allreduce", *words, options=options("multinode"))
    site.wait(job)
    assert len(re.findall(r"^\| +n[01] \|", site.output(job), re.M)) == 2, site.output(job)


@pytest.fixture
def long(site, run, data, tmp_path):  # noqa: F811
    """long(folder, steps) submits a job that saves to job.pt, and returns its id."""

    def long(folder, steps, *more):
        base = [*arguments_of("mlp", data), "--dropout", "0.5", "--max_steps", steps]
        words = (*base, "--snapshot", tmp_path / "job.pt", "--eval_every", 50)
        job = site.submit(f"{folder}_images", *words, options=[*options(folder), *more])
        if not more:
            saved = lambda: saved_at(tmp_path / "job.pt")  # noqa: E731
            wait_for(lambda: saved() or site.show(job)["JobState"] in ENDED, pause=0.1)
        processes = (2, 1) if folder == "multinode" else 2
        long.check = lambda: compare(base, folder, processes)
        return job

    def compare(base, folder, processes):
        whole = ("--snapshot", tmp_path / "whole.pt")
        run(f"{folder}/images.py", *base, *whole, processes=processes)
        assert_same_weights(tmp_path / "job.pt", tmp_path / "whole.pt")

    return long


def test_time_limit(site, long):  # noqa: F811
    """The real limit of a minute: Slurm sends the signal, until the training is done."""
    job = long("singlegpu", 20_000, "--time=1", "--signal=USR2@40")
    assert site.wait(job) == "COMPLETED", site.output(job)
    print(site.show(job)["Restarts"], "restarts")
    assert int(site.show(job)["Restarts"]) >= 1, site.output(job)
    long.check()


@pytest.mark.parametrize("given", (["--snapshot=job.pt"], ["--snapshot", "my job.pt"]))
def test_an_array_with_a_snapshot_of_its_own_name(site, given):  # noqa: F811
    """Each task goes on by itself, however the flag is written, also under --export=NONE."""
    job_file = site.folder / "slurm/singlegpu_images.slurm"
    activate = f"PATH={site.environment['PATH']}\ncd {site.folder}/$SLURM_ARRAY_TASK_ID || exit\n"
    text = re.sub("^# EDIT: activate.*", activate, job_file.read_text(), flags=re.M)
    job_file.write_text(text.replace("python singlegpu", f"python {site.folder}/singlegpu"))
    for task in (0, 1):
        (site.folder / str(task)).mkdir()
    words = ["--model", "mlp", "--max_steps", 1200, "--eval_every", 400, *given]
    job = site.submit(
        "singlegpu_images", *words, options=["--array=0-1", "--export=NONE", "--cpus-per-task=1"]
    )
    name = given[-1].split("=")[-1]
    wait_for(lambda: all((site.folder / str(task) / name).exists() for task in (0, 1)), pause=0.2)
    site.command("scancel", "--signal=USR2", f"{job}_1")
    wait_for(lambda: site.show(f"{job}_1")["Restarts"] == "1", pause=0.2)
    for task in (0, 1):
        wait_for(lambda task=task: site.show(f"{job}_{task}")["JobState"] in ENDED, pause=0.3)
        shown = site.show(f"{job}_{task}")
        assert (shown["JobState"], shown["Restarts"]) == ("COMPLETED", str(task))


def test_cancelled_job_stays_cancelled(site, long):  # noqa: F811
    job = long("multigpu", 500_000)
    site.command("scancel", job)
    assert site.wait(job) == "CANCELLED"
    time.sleep(3)
    assert site.show(job)["JobState"] == "CANCELLED" and site.show(job)["Restarts"] == "0"


def test_a_killed_process_ends_the_job(site, long, tmp_path):  # noqa: F811
    """Slurm ends the others, and the job has failed: it is not queued again."""
    job = long("multinode", 500_000)
    pattern = f"^[^ ]*python multinode/images.py .*{tmp_path}/job.pt"
    found = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True).stdout.split()
    assert len(found) == 2
    os.kill(int(found[0]), signal.SIGKILL)
    assert site.wait(job) == "FAILED", site.output(job)
    assert site.show(job)["Restarts"] == "0"


def test_a_data_set_that_takes_several_jobs(site):  # noqa: F811
    """At each limit it is queued again, as long as it has written more."""
    words = ("--dataset", "synthetic", "--versions", 100, "--copies", 1, "--out", "big")
    job = site.submit("singlegpu_make_bigmnist", *words, options=["--cpus-per-task=1"])
    images = site.folder / "big.synthetic60000x100x1.tmp/train_images.npy"
    size = 0
    for start in (1, 2, 3):
        wait_for(lambda size=size: images.exists() and images.stat().st_size > size + 50_000_000)
        size = images.stat().st_size
        wait_for_restart(site, job, signal_of_the_limit(site, job))
        assert site.show(job)["Restarts"] == str(start)
    site.command("scancel", job)
