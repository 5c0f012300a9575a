"""The short fault set: its names are those of tests, so that no rename makes it shorter in silence."""

from __future__ import annotations

import ast

from tests.faults.conftest import FOLDER, SHORT


def test_the_short_fault_set_holds_eleven_tests_that_exist() -> None:
    """Each name of the set is a test of tests/faults."""
    assert len(SHORT) == 13
    for name in SHORT:
        file, _, test = name.partition("::")
        found = {node.name for node in ast.parse((FOLDER / file).read_text()).body if isinstance(node, ast.FunctionDef)}
        assert test.partition("[")[0] in found, name
