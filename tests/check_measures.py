"""Measure how plain the scripts, the tools and the pages are, and say what is beyond a limit.

    python tests/check_measures.py          # status 1 if something is beyond its limit
    python tests/check_measures.py --all    # every figure, beside its limit

The limits have slack: nobody is asked to press against them. Where a measure and a reader disagree,
the reader is right, and the limit is changed. Each version of Python finds the same figures.
"""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

# The lines that a script may have. A tool has no limit of lines.
LINES = """
    singlegpu: mnist 105, images 610, gpt 580, text 615, translation 700, make_bigmnist 150
    multigpu: mnist 148, images 800, gpt 775, text 805, translation 900
    multinode: mnist 155, images 800, gpt 775, text 805, translation 900
    hybrid: mnist 180, images 920, gpt_fsdp 880, gpt_pipeline 980
    hybrid: mnist_tensor 195, gpt_tensor 985
    quantize: mnist 95, gpt 320
"""
MEAN_TOKENS = 11.5  # tokens a code line, the mean of a file
LONG_LINE = 25  # tokens, and the share of code lines that may have as many, in percent
LONG_LINES = 8.0
# Of main(), and the most of its lines that follow each other without a line that is a comment.
MAIN = {"lines": 115, "branches": 32, "names": 45, "lines without a heading": 40}
MAIN_OF_HYBRID = MAIN | {"lines": 130, "branches": 38, "names": 50}
FUNCTION = {"lines": 40, "branches": 15}
DRAWING = {"lines": 50, "branches": 8}  # a longer function may have few branches
README = {"words": 1500, "lines": 160}
PROSE = {"words a paragraph": 28, "commas per 100 words": 7, "colons per 100 words": 2}
RECORDS = ("results.md", "tests/README.md")  # a paragraph may have 35 words
JOB_FILE = {"lines": 26, "columns": 100}

# What is beyond its limit today. It may not grow, and its row goes when it is within.
UNTIL_MENDED = """
"""


class Measure(NamedTuple):
    path: str
    name: str
    value: float
    limit: float

    def __str__(self):
        return f"{self.path}: {self.name} {self.value:.4g}, and at most {self.limit:g}"


def read_files(root=ROOT):
    """Returns {path: text} of the files that are measured. Tests and examples are not."""
    folders = "singlegpu multigpu multinode hybrid quantize tools tools/*".split()
    patterns = [f"{folder}/*.py" for folder in folders]
    patterns += ["slurm/*.slurm", "*.md", "*/README.md"]
    paths = sorted({path for pattern in patterns for path in root.glob(pattern)})
    paths = [path for path in paths if path.parent.name[0] != "."]
    return {str(path.relative_to(root)): path.read_text() for path in paths}


def tokens_of_lines(source):
    """Returns the number of tokens of each code line. A string is one, and so is an f-string.

    From Python 3.12 on, tokenize gives the parts of an f-string, from 3.14 on of a t-string, too.
    """
    names = ["COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER", "ENCODING"]
    skipped = {getattr(tokenize, name) for name in names}
    starts = {getattr(tokenize, name, None) for name in ("FSTRING_START", "TSTRING_START")}
    ends = {getattr(tokenize, name, None) for name in ("FSTRING_END", "TSTRING_END")}
    counts, depth = {}, 0  # depth: of the f-strings in which a token is
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in ends:
            depth -= 1
            continue
        is_counted = depth == 0 and token.type not in skipped
        depth += token.type in starts
        if is_counted:
            counts[token.start[0]] = counts.get(token.start[0], 0) + 1
    return list(counts.values())


def branches_of(node):
    """Counts If, For, While, Try, IfExp and comprehensions; of and/or each operand but the first.

    A match statement counts one for each case.
    """
    kinds = (ast.If, ast.For, ast.While, ast.Try, ast.IfExp, ast.comprehension, ast.match_case)
    count = 0
    for part in ast.walk(node):
        count += isinstance(part, kinds)
        if isinstance(part, ast.BoolOp):
            count += len(part.values) - 1
    return count


def names_of(function):
    """Returns the names that a function gives, without targets of comprehensions."""
    targets = set()
    for part in ast.walk(function):
        if isinstance(part, ast.comprehension):
            targets |= {id(name) for name in ast.walk(part.target)}
    names = set()
    for part in ast.walk(function):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            names |= set() if id(part) in targets else {part.id}
    return names


def measures_of_main(path, function, lines):
    limits = MAIN_OF_HYBRID if path.startswith("hybrid/") else MAIN
    longest = since = 0  # lines since the last comment
    for line in lines:
        since = 0 if line.lstrip().startswith("#") else since + 1
        longest = max(longest, since)
    values = {
        "lines": len(lines),
        "branches": branches_of(function),
        "names": len(names_of(function)),
        "lines without a heading": longest,
    }
    for name, value in values.items():
        yield Measure(path, f"main(): {name}", value, limits[name])


