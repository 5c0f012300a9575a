"""One process: every sum over ranks is the value itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainkit.arguments import checked
from trainkit.engine.base import Engine
from trainkit.engine.collectives import LocalCollectives
from trainkit.engine.heartbeat import Heartbeat
from trainkit.engine.options import refusals
from trainkit.engine.pinning import DeviceName
from trainkit.engine.ranks import Ranks
from trainkit.errors import EngineError
from trainkit.launch.environment import read_launcher

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainkit.device.precision import Precision


@checked
class SingleEngine(Engine):
    """The engine of a plain `python -m trainkit fit`.

    Args:
        device: "auto" takes the first GPU if there is one.
    """

    name = "single"
    config_key = "engine"
    explained_arguments = refusals("single")

    def __init__(self, device: DeviceName = "auto") -> None:
        ranks, heartbeat = Ranks(read_launcher()), Heartbeat()
        super().__init__(device, ranks, heartbeat, LocalCollectives(ranks, heartbeat))

    def _start(self) -> None:
        if self.launcher.world_size > 1:
            raise EngineError(
                f"engine=single, but {self.launcher.name} started {self.launcher.world_size}"
                " processes: each would train alone and write the same files. Use engine=auto, or"
                " start one process."
            )
        self.ranks.assign(0, 1, 0, 1)
        self.pin()

    def prepare(
        self,
        task: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        precision: Precision | None = None,
    ) -> None:
        """See Engine."""
        super().prepare(task, optimizers, precision)
        self.approximation.start(task, optimizers)
