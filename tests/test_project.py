"""Copies, imports, commands and files that the project is made of."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import FOLDERS, ROOT, SCRIPTS, TRAINING, module
from fork_server import run_all
from PIL import Image
from test_training import check_forks
from torchvision.models import ResNet18_Weights, resnet18

GPT = "--dataset my.txt --d_model 16 --n_heads 2 --num_layers 1 --seq_len 16"
TINY = {  # how a command begins: flags that make it small. The first that fits counts.
    "images.py --dataset path/to/photos": "--image_size 32 --batch_size 6 --epochs 1",
    "multigpu/mine.py": "--batch_size 8 --max_steps 2",
    "multigpu/gpt.py": GPT,
    "singlegpu/gpt.py": f"{GPT} --max_steps 2",
    "quantize/gpt.py": "--rounds 1 --eager --num_samples 8",
}
PAGES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("[!.]*/*.md"))
PAGES = sorted(path.name for path in ROOT.glob("*.md")) + PAGES
TOOLS = [f"tools/{path.name}" for path in (ROOT / "tools").glob("*.py")]
TOOLS += ["tools/check/__main__.py", "tests/gpu.py", "tests/benchmark.py"]
OWN = ("multigpu/mine.py", "hybrid/mine.py", "multigpu/finetune.py")  # that a page makes
LIBRARIES = "numpy PIL pyarrow torch torchao torchvision datasets tokenizers sacrebleu tqdm"


def readme():
    return (ROOT / "README.md").read_text()


def test_scripts_stand_alone():
    """They import the standard library and installed packages, and nothing of ours."""
    for script in SCRIPTS:
        for node in ast.walk(ast.parse((ROOT / script).read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [each.name for each in node.names] if isinstance(node, ast.Import) else []
            tops = {name.split(".")[0] for name in names}
            assert tops <= {*LIBRARIES.split(), *sys.stdlib_module_names}, (script, tops)


def test_each_phase_is_known_to_the_tools():
    """report.py and predict.py add up the phases of a step, and draw each in a colour."""
    tools = module("tools/logs.py")
    for script in filter(TRAINING.search, SCRIPTS):
        [phases] = re.findall(r"^STEP_PHASES = (\(.*\))", (ROOT / script).read_text(), re.M)
        phases = {*ast.literal_eval(phases)}
        assert phases <= {*tools.PHASES} and phases <= tools.COLOURS.keys(), script


def test_what_is_loaded_is_data():
    """In each script, tool and example. Files that try to run code: test_files_cannot_run_code."""
    folders = (*FOLDERS, "tools", "tools/check", "examples")
    count = 0
    for path in (path for name in folders for path in (ROOT / name).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            words = {each.arg: ast.unparse(each.value) for each in getattr(node, "keywords", ())}
            assert name not in ("eval", "exec", "pickle.load", "pickle.loads"), path
            assert "trust_remote_code" not in words and "allow_pickle" not in words, path
            if name == "torch.load":
                assert words.get("weights_only") == "True", path
                count += 1
    assert count > len(SCRIPTS)


IN_A_JOB = (  # what each job file of a training needs, so that it goes on in a new job
    "#SBATCH --cpus-per-task=",
    "#SBATCH --time=",
    "#SBATCH --gpus-per-node=",
    "# EDIT: activate your Python",
    "--signal=USR2@120",
    "--requeue",
    "--open-mode=append",
    '[ "$status" -ne 75 ] || scontrol re',
    'exit "$status"\n',
    ".py --snapshot ",
)
SEVERAL_TASKS = ("--kill-on-bad-exit=1", "--wait=0", "export MASTER_ADDR=", "export MASTER_PORT=")


def test_each_script_has_its_job_file(tmp_path):
    """The two have the same name, and Bash can read the job file. A page's sed makes another."""
    shutil.copytree(ROOT / "slurm", tmp_path / "slurm")
    page = (ROOT / "slurm/README.md").read_text()
    [line] = re.findall("^sed .*", page, re.M)
    subprocess.run(line, shell=True, check=True, cwd=tmp_path)
    named = re.findall(r"[a-z]+/\w+\.py", (ROOT / "multinode/kubernetes.yaml").read_text())
    assert named and {*named} <= {*SCRIPTS}
    text = (mine := tmp_path / "slurm/multigpu_mine.slurm").read_text()
    assert "--job-name=multigpu_mine\n" in text and " python multigpu/mine.py --snapshot " in text
    names = [script.removesuffix(".py").replace("/", "_") for script in SCRIPTS]
    files = {path.stem: path for path in mine.parent.glob("*.slurm")}
    assert {*files} - {"report", "tools_report", "tools_allreduce"} == {*names, mine.stem}
    for name, path in (files | {"sweep": ROOT / "slurm/sweep.sh"}).items():
        assert subprocess.run(["bash", "-n", path]).returncode == 0, path
        if TRAINING.search(name.replace("_", "/", 1) + ".py"):
            several = SEVERAL_TASKS if name.startswith(("multinode", "hybrid")) else ()
            missing = [words for words in (*IN_A_JOB, *several) if words not in path.read_text()]
            assert not missing, (path, missing)


