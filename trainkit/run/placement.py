"""A Task's weights before training:
placed on this rank's device in their dtype and layout, and checked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.parameter import is_lazy

from trainkit.api.task import Task
from trainkit.device.precision import Precision
from trainkit.engine.base import Engine
from trainkit.errors import TaskError


def check_parameters(
    task: Task, optimizers: Sequence[torch.optim.Optimizer]
) -> list[torch.nn.Parameter]:
    """Return the task's parameters that no optimizer updates.

    Raises:
        TaskError: an optimizer updates a parameter that is not the task's: its gradient would not
            be summed over ranks.
    """
    own = set(task.parameters())
    optimized = {
        parameter
        for opt in optimizers
        for group in opt.param_groups
        for parameter in group["params"]
    }
    if strangers := optimized - own:
        shape = list(next(iter(strangers)).shape)
        raise TaskError(
            f"An optimizer updates {len(strangers)} parameters (one of shape {shape}) that are not"
            f" among {type(task).__name__}'s: ranks would drift apart. Keep modules as attributes,"
            " or in an nn.ModuleList."
        )
    return [parameter for parameter in task.parameters() if parameter not in optimized]


def place(task: Task, engine: Engine, precision: Precision, channels_last: bool) -> None:
    """Put the weights on this rank's device, in their dtype and layout.

    A buffer with elements that share memory (`expand`) is copied: it could not be written, as by a
    broadcast.

    Raises:
        TaskError: one has no shape yet, or, on several ranks, a buffer is sparse.
    """
    for name, buffer in task.named_buffers():
        if engine.ranks.world_size > 1 and buffer.layout is not torch.strided:
            raise TaskError(
                f"The buffer '{name}' of {type(task).__name__} is sparse, and ranks cannot send it"
                " to one another. Register its indices and values as two buffers and put them"
                " together in forward(), or keep it dense."
            )
    for name, parameter in task.named_parameters():
        if engine.ranks.world_size > 1 and is_lazy(parameter):
            raise TaskError(
                f"'{name}' of {type(task).__name__} has no shape yet (a lazy module), so ranks"
                " cannot agree on it. Run a batch through the model in __init__ or setup(), or"
                " give the module its sizes."
            )
    for module in task.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.layout is torch.strided and any(
                n > 1 and step == 0 for n, step in zip(buffer.shape, buffer.stride(), strict=True)
            ):
                setattr(module, name, buffer.clone(memory_format=torch.contiguous_format))
    precision.convert(task)
    # they get memory when they are split
    if any(parameter.is_meta for parameter in task.parameters()):
        task._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(engine.device))  # type: ignore[no-untyped-call]
    else:
        task.to(engine.device)
    if channels_last:
        task.to(memory_format=torch.channels_last)
