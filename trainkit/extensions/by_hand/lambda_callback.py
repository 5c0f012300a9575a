"""LambdaCallback: hooks as arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainkit.api.callback import Callback
from trainkit.arguments import unknown
from trainkit.errors import ConfigError

_HOOKS = sorted(
    name for name, member in vars(Callback).items() if callable(member) and not name.startswith("_")
)


class LambdaCallback(Callback):
    """Calls the given functions: `LambdaCallback(on_train_epoch_end=lambda trainer, task:
    print(trainer.current_epoch))`.

    Args:
        hooks: functions by the names of Callback's methods, with their arguments from `trainer` on.

    Raises:
        ConfigError: there is no such hook, or it is not a function.
    """

    may_differ = True  # functions of the user's own

    def __new__(cls, **hooks: Callable[..., Any]) -> LambdaCallback:
        """Return an object of a class of its own: hooks that are not given cost nothing."""
        for name, function in hooks.items():
            if name not in _HOOKS:
                raise ConfigError(unknown(f"LambdaCallback.{name}", name, _HOOKS))
            if not callable(function):
                raise ConfigError(f"LambdaCallback.{name} is {function!r}; it must be a function.")
        return super().__new__(
            type(
                cls.__name__, (cls,), {name: _method(function) for name, function in hooks.items()}
            )
        )

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        """Do nothing: see `__new__`."""


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: function(*args)
