"""The state of Python's `random`, saved and restored in a microsecond.

`random.getstate()` makes a tuple of 624 numbers, which takes twenty times as long as a batch of a
small data set. CPython's generator is plain memory behind the object's header
(Modules/_randommodule.c: an index and 624 words), so its bytes are copied instead, if a check at
the first use finds that this restores it; elsewhere getstate and setstate are used.
"""

from __future__ import annotations

import ctypes
import random
from typing import Any

# The bytes of the generator or what getstate returns, and the second of a pair of normals.
PythonState = tuple[Any, float | None]


class _Memory:
    """The bytes of a generator."""

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator  # lives as long as its bytes are looked at
        header = object.__basicsize__
        size = random.Random.__base__.__basicsize__ - header  # type: ignore[union-attr]
        self._bytes = (ctypes.c_char * size).from_address(id(generator) + header)

    def save(self) -> PythonState:
        return self._bytes.raw, self._generator.gauss_next  # type: ignore[attr-defined]

    def restore(self, state: PythonState) -> None:
        self._bytes.raw, self._generator.gauss_next = state  # type: ignore[attr-defined]


class _Portable:
    """The same by the public functions."""

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator

    def save(self) -> PythonState:
        return self._generator.getstate(), None

    def restore(self, state: PythonState) -> None:
        self._generator.setstate(state[0])


def is_plain_memory() -> bool:
    """Return whether the bytes of a generator are its state, found by trying."""
    try:
        num_bytes = random.Random.__base__.__basicsize__ - object.__basicsize__  # type: ignore[union-attr]
        if not 4 * 625 <= num_bytes <= 4 * 625 + 8:
            return False
        one = random.Random(1)
        memory = _Memory(one)
        state, known = memory.save(), one.getstate()
        drawn = [one.random() for _ in range(700)]  # more than the words: all of them change
        memory.restore(state)
        return one.getstate() == known and [one.random() for _ in range(700)] == drawn
    except (AttributeError, TypeError, ValueError):
        return False


_OF_MODULE: random.Random = random._inst
_state_of = _Memory(_OF_MODULE) if is_plain_memory() else _Portable(_OF_MODULE)
save_python = _state_of.save
restore_python = _state_of.restore
