"""Context ranks that are computed one after the other in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from trainkit.extensions.context.parts import part_of
from trainkit.extensions.context.sequence import SharedStep


class Beside:
    """A group of which this process is the rank at `place`; the others have what is given.

    Attributes:
        returned: what backward had for each rank.
    """

    def __init__(self, place: int, ranks: int, whole: Tensor | None = None) -> None:
        self.place, self.ranks, self.whole = place, ranks, whole
        self.returned: Sequence[Tensor] = ()

    def gather(self, own: Tensor) -> list[Tensor]:
        """Return the parts of the whole, of which `own` is one."""
        assert self.whole is not None
        parts = [part_of(self.whole, 2, place, self.ranks) for place in range(self.ranks)]
        assert torch.equal(parts[self.place], own)
        return parts

    def scatter_sum(self, of_ranks: list[Tensor]) -> Tensor:
        """Note what this rank has for each."""
        self.returned = of_ranks
        return of_ranks[self.place]

    def sum(self, own: Tensor) -> Tensor:
        """Every rank has as much."""
        return own * self.ranks


@contextmanager
def opened(group: Beside, name: str = "training_step") -> Iterator[SharedStep]:
    """Within the context a step is under way."""
    SharedStep.open = step = SharedStep(group, name)
    try:
        yield step
    finally:
        SharedStep.open = None
        step.end()
