"""The counting of FLOPs, which is torch's."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode


def flop_counter() -> FlopCounterMode:
    """Return a context that counts the FLOPs of what runs in it."""
    from torch.utils.flop_counter import FlopCounterMode  # here: it brings triton, 0.1 s that every start would pay

    return FlopCounterMode(display=False)
