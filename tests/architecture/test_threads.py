"""One rule for all threads: safety/threads.py starts them,
and asks what becomes of an exception.
"""

from __future__ import annotations

import ast

import pytest

from tests.architecture.test_layering import ROOT

# The actor on a node of Ray, whose environment may lack trainkit: its threads end their stream in
# `finally`.
EXCEPT = {"safety/threads.py", "extensions/ray/keeper.py"}
STARTERS = {"threading.Thread", "threading.Timer", "_thread.start_new_thread"}


def starters_of(source: str) -> list[str]:
    """Return the names in a module that start a thread: calls, parent classes and imports."""
    used: list[ast.expr] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            used.append(node.func)
        elif isinstance(node, ast.ClassDef):
            used += node.bases
        elif isinstance(node, ast.ImportFrom) and node.module in ("threading", "_thread"):
            used += [
                ast.parse(f"{node.module}.{alias.name}", mode="eval").body for alias in node.names
            ]
    return [name for name in map(ast.unparse, used) if name in STARTERS]


@pytest.mark.parametrize(
    ("source", "starters"),
    [
        ("threading.Thread(target=run).start()", ["threading.Thread"]),
        ("class Watch(threading.Thread): pass", ["threading.Thread"]),
        ("from threading import Lock, Timer", ["threading.Timer"]),
        ("threads: list[threading.Thread] = []", []),
    ],
)
def test_starters_are_seen(source: str, starters: list[str]) -> None:
    """Calls, subclasses and imports, but not annotations."""
    assert starters_of(source) == starters


def test_all_threads_are_started_in_one_place() -> None:
    """So that no exception ends a thread without a trace, as a heartbeat's did."""
    direct = {
        str(path.relative_to(ROOT)): starters
        for path in ROOT.rglob("*.py")
        if (starters := starters_of(path.read_text()))
    }
    assert set(direct) == EXCEPT, f"start these with trainkit.safety.threads.start_thread: {direct}"
