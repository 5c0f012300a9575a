"""Random numbers of a step whose ranks read the same samples: a seed that all of them draw, and
numbers of each rank that follow from it.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from trainkit.checkpoint.stateful import random_state, set_random_state


def drawn_seed() -> int:
    """Draw a seed; the same on all ranks of a model, which draw nothing else of this stream."""
    return int(torch.randint(2**31, ()).item())


@contextlib.contextmanager
def numbers_of(seed: int) -> Iterator[None]:
    """Within the context random numbers are those of a seed; after it they continue."""
    before = random_state()
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    seed_torch(seed)
    try:
        yield
    finally:
        set_random_state(before)


def seed_torch(seed: int) -> None:
    """As torch.manual_seed, which for each kind of device that has not started writes the stack
    down: milliseconds in each pass.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
