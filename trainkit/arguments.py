"""Checks arguments against annotations, for constructors and configs alike.

An annotation is read as text, so one table serves live objects (`__annotations__` under
`from __future__ import annotations`) and sources that were never imported (`signature.py`). Beside
builtin types, `Literal[...]`, `X | None`, `list[X]` and `dict[K, V]`, the names below carry a
range. An annotation that is not known here (a class, a callable) accepts everything: Python itself
reports errors.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import os
import re
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Literal, TypeVar

from trainkit.errors import ConfigError, did_you_mean
from trainkit.extension import advice

Duration = float | str | timedelta | dict[str, float]
LEGAL = (
    "a number of seconds above 0, a timedelta, 'HH:MM:SS' or 'DD:HH:MM:SS', or a mapping as {days:"
    " 1, hours: 2}"
)
_UNITS = {"weeks", "days", "hours", "minutes", "seconds"}


def is_duration(value: object) -> bool:
    """Whether a value is one."""
    return _seconds(value) is not None


def seconds_of(value: Duration) -> float:
    """Return a duration's seconds.

    Raises:
        ConfigError: it is none.
    """
    seconds = _seconds(value)
    if seconds is None:
        raise ConfigError(f"'{value}' is no duration; it must be {LEGAL}.")
    return seconds


def _seconds(value: object) -> float | None:
    if isinstance(value, dict):
        if (
            not value
            or not value.keys() <= _UNITS
            or not all(_is_number(part) and 0 <= part < 1e9 for part in value.values())
        ):
            return None
        value = timedelta(**value)
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str) and re.fullmatch(r"(\d+:)?\d+:[0-5]?\d:[0-5]?\d", value):
        seconds = 0.0
        for part, factor in zip(reversed(value.split(":")), (1, 60, 3600, 86400), strict=False):
            seconds += int(part) * factor
    else:
        return None
    return seconds if seconds > 0 else None


# To type checkers these are plain types; to `problem` their names carry a range.
PositiveInt = int
NonNegativeInt = int
PositiveFloat = float
NonNegativeFloat = float
Fraction = float
IntOrFraction = int | float
Seed = int
ExistingFolder = str
ExistingFile = str
# as in Lightning; api/options.py replaces them
ShortPrecision = Literal["32", "16", "bf16", "64", 32, 16, 64]

_Class = TypeVar("_Class", bound=type)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return (_is_int(value) or isinstance(value, float)) and not (
        isinstance(value, float) and math.isnan(value)
    )


def _is_text(value: object) -> bool:
    return isinstance(value, (str, os.PathLike))


# name -> (does the value fit, what is legal in words)
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (lambda v: isinstance(v, bool), "true or false"),
    "int": (_is_int, "a whole number"),
    "float": (_is_number, "a number"),
    "str": (_is_text, "a text"),
    "None": (lambda v: v is None, "null"),
    "list": (lambda v: isinstance(v, (list, tuple)), "a list"),
    "dict": (lambda v: isinstance(v, dict), "a mapping"),
    "PositiveInt": (lambda v: _is_int(v) and v >= 1, "a whole number, 1 or more"),
    "NonNegativeInt": (lambda v: _is_int(v) and v >= 0, "a whole number, 0 or more"),
    "Seed": (lambda v: _is_int(v) and -(2**63) <= v < 2**63, "a whole number of 64 bits"),
    "PositiveFloat": (lambda v: _is_number(v) and v > 0, "a number above 0"),
    "NonNegativeFloat": (lambda v: _is_number(v) and v >= 0, "a number, 0 or more"),
    "Fraction": (lambda v: _is_number(v) and 0 <= v <= 1, "a number from 0 to 1"),
    "IntOrFraction": (
        lambda v: (_is_int(v) and v >= 0) or (isinstance(v, float) and 0 <= v <= 1),
        "a whole number (a count), or a fraction from 0.0 to 1.0",
    ),
    "ShortPrecision": (
        lambda v: not isinstance(v, bool) and str(v) in ("32", "16", "bf16", "64"),
        "32, 16, 'bf16' or 64",
    ),
    "Duration": (is_duration, LEGAL),
    "DeviceName": (
        lambda v: v in ("auto", "cpu", "cuda", "xpu", "mps"),
        "'auto', 'cpu', 'cuda', 'xpu' or 'mps'",
    ),
    "FolderPath": (lambda v: _is_text(v) and v != "", "the path of a folder"),
    "ExistingFile": (lambda v: _is_text(v) and os.path.isfile(v), "an existing file"),
    "ExistingFolder": (lambda v: _is_text(v) and os.path.isdir(v), "an existing folder"),
}

# Classes without plain values: beside a checked type, they do not make everything legal.
_NEVER_SCALARS = {"Tensor", "Module", "Optimizer", "Callable", "Dataset", "DataLoader", "Callback"}


def problem(annotation: str, value: object) -> str | None:
    """Return the legal values in words if `value` does not fit
    `annotation` (its source text), else None.
    """
    if not annotation.strip():
        return None
    fits, legal = _match(_parse(annotation), value)
    return None if fits else legal


@functools.lru_cache(maxsize=4096)
def _parse(annotation: str) -> ast.expr:
    return ast.parse(annotation.strip(), mode="eval").body


def _match(node: ast.expr, value: object) -> tuple[bool, str]:
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):  # a quoted annotation
            return _match(_parse(node.value), value)
        return (value is None, "null") if node.value is None else (True, "")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _either([node.left, node.right], value)
    if isinstance(node, ast.Subscript):
        return _match_subscript(_last_name(node.value), node.slice, value)
    fits, legal = _KINDS.get(_last_name(node), (lambda v: True, ""))
    return fits(value), legal


def _match_subscript(name: str, inner: ast.expr, value: object) -> tuple[bool, str]:
    if name == "Literal":
        literal = ast.literal_eval(inner)
        choices = literal if isinstance(literal, tuple) else (literal,)
        listed = ", ".join(map(show, choices))
        return any(value == c and type(value) is type(c) for c in choices), (
            f"one of {listed}" if len(choices) > 1 else listed
        )
    if name == "Optional":
        return _either([inner, ast.Constant(None)], value)
    if name == "Union" and isinstance(inner, ast.Tuple):
        return _either(list(inner.elts), value)
    if name == "Annotated" and isinstance(inner, ast.Tuple):
        return _match(inner.elts[0], value)
    if name in ("list", "List", "Sequence"):
        if not isinstance(value, (list, tuple)):
            return False, "a list"
        for item in value:
            fits, legal = _match(inner, item)
            if not fits:
                return False, f"a list of which each is {legal}"
        return True, ""
    if name in ("dict", "Dict", "Mapping"):
        if not isinstance(value, dict) or not isinstance(inner, ast.Tuple):
            return isinstance(value, dict), "a mapping"
        for part, items in zip(inner.elts, (list(value), list(value.values())), strict=True):
            for item in items:
                fits, legal = _match(part, item)
                if not fits:
                    which = "key" if part is inner.elts[0] else "value"
                    return False, f"a mapping of which each {which} is {legal}"
        return True, ""
    return True, ""


def _either(nodes: list[ast.expr], value: object) -> tuple[bool, str]:
    scalar = value is None or isinstance(value, (bool, int, float, str))
    answers = [
        _match(node, value) for node in nodes if not (scalar and _last_name(node) in _NEVER_SCALARS)
    ]
    return any(fits for fits, _ in answers), " or ".join(
        dict.fromkeys(legal for _, legal in answers if legal)
    )


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def show(value: object) -> str:
    """Write a value as a user would write it in a config."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"'{value}'" if isinstance(value, str) else str(value)


