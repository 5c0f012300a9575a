"""format=peft: adapters alone, as a folder that peft puts on their base; written by the callback that
has replaced the Task's layers (callbacks=lora).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from trainkit.api.task import Task
from trainkit.errors import TaskError


def write(task: Task, args: tuple[Tensor, ...], path: Path) -> bool:
    """Write the folder; return True: it fits any batch size.

    Raises:
        TaskError: the Task has no adapters.
    """
    if task._layers_of is None:
        raise TaskError(
            f"{type(task).__name__} has no adapters, so format=peft cannot be written. Train it with"
            " callbacks=lora, or use format=safetensors."
        )
    path.mkdir()
    task._layers_of.save_pretrained(path)
    return True


def load(path: Path, task: Task, rebuilt: Task | None) -> Callable[..., Any]:
    """Return the forward of `rebuilt`, the plain Task, with the folder's adapters; without it that
    of the Task itself.
    """
    return task if rebuilt is None else task._layers_of.load_pretrained(path, rebuilt)
