"""Every job file on a real Slurm, and what happens to a job on a cluster."""

import os
import re
import signal
import subprocess

import pytest
from conftest import ROOT, assert_same_weights, rows, wait_for
from test_slurm import COMMON, ENDED, GPT, SMALL, cluster, site  # noqa: F401

WORDS = {  # what makes a job of each script small
    "images": SMALL,
    "text": ["--model", "transformer", "--seq_len", "32", *COMMON],
    "translation": ["--seq_len", "16", "--model", "lstm", *COMMON],
    "allreduce": ["--max_bytes", "65536", "--seconds", "0.05"],
    "make_bigmnist": ["--versions", "1", "--copies", "1"],
    "mnist": ["--synthetic", "--epochs", "1", "--batch_size", "6000"],
    "quantize_mnist": ["--synthetic"],
}
JOBS = sorted(path.stem for path in (ROOT / "slurm").glob("*_*.slurm"))
JOBS.remove("quantize_gpt")  # it needs what a training has written: a study


def options(folder):
    """Counts of a node, so that a job has one or two processes."""
    gpus = {"multigpu": 2, "multinode": 1, "hybrid": 2, "tools": 1}.get(folder)
    found = [f"--cpus-per-task={gpus or 1}", *([f"--gpus-per-node={gpus}"] if gpus else [])]
    return [*found, "--ntasks-per-node=1"] if folder in ("multinode", "hybrid", "tools") else found


@pytest.mark.parametrize("name", JOBS)
def test_job_completes(site, run, data, name):  # noqa: F811
    """On several nodes tools/check watches it before, by the line that a user uncomments."""
    folder, script = name.split("_", 1)
    path = site.folder / f"slurm/{name}.slurm"
    line = re.compile("^# (CHECK_FOLDER=.*tools/check)", re.M)
    text, checks = line.subn(r"\1 --steps 5", path.read_text())
    path.write_text(text)
    if name == "quantize_mnist":
        run("singlegpu/mnist.py", *WORDS["mnist"], cwd=site.folder)
    if "bigmnist" in name:
        (site.folder / "data").symlink_to(data)
    kind = "mnist" if script == "mnist_tensor" else script
    words = WORDS.get(name) or WORDS.get(kind, GPT)
    job = site.submit(name, *words, options=options(folder))
    state, out = site.wait(job), site.output(job)
    assert state == "COMPLETED", out
    assert checks == (folder in ("multinode", "hybrid") and kind != "mnist")
    assert checks == len(re.findall("^ok +processes +2 in one group", out, re.M)), out
    assert "\nERROR" not in out and "\nwarning" not in out, out
    if text.count('--snapshot "$'):
        assert re.search(rf"^\| *{folder}/{script}\.py ", out, re.M), "the row for results.md"
        paths = [site.folder / f"{name}-{job}{end}" for end in (".pt", "")]  # a file or a folder
        assert any(path.exists() for path in paths)


def long_job(site, data, folder, *more, steps=20_000):  # noqa: F811
    """Submits a job that saves to job.pt, and returns its id when it has saved."""
    words = ["--model", "mlp", "--dataset", "mnist", "--data_dir", data, "--batch_size", 24]
    words += ["--dropout", 0.5, "--eval_every", 50, "--max_steps", steps]
    words += ["--snapshot", site.folder / "job.pt"]
    job = site.submit(f"{folder}_images", *words, options=[*options(folder), *more])
    saved = (site.folder / "job.pt").exists
    wait_for(lambda: saved() or site.show(job)["JobState"] in ENDED, pause=0.1)
    return job, words


LIMIT = ("--time=2", "--signal=USR2@40")  # Slurm sends the signal, until the training is done
RESTARTED = {  # folder, processes, options, steps: enough for the limit, and for the preemption
    "limit": ("singlegpu", 1, LIMIT, 20_000),
    "preempted": ("multinode", (2, 1), (), 4_000),
}


