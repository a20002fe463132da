"""What tools/memory.py tells of a training, beside what its processes hold at most."""

import pytest
from held import LARGE, ratio

SHARDS = {"is_fsdp": True}
HOW = {  # script, its flags, and what memory.py is asked for
    "DDP": ("multigpu/gpt.py", (), {}),
    "FSDP": ("hybrid/gpt_fsdp.py", (), SHARDS),
    "FSDP in bf16": ("hybrid/gpt_fsdp.py", (), SHARDS | {"both": ("--precision", "bf16")}),
    "checkpoints": (
        "hybrid/gpt_fsdp.py",
        ("--checkpoint_activations",),
        SHARDS | {"checkpoints": True},
    ),
}


@pytest.mark.parametrize("large", LARGE)
@pytest.mark.parametrize("how", HOW)
def test_memory_is_as_told(data, tmp_path, how, large):
    """The difference of a small training and of a large one, within a tenth."""
    script, flags, asked = HOW[how]
    sizes = LARGE[large]
    if how == "checkpoints":  # which leave little of the activations
        sizes = sizes.replace("--batch_size 64", "--batch_size 256")
    found = ratio(script, sizes, data / "words.txt", tmp_path, flags, **asked)
    print(f"{how}, {large}: {found:.3f} of what is held")
    assert found == pytest.approx(1, abs=0.1)
