"""The arguments of a class with types, defaults and docstrings,
read from its source without importing anything.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from trainkit.config.signature import source_of


@dataclass(frozen=True)
class Documented:
    """One argument of a constructor;
    its type, its default and what the class's docstring says of it, as texts.
    """

    name: str
    kind: str
    default: str
    text: str


def arguments_of(target: str) -> list[Documented]:
    """Return the keyword arguments of a class's `__init__`, in order;
    none if its source cannot be found.
    """
    node = source_of(target)
    inits = [
        n
        for n in getattr(node, "body", [])
        if isinstance(n, ast.FunctionDef) and n.name == "__init__"
    ]
    if not inits or not isinstance(node, ast.ClassDef):
        return []
    texts, arguments = _texts(ast.get_docstring(node) or ""), inits[0].args
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return [
        Documented(
            argument.arg,
            "" if argument.annotation is None else ast.unparse(argument.annotation),
            "" if default is None else ast.unparse(default),
            texts.get(argument.arg, ""),
        )
        for argument, default in pairs
    ]


def _texts(docstring: str) -> dict[str, str]:
    """Return the entries of a docstring's "Args:" by name."""
    _, _, section = docstring.partition("Args:\n")
    section = re.split(r"\n\S", section)[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
