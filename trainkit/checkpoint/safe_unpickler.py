"""Reads a pickle with objects of any class without running its code: torch.load(...,
pickle_module=safe_unpickler).

A pickle is a program: it names functions to be called. Here the few names of a state_dict resolve
to functions of this file, and every other name to a stand-in that ignores all operations. No name
resolves to a function or class from elsewhere, so there is nothing to call. Objects of other
classes (a Lightning checkpoint's hyper-parameters, for example) become stand-ins, tensors plain
tensors.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class StandIn:
    """Replaces an object that was not built;
    accepts an unpickler's operations, and does nothing.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> StandIn:
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> StandIn:
        return self

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        """Ignore an item."""

    def extend(self, items: Any) -> None:
        """Swallow items."""

    def add(self, item: Any) -> None:
        """Ignore an item."""


class _Function:
    """A function that a pickle can only call: on a bare function it could set attributes."""

    __slots__ = ("_function",)
    _function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "_function", function)

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setattr__(self, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"it sets '{name}' of a function")


def _tensor(storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> Tensor:
    """Return a view of the storage; raises RuntimeError if it reaches beyond its end."""
    return torch.empty(0, dtype=storage.dtype).set_(storage).as_strided(size, stride, offset)


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _of_class(rebuild: Any, _class: Any, arguments: Any, *_: Any) -> Any:
    """Return the plain tensor of an object of a Tensor's subclass."""
    return rebuild(*arguments)


_KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _of_class,
    ("torch", "Size"): tuple,
}


class Unpickler(pickle.Unpickler):
    """The class that torch.load uses of a `pickle_module`."""

    def find_class(self, module: str, name: str) -> Any:
        """Return one of this file's functions, or a new stand-in; imports nothing."""
        known = _KNOWN.get((module, name))
        return type(name, (StandIn,), {"__module__": module}) if known is None else _Function(known)
