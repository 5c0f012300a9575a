"""format=safetensors: only the weights, as in a checkpoint; a tensor with several names is stored
once.

`run_with` is the check of all formats that hold weights only: the Task's own forward with them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.func import functional_call

from trainkit.api.task import Task
from trainkit.checkpoint.files import write_safetensors
from trainkit.checkpoint.format import find_aliases, read_safetensors
from trainkit.checkpoint.weights import load_into
from trainkit.errors import TaskError


def write(task: Task, args: tuple[Tensor, ...], path: Path) -> bool:
    """Write the task's state_dict; return True: it fits any batch size.

    Raises:
        TaskError: the state_dict is empty, or holds more than tensors; or the Task has adapters.
        OSError: the disk fails.
    """
    refuse_adapters(task, "safetensors")
    state = task.state_dict()
    others = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if others or not state:
        what = f"holds '{others[0]}', which is no tensor" if others else "has no weights"
        raise TaskError(
            f"{type(task).__name__} {what}; format=safetensors writes tensors. Use"
            " format=torch_export."
        )
    tensors, aliases = find_aliases(state)
    # none may share memory
    write_safetensors(path, {name: tensor.clone() for name, tensor in tensors.items()}, aliases)
    return True


def refuse_adapters(task: Task, form: str) -> None:
    """Raise TaskError if a Task has adapters beside its weights: its state_dict holds them alone."""
    if task._layers_of is not None:
        raise TaskError(
            f"{type(task).__name__} has adapters, which are merged in an export of a checkpoint: python"
            f" -m trainkit export ckpt_path=last format={form}. format=peft writes them alone."
        )


def load(path: Path, task: Task, rebuilt: Task | None) -> Callable[..., Any]:
    """Return the forward with the file's weights; see `run_with`."""
    state = read_safetensors(path)
    assert sorted(state) == sorted(task.state_dict())
    return run_with(state, str(path), task, rebuilt)


def run_with(
    state: dict[str, Tensor], source: str, task: Task, rebuilt: Task | None
) -> Callable[..., Any]:
    """Return the forward of `rebuilt` with weights, or the task's own forward with them; the task
    is unchanged.

    Raises:
        CheckpointError: the weights, which are those of `source`, do not fit.
    """
    if rebuilt is None:
        return lambda *args: functional_call(task, state, args)
    load_into(rebuilt, state, source)
    return rebuilt.eval()
