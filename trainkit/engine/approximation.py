"""Approximation: what an engine does in place of exact sums of gradients, in each step and in a
checkpoint. Exact sums need nothing; all else is an extension's. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from trainkit.engine.ranks import Ranks
    from trainkit.engine.reduce.low_rank import LowRank


class Approximation:
    """What an engine does beside exact sums of gradients: nothing, here.

    Attributes:
        shown: of the gradients, for the banner; "" if they are exact.
        low_rank: sums gradients as factors; None if they travel whole.
        averages_weights: whether ranks step alone, and meet by their weights.
        notes: what was translated from a checkpoint, in words.

    Args:
        ranks: of the engine.
    """

    shown = ""
    low_rank: LowRank | None = None
    averages_weights = False

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.notes: list[str] = []

    # -- a step -----------------------------------------------------------------------------------------------------

    def start(
        self,
        task: nn.Module,
        optimizers: Sequence[Optimizer],
        sparse: AbstractSet[Tensor] = frozenset(),
    ) -> None:
        """Begin, once all ranks hold the same weights and optimizer state; an evaluation (no
        optimizers) needs nothing.

        Args:
            sparse: parameters whose gradients travel as rows.

        Raises:
            ConfigError: the task has no parameters that the settings serve.
        """

    @property
    def sums_gradients(self) -> bool:
        """Whether gradients are summed over ranks in the next step."""
        return self._ranks.world_size > 1 and not self.steps_alone

    @property
    def steps_alone(self) -> bool:
        """Whether this rank takes its next step by its own samples."""
        return False

    @property
    def has_met(self) -> bool:
        """Whether the last step ended with an outer step, or summed gradients:
        what ranks share is as new as it can be.
        """
        return True

    def count(self, factor: Tensor | None) -> None:
        """Count this rank's samples of a step that it takes alone.

        Args:
            factor: planned samples of the step / own ones, by which gradients are multiplied; 0 for
                none, None for 1.
        """

    def end_step(self) -> bool:
        """Count a step, and take the outer step that is due;
        return whether the next step is the first one alone.
        """
        return False

    def close_round(self) -> None:
        """Bring all ranks to the same weights, if they step alone. Call it on all ranks."""

    # -- state ------------------------------------------------------------------------------------------------------

    def shared_tensors(self) -> dict[str, Tensor]:
        """Return what is equal on all ranks beside the task and its optimizers,
        or in their place if ranks step alone.
        """
        return {}

    def with_shared(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a task's state_dict with the weights that ranks share, in place of own ones."""
        return state

    def shared_state(self) -> dict[str, Any]:
        """Return what a checkpoint holds that is equal on all ranks."""
        return {}

    def own_state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of this rank's own."""
        return {}

    def load_shared(self, state: dict[str, Any]) -> list[str]:
        """Take back `shared_state`; return what has no place in this run."""
        return ["the state of another communication"] if state else []

    def load_own(self, states: Sequence[dict[str, Any]]) -> None:
        """Take back this rank's share of the `own_state` of all ranks that saved."""
