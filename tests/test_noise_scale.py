"""noise_scale.py on a model whose noise scale is known, and on the scripts."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT
from test_models import module
from test_training import arguments_of
from torch.utils.data import TensorDataset

DIM, SIGMA, SIZE = 10, 2.0, 4  # of the linear model, its noise, and a micro-batch


def linear_script(divisor):
    """A script of y = w x + noise at w = 0. Its loss is a mean, or a sum divided by a constant."""

    def batch_loss(model, batch, args):
        x, y = batch
        errors = (model(x).squeeze(1) - y) ** 2 / 2
        return (errors.sum() / divisor if divisor else errors.mean()), {}

    return SimpleNamespace(
        batch_loss=batch_loss,
        set_seeds=lambda *numbers: np.random.seed(numbers[:2]),
        training_order=lambda data, args, epoch: np.arange(len(data)),
        DTYPES={"fp32": None},
    )


def test_a_known_noise_scale():
    """At least 19 of 20 seeds have it in their 95% interval; a scaled loss changes nothing.

    A sample's gradient is -x y, where x is normal and y = x w + noise: G = -w, and
    tr(S) = (D + 1) |w|^2 + D sigma^2.
    """
    tool = module("singlegpu/noise_scale.py")
    model = torch.nn.Linear(DIM, 1, bias=False)
    torch.nn.init.zeros_(model.weight)

    def measure(seed, divisor=None):
        script, generator = linear_script(divisor), torch.Generator().manual_seed(seed)
        x = torch.randn(20_000, DIM, generator=generator)
        y = x[:, 0] + SIGMA * torch.randn(20_000, generator=generator)
        data, args = TensorDataset(x, y), SimpleNamespace(seed=seed, precision="fp32")
        requests = tool.random_requests(script, data, args, SIZE)
        batches = (data[indices] for _, indices in requests)
        return tool.noise_scale(*tool.gradient_norms(script, model, batches, args, 100), SIZE)

    expected = DIM + 1 + SIGMA**2 * DIM  # as |w| = 1
    estimates, widths = np.array([measure(seed) for seed in range(20)]).T
    assert (abs(estimates - expected) < widths).sum() >= 19, estimates
    assert estimates.mean() == pytest.approx(expected, rel=0.15)
    assert measure(0, 7.0) == pytest.approx(measure(0), rel=1e-4)


def test_it_takes_scripts_snapshots_and_own_sections(run, data, table_band, paste, tmp_path):
    """It takes a script's flags, a snapshot's settings and weights, and a user's own section."""
    snapshot, out, words = tmp_path / "s.pt", tmp_path / "noise.json", arguments_of("mlp", data)
    tool, few = "singlegpu/noise_scale.py", ("--steps", 20)
    first = run(tool, ROOT / "singlegpu/images.py", *words, *few)
    run("singlegpu/images.py", *words, "--epochs", 1, "--snapshot", snapshot)
    more = ("--snapshot", snapshot, "--data_dir", data, "--out", out, *few)
    later = run(tool, ROOT / "singlegpu/images.py", *more)
    assert "20 batches of 8 x 3 samples" in first and "20 batches of 8 x 3 samples" in later
    assert first != later and json.loads(out.read_text())["noise_scale"]
    split = "parts = random_split(table, [0.8, 0.2])"
    band = table_band.replace(split, f"print('seeds', torch.initial_seed())\n    {split}")
    mine = paste(band)
    words = (mine, "--batch_size", 64, "--epochs", 1, "--seed", 7, "--snapshot", tmp_path / "7.pt")
    trained, told = run(*words), run(tool, mine, *words[1:3], *words[-2:])
    seeds = [re.findall(r"^seeds \d+", out, re.M) for out in (trained, told)]
    assert seeds[0] == seeds[1] != [], "it draws the split of the training"
    assert "twice the batch needs" in told


def test_settings_of_a_snapshot(tmp_path):
    """Switches, numbers and names are those of the training, but for the flags given now."""
    settings = {"frozen": True, "rate": 0.5, "text": "a.txt", "series": "None", "size": 2}
    torch.save({"settings": settings | {"layers": "['q']"}, "model": {}}, tmp_path / "s.pt")
    args = SimpleNamespace(frozen=False, rate=0, text=None, series=None, size=3, layers=["k"])
    module("singlegpu/noise_scale.py").load_weights(tmp_path / "s.pt", args, ["--size", "3"])
    assert vars(args) == settings | {"series": None, "size": 3, "layers": ["k"]}


def test_mistakes_are_told(refused, data, tmp_path):
    torch.save({"settings": {"precision": "fp16"}, "model": {}}, half := tmp_path / "half.pt")
    script, words = ROOT / "singlegpu/images.py", arguments_of("mlp", data)
    for more, message in (
        ((tmp_path / "none.py",), "none.py is no training script"),
        ((ROOT / "report.py",), "report.py is no training script"),
        ((script, *words, "--snapshot", half), "--precision fp16 scales its loss"),
        ((script, *words, "--batch_size", 7), "--batch_size must be 8 or more"),
        ((script, *words, "--steps", 1), "--steps must be at least 20"),
    ):
        refused(message, "singlegpu/noise_scale.py", *more)
