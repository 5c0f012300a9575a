"""Rates as they are written into groups, and those that a user sets by hand, or by a scheduler of
one's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainkit.optim.batch_plan import BatchPlan
from trainkit.optim.forms import ScheduleConfig


class UsersRates:
    """Writes the rates of groups, and notices those that differ from what was written last.

    Attributes:
        places: of the groups whose rate is one that the user has set.
        written: what was written into each group.
        multiplier: of warm-up, in what was written.
        sizes: the number of groups of each optimizer.
        follow: whether the user's code may set others after the update in progress.
    """

    follow = False

    def __init__(self, say: Callable[[str], None], sizes: list[int]) -> None:
        self._say = say
        self._has_said = False
        self.sizes = sizes
        self.places: set[int] = set()
        self.written: list[Any] = []
        self.multiplier = 1.0
        # by place: a rate that is a tensor, and its version when it was written
        self._tensors: dict[int, tuple[Tensor, int]] = {}

    def write(
        self, groups: Sequence[dict[str, Any]], rates: Sequence[float], multiplier: float
    ) -> None:
        """Set the groups' rates. One that is a tensor gets the value, as torch's schedulers set it:
        optimizers that are compiled or captured read it there.
        """
        tensors = {}
        for place, (group, rate) in enumerate(zip(groups, rates, strict=True)):
            if not isinstance(tensor := group["lr"], Tensor):
                group["lr"] = rate
                continue
            if not self._stands(place, group) or rate != self.written[place]:
                tensor.detach().fill_(rate)  # it may have a gradient
            tensors[place] = tensor
        # groups may share one
        self._tensors = {place: (tensor, tensor._version) for place, tensor in tensors.items()}
        self.written = list(rates)
        self.multiplier = multiplier

    def read(self, groups: Sequence[dict[str, Any]]) -> list[float]:
        """Return the groups' rates, without waiting for a device that has one as it was written."""
        if not self._tensors:
            return [float(group["lr"]) for group in groups]
        return [
            self.written[place] if self._stands(place, group) else float(group["lr"])
            for place, group in enumerate(groups)
        ]

    def _stands(self, place: int, group: dict[str, Any]) -> bool:
        """Whether a rate is a tensor that has what was written into it."""
        tensor, version = self._tensors.get(place, (None, None))
        return tensor is not None and tensor is group["lr"] and tensor._version == version

    def insert(self, place: int, rate: float) -> None:
        """Take the rate of a group that was added; those behind it have other places."""
        self.written.insert(place, rate)
        self.places = {p + (p >= place) for p in self.places}
        self._tensors = {p + (p >= place): one for p, one in self._tensors.items()}

    def release(self, groups: Sequence[dict[str, Any]], written: Sequence[dict[str, Any]]) -> None:
        """Take the rates of some of the groups for the schedulers', which have written them."""
        ids = set(map(id, written))
        for place, group in enumerate(groups):
            if id(group) in ids:
                self.places.discard(place)

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
            # the first two cost nothing where a rate is on the device
            if rate is written or self._stands(place, group) or _equal(rate, written):
                continue
            if not self.places and not self._has_said:
                self._has_said = True
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


def _equal(rate: Any, written: float) -> bool:
    """Whether a rate is what was written, which a tensor has rounded."""
    if isinstance(rate, Tensor):
        written = float(torch.tensor(written, dtype=rate.dtype))
    return float(rate) == written
