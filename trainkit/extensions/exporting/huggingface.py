"""format=huggingface: a folder that `from_pretrained` of transformers opens: config.json and
model.safetensors.

The Task writes it itself, in `export_huggingface(folder)`, and reads its names back in
`translate_weights`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from trainkit.api.task import Task
from trainkit.checkpoint.weights import read_weights
from trainkit.errors import TaskError
from trainkit.extensions.exporting.weights import refuse_adapters, run_with


def writer_of(task: Task) -> Callable[[Path], None]:
    """Return the Task's method that writes the folder.

    Raises:
        TaskError: it has none.
    """
    export = getattr(task, "export_huggingface", None)
    if not callable(export):
        raise TaskError(
            f"{type(task).__name__} has no export_huggingface(), so format=huggingface cannot be"
            " written. Give it a method export_huggingface(folder) that writes config.json and"
            " model.safetensors, as recipes.language_model.LanguageModel has; or use"
            " format=safetensors."
        )
    writer: Callable[[Path], None] = export
    return writer


def write(task: Task, args: tuple[Tensor, ...], path: Path) -> bool:
    """Let the Task write the folder; return True: it fits any batch size.

    Raises:
        TaskError: the Task has no `export_huggingface`, or has adapters.
    """
    export = writer_of(task)
    refuse_adapters(task, "huggingface")
    path.mkdir()
    export(path)
    return True


def load(path: Path, task: Task, rebuilt: Task | None) -> Callable[..., Any]:
    """Return the forward with the folder's weights,
    as `init_weights` would load them; see `run_with`.
    """
    return run_with(task.translate_weights(read_weights(str(path))), str(path), task, rebuilt)
