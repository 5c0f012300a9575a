"""How a rank waits for a collective of Horovod's: it sleeps.

Horovod's own wait looks again and again without a pause, and keeps a core busy. Where ranks share
cores, that core is the one that the rank which it waits for computes on.
"""

from __future__ import annotations

import os
import time
from typing import Any

import horovod.torch as hvd

_SHORT_S = 5e-4  # so long it looks without a pause: a sleep costs a tenth of this
_LONGEST_SLEEP_S = 1e-3
_PART = 0.1  # of what it has waited: so much later than possible it ends, at most


def wait_for(handle: int) -> Any:
    """Wait for a collective that was started, and return its result; None if it was waited for
    before.

    Raises:
        HorovodInternalError: it failed, as if another rank is gone.
    """
    start = time.perf_counter()
    while not _is_done(handle):
        waited = time.perf_counter() - start
        if waited < _SHORT_S:
            os.sched_yield()
        else:
            time.sleep(min(_PART * waited, _LONGEST_SLEEP_S))
    return hvd.synchronize(handle)


def _is_done(handle: int) -> bool:
    try:
        return bool(hvd.poll(handle))
    except ValueError:  # it has been waited for before
        return True
