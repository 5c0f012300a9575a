"""Blocks: the repeated modules of a model, and modules by name;
what is gathered, or computed again, one at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from trainkit.errors import ConfigError

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_SHOWN = 8


def blocks_of(model: nn.Module, names: Sequence[str] | None, key: str) -> list[nn.Module]:
    """Return the modules of these names, or the repeated blocks; inner ones before those that hold
    them.

    Args:
        names: of modules ("model.blocks.0"), or of their classes ("Block"). None:
            `repeated_blocks`.
        key: of the setting, for errors.

    Raises:
        ConfigError: a name is that of no module of the model and of no class of one.
    """
    if names is None:
        return list(repeated_blocks(model))
    wanted = set(names)
    chosen = [
        (name, module)
        for name, module in model.named_modules()
        if name and {name, type(module).__name__} & wanted
    ]
    unknown = sorted(
        wanted - {name for name, _ in chosen} - {type(module).__name__ for _, module in chosen}
    )
    if unknown:
        classes = Counter(
            type(module).__name__
            for name, module in model.named_modules()
            if name and _has_weights(module)
        )
        shown = ", ".join(f"{name} ({count})" for name, count in classes.most_common(_SHOWN))
        raise ConfigError(
            f"{key} names '{unknown[0]}', which is no module of {type(model).__name__} and no class"
            f" of one. Its classes with weights are {shown}."
        )
    return [module for _, module in reversed(chosen)]


def repeated_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of each list of modules that holds several of one class, as a transformer's
    layers; one of several lists once.

    Single layers (a Linear in a Sequential) are too small: a block has children of its own.
    """
    seen = set[nn.Module]()
    for module in model.modules():
        if not isinstance(module, _LISTS):
            continue
        kinds = Counter(type(child) for child in module.children() if _has_weights(child))
        for child in module.children():
            if (
                kinds[type(child)] > 1
                and any(True for _ in child.children())
                and not isinstance(child, _LISTS)
                and child not in seen
            ):
                seen.add(child)
                yield child


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
