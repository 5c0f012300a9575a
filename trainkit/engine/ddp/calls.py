"""From which lines ranks exchange objects: if one of them calls something alone, such as
`trainer.save_checkpoint`, its exchange meets another one of the other ranks.

torch matches collectives by their order alone: each would read the other's objects as its own. So
the place of the call travels with them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from trainkit.errors import EngineError

_PACKAGE = "trainkit"
_BETWEEN = (_PACKAGE, "torch", "contextlib", "functools")  # packages between it and the user's code


class Call(NamedTuple):
    """A call of a collective.

    Attributes:
        function: of trainkit, that calls it; "" for one of the user's.
        line: the user's innermost, as "train.py, line 12".
    """

    function: str
    line: str


def here() -> Call:
    """Return where this rank is: the function beyond those of modules named collectives, and the
    user's line.
    """
    frame = inspect.currentframe()
    while frame is not None and _module(frame).endswith((".collectives", ".calls")):
        frame = frame.f_back
    function = "" if frame is None or _package(frame) != _PACKAGE else _name(frame)
    while frame is not None and _package(frame) in _BETWEEN:
        frame = frame.f_back
    line = "" if frame is None else f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
    return Call(function, line)


def compare(calls: Mapping[int, Call]) -> None:
    """Compare the calls of ranks, whose objects have met.

    Raises:
        EngineError: their functions differ.
    """
    if len({call.function for call in calls.values()}) == 1:
        return
    first = min(calls)
    other = next(rank for rank, call in calls.items() if call.function != calls[first].function)
    where = " and ".join(f"rank {rank} at {calls[rank].line}" for rank in (first, other))
    raise EngineError(
        f"Ranks exchange different things: {where}. Something that needs all ranks was called on"
        " some of them, as trainer.save_checkpoint or self.all_gather in `if"
        " trainer.is_global_zero`. Call it on all ranks: files are written by rank 0 alone anyway."
    )


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _package(frame: FrameType) -> str:
    return _module(frame).partition(".")[0]


def _name(frame: FrameType) -> str:
    return f"{_module(frame)}.{frame.f_code.co_name}"
