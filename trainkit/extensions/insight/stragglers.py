"""Stragglers: finds the slow rank and the cause, from each rank's own clock."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from trainkit.api.alerts import alert
from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView, step_clock_of
from trainkit.arguments import PositiveFloat, PositiveInt, checked
from trainkit.callbacks.step_clock import Times
from trainkit.errors import ConfigError

_OWN = {  # part -> description, remedy
    "data": (
        "waits for data",
        "More data.num_workers, a faster disk, or smaller samples on its host.",
    ),
    "compute": (
        "computes",
        (
            "Look at its GPU (clock, temperature, another job) or its cores; callbacks=balance"
            " gives it less."
        ),
    ),
    "optimizer": ("updates weights", "Look at its GPU or its cores."),
    "hooks": ("is in callbacks between steps", "Something runs on this rank alone."),
}
_LEAST_S = 0.002  # smaller differences do not matter


@dataclass(frozen=True)
class Straggler:
    """A rank that the other ranks wait for.

    Attributes:
        rank: its number.
        host: its host's name.
        part: the one of "data", "compute", "optimizer", "hooks" with the largest difference.
        seconds: seconds per step of that part.
        usual: the median of all ranks for that part.
        behind: seconds per step by which its own work exceeds the median rank's.
        rank_shares: shares of a step's samples, as "3:1", or "even".
    """

    rank: int
    host: str
    part: str
    seconds: float
    usual: float
    behind: float
    rank_shares: str = "even"

    def __str__(self) -> str:
        what, help_ = _OWN[self.part]
        shares = f" Samples are split {self.rank_shares}." if self.rank_shares != "even" else ""
        return (
            f"Straggler: rank {self.rank} ({self.host}) {what} for {1000 * self.seconds:.0f} ms a"
            f" step, the median rank for {1000 * self.usual:.0f} ms: the others wait"
            f" {1000 * self.behind:.0f} ms a step for it.{shares} {help_}"
        )


def find_stragglers(
    ranks: Sequence[tuple[str, dict[str, float]]], factor: float, rank_shares: str = "even"
) -> list[Straggler]:
    """Return the ranks with more own work than `factor` times the median rank's, slowest first.

    Communication is not a rank's own work: a fast rank waits there for the others.

    Args:
        ranks: (host, seconds per step by part) of each rank; at least two.
        factor: limit relative to the median rank, above 1.
        rank_shares: shares of a step's samples, for the message.
    """
    own = [sum(parts[part] for part in _OWN) for _, parts in ranks]
    # The lower median: of two ranks the slower one is the straggler.
    usual = statistics.median_low(own)
    stragglers = []
    for rank, (host, parts) in enumerate(ranks):
        if own[rank] > factor * usual and own[rank] - usual > _LEAST_S:
            medians = {
                part: statistics.median_low([other[part] for _, other in ranks]) for part in _OWN
            }
            part = max(_OWN, key=lambda p: parts[p] - medians[p])  # noqa: B023 - used at once
            stragglers.append(
                Straggler(
                    rank, host, part, parts[part], medians[part], own[rank] - usual, rank_shares
                )
            )
    return sorted(stragglers, key=lambda straggler: -straggler.behind)


@checked
class Stragglers(Callback):
    """Compares the ranks' own times at an interval and names the rank that the others wait for.

    Each rank adds up the seconds of its steps by its own clock (clocks of hosts are never
    compared); the sums are gathered each `every_n_steps`. Logged: `straggler/behind` (seconds per
    step that the others wait for the slowest rank) and `straggler/communication` (the share of a
    step that the slowest rank, which waits for no other, spends on communication).

    Args:
        every_n_steps: steps between two comparisons.
        factor: a rank is reported if its own work takes more than this times the median rank's;
            again only after a change.
    """

    config_key = "callbacks.stragglers"
    uses_step_clock = True

    def __init__(self, every_n_steps: PositiveInt = 100, factor: PositiveFloat = 1.25) -> None:
        if factor <= 1:
            raise ConfigError(
                f"{self.config_key}.factor is {factor}; it must be above 1: it multiplies the"
                " median rank's time."
            )
        self.every_n_steps = every_n_steps
        self.factor = factor
        self._before: Times | None = None
        self.found: list[Straggler] = []

    def on_train_start(self, trainer: RunView, task: Task) -> None:
        self._before = step_clock_of(trainer).read()
        self._reported: set[tuple[int, str]] = set()

    def on_train_step_end(self, trainer: RunView, task: Task) -> None:
        assert self._before is not None, "training has begun"
        if (
            trainer.world_size > 1
            and step_clock_of(trainer).steps - self._before.steps >= self.every_n_steps
        ):
            times = step_clock_of(trainer).read()
            self._compare(trainer, times - self._before)
            self._before = times

    def _compare(self, trainer: RunView, times: Times) -> None:
        ranks = trainer.engine.comm.all_gather_object((socket.gethostname(), times.per_step()))
        self.found = find_stragglers(ranks, self.factor, trainer.batch_plan.rank_shares)
        for straggler in self.found:
            if (straggler.rank, straggler.part) not in self._reported:
                alert(trainer, "straggler", str(straggler))
        self._reported = {(straggler.rank, straggler.part) for straggler in self.found}
        if trainer.is_global_zero:
            own = [sum(parts[part] for part in _OWN) for _, parts in ranks]
            slowest = max(range(len(own)), key=own.__getitem__)
            unhidden = ranks[slowest][1]["communication"]
            behind = own[slowest] - statistics.median_low(own)
            values = {
                "straggler/behind": behind,
                "straggler/communication": unhidden / max(1e-9, own[slowest] + unhidden),
            }
            trainer.log_metrics(values)
