"""Reads the arguments of a class or function from its source, without importing anything.

So a config is checked against the constructors that it names, before torch is loaded. A definition
that cannot be followed (behind a decorator, a class made at run time) gives a signature that
accepts everything. (griffe reads sources too, but its import alone takes 0.2 s, about as long as a
wrong key may take to be reported.)
"""

from __future__ import annotations

import ast
import functools
import sys
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from trainkit.errors import ConfigError, did_you_mean
from trainkit.extension import current_name, public_names

_ROOT = Path(__file__).parents[1]  # of the package
_DEPTH = 12  # of imports and base classes followed; a guard against circles


@dataclass(frozen=True)
class Parameter:
    """One argument: its annotation as text ("" for none), and whether it is required."""

    annotation: str
    required: bool


@dataclass(frozen=True)
class Signature:
    """The arguments of a target.

    Attributes:
        parameters: by name, without self.
        accepts_any: whether other names are legal too (**kwargs), or unknown.
    """

    parameters: dict[str, Parameter] = field(default_factory=dict)
    accepts_any: bool = False


def read_signature(target: str, key: str) -> Signature:
    """Return the signature of a dotted path such as "torch.optim.SGD"; errors name `key`, the
    config's key.

    Raises:
        ConfigError: there is no such module, or the module has no such name.
    """
    target = current_name(target)
    module, names = _find_module(target, key)
    if module is None or not names:
        return Signature(accepts_any=True)
    definition = _find(module, names[0], 0)
    if definition is None:
        tree, own = _parse(module), _own_name(module)
        if own is None and any(
            isinstance(n, ast.FunctionDef) and n.name == "__getattr__" for n in tree.body
        ):
            return Signature(accepts_any=True)
        known = [*_names(module), *public_names(own or "")]
        owner = target.removesuffix("." + ".".join(names))
        raise ConfigError(
            f"{key} is '{target}', but {owner} has no '{names[0]}'.{did_you_mean(names[0], known)}"
        )
    home, node = definition
    for name in names[1:]:
        inner = [
            n
            for n in getattr(node, "body", [])
            if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name == name
        ]
        if not inner:
            return Signature(accepts_any=True)
        node = inner[0]
    return _signature_of(home, node, 0)


def source_of(target: str) -> ast.AST | None:
    """Return the definition of a dotted path, or None if its source cannot be found."""
    target = current_name(target)
    module, names = _find_module(target, target)
    definition = _find(module, names[0], 0) if module is not None and names else None
    return None if definition is None else definition[1]


def class_attribute(target: str, name: str) -> Any:
    """Return the literal that a class, or the nearest of its bases, assigns to an attribute.

    None if there is none, it is computed, or the class cannot be found: the constructors' check
    names that fault.
    """
    try:
        module, names = _find_module(target, target)
        definition = _find(module, names[0], 0) if module is not None and len(names) == 1 else None
        value = None if definition is None else _attribute(*definition, name, 0)
        return None if value is None else ast.literal_eval(value)
    except (ConfigError, ValueError):
        return None


