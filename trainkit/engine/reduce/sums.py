"""What a framework supplies to sums of gradients: how a bucket's sum starts and ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from trainkit.engine.reduce.buckets import NamedParameter


@dataclass(eq=False)
class Bucket:
    """Parameters with gradients that one collective sums."""

    index: int  # its place in the order in which sums start
    entries: list[NamedParameter]  # name and parameter, in the order of summing
    sparse: bool = False  # whether its one parameter's gradient travels as rows
    waiting: int = field(init=False)  # how many gradients of this step are not ready yet
    # what the engine returned when the sum started; None before that
    handle: Any = field(init=False, default=None)
    is_summed: bool = field(init=False, default=False)  # whether this step's sum is in `.grad`
    handed_ns: int = field(init=False, default=0)  # when that was, while sums are recorded; else 0

    def __post_init__(self) -> None:
        assert len(self.entries) == 1 or not self.sparse
        self.waiting = len(self.entries)


class GradientSums(ABC):
    """The sums of one framework; reducer.GradientReducer decides when each starts."""

    # whether a bucket can carry the vector of which parameters took part: if gradients are added up
    _carries = True
    # whether a sum is made in the memory of `.grad`, which must stay until it is done
    _is_in_place = False

    _carrier: Bucket | None

    @abstractmethod
    def _start(self, bucket: Bucket, flags: Tensor | None) -> Any:
        """Start the sum of the bucket's gradients, and of a vector of ones and zeros;
        return a handle that is not None.
        """

    @abstractmethod
    def _end(self, bucket: Bucket) -> Tensor | None:
        """Wait for the bucket's sum, leave it in the parameters' `.grad`, and return the vector's,
        in any scale but zero.
        """

    @abstractmethod
    def _wait(self, handle: Any) -> None:
        """Wait for a bucket's sum, which may have been waited for before, and leave it."""

    def _is_done(self, handle: Any) -> bool:
        """Return whether a bucket's sum is known to be done, without waiting for it."""
        return False

    @abstractmethod
    def _start_rows(self, name: str, rows: Tensor, values: Tensor) -> Any:
        """Start to gather the rows [R] and values [R, ...] of all ranks (R may differ);
        return a handle that is not None.
        """

    @abstractmethod
    def _end_rows(self, handle: Any) -> tuple[Tensor, Tensor]:
        """Wait, and return the rows and values of all ranks, one after the other."""

    @abstractmethod
    def _start_flat(self, vector: Tensor, name: str) -> Any:
        """Start the sum of a vector, in place, under a name; return a handle."""

    @abstractmethod
    def _end_flat(self, handle: Any) -> Tensor:
        """Wait for a vector's sum, and return it."""
