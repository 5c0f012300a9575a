"""The order of a mixture: which sample of which source comes at place k of a run, as a function of
(seed, weights, k) alone, so on any ranks and after any interruption.

Mixture      the sampler of a loader over all sources, one after the other in a ConcatDataset
  SourceTurns   which source has the k'th turn: counts follow the weights within one sample, always
  MixtureOrder  the samples of an epoch: each source shuffled, pass by pass

Drawn turns (as in transformers' and datasets' interleaving) would stray from the weights by the root
of k; here no count is ever one sample off.
"""

from __future__ import annotations

import functools
import heapq
import math
from array import array
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, overload

import torch
from torch.utils.data import Sampler

from trainkit.data.order import Repeating, epoch_order, mix

_AT_ONCE = 4096  # turns


class SourceTurns:
    """Which source has which turn.

    After any k turns source i has had more than k w_i - 1 and fewer than k w_i + 1: its n'th turn
    stands between k = (n - 1) / w_i and k = n / w_i. Of the sources that may have a turn, the one
    that must have it first gets it, which for turns of one length always succeeds (earliest deadline
    first; Tijdeman 1980, "The chairman assignment problem", has the bound). The weights are taken
    as they are written, 0.1 as a tenth, so that all sums are exact. The turns repeat after the
    common denominator of the shares, and are computed up to there as they are asked for, at a
    microsecond each.

    Args:
        weights: of the sources, 0 or more; their sum is not 0.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(str(weight)) for weight in weights]
        whole = math.lcm(*(weight.denominator for weight in exact))
        parts = [int(weight * whole) for weight in exact]
        common = math.gcd(*parts)
        self.parts = [part // common for part in parts]
        self.period = sum(self.parts)
        self._sources, self._before = array("H"), array("Q")
        self._counts = [0] * len(weights)
        # of sources: by when the next turn may come, and by when it must have come
        self._waiting = [(0, source) for source, part in enumerate(self.parts) if part]
        self._ready: list[tuple[int, int]] = []

    def at(self, turn: int) -> tuple[int, int]:
        """Return the source of a turn, and how many turns it had before."""
        periods, place = divmod(turn, self.period)
        while place >= len(self._sources):
            for _ in range(min(_AT_ONCE, self.period - len(self._sources))):
                self._add()
        source = self._sources[place]
        return source, periods * self.parts[source] + self._before[place]

    def _add(self) -> None:
        turn = len(self._sources)
        while self._waiting and self._waiting[0][0] <= turn:
            _, source = heapq.heappop(self._waiting)
            latest = -(-(self._counts[source] + 1) * self.period // self.parts[source])
            heapq.heappush(self._ready, (latest, source))
        _, source = heapq.heappop(self._ready)
        self._sources.append(source)
        self._before.append(self._counts[source])
        self._counts[source] += 1
        earliest = self._counts[source] * self.period // self.parts[source]
        heapq.heappush(self._waiting, (earliest, source))


class Mixture(Sampler[int]):
    """The sampler of a loader over a ConcatDataset of sources. trainkit asks it for the order of an
    epoch, on each rank.

    Args:
        sizes: samples of each source.
        weights: of each source, 0 or more.
        epoch_size: samples of an epoch; None for as many as all sources have together.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], epoch_size: int | None = None
    ) -> None:
        self.sizes = sizes
        self.turns = SourceTurns(weights)
        self.epoch_size = epoch_size or sum(sizes)

    def __len__(self) -> int:
        return self.epoch_size

    def __iter__(self) -> Iterator[int]:
        return iter(self.order_of(int(torch.randint(2**62, ())), 0))

    @functools.lru_cache(maxsize=2)  # noqa: B019 - as long as the loader
    def order_of(self, seed: int, epoch: int) -> MixtureOrder:
        """Return the order of an epoch; the next one continues it."""
        return MixtureOrder(self, seed, epoch)

    def passes(self) -> list[float]:
        """Return how often an epoch reads each source."""
        return [
            self.epoch_size * part / self.turns.period / size
            for part, size in zip(self.turns.parts, self.sizes, strict=True)
        ]


class MixtureOrder(Repeating):
    """Indices into the ConcatDataset, each computed when it is asked for.

    A source is read in a new order in each pass, and no sample of it comes again before all others
    have come. A pass may begin in one epoch and end in another.
    """

    def __init__(self, mixture: Mixture, seed: int, epoch: int) -> None:
        self._mixture = mixture
        self._first = epoch * len(mixture)
        sizes = mixture.sizes
        self._offsets = [sum(sizes[:source]) for source in range(len(sizes))]

        def order(source: int, number: int) -> Sequence[int]:
            return epoch_order(sizes[source], True, mix(seed, source), number, None)

        self._order = functools.lru_cache(maxsize=2 * len(sizes))(order)

    def __len__(self) -> int:
        return len(self._mixture)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> list[int]: ...
    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        if not 0 <= place < len(self):
            raise IndexError(place)
        source, before = self._mixture.turns.at(self._first + place)
        number, at = divmod(before, self._mixture.sizes[source])
        return self._offsets[source] + int(self._order(source, number)[at])

    def copy_of(self, place: int) -> int:
        """Return the number of the pass: another one has other random numbers."""
        source, before = self._mixture.turns.at(self._first + place)
        return before // self._mixture.sizes[source]
