"""The job files, submitted to a real Slurm of two nodes that tests/slurm_cluster.sh starts on this machine."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ENVIRONMENT, ROOT, SCRIPTS, assert_same_weights, commands_of, environment_of, rows, wait_for

JOB_FILES = sorted(path.stem for path in (ROOT / "slurm").glob("*.slurm"))
# Flags that make a job of each script small, and how many processes it has with --gpus-per-node=2.
COMMON = ["--epochs", "2", "--batch_size", "64", "--max_steps", "5", "--threads", "1"]
TINY = {
    "images": ["--model", "mlp", *COMMON],
    "autoencoder": COMMON,
    "text": ["--seq_len", "32", *COMMON],
    "translation": ["--seq_len", "16", *COMMON],
    "gpt": ["--d_model", "16", "--n_heads", "2", "--num_layers", "1", "--seq_len", "32", *COMMON],
}
POLL = 0.3  # s between two questions to Slurm, each a process
PROCESSES = {"singlegpu": 1, "multigpu": 2, "multinode": 2, "hybrid": 2}  # of a job with the options below


def test_every_script_has_its_job_file():
    assert JOB_FILES == sorted(script.removesuffix(".py").replace("/", "_") for script in SCRIPTS)


@pytest.mark.parametrize("name", [*(f"{name}.slurm" for name in JOB_FILES), "sweep.sh"])
def test_static(name):
    path = ROOT / "slurm" / name
    text = path.read_text()
    assert subprocess.run(["bash", "-n", path]).returncode == 0
    assert not re.search(r"^#\s+SBATCH", text, re.M), "Slurm does not read '# SBATCH'"
    assert not re.search(r"SLURM_(NODEID|PROCID|LOCALID)", text), "the batch shell knows no task's number"
    for script in re.findall(r"\b((?:singlegpu|multigpu|multinode|hybrid|quantize)/\w+\.py|report\.py)", text):
        assert (ROOT / script).exists(), script
    if name.endswith(".slurm"):
        assert path.stem.replace("_", "/", 1) + ".py" in text
        assert len(text.splitlines()) <= 30
        assert "EDIT" in text and "set -euo pipefail" in text and '"$@"' in text
        assert not re.search(r"--(partition|account)|module load|localhost|127\.0", text), "of one site, or a fall-back"


@pytest.mark.parametrize("name", JOB_FILES)
def test_job_files_of_a_folder_differ_in_the_name_alone(name):
    """And in the comment on top: what is tested with one of them holds for all."""
    folder, script = name.split("_", 1)
    first = "gpt" if folder == "quantize" else "images"
    text, model = ((ROOT / "slurm" / f"{each}.slurm").read_text() for each in (name, f"{folder}_{first}"))
    if name == "quantize_text":  # a bag of words has little to convert
        text = text.replace(" --model transformer", "")
    if name == "hybrid_gpt":  # a process has one GPU, not --num_stages
        text = re.sub("# EDIT: processes of a pipeline.*", "# EDIT: GPUs of a process", text)
        text = text.replace(
            "processes=${SLURM_GPUS_ON_NODE:-$num_stages}",
            "processes=$((${SLURM_GPUS_ON_NODE:-$num_stages} / num_stages))",
        )
    if script == "allreduce":
        text = text.replace(
            '--out "$SLURM_JOB_NAME-$SLURM_JOB_ID.json"', '--snapshot "$SLURM_JOB_NAME-$SLURM_JOB_ID.pt"'
        )
    if script == "make_bigmnist":  # goes on from what it has written
        model = model.replace(' --snapshot "$SLURM_JOB_NAME-$SLURM_JOB_ID.pt"', "")
    assert text.partition("#SBATCH")[2].replace(script, first) == model.partition("#SBATCH")[2]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """The environment for Slurm's commands."""
    folder = tmp_path_factory.mktemp("c")
    script = ["bash", ROOT / "tests" / "slurm_cluster.sh"]
    started = subprocess.run([*script, "up", folder], capture_output=True, text=True)
    if started.returncode == 3 and not os.environ.get("REQUIRE_SLURM"):
        pytest.skip(started.stderr.strip())
    assert started.returncode == 0, started.stderr
    variables = dict(re.findall(r"(\w+)=(\S+)", started.stdout))
    # `python` and `torchrun` are those of this test; a job gets its GPUs from Slurm alone.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    yield (
        {name: value for name, value in ENVIRONMENT.items() if name != "CUDA_VISIBLE_DEVICES"}
        | variables
        | {"PATH": path}
    )
    subprocess.run([*script, "down", folder], check=True)
    assert not folder.exists()


