"""A run that is asked to stop, and what it draws, reads and saves where users seldom look."""

import re

import numpy as np
import pytest
import torch
from conftest import ROOT, curve, load, rows
from test_models import module

DURING_VALIDATION = """
import os, runpy, signal, sys, time, torch
count, sleep, loss_of = 0, time.sleep, torch.nn.functional.cross_entropy
is_last = int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1

def cross_entropy(*args, **kwargs):
    global count
    count += not torch.is_grad_enabled()
    if count == 2 and not torch.is_grad_enabled() and is_last:
        os.kill(os.getpid(), signal.SIGTERM)
    if is_last:
        print(f"batch {count} of validation\\n", end="", flush=True)  # in one write
    return loss_of(*args, **kwargs)

def sleep_signalled(seconds):  # 10: all is saved, and rank 0 lets the others end first
    os.kill(os.getpid(), signal.SIGTERM) if seconds == 10 else sleep(seconds)

torch.nn.functional.cross_entropy, time.sleep = cross_entropy, sleep_signalled
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
IMAGES = "--dataset mnist --data_dir DATA --model mlp --batch_size 24"
GPT = (
    "--dataset DATA/words.txt --d_model 32 --n_heads 2 --num_layers 2 --seq_len 16 --batch_size 24"
)


@pytest.mark.parametrize(
    ("script", "words", "processes"),
    [
        ("singlegpu/images.py", IMAGES, 1),
        ("multigpu/images.py", IMAGES, 2),
        ("hybrid/gpt_fsdp.py", GPT, 2),
        ("hybrid/gpt_pipeline.py", GPT, 2),
    ],
)
def test_a_signal_during_validation(attempt, run, data, tmp_path, script, words, processes):
    """One process gets it: all stop at that step. A second signal does not change the status.

    Then the same command begins with that validation, and ends as if nothing had happened.
    """
    (before := tmp_path / "signalled.py").write_text(DURING_VALIDATION)
    words = words.replace("DATA", str(data)).split() + ["--max_steps", 4, "--eval_every", 2]
    run(script, *words, "--log", tmp_path / "whole", processes=processes)
    words += ["--log", tmp_path / "log", "--snapshot", tmp_path / "s.pt"]
    env = {"SLURM_STEP_NUM_TASKS": "2"} if "multigpu" in script else {}
    status, out, err = attempt(script, *words, processes=processes, before=[before], **env)
    assert status == 75 and "stopped at step 2 of 4" in out, (out, err)
    batches = [int(count) for count in re.findall("batch (.*) of validation", out)]
    assert 2 <= max(batches) <= 4, "the rest of the validation is left out"  # 4 micro-batches
    assert load(tmp_path / "s.pt")["step"] == 2 and len(curve(tmp_path / "log")) == 0
    run(script, *words, processes=processes)
    np.testing.assert_allclose(curve(tmp_path / "log"), curve(tmp_path / "whole"), rtol=1e-6)
    assert [row["step"] for row in rows(tmp_path / "log") if "val_loss" in row][::processes] == [
        2,
        4,
    ]


IN_THE_LAST_STEP = """
import os, runpy, signal, sys, torch

step, calls = torch.optim.AdamW.step, []

def signalled(*args, **kwargs):
    calls.append(0)
    if len(calls) == 4:
        os.kill(os.getpid(), signal.SIGTERM)
    return step(*args, **kwargs)

torch.optim.AdamW.step = signalled
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(("folder", "processes"), [("singlegpu", 1), ("multinode", 2)])
def test_a_run_stopped_after_its_last_step(attempt, run, data, tmp_path, folder, processes):
    """The same command validates once. Typed again, it does nothing."""
    (before := tmp_path / "signalled.py").write_text(IN_THE_LAST_STEP)
    words = [f"{folder}/images.py", *IMAGES.replace("DATA", str(data)).split(), "--max_steps", 4]
    words += ["--log", tmp_path / "log", "--snapshot", tmp_path / "s.pt"]
    assert attempt(*words, processes=processes, before=[before])[0] == 75
    for _ in range(2):
        run(*words, processes=processes)
        validated = [row for row in rows(tmp_path / "log") if "val_loss" in row]
        assert [row["step"] for row in validated] == [4] * processes


SIGNALLED_WORKERS = """
import os, runpy, signal, sys, threading, time

def signal_often():
    for _ in range(500):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.001)

start = lambda: threading.Thread(target=signal_often, daemon=True).start()
os.register_at_fork(after_in_child=start)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_signals_while_workers_start(run, data, tmp_path):
    """Signals to the whole job reach them, too, and end none: not even in its first moments."""
    (before := tmp_path / "signalled.py").write_text(SIGNALLED_WORKERS)
    words = [*IMAGES.replace("DATA", str(data)).split(), "--max_steps", 4, "--eval_every", 2]
    words += ["--num_workers", 2, "--log", tmp_path / "log"]
    run("singlegpu/images.py", *words, before=[before])
    assert len(curve(tmp_path / "log")) == 2


def test_a_worker_that_starts_after_its_parents_end_ends(attempt, tmp_path):
    """Nobody else would end it, and it keeps the job's output open."""
    (script := tmp_path / "late.py").write_text(
        f"import sys, time\nsys.path.append('{ROOT / 'multigpu'}')\nimport images\n"
        "images.init_worker(2**30)\ntime.sleep(1000)\nprint('lives')"
    )
    assert attempt(script) == (0, "", "")


