"""Memory: a run's state in host memory, from which it continues after other ranks are lost."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainkit.checkpoint.stateful import own_parts, with_ranks
from trainkit.checkpoint.writer import HostCopy
from trainkit.device.shards import is_spread, local_of

_SMALL_BYTES = 1 << 16  # of a tensor that is copied where others are only held


class _Held(NamedTuple):
    """A state whose large tensors are those that train."""

    step: int
    weights: Mapping[str, Tensor]
    training: Mapping[str, Any]
    ranks: Sequence[bytes | memoryview]
    versions: Sequence[tuple[Tensor, int]]


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
        self._held: _Held | None = None

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
        self.step, self._held = -1, None  # an interrupted copy is no commit
        own = {name: local_of(weight) for name, weight in weights.items()}
        self._kept = self._host.take({"weights": own, "training": own_parts(dict(training))})
        self._host.mark()
        self._ranks = ranks
        self.step = step

    def hold(
        self,
        step: int,
        weights: Mapping[str, Tensor],
        training: Mapping[str, Any],
        ranks: Sequence[bytes | memoryview],
    ) -> None:
        """Note the state of `step` without copying its large tensors: `settle` does, if it is needed
        before they change. Arguments as of `keep`.
        """
        large: list[Tensor] = []
        held = _holding_weights(weights, large), _holding(dict(training), large)
        watched = [(one, one._version) for tensor in large for one in {tensor, local_of(tensor)}]
        self._held = _Held(step, *held, ranks, watched)

    @property
    def can_settle(self) -> bool:
        """Whether the tensors that are held are as they were."""
        return self._held is not None and all(
            one._version == old for one, old in self._held.versions
        )

    def settle(self, step: int) -> None:
        """Copy the state that is held, if it is that of `step` and newer than the last commit."""
        held = self._held
        if held is not None and held.step == step > self.step and self.can_settle:
            self.keep(held.step, held.weights, held.training, held.ranks)
        self._held = None

    def load_into(self, model: nn.Module) -> dict[str, Any]:
        """Load the weights into `model`; return a copy of the state beside them."""
        weights, training = self.read()
        _load(model, weights)
        return training

    def read(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the weights, and a copy of the state beside them."""
        self._host.wait()
        # A copy: an optimizer does not copy loaded tensors, and would train those of the commit.
        training = copy.deepcopy(with_ranks(self._kept["training"], self._ranks))
        return self._kept["weights"], training

    def forget(self) -> None:
        """Release the commit."""
        self.step = -1
        self._kept = {}
        self._ranks = ()
        self._host = HostCopy()
        self._held = None


def _load(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load what this rank holds of a model's weights."""
    own: dict[str, Tensor] = model.state_dict()
    if not any(map(is_spread, own.values())):
        model.load_state_dict(weights)
        return
    with torch.no_grad():
        for name, tensor in own.items():
            local_of(tensor).copy_(weights[name])


def _holding_weights(weights: Mapping[str, Tensor], large: list[Tensor]) -> dict[str, Tensor]:
    held = {name: _held(weight, large) for name, weight in weights.items()}
    return {name: local_of(weight) for name, weight in held.items()}


def _held(tensor: Tensor, large: list[Tensor]) -> Tensor:
    own = local_of(tensor)
    if own.numel() * own.element_size() <= _SMALL_BYTES:
        return tensor.detach().clone()
    large.append(tensor)
    return tensor


def _holding(tree: Any, large: list[Tensor]) -> Any:
    """Return a tree of dicts, lists and tuples with copies of its small tensors; the others are
    added to `large`.
    """
    if isinstance(tree, Tensor):
        return _held(tree, large)
    if isinstance(tree, dict):
        copied = type(tree)()
        for key, value in tree.items():
            copied[key] = _holding(value, large)
        return copied
    return type(tree)(_holding(one, large) for one in tree) if type(tree) in (list, tuple) else tree
