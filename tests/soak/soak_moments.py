"""The time limit comes at any moment of a job with default flags, on a Slurm that kills orphans.

SOAK_MOMENTS=all tries each moment with each job. Otherwise each job meets two of the moments.
"""

import itertools
import os
import re
import time

import pytest
from conftest import ROOT, load, wait_for
from test_slurm import ENDED, cluster, site  # noqa: F401

MOMENTS = {  # what is slow at that moment (see tests/helpers/slow.py), and for how many seconds
    "start-up": None,  # Python imports, processes meet
    "data preparation": ("read", 25),
    "first step": ("step", 25),
    "steps of 6 s": ("step", 6),
    "validation": ("eval", 20),
    "saving": ("save", 10),
}
IMAGES = "--model mlp --dataset mnist --data_dir {data}"
GPT = "--dataset {data}/words.txt --max_steps 60 --eval_every 20"
JOBS = {  # job: arguments, GPUs of a node
    "singlegpu_images": (IMAGES, 1),
    "multigpu_images": (IMAGES, 2),
    "multinode_images": (IMAGES, 1),
    "hybrid_images": (IMAGES, 2),
    "hybrid_gpt_pipeline": (GPT, 1),
    "preempted multinode_images": (IMAGES, 1),
}
PAIRS = [
    pair
    for pair in itertools.product(JOBS, MOMENTS)
    if "gpt" not in pair[0] or pair[1] != "data preparation"
]
if os.environ.get("SOAK_MOMENTS") != "all":
    PAIRS = PAIRS[1::3]

SLOWED = f"""
import os, sys
if os.path.exists(os.environ["SLOW_FILE"]):
    sys.path.insert(0, {str(ROOT / "tests/helpers")!r})
    import slow
    what, seconds = open(os.environ["SLOW_FILE"]).read().split()
    slow.slow_down(what, -1, float(seconds))
"""


@pytest.mark.parametrize("name, moment", PAIRS)
def test_the_limit_comes(site, data, tmp_path, name, moment):  # noqa: F811
    """At most the step under way is lost. A validation is done again: all was saved before it."""
    slow_file, steps, folder = (tmp_path / each for each in ("slow", "steps", "slowed"))
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SLOWED)
    slowly = {"SLOW_FILE": slow_file, "STEPS": steps, "PYTHONPATH": folder}
    site.environment = site.environment | {key: str(path) for key, path in slowly.items()}
    if MOMENTS[moment]:
        slow_file.write_text(" ".join(map(str, MOMENTS[moment])))
    words, gpus = JOBS[name]
    script = name.split()[-1]
    options = [f"--gpus-per-node={gpus}", f"--cpus-per-task={gpus}"]
    options += ["--ntasks-per-node=1"] if script.startswith(("multinode", "hybrid")) else []
    job = site.submit(script, *words.format(data=data).split(), "--epochs", 3, options=options)

    def count():
        return len(steps.read_text().splitlines()) if steps.exists() else 0

    def has_come():
        state = site.show(job)["JobState"]
        is_there = count() >= (3 if moment == "steps of 6 s" else 1)
        return state in ENDED or (state == "RUNNING" if moment == "start-up" else is_there)

    wait_for(has_come, pause=0.2)
    time.sleep(0.5 if moment == "start-up" else 3)  # importing torch takes longer than that
    under_way = count()
    slow_file.unlink(missing_ok=True)
    start = time.monotonic()
    if name.startswith("preempted"):
        site.command("scontrol", "requeue", job)
    else:
        site.reach_limit(job)
    wait_for(lambda: site.show(job)["JobState"] in {"PENDING"} | ENDED, pause=0.1)
    gone = time.monotonic() - start
    if moment in ("start-up", "data preparation") and not name.startswith("preempted"):
        assert site.wait(job) == "FAILED", "nothing was done yet: it is not queued again"
        return
    assert site.wait(job) == "COMPLETED", site.output(job)
    step, end = map(int, re.findall(r", steps (\d+) to (\d+)", site.output(job))[-1])
    print(f"| {moment} | {name} | {under_way} | step {step} of {end} | {gone:.0f} s |")
    if moment == "steps of 6 s":
        assert step >= under_way - 1
    if moment in ("validation", "saving"):
        assert step >= end // 3, "the steps of the first row were saved before"
    assert load(site.folder / f"{script}-{job}.pt")["step"] == end
