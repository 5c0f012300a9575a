"""A Task from a checkpoint: its class called with the arguments that `save_hyperparameters` left in
the manifest.

The manifest holds plain values only: numbers, texts, and lists, tuples and mappings of them. Others,
as a module, are given again; a line names those that are left to their defaults.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from trainkit.api.hyperparameters import Configured, HyperParameters
from trainkit.api.task_hooks import TaskHooks
from trainkit.arguments import unknown
from trainkit.checkpoint.format import MANIFEST, load_extra, read_manifest
from trainkit.checkpoint.handed import Handed
from trainkit.checkpoint.mismatch import listed
from trainkit.checkpoint.places import local_copy
from trainkit.checkpoint.weights import compare, load_into, read_config, read_weights
from trainkit.console import info
from trainkit.errors import CheckpointError, TaskError
from trainkit.extension import advice
from trainkit.safety.masking import MASK, is_secret, masked

_Module = TypeVar("_Module", bound=nn.Module)


def saved_arguments(task: Configured, secrets: Collection[str]) -> dict[str, Any]:
    """Return the entries of a manifest for a Task's saved arguments, with secrets masked.

    Returns:
        `hparams`: those that JSON can hold, tuples as lists; `hparams_exact`: Python's literals of
        those that JSON would change (tuples, numbers as keys); `hparams_left_out`: names of the
        others, without those that have their default; `hparams_of`: argument -> its entries, which
        were saved in its place.
    """
    own = task.hparams
    held = {str(key): value for key, value in own.items() if _is_plain(value)}
    exact = {
        key: repr(masked(value, secrets))
        for key, value in own.items()
        if _is_literal(value) and not is_secret(str(key))
    }
    defaults: dict[str, Any] = {}
    for base in reversed(type(task).__mro__):
        parameters = inspect.signature(base.__init__).parameters  # type: ignore[misc]
        defaults |= {name: parameter.default for name, parameter in parameters.items()}
    left_out = [k for k in own if k not in held | exact and own[k] is not defaults.get(k, inspect)]
    entries = {"hparams": masked(held, secrets), "hparams_exact": exact}
    entries |= {"hparams_left_out": left_out, "hparams_of": dict(task._saved_whole)}
    return {key: value for key, value in entries.items() if value}


def _is_literal(value: Any) -> bool:
    """Return whether JSON would change it, and `ast.literal_eval` makes it of its text."""
    try:
        return bool(json.loads(json.dumps(value)) != value == ast.literal_eval(repr(value)))
    except (TypeError, ValueError, SyntaxError):  # it holds more than literals
        return False


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
        TaskError: the class has no such argument.
    """
    with local_copy(path) as local:
        manifest = read_manifest(Path(local)) if (Path(local) / MANIFEST).is_file() else {}
        weights = read_weights(local)
        config = read_config(local)
        extra = _extra_of(cls, Path(local))
    parameters = inspect.signature(cls).parameters
    is_open = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    whole = {k: names for k, names in manifest.get("hparams_of", {}).items() if k in parameters}
    changed = {name: given[name] for name in given if name in set().union(*whole.values())}
    given = {name: given[name] for name in given if name not in changed or name in parameters}
    for name in given:
        if name not in parameters and (not is_open or advice("load_from_checkpoint", name)):
            raise TaskError(unknown(f"load_from_checkpoint: {name}", name, [*parameters]))
    saved = _arguments_of(manifest, whole, changed)
    known = {*saved, *manifest.get("hparams_left_out", ()), *whole}
    if not is_open:
        known &= parameters.keys()
    arguments = {name: saved[name] for name in saved if name in known} | dict(given)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    hidden = [name for name, value in arguments.items() if name not in given and _is_hidden(value)]
    needed = [p.name for p in parameters.values() if p.kind in kinds and p.default is p.empty]
    lacking = [*hidden, *(name for name in needed if name not in arguments)]
    if lacking:
        raise CheckpointError(
            f"{path} does not hold the arguments {', '.join(lacking)} of {cls.__name__}: call"
            " save_hyperparameters() in its __init__ before training (it saves plain values, but"
            " no secrets and no values of the environment), or give them:"
            f" {cls.__name__}.load_from_checkpoint(path, {'=..., '.join(lacking)}=...)."
        )
    if defaulted := ", ".join(sorted(known - arguments.keys())):
        info(
            f"{path} was made with other values of {defaulted} than the defaults of {cls.__name__},"
            " which are used now: it holds plain values only. Give them to load_from_checkpoint."
        )
    task = cls(**arguments)
    getattr(task, "_make_model", lambda: None)()  # of a Task, which imports this file
    if extra is not None:
        handed = Handed(extra["extra"], extra["state"])
        handed["state_dict"] = weights
        task.on_load_checkpoint(handed)  # type: ignore[operator]
        weights = handed.split()[1] or {}
    lines = compare(getattr(task, "compare_config", lambda config: []), config, path, strict)
    lines += load_into(task, getattr(task, "translate_weights", dict)(weights), path, strict)
    if lines:
        info(f"Weights from {path}, without those that do not match:\n{listed(lines)}")
    return task


def _extra_of(cls: type[nn.Module], folder: Path) -> dict[str, Any] | None:
    """Return what `load_extra` does, if the class reads it and the folder has it."""
    own = getattr(cls, "on_load_checkpoint", TaskHooks.on_load_checkpoint)
    return None if own is TaskHooks.on_load_checkpoint else load_extra(folder) or None


def _is_hidden(value: Any) -> bool:
    if isinstance(value, HyperParameters):
        return any(map(_is_hidden, value.values()))
    return isinstance(value, str) and (value == MASK or "${" in value)


def _arguments_of(
    manifest: Mapping[str, Any], whole: Mapping[str, list[str]], changed: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the saved hyper-parameters, and the plain arguments of the Task's config,
    if it was built from one. Those of `whole`, each saved by its entries, get all, with `changed`.
    """
    node = (manifest.get("config") or {}).get("task") or {}
    own = {k: v for k, v in node.items() if k[:1] != "_" and not isinstance(v, Mapping)}
    exact = {k: ast.literal_eval(v) for k, v in (manifest.get("hparams_exact") or {}).items()}
    saved = {**(manifest.get("hparams") or {}), **exact, **changed}
    entries = set().union(*whole.values())
    own |= {name: value for name, value in saved.items() if name not in entries}
    return own | {k: _by_attribute(saved) for k in whole if saved.keys() >= {*whole[k]}}


def _by_attribute(value: Any) -> Any:
    """Return mappings, on any level, as ones whose entries are attributes too: an argument may have
    been a namespace.
    """
    if not isinstance(value, Mapping):
        return value
    return HyperParameters({key: _by_attribute(item) for key, item in value.items()})
