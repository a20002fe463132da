"""Each command of each page is typed by soak_pages.py, or pages.toml says why it is not."""

import re
import tomllib

import pytest
from conftest import ROOT

PAGES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("[!.]*/README.md"))
PAGES = ["README.md", "CONTRIBUTING.md", "results.md", *PAGES]
SHELLS = ("bash", "sh", "shell", "console")
PROGRAMS = r"""python3? \S*/bin/python torchrun sbatch srun scancel scontrol bash pip make diff cp
    sed cat git source export unset module ruff ip kubectl apptainer docker py-spy tensorboard
    [a-z]+/(?:helpers/)?\w+\.py""".split()
VARIABLES = r"(?:[A-Z_]+=\S+ )*"  # that stand before a command
IS_COMMAND = re.compile(f"{VARIABLES}(?:{'|'.join(PROGRAMS)}) ")
# What is typed as it stands, beside the scripts of SMALL.
PLAIN = r"""make (?:demo|lint)$|diff |mkdir |cp |sed |export |unset |source |ruff |[a-z]+=|
    for file in |bash slurm/sweep.sh |python -m torch\.""".replace("\n    ", "")
PLAIN = re.compile(f"{VARIABLES}(?:{PLAIN})")
STARTED = re.compile(rf"(?:for n in .*?; do\s+)?{VARIABLES}(?:python|torchrun) ")
SCRIPT = re.compile(r"""[\w/]*\w\.py\b[^|;&>"'\n]*""")  # a script and its words

RUN = "--max_steps 6 --batch_size 8"
GPT = "--dataset my.txt --d_model 16 --n_heads 2 --num_layers 2 --seq_len 16 --batch_size 16"
SMALL = {  # words of a command: the flags that make it small. The first that fit count.
    "tools/paste.py": "",
    "tools/memory.py": "",
    "tools/report.py": "",
    "tools/predict.py": "",
    "tools/allreduce.py": "--max_bytes 2097152 --seconds 0.1",
    "tests/check_copies.py": "",
    "tests/benchmark.py steps": "--rounds 1 --lengths 3 6",
    "tests/helpers/plain_loops.py plain": "",
    "examples/predict_photo.py": "",
    "examples/show_log.py": "",
    "quantize/mnist.py": "",
    "quantize/gpt.py": "--rounds 1 --eager --num_samples 8",
    "/mnist.py": "--epochs 1 --batch_size 6000",
    "/mnist_tensor.py": "--epochs 1 --batch_size 6000",
    "/make_bigmnist.py": "--num_images 600 --versions 1 --copies 1",
    "--pretrained --epochs 0": "--image_size 32 --batch_size 6",
    "/images.py --dataset path/to/photos": "--image_size 32 --batch_size 6 --epochs 1",
    "/images.py": RUN,
    "/text.py": f"{RUN} --seq_len 16",
    "/translation.py": f"{RUN} --seq_len 8",
    "/gpt.py": f"{GPT} --max_steps 6",
    "/gpt_fsdp.py": f"{GPT} --max_steps 6",
    "/gpt_pipeline.py": f"{GPT} --max_steps 6",
    "/gpt_tensor.py": f"{GPT} --max_steps 6",
    "/mine.py": RUN,  # what a page makes
    "/finetune.py": f"{RUN} --seq_len 8",
    "train.py": "--max_steps 40 --batch_size 8 --model mlp",  # what a reader has
    "one_gpu.py": "--max_steps 40 --batch_size 8 --model mlp",
}


def commands_of(text):
    """Returns the commands of a page in its order: of blocks for a shell, and between backticks."""
    commands = []
    code = re.findall(r"^ *```(\w*)\n(.*?)^ *```|`([^`]+)`", text, re.M | re.S)
    for kind, block, words in code:
        words = " ".join(words.split())
        if kind in SHELLS:
            block = re.sub(r"[ \t]+#.*", "", block.replace("\\\n", " "))
            commands += re.findall(r"^for (?:.|\n)*?\bdone\b|^.+", block, re.M)
        elif IS_COMMAND.match(words):
            commands.append(words)
        else:
            commands += re.findall(r"^\$ (.*)", block, re.M)  # an output, and what printed it
    return list(dict.fromkeys(command.strip() for command in commands))


def in_one_line(command):
    return " ".join(command.split())


def not_typed():
    """Returns {command: why nobody types it here}, of pages.toml."""
    found = {}
    for row in tomllib.loads((ROOT / "tests/pages.toml").read_text())["reason"]:
        for command in row["commands"].strip().splitlines():
            assert command not in found, f"{command} is listed twice"
            found[command] = row["why"]
    return found


def small_flags(words):
    """Returns the flags that make a script with these words small, or None if there is no row."""
    return next((flags for name, flags in SMALL.items() if f"{name} " in f"{words} "), None)


def made_small(command):
    """Returns the command as the soak types it, or None if it is of no kind that is typed."""
    if PLAIN.match(command):
        return command
    started, arrow, target = command.partition(" > ")
    scripts = SCRIPT.findall(started)
    if not STARTED.match(started) or not scripts or None in map(small_flags, scripts):
        return None
    small = SCRIPT.sub(lambda found: f"{found[0].rstrip()} {small_flags(found[0])} ", started)
    return f"{small.rstrip()}{arrow}{target}"


@pytest.mark.parametrize("page", PAGES)
def test_each_command_is_typed_or_listed(page):
    listed = not_typed()
    for command in commands_of((ROOT / page).read_text()):
        is_known = in_one_line(command) in listed or made_small(command) is not None
        assert is_known, f"{page}: a row of SMALL or of pages.toml is missing for: {command}"


def test_each_listed_command_stands_on_a_page():
    """Its reason is a sentence, and a test that it names is there."""
    pages = [commands_of((ROOT / page).read_text()) for page in PAGES]
    found = {in_one_line(command) for commands in pages for command in commands}
    assert len(found) > 150, "the pages have commands"
    for command, why in not_typed().items():
        assert command in found, f"no page has the command {command}"
        assert re.fullmatch(r"[A-Z].*\.", why), f"{why} is no sentence"
        for name in re.findall(r"\b(?:test|soak)_\w+", why):
            assert [*(ROOT / "tests").glob(f"**/{name}.py")], f"{why}: there is no {name}.py"
