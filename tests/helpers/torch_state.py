"""torch in a process that runs tests: one thread, short waits, the same random numbers."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
import torch.utils.data._utils as data_workers

from trainkit.checkpoint.stateful import random_state, set_random_state
from trainkit.data import seeding

torch.set_num_threads(1)
# so long the garbage collector waits for a worker: 5 s otherwise
data_workers.MP_STATUS_CHECK_INTERVAL = 0.2


@contextlib.contextmanager
def fixed_random_state() -> Iterator[None]:
    """Begin with the same random numbers, and leave the state as it was found."""
    before = random_state()
    seeding._of_user.clear()
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    try:
        yield
    finally:
        set_random_state(before)
