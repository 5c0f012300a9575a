"""Weights that do not fit a model, in words: names and shapes, as many as are read at a glance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from trainkit.errors import CheckpointError

_SHOWN = 6
Shape = Sequence[int]
T = TypeVar("T")


def mismatches(there: Mapping[str, Shape], here: Mapping[str, Shape]) -> list[str]:
    """Return a line for each name that only one side has, and for each shape that differs.

    Args:
        there: names and shapes of a checkpoint.
        here: those of the model.
    """
    lines = [
        f"missing in the checkpoint: {name} {list(here[name])}"
        for name in sorted(here.keys() - there.keys())
    ]
    lines += [
        f"not in the model: {name} {list(there[name])}"
        for name in sorted(there.keys() - here.keys())
    ]
    both = sorted(here.keys() & there.keys())
    lines += [
        _other_shape(name, there[name], here[name])
        for name in both
        if list(there[name]) != list(here[name])
    ]
    return lines


def uncompiled(name: str) -> str:
    """Return a name without what torch.compile adds to it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def under_names_of(here: Iterable[str], weights: Mapping[str, T]) -> dict[str, T]:
    """Return weights under the model's names: a part that torch.compile returned, in one of them
    alone, has others.
    """
    names = {*here}
    plain = {uncompiled(name): name for name in names}
    return {
        name if name in names else plain.get(uncompiled(name), name): value
        for name, value in weights.items()
    }


def unfit(folder: Path, lines: Sequence[str]) -> CheckpointError:
    """Return the error for a checkpoint's weights, with what to do."""
    are_later = all(line.startswith("not in the model") for line in lines)
    advice = (
        " Add modules in __init__, setup or configure_model: other hooks run later." * are_later
    )
    return CheckpointError(
        f"The weights in {folder} do not fit this model:\n{listed(lines)}\nResume with the Task and"
        " the settings that wrote them, or start a new run from those that fit:"
        f" init_weights={folder} strict=false.{advice}"
    )


def listed(lines: Sequence[str]) -> str:
    """Return the first lines, indented, and the number of the others."""
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n".join(f"  {line}" for line in [*lines[:_SHOWN], *more])


def _other_shape(name: str, there: Shape, here: Shape) -> str:
    return f"other shape: {name} is {list(there)} in the checkpoint and {list(here)} in the model"
