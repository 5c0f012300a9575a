"""Python's collector of cycles while a command starts.

What a command imports and composes makes half a million objects, of which almost none is garbage.
The collector would look through them again and again, for a tenth to a quarter of the time until
the first step.
"""

from __future__ import annotations

import gc

_STARTING = 100_000  # objects made, less those freed, between two collections; usually 700 or 2,000
_usual: list[int] = []


def collect_rarely() -> None:
    """Collect rarely, until `collect_as_usual`: this process starts."""
    _usual[:] = gc.get_threshold()
    gc.set_threshold(_STARTING, *_usual[1:])


def collect_as_usual() -> None:
    """Collect as before `collect_rarely`, if it was called: cycles may hold a device's memory."""
    if _usual:
        gc.set_threshold(*_usual)
        _usual.clear()
