"""The figures of the studies on results.md are those that the studies print.

studies.tsv has the figures and findings of each study, each with the words around it. A page marks
what is a study's own: below a line `<!-- study: NAME -->`, it is a table row or a column with a
cell that begins with "theirs", or a paragraph that begins with "*Theirs:*". What is computed from
their figures is in DERIVED, with its formula.
"""

import csv
import itertools
import os
import re
from pathlib import Path

import pytest
from conftest import ROOT

FILES = {
    "agnews": "agnews_000.txt",
    "imdb": "imdb_001.txt",
    "gpt": "gpt_002.txt",
    "mnist": "mnist_003.txt",
    "six": "six_models_004.txt",
}
NUMBER = re.compile(r"(?<![\w.])(\d+(?:[.,]\d+)*)(?:\s?(%)|([kM])\b)?")

# A number that a page computes from a study's figures: its text, and its formula over their keys.
DERIVED = {
    "gpt": {
        "102%": lambda of: percent(of["batch64_speedup_2_gpus"] / 2),
        "68%": lambda of: percent(of["batch64_speedup_4_gpus"] / 4),
        "111%": lambda of: percent(
            of["batch128_seconds_1_gpu"] / of["batch128_seconds_2_gpus"] / 2
        ),
        "106%": lambda of: percent(of["batch128_speedup_4_gpus"] / 4),
    },
    "six": {
        "1.91": lambda of: faster(of, "vgg11"),
        "1.8": lambda of: faster(of, "nbow", digits=1),
        "1.80": lambda of: faster(of, "nbow"),
        "1.85": lambda of: faster(of, "seq2seq"),
        "2.00": lambda of: faster(of, "cnn"),
        "2.18": lambda of: faster(of, "mlp"),
    },
}


def percent(share):
    return f"{100 * share:.0f}%"


def faster(of, model, digits=2):
    """How many times as fast a model of the study trains on two GPUs as on one."""
    times = of[f"{model}_train_seconds_1_gpu"] / of[f"{model}_train_seconds_2_gpus"]
    return f"{times:.{digits}f}"


