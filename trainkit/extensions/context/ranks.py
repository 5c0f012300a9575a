"""ContextRanks: the ranks that share the tokens of each sample, which FSDPEngine asks.

    cutting     a Task's step may take its part of the sequence (sequence.py); a training step must
    backward    with the same step, since activation checkpointing runs layers again

Ranks of a group read the same samples, as tensor ranks do, and each has the gradient of its own
tokens: FSDP2 splits weights, and sums gradients, over the data ranks and these.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.engine.base import HandedOn
from trainkit.engine.ddp.collectives import DDPCollectives
from trainkit.engine.ranks import Ranks
from trainkit.errors import TaskError
from trainkit.extensions.context.sequence import SharedStep

_ADVICE = (
    "See trainkit.extensions.context.sequence for what a Task and its layers call, or set"
    " engine.context=1."
)


class ContextGroup:
    """This rank's group; see sequence.Group.

    Not frozen: before the interpreter ends, groups are taken from what holds them
    (engine/ddp/collectives.py).
    """

    def __init__(self, ranks: Ranks, comm: DDPCollectives) -> None:
        # tensor ranks of the same tokens are neighbours
        self.place = ranks.rank // ranks.tensor_size % ranks.context_size
        self.ranks = ranks.context_size
        self._comm = comm
        self._group = _group_of(ranks, comm)

    def gather(self, own: Tensor) -> list[Tensor]:
        """See Group."""
        everyone = own.new_empty(self.ranks * own.numel())
        with self._comm.waiting_for("keys and values of the context ranks"):
            dist.all_gather_into_tensor(everyone, own.contiguous().view(-1), group=self._group)
        return list(everyone.view(self.ranks, *own.shape).unbind())

    def scatter_sum(self, of_ranks: list[Tensor]) -> Tensor:
        """See Group."""
        # in float32 at least, as gradients of weights are
        first = of_ranks[0]
        wide = torch.promote_types(of_ranks[0].dtype, torch.float32)
        sent = torch.stack(of_ranks).to(wide)
        own = sent.new_empty(first.shape)
        with self._comm.waiting_for("gradients of keys and values from the context ranks"):
            dist.reduce_scatter_tensor(own.view(-1), sent.view(-1), group=self._group)
        return own.to(first.dtype)

    def sum(self, own: Tensor) -> Tensor:
        """See Group."""
        total = own.detach().clone()
        with self._comm.waiting_for("a sum over context ranks"):
            dist.all_reduce(total, group=self._group)
        return total


class ContextRanks:
    """See the module. Make it on all ranks."""

    def __init__(self, ranks: Ranks, comm: DDPCollectives) -> None:
        self._group = ContextGroup(ranks, comm)

    def cutting(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a Task's step in which its part of a sequence can be taken.

        Args:
            name: of the step.
        """

        @functools.wraps(step)
        def cut(*args: Any, **kwargs: Any) -> Any:
            if SharedStep.open is not None:  # a step of the Task calls another one
                return step(*args, **kwargs)
            SharedStep.newest = own = SharedStep(self._group, name)
            with _opened(own):
                try:
                    outputs = step(*args, **kwargs)
                finally:
                    own.end()
            if own.length is not None or (name == "training_step" and outputs is not None):
                _check(own)
            return outputs

        return cut

    def backward(self, loss: Tensor | HandedOn, run: Callable[[Tensor | HandedOn], None]) -> None:
        """Run backward of the newest step."""
        with _opened(SharedStep.newest):
            run(loss)


@contextlib.contextmanager
def _opened(step: SharedStep | None) -> Iterator[None]:
    SharedStep.open = step
    try:
        yield
    finally:
        SharedStep.open = None


def _check(step: SharedStep) -> None:
    """Refuse a step that trains another model than one process would.

    Raises:
        TaskError: it did.
    """
    ranks = step.group.ranks
    if step.length is None:
        raise TaskError(
            f"engine.context is {ranks}, and {step.name} took no part of its sequence: each rank has"
            f" computed all of it, and gradients would count {ranks} times. Give the model"
            f" part(tokens), and compare with part(labels). {_ADVICE}"
        )
    if not step.attends:
        raise TaskError(
            f"engine.context is {ranks}, and {step.name} took its part of a sequence, but no layer"
            " called attention of trainkit.extensions.context.sequence: tokens would see those of"
            f" their own rank alone. {_ADVICE}"
        )
    if not step.sums:
        raise TaskError(
            f"engine.context is {ranks}, and {step.name} took its part of a sequence, but no sum"
            " over its parts: its loss would be that of a rank's own tokens. Return"
            f" sum_of_parts(total) / count, with the count of the whole batch. {_ADVICE}"
        )


def _group_of(ranks: Ranks, comm: DDPCollectives) -> dist.ProcessGroup:
    """Make the groups of all context ranks, and return this rank's. Call it on all ranks."""
    own: Any = None
    tensor = ranks.tensor_size
    size = ranks.tensor_size * ranks.context_size
    for first in range(0, ranks.world_size, size):
        for index in range(tensor):
            members = range(first + index, first + size, tensor)
            with comm.connecting():
                group = dist.new_group(list(members))
            if ranks.rank in members:
                own = group
    assert own is not None
    return own  # type: ignore[no-any-return]
