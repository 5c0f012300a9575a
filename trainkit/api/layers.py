"""Callbacks that replace layers of a Task (role "layers"), as adapters do: once its layers are made,
before weights are placed, loaded or split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from trainkit.api.task import Task
from trainkit.errors import ConfigError

# runs a function on rank 0, and returns its value on all ranks (Collectives.run_on_main)
OnMain = Callable[[Callable[[], Any]], Any]


class LayerChange(Protocol):
    """What a callback of the role "layers" has; a Task takes one at most.

    change_layers   replaces layers, on all ranks alike
    check_base      refuses weights of a checkpoint that were trained beside others than the Task's
    fold            the plain layers again, with what was trained summed into their weights
    save_pretrained what was trained, as a folder for the library that the layers are of
    load_pretrained such a folder, on a plain Task of the same kind; returns its forward

    Attributes:
        what_weights_are: a sentence for weights of a file that do not fit the changed Task.
    """

    what_weights_are: str

    def change_layers(self, task: Task, on_main: OnMain) -> None: ...
    def check_base(self, task: nn.Module) -> None: ...
    def fold(self, task: Task) -> None: ...
    def save_pretrained(self, folder: str | Path) -> None: ...
    def load_pretrained(self, folder: Path, task: Task) -> Callable[..., Any]: ...


def change_layers(task: Task, changes: Sequence[LayerChange], on_main: OnMain) -> None:
    """Let a callback replace the Task's layers, unless it has.

    Raises:
        ConfigError: there are two, or another one has replaced them.
    """
    for change in changes:
        if task._layers_of is not None and task._layers_of is not change:
            own, kind = type(task).__name__, type(change).__name__
            raise ConfigError(
                f"{kind} would replace layers of {own}, and another {type(task._layers_of).__name__}"
                f" has replaced them. Pass that one again, or a new {own}."
            )
        if task._layers_of is None:
            change.change_layers(task, on_main)
            task._layers_of = change