def table():
    with open(ROOT / "tests/studies.tsv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def numbers_in(text):
    """The numbers of a text, without the commas of thousands, with %, k or M if it has one."""
    text = re.sub(r"\]\([^)]*\)", "]", text)  # the address of a link
    return [
        digits.replace(",", "") + percent_sign + suffix
        for digits, percent_sign, suffix in NUMBER.findall(text)
    ]


def known_numbers(study):
    """The numbers that a page may call theirs: those of the table, and the derived ones."""
    known = set(DERIVED.get(study, ()))
    for row in table():
        if row["study"] == study:
            known |= set(numbers_in(row["figure"]))
            known |= {number.rstrip("%") for number in numbers_in(row["figure"])}
    return known


def begins_with_theirs(cell):
    return cell.strip(" *_-").lower().startswith("theirs")


def cells_of(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def theirs_of_table(lines):
    """The cells of a table that are theirs: whole rows, and columns by their header."""
    header = cells_of(lines[0])
    columns = [column for column, cell in enumerate(header) if begins_with_theirs(cell)]
    yield from (header[column] for column in columns)
    for line in lines[2:]:
        cells = cells_of(line)
        if any(begins_with_theirs(cell) for cell in cells):
            yield from cells
        else:
            yield from (cells[column] for column in columns if column < len(cells))


def blocks_of(page):
    """Each block of a page with its study: a table, a list item, or a paragraph."""
    study, block = None, []
    for line in [*page.splitlines(), ""]:
        marker = re.fullmatch(r"<!-- study: (\w+) -->", line.strip())
        is_row = line.startswith("|")
        in_table = bool(block) and block[0].startswith("|")
        starts_item = bool(re.match(r"\s*([-*]|\d+\.) ", line))
        if block and (not line.strip() or marker or starts_item or is_row != in_table):
            yield study, block
            block = []
        if marker:
            study = marker[1]
        elif re.match(r"##? ", line):
            study = None
        elif line.strip():
            block.append(line)


def theirs_of(page):
    """(study, text) of all that a page marks as a study's own."""
    for study, block in blocks_of(page):
        if block[0].startswith("|"):
            for text in theirs_of_table(block):
                yield study, text
        elif re.match(r"\s*([-*] )?\*{1,2}Theirs:\*{1,2}", block[0]):
            yield study, " ".join(block)


def unknown_numbers(page):
    """A line for each number that is marked as theirs and that the study does not print."""
    findings = []
    for study, text in theirs_of(page):
        if study not in FILES:
            findings.append(f"no study is named above: {text}")
            continue
        known = known_numbers(study)
        for number in numbers_in(text):
            if number not in known:
                findings.append(f"{study}: {number} is not theirs: {text}")
    return findings


def test_the_table_is_what_the_studies_print():
    if not os.path.isdir(os.environ.get("STUDIES_DIR", "")):
        pytest.skip("STUDIES_DIR does not name a folder with the studies")
    folder = Path(os.environ["STUDIES_DIR"])
    texts = {study: " ".join((folder / name).read_text().split()) for study, name in FILES.items()}
    for row in table():
        assert row["words"] in texts[row["study"]], row
        assert row["figure"] in row["words"], row
        assert len(row["words"].split()) <= 12, row


def test_the_table_is_whole():
    rows = table()
    keys = [(row["study"], row["key"]) for row in rows]
    assert len(keys) == len(set(keys))
    assert {row["study"] for row in rows} == set(FILES)
    for row in rows:
        assert row["words"], row
        assert row["figure"] or re.match("finding_|setting_|formula_", row["key"]), row


def test_derived_numbers_follow_from_the_table():
    for study, formulas in DERIVED.items():
        of = {}
        for row in table():
            if row["study"] == study and (numbers := numbers_in(row["figure"])):
                of[row["key"]] = float(re.sub("[%kM]", "", numbers[0]))
        for text, formula in formulas.items():
            assert formula(of) == text


def test_the_page_names_only_figures_of_the_studies():
    page = (ROOT / "results.md").read_text()
    assert unknown_numbers(page) == []
    assert {study for study, _ in theirs_of(page)} == set(FILES)


# What is no result: versions, names of nodes, and the speedup of one GPU beside itself.
NOT_QUOTED = "setting_python setting_pytorch setting_feedforward setting_warmup_of_plots date "
NOT_QUOTED += "setting_v100_nodes setting_a40_nodes setting_sxm2_node finding_vgg11_ranks "
NOT_QUOTED += "speedup_1_gpu large_speedup_1_gpu"


def left_out(page):
    """The keys of the figures that a page does not have among what is theirs."""
    quoted = {study: set() for study in FILES}
    for study, text in theirs_of(page):
        quoted[study] |= set(numbers_in(text))
    missing = []
    for row in table():
        if not set(numbers_in(row["figure"])) <= quoted[row["study"]]:
            missing.append(row["key"])
    return [key for key in missing if key not in NOT_QUOTED.split()]


def test_the_page_has_all_figures_of_the_studies():
    page = (ROOT / "results.md").read_text()
    assert left_out(page) == []
    for key, figure in (
        ("batch64_seconds_2_gpus", "1095.70"),
        ("mlp_val_accuracy_end_1_gpu", "0.975"),
    ):
        assert figure in page
        assert left_out(page.replace(figure, "much")) == [key]


SIX_TIMES = "| {name} | {train_seconds_1_gpu} | {train_seconds_2_gpus} "
SIX_TIMES += "| {val_seconds_1_gpu} | {val_seconds_2_gpus} |"
SIX_VALUES = "{0}_start_1_gpu", "{0}_end_1_gpu"


def rows_of_the_table():
    """Yields the rows that the page's tables should have, cell by cell, made of studies.tsv."""
    of = {(row["study"], row["key"]): row["figure"] for row in table()}
    for size in "small", "large":
        seconds = [of["agnews", f"{size}_seconds_{gpus}"] for gpus in ("1_gpu", "4_gpus")]
        ends = [of["agnews", f"{size}_{what}_4_gpus"] for what in ("speedup", "efficiency")]
        ratio = of["agnews", f"{size}_ratio"]
        yield f"| {seconds[0]} s | {seconds[1]} s | {ends[0]} | {ends[1]} | about {ratio}, "
    for batch, gpus in itertools.product((64, 128), ("1_gpu", "2_gpus", "4_gpus")):
        names = "seconds", "speedup", "compute_seconds", "comm_seconds"
        cells = [of.get(("gpt", f"batch{batch}_{name}_{gpus}"), "") for name in names]
        cells = "|".join(f" {cell} " if cell else " " for cell in cells)
        yield f"| {batch} | {gpus[0]} |{cells}|"
    for name in "VGG11", "NBoW", "Seq2Seq", "ConvAutoencoder", "CNN", "MLP":
        model = name.lower().replace("conv", "")
        figures = {
            key.removeprefix(f"{model}_"): figure
            for (study, key), figure in of.items()
            if study == "six"
        }
        yield SIX_TIMES.format(name=name, **figures)
        if name != "ConvAutoencoder":
            cells = ""
            for value in "train_accuracy", "val_accuracy", "train_loss", "val_loss":
                ends = [figures.get(key.format(value), "") for key in SIX_VALUES]
                cells += f" {ends[0]} to {ends[1]} |" if ends[0] else " |"
            yield cells


def rows_left_out(page):
    return [row for row in rows_of_the_table() if row not in page]


def test_each_figure_stands_in_its_cell():
    page = (ROOT / "results.md").read_text()
    assert len(list(rows_of_the_table())) == 2 + 6 + 6 + 5
    assert rows_left_out(page) == []
    assert len(rows_left_out(page.replace("| 40 | 20 |", "| 20 | 40 |"))) == 1
    assert len(rows_left_out(page.replace("0.35 to 0.40", "0.3 to 0.4"))) == 1


PAGE = """\
## AG News
<!-- study: agnews -->

| | 1 GPU | 4 GPUs | speedup |
|---|---|---|---|
| ours, small | 5.55 | 7.77 | 0.71 |
| *theirs*, small | 19.53 s | 42.34 s | 0.46× |

| model | ours | theirs, 4 GPUs |
|---|---|---|
| large | 31.4% | 20.0% |

*Theirs:* AG News has 120k samples, and training
takes 20 epochs.

Ours takes 33 epochs.

<!-- study: mnist -->
- *Theirs:* bigMNIST has 72,000,000 samples.
- Ours has 12,345.
"""


def test_a_page_of_their_figures_has_no_finding():
    assert unknown_numbers(PAGE) == []
    theirs = [number for _, text in theirs_of(PAGE) for number in numbers_in(text)]
    assert theirs == ["19.53", "42.34", "0.46", "4", "20.0%", "120k", "20", "72000000"]


@pytest.mark.parametrize(
    "old, new, study, number",
    [
        ("19.53 s", "19.63 s", "agnews", "19.63"),
        ("0.46×", "0.47×", "agnews", "0.47"),
        ("20.0%", "20.1%", "agnews", "20.1%"),
        ("takes 20 epochs", "takes 21 epochs", "agnews", "21"),
        ("120k", "130k", "agnews", "130k"),
        ("72,000,000", "73,000,000", "mnist", "73000000"),
    ],
)
def test_a_changed_digit_is_named(old, new, study, number):
    assert PAGE.count(old) == 1
    (finding,) = unknown_numbers(PAGE.replace(old, new))
    assert finding.startswith(f"{study}: {number} is not theirs")


def test_a_changed_digit_of_results_is_named():
    """In a copy of results.md, each number that is theirs is changed in its text."""
    page = (ROOT / "results.md").read_text()
    for study, text in theirs_of(page):
        for number in NUMBER.finditer(text):
            changed = f"98765{number[1]}"
            copy = f"<!-- study: {study} -->\n\n*Theirs:* {text[: number.start(1)]}{changed}"
            assert any("98765" in finding for finding in unknown_numbers(copy))


def test_theirs_without_a_study_is_named():
    (finding,) = unknown_numbers("## Speed\n\n*Theirs:* 19.53 s\n")
    assert finding.startswith("no study is named above")
