"""Calls hooks: of each callback in the order of the list, then of the Task. Only hooks that someone overrode cost anything.

What saves checkpoints (`runs_last`) comes behind the Task: it saves what the Task did.
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
        """Look up once who overrides what.

        Raises:
            ConfigError: a callback has a method that looks like a hook and is none.
            TaskError: the Task has one.
        """
        names = [n for n, f in vars(Callback).items() if callable(f) and not n.startswith("_")]
        for callback in callbacks:
            if stray := _stray_hook(type(callback), names):
                raise ConfigError(_nobody_calls(type(callback), stray, "Callback", names))
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
        """Put something around each call from now on, in place of what was before.

        Args:
            around: takes the class whose object it is, the hook's name and what implements it; returns what is called.
        """
        self._calls = {
            name: [around(owner, name, method) for owner, method in zip(self.owners(name), methods, strict=True)]
            for name, methods in self._table.items()
        }

    def owners(self, name: str) -> list[str]:
        """Return the classes whose objects the hook `name` calls, in order."""
        found = (getattr(implementation, "func", implementation) for implementation in self._table.get(name, ()))
        return [type(method.__self__).__name__ for method in found]  # type: ignore[union-attr]

    def __call__(self, name: str, *args: Any) -> None:
        """Call the hook `name`."""
        for implementation in self._calls.get(name, ()):
            implementation(*args)

    def of_task(self, name: str, *args: Any) -> None:
        """Call the hook `name` of the Task alone."""
        for method, implementation in zip(self._table.get(name, ()), self._calls.get(name, ()), strict=True):
            if not isinstance(method, functools.partial):
                implementation(*args)

    def of_callbacks(self, name: str, *args: Any) -> None:
        """Call the hook `name` of the callbacks alone."""
        for method, implementation in zip(self._table.get(name, ()), self._calls.get(name, ()), strict=True):
            if isinstance(method, functools.partial):
                implementation(*args)


def _check_task(task: Task, of_callbacks: Collection[str]) -> None:
    """Refuse what would be passed over in silence: hooks that a Task has not got, methods that Lightning alone would call."""
    own = type(task)
    for name, advice in TASK_METHODS.items():
        if callable(getattr(own, name, None)):
            raise TaskError(f"{own.__name__}.{name}() is a hook of Lightning's, and none here: nobody would call it. {advice}")
    if not getattr(task, "automatic_optimization", True):
        raise TaskError(f"{own.__name__}.{MANUAL_OPTIMIZATION}")
    if stray := _stray_hook(own, TASK_HOOKS):
        where = " A Callback has it: Trainer(callbacks=[...])." if stray in of_callbacks else ""
        raise TaskError(_nobody_calls(own, stray, "Task", TASK_HOOKS) + where)


def _stray_hook(cls: type, known: Collection[str]) -> str | None:
    """Return the name of a method that looks like a hook and is none, or None."""
    return next((n for n in dir(cls) if n.startswith("on_") and n not in known and callable(getattr(cls, n))), None)


def _nobody_calls(cls: type, name: str, kind: str, known: Collection[str]) -> str:
    return f"{cls.__name__}.{name}() is no hook of a {kind}: nobody would call it.{did_you_mean(name, known)}"