def measures_of_function(path, name, node):
    """Of a function, or of the block at the end of a file."""
    lines, branches = node.end_lineno - node.lineno + 1, branches_of(node)
    limits = DRAWING if branches <= DRAWING["branches"] else FUNCTION
    yield Measure(path, f"{name}: lines", lines, limits["lines"])
    yield Measure(path, f"{name}: branches", branches, FUNCTION["branches"])


def measures_of_code(path, source):
    counts, tree = tokens_of_lines(source), ast.parse(source)
    yield Measure(path, "tokens a code line", sum(counts) / len(counts), MEAN_TOKENS)
    long = sum(count >= LONG_LINE for count in counts)
    share = 100 * long / len(counts)
    yield Measure(path, f"percent of lines with {LONG_LINE} tokens", share, LONG_LINES)
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if node.name == "main":
            lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
            yield from measures_of_main(path, node, lines)
        else:
            yield from measures_of_function(path, f"{node.name}()", node)
    last = tree.body[-1]
    if isinstance(last, ast.If):
        yield from measures_of_function(path, "the block at the end", last)
    walruses = side_effects = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            arguments = [*node.args, *[keyword.value for keyword in node.keywords]]
            walruses += sum(isinstance(argument, ast.NamedExpr) for argument in arguments)
        if isinstance(node, ast.Expr):
            side_effects += isinstance(node.value, (ast.ListComp, ast.SetComp, ast.DictComp))
    yield Measure(path, "walrus in a call", walruses, 0)
    yield Measure(path, "comprehension for its side effects", side_effects, 0)


def measures_of_page(path, text):
    """Of the prose of a page, without its tables, code, titles and pictures."""
    if path == "README.md":
        yield Measure(path, "words", len(text.split()), README["words"])
        yield Measure(path, "lines", text.count("\n"), README["lines"])
    text = re.sub(r"```.*?```", "\n\n", text, flags=re.S)
    text = re.sub(r"^#.*", "\n", text, flags=re.M)  # titles: the text below may follow at once
    blocks = re.split(r"\n\s*\n|\n(?=[-*] |\d+\. )", text)
    blocks = [block.strip() for block in blocks if block.strip()]
    blocks = [block for block in blocks if not re.match(r"\||#|<|!\[", block)]
    if not blocks:
        return
    # Of a link its text counts, and code between backticks is a word.
    words = sum(len(re.sub(r"\]\([^)]*\)|`[^`]*`", " w ", block).split()) for block in blocks)
    plain = re.sub(r"\]\([^)]*\)|`[^`]*`", " ", " ".join(blocks))
    values = {
        "words a paragraph": words / len(blocks),
        "commas per 100 words": 100 * plain.count(",") / words,
        "colons per 100 words": 100 * (plain.count(":") + plain.count(";")) / words,
    }
    limits = PROSE | ({"words a paragraph": 35} if path in RECORDS else {})
    for name, value in values.items():
        yield Measure(path, name, value, limits[name])


def limit_of_lines():
    """Returns {path: lines} of the table."""
    limits = {}
    for row in LINES.strip().splitlines():
        folder, files = row.strip().split(": ")
        for file in files.split(", "):
            name, lines = file.split()
            limits[f"{folder}/{name}.py"] = int(lines)
    return limits


def measures_of(files):
    """Yields each Measure of the files."""
    limits = limit_of_lines()
    for path, text in files.items():
        if path.endswith(".md"):
            yield from measures_of_page(path, text)
        elif path.endswith(".slurm"):
            columns = max(map(len, text.splitlines()))
            yield Measure(path, "lines", text.count("\n"), JOB_FILE["lines"])
            yield Measure(path, "columns", columns, JOB_FILE["columns"])
        else:
            if not path.startswith("tools/"):
                yield Measure(path, "lines", text.count("\n"), limits.get(path, 0))
            yield from measures_of_code(path, text)


def excuses():
    """Yields (pattern of paths, name, value) of what may be beyond its limit for now."""
    for row in UNTIL_MENDED.strip().splitlines():
        pattern, measures = row.strip().split(": ", 1)
        for measure in measures.split(", "):
            name, value = measure.rsplit(maxsplit=1)
            yield pattern, name, float(value)


def problems_of(files):
    """Returns what is beyond its limit, and which excuse is no longer needed, as texts."""
    beyond = [measure for measure in measures_of(files) if measure.value > measure.limit]
    problems, used = [], set()
    for measure in beyond:
        for excuse in excuses():
            pattern, name, value = excuse
            is_of_it = name == measure.name and re.fullmatch(pattern, measure.path)
            if is_of_it and measure.value <= value + 0.05:
                used.add(excuse)
                break
        else:
            problems.append(str(measure))
    for pattern, name, value in excuses():
        if (pattern, name, value) not in used:
            problems.append(f"{pattern} is within the limit of {name}: take out its row, {value:g}")
    missing = limit_of_lines().keys() - files.keys()
    return problems + [f"{path} has a limit of lines, and is not here" for path in sorted(missing)]


def main():
    files = read_files()
    if "--all" in sys.argv:
        print(*measures_of(files), sep="\n")
    sys.exit("\n".join(problems_of(files)) or 0)


if __name__ == "__main__":
    main()