def flags_of(path):
    """The flags that a script, a job file's script or a shell script knows."""
    if path.endswith(".slurm"):
        folder, script = Path(path).stem.split("_", 1)
        return flags_of(f"{folder}/{script}.py")
    text = (ROOT / path).read_text() if (ROOT / path).exists() else ""
    if path.endswith(".sh"):  # what it does not know itself, it gives to the scripts
        return {*re.findall(r"--\w+", text)}.union(*map(flags_of, SCRIPTS))
    return {*re.findall(r'"(--\w+)"', text), "--help"}


def unknown_flags(text):
    """The flags in commands of a page that the script before them does not know, and in tables."""
    declared = {"--config"}.union(*map(flags_of, [*SCRIPTS, *TOOLS]))
    rows = re.findall(r"^\| `(--\w+)", text, re.M)  # of a table of flags
    unknown = [flag for flag in rows if flag not in declared]
    text = text.replace("\\\n", " ")  # a command may go on in the next line
    for command in re.findall(r"^.*\b(?:python|torchrun|sbatch|bash|srun) .*$", text, re.M):
        # The options of torchrun, sbatch and tools/check end where the name of a script begins.
        parts = re.split(r"\b([a-z]+/\w+\.(?:py|slurm|sh))\b", command)
        for path, words in zip(parts[1::2], parts[2::2]):
            words = re.split(r"[`|;#]|&&|python -m| -- |\"\s+\"", words)[0]
            flags = {*re.findall(r"(?<=\s)--[a-z]\w+", words)}
            unknown += [f"{path} {flag}" for flag in flags - flags_of(path) if path not in OWN]
    return unknown


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_what_exists(page):
    """Links to files and to sections of the page, and the scripts in commands."""
    text = (ROOT / page).read_text()
    links = re.findall(r"\]\((?!\.\./\.\./)([\w./-]*)(?:#(.*?))?\)", text)  # ../../: of GitHub
    missing = [link for link, _ in links if not (ROOT / page).parent.joinpath(link).exists()]
    commands = re.findall(r"(?:python|sbatch|bash|--) ([a-z]+/(?!mine|finetune)\w+\.\w+)", text)
    missing += [name for name in commands if not (ROOT / name).exists()]
    missing += unknown_flags(text)
    for link, anchor in links:
        there = (ROOT / page).parent.joinpath(link).read_text() if link and anchor else text
        titles = re.findall(r"^#+ (.*)", there, re.M)
        anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
        missing += [anchor] * (anchor not in {"", *anchors})
    assert not missing


MY_MODEL = """import torch
from torch import nn


class MyDataset:
    def __init__(self, split):
        self.size = {"train": 64, "val": 16}[split]

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.full((5,), index / 64), index % 3


class MyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 3)])

    def forward(self, inputs):
        return self.blocks[0](inputs)
"""


