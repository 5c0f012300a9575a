"""A permutation of more samples than fit in memory: the sample of a place is computed on access.

A place is enciphered by a Feistel network of 12 rounds over the least power of two that holds all
places, repeatedly until the result is one of them (cycle walking: Black and Rogaway 2002, "Ciphers
with Arbitrary Finite Domains", section 3). An invertible cipher of a set is a permutation of it;
with the keys of a seed, one of 2^64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

MOST_HELD = 2**22  # the longest permutation held in memory: 32 MiB, made in some 50 ms
_AT_ONCE = 2**12  # places computed together: numpy's calls cost more than their arithmetic
_ROUNDS = 12

Numbers = npt.NDArray[np.uint64]


class Permutation(Sequence[int]):
    """The numbers from 0 to `length` - 1 (up to 2^62 of them)
    in an order that depends on `seed`.
    """

    def __init__(self, length: int, seed: int) -> None:
        self._length = length
        bits = max(2, (length - 1).bit_length())
        self._low = np.uint64(bits // 2)
        self._masks = np.uint64((1 << (bits - bits // 2)) - 1), np.uint64((1 << (bits // 2)) - 1)
        self._keys = np.random.Generator(np.random.PCG64(seed)).integers(
            2**64, size=_ROUNDS, dtype=np.uint64
        )
        self._first, self._block = -1, np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> list[int]: ...
    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(self._length))]
        if not 0 <= place < self._length:
            raise IndexError(place)
        first = place - place % _AT_ONCE
        if first != self._first:
            places = np.arange(first, min(first + _AT_ONCE, self._length), dtype=np.uint64)
            self._first, self._block = first, self._walk(places).astype(np.int64)
        return int(self._block[place - first])

    def _walk(self, places: Numbers) -> Numbers:
        numbers = self._encipher(places)
        while (outside := numbers >= self._length).any():
            numbers[outside] = self._encipher(numbers[outside])
        return numbers

    def _encipher(self, numbers: Numbers) -> Numbers:
        high_mask, low_mask = self._masks
        high, low = numbers >> self._low, numbers & low_mask
        for i, key in enumerate(self._keys):
            if i % 2 == 0:
                high = high ^ (_hash(low, key) & high_mask)
            else:
                low = low ^ (_hash(high, key) & low_mask)
        return (high << self._low) | low


def _hash(numbers: Numbers, key: np.uint64) -> Numbers:
    """Return 64 bits of each (the finalizer of splitmix64, as order.mix); products wrap around."""
    mixed = numbers ^ key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