def _attribute(file: Path, node: ast.AST, name: str, depth: int) -> ast.expr | None:
    if not isinstance(node, ast.ClassDef) or depth > _DEPTH:
        return None
    for item in node.body:
        if not isinstance(item, (ast.Assign, ast.AnnAssign)):
            continue
        targets = item.targets if isinstance(item, ast.Assign) else [item.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return item.value
    for base in node.bases:
        definition = _base(file, base)
        value = _attribute(*definition, name, depth + 1) if definition is not None else None
        if value is not None:
            return value
    return None


def _base(file: Path, base: ast.expr) -> tuple[Path, ast.AST] | None:
    """Find the definition of a base class, as `Elastic`,
    or `callbacks.Elastic` by a module that the file imports.
    """
    if isinstance(base, ast.Name):
        return _find(file, base.id, 0)
    first, _, rest = (
        ast.unparse(base).partition(".") if isinstance(base, ast.Attribute) else ("", "", "")
    )
    for node in _statements(_parse(file).body):
        for alias in node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else ():
            above = f"{node.module}." if isinstance(node, ast.ImportFrom) and not node.level else ""
            bound = alias.asname or (alias.name if above else alias.name.partition(".")[0])
            if bound == first:
                module, names = _find_module(
                    f"{above}{alias.name if alias.asname or above else first}.{rest}", "import"
                )
                return (
                    _find(module, names[0], 0) if module is not None and len(names) == 1 else None
                )
    return None


def _find_module(target: str, key: str) -> tuple[Path | None, list[str]]:
    """Return the file of the longest prefix that is a module, and the names after it."""
    first, *rest = target.split(".")
    spec = PathFinder.find_spec(first, sys.path)
    if spec is None:
        raise ConfigError(
            f"{key} is '{target}', but there is no module '{first}', neither in the current folder"
            " nor installed."
        )
    if spec.submodule_search_locations is None:
        return (Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None), rest
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    file = Path(spec.origin) if spec.origin else None
    while rest:
        step = _submodule(folders, rest[0])
        if step is None:
            if file is None:  # a namespace package has nothing but modules
                names = [p.stem for folder in folders for p in folder.glob("*.py")]
                raise ConfigError(
                    f"{key} is '{target}', but there is no module '{rest[0]}'"
                    f" there.{did_you_mean(rest[0], names)}"
                )
            break
        file, folders = step
        rest = rest[1:]
        if not folders:
            break
    return file, rest


def _submodule(folders: list[Path], name: str) -> tuple[Path | None, list[Path]] | None:
    for folder in folders:
        if (folder / name / "__init__.py").is_file():
            return folder / name / "__init__.py", [folder / name]
        if (folder / f"{name}.py").is_file():
            return folder / f"{name}.py", []
    spaces = [
        folder / name
        for folder in folders
        if (folder / name).is_dir() and any((folder / name).glob("*.py"))
    ]
    return (None, spaces) if spaces else None


@functools.lru_cache(maxsize=256)
def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_text(encoding="utf-8"), str(file))
    except SyntaxError as error:
        raise ConfigError(
            f"{file.name}, line {error.lineno}: {error.msg}. Fix the file first."
        ) from error


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of a module, those under if and try included."""
    result: list[ast.stmt] = []
    for node in body:
        result.append(node)
        if isinstance(node, (ast.If, ast.Try)):
            result += _statements([*node.body, *node.orelse])
    return result


def _names(file: Path) -> list[str]:
    names = []
    for node in _statements(_parse(file).body):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.append(node.name)
        elif isinstance(node, ast.ImportFrom):
            names += [alias.asname or alias.name for alias in node.names]
    return names


def _find(file: Path, name: str, depth: int) -> tuple[Path, ast.AST] | None:
    """Find the definition of `name` of a module, following imports and plain aliases."""
    if depth > _DEPTH:
        return None
    stars = []
    for node in reversed(_statements(_parse(file).body)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return file, node
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if name in names:
                return _find(file, node.value.id, depth + 1)
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name == "*":
                    stars.append(node)
                elif (alias.asname or alias.name) == name:
                    source = _imported_file(file, node)
                    return _find(source, alias.name, depth + 1) if source else (file, ast.Pass())
    for node in stars:
        source = _imported_file(file, node)
        definition = _find(source, name, depth + 1) if source else None
        if definition is not None:
            return definition
    return _find_brought(file, name, depth)


def _find_brought(file: Path, name: str, depth: int) -> tuple[Path, ast.AST] | None:
    """Find what an extension brings under a name of a module of trainkit's,
    as trainkit.callbacks.Timeline.
    """
    own = _own_name(file)
    if own is None or name not in public_names(own):
        return None
    module, names = _find_module(current_name(f"{own}.{name}"), "import")
    return _find(module, names[0], depth + 1) if module is not None else None


def _own_name(file: Path) -> str | None:
    """Return the dotted name of a module of trainkit's; None for another's."""
    if not file.is_relative_to(_ROOT):
        return None
    parts = file.relative_to(_ROOT.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def _imported_file(file: Path, node: ast.ImportFrom) -> Path | None:
    if node.level == 0:
        try:
            path, rest = _find_module(node.module or "", "import")
        except ConfigError:
            return None
        return path if not rest else None
    folder = file.parent
    for _ in range(node.level - 1):
        folder = folder.parent
    for part in (node.module or "").split(".")[:-1]:
        folder = folder / part
    if not node.module:
        return folder / "__init__.py" if (folder / "__init__.py").is_file() else None
    step = _submodule([folder], node.module.split(".")[-1])
    return step[0] if step else None


def _signature_of(file: Path, node: ast.AST, depth: int) -> Signature:
    if isinstance(node, ast.FunctionDef):
        return _from_function(node, skip_first=False)
    if not isinstance(node, ast.ClassDef) or depth > _DEPTH:
        return Signature(accepts_any=True)
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return _from_function(item, skip_first=True)
    for base in node.bases:
        if not isinstance(base, ast.Name):
            return Signature(accepts_any=True)
        definition = _find(file, base.id, 0)
        if definition is None:
            return Signature(accepts_any=base.id != "object")
        return _signature_of(*definition, depth + 1)
    decorated = [d.id if isinstance(d, ast.Name) else "" for d in node.decorator_list]
    # as a dataclass: its __init__ is written at run time
    return Signature(accepts_any=bool(decorated))


def _from_function(node: ast.FunctionDef, skip_first: bool) -> Signature:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args][1 if skip_first else 0 :]
    without_default = len(positional) - len(arguments.defaults)
    parameters = {
        argument.arg: Parameter(_text(argument.annotation), i < without_default)
        for i, argument in enumerate(positional)
    }
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters[argument.arg] = Parameter(_text(argument.annotation), default is None)
    return Signature(parameters, accepts_any=arguments.kwarg is not None)


def _text(annotation: ast.expr | None) -> str:
    return "" if annotation is None else ast.unparse(annotation)
