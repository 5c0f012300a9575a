"""What is saved of a model."""

from __future__ import annotations

from torch import Tensor, nn

from trainkit.errors import TaskError


def whole_state(task: nn.Module) -> dict[str, Tensor]:
    """Return a Task's weights and buffers by name; the tensors share the task's memory.

    Raises:
        TaskError: its state_dict contains something else.
    """
    state: dict[str, Tensor] = task.state_dict()
    if strange := [name for name, value in state.items() if not hasattr(value, "data_ptr")]:
        raise TaskError(
            f"{type(task).__name__}.state_dict()['{strange[0]}'] is a {type(state[strange[0]]).__name__}; weights are tensors. "
            "Keep other things in on_save_checkpoint."
        )
    return state
