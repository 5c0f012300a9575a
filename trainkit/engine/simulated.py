"""Rank 0 of any number of ranks, without the others: what a plan is worked out on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainkit.engine.single import SingleEngine


class PretendedEngine(SingleEngine):
    """Every other rank would answer as this one does. On the CPU.

    Args:
        name: of the engine that it stands for.
        world_size: number of ranks.
        local_size: ranks of each host.
    """

    def __init__(self, name: str, world_size: int, local_size: int) -> None:
        super().__init__("cpu")
        self.name = name
        self._sizes = world_size, local_size

    def _start(self) -> None:
        self.rank = self.local_rank = 0
        self.world_size, self.local_size = self._sizes
        self.device = torch.device("cpu")

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the tensor times the number of ranks."""
        return tensor * self.world_size

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the value once for each rank."""
        return [value] * self.world_size
