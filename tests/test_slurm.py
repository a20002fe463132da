"""One job file of each folder on a real Slurm of two nodes on this machine; all in the soak."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, FOLDERS, ROOT, assert_same_weights
from conftest import rows, wait_for

CLUSTER = ["bash", ROOT / "tests/helpers/slurm_cluster.sh"]
SMALL = ["--model", "mlp", "--batch_size", "64", "--max_steps", "10", "--eval_every", "5"]
ONE_PROCESS = ["--gpus-per-node=1", "--ntasks-per-node=1", "--cpus-per-task=1"]  # of each node
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """The environment for Slurm's commands."""
    folder = tmp_path_factory.mktemp("c")
    started = subprocess.run([*CLUSTER, "up", folder], capture_output=True, text=True)
    if started.returncode == 3 and not os.environ.get("REQUIRE_SLURM"):
        pytest.skip(started.stderr.strip())
    assert started.returncode == 0, started.stderr
    variables = dict(re.findall(r"(\w+)=(\S+)", started.stdout))
    # `python` and `torchrun` are those of this test; a job gets its GPUs from Slurm alone.
    variables["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    yield {key: value for key, value in ENVIRONMENT.items() if key[:4] != "CUDA"} | variables
    subprocess.run([*CLUSTER, "down", folder], check=True)
    assert not folder.exists()


class Site:
    """A copy of the project, from which jobs are submitted."""

    def __init__(self, folder, environment):
        self.folder, self.environment = folder, environment
        for name in (*FOLDERS, "slurm"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        shutil.copy(ROOT / "report.py", folder)

    def command(self, *words):
        where = {"cwd": self.folder, "env": self.environment}
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True, **where)
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout.strip()

    def submit(self, name, *arguments, options=()):
        return self.command("sbatch", "--parsable", *options, f"slurm/{name}.slurm", *arguments)

    def show(self, job):
        """What Slurm knows of a job: {name: value}."""
        return dict(re.findall(r"(\w+)=(\S*)", self.command("scontrol", "show", "job", "-o", job)))

    def output(self, job):
        return "".join(path.read_text() for path in self.folder.rglob(f"*-{job}.out"))

    def wait(self, job):
        """The state in which the job ended."""
        wait_for(lambda: self.show(job)["JobState"] in ENDED, pause=0.3)
        return self.show(job)["JobState"]


@pytest.fixture
def site(tmp_path, cluster):
    site = Site(tmp_path, cluster)
    yield site
    subprocess.run(["scancel", "--user=root", "--quiet"], env=cluster)
    wait_for(lambda: not site.command("squeue", "--noheader"), pause=0.3)


def test_jobs_of_a_sweep_train_and_are_reported(site, data):
    """Jobs of singlegpu, multigpu and multinode, and their report."""
    words = ("--gpus", "1 2 2x1", "--batch_sizes", 32, "--out", "sweep", "images", *SMALL)
    words += ("--dataset", "mnist", "--data_dir", data)
    told = site.command("bash", "slurm/sweep.sh", *words)
    out = site.folder / "sweep"
    assert site.wait(re.search(r"job (\d+) writes", told)[1]) == "COMPLETED"
    cases = ("singlegpu_1", 1, 1), ("multigpu_2", 2, 1), ("multinode_2x1", 2, 2)
    for name, processes, nodes in cases:
        logged = rows(out / f"{name}_32.jsonl")
        assert len(logged) == 2 * processes
        assert {(row["processes"], row["nodes"]) for row in logged} == {(processes, nodes)}
    report = (out / "report.md").read_text()
    assert report.count("## strong scaling") == 1 and "not compared" not in report, report
    assert len(re.findall(r"^\| +[12] \| +[12] \| +32 \|", report, re.M)) == 3, report
    assert list(out.glob("phases*.png"))


def test_mnist_jobs(site, data):
    """Two launches of one task on two nodes: one loss curve. A third job quantizes the model."""
    job_file = site.folder / "slurm/multinode_mnist.slurm"
    edited, count = re.subn(  # its environment comes from the job file alone, as --export=NONE says
        "^# EDIT: activate.*",
        f"PATH={site.environment['PATH']}",
        job_file.read_text(),
        flags=re.M,
    )
    assert count == 1
    job_file.write_text(edited)
    small = ("--data_dir", data, "--batch_size", "48", "--epochs", "1")
    losses = []
    alone = [*ONE_PROCESS, "--export=NONE"]
    jobs = {
        "multinode": site.submit("multinode_mnist", *small, options=alone),
        "hybrid": site.submit("hybrid_mnist", *small, options=ONE_PROCESS),
    }
    for folder, job in jobs.items():
        assert site.wait(job) == "COMPLETED", site.output(job)
        assert f"| {folder} | 2 |" in site.output(job), site.output(job)
        losses.append(float(re.search(r"train_loss ([\d.]+)", site.output(job))[1]))
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)
    job = site.submit("quantize_mnist", "--data_dir", data, options=["--cpus-per-task=1"])
    assert site.wait(job) == "COMPLETED", site.output(job)
    assert len(re.findall(r"^\| quantize \| (?:fp32|int8) \|", site.output(job), re.M)) == 2


