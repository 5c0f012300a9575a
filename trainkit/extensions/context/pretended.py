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
    """Let what runs within the context be a step of a rank of the group.

    Raises:
        ConfigError: the task's model, of transformers, takes no attention but its own.
    """
    models: list[Any] = [
        each for each in task.modules() if hasattr(each, "set_attn_implementation")
    ]
    step = SharedStep(group, "plan")
    with contextlib.ExitStack() as stack:
        for model in models[:1]:  # it sets those inside of it
            from trainkit.extensions.context.transformers import set_attention

            before = model.config._attn_implementation
            set_attention(model, group.ranks)
            stack.callback(model.set_attn_implementation, before)
        stack.callback(setattr, SharedStep, "open", None)
        SharedStep.open = step
        yield step
