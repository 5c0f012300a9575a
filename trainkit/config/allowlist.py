"""Allow-list of the objects that a config may name; checks the name first, then the object.

A config selects the code that runs, so a foreign config is foreign code. Allowed are the packages
of trainkit that are meant for configs, what extensions bring, the recipes, torch's optimizers and
schedulers, torchvision's models and transforms, the user's own modules (users_code.py), and modules
named with `trust=[...]` on the command line. An alias does not help: the object's own module must
be on the list too.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from trainkit import extension
from trainkit.config.users_code import (
    folder_without_init,
    is_shipped,
    is_there,
    is_users_own,
    module_of,
)
from trainkit.errors import ConfigError, did_you_mean

ALLOWED = (
    "trainkit.callbacks",
    "trainkit.data",
    "trainkit.engine",
    "trainkit.launch",
    "trainkit.loggers",
    "trainkit.optim",
    "recipes",
    "torch.optim",
    "torchvision.models",
    "torchvision.transforms",
)
_LAUNCHER = "trainkit.launch.job_launcher.JobLauncher"
_KINDS = {
    "torch.optim.optimizer.Optimizer",
    "torch.optim.lr_scheduler.LRScheduler",
    "torch.nn.modules.module.Module",
}


def check_name(
    target: str, key: str, trusted: Sequence[str], named: Collection[str] | None = None
) -> None:
    """Refuse a dotted path that is not on the list; imports nothing.

    Args:
        target: the dotted path.
        key: of the config.
        trusted: modules of `trust=[...]`.
        named: if the config is that of a run, the only modules of the user's own that it may name
            (named_by_user).

    Raises:
        ConfigError: it is not.
    """
    parts = target.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ConfigError(
            f"{key} is '{target}'; it must be the dotted path of a class or function, as"
            " my_task.MyTask."
        )
    if any(part.startswith("_") for part in parts) or not _listed(target, trusted):
        raise ConfigError(_refusal(target, key))
    shipped = (prefix for prefix in ALLOWED if prefix != "recipes")
    is_given = target in extension.targets() or _is_below(target, (*shipped, *trusted))
    if (
        named is not None
        and not is_given
        and module_of(target) not in named
        and not is_shipped(target)
    ):
        raise ConfigError(
            f"{key} is '{target}' in the config of a run, whose folder may come from anyone, and"
            f" neither this command nor a file of your conf/ names the module {module_of(target)}."
            f" If it is your own, say so on the command line: trust=[{module_of(target)}]"
        )


def locate(target: str, key: str, trusted: Sequence[str]) -> Any:
    """Import and return the object of a dotted path, after checking the name and the object.

    Raises:
        ConfigError: it is not on the list, does not exist, or may not be called by a config.
    """
    check_name(target, key, trusted)
    target_object = _import(target.split("."))
    if target_object is None:
        raise ConfigError(f"{key} is '{target}', which does not exist.")
    if not (inspect.isclass(target_object) or inspect.isroutine(target_object)):
        raise ConfigError(f"{key} is '{target}', which is no class or function.")
    real = f"{target_object.__module__}.{target_object.__qualname__}"
    if not _listed(real, trusted) or not _fits(target_object, real, trusted):
        raise ConfigError(_refusal(target, key) + (f" (It is {real}.)" if real != target else ""))
    return target_object


def _import(parts: list[str]) -> Any:
    for i in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:i])
        try:
            value: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
                continue
            raise
        for part in parts[i:]:
            value = getattr(value, part, None)
        return value
    return None


def _fits(value: Any, real: str, trusted: Sequence[str]) -> bool:
    """Return whether the object is of the kind that its package is on the list for.

    torch and torchvision contain functions that load pickles or fetch from a URL; only their
    optimizers, schedulers, modules, transforms and registered models may be called. trainkit.launch
    runs commands; only its launchers may be called. A function inside a class may never be called.
    """
    if not inspect.isclass(value) and ("." in value.__qualname__ or not inspect.isfunction(value)):
        return False
    limited = ("torch.", "torchvision.", "trainkit.launch.")
    if any(real.startswith(prefix + ".") for prefix in trusted) or not real.startswith(limited):
        return True
    if inspect.isfunction(value) and real.startswith("torch"):
        models = importlib.import_module("torchvision.models")
        return any(models.get_model_builder(name) is value for name in models.list_models())
    names = {f"{base.__module__}.{base.__qualname__}" for base in getattr(value, "__mro__", ())}
    if real.startswith("trainkit.launch."):
        return _LAUNCHER in names
    return bool(names & _KINDS) or real.startswith("torchvision.transforms.")


def _listed(path: str, trusted: Sequence[str]) -> bool:
    return (
        path in extension.targets() or _is_below(path, (*ALLOWED, *trusted)) or is_users_own(path)
    )


def _is_below(path: str, prefixes: Sequence[str]) -> bool:
    return any(path == prefix or path.startswith(prefix + ".") for prefix in prefixes)


def _refusal(target: str, key: str) -> str:
    if text := extension.advice("_target_", target):
        return f"{key} is '{target}'{text}"
    folder = folder_without_init(target)
    if not is_there(root := target.partition(".")[0]):
        near = did_you_mean(root, (file.stem for file in Path.cwd().glob("*.py")))
        return (
            f"{key} is '{target}', and there is no module {root}.{near} Run the command in the"
            f" folder of {root}.py (this is {Path.cwd()}), or correct the name."
        )
    hint = (
        f" ({folder} has no __init__.py, and only packages that have one count as yours.)"
        if folder
        else ""
    )
    return (
        f"{key} is '{target}', which configs may not call. Allowed: {', '.join(ALLOWED)}, what"
        " extensions bring, and your modules in the current folder, but none in the folder of a"
        f" run.{hint} If you trust it, allow it on the command line: trust=[{module_of(target)}]"
    )