def test_a_study_that_slurm_refuses_leaves_nothing(site):
    """Its second run asks for more GPUs than a node has."""
    options = ["--gpus", "1 64", "--sbatch", "--begin=now+1hour"]
    words = ["bash", "slurm/sweep.sh", *options, "images", *SMALL]
    where = {"cwd": site.folder, "env": site.environment}
    done = subprocess.run(words, capture_output=True, text=True, **where)
    assert done.returncode == 2 and "sbatch refused the run of 64" in done.stderr, done.stderr
    assert "singlegpu_images" not in site.command("squeue", "--format=%j")


def signal_of_the_limit(site, job):
    """What Slurm does two minutes before a job's time limit. Returns how often it had restarted."""
    restarts = site.show(job)["Restarts"]
    site.command("scancel", "--signal=USR2", job)
    return restarts


def wait_for_restart(site, job, restarts):
    def has_come():
        shown = site.show(job)
        return shown["Restarts"] != restarts or shown["JobState"] in ENDED

    wait_for(has_come, pause=0.3)


def test_stopped_at_the_time_limit(site, run, data):
    """Stop a job on two nodes; it goes on in a new one: the weights of an undisturbed run."""
    words = "--model mlp --dropout 0.5 --max_steps 500 --eval_every 50 --num_workers 2".split()
    words += ["--dataset", "mnist", "--data_dir", data]
    job = site.submit("multinode_images", *words, options=ONE_PROCESS)
    snapshot = site.folder / f"multinode_images-{job}.pt"
    wait_for(lambda: snapshot.exists() or site.show(job)["JobState"] in ENDED, pause=0.3)
    restarts = signal_of_the_limit(site, job)
    whole = site.folder / "whole.pt"
    more = ("--num_workers", 0, "--snapshot", whole)
    run("multinode/images.py", *words, *more, processes=(2, 1))
    wait_for_restart(site, job, restarts)
    assert site.wait(job) == "COMPLETED", site.output(job)
    assert int(site.show(job)["Restarts"]) == 1
    starts = re.findall(r"steps (\d+) to 500", site.output(job))
    assert len(starts) == 2 and starts[1] != "0", "it began again"
    assert_same_weights(whole, snapshot)


def test_jobs_that_are_not_queued_again(site):
    """One that gets the signal before its first step, with nothing saved; and one that fails."""
    early = site.submit("multinode_gpt", options=ONE_PROCESS)
    failed = site.submit("multigpu_gpt", "--batch_size", "many", options=["--gpus-per-node=2"])
    wait_for(lambda: site.show(early)["JobState"] == "RUNNING", pause=0.1)
    time.sleep(1)
    signal_of_the_limit(site, early)
    for job in (early, failed):
        assert site.wait(job) == "FAILED" and site.show(job)["Restarts"] == "0", site.output(job)
    assert "argument --batch_size: invalid int value: 'many'" in site.output(failed)


def test_sweep_refuses(tmp_path):
    """Mistakes are found before anything is submitted; --dry_run submits nothing."""
    script = ["bash", ROOT / "slurm/sweep.sh", "--dry_run"]
    cases = {
        "--gpus|1 many|images": "--gpus many",
        "nothing": "multigpu_nothing.slurm",
        "mnist": "no --log",
    }
    for words, message in cases.items():
        done = subprocess.run([*script, *words.split("|")], capture_output=True, text=True)
        assert done.returncode == 2 and message in done.stderr, done.stderr
    words = [*script, "--gpus", "1 2x4 4", "--weak", "images"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stdout.count("--num_gpus") == done.stdout.count("--num_gpus 4 ") == 1
    assert "--batch_size 512" in done.stdout and done.stdout.count("sbatch --parsable") == 4
