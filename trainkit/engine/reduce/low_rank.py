"""What a reducer asks of sums by factors (communication=powersgd, an extension's): a bucket has two
messages, and the second one is made of the first one's sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainkit.engine.reduce.buckets import NamedParameter


@dataclass(eq=False)
class TwoMessages:
    """A bucket's sum under way.

    Attributes:
        entries: its parameters.
        message: what is to be summed next, flat.
        handle: of the sum that was started last.
    """

    entries: Sequence[NamedParameter]
    message: Tensor
    handle: Any = None

    @property
    def num_bytes(self) -> int:
        """That this rank has handed over."""
        return self.message.numel() * self.message.element_size()


class LowRank(ABC):
    """Sums gradients as factors.

    Attributes:
        owing: the bucket whose second message has not started.
    """

    owing: TwoMessages | None = None

    @abstractmethod
    def serves(self, entries: Sequence[NamedParameter]) -> bool:
        """Return whether this step's sum of these parameters goes by factors."""

    @abstractmethod
    def begin(self, entries: Sequence[NamedParameter], flags: Tensor | None) -> TwoMessages:
        """Return a bucket with its first message: factors, then exact gradients, then flags."""

    @abstractmethod
    def send_second(
        self, start: Callable[[Tensor, str], Any], end: Callable[[Any], Tensor]
    ) -> None:
        """Start the second message of the bucket before, once its first one is there;
        `start` and `end` sum a vector.
        """

    @abstractmethod
    def finish(self, bucket: TwoMessages, total: Tensor) -> Tensor:
        """Leave the sums in `.grad`, given the sum of the second message;
        return the flags' sum, or an empty tensor.
        """

    @abstractmethod
    def end_step(self, unused: Sequence[str]) -> None:
        """Count a step, in which no rank used some parameters."""
