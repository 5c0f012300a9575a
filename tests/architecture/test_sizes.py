"""Sizes: no file, function or class of the package grows beyond what is read in one sitting."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.test_layering import modules
from trainkit.trainer import Trainer

LONGEST_FILE = 400
LONGEST_BODY = 70  # lines of a function below its docstring
MOST_LINES = 25_000  # of code, in the core: what stands beside extensions/
MOST_NODES = 8.5  # of syntax, a line of code, over the whole package
MOST_NODES_OF_A_FILE = 15.0  # of more than 60 lines of code
MOST_MEMBERS = 35  # methods, properties and attributes of a class of its own
LONGEST_CHAIN = 3  # classes of ours, from a class to its oldest ancestor of ours
# Interfaces with one method for each hook of Lightning's: they hold no state.
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
INTERFACES = {"api.callback.Callback"}


def trees() -> Iterator[tuple[str, ast.Module]]:
    """Yield each module with its syntax tree."""
    for name, path in modules().items():
        yield name, ast.parse(path.read_text())


def classes() -> dict[str, ast.ClassDef]:
    """Return all classes by dotted name."""
    by_name = {}
    for module, tree in trees():
        by_name |= {
            f"{module}.{node.name}": node
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
        }
    return by_name


def members(node: ast.ClassDef) -> set[str]:
    """Return the names of a class's own methods, properties and attributes,
    but for Python's own (`__init__`, ...).
    """
    names: set[str] = set()
    for item in node.body:
        if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(item.name)
            for inner in ast.walk(item):
                if (
                    isinstance(inner, ast.Attribute)
                    and isinstance(inner.ctx, ast.Store)
                    and ast.unparse(inner.value) == "self"
                ):
                    names.add(inner.attr)
        elif isinstance(item, ast.AnnAssign):
            names.add(ast.unparse(item.target))
        elif isinstance(item, ast.Assign):
            names |= {ast.unparse(target) for target in item.targets}
    # of the constructor: `checked` reads them
    names -= {"config_key", "explained_arguments", "taken_arguments"}
    return {name for name in names if not (name.startswith("__") and name.endswith("__"))}


def chain(name: str, by_short_name: dict[str, ast.ClassDef]) -> int:
    """Return how many classes of ours are in the longest line of ancestors,
    the class itself included.
    """
    node = by_short_name.get(name)
    if node is None or name in {interface.rpartition(".")[2] for interface in INTERFACES}:
        return 0  # an interface without code of its own sends no reader up
    bases = [ast.unparse(base).split("[")[0].rpartition(".")[2] for base in node.bases]
    return 1 + max((chain(base, by_short_name) for base in bases if base != name), default=0)


def test_members_are_counted() -> None:
    """The count sees methods, attributes set in methods, and annotated ones."""
    node = ast.parse(
        "class A:\n a: int\n b = 1\n def __init__(self):\n  self.c, self.d = 1, 2\n def"
        " e(self): ..."
    ).body[0]
    assert isinstance(node, ast.ClassDef)
    assert members(node) == {"a", "b", "c", "d", "e"}


def test_no_class_has_too_many_members() -> None:
    """A class of more members holds a second object."""
    counted = {
        name: len(members(node)) for name, node in classes().items() if name not in INTERFACES
    }
    assert len(counted) > 150
    assert {name: count for name, count in counted.items() if count > MOST_MEMBERS} == {}


def test_no_chain_of_inheritance_is_too_long() -> None:
    """Parts are owned, not inherited:
    a reader never climbs through more than three classes of ours.
    """
    by_short_name = {name.rpartition(".")[2]: node for name, node in classes().items()}
    lengths = {name: chain(name, by_short_name) for name in by_short_name}
    assert lengths["HorovodEngine"] >= 2
    assert {name: length for name, length in lengths.items() if length > LONGEST_CHAIN} == {}


def body_length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function below its signature and its docstring."""
    first = function.body[min(1, len(function.body) - 1)]
    start = first.lineno if ast.get_docstring(function) else function.body[0].lineno
    return (function.end_lineno or start) - start + 1


def test_no_function_is_too_long() -> None:
    """A function is read without scrolling."""
    lengths = {
        f"{module}.{node.name}": body_length(node)
        for module, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert len(lengths) > 3000
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_BODY} == {}


def test_no_file_is_too_long() -> None:
    """A longer file holds a second idea."""
    lengths = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    # Its docstring is the reference of all settings.
    lengths["trainer"] -= len((Trainer.__doc__ or "").splitlines())
    assert {name: length for name, length in lengths.items() if length > LONGEST_FILE} == {}


def code_lines(text: str, tree: ast.Module) -> int:
    """Return the number of lines that are neither blank, nor comments, nor a docstring's."""
    documentation: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            documentation |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return sum(
        number not in documentation and line.strip() != "" and not line.strip().startswith("#")
        for number, line in enumerate(text.split("\n"), 1)
    )


def test_no_file_is_too_dense() -> None:
    """A line holds one thought: syntax nodes a line, of the package and of each file."""
    nodes, lines = {}, {}
    for name, path in modules().items():
        text = path.read_text()
        tree = ast.parse(text)
        nodes[name], lines[name] = sum(1 for _ in ast.walk(tree)), code_lines(text, tree)
    assert sum(nodes.values()) / sum(lines.values()) <= MOST_NODES
    dense = {name: round(nodes[name] / lines[name], 1) for name in nodes if lines[name] > 60}
    assert {name: n for name, n in dense.items() if n > MOST_NODES_OF_A_FILE} == {}


def test_lines_of_code_are_counted() -> None:
    """Blank lines, comments and docstrings are not code; a string in the middle is."""
    text = '"""Doc\nof two."""\n\n# c\ndef f():\n    """Doc."""\n    return """a\nb"""\n'
    assert code_lines(text, ast.parse(text)) == 3


def test_the_core_is_small() -> None:
    """What one reader can know; a feature that would not fit is an extension."""
    texts = [path.read_text() for name, path in modules().items() if "extensions" not in name]
    assert sum(code_lines(text, ast.parse(text)) for text in texts) <= MOST_LINES


@pytest.mark.parametrize(("module", "most"), [("loop", 240), ("run.build", 300)])
def test_what_is_read_first_is_short(module: str, most: int) -> None:
    """Training, and the building of a run, are each read in one place."""
    assert len(modules()[module].read_text().splitlines()) <= most


def test_the_top_of_the_package_fits_a_screen() -> None:
    """The core has at most 27 rooms at the top, files and packages;
    what a user asks for by name is in extensions/.
    """
    assert len({name.split(".")[0] for name in modules() if name} - {"extensions"}) <= 27