def illegal(key: str, value: object, legal: str) -> str:
    """Return the sentence for a value that does not fit."""
    if legal == "an existing folder":
        return (
            f"{key} is {show(value)}, and there is no such folder. Give the path of an existing"
            " folder."
        )
    # 'bf17' is a typing error; 'fp16' is none of 'bf16', although it is as near.
    names = re.findall(f"'({re.escape(value[:1])}[^']*)'", legal) if isinstance(value, str) else []
    in_quotes = isinstance(value, str) and "number" in legal and value.lstrip("-").isdigit()
    hint = f" Without quotes: {value}" if in_quotes else did_you_mean(str(value), names)
    return f"{key} is {show(value)}; it must be {legal}.{hint}"


def unknown(key: str, name: str, known: list[str], explained: dict[str, str] | None = None) -> str:
    """Return the sentence for an argument that does not exist.

    Args:
        key: the full key as the user wrote it, as "trainer.max_epoch".
        name: its last part, as "max_epoch".
        known: the names that exist.
        explained: names that users know from elsewhere, each with its replacement.
    """
    place = key.removesuffix(name).rstrip(".: ") or "config"
    if text := (explained or {}).get(name) or advice(place, name).removeprefix(". "):
        return f"{key}: {text}"
    if not known:
        return f"{key} is not a setting: it has none. Write it as an argument of its __init__."
    # the right name, or one with an explanation
    near = did_you_mean(name, known) or did_you_mean(name, explained or {})
    return f"{key} is not a setting.{near} Known here: {', '.join(sorted(known))}."


