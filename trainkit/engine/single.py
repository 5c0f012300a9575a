"""One process, nobody to talk to: every sum is the value itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.arguments import checked
from trainkit.engine.base import Device, Engine
from trainkit.engine.options import refusals
from trainkit.errors import EngineError


@checked
class SingleEngine(Engine):
    """The engine of a plain `python -m trainkit fit`.

    Args:
        device: "auto" takes the first GPU where there is one.
    """

    name = "single"
    config_key = "engine"
    explained_arguments = refusals("single")

    def __init__(self, device: Device = "auto") -> None:
        super().__init__(device)

    def _start(self) -> None:
        if self.launcher.world_size > 1:
            raise EngineError(
                f"engine=single, but {self.launcher.name} started {self.launcher.world_size} processes: each would train "
                "alone and write the same files. Use engine=auto, or start one process."
            )
        self.rank, self.local_rank, self.world_size, self.local_size = 0, 0, 1, 1
        self._pin_device()

    def prepare(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Do nothing: the weights are rank 0's already."""

    def release(self) -> None:
        """Do nothing: nothing was hooked."""

    def reduce_gradients(self) -> None:
        """Do nothing: the gradients are the sum already."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return a copy."""
        return tensor.clone()

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Do nothing."""

    def broadcast_object(self, value: Any) -> Any:
        """Return the value."""
        return value

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return a list of the one value."""
        return [value]

    def barrier(self) -> None:
        """Do nothing."""
