"""Reads weights: a checkpoint of trainkit, safetensors, a folder of transformers, a file of
torch.save, of Lightning.

read_weights   file or folder -> {name: tensor}; runs no code of the file
read_config    what transformers writes beside them: of which model they are
compare        that with the Task that loads them
load_into      {name: tensor} -> model, all of them or (strict=False) those that match by name and shape
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.checkpoint import safe_unpickler
from trainkit.checkpoint.format import MANIFEST, STRANGE_FILE, read_safetensors, read_state, verify
from trainkit.checkpoint.mismatch import listed, uncompiled, under_names_of
from trainkit.device.shards import local_of
from trainkit.errors import CheckpointError
from trainkit.safety.untrusted import check_archive

_LEGAL = (
    "a checkpoint's folder, a .safetensors file, a folder of transformers (it holds a"
    " model.safetensors, or its index and files), a state_dict saved by torch.save, or a Lightning"
    " checkpoint (.ckpt)"
)
_OF_TRANSFORMERS = "model.safetensors"
_INDEX = "model.safetensors.index.json"  # of weights in several files
# the keys of a state_dict in files of training scripts; the last is that of torch's tutorial
_WRAPPERS = ("state_dict", "model", "model_state_dict")
_SHOWN = 6
_BROKEN = (*STRANGE_FILE, OSError)


def read_weights(path: str) -> dict[str, Tensor]:
    """Return the weights of a file or a folder, by name, on the CPU.

    Names of a file lose `_orig_mod.` (torch.compile) and, if all have it, a leading `module.`
    (DistributedDataParallel).

    Args:
        path: a checkpoint's folder, a `.safetensors` file, a folder of transformers'
            `save_pretrained` (with a `model.safetensors`, or an index of several), or a file of
            torch.save: a state_dict, alone or under "state_dict" or "model", as in a Lightning
            checkpoint. Objects of other classes beside it are ignored.

    Raises:
        CheckpointError: it is none of these, damaged, or has no weights.
    """
    place = Path(path)
    if (place / MANIFEST).is_file():
        verify(place)
        return read_state(place)
    if (place / _OF_TRANSFORMERS).is_file():
        place = place / _OF_TRANSFORMERS
    elif (place / _INDEX).is_file():
        return _plain_names(_read_shards(place), path)
    if not place.is_file():
        what = (
            f"a folder without a {MANIFEST} or a {_OF_TRANSFORMERS}"
            if place.is_dir()
            else "no regular file" * place.exists() or "not there"
        )
        raise CheckpointError(f"{path} is {what}; it must be {_LEGAL}.")
    state = (
        read_safetensors(place)
        if place.suffix == ".safetensors"
        else _state_dict(_load(place), path)
    )
    if not state:
        raise CheckpointError(f"{path} has no weights; it must be {_LEGAL}.")
    return _plain_names(state, path)


def compare(
    differences: Callable[[Mapping[str, Any]], list[str]],
    config: Mapping[str, Any],
    source: str,
    strict: bool = True,
) -> list[str]:
    """Return how a Task differs from the config beside weights, one line each; empty if strict.

    Args:
        differences: Task.compare_config.
        config: see `read_config`.
        source: the weights' origin, for errors.
        strict: nothing may differ.

    Raises:
        CheckpointError: something differs, if strict.
    """
    lines = differences(config)
    if lines and strict:
        raise CheckpointError(
            f"The weights of {source} would compute something else here than where they come"
            f" from:\n{listed(lines)}\nstrict=false loads them nevertheless."
        )
    return lines


def read_config(path: str) -> dict[str, Any]:
    """Return the config.json beside weights of transformers, a folder's or its file's; empty if there
    is none.

    Raises:
        CheckpointError: it is damaged.
    """
    folder = Path(path)
    if folder.name == _OF_TRANSFORMERS:
        folder = folder.parent
    file = folder / "config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
    return config if isinstance(config, dict) else {}


def _read_shards(folder: Path) -> dict[str, Tensor]:
    """Return the weights of all files that a folder's index names.

    Raises:
        CheckpointError: the index is damaged, names a file elsewhere, or a file or a weight of it is
            missing.
    """
    index = folder / _INDEX
    try:
        files = json.loads(index.read_bytes())["weight_map"]
        names = sorted({*files.values()})
        is_plain = all(isinstance(name, str) and Path(name).name == name for name in names)
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{index} is not an index of transformers, or a damaged one ({type(error).__name__})."
        ) from error
    if not names or not is_plain:
        raise CheckpointError(
            f"{index} must name files of its own folder; it names {names[:_SHOWN]}."
        )
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise CheckpointError(
            f"{index} names {len(names)} files, of which {', '.join(absent[:_SHOWN])} are missing."
            " Copy the whole folder."
        )
    state: dict[str, Tensor] = {}
    for name in names:
        state |= read_safetensors(folder / name)
    lost = sorted({*files} - {*state})
    if lost:
        raise CheckpointError(
            f"{index} names {len(lost)} weights that its files lack: {', '.join(lost[:_SHOWN])}."
            " Copy the whole folder."
        )
    return state


def _load(path: Path) -> Any:
    """Return the contents of a file of torch.save;
    objects that torch considers unsafe become stand-ins.
    """
    check_archive(path.resolve())
    with warnings.catch_warnings():
        # of torch.load, about old formats: real faults become errors
        warnings.simplefilter("ignore")
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            refused = error
        except _BROKEN as error:
            raise CheckpointError(_unreadable(path, error)) from error
        # TorchScript has failed above; for files other than zip torch.load could do more than
        # unpickle.
        with path.open("rb") as file:
            if file.read(4) != b"PK\x03\x04":
                raise CheckpointError(_unreadable(path, refused)) from refused
        try:
            return torch.load(
                path, map_location="cpu", weights_only=False, pickle_module=safe_unpickler
            )
        except _BROKEN as error:
            raise CheckpointError(_unreadable(path, error)) from error


def _unreadable(path: Path, error: BaseException) -> str:
    return f"{path} cannot be read: it is damaged, or not {_LEGAL} ({_first_line(error)})."


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def _state_dict(content: Any, path: str) -> dict[str, Tensor]:
    if not isinstance(content, dict):
        kind = f"{type(content).__module__}.{type(content).__qualname__}"
        raise CheckpointError(
            f"{path} holds one object ({kind}); it must hold a state_dict:"
            " torch.save(model.state_dict(), ...)."
        )
    by_name = next(
        (content[key] for key in _WRAPPERS if isinstance(content.get(key), dict)), content
    )
    state = {}
    for name, value in dict.items(by_name):
        if not isinstance(name, str) or not isinstance(value, Tensor) or value.is_meta:
            keys = ", ".join(sorted(str(key) for key in content)[:_SHOWN])
            raise CheckpointError(
                f"{path} holds {type(value).__module__}.{type(value).__qualname__} under '{name}',"
                " which is no tensor. It must be a state_dict, alone or under one of the keys"
                f" {', '.join(_WRAPPERS)}; the file has {keys}."
            )
        state[name] = value.detach()
    return state


def _plain_names(state: Mapping[str, Tensor], path: str) -> dict[str, Tensor]:
    """Remove the name parts added by torch.compile and DistributedDataParallel."""
    split = {name: uncompiled(name).split(".") for name in state}
    wrapped = all(len(parts) > 1 and parts[0] == "module" for parts in split.values())
    plain: dict[str, Tensor] = {}
    for name, parts in split.items():
        short = ".".join(parts[wrapped:])
        if short in plain:
            raise CheckpointError(
                f"{path} has two tensors for '{short}', one of them as '{name}'. Save"
                " model.state_dict() once."
            )
        plain[short] = state[name]
    return plain


def load_into(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    source: str,
    strict: bool = True,
    fill: Callable[[Tensor, Tensor], None] | None = None,
) -> list[str]:
    """Load weights into a model, cast to its types; an error leaves the model unchanged. A part of
    either that torch.compile returned fits one that it did not.

    Args:
        model: parameters and buffers that share one tensor need only one of their names among the
            weights.
        weights: name -> tensor, as `read_weights` returns them.
        source: their origin, for errors.
        strict: all must match; false loads those that match by name and shape.
        fill: fills what this rank holds of a tensor from a whole value (Engine.fill), if ranks hold
            parts of the model.

    Returns:
        The mismatches, one line each, sorted; empty if strict.

    Raises:
        CheckpointError: nothing matches, or, if strict, not everything.
    """
    here = {
        name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)
    }
    if all(uncompiled(name).startswith("module.") for name in here) and not any(
        uncompiled(name).startswith("module.") for name in weights
    ):
        # its own name, not a wrapper's
        weights = {f"module.{name}": tensor for name, tensor in weights.items()}
    weights = under_names_of(here, weights)
    fitting = {
        name: tensor
        for name, tensor in weights.items()
        if name in here and tensor.shape == here[name].shape
    }
    lines = sorted(_mismatches(here, weights, fitting))
    name = type(model).__name__
    if not fitting:
        raise CheckpointError(
            f"Nothing in {source} fits {name}, by name and"
            f" shape:\n{listed(lines)}{_hint(here, weights)}"
        )
    if strict and lines:
        raise CheckpointError(
            f"{source} does not fit {name}:\n{listed(lines)}\nstrict=false loads the matching"
            " weights."
        )
    if fill is None:
        model.load_state_dict(fitting, strict=False)
    else:
        for name, tensor in fitting.items():
            fill(here[name].detach(), tensor)
    return lines


def _mismatches(
    here: Mapping[str, Tensor], there: Mapping[str, Tensor], fitting: Mapping[str, Tensor]
) -> Iterator[str]:
    loaded = {_place(here[name]): name for name in fitting}
    for name, tensor in here.items():
        if name not in there and _place(tensor) not in loaded:
            yield f"missing in the file: {name} {list(tensor.shape)}"
        first = loaded.get(_place(tensor), name)
        if name in fitting and first != name and not torch.equal(there[name], there[first]):
            yield (
                f"one tensor in the model, two in the file: {name} and {first} {list(tensor.shape)}"
            )
    for name, tensor in there.items():
        if name not in here:
            yield f"not in the model: {name} {list(tensor.shape)}"
        elif name not in fitting:
            yield (
                f"other shape: {name} is {list(tensor.shape)} in the file and"
                f" {list(here[name].shape)} in the model"
            )


def _place(tensor: Tensor) -> Any:
    """Return a key that is equal only for the same tensor."""
    part = local_of(tensor)
    return (
        (part.device, part.data_ptr(), part.dtype, part.shape, part.stride())
        if part.numel()
        else id(tensor)
    )


def _hint(here: Mapping[str, Tensor], there: Mapping[str, Tensor]) -> str:
    first = next(iter(there), "")
    part = min(
        (name.removesuffix(f".{first}") for name in here if name.endswith(f".{first}")), default=""
    )
    hint = (
        f"\nThe names are those of its part '{part}': load them into that, or save them with"
        f" '{part}.' in front."
    )
    return hint if part else ""
