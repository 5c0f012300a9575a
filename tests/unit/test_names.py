"""The names of `import trainkit`, in whichever order its modules are imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

import trainkit

FUNCTIONS = {
    "export": ("trainkit.extensions.exporting.export", "trainkit.extensions.exporting.command"),
    "replay": ("trainkit.extensions.capsule.replay", "trainkit.extensions.capsule.command"),
}
ORDERS = ("pass", "import {home}", "trainkit.{name}; import {command}")
# torch is the longest import, and none of ours: each case is a fork that has it
CALLS = """
import os, sys
import torch
for name, first in {cases!r}:
    if os.fork() == 0:
        print("case", name, first, flush=True)
        import trainkit
        exec(first)
        for _ in range(2):
            try:
                getattr(trainkit, name)()
            except TypeError as error:
                print(error, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def test_a_function_with_the_name_of_its_module_can_be_called() -> None:
    """Each time, and after its module was imported:
    its own error about arguments shows that it is called.
    """
    cases = [
        (name, before.format(name=name, home=home, command=command))
        for name, (home, command) in FUNCTIONS.items()
        for before in ORDERS
    ]
    found = subprocess.run(
        [sys.executable, "-c", CALLS.format(cases=cases)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("case ")[1:]
    assert len(found) == len(cases)
    for (name, _), text in zip(cases, found, strict=True):
        assert text.count(f"{name}() missing") == 2, text


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
    with pytest.raises(AttributeError, match=r"'Trainer' object has no attribute 'callbak'$"):
        trainkit.Trainer().callbak  # noqa: B018


def test_a_name_of_lightning_says_what_to_use() -> None:
    """Where it is imported too: Python would not show an AttributeError's sentence there."""
    with pytest.raises(
        ImportError, match=r"^trainkit has no LightningModule\. It is trainkit\.Task"
    ):
        from trainkit import LightningModule  # noqa: F401
    with pytest.raises(ImportError, match="RichProgressBar. In its place: ProgressBar"):
        from trainkit.callbacks import RichProgressBar  # noqa: F401
    with pytest.raises(AttributeError, match="Write a Callback with on_metrics"):
        trainkit.loggers.CometLogger  # noqa: B018
    with pytest.raises(ImportError, match=r"DDPStrategy. In its place: Trainer\(engine=..."):
        from trainkit import DDPStrategy  # noqa: F401
    with pytest.raises(AttributeError, match=r"'scaler'\. In its place: trainer\.precision"):
        trainkit.Trainer().scaler  # noqa: B018


def test_all_names_are_there() -> None:
    """Each can be imported, and none twice."""
    assert all(getattr(trainkit, name) is not None for name in trainkit.__all__)
    assert {"Loop", "CombinedLoader", "Trainer", "Task"} <= set(trainkit.__all__)
