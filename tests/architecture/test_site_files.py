"""The tables behind the site: addresses of pages that were, and what a page was run on."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.page_tests import TESTS
from tests.helpers.pages import blocks, commands

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def loaded() -> Any:
    """Return the module that conf.py imports."""
    spec = importlib.util.spec_from_file_location("site_files", DOCS / "site_files.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site_files = loaded()
PAGES = {page.stem for page in DOCS.glob("*.md")}


def test_a_reader_sees_few_pages() -> None:
    """At most as many as he finds his way in; a page that grows out of it replaces another."""
    included = {"index", "errors", "figures", "contributing", "changelog"}
    assert len(PAGES - included) <= 25, sorted(PAGES - included)


def test_each_page_with_commands_is_run() -> None:
    """A page that no test runs would soon be wrong."""
    with_commands = {page.stem for page in DOCS.glob("*.md") if any(commands(page))}
    assert with_commands - {"index"} <= set(TESTS)
    named = {test for parts in TESTS.values() for test in parts.values()}
    assert [test for test in named if not (ROOT / "tests" / test).is_file()] == []


def test_what_is_not_run_says_why() -> None:
    """A block is left out for a reason of more than a word, and only shell commands are: the site names them."""
    left_out = [block for page in DOCS.glob("*.md") for block in blocks(page) if not block.is_run]
    assert left_out
    for block in left_out:
        assert len(block.comment.split()) > 5 and block.commands, block


def test_the_reference_has_each_public_callback_with_its_config() -> None:
    """Those of the core, those of extensions and those that a config calls otherwise alike."""
    text = site_files.classes_of("trainkit.callbacks")
    for file in (ROOT / "conf" / "callbacks").glob("*.yaml"):
        for name in re.findall(r"_target_: trainkit\.callbacks\.(\w+)", file.read_text()):
            assert f".. autoclass:: trainkit.callbacks.{name}\n" in text, name
            assert f"`callbacks={file.stem}` is" in text
    assert ".. autoclass:: trainkit.callbacks.LambdaCallback\n" in text  # no config has it
    assert "Any" not in site_files.class_names("trainkit.callbacks")


def test_each_page_is_in_the_navigation_once() -> None:
    """A page that no list names is seen by no reader."""
    lists = [DOCS / "index.md", DOCS / "reference" / "index.md"]
    trees = [
        tree
        for file in lists
        for tree in re.findall(r"```\{toctree\}\n((?:.*\n)*?)```", file.read_text())
    ]
    named = [
        Path(line).name for tree in trees for line in tree.splitlines() if line and ":" not in line
    ]
    reference = {page.stem for page in (DOCS / "reference").glob("*.md")}
    assert sorted(named) == sorted((PAGES - {"index"}) | reference)


def test_an_old_address_is_no_page_of_today() -> None:
    """A redirect would be written over it."""
    assert PAGES & set(site_files.REDIRECTS) == set()
    targets = {new.partition(".html#")[0] for new in site_files.REDIRECTS.values()}
    assert targets <= PAGES


@pytest.mark.parametrize(
    ("stamp", "said"),
    [
        (None, "`make mpi`, which has not passed as a whole yet"),
        ({"date": "2026-11-26T09:02:02+00:00"}, "`make mpi`, 2026-11-26"),
        (
            {"date": "2026-12-01T00:00:00", "python": "3.11.7", "torch": "2.15.0", "cores": 2},
            "`make mpi`, 2026-12-01 on Python 3.11.7, torch 2.15.0, 2 cores",
        ),
    ],
)
def test_what_a_page_was_run_on_is_its_groups_stamp(
    stamp: dict[str, Any] | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group without a stamp is named so; the parts of a page that others test stand apart."""
    stamps = {"pages": {"date": "2026-11-26T09:02:02+00:00"}} | ({"mpi": stamp} if stamp else {})
    monkeypatch.setattr(site_files, "read_stamps", lambda: stamps)
    line = site_files.what_it_was_run_on("horovod")
    assert f"It is tested in `make pages`, 2026-11-26; *Horovod on MPI* in {said}." in line
    assert "Not run: `python -m trainkit horovod install` (`make setup` runs the install;" in line


def test_a_page_without_commands_has_no_such_line() -> None:
    """There is nothing to say of it."""
    assert site_files.what_it_was_run_on("security") == ""
