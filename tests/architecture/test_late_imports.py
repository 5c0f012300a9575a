"""What is imported by name, within a function, exists: mypy does not see it."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator

from tests.architecture.test_layering import modules


def module_of(call: ast.AST | None) -> str | None:
    """Return the module that `importlib.import_module("trainkit...")` imports."""
    if not isinstance(call, ast.Call) or not ast.unparse(call.func).endswith("import_module"):
        return None
    name = call.args[0]
    is_ours = isinstance(name, ast.Constant) and str(name.value).startswith("trainkit.")
    return name.value if is_ours else None  # type: ignore[attr-defined]


def late_uses(function: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of what a function takes from modules that it imports by name."""
    bound: dict[str, str] = {}
    for node in ast.walk(function):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and (module := module_of(node.value)):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            bound[ast.unparse(target)] = module
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute):
            module = module_of(node.value) or bound.get(ast.unparse(node.value))
            if module is not None:
                yield module, node.attr


def test_what_is_imported_late_is_there() -> None:
    """A class that was renamed is missed by no command."""
    uses = {
        use
        for path in modules().values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        for use in late_uses(node)
    }
    assert len(uses) > 20
    missing = [use for use in sorted(uses) if not hasattr(importlib.import_module(use[0]), use[1])]
    assert missing == []
