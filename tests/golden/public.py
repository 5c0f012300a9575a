"""The public names of a release, and the rule by which one may go (docs/releases.md).

    python -m tests.golden.public       # writes those of this version into public.json

Names are those of `trainkit.__all__`, with the arguments of classes and functions; callbacks and
loggers; commands; groups and files of conf/, with their keys. A release adds its names to the file.
One that is gone since must have warned in a release before this one: WARNED says in which.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import trainkit
from trainkit import callbacks, extension, loggers
from trainkit.cli.commands import all_commands
from trainkit.version import __version__

STORED = Path(__file__).with_name("public.json")
CONF = Path(__file__).parents[2] / "conf"
# of these all methods are public, of others those that they do not inherit
WHOLE = (trainkit.Task, trainkit.DataModule, trainkit.Callback, trainkit.Trainer)
# a name that is gone -> the release that warned, and said what to type instead
WARNED: dict[str, str] = {}


def present() -> set[str]:
    """Return all public names of this version."""
    return {*_python(), *_commands(), *_configs()}


def _python() -> Iterator[str]:
    for name in trainkit.__all__:
        yield from _of(f"trainkit.{name}", getattr(trainkit, name))
    for module in (callbacks, loggers):
        brought = extension.public_names(module.__name__)
        own = {name for name in vars(module) if not name.startswith("_")}
        for name in sorted({*own, *brought}):
            value = getattr(module, name)
            if inspect.isclass(value):
                yield from _of(f"{module.__name__}.{name}", value)


def _of(name: str, value: Any) -> Iterator[str]:
    """Yield a name, with its arguments and its public methods."""
    yield name
    if not callable(value):
        return
    yield from (f"{name}({argument}=)" for argument in _arguments(value))
    if inspect.isclass(value):
        methods = dir(value) if value in WHOLE else vars(value)
        yield from (
            f"{name}.{method}"
            for method in methods
            if not method.startswith("_")
            and getattr(getattr(value, method), "__module__", "").startswith("trainkit")
        )


def _arguments(value: Any) -> list[str]:
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):  # an error class of C
        return []
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _commands() -> Iterator[str]:
    for name in all_commands():
        yield f"python -m trainkit {name}"


def _configs() -> Iterator[str]:
    for path in sorted(CONF.rglob("*.yaml")):
        where = path.relative_to(CONF).with_suffix("").as_posix()
        yield f"conf/{where}"
        yield from (f"conf/{where}: {key}" for key in _keys(OmegaConf.load(path)))


def _keys(node: Any, before: str = "") -> Iterator[str]:
    if not OmegaConf.is_dict(node):
        return
    for key in node:
        if key in ("defaults", "_target_"):
            continue
        yield f"{before}{key}"
        value = None if OmegaConf.is_missing(node, key) else node._get_node(key)
        yield from _keys(value, f"{before}{key}.")


def stored() -> dict[str, list[str]]:
    """Return the names that each release added, by version."""
    releases: dict[str, list[str]] = json.loads(STORED.read_text())
    return releases


def number(version: str) -> tuple[int, ...]:
    """Return a version as numbers."""
    return tuple(int(part) for part in version.split("."))


def broken(names: set[str], releases: dict[str, list[str]], warned: dict[str, str]) -> list[str]:
    """Return the names that are gone without the warning of an earlier release."""
    return [
        f"{name}, public since {version}"
        for version, added in releases.items()
        for name in added
        if name not in names
        and not _is_inherited(name)
        and not (name in warned and number(warned[name]) < number(__version__))
    ]


def _is_inherited(name: str) -> bool:
    """Return whether a class has a method by a base now."""
    owner, _, method = name.rpartition(".")
    home, _, own = owner.rpartition(".")
    if home not in ("trainkit", callbacks.__name__, loggers.__name__):
        return False
    module = importlib.import_module(home)
    known = own in dir(module) or own in extension.public_names(home)
    return known and hasattr(getattr(module, own), method)


def main() -> None:
    """Write this version's names, beside those of releases before it."""
    releases = stored() if STORED.exists() else {}
    releases.pop(__version__, None)
    known = {name for names in releases.values() for name in names}
    releases[__version__] = sorted(present() - known)
    STORED.write_text(json.dumps(releases, indent=0) + "\n")


if __name__ == "__main__":
    main()
