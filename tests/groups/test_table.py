"""groups.toml: each test belongs to the group that names it most closely,
and nothing runs nowhere.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.groups.table import ROOT, Group, all_groups, group_of, read

FILES = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py"))


@pytest.mark.parametrize("file", FILES, ids=str)
def test_each_file_belongs_to_a_group(file: Path) -> None:
    """A file that no group names would run nowhere."""
    assert group_of(str(file), all_groups()) is not None


def test_each_name_of_the_table_exists() -> None:
    """A file or test that is renamed would leave its group in silence; so would a source."""
    for group in all_groups().values():
        for name in (*group.tests, *group.sources):
            file, _, test = name.partition("::")
            assert (ROOT / file).exists(), name
            if test:
                tree = ast.parse((ROOT / file).read_text())
                defined = {
                    node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
                }
                assert test.partition("[")[0] in defined, name


def test_the_closest_name_wins() -> None:
    """A test's name before its file's, a file's before its folder's;
    a parametrized test, its cases too.
    """
    groups = {
        "folder": Group("folder", "", 1, tests=("tests/a",)),
        "file": Group("file", "", 1, tests=("tests/a/test_b.py",)),
        "test": Group("test", "", 1, tests=("tests/a/test_b.py::test_c",)),
        "case": Group("case", "", 1, tests=("tests/a/test_b.py::test_c[2]",)),
    }
    assert group_of("tests/a/test_d.py::test_e", groups) == "folder"
    assert group_of("tests/a/test_b.py::test_cc", groups) == "file"
    assert group_of("tests/a/test_b.py::test_c[1]", groups) == "test"
    assert group_of("tests/a/test_b.py::test_c[2]", groups) == "case"
    assert group_of("tests/ab/test_d.py", groups) is None


def test_two_groups_cannot_name_the_same_test() -> None:
    """It would run twice, or not where one thinks."""
    with pytest.raises(ValueError, match=r"tests/a is named by two groups: one and two"):
        read(
            '[one]\nabout = ""\nbudget_s = 1\ntests = ["tests/a"]\n[two]\nabout = ""\nbudget_s ='
            ' 1\ntests = ["tests/a"]\n'
        )


def test_a_misspelled_key_raises() -> None:
    """A setting without effect is none."""
    with pytest.raises(TypeError, match="budgets"):
        read('[one]\nabout = ""\nbudgets = 1\n')


def test_pytest_gets_each_file_once() -> None:
    """A file in a folder that is named too is part of the folder."""
    group = Group(
        "one",
        "",
        1,
        sources=("trainkit",),
        tests=("tests/a", "tests/a/test_b.py::test_c", "tests/d.py::x", "tests/d.py::y"),
    )
    assert group.paths == ("tests/a", "tests/d.py")
    assert group.due_after == ("trainkit", "tests/a", "tests/a/test_b.py", "tests/d.py")
