"""What a rank says if the others do not come: a start that hangs in silence looks like a slow one."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from trainkit.console import plural, warning
from trainkit.engine.ranks import Ranks
from trainkit.launch.environment import read_launcher
from trainkit.safety.threads import printed, start_thread

_AFTER_S = 20.0


@contextlib.contextmanager
def named(ranks: Ranks) -> Iterator[None]:
    """Within the context, in which this rank meets the others: after 20 s the first rank of each
    host prints what it waits for.
    """
    if ranks.local_rank > 0 or ranks.world_size == 1:
        yield
        return
    met = threading.Event()

    def watch() -> None:
        if not met.wait(_AFTER_S):
            warning(_sentence(ranks))

    start_thread("late ranks", watch, printed("It prints nothing if ranks are late."))
    try:
        yield
    finally:
        met.set()


def _sentence(ranks: Ranks) -> str:
    others = plural(ranks.world_size - 1, "other rank")
    place = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}".strip(":")
    start = f"Rank {ranks.rank} has waited {_AFTER_S:.0f} s for {others} to come"
    start += f" at {place}." if place else "."
    if read_launcher().name != "env":
        return f"{start} It waits on; the output of their hosts says why they are late."
    return (
        f"{start} It waits on. They are expected since MASTER_ADDR, RANK={ranks.rank} and"
        f" WORLD_SIZE={ranks.world_size} are set in the environment: start the others with the same"
        " WORLD_SIZE, or, if this should be one process: unset RANK WORLD_SIZE MASTER_ADDR"
    )
