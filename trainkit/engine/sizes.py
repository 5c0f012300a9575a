"""How large a parameter is, whichever part of it this rank holds."""

from __future__ import annotations

from torch import Tensor


def numel_of(parameter: Tensor) -> int:
    """Return the number of elements of the whole parameter;
    DeepSpeed's stage 3 leaves an empty tensor and a note of it.
    """
    return int(getattr(parameter, "ds_numel", parameter.numel()))
