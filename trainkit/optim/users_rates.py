"""The rates that a user sets by hand, or by a scheduler of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.optim import Optimizer

from trainkit.optim.batch_plan import BatchPlan
from trainkit.optim.forms import ScheduleConfig


class UsersRates:
    """Notices rates that differ from those written last.

    Attributes:
        places: of the groups whose rate the user has set.
        written: what was written into each group.
        multiplier: of warm-up, in what was written.
        sizes: the number of groups of each optimizer.
    """

    def __init__(self, say: Callable[[str], None], sizes: list[int]) -> None:
        self._say = say
        self.sizes = sizes
        self.places: set[int] = set()
        self.written: list[Any] = []
        self.multiplier = 1.0

    def stand(self, optimizers: Sequence[Optimizer], multiplier: float) -> bool:
        """Return whether all groups have what was written last, and would again: the common case of
        a step, at little cost.
        """
        if multiplier != self.multiplier:
            return False
        place = 0
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if place == len(self.written) or group["lr"] is not self.written[place]:
                    return False
                place += 1
        return place == len(self.written)

    def new_rates(
        self,
        groups: Sequence[dict[str, Any]],
        contract: BatchPlan,
        schedules: Sequence[ScheduleConfig],
    ) -> Iterator[tuple[int, float]]:
        """Yield the place and the rate of each group whose rate was set since."""
        for place, (group, written) in enumerate(zip(groups, self.written, strict=True)):
            rate = group["lr"]
            # the first costs nothing where a rate is on the device
            if rate is written or float(rate) == written:
                continue
            if not self.places:
                self._say_so(place, float(rate), contract, schedules)
            self.places.add(place)
            yield place, float(rate)

    def _say_so(
        self, place: int, rate: float, contract: BatchPlan, schedules: Sequence[ScheduleConfig]
    ) -> None:
        """Say that a rate is the user's, if it would otherwise be scaled or in warm-up."""
        is_scaled = contract.lr_factor != 1.0 and not any(
            config.interval == "hand" for config in schedules
        )
        parts = [f"without lr_scaling's factor of {contract.lr_factor:g}"] * is_scaled
        parts += ["without warm-up"] * bool(contract.warmup_steps)
        if parts:
            self._say(
                f"The learning rate of group {place} was set to {rate:g} by your own code, and"
                f" holds as it is: {' and '.join(parts)}."
            )
