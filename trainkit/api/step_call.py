"""A Task's steps: whether there is one, and the arguments that it takes; `training_step(self, batch)` may leave some out."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def call_step(step: Callable[..., Any], *arguments: Any) -> Any:
    """Call a step with as many of the arguments as it takes."""
    taken = _taken(getattr(step, "__func__", step))
    if taken is None:
        return step(*arguments)
    return step(*arguments[: taken - hasattr(step, "__func__")])


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
