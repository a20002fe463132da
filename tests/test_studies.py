"""The studies of results.md as sweep.sh submits them, at a tiny size on the test cluster."""

import re

import numpy as np
from conftest import rows, write_mnist, write_tables
from test_slurm import cluster, site  # noqa: F401  two fixtures

SIX = "vgg11 cnn mlp autoencoder nbow seq2seq".split()
STUDIES = {  # GPUs, and the logs that this gives
    "agnews": ("1", ["small_singlegpu_1_40", "large_singlegpu_1_40"]),
    "imdb": ("1", ["singlegpu_1_40"]),
    "gpt": ("1", ["singlegpu_1_40"]),
    "mnist": ("2/2", ["mnist_hybrid_2of2_40", "bigmnist_hybrid_2of2_40"]),
    "six": ("1", [f"{model}_singlegpu_1_40" for model in SIX]),
}
GPT = ("--d_model", 16, "--n_heads", 2, "--num_layers", 1)


def write_data(folder):
    """Make the folder a --data_dir with a small data set for each name that a study takes."""
    write_mnist(folder)
    write_tables(folder / "ag_news")
    for path in (folder / "ag_news").iterdir():  # its numbers and their names are two languages
        path.write_text(path.read_text().replace("number,name", "de,en", 1))
    for name in ("imdb", "multi30k"):
        (folder / name).symlink_to("ag_news")
    (folder / "bigmnist").mkdir()
    for split, size in (("train", 64), ("test", 16)):
        labels = (np.arange(size) % 10).astype(np.uint8)
        np.save(folder / f"bigmnist/{split}_images.npy", np.zeros((size, 28, 28), np.uint8))
        np.save(folder / f"bigmnist/{split}_labels.npy", labels)


def test_studies(site):  # noqa: F811
    """All runs of each study train, their report is written, and the GPT is quantized."""
    script = site.folder / "slurm/sweep.sh"  # a snapshot of VGG11 has 1.5 GB
    small, count = re.subn("--model vgg11", "--model shufflenet_v2_x0_5", script.read_text())
    assert script.write_text(small) and count == 1

    def sweep(study, *more):
        words = ("--gpus", STUDIES[study][0], "--batch_sizes", 40, "--sbatch", "--cpus-per-task=1")
        words = (*words, "--out", study, *more, "study", study, "--max_steps", 5)
        return site.command("bash", script, *words, *(GPT if study == "gpt" else ()))

    told = sweep("mnist", "--dry_run")
    assert told.index("singlegpu_make_bigmnist.slurm") < told.index("--dependency=afterok:ID")
    write_data(site.folder / "data")
    jobs = {study: re.search(r"job (\d+) writes", sweep(study))[1] for study in STUDIES}
    for study, (_, logs) in STUDIES.items():
        assert site.wait(jobs[study]) == "COMPLETED", study
        paths = sorted((site.folder / study).glob("*.jsonl"))
        assert [path.stem for path in paths] == sorted(logs)
        assert [rows(path)[-1]["step"] for path in paths] == [5] * len(paths)
        assert (site.folder / study / "report.md").exists()
    [quantized] = (site.folder / "gpt").glob("quantize-*.out")
    assert "| int8-torch.ao | eager |" in quantized.read_text()
