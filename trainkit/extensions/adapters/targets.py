"""The modules that callbacks.lora names: each name must be that of one. peft itself overlooks a name
without a module if another one has some.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from trainkit.errors import ConfigError, did_you_mean

ALL_LINEAR = "all-linear"
_KINDS = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_OF_TRANSFORMERS = "Conv1D"  # a Linear whose matrix is turned
_SHOWN = 8
_KEY = "callbacks.lora"


def check_names(
    model: nn.Module,
    target_modules: str | Sequence[str],
    exclude_modules: Sequence[str],
    modules_to_save: Sequence[str],
) -> None:
    """Refuse names that are those of no module, before anything is replaced.

    Args:
        target_modules: "all-linear", a regular expression of whole names, or names and ends of
            names.
        exclude_modules: names and ends of names.
        modules_to_save: ends of names.

    Raises:
        ConfigError: names the setting, the nearest names, and the layers that there are.
    """
    names = [name for name, _ in model.named_modules() if name]
    adaptable = {
        name: module for name, module in model.named_modules() if name and _is_adaptable(module)
    }
    if not adaptable:
        kinds = ", ".join(kind.__name__ for kind in _KINDS)
        raise ConfigError(
            f"{_KEY}: {type(model).__name__} has no layer that peft adapts ({kinds},"
            f" {_OF_TRANSFORMERS} of transformers). Leave the callback out, or adapt another module:"
            f" {_KEY}.module=NAME."
        )
    if isinstance(target_modules, str):
        _check_pattern(model, target_modules, adaptable)
    else:
        if not target_modules:
            raise ConfigError(f"{_KEY}.target_modules is empty. {_there(adaptable)}")
        _check_list("target_modules", target_modules, model, adaptable)
    _check_list("exclude_modules", exclude_modules, model, adaptable)
    for name in modules_to_save:
        if not any(each.endswith(name) for each in names):
            raise _no_module("modules_to_save", name, model, names)


def check_replaced(plain: Mapping[str, nn.Module], replaced: Iterable[str]) -> None:
    """Refuse layers that cannot be adapted by themselves.

    Args:
        plain: the modules of the model, by name, as they were.
        replaced: those that have an adapter or a copy now.

    Raises:
        ConfigError: names the layer, and how to leave it out.
    """
    owners = Counter(
        id(parameter) for module in plain.values() for parameter in module._parameters.values()
    )
    for name in replaced:
        module = plain[name]
        parent = plain[name.rpartition(".")[0]]
        if isinstance(parent, nn.MultiheadAttention):
            raise ConfigError(
                f"{_KEY} would adapt '{name}', and nn.MultiheadAttention reads that layer's weight"
                " without calling it: the adapter would have no effect."
                f" {_without(name)}"
            )
        if isinstance(module, nn.MultiheadAttention):
            raise ConfigError(
                f"{_KEY} names '{name}', an nn.MultiheadAttention: peft would change its frozen"
                f" weights in each forward. {_without(name)}"
            )
        shared = [key for key, p in module.named_parameters() if owners[id(p)] > 1]
        if shared:
            raise ConfigError(
                f"{_KEY} names '{name}', which shares its {shared[0]} with another layer: adapted,"
                f" the two would differ. {_without(name)}"
            )


def _without(name: str) -> str:
    return (
        "Leave it out of target_modules and modules_to_save, or exclude it:"
        f" {_KEY}.exclude_modules=[{name.rpartition('.')[2]}]."
    )


def _check_pattern(model: nn.Module, pattern: str, adaptable: Mapping[str, nn.Module]) -> None:
    if pattern.lower() == ALL_LINEAR:
        if not any(_is_linear(module) for module in adaptable.values()):
            raise ConfigError(
                f"{_KEY}.target_modules is '{pattern}', and {type(model).__name__} has no Linear."
                f" {_there(adaptable)}"
            )
        return
    try:
        matches = [name for name in adaptable if re.fullmatch(pattern, name)]
    except re.error as error:
        raise ConfigError(
            f"{_KEY}.target_modules is '{pattern}', which is not a regular expression ({error})."
            f" Give '{ALL_LINEAR}', a list of names, or an expression of whole names."
        ) from error
    if not matches:
        near = did_you_mean(pattern, {name.rpartition(".")[2] for name in adaptable})
        raise ConfigError(
            f"{_KEY}.target_modules is the expression '{pattern}', which no layer's whole name"
            f" matches.{near} For ends of names give a list: target_modules=[{pattern}]."
            f" {_there(adaptable)}"
        )


def _check_list(
    key: str, given: Iterable[str], model: nn.Module, adaptable: Mapping[str, nn.Module]
) -> None:
    for name in given:
        if not any(each == name or each.endswith(f".{name}") for each in adaptable):
            if any(each == name or each.endswith(f".{name}") for each, _ in model.named_modules()):
                raise ConfigError(
                    f"{_KEY}.{key} names '{name}', which peft does not adapt. {_there(adaptable)}"
                )
            raise _no_module(key, name, model, adaptable)


def _no_module(key: str, name: str, model: nn.Module, known: Iterable[str]) -> ConfigError:
    ends = Counter(each.rpartition(".")[2] for each in known)
    shown = ", ".join(end for end, _ in ends.most_common(_SHOWN))
    near = did_you_mean(name, [*ends, *known])
    return ConfigError(
        f"{_KEY}.{key} names '{name}', and {type(model).__name__} has no such layer.{near}"
        f" Its layers' names end in {shown}{', ...' * (len(ends) > _SHOWN)}."
    )


def _there(adaptable: Mapping[str, nn.Module]) -> str:
    ends = Counter(name.rpartition(".")[2] for name in adaptable)
    shown = ", ".join(f"{end} ({count})" for end, count in ends.most_common(_SHOWN))
    return f"Layers that peft adapts are {shown}{', ...' * (len(ends) > _SHOWN)}."


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == _OF_TRANSFORMERS


def _is_adaptable(module: nn.Module) -> bool:
    return isinstance(module, _KINDS) or type(module).__name__ == _OF_TRANSFORMERS
