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


@pytest.mark.parametrize("room", ["callbacks", "loggers"])
def test_the_rooms_of_callbacks_and_loggers_are_there(
    room: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Lightning's: `trainkit.callbacks.EarlyStopping` needs no import of its own."""
    monkeypatch.delattr(trainkit, room, raising=False)
    assert getattr(trainkit, room).__name__ == f"trainkit.{room}"


def test_a_sentence_about_a_missing_name_ends_once() -> None:
    """Python adds ". Did you mean: ...?" to what has no dot of its own."""
    with pytest.raises(AttributeError, match=r"module 'trainkit' has no attribute 'Callbak'$"):
        trainkit.Callbak  # noqa: B018
    with pytest.raises(AttributeError, match=r"'LightningModule'\. It is trainkit\.Task"):
        trainkit.LightningModule  # noqa: B018


def test_all_names_are_there() -> None:
    """Each can be imported, and none twice."""
    assert all(getattr(trainkit, name) is not None for name in trainkit.__all__)
    assert {"Loop", "CombinedLoader", "Trainer", "Task"} <= set(trainkit.__all__)
