"""Sums and gathers over the samples of a run: ranks that compute one model (engine.tensor,
engine.pipeline, engine.context) read the same samples and count once, by their first.

What splits or counts samples uses `engine.ranks.data_rank` and `data_size`, and these collectives in
place of `engine.comm`'s. On an engine with one rank a model they are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainkit.engine.collectives import Collectives


class OverData:
    """See the module. Results are equal on all ranks, bit for bit,
    so that ranks which decide by them decide alike.
    """

    def __init__(self, comm: Collectives) -> None:
        self._comm = comm

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over data ranks; see Collectives."""
        return self._comm.all_reduce(
            tensor if self._comm.ranks.counts_samples else torch.zeros_like(tensor)
        )

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all data ranks, in their order; see Collectives."""
        return self._comm.all_gather_object(value)[:: self._comm.ranks.model_size]

    def sum_number(self, number: int) -> int:
        """Return the sum over data ranks of an integer of the host; see Collectives."""
        return self._comm.sum_number(number if self._comm.ranks.counts_samples else 0)