def not_logged(monitor: str, values: Iterable[str]) -> str:
    """Return the end of a sentence about a monitored value that was not logged."""
    names = sorted(values)
    return (
        f"'{monitor}', which was not logged for an epoch; there are"
        f" {', '.join(names) or 'none'}.{did_you_mean(monitor, names)} training_step logs a step's"
        " value, unless it calls self.log(..., on_epoch=True). A scheduler moves before"
        " on_train_epoch_end, whose values it cannot read."
    )


def checked(cls: _Class) -> _Class:
    """Class decorator: check the arguments of `cls(...)` against their annotations.

    Unknown names and illegal values raise the ConfigError of the same mistake in a config. A class
    attribute `explained_arguments` (name -> text) explains names that users know from other
    trainers; `taken_arguments` (name -> function of the value) returns the arguments that stand for
    such a name.
    """
    init: Callable[..., None] = vars(cls)["__init__"]
    signature = inspect.signature(init)
    parameters = {n: p for n, p in signature.parameters.items() if n != "self"}

    @functools.wraps(init)
    def checked_init(self: object, *args: object, **kwargs: object) -> None:
        own = type(self)
        room = getattr(own, "config_key", own.__name__)
        by: dict[str, str] = {}
        for name, take in getattr(own, "taken_arguments", {}).items():
            taken = take(kwargs.pop(name)) if name in kwargs else {}
            for key in taken:
                if kwargs.get(key) is not None:
                    both = f"{room}.{name} and {room}.{by.get(key, key)}"
                    raise ConfigError(f"{both} are given, and decide the same: leave one out.")
                by[key], kwargs[key] = name, taken[key]
        check_call(signature, args, kwargs, f"{room}.", getattr(own, "explained_arguments", None))
        given = dict(zip(parameters, args, strict=False)) | kwargs
        for name, value in given.items():
            legal = problem(str(parameters[name].annotation), value)
            if legal is not None:
                raise ConfigError(illegal(f"{room}.{name}", value, legal))
        init(self, *args, **kwargs)
        vars(self)["_given"] = given

    cls.__init__ = checked_init  # type: ignore[misc]
    return cls


def given_to(checked_object: object) -> dict[str, object]:
    """Return the arguments that an object of a `checked` class was constructed with."""
    return dict(vars(checked_object).get("_given", {}))


def check_call(
    signature: inspect.Signature,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    prefix: str,
    explained: dict[str, str] | None,
) -> None:
    """Raise a ConfigError if a method (its first parameter is the
    object) cannot be called like this.
    """
    known = [*signature.parameters][1:]
    for name in kwargs:
        if name not in known:
            raise ConfigError(unknown(f"{prefix}{name}", name, known, explained))
    try:
        signature.bind(None, *args, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{prefix.rstrip('.: ')}: {error}. Its arguments: {', '.join(known) or 'none'}."
        ) from None