def write_own_files(folder):
    """Writes what README.md says that a reader has: photos, a text, a model, and task.py.

    With TORCH_HOME=weights, torchvision finds those of a pretrained network.
    """
    for number in range(24):
        split = ("val", "train")[number % 2]
        names = "path/to/photos", split, ("cat", "dog")[number % 4 // 2]
        (path := folder.joinpath(*names)).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (number, 0, 0)).save(path / f"{number}.png")
    weights = ResNet18_Weights.DEFAULT.url.split("/")[-1]
    (folder / "weights/hub/checkpoints").mkdir(parents=True)
    pretrained = resnet18().state_dict()
    pretrained["conv1.weight"].fill_(7.0)  # no new network has such weights
    torch.save(pretrained, folder / "weights/hub/checkpoints" / weights)
    (folder / "multigpu/my_model.py").write_text(MY_MODEL)
    (folder / "my.txt").write_text(readme())
    [task] = re.findall(r"^```python\n(.*?)^```", readme(), re.M | re.S)
    (folder / "task.py").write_text(task)


def readme_commands():
    """Returns commands of README.md: of a GPT, photographs, a task of one's own, tools.

    One with which another one begins is left out. Other tests start scripts with such words as the
    rest of the commands have, and soak_pages.py types them all.
    """
    lines = []
    for kind, block, words in re.findall(r"^```(\w*)\n(.*?)^```|`([^`]+)`", readme(), re.M | re.S):
        lines += block.splitlines() * (kind == "bash") + [" ".join(words.split())]
    # OMP_NUM_THREADS=1, before a command, holds for all tests.
    words = r"gpt\.py|photos|mine|tools/p"
    is_command = rf"(?:\w+=\d+ )?(python (?=.*(?:{words})).*)"
    commands = [found[1] for line in lines if (found := re.fullmatch(is_command, line))]
    return [each for each in commands if f"{each} " not in "\n".join(commands)]


def test_readme_commands(tmp_path):
    """Each runs as it stands, but tiny: of blocks, then in text.

    A --pretrained network trains on photographs.
    """
    for name in (*FOLDERS, "examples", "tools", "pictures"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "multigpu").unlink()
    shutil.copytree(ROOT / "multigpu", tmp_path / "multigpu")
    write_own_files(tmp_path)
    commands = readme_commands()
    assert len(commands) >= 7
    printed = ""
    for command in commands:
        command, _, target = command.partition(" > ")  # what paste.py writes
        small = (more for name, more in TINY.items() if f"{name} " in f"{command} ")
        command += " " + ("" if target else next(small, ""))
        env = {"TORCH_HOME": str(tmp_path / "weights")}
        [(status, out, err)] = run_all([command.split()[1:]], [env], tmp_path)
        assert status == 0, (command, err)
        printed += out
        if target:
            (tmp_path / target).write_text(out)
    assert (tmp_path / "gpt.pt").exists() and (tmp_path / "mine.pt").exists()
    assert "It pays up to 2 processes" in printed
    trained = torch.load(tmp_path / "photos.pt", weights_only=True)["model"]
    assert max(weight.max() for weight in trained.values()) > 6, "as the pretrained ones"


def test_readme_shows_what_ddp_adds():
    """README's lines are of the diff of the two mnist.py. With multigpu's page, none is missing."""
    [heart] = re.findall(r"^```diff\n(.*?)^```", readme(), re.M | re.S)
    page = (ROOT / "multigpu/README.md").read_text()
    [rest] = re.findall(r"^```python\n(world_size.*?)^```", page, re.M | re.S)
    alone, ddp = ((ROOT / f"{name}/mnist.py").read_text() for name in FOLDERS[:2])
    alone, ddp = ([x.split("  #")[0].strip() for x in text.splitlines()] for text in (alone, ddp))
    shown = {"+": [], "-": []}
    for line in heart.splitlines():
        shown[line[0]].append(line[1:].split("  #")[0].strip())
    assert all(line in alone and line not in ddp for line in shown["-"])
    assert all(line in ddp and line not in alone for line in shown["+"])
    shown = shown["+"] + [line.split("  #")[0].strip() for line in rest.splitlines()]
    added = [line for line in ddp if line not in alone]
    assert {*shown} <= {*added}, {*shown} - {*added}
    main = added[added.index(shown[0]) : added.index("dist.destroy_process_group()")]
    words = re.compile(r"rank|world_size|dist\.|\bDist")
    assert {line for line in main if words.search(line) and "mark" not in line} <= {*shown}


