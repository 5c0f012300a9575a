"""Messages go through trainkit's logger; a print is left where output is what a command is for."""

from __future__ import annotations

import ast
import fnmatch

import pytest

from tests.architecture.test_layering import ROOT, modules

# Files that print -> why.
PRINTS = {
    "__main__.py": "the command line's help",
    "api/in_run.py": "Task.print is the user's",
    "extensions/insight/watchdog/watchdog.py": (
        "ends a process whose main thread may be held up inside of a logger's handler"
    ),
    "cli/*": "a command's output",
    "config/compose.py": "--cfg job prints a config",
    "config/sweep.py": "a command's error",
    "extensions/elastic/*": "the output of a job and its workers",
    "extensions/experiment/*": "a command's output",
    "extensions/exporting/*": "a command's output",
    "extensions/*/*command.py": "a command's output",
    "extensions/deepspeed/p*.py": "a process's answer to its parent",
    "extensions/kubernetes/*": "a command's output",
    "extensions/ray/*": "the output of a job and its workers; a command's output",
    "extensions/programs/commands.py": "a command's error",
    "extensions/serving/serve.py": "a command's output",
    "extensions/slurm/launcher.py": "a command's output",
    "launch/*": "the output of launchers' commands; the error that ends a process",
    "console.py": "prints messages that no handler takes",
    "run/lightning_names.py": "Trainer.print is the user's",
    "safety/threads.py": "a mistake of trainkit's own, in a thread",
}


def printing(source: str) -> bool:
    """Return whether a source calls print."""
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return any(isinstance(function, ast.Name) and function.id == "print" for function in calls)


def test_only_commands_print() -> None:
    """A library user can silence and redirect everything else."""
    files = [
        path.relative_to(ROOT).as_posix()
        for path in modules().values()
        if printing(path.read_text())
    ]
    assert [
        file for file in files if not any(fnmatch.fnmatch(file, place) for place in PRINTS)
    ] == []
    assert [place for place in PRINTS if not fnmatch.filter(files, place)] == [], (
        "no longer prints: take it out of the table"
    )


@pytest.mark.parametrize(
    ("source", "prints"), [("def f():\n    print('a')\n", True), ("console.print('a')\n", False)]
)
def test_a_print_is_seen(source: str, prints: bool) -> None:
    """Wherever it stands; a method of that name is another."""
    assert printing(source) is prints
