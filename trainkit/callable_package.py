"""Packages that are called as the function of their name: `trainkit.export(task, path)`, though trainkit/export/ is a package.

Once a module of the package is imported, `trainkit.export` is the package, whatever `trainkit` itself returns for the name.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any


class _CallablePackage(types.ModuleType):
    """Calls the function that its module of the same name has."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(importlib.import_module(f"{self.__name__}.{name}"), name)(*args, **kwargs)


def make_callable(package: str) -> None:
    """Let a package that is being imported be called."""
    sys.modules[package].__class__ = _CallablePackage
