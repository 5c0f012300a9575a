"""The table of hooks: who overrides what."""

from __future__ import annotations

from typing import Any

import pytest

from tests.toy import Line
from trainkit.callback import Callback
from trainkit.errors import TaskError
from trainkit.hooks import Hooks


class Watch(Callback):
    """Overrides one hook."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_start(self, trainer: Any, task: Any) -> None:
        """Note who calls."""
        self.seen.append((trainer, task))


class Later(Watch):
    """Inherits it."""


def test_only_overridden_hooks_are_called() -> None:
    """A hook that nobody overrides is not in the table, and calling it does nothing."""
    hooks = Hooks("trainer", Line(), [Watch(), Callback()])  # type: ignore[arg-type]
    assert "on_train_start" in hooks._table
    assert "on_train_end" not in hooks._table
    hooks("on_train_end")
    hooks("no_such_hook")


def test_inherited_hooks_are_called() -> None:
    """A callback's subclass keeps the hooks of its parent."""
    watch, task = Later(), Line()
    Hooks("trainer", task, [watch])("on_train_start")  # type: ignore[arg-type]
    assert watch.seen == [("trainer", task)]


def test_a_callbacks_own_hook_is_refused_in_a_task() -> None:
    """A hook that only callbacks have would never be called on a Task."""

    class Own(Line):
        def on_metrics(self) -> None:
            """Never called."""

    with pytest.raises(TaskError, match=r"Own\.on_metrics\(\) is no hook of a Task: nobody would call it"):
        Hooks("trainer", Own(), [])  # type: ignore[arg-type]
