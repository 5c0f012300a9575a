"""The names of `import trainkit`, in whichever order its modules are imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

import trainkit


@pytest.mark.parametrize(
    ("name", "home", "command"),
    [
        ("export", "trainkit.extensions.exporting.export", "trainkit.extensions.exporting.command"),
        ("replay", "trainkit.extensions.capsule.replay", "trainkit.extensions.capsule.command"),
    ],
)
@pytest.mark.parametrize("before", ["pass", "import {home}", "trainkit.{name}; import {command}"])
def test_a_function_with_the_name_of_its_module_can_be_called(
    name: str, home: str, command: str, before: str
) -> None:
    """Each time, and after its module was imported:
    its own error about arguments shows that it is called.
    """
    first = before.format(name=name, home=home, command=command)
    code = f"import trainkit\n{first}\nfor _ in range(2):\n    try:\n        trainkit.{name}()\n"
    code += "    except TypeError as error:\n        print(error)\n"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert found.count(f"{name}() missing") == 2, found


def test_all_names_are_there() -> None:
    """Each can be imported, and none twice."""
    assert all(getattr(trainkit, name) is not None for name in trainkit.__all__)
    assert {"Loop", "CombinedLoader", "Trainer", "Task"} <= set(trainkit.__all__)