class Site:
    """A copy of the project, from which jobs are submitted."""

    def __init__(self, folder, environment):
        self.folder, self.environment = folder, environment
        for name in ("singlegpu", "multigpu", "multinode", "hybrid", "quantize", "slurm"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "report.py", folder)

    def command(self, *words):
        done = subprocess.run(
            list(map(str, words)), cwd=self.folder, env=self.environment, capture_output=True, text=True
        )
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout.strip()

    def submit(self, name, *arguments, options=()):
        return self.command("sbatch", "--parsable", *options, f"slurm/{name}.slurm", *arguments)

    def show(self, job):
        """What Slurm knows of a job: {name: value}."""
        return dict(re.findall(r"(\w+)=(\S*)", self.command("scontrol", "show", "job", "-o", job)))

    def output(self, job):
        return "".join(path.read_text() for path in self.folder.rglob(f"*-{job}.out"))

    def wait(self, job, seconds=240):
        """The state in which the job ended."""
        ended = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
        wait_for(lambda: self.show(job)["JobState"] in ended, seconds, POLL)
        return self.show(job)["JobState"]


@pytest.fixture
def site(tmp_path, cluster):
    site = Site(tmp_path, cluster)
    yield site
    subprocess.run(["scancel", "--user=root", "--quiet"], env=cluster)
    wait_for(lambda: not site.command("squeue", "--noheader"), 60, POLL)


def test_quantize_job(site):
    """Given no snapshot it trains one first; given one, or quantized weights, it does not."""
    path = site.folder / "slurm" / "quantize_text.slurm"
    path.write_text(path.read_text().replace("--max_steps 300", "--max_steps 20 --seq_len 32"))
    more = ["--rounds", "1", "--precisions", "fp32", "int8", "--threads", "1"]
    job = site.submit("quantize_text", *more, "--save", "int8.pt", options=["--cpus-per-task=1"])
    state, out = site.wait(job), site.output(job)
    assert state == "COMPLETED", out
    assert "singlegpu/text.py: transformer-small" in out and "| quantize/text.py | transformer-small |" in out
    again = site.submit("quantize_text", *more, "--load", "int8.pt", options=["--cpus-per-task=1"])
    state, out = site.wait(again), site.output(again)
    assert state == "COMPLETED" and "singlegpu/text.py" not in out and out.count("| quantize/text.py |") == 1, out


@pytest.mark.parametrize("folder", ["multigpu", "multinode"])
def test_allreduce_job(site, folder):
    small = ("--max_bytes", 1 << 16, "--seconds", "0.05", "--threads", "1")
    job = site.submit(f"{folder}_allreduce", *small, options=["--gpus-per-node=2"])
    state, out = site.wait(job), site.output(job)
    assert state == "COMPLETED" and "sums right" in out, out
    link = json.loads((site.folder / f"{folder}_allreduce-{job}.json").read_text())
    assert (link["processes"], link["nodes"]) == ((2, 1) if folder == "multigpu" else (4, 2))


@pytest.mark.parametrize("name", [name for name in JOB_FILES if name.partition("_")[2] in TINY and name[:4] != "quan"])
def test_job_completes(site, tiny, name):
    folder, script = name.split("_", 1)
    gpus, processes = {"singlegpu": 1, "multinode": 1}.get(folder, 2), PROCESSES[folder]
    if name == "multinode_images":  # two nodes of two
        gpus, processes = 2, 4
    options = [] if folder == "singlegpu" else [f"--gpus-per-node={gpus}"]
    more = ["--dataset", "bigmnist", "--data_dir", tiny] if script == "autoencoder" else []
    more += ["--num_layers", "2"] if name == "hybrid_gpt" else []
    job = site.submit(name, *TINY[script], *more, options=options)
    state, out = site.wait(job), site.output(job)
    assert state == "COMPLETED", out
    count = "x 2 pipeline(s) of 2 processes" if name == "hybrid_gpt" else f"x {processes} process"
    assert count in out and len(re.findall(r"^\| +[01] \|", out, re.M)) == 2, out
    assert re.search(rf"^\| {folder}/{script}.py \|", out, re.M), "the row for results.md"
    nodes = "n[1-2], head n1" if folder in ("multinode", "hybrid") else "n1, head n1"
    assert f"job {job}, start 1" in out and nodes in out and f"of {gpus} GPUs and " in out
    assert f"{folder}/{script}.py" in out.splitlines()[0] and "--max_steps 5" in out.splitlines()[0]
    assert (site.folder / f"{name}-{job}.pt").exists()


