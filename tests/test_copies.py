"""check_copies.py and check_measures.py are seen to fail: each edit of a copy is found, or carried.

The edits are chosen by the syntax tree, so that they fit any text of the scripts.
"""

import ast
import re
import subprocess
import sys

import check_copies
import check_measures
import pytest
from conftest import ROOT

FILES = check_copies.read_files()
TRAINING = [path for path in FILES if check_copies.is_training(path)]
SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.Return, ast.Delete, ast.Raise)


def with_lines(source, node, text):
    """The source with the text in place of the lines of a node, and as many empty ones."""
    lines = source.splitlines(keepends=True)
    empty = ["\n"] * (node.end_lineno - node.lineno)  # so that other nodes keep their lines
    lines[node.lineno - 1 : node.end_lineno] = [f"{' ' * node.col_offset}{text}\n", *empty]
    return "".join(lines)


def statements_of(node):
    """The simple statements in a node, without docstrings."""
    found = []
    for part in ast.walk(node):
        is_docstring = isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)
        if isinstance(part, SIMPLE) and not is_docstring:
            found.append(part)
    return sorted(found, key=lambda part: part.lineno)


def edits_of(source):
    """Returns {name: an edit}. An edit is a node, and the text in its place.

    Of each function or class, a statement in the middle becomes `pass`; of a block at the top or
    the end, the last one. A constant becomes None. A flag gets another default.
    """
    tree, edits = ast.parse(source), {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            name = ast.unparse(node.targets[0])
            edits[name] = node, f"{name} = None"
        elif isinstance(node, ast.If):
            is_top = node.lineno < len(source.splitlines()) // 4
            name = f"if {ast.unparse(node.test)}, at the top" if is_top else "the start"
            edits[name] = statements_of(node)[-1], "pass"
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            statements = statements_of(node) or node.body  # finish() has a docstring alone
            edits[node.name] = statements[len(statements) // 2], "pass"
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and ast.unparse(node).startswith("add('--"):
            default = [part for part in node.value.keywords if part.arg == "default"]
            if default:
                default[0].value = ast.Constant("another")
                edits[node.value.args[0].value] = node, ast.unparse(node)
    return edits


def told_of(path, source):
    """The names of what is told of a script where it has this text."""
    files = FILES | {path: source}
    told = [problem.splitlines()[0] for problem in check_copies.copy_problems(files)]
    names = {line.partition(" differs in ")[0] for line in told if path in line}
    told = [problem.splitlines()[0] for problem in check_copies.record_problems(files)]
    return names | {line.partition(": ")[0] for line in told if path in line}


@pytest.mark.parametrize("path", TRAINING)
def test_an_edit_of_one_copy_is_found(path):
    """Of each function, constant and flag, and of each third statement of main()."""
    groups = check_copies.groups_of(FILES)
    expected = {name for (_, name), texts in groups.items() if path in texts and len(texts) > 1}
    titles = [title for title in check_copies.differences_of(FILES) if path in title]
    expected |= {title.removeprefix("== ").partition(": ")[0] for title in titles}
    source = FILES[path]
    edits = edits_of(source)
    for node, text in edits.values():
        source = with_lines(source, node, text)
    with_defaults = {name for name in expected if name[:2] != "--" or name in edits}
    assert with_defaults <= told_of(path, source) and len(expected) > 30
    assert {"yours", "the start"} <= expected and {"the run", "main"} & expected
    [main] = [node for node in ast.parse(FILES[path]).body if getattr(node, "name", "") == "main"]
    for part in statements_of(main)[::3]:
        told = told_of(path, with_lines(FILES[path], part, "pass"))
        assert {"the run", "main"} & told, ast.unparse(part)


def with_edit(path, name):
    return with_lines(FILES[path], *edits_of(FILES[path])[name])


@pytest.mark.parametrize("name", ["ON_GPU", "marks", "mark"])
def test_timing_has_the_marks_of_mnist(name):
    """An edit of one is found, and --fix carries an edit of singlegpu/mnist.py to timing.py."""
    timing, mnist = "tools/timing.py", "singlegpu/mnist.py"
    assert name in told_of(timing, with_edit(timing, name))
    fixed = check_copies.fixed(FILES | {mnist: with_edit(mnist, name)}, FILES)
    changed = {each for each in fixed if fixed[each] != FILES[each]}
    assert {timing, mnist, "multigpu/mnist.py"} <= changed


CARRIED = {  # a name, and the folders whose scripts have its text
    "create_model": check_copies.FOLDERS[:4],
    "main": ["multinode"],
    "--seed": check_copies.FOLDERS[:4],
    "now": check_copies.FOLDERS[:4],
    "the start": ["multinode"],
}


@pytest.mark.parametrize("name", CARRIED)
def test_an_edit_is_carried_to_its_copies(name):
    """By --fix. Not if two copies have two new texts: both are left as they are."""
    path = "multinode/gpt.py"
    source = with_edit(path, name)
    fixed = check_copies.fixed(FILES | {path: source}, FILES)
    changed = [each for each in fixed if fixed[each] != FILES[each]]
    assert {each.split("/")[0] for each in changed} == {*CARRIED[name]} and len(changed) >= 3
    assert not [*check_copies.copy_problems(fixed)]
    for each in changed:
        old, new = FILES[each].splitlines(), fixed[each].splitlines()
        assert len(old) == len(new) and 1 <= sum(x != y for x, y in zip(old, new)) < 10, each
    other = next(each for each in changed if each != path)
    node, text = edits_of(FILES[other])[name]
    two = FILES | {path: source, other: with_lines(FILES[other], node, f"{text}  # another")}
    left = check_copies.fixed(two, FILES)
    assert (left[path], left[other]) == (two[path], two[other])
    assert [*check_copies.copy_problems(left)]


def test_a_second_edit_is_carried_too():
    """In a folder to which an edit of another folder was carried, before it had its own."""
    other = "multigpu/gpt.py"
    edited = FILES | {other: with_edit(other, "means")}
    carried = check_copies.fixed(edited, FILES)
    own = "multinode/gpt.py"
    node, text = edits_of(carried[own])["main"]
    twice = carried | {own: with_lines(carried[own], node, text)}
    fixed = check_copies.fixed(twice, FILES)
    folder = [path for path in FILES if re.match(r"multinode/(images|text|translation|gpt)", path)]
    assert all(fixed[path] != carried[path] for path in folder) and len(folder) == 4
    assert not [*check_copies.copy_problems(fixed)]


def without(text, pattern):
    """The text without what the pattern matches, which must be there once."""
    found, count = re.subn(pattern, "", text, flags=re.M | re.S)
    assert count == 1, pattern
    return found


TEXT, JOB = "multigpu/text.py", "slurm/multinode_gpt.slurm"
START = check_copies.START
BROKEN = {  # what is said, and the change of a file that it must find; None: the file is not there
    "multigpu/text.py has no section: the run": (
        TEXT,
        lambda text: text.replace("# == The run", "# = The run"),
    ),
    "has no section: the start": (TEXT, lambda text: text.replace(START, "if True:")),
    "15 training scripts are here": (TEXT, None),
    "yours is compared in": ("hybrid/images.py", lambda text: text),
    "has now of hybrid/images.py, where it is not": (
        "hybrid/images.py",
        lambda text: text.replace("def now(", "def other("),
    ),
    "has print_marks of hybrid/mnist.py, which has no copy that differs": (
        "hybrid/mnist.py",
        lambda text: re.sub(
            r"^def print_marks.*?(?=^\S)",
            check_copies.names_of(FILES["multinode/mnist.py"])["print_marks"] + "\n\n",
            text,
            flags=re.M | re.S,
        ),
    ),
    "main: multigpu/images.py -> multinode/images.py differ in another way": (
        check_copies.RECORD,
        lambda text: without(text, r"^== main: multigpu/images.py.*?(?=^==)"),
    ),
    "differs in more than a name": (JOB, lambda text: text.replace("status=", "\nstatus=", 1)),
    "has no job file": (JOB, None),
}


@pytest.mark.parametrize("told", BROKEN)
def test_each_problem_of_copies_is_told(told):
    path, change = BROKEN[told]
    files = dict(FILES)
    if change is None:
        del files[path]
    else:
        files[path] = change(files[path])
    if told.startswith("yours is compared"):  # with none of the other folders
        files = {each: files[each] for each in files if each.split("/")[0] in ("hybrid", "slurm")}
        found = [*check_copies.section_problems(files)]
    else:
        assert files != FILES
        found = check_copies.problems_of(files)
    assert any(told in problem for problem in found), found


def test_nothing_is_said_of_what_is_here():
    assert check_copies.problems_of(FILES) == []
    assert check_measures.problems_of(check_measures.read_files()) == []


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the repository")
def test_the_command(tmp_path):
    """Status 1 and a diff; --fix writes what it carries; --record accepts what is left."""
    subprocess.run(["git", "clone", "-q", ROOT, tmp_path], check=True)
    for name in "check_copies.py", "folders.diff":  # as they are here, committed or not
        (tmp_path / "tests" / name).write_text((ROOT / "tests" / name).read_text())
    for path in FILES:
        (tmp_path / path).write_text(FILES[path])
    path = tmp_path / "multigpu/text.py"
    path.write_text(with_edit("multigpu/text.py", "main"))

    def command(*flags):
        words = [sys.executable, tmp_path / "tests/check_copies.py", *flags]
        done = subprocess.run(words, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    status, out, err = command()
    assert status == 1 and "the run differs in multigpu/text.py" in err
    assert re.search("^[+] +pass$", err, re.M)
    assert out == ""
    status, out, err = command("--fix")
    assert status == 1 and out.count("wrote multigpu/") == 3, "of the other folders it is told"
    assert "main: singlegpu/images.py -> multigpu/images.py differ" in err
    assert command("--record")[0] == 0 == command()[0]


LONG = "x = f(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)\n"  # 27 tokens
FUNCTION = "def long():\n" + "    x = 1\n" * 40
BRANCHY = "def branchy():\n" + "    x = 1 if y else 2\n" * 16
PAGE = "singlegpu/README.md"
MEASURED = {  # a part of what is told: file, and what is put at its end
    "multigpu/mnist.py: lines": ("multigpu/mnist.py", "\n" * 60),
    "multigpu/mnist.py: tokens a code line": ("multigpu/mnist.py", LONG * 60),
    "multigpu/mnist.py: percent of lines with 25": ("multigpu/mnist.py", LONG * 20),
    "multigpu/mnist.py: long(): lines 50": ("multigpu/mnist.py", FUNCTION + "    y = a or b\n" * 9),
    "multigpu/mnist.py: branchy(): branches 16": ("multigpu/mnist.py", BRANCHY),
    "multigpu/mnist.py: walrus in a call 1": ("multigpu/mnist.py", "print(x := 1)\n"),
    "comprehension for its side effects 1": ("multigpu/mnist.py", "[print(x) for x in y]\n"),
    "the block at the end: lines 52": ("multigpu/mnist.py", "if True:\n" + "    x = 1\n" * 51),
    "main(): lines 116": (
        "tools/new.py",
        "def main():\n" + "    #\n    x = 1\n" * 57 + "    y = 1\n",
    ),
    "main(): branches 33": ("tools/new.py", "def main():\n" + "    x = a or b\n" * 33),
    "main(): names 46": (
        "tools/new.py",
        "def main():\n" + "".join(f"    x{n} = 1\n" for n in range(46)),
    ),
    "main(): lines without a heading 41": ("tools/new.py", "def main():\n" + "    x = 1\n" * 40),
    "README.md: lines": ("README.md", "\n" * 200),
    "README.md: words": ("README.md", "word " * 2000),
    f"{PAGE}: words a paragraph": (PAGE, "word " * 99),
    f"{PAGE}: commas per 100 words": (PAGE, "word, " * 10),
    f"{PAGE}: colons per 100 words": (PAGE, "word; " * 10),
    "multigpu/mnist.slurm: lines": ("multigpu/mnist.slurm", "echo\n" * 27),
    "multigpu/mnist.slurm: columns": ("multigpu/mnist.slurm", "e" * 101),
    "hybrid/new.py: lines 1, and at most 0": ("hybrid/new.py", "x = 1\n"),
}


@pytest.mark.parametrize("told", MEASURED)
def test_each_limit_is_told(told):
    path, more = MEASURED[told]
    text = (ROOT / path).read_text() if (ROOT / path).exists() else ""
    before = check_measures.problems_of({path: text}) if text else []
    new = {*check_measures.problems_of({path: text + more})} - {*before}
    assert any(told in problem for problem in new), new


def test_an_excuse_that_is_not_needed_is_told(monkeypatch):
    files = check_measures.read_files()
    monkeypatch.setattr(check_measures, "UNTIL_MENDED", "README.md: words 2000")
    told = check_measures.problems_of(files)
    assert "README.md is within the limit of words: take out its row, 2000" in told
    long = files | {"README.md": files["README.md"] + "word " * 200}
    told = "\n".join(check_measures.problems_of(long))
    assert "README.md: words 1" not in told, "it is excused"
    del files["multigpu/mnist.py"]
    assert "multigpu/mnist.py has a limit of lines, and is not here" in check_measures.problems_of(
        files
    )


def test_tokens_are_the_same_on_each_python():
    """An f-string is one, with all that is in it; so is a string of several lines."""
    source = 'x = f"{a + f(b, c):.3f} and {d!r}"\ny = f"{g(f"{1}")}" if z else """\n\n"""\n'
    if sys.version_info < (3, 12):
        source = source.replace('f(f"{1}")', "g('1')").replace('g(f"{1}")', "g('1')")
    assert check_measures.tokens_of_lines(source) == [3, 7]
