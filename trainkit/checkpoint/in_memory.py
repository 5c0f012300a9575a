"""Memory: the state of a run, kept in this process, from which it goes on when other ranks are lost."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from trainkit.checkpoint.stateful import with_ranks
from trainkit.checkpoint.writer import HostCopy


class Memory:
    """Holds one commit: what a checkpoint holds, in host memory that is made once and used again by the next commit.

    Attributes:
        step: the optimizer step that it is of; -1 while there is none.
    """

    def __init__(self) -> None:
        self.step = -1
        self._host = HostCopy()
        self._kept: dict[str, Any] = {}
        self._ranks: Sequence[bytes | memoryview] = ()

    def keep(
        self, step: int, weights: Mapping[str, Tensor], training: Mapping[str, Any], ranks: Sequence[bytes | memoryview]
    ) -> None:
        """Copy the state of `step`; the copy from a GPU is queued, and nobody waits for it.

        Args:
            step: its number.
            weights: by name.
            training: what is kept beside them, but for the ranks' own.
            ranks: each rank's own, packed: they stay as they came until somebody goes on from them.
        """
        self.step = -1  # a copy that breaks off half-way is none
        self._kept = self._host.take({"weights": dict(weights), "training": dict(training)})
        self._host.mark()
        self._ranks = ranks
        self.step = step

    def load_into(self, model: nn.Module) -> dict[str, Any]:
        """Load the weights into `model`; return what was kept beside them, as the caller's own."""
        self._host.wait()
        model.load_state_dict(self._kept["weights"])
        # Its own: an optimizer takes tensors over as they are, and would train what is kept here.
        return copy.deepcopy(with_ranks(self._kept["training"], self._ranks))

    def forget(self) -> None:
        """Let go of what is kept."""
        self.step, self._kept, self._ranks, self._host = -1, {}, (), HostCopy()