def test_hybrids_page_shows_the_heart_of_fsdp():
    page = (ROOT / "hybrid/README.md").read_text()
    [shown] = re.findall(r"^```python\n(with torch.*?)^```", page, re.M | re.S)
    lines = {line.strip() for line in (ROOT / "hybrid/gpt_fsdp.py").read_text().splitlines()}
    assert {line.strip() for line in shown.splitlines() if line} <= lines


def test_a_folder_of_classes_is_split(tmp_path):
    """By the lines of examples/README.md: each tenth file is to validate on, whatever its name."""
    for name, count in (("one class", 11), ("two", 5)):
        (tmp_path / "cells" / name).mkdir(parents=True)
        for number in range(count):
            (tmp_path / "cells" / name / f"{number} a.tif").write_text(f"{name} {number}")
    page = (ROOT / "examples/README.md").read_text().split("### Split a folder of classes")[1]
    lines = re.search(r"^```bash\n(.*?)^```", page, re.M | re.S)[1]
    subprocess.run(["bash", "-e", "-c", lines], cwd=tmp_path, check=True)
    found = {part: [*(tmp_path / "photos" / part).glob("*/*.tif")] for part in ("train", "val")}
    assert len(found["val"]) == 3 and len(found["train"]) == 13
    texts = {path.read_text() for paths in found.values() for path in paths}
    assert len(texts) == 16, "each file is linked, once"
    for paths in found.values():
        assert {path.parent.name for path in paths} == {"one class", "two"}, "numbered alike"


START_OF_TRAIN = """import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0)
device, num_epochs = torch.device("cpu"), 3
images = torch.randn(640, 20)
data = TensorDataset(images, images[:, :4].argmax(1))


def MyModel():
    return nn.Linear(20, 4)


"""
STEPS_OF_TRAIN = """    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in loader:
        nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("processes", [1, 3])
def test_a_train_py_of_ones_own_becomes_ddp(tmp_path, monkeypatch, processes):
    """The lines of multigpu's page: tools/check finds the gradients averaged, and no sample twice.

    Without them, it is the script of one process. Both save a model that loads without DDP.
    """
    page = (ROOT / "multigpu/README.md").read_text().split("## In a train.py of your own")[1]
    [diff] = re.findall(r"^```diff\n(.*?)^```", page, re.M | re.S)
    signs = " -" if processes == 1 else " +"
    lines = [line[1:] for line in diff.splitlines() if line[0] in signs]
    text = START_OF_TRAIN + "\n".join(lines).replace("    ...\n", STEPS_OF_TRAIN)
    if not torch.accelerator.is_available():
        text = text.replace("torch.accelerator.set_device_index(local_rank)", "")
        text = text.replace("torch.device(local_rank)", 'torch.device("cpu")')
        text = text.replace('"nccl", device_id=device', '"gloo"')
    (path := tmp_path / "multinode/train.py").parent.mkdir()
    path.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    done = check_forks("--steps", 1000, "--", processes, path)
    assert done.returncode == 0, done.stdout + done.stderr
    if processes > 1:
        for words in ("gradients are averaged", "shares "):
            assert re.search(f"^ok .*{words}", done.stdout, re.M), done.stdout
    weights = torch.load(tmp_path / "run.pt", weights_only=True)
    assert {name: tuple(x.shape) for name, x in weights.items()} == {
        "weight": (4, 20),
        "bias": (4,),
    }
