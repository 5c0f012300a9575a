"""Reads groups.toml: the groups, and the one that a test belongs to."""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it along
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests" / "groups.toml"


@dataclass(frozen=True)
class Group:
    """A group of tests, which run in one command.

    Attributes:
        name: as `python -m tests.groups NAME` takes it.
        about: what it holds, in a line.
        quick: whether it is a part of `make test`.
        budget_s: seconds that it may take on two quiet cores.
        sources: files and folders of the repository; a change to one makes the group due.
        tests: folders, files or single tests. A test belongs to the group that names it most
            closely.
        workers: processes of pytest-xdist; 0 runs the tests in pytest's own process.
        dist: how pytest-xdist distributes the tests.
        cores: how many cores it keeps busy, for what may run beside it: 0.4 if it mostly waits.
        commands: shell commands that are the group, in place of pytest.
        prepare: a shell command to run before; if it fails, so does the group.
        environment: further variables; {root} is the repository.
        chosen: single tests of it, to run in place of all.
        before_s: seconds that its tests took on 2026-11-24, before there was this table.
    """

    name: str
    about: str
    budget_s: int
    quick: bool = False
    sources: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    workers: int = 2
    dist: str = "load"
    cores: float = 2
    commands: tuple[str, ...] = ()
    prepare: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    chosen: tuple[str, ...] = ()
    before_s: int | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """The folders and files that pytest collects for it, each once; or the chosen tests."""
        if self.chosen:
            return self.chosen
        files = list(dict.fromkeys(test.partition("::")[0] for test in self.tests))
        return tuple(
            file for file in files if not any(file.startswith(f"{other}/") for other in files)
        )

    @property
    def due_after(self) -> tuple[str, ...]:
        """All files and folders whose change makes the group due: its sources and its tests."""
        return (*self.sources, *dict.fromkeys(test.partition("::")[0] for test in self.tests))


def read(text: str) -> dict[str, Group]:
    """Return the groups of a table's text by name, in its order.

    Raises:
        ValueError: two groups name the same test.
    """
    groups = {name: _group(name, entry) for name, entry in tomllib.loads(text).items()}
    owners: dict[str, str] = {}
    for group in groups.values():
        for test in group.tests:
            if owners.setdefault(test, group.name) != group.name:
                raise ValueError(f"{test} is named by two groups: {owners[test]} and {group.name}.")
    return groups


def _group(name: str, entry: dict[str, Any]) -> Group:
    return Group(
        name,
        **{key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()},
    )


@functools.cache
def all_groups() -> dict[str, Group]:
    """Return the groups of groups.toml by name, the most valuable first."""
    return read(TABLE.read_text())


def group_of(test: str, groups: dict[str, Group]) -> str | None:
    """Return the name of the group that names a test most closely, or None.

    Args:
        test: its id, as pytest prints it: tests/unit/test_a.py::test_b[1].
    """
    closest: tuple[int, str] | None = None
    for group in groups.values():
        for prefix in group.tests:
            if _holds(prefix, test) and (closest is None or len(prefix) > closest[0]):
                closest = (len(prefix), group.name)
    return None if closest is None else closest[1]


def _holds(prefix: str, test: str) -> bool:
    return test.startswith(prefix) and re.match(r"/|::|\[|$", test[len(prefix) :]) is not None
