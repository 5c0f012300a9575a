"""A Task's steps: whether there is one, and the arguments that it takes;
`training_step(self, batch)` may leave some out.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def call_step(task: object, name: str, *arguments: Any) -> Any:
    """Call a Task's step with as many of the arguments as it takes."""
    own = vars(task)
    before = own.get("_before_step")  # set while its modules replay CUDA graphs
    if before is not None:
        before()
    if name in own:
        return getattr(task, name)(*arguments[: _most(task, name)])
    taken = _taken(getattr(type(task), name))
    return getattr(task, name)(*(arguments if taken is None else arguments[: taken - 1]))


def _most(task: object, name: str) -> int | None:
    """Return how many arguments a step takes; None for any.

    A step that an engine has wrapped takes what the class's does.
    """
    own = vars(task).get(name)
    if own is not None and not hasattr(own, "__wrapped__"):
        taken = _taken(getattr(own, "__func__", own))
        if taken is not None:
            return taken - hasattr(own, "__func__")
    taken = _taken(getattr(type(task), name))
    return None if taken is None else taken - 1


@functools.lru_cache(maxsize=256)
def _taken(function: Callable[..., Any]) -> int | None:
    """Return the number of positional arguments of a function; None for any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a function without a signature
        return None
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return None
    return sum(parameter.kind in _POSITIONAL for parameter in parameters)


def has_step(task: object, base: type, name: str) -> bool:
    """Return whether a Task has this step of its own; None switches one off, as in Lightning."""
    own = vars(task).get(name, getattr(type(task), name))
    return own is not None and own is not getattr(base, name)
