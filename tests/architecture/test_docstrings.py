"""Docstrings: ruff asks for those of classes and functions;
a method has one of its own, or overrides one that has.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterator

from tests.architecture.test_layering import HOMES, ROOT


def undocumented(cls: type) -> list[str]:
    """Return the public methods and properties of a class that have no docstring,
    nor override one that has.
    """
    lacking = []
    for name, member in vars(cls).items():
        function = getattr(member, "fget", None) or getattr(member, "__func__", member)
        if (
            name.startswith("_")
            or not inspect.isfunction(function)
            or function.__doc__
            or function.__name__ == "<lambda>"
        ):
            continue
        if not any(getattr(vars(base).get(name), "__doc__", None) for base in cls.__mro__[1:]):
            lacking.append(f"{cls.__module__}.{cls.__qualname__}.{name}")
    return lacking


def classes() -> Iterator[type]:
    """Yield the public classes of the package except protocols,
    which their implementations document, and Horovod's.
    """
    for path in sorted(ROOT.rglob("*.py")):
        place = path.relative_to(ROOT)
        if str(place) in HOMES["horovod"] or path.name == "__main__.py":
            continue
        if (
            place.parts[:2] == ("extensions", "deepspeed")
            and importlib.util.find_spec("deepspeed") is None
        ):
            continue
        module = importlib.import_module(
            ".".join(["trainkit", *place.with_suffix("").parts]).removesuffix(".__init__")
        )
        own = (
            cls
            for cls in vars(module).values()
            if inspect.isclass(cls) and cls.__module__ == module.__name__
        )
        yield from (
            cls
            for cls in own
            if not cls.__name__.startswith("_") and not getattr(cls, "_is_protocol", False)
        )


def test_each_public_method_is_documented_by_its_class_or_a_base() -> None:
    """A public method without a docstring overrides one that has a docstring."""
    found = list(classes())
    assert len(found) > 150
    assert [name for cls in found for name in undocumented(cls)] == []
