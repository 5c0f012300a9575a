"""What a Task may ask of its run, and the small methods of LightningModule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainkit.api.view import RunView
from trainkit.errors import TaskError

_GATHERED = (
    "A loss that compares samples of all ranks: gather the others' features without gradients, put"
    " this rank's own in their place, and return the loss of this rank's samples."
)


class InRun:
    """Part of Task; `parameters` is nn.Module's, `trainer` Configured's."""

    parameters: Callable[..., Iterator[nn.Parameter]]

    if TYPE_CHECKING:

        @property
        def trainer(self) -> RunView:
            """The run in progress."""

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        first = next(self.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return next((parameter.dtype for parameter in self.parameters()), torch.get_default_dtype())

    @property
    def global_rank(self) -> int:
        """This rank."""
        return self.trainer.global_rank

    @property
    def local_rank(self) -> int:
        """This rank's number on its host."""
        return self.trainer.engine.ranks.local_rank

    @property
    def global_step(self) -> int:
        """Optimizer steps taken."""
        return self.trainer.global_step

    @property
    def loggers(self) -> list[Any]:
        """The run's loggers."""
        return self.trainer.loggers

    @property
    def logger(self) -> Any:
        """The first of them, or None."""
        return next(iter(self.loggers), None)

    @property
    def current_epoch(self) -> int:
        """The epoch in progress, from 0."""
        return self.trainer.current_epoch

    def print(self, *values: Any, **options: Any) -> None:
        """Print on rank 0 only."""
        if self.trainer.is_global_zero:
            print(*values, **options)

    def all_gather(self, data: Any, group: None = None, sync_grads: bool = False) -> Any:
        """Return the values of all ranks: of a tensor one more dimension in front, of a dict, list
        or tuple the same for each, of a text this rank's. At one rank, as in Lightning, values are
        tensors without that dimension, and with their graph.

        Call it on all ranks, with tensors of the same shape. It waits for the device.

        Raises:
            TaskError: gradients of several ranks are asked for: those of a loss over all ranks'
                samples are summed anyway.
        """
        if self.trainer.world_size == 1:
            return alone(data)
        if sync_grads:
            raise TaskError(
                "all_gather(sync_grads=True): gathered values carry no gradients here. " + _GATHERED
            )
        return gathered(data, self.trainer.engine.comm.all_gather_object)


def alone(data: Any) -> Any:
    """Return the values of the only rank, as tensors."""
    if isinstance(data, Mapping):
        return {name: alone(part) for name, part in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data)(alone(part) for part in data)
    if isinstance(data, str):
        return data
    return torch.as_tensor(data)


def gathered(data: Any, all_gather_object: Callable[[Any], list[Any]]) -> Any:
    """Return the values of all ranks, tensors with a dimension for the ranks in front,
    on the device they were on.
    """
    if isinstance(data, Mapping):
        return {name: gathered(part, all_gather_object) for name, part in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data)(gathered(part, all_gather_object) for part in data)
    if isinstance(data, str):
        return data
    device = data.device if isinstance(data, Tensor) else torch.device("cpu")
    return torch.stack(all_gather_object(torch.as_tensor(data).detach().cpu())).to(device)
