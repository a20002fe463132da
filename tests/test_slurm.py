"""A job on a real Slurm of two nodes on this machine, and what sweep.sh submits. More: the soak."""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, FOLDERS, ROOT, assert_same_weights, module, wait_for

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


# What each study says of its runs, and what it leaves open and we chose.
# GPUs: 2x4 is two nodes of four, 2/2 one process whose layers are split over two.
STUDIES = """
study  | script      | GPUs    | theirs | ours
agnews | text        | 1 4     | epochs 20, batch_size 128, learning_rate 1e-3, num_workers 4, dataset ag_news, model transformer, size small | seq_len 128
agnews | text        | 1 4     | epochs 20, batch_size 128, learning_rate 1e-3, num_workers 4, dataset ag_news, model transformer, size small | seq_len 256
agnews | text        | 1 4     | epochs 20, batch_size 128, learning_rate 1e-3, num_workers 4, dataset ag_news, model transformer, size large | seq_len 128
agnews | text        | 1 4     | epochs 20, batch_size 128, learning_rate 1e-3, num_workers 4, dataset ag_news, model transformer, size large | seq_len 256
imdb   | text        | 1 4     | epochs 20, dataset imdb, model transformer | batch_size 64, dropout 0.2, learning_rate 5e-4
gpt    | gpt         | 1 2 4   | epochs 1, batch_size 64, learning_rate 1e-4 |
gpt    | gpt         | 1 2 4   | epochs 1, batch_size 128, learning_rate 1e-4 |
mnist  | images      | 1 4 2x4 | dataset mnist | model cnn, epochs 10, batch_size 256
mnist  | images      | 1 4 2x4 | dataset data/bigmnist | model cnn, epochs 1, batch_size 256
six    | images      | 1 2     | model vgg11, epochs 3 | dataset cifar10, batch_size 32, learning_rate 1e-4
six    | text        | 1 2     | model nbow, epochs 5 | dataset imdb, batch_size 64, dropout 0.5
six    | translation | 1 2     | model lstm, epochs 10 | dataset multi30k, batch_size 128
six    | images      | 1 2     | model autoencoder | dataset mnist, epochs 10, batch_size 64
six    | images      | 1 2     | model cnn, epochs 20 | dataset cifar10, batch_size 256
six    | images      | 1 2 2/2 | model mlp, epochs 10 | dataset mnist, batch_size 1024
"""  # noqa: E501


def runs_of_table(study):
    """Returns [(GPUs, script, {flag: value})] of the runs that the table gives to a study."""
    runs = []
    for line in STUDIES.strip().splitlines()[1:]:
        name, script, counts, theirs, ours = [cell.strip() for cell in line.split("|")]
        pairs = [pair.split() for pair in f"{theirs}, {ours}".split(",") if pair.strip()]
        if name == study:
            runs += [(count, script, dict(pairs)) for count in counts.split()]
    return runs


def run_of_line(monkeypatch, words):
    """Returns the same of a line of sweep.sh, with the values that its script reads."""
    [place] = [place for place, word in enumerate(words) if word.endswith(".slurm")]
    folder, script = Path(words[place]).stem.split("_", 1)
    flags = words[place + 1 :]
    monkeypatch.setattr("sys.argv", [script, *flags])
    values = vars(module(f"{folder}/{script}.py").parse_args())
    options = dict(word.split("=") for word in words[:place] if "=" in word)
    gpus = each = int(options["--gpus-per-node"].split(":")[-1])
    tasks = {"multinode": each, "hybrid": each // values.get("num_stages", 1)}.get(folder)
    assert options.get("--ntasks-per-node") == (str(tasks) if tasks else None), words
    if folder == "multigpu":
        assert values["num_gpus"] == each, words
    if folder == "multinode":
        gpus = f"{options['--nodes']}x{each}"
    if folder == "hybrid":
        gpus = f"{each}/{values['num_stages']}"
    given = {flag[2:] for flag in flags if flag.startswith("--")}
    chosen = given - {"num_gpus", "num_stages", "log", "snapshot"}
    return str(gpus), script, {name: values[name] for name in chosen}


def differences(monkeypatch, study, lines):
    """Returns the runs that only the table has, and those that only sweep.sh has."""
    found = [run_of_line(monkeypatch, words) for words in lines if "--log" in words]
    wanted = []
    for gpus, script, settings in runs_of_table(study):
        numbers = dict(settings)
        for name, value in settings.items():
            with contextlib.suppress(ValueError):
                numbers[name] = float(value)
        wanted.append((gpus, script, numbers))
    return (
        [run for run in wanted if run not in found],
        [run for run in found if run not in wanted],
    )


@pytest.mark.parametrize("study", ("agnews", "imdb", "gpt", "mnist", "six"))
def test_studies_run_with_their_settings(monkeypatch, study):
    """sweep.sh runs what the table says and nothing else, and the scripts have all its flags."""
    lines = dry_run("study", study)
    assert differences(monkeypatch, study, lines) == ([], [])
    assert len([words for words in lines if "--log" in words]) == len(runs_of_table(study))
    waiting = [words for words in lines if "--dependency=afterok:ID" in words]
    is_made = (ROOT / "data/bigmnist").exists()
    assert len(waiting) == {"gpt": 1, "mnist": 0 if is_made else 3}.get(study, 0), lines


def test_another_setting_of_a_study_is_seen(monkeypatch):
    lines = dry_run("study", "six", "--epochs", "7")
    missing, more = differences(monkeypatch, "six", lines)
    assert len(missing) == len(more) == len(runs_of_table("six"))
    lines = dry_run("--gpus", "1", "study", "six")
    assert len(differences(monkeypatch, "six", lines)[0]) == 7, "six on two, and MP-DDP"


def test_node_types_of_a_sweep():
    """Each kind of GPU gets each run, with a log of its own."""
    lines = dry_run("--node_types", "v100 a40", "study", "mnist")
    runs = [words for words in lines if "--log" in words]
    kinds = [word for words in runs for word in words if word.startswith("--gpus-per-node=")]
    expected = [f"--gpus-per-node={kind}:{each}" for each in (1, 4, 4) for kind in ("v100", "a40")]
    assert kinds == 2 * expected
    logs = {words[words.index("--log") + 1] for words in runs}
    assert len(logs) == len(runs) and any(log.endswith("2x4_256_a40.jsonl") for log in logs)
