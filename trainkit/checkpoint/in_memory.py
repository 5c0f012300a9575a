"""Memory: a run's state in host memory, from which it continues after other ranks are lost."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from trainkit.checkpoint.stateful import with_ranks
from trainkit.checkpoint.writer import HostCopy


class Memory:
    """Holds one commit: a checkpoint's contents in host memory, which the next commit reuses.

    Attributes:
        step: its optimizer step; -1 if there is none.
    """

    def __init__(self) -> None:
        self.step = -1
        self._host = HostCopy()
        self._kept: dict[str, Any] = {}
        self._ranks: Sequence[bytes | memoryview] = ()

    def keep(
        self,
        step: int,
        weights: Mapping[str, Tensor],
        training: Mapping[str, Any],
        ranks: Sequence[bytes | memoryview],
    ) -> None:
        """Copy the state of `step` (from a GPU the copy is only queued), and keep `ranks`:
        each rank's parts, packed.
        """
        self.step = -1  # an interrupted copy is no commit
        self._kept = self._host.take({"weights": dict(weights), "training": dict(training)})
        self._host.mark()
        self._ranks = ranks
        self.step = step

    def load_into(self, model: nn.Module) -> dict[str, Any]:
        """Load the weights into `model`; return a copy of the state beside them."""
        self._host.wait()
        model.load_state_dict(self._kept["weights"])
        # A copy: an optimizer does not copy loaded tensors, and would train those of the commit.
        return copy.deepcopy(with_ranks(self._kept["training"], self._ranks))

    def forget(self) -> None:
        """Release the commit."""
        self.step, self._kept, self._ranks, self._host = -1, {}, (), HostCopy()
