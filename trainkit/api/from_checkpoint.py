"""A Task from a checkpoint: its class called with the arguments that `save_hyperparameters` left in
the manifest.

The manifest holds plain values only (numbers, texts, and lists and mappings of them); others, as a
module, are given again.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from trainkit.api.task_hooks import TaskHooks
from trainkit.checkpoint.format import MANIFEST, load_extra, read_manifest
from trainkit.checkpoint.handed import Handed
from trainkit.checkpoint.mismatch import listed
from trainkit.checkpoint.places import local_copy
from trainkit.checkpoint.weights import compare, load_into, read_config, read_weights
from trainkit.console import info
from trainkit.errors import CheckpointError
from trainkit.safety.masking import MASK

_Module = TypeVar("_Module", bound=nn.Module)


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that JSON can hold; tuples become lists."""
    return {str(key): value for key, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def build_from(cls: type[_Module], path: str, strict: bool, given: Mapping[str, Any]) -> _Module:
    """Return `cls(**arguments)` with a checkpoint's weights.

    Args:
        cls: the Task's class.
        path: a checkpoint's folder or URL, or a file of weights.
        strict: whether all weights must match; else those that do not are printed.
        given: arguments; before those of the checkpoint.

    Raises:
        CheckpointError: it is no checkpoint, is damaged, does not fit, or lacks arguments; names
            them.
    """
    with local_copy(path) as local:
        saved = (
            _arguments_of(read_manifest(Path(local))) if (Path(local) / MANIFEST).is_file() else {}
        )
        weights = read_weights(local)
        config = read_config(local)
        extra = _extra_of(cls, Path(local))
    parameters = inspect.signature(cls).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments = {
        name: value for name, value in saved.items() if takes_any or name in parameters
    } | dict(given)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    hidden = [name for name, value in arguments.items() if name not in given and _is_hidden(value)]
    needed = [p.name for p in parameters.values() if p.kind in kinds and p.default is p.empty]
    lacking = [*hidden, *(name for name in needed if name not in arguments)]
    if lacking:
        shown = ", ".join(f"{name}=..." for name in lacking)
        raise CheckpointError(
            f"{path} does not hold the arguments {', '.join(lacking)} of {cls.__name__}: call"
            " save_hyperparameters() in its __init__ before training (it saves plain values, but"
            " no secrets and no values of the environment), or give them:"
            f" {cls.__name__}.load_from_checkpoint(path, {shown})."
        )
    task = cls(**arguments)
    make_model: Any = getattr(task, "_make_model", None)  # of a Task, which imports this file
    if make_model is not None:
        make_model()
    if extra is not None:
        handed = Handed(extra["extra"], extra["state"])
        handed["state_dict"] = weights
        task.on_load_checkpoint(handed)  # type: ignore[operator]
        weights = handed.split()[1] or {}
    differences: Any = getattr(task, "compare_config", lambda config: [])
    lines = compare(differences, config, path, strict)
    translate: Any = getattr(task, "translate_weights", dict)
    lines += load_into(task, translate(weights), path, strict)
    if lines:
        info(f"Weights from {path}, without those that do not match:\n{listed(lines)}")
    return task


def _extra_of(cls: type[nn.Module], folder: Path) -> dict[str, Any] | None:
    """Return what `load_extra` does, if the class reads it and the folder has it."""
    own = getattr(cls, "on_load_checkpoint", TaskHooks.on_load_checkpoint)
    return None if own is TaskHooks.on_load_checkpoint else load_extra(folder) or None


def _is_hidden(value: Any) -> bool:
    return isinstance(value, str) and (value == MASK or "${" in value)


def _arguments_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved hyper-parameters, and the plain arguments of the Task's config,
    if it was built from one.
    """
    node = (manifest.get("config") or {}).get("task") or {}
    own = {
        key: value
        for key, value in node.items()
        if not key.startswith("_") and not isinstance(value, Mapping)
    }
    return own | dict(manifest.get("hparams") or {})
