"""The studies of results.md as sweep.sh submits them, at a tiny size on the test cluster."""

import re

import numpy as np
from conftest import rows, write_mnist, write_tables
from test_slurm import cluster, site  # noqa: F401  two fixtures

GPT = ["--d_model", 16, "--n_heads", 2, "--num_layers", 1, "--seq_len", 16]
STUDIES = {  # GPUs, what else makes a study small, and its logs: what it trains, on how many
    "agnews": ("2", [], {"small_multigpu_2_8": 2, "large_multigpu_2_8": 2}),
    "imdb": ("1 2", ["--seq_len", 16], {"singlegpu_1_8": 1, "multigpu_2_8": 2}),
    "gpt": ("1", GPT, {"singlegpu_1_8": 1}),
    "mnist": ("2x1", [], {"mnist_multinode_2x1_8": 2, "bigmnist_multinode_2x1_8": 2}),
    "six": (
        "1 2/2",
        [],
        {
            f"{model}_{run}_8": 1
            for run in ("singlegpu_1", "hybrid_2of2")
            for model in ("vgg11", "cnn", "mlp", "autoencoder", "nbow", "seq2seq")
            if "singlegpu" in run or model in ("vgg11", "cnn", "mlp")
        },
    ),
}


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
    """All runs of each study train, and their report is written."""
    words = ("--batch_sizes", 8, "--sbatch", "--cpus-per-task=1")

    def sweep(study, *more):
        gpus, small, _ = STUDIES[study]
        told = ("--gpus", gpus, *words, "--out", study, *more, "study", study)
        return site.command("bash", "slurm/sweep.sh", *told, *small, "--max_steps", 5)

    out = sweep("mnist", "--dry_run")
    assert out.index("make_bigmnist.slurm") < out.index("--dependency=afterok:ID")
    write_data(site.folder / "data")
    jobs = {study: re.search(r"job (\d+) writes", sweep(study))[1] for study in STUDIES}
    for study, (_, _, logs) in STUDIES.items():
        assert site.wait(jobs[study]) == "COMPLETED", study
        for log, processes in logs.items():
            logged = rows(site.folder / f"{study}/{log}.jsonl")
            assert {row["processes"] for row in logged} == {processes}, log
            assert logged[-1]["step"] == 5, log
        assert len(list((site.folder / study).glob("*.jsonl"))) == len(logs)
        assert (site.folder / study / "report.md").exists()
    [quantized] = (site.folder / "gpt").glob("quantize-*.out")
    assert "| int8-torch.ao | eager |" in quantized.read_text()
