"""Approximation: what an engine does in place of exact sums,
from the settings of a fit to its state in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.engine.approximate.checks import check_communication
from trainkit.engine.approximate.rounds import Rounds
from trainkit.engine.approximate.settings import Alone, PowerSGD
from trainkit.engine.collectives import Collectives
from trainkit.engine.ranks import Ranks
from trainkit.engine.reduce.buckets import split_frozen
from trainkit.engine.reduce.low_rank import LowRank
from trainkit.engine.step_settings import StepSettings


class Approximation:
    """What a fit's communication is; nothing, if it is exact.

    Attributes:
        rounds: the steps that ranks take alone.
        low_rank: the factors of gradients.
        words: of the gradients, for the banner; "" if they are exact.

    Args:
        ranks: of the engine.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.rounds: Rounds | None = None
        self.low_rank: LowRank | None = None
        self.words = ""

    def choose(
        self, settings: StepSettings, engine: str, options: Mapping[str, Any], comm: Collectives
    ) -> None:
        """Take the settings of a fit.

        Args:
            engine: its name.
            options: those of the engine that are not its defaults.

        Raises:
            ConfigError: they exclude each other.
        """
        chosen = settings.communication
        check_communication(chosen, engine, options, settings)
        self.rounds = None
        self.low_rank = None
        self.words = ""
        world_size = comm.ranks.world_size
        if isinstance(chosen, Alone) and (world_size > 1 or not chosen.is_mean):
            self.rounds = Rounds(chosen, comm)
        elif isinstance(chosen, PowerSGD) and world_size > 1:
            self.low_rank = LowRank(chosen, world_size if options.get("op") == "sum" else 1)
        if self.held is not None:
            self.words = f"approximate: {chosen.describe()}"
        elif chosen.name != "exact":
            self.words = f"exact: with one rank communication={chosen.name} changes nothing"

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
        if optimizers:
            trained, _ = split_frozen(task.named_parameters())
            if self.rounds is not None:
                self.rounds.start(trained, optimizers)
            if self.low_rank is not None:
                self.low_rank.start(trained, sparse)

    @property
    def sums_gradients(self) -> bool:
        """Whether gradients are summed over ranks in the next step."""
        return self._ranks.world_size > 1 and not self.steps_alone

    def end_step(self) -> bool:
        """Count a step, and take the outer step that is due;
        return whether the next step is the first one alone.
        """
        return self.rounds is not None and self.rounds.after_step()

    def close_round(self) -> None:
        """Bring all ranks to the same weights, if they step alone. Call it on all ranks."""
        if self.rounds is not None:
            self.rounds.close()

    @property
    def held(self) -> Rounds | LowRank | None:
        """The one of the two that there is."""
        return self.rounds or self.low_rank

    @property
    def steps_alone(self) -> bool:
        """Whether this rank takes its next step by its own samples."""
        return self.rounds is not None and self.rounds.is_alone

    @property
    def has_met(self) -> bool:
        """Whether the last step ended with an outer step, or summed gradients:
        what ranks share is as new as it can be.
        """
        return self.rounds is None or self.rounds.is_met

    def shared_tensors(self) -> dict[str, Tensor]:
        """Return what is equal on all ranks beside the task and its optimizers,
        or in their place if ranks step alone.
        """
        return {} if self.held is None else self.held.shared_tensors()

    @property
    def notes(self) -> list[str]:
        """What was translated from a checkpoint, in words."""
        return [] if self.held is None else self.held.notes


class SharedPart:
    """The part of a checkpoint that is equal on all ranks."""

    def __init__(self, approximation: Approximation) -> None:
        self._approximation = approximation

    def state_dict(self) -> dict[str, Any]:
        """Return it; empty if the communication is exact."""
        held = self._approximation.held
        return {} if held is None else held.shared_state()

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Take it back; return what has no place in this run."""
        held = self._approximation.held
        if not state or (held is not None and held.kind == state["kind"]):
            if held is not None and state:
                held.load_shared(state)
            return []
        return ["the state of another communication"]


class OwnPart:
    """The part of a checkpoint that is each rank's own."""

    def __init__(self, approximation: Approximation, comm: Collectives) -> None:
        self._approximation = approximation
        self._comm = comm

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's; empty if the communication is exact."""
        held = self._approximation.held
        own = {} if held is None else held.own_state()
        return {"kind": held.kind, **own} if held is not None and own else {}

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        """Take back this rank's share."""
        held, ranks = self._approximation.held, self._comm.ranks
        states = [state for state in states if held is not None and state.get("kind") == held.kind]
        if held is not None and states:
            held.load_own(states, ranks.rank, ranks.world_size)
