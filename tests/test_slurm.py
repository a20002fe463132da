"""Job files of each folder on a real Slurm of two nodes on this machine; all in the soak."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, FOLDERS, ROOT, assert_same_weights, rows, wait_for

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
    # `python` is that of this test; a job gets its GPUs from Slurm alone, and none of its numbers
    # from what a user has tried in this shell before.
    variables["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables |= {"RANK": "0", "LOCAL_RANK": "5", "WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1"}
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

    def reach_limit(self, job):
        """Do what Slurm does two minutes before the time limit; wait for the next start or end."""
        restarts = self.show(job)["Restarts"]
        self.command("scancel", "--signal=USR2", job)
        wait_for(
            lambda: self.show(job)["Restarts"] != restarts or self.show(job)["JobState"] in ENDED,
            pause=0.3,
        )


@pytest.fixture
def site(tmp_path, cluster):
    site = Site(tmp_path, cluster)
    yield site
    subprocess.run(["scancel", "--user=root", "--quiet"], env=cluster)
    wait_for(lambda: not site.command("squeue", "--noheader"), pause=0.3)


def test_jobs_of_a_sweep_train_and_are_reported(site, data):
    """Jobs of singlegpu, multigpu and multinode, and their report, submitted inside salloc."""
    inside = ("salloc", "--quiet", "--gpus=1", "--mem-per-cpu=100", "bash", "slurm/sweep.sh")
    words = ("--gpus", "1 2 2x1", "--batch_sizes", 32, "--out", "sweep", "--sbatch", "--mem=4000")
    told = site.command(*inside, *words, "images", *SMALL, "--dataset", "mnist", "--data_dir", data)
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
    """Two launches of one task on two nodes: one loss curve."""
    job_file = site.folder / "slurm/hybrid_mnist.slurm"
    path = f"PATH={site.environment['PATH']}"  # from the job file alone, as --export=NONE says
    text, count = re.subn("^# EDIT: activate.*", path, job_file.read_text(), flags=re.M)
    assert job_file.write_text(text) and count == 1
    small, losses = ("--data_dir", data, "--batch_size", "48", "--epochs", "1"), []
    jobs = {
        folder: site.submit(f"{folder}_mnist", *small, options=[*ONE_PROCESS, *more])
        for folder, more in (("multinode", []), ("hybrid", ["--export=NONE"]))
    }
    for folder, job in jobs.items():
        assert site.wait(job) == "COMPLETED", site.output(job)
        assert f"| {folder} | 2 |" in site.output(job), site.output(job)
        losses.append(float(re.search(r"train_loss ([\d.]+)", site.output(job))[1]))
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)


def test_stopped_at_the_time_limit(site, run, data):
    """Stop a job on two nodes; it goes on in a new one: the weights of an undisturbed run."""
    words = "--model mlp --dropout 0.5 --max_steps 500 --eval_every 100 --num_workers 1".split()
    words += ["--dataset", "mnist", "--data_dir", data]
    job = site.submit("multinode_images", *words, options=ONE_PROCESS)
    snapshot = site.folder / f"multinode_images-{job}.pt"
    wait_for(lambda: snapshot.exists() or site.show(job)["JobState"] in ENDED, pause=0.3)
    site.reach_limit(job)
    assert site.wait(job) == "COMPLETED", site.output(job)
    assert int(site.show(job)["Restarts"]) == 1
    starts = re.findall(r"steps (\d+) to 500", site.output(job))
    assert len(starts) == 2 and starts[1] != "0", "it began again"
    more = ("--num_workers", 0, "--snapshot", site.folder / "whole.pt")
    run("multinode/images.py", *words, *more, processes=(2, 1))
    assert_same_weights(site.folder / "whole.pt", snapshot)


def test_jobs_that_are_not_queued_again(site):
    """One that gets the signal before its first step, with nothing saved; and two that fail."""
    early = site.submit("multinode_gpt", options=ONE_PROCESS)
    wrong = site.submit("multigpu_gpt", "--batch_size", "many", options=["--gpus-per-node=2"])
    twice = site.submit("singlegpu_gpt", options=["--nodes=2", "--cpus-per-task=1"])
    wait_for(lambda: site.show(early)["JobState"] == "RUNNING", pause=0.1)
    time.sleep(1)
    site.reach_limit(early)
    for job in (early, wrong, twice):
        assert site.wait(job) == "FAILED" and site.show(job)["Restarts"] == "0", site.output(job)
    assert "argument --batch_size: invalid int value: 'many'" in site.output(wrong)
    assert "use slurm/multinode_gpt.slurm" in site.output(twice)


def test_sweep_refuses(site):
    """Mistakes, before anything is submitted. --dry_run submits nothing, and a refused run cancels
    those before it: here it asks for more GPUs than a node has."""

    def sweep(*words):
        where = {"cwd": site.folder, "env": site.environment, "capture_output": True, "text": True}
        return subprocess.run(["bash", "slurm/sweep.sh", *words], **where)

    too_many = ("--gpus", "1 64", "--sbatch", "--begin=now+1hour", "images")
    cases = {
        ("--gpus", "1 many", "images"): "--gpus many",
        ("nothing",): "multigpu_nothing.slurm",
        ("mnist",): "no --log",
        too_many: "sbatch refused the run of 64",
    }
    for words, message in cases.items():
        done = sweep(*words)
        assert done.returncode == 2 and message in done.stderr, done.stderr
    out = sweep("--dry_run", "--gpus", "1 2x4 4", "--weak", "images").stdout
    assert out.count("--num_gpus") == out.count("--num_gpus 4 ") == 1
    assert "--batch_size 512" in out and out.count("sbatch --parsable") == 4
    assert "singlegpu_images" not in site.command("squeue", "--format=%j")