def test_make_bigmnist(site, tmp_path):
    """Signalled before its time is up, the job goes on where it was, and completes."""
    out, images = tmp_path / "bigmnist", tmp_path / "bigmnist.tmp" / "train_images.npy"
    job = site.submit(
        "singlegpu_make_bigmnist", "--dataset", "synthetic", "--versions", "4", "--copies", "2", "--out", out
    )
    wait_for(lambda: images.exists() and images.stat().st_size > 1 << 20, 60)
    site.command("scancel", "--signal=USR2", job)
    wait_for(lambda: site.show(job)["Restarts"] == "1", 60, POLL)
    assert site.wait(job) == "COMPLETED", site.output(job)
    assert "480,000 training and 10,000 test images" in site.output(job)
    assert int(re.search(r"augmented ([\d,]+) images", site.output(job))[1].replace(",", "")) < 240_000
    assert np.load(out / "train_images.npy", mmap_mode="r").shape == (480_000, 28, 28)


def test_default_counts(site):
    """Without any option a job takes what its file says: four processes on the GPUs of a node."""
    job = site.submit("multigpu_images", *TINY["images"])
    assert site.wait(job) == "COMPLETED"
    assert "x 4 process" in site.output(job)


def test_two_jobs_at_once_on_the_same_nodes(site):
    jobs = [site.submit("multinode_images", *TINY["images"], options=["--gpus-per-node=1"]) for _ in range(2)]
    assert [site.wait(job) for job in jobs] == ["COMPLETED", "COMPLETED"], [site.output(job) for job in jobs]
    losses = [re.findall(r"^\| +1 \| +(\S+)", site.output(job), re.M) for job in jobs]
    assert losses[0] == losses[1] != []


@pytest.mark.parametrize("name", ["singlegpu_gpt", "multigpu_text", "multinode_images"])
def test_wrong_argument(site, name):
    job = site.submit(name, "--batch_size", "many", options=options(name.split("_")[0]))
    assert site.wait(job) == "FAILED"
    out = site.output(job)
    assert "error: argument --batch_size: invalid int value: 'many'" in out
    assert site.show(job)["Restarts"] == "0"


def long_arguments(tiny, epochs=3):
    """50 steps an epoch, with dropout."""
    size = ["--epochs", epochs, "--batch_size", "24", "--threads", "1"]
    return ["--model", "cnn", "--dropout", "0.5", "--dataset", "bigmnist", "--data_dir", tiny, *size]


def train_undisturbed(fork, tiny, folder, snapshot, *arguments):
    """The same training without Slurm, on the same number of processes."""
    processes = {"singlegpu": 1, "multigpu": 2, "multinode": (2, 1)}[folder]
    arguments = [*long_arguments(tiny, *arguments), "--snapshot", snapshot]
    commands = commands_of(folder, "images.py", processes, (), arguments)
    for status, _, err, _ in fork(commands, env=environment_of(commands, {}), timeout=400, together=True):
        assert status == 0, err
    return snapshot


@pytest.fixture(scope="session")
def undisturbed(fork, tiny, tmp_path_factory):
    """undisturbed(folder) gives the snapshot of three epochs."""
    root = tmp_path_factory.mktemp("undisturbed")

    @functools.cache
    def undisturbed(folder):
        return train_undisturbed(fork, tiny, folder, root / f"{folder}.pt")

    return undisturbed


def options(folder):
    return {"singlegpu": [], "multigpu": ["--gpus-per-node=2"], "multinode": ["--gpus-per-node=1"]}[folder]


def wait_for_step(site, snapshot):
    wait_for(snapshot.exists, 120)
    time.sleep(0.3)


@pytest.mark.parametrize("how", ["requeue", "signal"])
@pytest.mark.parametrize("folder", ["singlegpu", "multigpu", "multinode"])
def test_preempted_jobs_go_on(site, undisturbed, tiny, tmp_path, folder, how):
    """After `scontrol requeue` or a limit's signal the job goes on, and ends with the same weights."""
    snapshot = tmp_path / "job.pt"
    job = site.submit(f"{folder}_images", *long_arguments(tiny), "--snapshot", snapshot,
                      "--snapshot_every", "5", options=options(folder))  # fmt: skip
    wait_for_step(site, snapshot)
    if how == "requeue":
        site.command("scontrol", "requeue", job)
    else:
        site.command("scancel", "--signal=USR2", job)
    wait_for(lambda: site.show(job)["Restarts"] == "1", 60, POLL)
    assert site.wait(job) == "COMPLETED", site.output(job)
    out = site.output(job)
    stopped = re.findall(r"stopped by a signal: epoch (\d+), step (\d+)", out)
    assert len(stopped) == 1 and f"epoch {stopped[0][0]}, step {stopped[0][1]}\n" in out, out
    assert f"job {job}, start 2" in out
    assert_same_weights(undisturbed(folder), snapshot)


