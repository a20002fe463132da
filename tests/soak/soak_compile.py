"""--compile makes kernels of each stage, and of the blocks of FSDP: minutes of compilation."""

import numpy as np
import pytest
from conftest import curve
from test_hybrid import FSDP, PIPELINE, words  # noqa: F401


KERNELS = {  # of the first and the last stage; of a block, and of the head
    PIPELINE: ("cpp_fused_add_embedding_native_layer_norm", "cpp_fused_native_layer_norm"),
    FSDP: ("gelu", "cpp_fused__log_softmax"),
}


@pytest.mark.parametrize("script", KERNELS)
def test_gpt_compile_compiles_all_parts(run, words, tmp_path, script):  # noqa: F811
    """Kernels are generated for each of them, and the loss is the eager one."""
    few = [*words, "--num_layers", 2, "--max_steps", 2]
    logs = [tmp_path / "eager.jsonl", tmp_path / "compiled.jsonl"]
    run(script, *few, "--log", logs[0], processes=2)
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    run(script, *few, "--log", logs[1], "--compile", processes=2, **cache)
    np.testing.assert_allclose(curve(logs[1]), curve(logs[0]), rtol=1e-4)
    code = "".join(path.read_text() for path in tmp_path.glob("cache/**/*.py"))
    assert all(name in code for name in KERNELS[script])
