"""Words: the prose of the package is that of the field, so that a newcomer need not decode it."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.test_layering import ROOT
from tests.architecture.test_sizes import classes

# A word of our former dialect -> how the field says it.
INSTEAD = {
    r"anew": "again",
    r"nobody|somebody|everybody": "no rank, a worker, all ranks",
    r"gone on with|goes on|go on|went on": "resumed, continues",
    r"told|tells": "reported, prints",
    r"wish|wishes": "requested",
    r"lies": "is stored",
    r"roster": "state machine",
    r"crew": "workers",
    r"warden": "reaper",
    r"whereabouts": "heartbeat",
    r"for ever": "forever",
    # in quotes it is a key of old recordings
    r"deals?|dealing|(?<!\")dealt(?!\")": "split, shares",
}
# Of names alone.
INSTEAD_IN_NAMES = {
    r"foreign": "of others, untrusted",
    r"foretold|foretells?": "predicted",
    r"misfits?": "mismatch",
    r"seats?|seated": "slot",
}
# Names that say how a value was had, not what it is.
EMPTY_NAMES = {"found", "kept", "mend"}
PLACES = [
    *sorted(ROOT.rglob("*.py")),
    *(ROOT.parent / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT.parent / "docs").rglob("*.md")),
    ROOT / "cli" / "explained" / "errors.md",
]
# Held to the same words, too: what else users and we read.
OTHERS = [
    path
    for folder in ("benchmarks", "recipes", "tests")
    for path in sorted((ROOT.parent / folder).rglob("*.py"))
    if path != Path(__file__)
]


@functools.cache
def prose(path: Path) -> list[tuple[int, str]]:
    """Return the lines of a file's prose: of Markdown all, of Python its comments and strings."""
    return list(_prose(path))


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    text = path.read_text()
    if path.suffix == ".md":
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if (
            token.type in (tokenize.COMMENT, tokenize.STRING)
            or tokenize.tok_name[token.type] == "FSTRING_MIDDLE"
        ):
            yield from enumerate(token.string.splitlines(), token.start[0])


def found_in(path: Path, word: str) -> list[str]:
    """Return where a word stands in a file's prose."""
    pattern = re.compile(rf"\b(?:{word})\b", re.IGNORECASE)
    return [
        f"{path.name}:{number}: {line.strip()[:80]}"
        for number, line in prose(path)
        if pattern.search(line)
    ]


def test_prose_is_read(tmp_path: Path) -> None:
    """Comments, docstrings and messages are looked at, names are not."""
    file = tmp_path / "a.py"
    file.write_text('"""Begin anew."""\nanew = 1  # anew\nprint("anew", f"{anew} anew")\n')
    ast.parse(file.read_text())
    assert [entry.split(":")[1] for entry in found_in(file, "anew")] == ["1", "2", "3", "3"]


@pytest.mark.parametrize("word", INSTEAD)
def test_the_package_speaks_plainly(word: str) -> None:
    """A word of the former dialect is not used again."""
    assert len(PLACES) > 200 and len(OTHERS) > 500
    assert [entry for path in [*PLACES, *OTHERS] for entry in found_in(path, word)] == [], (
        f"say: {INSTEAD[word]}"
    )


def in_words(name: str) -> str:
    """Return a name with a space between its words."""
    return " ".join(re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)).lower()


def names_of(text: str) -> list[str]:
    """Return the names of functions and classes, as words."""
    return [
        in_words(node.name)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    ]


def all_names_of(text: str) -> list[str]:
    """Return all names that a file defines or uses, as words."""
    tree = ast.parse(text)
    fields = ("name", "id", "arg", "attr")
    names = [getattr(node, field, None) for node in ast.walk(tree) for field in fields]
    return [in_words(name) for name in names if isinstance(name, str)]


@functools.cache
def names_of_tests() -> list[str]:
    """Return those of all files of tests/."""
    tests = [path for path in OTHERS if path.is_relative_to(ROOT.parent / "tests")]
    return [name for path in tests for name in names_of(path.read_text())]


@pytest.mark.parametrize("word", INSTEAD | INSTEAD_IN_NAMES)
def test_a_test_is_named_in_the_same_words(word: str) -> None:
    """What a test is called is the first that is read of it, when it fails."""
    assert names_of("def test_a_run_goes_on(): pass") == ["test a run goes on"]
    pattern = re.compile(rf"\b(?:{word})\b", re.IGNORECASE)
    assert [name for name in names_of_tests() if pattern.search(name)] == [], (
        f"say: {(INSTEAD | INSTEAD_IN_NAMES)[word]}"
    )


@functools.cache
def names_of_the_package() -> set[str]:
    """Return those of all its files, and the files' own."""
    files = sorted(ROOT.rglob("*.py"))
    return {in_words(path.stem) for path in files}.union(
        *(all_names_of(path.read_text()) for path in files)
    )


@pytest.mark.parametrize("word", INSTEAD | INSTEAD_IN_NAMES)
def test_the_package_names_things_in_the_same_words(word: str) -> None:
    """A class, an argument, an attribute and a file are called as the prose calls them."""
    assert all_names_of("class DealtStream:\n def f(self, n_told): self.goes_on = 1") == [
        "dealt stream",
        "f",
        "self",
        "n told",
        "goes on",
        "self",
    ]
    pattern = re.compile(rf"\b(?:{word})\b")
    assert sorted(name for name in names_of_the_package() if pattern.search(name)) == [], (
        f"say: {(INSTEAD | INSTEAD_IN_NAMES)[word]}"
    )


def empty_names(text: str) -> list[str]:
    """Return the variables and arguments whose name says nothing, each with its line."""
    return [
        f"{node.lineno}: {name}"
        for node in ast.walk(ast.parse(text))
        if (name := getattr(node, "id", getattr(node, "arg", None))) in EMPTY_NAMES
    ]


def test_a_variable_is_named_for_what_it_holds() -> None:
    """Samples that were found are `samples`; a keyword of another library's is its own."""
    assert empty_names("def f(found): return [kept for kept in a.found]") == [
        "1: found",
        "1: kept",
        "1: kept",
    ]
    recipes = sorted((ROOT.parent / "recipes").rglob("*.py"))
    files = [path for path in [*PLACES, *recipes] if path.suffix == ".py"]
    assert {str(path): names for path in files if (names := empty_names(path.read_text()))} == {}


def test_a_class_name_stands_once() -> None:
    """A name leads to one class of the package, but for those that are a file's own."""
    places: dict[str, list[str]] = {}
    for name in classes():
        places.setdefault(name.rpartition(".")[2], []).append(name)
    assert not {
        short: names
        for short, names in places.items()
        if len(names) > 1 and not short.startswith("_")
    }
