"""Allow-list of the objects that a config may name; checks the name first, then the object.

A config selects the code that runs, so a foreign config is foreign code. Allowed are the packages of trainkit that are meant
for configs, the recipes, torch's optimizers and schedulers, torchvision's models and transforms, and modules in the current
folder or named with `trust=[...]` on the command line. An alias does not help: the object's own module must be on the list
too.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from trainkit.errors import ConfigError

ALLOWED = (
    "trainkit.callbacks",
    "trainkit.data",
    "trainkit.engine",
    "trainkit.launch.kubernetes.launcher",
    "trainkit.launch.ray.launcher",
    "trainkit.launch.slurm.launcher",
    "trainkit.loggers",
    "trainkit.optim",
    "trainkit.report.resume.recorder",
    "trainkit.report.scaling.allreduce_costs",
    "recipes",
    "torch.optim",
    "torchvision.models",
    "torchvision.transforms",
)
_KINDS = {
    "torch.optim.optimizer.Optimizer",
    "torch.optim.lr_scheduler.LRScheduler",
    "torch.nn.modules.module.Module",
}


def check_name(target: str, key: str, trusted: Sequence[str]) -> None:
    """Refuse a dotted path that is not on the list; imports nothing.

    Raises:
        ConfigError: it is not.
    """
    parts = target.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ConfigError(f"{key} is '{target}'; it must be the dotted path of a class or function, as my_task.MyTask.")
    if any(part.startswith("_") for part in parts) or not _listed(target, trusted):
        raise ConfigError(_refusal(target, key))


def locate(target: str, key: str, trusted: Sequence[str]) -> Any:
    """Import and return the object of a dotted path, after checking the name and the object.

    Raises:
        ConfigError: it is not on the list, does not exist, or may not be called by a config.
    """
    check_name(target, key, trusted)
    found = _import(target.split("."))
    if found is None:
        raise ConfigError(f"{key} is '{target}', which does not exist.")
    if not (inspect.isclass(found) or inspect.isroutine(found)):
        raise ConfigError(f"{key} is '{target}', which is no class or function.")
    real = f"{found.__module__}.{found.__qualname__}"
    if not _listed(real, trusted) or not _fits(found, real, trusted):
        raise ConfigError(_refusal(target, key) + (f" (It is {real}.)" if real != target else ""))
    return found


def _import(parts: list[str]) -> Any:
    for i in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:i])
        try:
            found: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
                continue
            raise
        for part in parts[i:]:
            found = getattr(found, part, None)
        return found
    return None


def _fits(found: Any, real: str, trusted: Sequence[str]) -> bool:
    """Return whether the object is of the kind that its package is on the list for.

    torch and torchvision contain functions that load pickles or fetch from a URL; only their optimizers, schedulers,
    modules, transforms and registered models may be called. A function inside a class may never be called.
    """
    if not inspect.isclass(found) and ("." in found.__qualname__ or not inspect.isfunction(found)):
        return False
    if any(real.startswith(prefix + ".") for prefix in trusted) or not real.startswith(("torch.", "torchvision.")):
        return True
    if inspect.isfunction(found):
        models = importlib.import_module("torchvision.models")
        return any(models.get_model_builder(name) is found for name in models.list_models())
    names = {f"{base.__module__}.{base.__qualname__}" for base in found.__mro__}
    return bool(names & _KINDS) or real.startswith("torchvision.transforms.")


def _listed(path: str, trusted: Sequence[str]) -> bool:
    if any(path == prefix or path.startswith(prefix + ".") for prefix in (*ALLOWED, *trusted)):
        return True
    return is_users_own(path.split(".")[0])


def is_users_own(top: str) -> bool:
    """Return whether a top-level name is imported from the current folder, and is no installed package."""
    if top in sys.stdlib_module_names or top == "trainkit":
        return False
    spec = PathFinder.find_spec(top, [str(Path.cwd()), *sys.path])
    if spec is None:
        return False
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or [])
    here = Path.cwd().resolve()
    return bool(places) and all(
        Path(place).resolve().is_relative_to(here) and "site-packages" not in Path(place).parts for place in places
    )


def _refusal(target: str, key: str) -> str:
    return (
        f"{key} is '{target}', which configs may not call. Allowed: {', '.join(ALLOWED)}, and modules in the current "
        f"folder. If you trust it, allow it on the command line: trust=[{target.rpartition('.')[0]}]"
    )
