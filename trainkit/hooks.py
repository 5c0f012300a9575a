"""Calls hooks: of each callback in the order of the list, then of the Task. Only hooks that someone overrode cost anything."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from trainkit.callback import Callback
from trainkit.task import Task
from trainkit.task_hooks import TASK_HOOKS

if TYPE_CHECKING:
    from trainkit.trainer import Trainer


class Hooks:
    """A table from a hook's name to the methods that implement it."""

    def __init__(self, trainer: Trainer, task: Task, callbacks: Sequence[Callback]) -> None:
        """Look up once who overrides what."""
        names = [n for n, f in vars(Callback).items() if callable(f) and not n.startswith("_")]
        self._table: dict[str, list[Callable[..., Any]]] = {}
        for name in names:
            found: list[Callable[..., Any]] = [
                functools.partial(getattr(callback, name), trainer, task)
                for callback in callbacks
                if getattr(type(callback), name) is not getattr(Callback, name)
            ]
            if name in TASK_HOOKS and getattr(type(task), name) is not getattr(Task, name):
                found.append(getattr(task, name))
            if found:
                self._table[name] = found

    def __call__(self, name: str, *args: Any) -> None:
        """Call the hook `name`."""
        for implementation in self._table.get(name, ()):
            implementation(*args)

    def has(self, name: str) -> bool:
        """Return whether anybody overrides the hook."""
        return name in self._table