LOSS = 'return loss, {"loss": loss * len(targets), "mae": errors, "count": len(targets)}'
QUEUED = """
class Queued(torch.Tensor):
    queue, waits = [], []
    def __float__(self):  # as a GPU: Python is ahead by so many steps, which take so long
        time.sleep(SECONDS * len(self.queue))
        self.waits.append(len(self.queue))
        self.queue.clear()
        return super().__float__()


def finish(model, data, args, device):
    print("longest", max(Queued.waits))


def create_optimizer"""


QUEUES = [("singlegpu", 1, 0.02), ("multigpu", 2, 0.02), ("singlegpu", 1, 0)]


@pytest.mark.parametrize(("folder", "processes", "seconds"), QUEUES)
def test_looks_follow_a_device_that_is_behind(run, table_band, paste, folder, processes, seconds):
    """About once a second, though Python starts a thousand steps in this time.

    A few quick steps, as where data comes in bursts, put off the next look by as many again.
    """
    queued = QUEUED.lstrip().replace("SECONDS", str(seconds))
    band = table_band.replace("def create_optimizer", queued)
    queue = "if model.training:\n        Queued.queue.append(0)\n    "
    queue += "loss_sum = (loss * len(targets)).as_subclass(Queued)\n    "
    band = band.replace(LOSS, queue + LOSS.replace("loss * len(targets)", "loss_sum"))
    words = ("--max_steps", 150, "--eval_every", 150)
    out = run(paste(band, folder), *words, processes=processes)
    assert int(re.search(r"longest (\d+)", out)[1]) <= 75, out


def test_what_batch_loss_draws(run, table_band, paste, tmp_path):
    """With workers, too, NumPy's numbers differ between steps and processes; a resume repeats."""
    drawn = tmp_path / "drawn"
    draw = f"""with open("{drawn}", "a") as file:
        print(os.environ["RANK"], args.max_steps, np.random.random(), file=file)
    {LOSS}"""
    script = paste(table_band.replace(LOSS, draw), "multigpu")
    words = ("--num_workers", 1, "--eval_every", 3, "--snapshot")
    run(script, *words, tmp_path / "a.pt", "--max_steps", 6, processes=2)
    whole = set(drawn.read_text().splitlines())
    validated = 2 * 5  # 120 samples in batches of 12; both validations draw the same
    assert len(whole) == len({line.split()[2] for line in whole}) == 2 * 6 + validated
    drawn.unlink()
    for steps in (3, 6):
        run(script, *words, tmp_path / "b.pt", "--max_steps", steps, processes=2)
    parts = {line.replace(" 3 ", " 6 ") for line in drawn.read_text().splitlines()}
    assert parts == whole


def test_an_error_of_any_process_is_told(attempt, tmp_path):
    """A process whose launcher has not ended it by then says what only it has seen."""
    place = f"import sys\nsys.path.append('{ROOT / 'multigpu'}')\n"
    (script := tmp_path / "rank1.py").write_text(
        f"{place}import images\nimages.main = lambda *_: sys.exit('it is damaged')\n"
        "images.start(1, None, '')"
    )
    status, _, err = attempt(script, RANK="1")
    assert status == 1 and re.fullmatch("rank 1 on .*: it is damaged\n", err)


def test_one_process_says_that_the_loss_is_not_finite(attempt, data):
    """The others are ended at once, as by torchrun; they take its signal for a stop."""
    words = (*IMAGES.replace("DATA", str(data)).split(), "--learning_rate", "1e30")
    status, _, err = attempt("multinode/images.py", *words, processes=3)
    assert status == 1 and err.count("the loss is not finite at step") == 1, err


def test_snapshots_hold_what_can_be_read(refused, run, table_band, paste, tmp_path):
    """A NumPy number in the optimizer's state fails at the first save. A frozen mask is saved."""
    words = ("--max_steps", 4, "--snapshot", tmp_path / "s.pt")
    refused("cannot save", paste(table_band.replace("0.9", "np.float64(0.9)")), *words)
    assert not [*tmp_path.glob("s.pt*")]
    mask = "\n    model.mask = nn.Parameter(torch.tensor(-math.inf), requires_grad=False)"
    band = table_band.replace("return nn.Sequential(", "model = nn.Sequential(")
    band = band.replace("nn.Linear(16, 1))", "nn.Linear(16, 1))" + mask + "\n    return model")
    run(paste(band), *words)
    assert load(tmp_path / "s.pt")["model"]["mask"] == -torch.inf


def test_a_large_file_of_ids_is_not_validated_whole(run, tmp_path):
    """2**18 tokens at most, as of a text."""
    ids = np.random.default_rng(0).integers(0, 99, 600_000, dtype=np.uint16)
    for split in ("train", "val"):
        ids.tofile(tmp_path / f"{split}.bin")
    gpt = module("singlegpu/gpt.py")
    args = gpt.argparse.Namespace(dataset=str(tmp_path), seq_len=128, vocab_size=99)
    train_data, val_data = gpt.read_data(args)
    assert (len(train_data), len(val_data)) == (599_999 // 128, (2**18 - 1) // 128)


def test_a_process_without_its_launcher_ends(attempt, data):
    """torchrun was killed while this process started: nobody listens."""
    env = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}
    words = (*IMAGES.replace("DATA", str(data)).split(), "--timeout", 3)
    status, _, err = attempt("multinode/images.py", *words, **env)
    assert status == 1 and "timed out" in err, err
