"""Stragglers: which rank is slow, and why, from each rank's own clock."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainkit.api.callback import Callback
from trainkit.arguments import PositiveFloat, PositiveInt, checked
from trainkit.callbacks.step_clock import Times
from trainkit.errors import ConfigError

if TYPE_CHECKING:
    from trainkit.api.task import Task
    from trainkit.trainer import Trainer

_OWN = {  # part -> what it is, and what helps
    "data": ("waits for data", "More data.num_workers, a faster disk, or smaller samples on its host."),
    "compute": ("computes", "Look at its GPU (clock, temperature, another job) or its cores."),
    "optimizer": ("updates weights", "Look at its GPU or its cores."),
    "hooks": ("is in callbacks between steps", "Something runs on this rank alone."),
}
_LEAST_S = 0.002  # differences below do not hurt anybody


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for.

    Attributes:
        rank: which.
        host: its host's name.
        part: of "data", "compute", "optimizer", "hooks", the one that makes the difference.
        seconds: of that part, in a step.
        usual: the median of all ranks.
        behind: by how many seconds a step its own work is longer than the median rank's.
    """

    rank: int
    host: str
    part: str
    seconds: float
    usual: float
    behind: float

    def __str__(self) -> str:
        what, help_ = _OWN[self.part]
        return (
            f"Straggler: rank {self.rank} ({self.host}) {what} for {1000 * self.seconds:.0f} ms a step, the median rank for "
            f"{1000 * self.usual:.0f} ms: the others wait {1000 * self.behind:.0f} ms a step for it. {help_}"
        )


def find_stragglers(ranks: Sequence[tuple[str, dict[str, float]]], factor: float) -> list[Straggler]:
    """Return the ranks whose own work takes so much longer than the median rank's, the slowest first.

    A rank's communication is not its own: whoever is fast waits there for the others.

    Args:
        ranks: (host, seconds of a step by part) of each rank; two at least.
        factor: above 1: how much longer.
    """
    own = [sum(parts[part] for part in _OWN) for _, parts in ranks]
    # The lower middle: of two ranks the slower one is the straggler.
    usual = statistics.median_low(own)
    found = []
    for rank, (host, parts) in enumerate(ranks):
        if own[rank] > factor * usual and own[rank] - usual > _LEAST_S:
            medians = {part: statistics.median_low([other[part] for _, other in ranks]) for part in _OWN}
            part = max(_OWN, key=lambda p: parts[p] - medians[p])  # noqa: B023 - used at once
            found.append(Straggler(rank, host, part, parts[part], medians[part], own[rank] - usual))
    return sorted(found, key=lambda straggler: -straggler.behind)


@checked
class Stragglers(Callback):
    """Compares the ranks' own times now and then, and names the one that the others wait for.

    Each rank adds up the seconds of its steps by its own clock (no clocks of hosts are compared); the sums are gathered each
    `every_n_steps`. Logged: `straggler/behind` (seconds a step that the others wait for the slowest rank) and
    `straggler/communication` (the share of a step that the slowest rank, which waits for nobody, spends on communication).

    Args:
        every_n_steps: steps between two comparisons.
        factor: a rank whose own work takes so much longer than the median rank's is told of, once until it has changed.
    """

    config_key = "callbacks.stragglers"
    uses_step_clock = True

    def __init__(self, every_n_steps: PositiveInt = 100, factor: PositiveFloat = 1.25) -> None:
        if factor <= 1:
            raise ConfigError(
                f"{self.config_key}.factor is {factor}; it must be above 1: how much longer than the median rank's."
            )
        self.every_n_steps, self.factor = every_n_steps, factor
        self._before: Times | None = None
        self.found: list[Straggler] = []

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        """Start with nothing."""
        self._before = trainer.step_clock.read()
        self._told: set[tuple[int, str]] = set()

    def on_train_step_end(self, trainer: Trainer, task: Task) -> None:
        """Compare where it is due."""
        assert self._before is not None, "training has begun"
        if trainer.world_size > 1 and trainer.step_clock.steps - self._before.steps >= self.every_n_steps:
            times = trainer.step_clock.read()
            self._compare(trainer, times - self._before)
            self._before = times

    def _compare(self, trainer: Trainer, times: Times) -> None:
        ranks = trainer.engine.comm.all_gather_object((socket.gethostname(), times.per_step()))
        self.found = find_stragglers(ranks, self.factor)
        for straggler in self.found:
            if (straggler.rank, straggler.part) not in self._told:
                trainer.session.tell(str(straggler))
        self._told = {(straggler.rank, straggler.part) for straggler in self.found}
        if trainer.is_global_zero:
            own = [sum(parts[part] for part in _OWN) for _, parts in ranks]
            slowest = max(range(len(own)), key=own.__getitem__)
            unhidden = ranks[slowest][1]["communication"]
            behind = own[slowest] - statistics.median_low(own)
            values = {"straggler/behind": behind, "straggler/communication": unhidden / max(1e-9, own[slowest] + unhidden)}
            trainer.session.hooks("on_metrics", values, trainer.global_step)
