"""What a Task and a DataModule share: their saved arguments, and the run that they belong to."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from types import FrameType, MappingProxyType
from typing import Any

from trainkit.api.view import RunView
from trainkit.errors import TaskError, did_you_mean


class HyperParameters(dict[str, Any]):
    """The arguments saved by `save_hyperparameters`; its entries are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"No hyper-parameter '{name}'; there are {', '.join(self) or 'none'}."
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class Configured:
    """Base of Task and DataModule; needs no `__init__`."""

    _kind = "Task"  # for messages
    _trainer: RunView | None = None
    _not_logged: frozenset[str] = frozenset()
    # argument of __init__ whose entries were saved -> their names
    _saved_whole: Mapping[str, list[str]] = MappingProxyType({})

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without the run, for copies and loader workers:
        neither belongs to it.
        """
        return {name: value for name, value in self.__dict__.items() if name != "_trainer"}

    @functools.cached_property
    def hparams(self) -> HyperParameters:
        """What `save_hyperparameters` saved."""
        return HyperParameters()

    @property
    def logged_hparams(self) -> dict[str, Any]:
        """The part of `hparams` that loggers receive."""
        return {
            name: value
            for name, value in self.hparams.items()
            if name not in self._not_logged and not callable(value)
        }

    def save_hyperparameters(
        self, *names: Any, ignore: str | Sequence[str] = (), logger: bool = True
    ) -> None:
        """Save the arguments of `__init__` in `self.hparams`; call it there, after
        `super().__init__()`.

        Those of a subclass are saved too, if its `__init__` calls this one. Of two with the same
        name, the subclass's counts.

        Args:
            names: the arguments to save, or one mapping or namespace to save instead. Default: all.
            ignore: arguments to leave out.
            logger: false: loggers do not receive them.

        Raises:
            TaskError: called outside of `__init__`, or there is no such argument.
        """
        own, left_out = type(self).__name__, {ignore} if isinstance(ignore, str) else set(ignore)
        called = _arguments_of(self, inspect.currentframe())
        whole = list[str]()
        if len(names) == 1 and not isinstance(names[0], str):
            given = _entries(names[0])
            if given is None or not all(isinstance(name, str) for name in given):
                raise TaskError(
                    f"{own}.save_hyperparameters: {names[0]!r} cannot be saved; give a mapping with"
                    " texts as keys, or a namespace."
                )
            arguments = dict(given)
            left_out &= arguments.keys()  # of one that is built from a checkpoint, which lacks them
            values = (called or {}).items() if arguments else ()
            whole = [name for name, value in values if _entries(value) == arguments]
            names = ()
        elif called is not None:
            arguments = called
        else:
            raise TaskError(
                f"{own}.save_hyperparameters() is called outside of {own}.__init__, so nothing is"
                " saved."
            )
        if strange := [name for name in (*names, *left_out) if name not in arguments]:
            raise TaskError(
                f"{own}.save_hyperparameters: '{strange[0]}' is no argument of its"
                f" __init__.{did_you_mean(strange[0], arguments)} It has {', '.join(arguments) or 'none'}."
            )
        chosen = {name: arguments[name] for name in names or arguments if name not in left_out}
        self.hparams.update(chosen)
        self._saved_whole = {**self._saved_whole, **{name: list(chosen) for name in whole}}
        if not logger:
            self._not_logged = self._not_logged | chosen.keys()

    @property
    def trainer(self) -> RunView:
        """The run in progress; hooks receive it as `trainer`.

        Raises:
            TaskError: no Trainer runs it yet.
        """
        if self._trainer is None:
            raise TaskError(
                f"{type(self).__name__}.trainer: no Trainer runs this {self._kind} yet."
            )
        return self._trainer


def _entries(value: Any) -> Mapping[str, Any] | None:
    """Return the entries of a mapping, or those of a namespace."""
    return value if isinstance(value, Mapping) else getattr(value, "__dict__", None)


def _arguments_of(owner: object, frame: FrameType | None) -> dict[str, Any] | None:
    """Return the arguments of the calls of `owner.__init__` that are in progress; the outermost, a
    subclass's, comes last. None: there is no such call.
    """
    arguments: dict[str, Any] = {}
    calls = 0
    while frame is not None:
        code = frame.f_code
        values = frame.f_locals
        first = code.co_varnames[0] if code.co_argcount else None  # usually, not always, "self"
        if code.co_name == "__init__" and first is not None and values.get(first) is owner:
            num_named = code.co_argcount + code.co_kwonlyargcount
            arguments |= {
                name: values[name] for name in code.co_varnames[1:num_named] if name in values
            }
            if code.co_flags & inspect.CO_VARKEYWORDS:
                place = num_named + bool(code.co_flags & inspect.CO_VARARGS)
                arguments |= values.get(code.co_varnames[place], {})
            calls += 1
        frame = frame.f_back
    return arguments if calls else None
