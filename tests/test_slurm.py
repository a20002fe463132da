"""Job files of each folder on a real Slurm of two nodes on this machine; all in the soak."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, FOLDERS, ROOT, assert_same_weights, module, rows, wait_for

CLUSTER = ["bash", ROOT / "tests/helpers/slurm_cluster.sh"]
COMMON = "--batch_size 64 --max_steps 10 --eval_every 5".split()
SMALL = ["--model", "mlp", *COMMON]
GPT = ["--d_model", "16", "--n_heads", "2", "--num_layers", "2", "--seq_len", "32", *COMMON]
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
        ignored = shutil.ignore_patterns("__pycache__")
        for name in (*FOLDERS, "slurm", "tools"):
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)

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
        paths = self.folder.rglob(f"*-{job}.out")
        return "".join(path.read_text(errors="replace") for path in paths)

    def wait(self, job):
        """The state in which the job ended."""
        wait_for(lambda: self.show(job)["JobState"] in ENDED, pause=0.5)
        return self.show(job)["JobState"]


@pytest.fixture
def site(tmp_path, cluster):
    site = Site(tmp_path, cluster)
    yield site
    subprocess.run(["scancel", "--user=root", "--quiet"], env=cluster)
    wait_for(lambda: not site.command("squeue", "--noheader"), pause=0.5)


def test_jobs_of_a_sweep_train_and_are_reported(site, data):
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
    assert len(re.findall(r"^\| +[12] \| +[12] \| +32 \|", report, re.M)) == 3, report
    assert list(out.glob("scaling*.png"))


def test_jobs_train_stop_and_fail(site, run, data):
    """A job on two nodes that is stopped goes on in a new one: the weights of an undisturbed run.

    With --export=NONE, it takes nothing of a shell. One that fails is not queued again.
    """
    job_file = site.folder / "slurm/hybrid_images.slurm"
    path = f"PATH={site.environment['PATH']}"  # from the job file alone
    text, count = re.subn("^# EDIT: activate.*", path, job_file.read_text(), flags=re.M)
    assert job_file.write_text(text) and count == 1
    words = "--model mlp --dropout 0.5 --max_steps 500 --eval_every 25 --num_workers 1".split()
    words += ["--dataset", "mnist", "--data_dir", data]
    log, alone = site.folder / "log.jsonl", [*ONE_PROCESS, "--export=NONE"]
    stopped = site.submit("hybrid_images", *words, "--log", log, options=alone)
    wrong = site.submit("multigpu_gpt", "--batch_size", "many", options=["--gpus-per-node=2"])

    snapshot = site.folder / f"hybrid_images-{stopped}.pt"
    wait_for(lambda: snapshot.exists() or site.show(stopped)["JobState"] in ENDED, pause=0.1)
    site.command("scancel", "--signal=USR2", stopped)  # as two minutes before the time limit
    assert site.wait(stopped) == "COMPLETED", site.output(stopped)
    assert int(site.show(stopped)["Restarts"]) == 1
    steps = [json.loads(line)["step"] for line in open(log)][::2]
    assert steps == sorted({*steps}) and steps[-1] == 500, "it began again"
    more = ("--num_workers", 0, "--snapshot", site.folder / "whole.pt")
    run("hybrid/images.py", *words, *more, processes=(2, 1))
    assert_same_weights(site.folder / "whole.pt", snapshot)
    assert site.wait(wrong) == "FAILED" and site.show(wrong)["Restarts"] == "0", site.output(wrong)
    assert "argument --batch_size: invalid int value: 'many'" in site.output(wrong)


def dry_run(*words):
    """The lines that sweep.sh would give to Slurm, as words."""
    command = ["bash", "slurm/sweep.sh", "--dry_run", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [shlex.split(line) for line in done.stdout.splitlines() if line[:6] == "sbatch"]


def test_sizes_of_a_sweep():
    runs = dry_run("--gpus", "1 2x4 4 4/2", "--weak", "images")[:-1]  # without the report
    sizes = [line[line.index("--batch_size") + 1] for line in runs]
    assert sizes == ["64", "512", "256", "256"]
    assert "--cpus-per-task=32" in runs[2], "8 for each process, as in singlegpu"
    assert "--ntasks-per-node=2" in runs[3], "each has two GPUs"


# On 1 GPU and on 4/2: their runs, and the jobs that wait for another one, such as make_bigmnist.py.
STUDIES = {"agnews": (2, 0), "imdb": (1, 0), "gpt": (2, 1), "mnist": (4, 2), "six": (10, 0)}


@pytest.mark.parametrize("study", STUDIES)
def test_studies(monkeypatch, study):
    """The scripts have all flags of the studies."""
    lines = dry_run("--gpus", "1 4/2", "study", study)
    runs = [words for words in lines if "--log" in words]
    waiting = [words for words in lines if "--dependency=afterok:ID" in words]
    is_made = study == "mnist" and (ROOT / "data/bigmnist").exists()
    assert (len(runs), len(waiting) or 2 * is_made) == STUDIES[study], lines
    for words in runs:
        [place] = [place for place, word in enumerate(words) if word.endswith(".slurm")]
        script = Path(words[place]).stem.replace("_", "/", 1) + ".py"
        monkeypatch.setattr("sys.argv", [script, *words[place + 1 :]])
        assert module(script).parse_args().log
