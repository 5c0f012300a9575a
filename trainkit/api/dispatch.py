"""Calls hooks: of each callback in the order of the list, then of the Task. Only overridden hooks cost anything.

Callbacks with `runs_last` come after the Task: a checkpoint must contain the Task's changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from trainkit.api.callback import Callback
from trainkit.api.lightning_names import MANUAL_OPTIMIZATION, TASK_METHODS
from trainkit.api.task import Task
from trainkit.api.task_hooks import TASK_HOOKS
from trainkit.api.view import RunView
from trainkit.errors import ConfigError, TaskError, did_you_mean


class Hooks:
    """A table from a hook's name to the methods that implement it."""

    def __init__(self, trainer: RunView, task: Task, callbacks: Sequence[Callback]) -> None:
        """Collect the overridden hooks.

        Raises:
            ConfigError: a callback has a method that looks like a hook and is none.
            TaskError: the Task has one.
        """
        names = [n for n, f in vars(Callback).items() if callable(f) and not n.startswith("_")]
        for callback in callbacks:
            if stray := _stray_hook(type(callback), names):
                raise ConfigError(_no_hook(type(callback), stray, "Callback", names))
        _check_task(task, names)
        self._table: dict[str, list[Callable[..., Any]]] = {}
        for name in names:
            first, last = (
                [
                    functools.partial(getattr(callback, name), trainer, task)
                    for callback in callbacks
                    if getattr(type(callback), name) is not getattr(Callback, name) and callback.runs_last is runs_last
                ]
                for runs_last in (False, True)
            )
            of_task = name in TASK_HOOKS and getattr(type(task), name) is not getattr(Task, name)
            found: list[Callable[..., Any]] = [*first, *([getattr(task, name)] if of_task else []), *last]
            if found:
                self._table[name] = found
        self._calls = self._table

    def wrap(self, around: Callable[[str, str, Callable[..., Any]], Callable[..., Any]]) -> None:
        """Wrap each call from now on; replaces an earlier wrapper.

        Args:
            around: receives the owner's class name, the hook's name and its implementation; returns the function to call.
        """
        self._calls = {
            name: [around(owner, name, method) for owner, method in zip(self.owners(name), methods, strict=True)]
            for name, methods in self._table.items()
        }

    def owners(self, name: str) -> list[str]:
        """Return the class names of the objects that implement the hook `name`, in order of the calls."""
        found = (getattr(implementation, "func", implementation) for implementation in self._table.get(name, ()))
        return [type(method.__self__).__name__ for method in found]  # type: ignore[union-attr]

    def __call__(self, name: str, *args: Any) -> None:
        """Call the hook `name`."""
        for implementation in self._calls.get(name, ()):
            implementation(*args)

    def of_task(self, name: str, *args: Any) -> None:
        """Call the hook `name` of the Task only."""
        for method, implementation in zip(self._table.get(name, ()), self._calls.get(name, ()), strict=True):
            if not isinstance(method, functools.partial):
                implementation(*args)

    def of_callbacks(self, name: str, *args: Any) -> None:
        """Call the hook `name` of the callbacks only."""
        for method, implementation in zip(self._table.get(name, ()), self._calls.get(name, ()), strict=True):
            if isinstance(method, functools.partial):
                implementation(*args)


def _check_task(task: Task, of_callbacks: Collection[str]) -> None:
    """Refuse methods that would silently never be called: unknown hooks, and hooks that only Lightning has."""
    own = type(task)
    for name, advice in TASK_METHODS.items():
        if callable(getattr(own, name, None)):
            raise TaskError(
                f"{own.__name__}.{name}() is a hook of Lightning, and none here: it would never be called. {advice}"
            )
    if not getattr(task, "automatic_optimization", True):
        raise TaskError(f"{own.__name__}.{MANUAL_OPTIMIZATION}")
    if stray := _stray_hook(own, TASK_HOOKS):
        where = " A Callback has it: Trainer(callbacks=[...])." if stray in of_callbacks else ""
        raise TaskError(_no_hook(own, stray, "Task", TASK_HOOKS) + where)


def _stray_hook(cls: type, known: Collection[str]) -> str | None:
    """Return the name of a method that looks like a hook and is none, or None."""
    return next((n for n in dir(cls) if n.startswith("on_") and n not in known and callable(getattr(cls, n))), None)


def _no_hook(cls: type, name: str, kind: str, known: Collection[str]) -> str:
    return f"{cls.__name__}.{name}() is no hook of a {kind}: it would never be called.{did_you_mean(name, known)}"
