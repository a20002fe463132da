"""The five commands of examples/README.md, from a data set of the Hub to transformers."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, FOLDERS, ROOT, load
from test_hub import PAGE, assert_same_logits, write_texts


@pytest.mark.parametrize("folder", ["singlegpu", "multigpu"])
def test_five_commands_from_the_hub_to_elsewhere(tmp_path, folder):
    """Those of the page, as they are typed, but small. The data set is a local one.

    It is named and laid out as on the Hub: Parquet files of a configuration that README.md names.
    """
    [block] = re.findall(r"^```bash\n(python examples/tokens.*?)^```", PAGE, re.M | re.S)
    commands = block.splitlines()
    assert len(commands) == 5
    name = "wikitext-103-raw-v1"
    hub = tmp_path / "Salesforce/wikitext"
    write_texts(hub, 2500)
    files = f"  - split: train\n    path: {name}/train-*\n"
    about = f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{files}---\n"
    (hub / "README.md").write_text(about)
    (hub / "data").rename(hub / name)
    for linked in (*FOLDERS, "examples", "tools"):
        (tmp_path / linked).symlink_to(ROOT / linked)
    small = "--d_model 16 --n_heads 2 --num_layers 2 --seq_len 32 --max_steps 20 --batch_size 12"
    printed = []
    for command in commands:
        command = command.replace("multigpu", folder)
        if "tokens.py" in command:
            command += " --column content --vocab_size 300"
        command = re.sub(r"--d_model.*_layers 12", small, command)
        env = ENVIRONMENT | {"HF_HUB_OFFLINE": "1"}
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        how = {"capture_output": True, "text": True, "cwd": tmp_path, "env": env}
        done = subprocess.run(command, shell=True, **how)
        assert done.returncode == 0, (command, done.stderr)
        printed.append(done.stdout)
    assert "FSDP, checkpoints" in printed[1]
    assert re.search(r"\bstep 20 .*tokens/s \d", printed[2].replace("\n", " ")), printed[2]
    assert "'generated_text': 'The" in printed[4]
    assert_same_logits("singlegpu/gpt.py", load(tmp_path / "gpt.pt"), tmp_path / "my_gpt")