@pytest.mark.parametrize("why", RESTARTED)
def test_restarted_jobs_go_on(site, run, data, why):  # noqa: F811
    """At a real limit of two minutes, and in another job of the same number: the same weights."""
    folder, processes, more, steps = RESTARTED[why]
    job, words = long_job(site, data, folder, *more, steps=steps)
    if why == "preempted":
        site.command("scontrol", "requeue", job)
    assert site.wait(job) == "COMPLETED", site.output(job)
    assert site.show(job)["Restarts"] > "0" and "train_loss" in site.output(job)
    words += ["--num_workers", 0, "--snapshot", site.folder / "whole.pt"]
    run(f"{folder}/images.py", *words, processes=processes)
    assert_same_weights(site.folder / "job.pt", site.folder / "whole.pt")


def test_jobs_that_are_not_queued_again(site, data):  # noqa: F811
    """A cancelled one, and one of whose processes one was killed: Slurm ends the others."""
    job, _ = long_job(site, data, "multigpu")
    site.command("scancel", job)
    assert site.wait(job) == "CANCELLED"
    (site.folder / "job.pt").unlink()
    killed, _ = long_job(site, data, "multinode")
    pattern = f"^[^ ]*python multinode/images.py .*{site.folder}/job.pt"
    found = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True).stdout.split()
    assert len(found) == 2
    os.kill(int(found[0]), signal.SIGKILL)
    assert site.wait(killed) == "FAILED", site.output(killed)
    for each, state in ((job, "CANCELLED"), (killed, "FAILED")):
        assert (site.show(each)["JobState"], site.show(each)["Restarts"]) == (state, "0")


def test_jobs_of_a_sweep_train_and_are_reported(site, data):  # noqa: F811
    """Jobs of singlegpu, multigpu and multinode, and their report, submitted inside salloc."""
    inside = ("salloc", "--quiet", "--gpus=1", "--mem-per-cpu=100", "bash", "slurm/sweep.sh")
    words = ("--gpus", "1 2 2x1", "--batch_sizes", 32, "--out", "sweep", "--sbatch", "--mem=4000")
    told = site.command(*inside, *words, "gpt", *GPT, "--dataset", data / "text.txt")
    out = site.folder / "sweep"
    assert site.wait(re.search(r"job (\d+) writes", told)[1]) == "COMPLETED"
    cases = ("singlegpu_1", 1, 1), ("multigpu_2", 2, 1), ("multinode_2x1", 2, 2)
    for name, processes, nodes in cases:
        logged = rows(out / f"{name}_32.jsonl")
        assert len(logged) == 2 * processes
        assert {(row["processes"], row["nodes"]) for row in logged} == {(processes, nodes)}
    report = (out / "report.md").read_text()
    assert report.count("## strong scaling") == 1 and "not compared" not in report, report
    assert "global batch 32" in report
    assert len(re.findall(r"^\| +[12] \| +[12] \| +7 \|", report, re.M)) == 3, report
    assert list(out.glob("scaling*.png"))


def test_a_study_trains_and_is_reported(site):  # noqa: F811
    """All runs, then their report; the GPT is quantized. If its training fails, nothing waits."""
    jobs, small = [], ("--gpus", 1, "--batch_sizes", 8, "--sbatch", "--cpus-per-task=1", "--out")
    for out, more in ("done", GPT[:4]), ("failed", ("--n_heads", 0)):
        words = (*small, out, "study", "gpt", "--max_steps", 5, *more)
        told = site.command("bash", "slurm/sweep.sh", *words)
        jobs.append(re.search(r"job (\d+) writes", told)[1])
    assert [site.wait(job) for job in jobs] == ["COMPLETED", "FAILED"]
    assert rows(site.folder / "done/singlegpu_1_8.jsonl")[-1]["step"] == 5
    assert (site.folder / "done/report.md").exists()
    [quantized] = (site.folder / "done").glob("quantize-*.out")
    assert "| int8-torch.ao | eager |" in quantized.read_text()
