"""What travels between ranks in place of exact sums of gradients, as `communication=` names it.
Imports no torch.

powersgd    two narrow factors of each gradient in each step (Vogels et al. 2019)            low_rank.py
local_sgd   steps of each rank alone, then the mean of the weights (Stich 2019, Lin et al. 2018)      rounds.py
diloco      the same with an outer optimizer on the mean change (Douillard et al. 2023)              rounds.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainkit.arguments import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    checked,
)
from trainkit.console import plural
from trainkit.engine.approximation import Approximation
from trainkit.engine.step_settings import Communication
from trainkit.errors import ConfigError
from trainkit.extension import resolve

if TYPE_CHECKING:
    from trainkit.engine.collectives import Collectives
    from trainkit.engine.step_settings import StepSettings


@checked
class PowerSGD(Communication):
    """Each gradient matrix travels as two factors of a low rank, with error feedback (Vogels et al.
    2019, algorithms 1 and 2).

    What the factors leave out is added to the next step's gradient. Vectors, and matrices that
    would not shrink, travel exactly, with the first factors. Like the exact one, the result is a
    sum over ranks.

    Args:
        rank: columns of a factor; at most the shorter side of a matrix is used. Higher is closer
            and sends more.
        start_after_steps: exact steps first: early gradients change direction fast.
        min_compression: a matrix travels as factors only if they have this many times fewer
            elements. 0: always.
    """

    name = "powersgd"

    def __init__(
        self,
        rank: PositiveInt = 4,
        start_after_steps: NonNegativeInt = 20,
        min_compression: NonNegativeFloat = 2.0,
    ) -> None:
        self.rank = rank
        self.start_after_steps = start_after_steps
        self.min_compression = min_compression

    def describe(self) -> str:
        """Return it in words."""
        return f"PowerSGD of rank {self.rank}{_after(self.start_after_steps)}"

    def begin(
        self, settings: StepSettings, engine: str, options: Mapping[str, Any], comm: Collectives
    ) -> Approximation:
        """See Communication."""
        return _begun(self, settings, engine, options, comm)

    def rank_for(self, shape: tuple[int, ...]) -> int:
        """Return the columns of the factors of a gradient of a shape; 0 if it travels exactly."""
        rows = shape[0] if len(shape) > 1 else 0
        columns = 1
        for size in shape[1:]:
            columns *= size
        rank = min(self.rank, rows, columns)
        return rank if rows * columns >= self.min_compression * rank * (rows + columns) else 0


class Alone(Communication):
    """Ranks step alone; every few steps an outer step brings them together.

    Attributes:
        every_n_steps: of a rank, between two outer steps of a weight.
        start_after_steps: exact steps first.
        outer_lr: rate of the outer SGD, whose gradient is the mean change of the ranks' weights.
        outer_momentum: of its Nesterov momentum.
        fragments: parts of the weights, which take their outer steps in turn.
    """

    name: str
    every_n_steps: int
    start_after_steps: int = 0
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    fragments: int = 1

    @property
    def is_mean(self) -> bool:
        """Whether the outer step is the plain mean of the weights,
        which at one rank changes nothing.
        """
        return self.outer_lr == 1.0 and self.outer_momentum == 0.0

    def begin(
        self, settings: StepSettings, engine: str, options: Mapping[str, Any], comm: Collectives
    ) -> Approximation:
        """See Communication."""
        return _begun(self, settings, engine, options, comm)


@checked
class LocalSGD(Alone):
    """Each rank takes steps by its own samples, then all take the mean of their weights (Stich
    2019).

    With exact steps first it is post-local SGD (Lin et al. 2018).

    Args:
        every_n_steps: steps of a rank between two means.
        start_after_steps: exact steps before the first step alone.
    """

    name = "local_sgd"

    def __init__(
        self, every_n_steps: PositiveInt = 8, start_after_steps: NonNegativeInt = 0
    ) -> None:
        self.every_n_steps = every_n_steps
        self.start_after_steps = start_after_steps

    def describe(self) -> str:
        """Return it in words."""
        kind = "post-local SGD" if self.start_after_steps else "local SGD"
        alone = (
            f"the mean of weights each {plural(self.every_n_steps, 'step')} that ranks take alone"
        )
        return f"{alone} ({kind}){_after(self.start_after_steps)}"


@checked
class DiLoCo(Alone):
    """Each rank takes steps by its own samples; then an outer SGD with Nesterov momentum takes the
    mean change as its gradient.

    Douillard et al. 2023, algorithm 1. With fragments each of them takes its outer step at another
    time, so that a message is short (Douillard et al. 2025, streaming DiLoCo; here a rank waits for
    the message).

    Args:
        every_n_steps: steps of a rank between two outer steps of a weight.
        outer_lr: rate of the outer SGD; 1 takes the whole mean change.
        outer_momentum: its Nesterov momentum, from 0 to below 1.
        fragments: parts of the weights, which take their outer steps in turn; at most
            `every_n_steps`.
        start_after_steps: exact steps before the first step alone.
    """

    name = "diloco"

    def __init__(
        self,
        every_n_steps: PositiveInt = 20,
        outer_lr: PositiveFloat = 0.7,
        outer_momentum: Fraction = 0.9,
        fragments: PositiveInt = 1,
        start_after_steps: NonNegativeInt = 0,
    ) -> None:
        if outer_momentum >= 1:
            raise ConfigError(
                f"communication.outer_momentum is {outer_momentum}; it must be below 1, or no"
                " change fades."
            )
        if fragments > every_n_steps:
            raise ConfigError(
                f"communication.fragments is {fragments}, but communication.every_n_steps is"
                f" {every_n_steps}: each fragment needs a step of its own. Use fewer fragments, or"
                " more steps."
            )
        self.every_n_steps = every_n_steps
        self.outer_lr = outer_lr
        self.outer_momentum = outer_momentum
        self.fragments = fragments
        self.start_after_steps = start_after_steps

    def describe(self) -> str:
        """Return it in words."""
        outer = f"an outer step of rate {self.outer_lr:g} and momentum {self.outer_momentum:g}"
        parts = f", in {self.fragments} fragments" * (self.fragments > 1)
        alone = f"each {plural(self.every_n_steps, 'step')} that ranks take alone"
        return f"{outer} {alone}{parts} (DiLoCo){_after(self.start_after_steps)}"


def _begun(*arguments: Any) -> Approximation:
    begin = resolve("trainkit.extensions.communication.approximation.begin")  # imports torch
    approximation: Approximation = begin(*arguments)
    return approximation


def _after(steps: int) -> str:
    return f" after {plural(steps, 'exact step')}" if steps else ""
