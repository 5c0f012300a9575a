"""A step that takes its part as one of several ranks would, in one process: its tensors have the
sizes of a rank's, their numbers are of no use. `plan` measures memory with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from trainkit.extensions.context.sequence import SharedStep


class PretendedGroup:
    """The first of some ranks, which gets back what it sends; see sequence.Group.

    Attributes:
        sent: bytes that a rank sends in a forward and its backward, by a ring.
    """

    place = 0

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.sent = 0

    def gather(self, own: Tensor) -> list[Tensor]:
        """See Group."""
        # keys and values there, and their gradients back
        self.sent += 2 * (self.ranks - 1) * own.numel() * own.element_size()
        return [own] * self.ranks

    def scatter_sum(self, of_ranks: list[Tensor]) -> Tensor:
        """See Group."""
        return of_ranks[0]

    def sum(self, own: Tensor) -> Tensor:
        """See Group."""
        return own.detach().clone()


@contextlib.contextmanager
def pretended_step(task: nn.Module, group: PretendedGroup) -> Iterator[SharedStep]:
    """Let what runs within the context be a step of a rank of the group."""
    models = [each for each in task.modules() if hasattr(each, "set_attn_implementation")]
    chosen = _share(models[0]) if models else None
    SharedStep.open = step = SharedStep(group, "plan")
    try:
        yield step
    finally:
        SharedStep.open = None
        if chosen is not None:
            _model(models[0]).set_attn_implementation(chosen)


def _share(model: nn.Module) -> str:
    """Let a model of transformers compute attention with all keys; return what it did before."""
    from trainkit.extensions.context.transformers import NAME, register

    chosen: str = _model(model).config._attn_implementation
    register()
    _model(model).set_attn_implementation(NAME)
    return chosen


def _model(module: nn.Module) -> Any:
    return module
