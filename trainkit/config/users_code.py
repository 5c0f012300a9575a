"""Which modules are the user's own code, and which of them the config of a run may name.

A run's folder may come from anywhere, its config and its files with it. So nothing below a run's
folder is the user's own code, and no namespace package is: Python imports from any folder without
`__init__.py`, `outputs/theirs` too. Of the user's own modules the config of a run may name those
that this command, or a file of the user's conf/, names as well.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path

from trainkit.config.resources import shipped_root

_TARGET = re.compile(r"""_target_['"]?\s*[:=]\s*['"]?([\w.]+)""")
_OF_A_RUN = ("checkpoints", ".hydra", "state.json")  # one of them beside a config.yaml


def is_users_own(target: str) -> bool:
    """Return whether a dotted path leads to a module in the current folder
    that is the user's own code; imports nothing.
    """
    if target.split(".")[0] in (*sys.stdlib_module_names, "trainkit"):
        return False
    here = Path.cwd().resolve()
    files = [file.resolve() for file in _files_of(target)]
    return bool(files) and all(
        file.is_relative_to(here)
        and "site-packages" not in file.parts
        and not _is_of_a_run(file, here)
        for file in files
    )


def is_there(name: str) -> bool:
    """Return whether Python finds a module or a folder of this name; imports nothing."""
    return (
        name in sys.builtin_module_names
        or PathFinder.find_spec(name, [str(Path.cwd()), *sys.path]) is not None
    )


def is_shipped(target: str) -> bool:
    """Return whether `recipes.X` is one of trainkit's;
    a folder recipes/ of the current folder comes before it.
    """
    package, *rest = target.split(".")
    spec = PathFinder.find_spec(package, [str(Path.cwd()), *sys.path])
    module = None
    if (
        package == "recipes"
        and rest
        and spec is not None
        and spec.submodule_search_locations is not None
    ):
        module = PathFinder.find_spec(rest[0], list(spec.submodule_search_locations))
    origins = [
        part.origin for part in (spec, module) if part is not None and part.origin is not None
    ]
    return module is not None and all(
        Path(origin).resolve().is_relative_to(shipped_root()) for origin in origins
    )


def named_by_user(texts: Iterable[str]) -> frozenset[str]:
    """Return the modules that the user names: in the texts of this command, and in conf/ of the
    current folder.

    A conf/ in the folder of a run came with the run.
    """
    here = Path.cwd().resolve()
    is_of_a_run = any(map(is_run, (here, *here.parents)))
    files = [] if is_of_a_run else sorted((here / "conf").rglob("*.yaml"))
    sources = [*texts, *(file.read_text(encoding="utf-8", errors="replace") for file in files)]
    return frozenset(module_of(target) for text in sources for target in _TARGET.findall(text))


def module_of(target: str) -> str:
    """Return a dotted path without its last name."""
    return target.rpartition(".")[0]


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run."""
    return (folder / "config.yaml").is_file() and any(
        (folder / name).exists() for name in _OF_A_RUN
    )


def folder_without_init(target: str) -> Path | None:
    """Return the first folder of a dotted path that is a namespace
    package below the current folder, if it has one.
    """
    here = Path.cwd()
    for depth in range(1, target.count(".") + 1):
        folder = here.joinpath(*target.split(".")[:depth])
        if not folder.is_dir():
            return None
        if not (folder / "__init__.py").is_file():
            return folder.relative_to(here)
    return None


def _files_of(target: str) -> list[Path]:
    """Return the files of the packages and of the module of a dotted path;
    none if one is a namespace package.
    """
    places = [str(Path.cwd()), *sys.path]
    files = []
    for name in target.split(".")[:-1]:
        spec = PathFinder.find_spec(name, places)
        if spec is None:
            break  # an attribute of the module
        if spec.origin is None:
            return []
        files.append(Path(spec.origin))
        if spec.submodule_search_locations is None:
            break
        places = list(spec.submodule_search_locations)
    return files


def _is_of_a_run(file: Path, here: Path) -> bool:
    return any(
        is_run(folder) for folder in file.parents if folder != here and folder.is_relative_to(here)
    )
