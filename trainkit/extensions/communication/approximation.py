"""What an engine does by the settings of an extension, in place of exact sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.engine.approximation import Approximation
from trainkit.engine.collectives import Collectives
from trainkit.engine.ranks import Ranks
from trainkit.engine.reduce.buckets import split_frozen
from trainkit.engine.step_settings import Communication, StepSettings
from trainkit.extensions.communication.checks import check_communication
from trainkit.extensions.communication.low_rank import PowerSGDSums
from trainkit.extensions.communication.rounds import Rounds
from trainkit.extensions.communication.settings import Alone, PowerSGD


def begin(
    chosen: Communication,
    settings: StepSettings,
    engine: str,
    options: Mapping[str, Any],
    comm: Collectives,
) -> Approximation:
    """See Communication.begin."""
    check_communication(chosen, engine, options, settings)
    world_size = comm.ranks.world_size
    if isinstance(chosen, Alone) and (world_size > 1 or not chosen.is_mean):
        return Rounds(chosen, comm)
    if isinstance(chosen, PowerSGD) and world_size > 1:
        sums = PowerSGDSums(chosen, world_size if options.get("op") == "sum" else 1)
        return Factored(comm.ranks, sums, f"approximate: {chosen.describe()}")
    exact = Approximation(comm.ranks)
    exact.shown = f"exact: with one rank communication={chosen.name} changes nothing"
    return exact


class Factored(Approximation):
    """Gradients travel as factors."""

    low_rank: PowerSGDSums

    def __init__(self, ranks: Ranks, sums: PowerSGDSums, shown: str) -> None:
        super().__init__(ranks)
        self.low_rank, self.shown = sums, shown
        self.notes = sums.notes

    def start(
        self,
        task: nn.Module,
        optimizers: Sequence[Optimizer],
        sparse: AbstractSet[Tensor] = frozenset(),
    ) -> None:
        """See Approximation."""
        if optimizers:
            trained, _ = split_frozen(task.named_parameters())
            self.low_rank.start(trained, sparse)

    def shared_tensors(self) -> dict[str, Tensor]:
        """See Approximation."""
        return self.low_rank.shared_tensors()

    def shared_state(self) -> dict[str, Any]:
        """See Approximation."""
        return self.low_rank.shared_state()

    def own_state(self) -> dict[str, Any]:
        """See Approximation."""
        return self.low_rank.own_state()

    def load_shared(self, state: dict[str, Any]) -> list[str]:
        """See Approximation."""
        if not state or state["kind"] != self.low_rank.kind:
            return super().load_shared(state)
        self.low_rank.load_shared(state)
        return []

    def load_own(self, states: Sequence[dict[str, Any]]) -> None:
        """See Approximation."""
        states = [state for state in states if state.get("kind") == self.low_rank.kind]
        if states:
            self.low_rank.load_own(states, self._ranks.rank, self._ranks.world_size)