def test_time_limit(site, fork, tiny, tmp_path):
    """The real limit: Slurm sends the signal, the job file requeues, until the training is done."""
    snapshot = tmp_path / "job.pt"
    job = site.submit("singlegpu_images", *long_arguments(tiny, 25), "--snapshot", snapshot,
                      options=["--time=1", "--signal=USR2@50"])  # fmt: skip
    undisturbed = train_undisturbed(fork, tiny, "singlegpu", tmp_path / "undisturbed.pt", 25)  # meanwhile
    assert site.wait(job, 400) == "COMPLETED", site.output(job)
    restarts, out = int(site.show(job)["Restarts"]), site.output(job)
    # The signal may also meet a job that has not started to train, or has just finished.
    assert 1 <= out.count("stopped by a signal") <= restarts, out
    assert_same_weights(undisturbed, snapshot)


def test_cancelled_job_stays_cancelled(site, tiny, tmp_path):
    snapshot = tmp_path / "job.pt"
    job = site.submit("singlegpu_images", *long_arguments(tiny, 1000), "--snapshot", snapshot)
    wait_for_step(site, snapshot)
    site.command("scancel", job)
    assert site.wait(job) == "CANCELLED"
    time.sleep(3)
    assert site.show(job)["JobState"] == "CANCELLED" and site.show(job)["Restarts"] == "0"


def test_killed_worker_is_restarted(site, undisturbed, tiny, tmp_path):
    """torchrun starts all workers again after one was killed; the weights are those of an undisturbed run."""
    snapshot = tmp_path / "job.pt"
    job = site.submit("multinode_images", *long_arguments(tiny), "--snapshot", snapshot, "--snapshot_every", "5",
                      options=options("multinode"))  # fmt: skip
    wait_for_step(site, snapshot)
    workers = [
        int(entry.name) for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and is_worker(entry, snapshot)
    ]  # fmt: skip
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    assert site.wait(job) == "COMPLETED", site.output(job)
    assert site.output(job).count("multinode/images.py: cnn") == 2
    assert site.show(job)["Restarts"] == "0", "of the job: torchrun restarted the workers"
    assert_same_weights(undisturbed("multinode"), snapshot)


def is_worker(entry, snapshot):
    try:
        words = (entry / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return str(snapshot).encode() in words and b"multinode/images.py" in words and b"--" not in words


@pytest.mark.parametrize("scaling", [[], ["--weak"]])
def test_sweep(site, scaling):
    out = site.folder / "sweep"
    text = site.command("bash", "slurm/sweep.sh", *scaling, "--gpus", "1 2 2x1", "--batch_sizes", 32, "--out", "sweep",
                        "images", *TINY["images"])  # fmt: skip
    job = re.search(r"job (\d+) writes", text)[1]
    assert site.wait(job) == "COMPLETED"
    batches = [32, 32, 32] if not scaling else [32, 64, 64]
    names = [f"{folder}_{count}_{batch}.csv" for (folder, count), batch in zip(
        [("singlegpu", "1"), ("multigpu", "2"), ("multinode", "2x1")], batches)]  # fmt: skip
    assert sorted(path.name for path in out.glob("*.csv")) == sorted(names)
    for name, batch, processes in zip(names, batches, (1, 2, 2)):
        logged = rows(out / name)
        assert len(logged) == 2 * processes and {row["batch_size"] for row in logged} == {batch}
    assert [row["nodes"] for row in rows(out / names[2])] == [2] * 4
    report = (out / "report.md").read_text()
    assert report.count("| weak |" if scaling else "| strong |") == 3, report
    assert list(out.glob("*_speedup.png"))


def test_sweep_refuses(tmp_path):
    """Mistakes are found before anything is submitted; --dry_run submits nothing."""
    script = ["bash", ROOT / "slurm" / "sweep.sh"]
    for arguments, message in (
        (["--gpus", "1 many", "images"], "--gpus many"),
        (["--batch_sizes", "64 -1", "images"], "--batch_sizes -1"),
        (["nothing"], "slurm/multigpu_nothing.slurm"),
        ([], "which script"),
        (["--cheap", "images"], "unknown option --cheap"),
    ):
        done = subprocess.run([*script, "--dry_run", *arguments], capture_output=True, text=True)
        assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    done = subprocess.run([*script, "--dry_run", "--gpus", "1 2x4", "--weak", "images"], capture_output=True, text=True)
    assert done.returncode == 0 and "--batch_size 512" in done.stdout and done.stdout.count("sbatch --parsable") == 3


def test_cluster_leaves_nothing_behind(cluster):
    """A cluster beside the running one comes and goes without a trace."""
    script = ["bash", ROOT / "tests" / "slurm_cluster.sh"]
    started = subprocess.run([*script, "up"], capture_output=True, text=True)
    assert started.returncode == 0, started.stderr
    folder = dict(re.findall(r"(\w+)=(\S+)", started.stdout))["CLUSTER"]
    subprocess.run([*script, "down", folder], check=True)
    assert not Path(folder).exists()
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert folder not in left
