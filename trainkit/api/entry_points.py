"""Checks the calls of the Trainer's entry points:
arguments that a method does not take raise a ConfigError.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any, TypeVar

from trainkit.arguments import check_call, illegal
from trainkit.errors import ConfigError

_Class = TypeVar("_Class", bound=type)
_OTHER_NAMES = {"model": "task"}  # Lightning's, with ours
# Lightning's without effect here: a checkpoint is always read without running code from it.
_IGNORED = ("weights_only",)
_PATHS = {"ckpt_path", "init_weights"}


def checked_calls(*methods: str) -> Callable[[_Class], _Class]:
    """Return a class decorator that checks the calls of these methods,
    which take Lightning's names of arguments too.
    """

    def decorate(cls: _Class) -> _Class:
        for name in methods:
            setattr(cls, name, _checked(f"{cls.__name__}.{name}", vars(cls)[name]))
        return cls

    return decorate


def _checked(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def checked_call(self: object, *args: object, **kwargs: object) -> Any:
        for other, own in _OTHER_NAMES.items():
            if other in kwargs and own not in kwargs:
                kwargs[own] = kwargs.pop(other)
        for ignored in _IGNORED:
            kwargs.pop(ignored, None)
        check_call(signature, args, kwargs, f"{name}: ", None)
        bound = signature.bind(self, *args, **kwargs)
        for key in _PATHS & bound.arguments.keys():
            bound.arguments[key] = _text_of(key, bound.arguments[key])
        return method(*bound.args, **bound.kwargs)

    return checked_call


def _text_of(key: str, path: Any) -> str | None:
    if path is None or isinstance(path, str):
        return path
    if isinstance(path, os.PathLike):
        return str(path)
    names = '"last", "best", "auto", ' * (key == "ckpt_path")
    raise ConfigError(illegal(key, path, f"{names}a path, a URL, or None"))
