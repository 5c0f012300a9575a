"""Rank 0 of any number of simulated ranks, in one process: what a plan is computed on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.device.precision import Precision
from trainkit.engine.base import Engine
from trainkit.engine.collectives import LocalCollectives
from trainkit.engine.heartbeat import Heartbeat
from trainkit.engine.ranks import Ranks
from trainkit.engine.reduce.buckets import find_sparse
from trainkit.launch.environment import read_launcher


class SimulatedCollectives(LocalCollectives):
    """Every other rank answers as this one does."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the tensor times the number of ranks."""
        return tensor * self.ranks.world_size

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the value once for each rank."""
        return [value] * self.ranks.world_size

    def run_on_main(self, work: Callable[[], Any]) -> Any:
        """Return what `work` returns here."""
        return work()


class SimulatedEngine(Engine):
    """An engine that stands for the one called `name`, with `local_size` ranks on each host, as
    `rank` of them.

    It is on the CPU by default.
    """

    def __init__(
        self,
        name: str,
        world_size: int,
        local_size: int,
        rank: int = 0,
        device: torch.device | None = None,
        tensor_size: int = 1,
        pipeline_size: int = 1,
        context_size: int = 1,
    ) -> None:
        ranks, heartbeat = Ranks(read_launcher()), Heartbeat()
        super().__init__("cpu", ranks, heartbeat, SimulatedCollectives(ranks, heartbeat))
        self.name = name
        self._place = rank, world_size, rank % local_size, local_size
        self._device = device or torch.device("cpu")
        ranks.tensor_size, ranks.pipeline_size = tensor_size, pipeline_size
        ranks.context_size = context_size

    def _start(self) -> None:
        self.ranks.assign(*self._place)
        self.device = self._device

    def prepare(
        self,
        task: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        precision: Precision | None = None,
    ) -> None:
        """See Engine. What the real engine would refuse of the task is refused here too."""
        super().prepare(task, optimizers, precision)
        self.approximation.start(task, optimizers, find_sparse(task, optimizers))
