"""format=safetensors: only the weights, as in a checkpoint; a tensor with several names is stored once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.func import functional_call

from trainkit.api.task import Task
from trainkit.checkpoint.format import find_aliases, read_safetensors, write_safetensors
from trainkit.checkpoint.weights import load_into
from trainkit.errors import TaskError


def write(task: Task, args: tuple[Tensor, ...], path: Path) -> bool:
    """Write the task's state_dict; return True: it fits any batch size.

    Raises:
        TaskError: the state_dict is empty, or holds more than tensors.
        OSError: the disk fails.
    """
    state = task.state_dict()
    others = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if others or not state:
        what = f"holds '{others[0]}', which is no tensor" if others else "has no weights"
        raise TaskError(f"{type(task).__name__} {what}; format=safetensors writes tensors. Use format=torch_export.")
    tensors, aliases = find_aliases(state)
    write_safetensors(path, {name: tensor.clone() for name, tensor in tensors.items()}, aliases)  # none may share memory
    return True


def load(path: Path, task: Task, rebuilt: Task | None) -> Callable[..., Any]:
    """Return the forward of `rebuilt` with the file's weights, or the task's own forward with them; the task is unchanged.

    Raises:
        CheckpointError: the weights do not fit.
    """
    state = read_safetensors(path)
    assert sorted(state) == sorted(task.state_dict())
    if rebuilt is None:
        return lambda *args: functional_call(task, state, args)
    load_into(rebuilt, state, str(path))
    return rebuilt.eval()
