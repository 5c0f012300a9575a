"""Memory: a run's state in host memory, from which it continues after other ranks are lost."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.checkpoint.stateful import with_ranks
from trainkit.checkpoint.writer import HostCopy
from trainkit.device.shards import is_spread, local_of


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
        self._kept = self._host.take(
            {
                "weights": {name: local_of(weight) for name, weight in weights.items()},
                "training": dict(training),
            }
        )
        self._host.mark()
        self._ranks = ranks
        self.step = step

    def load_into(self, model: nn.Module) -> dict[str, Any]:
        """Load the weights into `model`; return a copy of the state beside them."""
        self._host.wait()
        load_local(model, self._kept["weights"])
        # A copy: an optimizer does not copy loaded tensors, and would train those of the commit.
        return copy.deepcopy(with_ranks(self._kept["training"], self._ranks))

    def forget(self) -> None:
        """Release the commit."""
        self.step, self._kept, self._ranks, self._host = -1, {}, (), HostCopy()


def load_local(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load what this rank holds of a model's weights."""
    own: dict[str, Tensor] = model.state_dict()
    if not any(map(is_spread, own.values())):
        model.load_state_dict(weights)
        return
    with torch.no_grad():
        for name, tensor in own.items():
            local_of(tensor).copy_(weights[name])
