"""Links: what travels between neighbouring stages of one model.

    request     once for each kind of step: which arguments of the next stage's first layer depend
                on earlier stages
    forward     a header (shapes and dtypes, by the host), then these tensors
    backward    their gradients, whose shapes are known

Forward and backward have a group of their own each: NCCL runs what one group sends in order, and
both directions are under way at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.engine.collectives import Collectives

_DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)
_MOST, _DIMENSIONS = 16, 8  # tensors, and dimensions of one
_ROW = 3 + _DIMENSIONS


@dataclass
class Group:
    """The ranks of one model that hold the stages of it, by stage, and their groups.

    A dataclass that is not frozen: before the interpreter ends, groups are taken from what holds
    them (engine/ddp/collectives.py).
    """

    ranks: Sequence[int]
    forward: Any
    backward: Any


class Links:
    """Sends to the next and the previous stage, and receives from them.

    Args:
        in_flight: tensors that may be under way; beyond them a send waits for the oldest.
    """

    def __init__(
        self, group: Group, stage: int, device: torch.device, comm: Collectives, in_flight: int
    ) -> None:
        self._group, self._stage, self._device, self._comm = group, stage, device, comm
        self._in_flight = in_flight
        self._sent: deque[tuple[Any, Tensor]] = deque()

    def request(self, places: Sequence[int]) -> None:
        """Ask the previous stage for arguments of its last call, by their places."""
        table = torch.full((_MOST,), -1, dtype=torch.int64)
        table[: len(places)] = torch.tensor(places, dtype=torch.int64)
        self._send(table, self._stage - 1, self._group.backward)

    def requested(self) -> list[int]:
        """Return what the next stage asks for."""
        table = torch.empty(_MOST, dtype=torch.int64)
        self._receive(table, self._stage + 1, self._group.backward)
        return [int(place) for place in table if place >= 0]

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send tensors to the next stage; they must not be written to until it has them."""
        header = torch.zeros(_MOST, _ROW, dtype=torch.int64)
        for row, tensor in zip(header, tensors, strict=False):
            numbers = [1 + _DTYPES.index(tensor.dtype), tensor.requires_grad, tensor.dim()]
            row[: 3 + tensor.dim()] = torch.tensor([*numbers, *tensor.shape])
        self._send(header, self._stage + 1, self._group.forward)
        for tensor in tensors:
            self._send(tensor.detach().contiguous(), self._stage + 1, self._group.forward)

    def receive(self) -> list[Tensor]:
        """Return what the previous stage sends: tensors that will hold its gradients."""
        header = torch.empty(_MOST, _ROW, dtype=torch.int64)
        self._receive(header, self._stage - 1, self._group.forward)
        tensors = []
        for dtype, requires_grad, dimensions, *sizes in header.tolist():
            if not dtype:
                break
            tensor = torch.empty(sizes[:dimensions], dtype=_DTYPES[dtype - 1], device=self._device)
            self._receive(tensor, self._stage - 1, self._group.forward)
            tensors.append(tensor.requires_grad_(bool(requires_grad)))
        return tensors

    def send_gradients(self, tensors: Sequence[Tensor]) -> None:
        """Send the gradients of received tensors to the previous stage."""
        for tensor in tensors:
            if tensor.requires_grad:
                own = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                self._send(own.contiguous(), self._stage - 1, self._group.backward)

    def receive_gradients(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of tensors that the next stage has received."""
        gradients = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
        for gradient in gradients:
            self._receive(gradient, self._stage + 1, self._group.backward)
        return gradients

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over the stages of this model."""
        total = tensor.detach().clone()
        with self._comm.waiting_for("a sum over pipeline stages"):
            dist.all_reduce(total, group=self._group.forward)
        return total

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        while self._sent:
            self._wait()

    def release(self) -> None:
        """Drop what was sent, and has arrived: all ranks have met since. Waits for nothing, so that
        a rank with an error ends.
        """
        self._sent.clear()

    def _send(self, tensor: Tensor, stage: int, group: Any) -> None:
        while len(self._sent) >= self._in_flight:
            self._wait()
        with self._comm.waiting_for(f"pipeline stage {stage}"):
            self._sent.append((dist.isend(tensor, self._group.ranks[stage], group=group), tensor))

    def _wait(self) -> None:
        work, _ = self._sent[0]
        with self._comm.waiting_for("the neighbouring pipeline stages"):
            work.wait()
        self._sent.popleft()

    def _receive(self, tensor: Tensor, stage: int, group: Any) -> None:
        with self._comm.waiting_for(f"pipeline stage {stage}"):
            dist.recv(tensor, self._group.ranks[stage], group=group)


def make_group(
    world_size: int, tensor: int, stages: int, rank: int, sockets: Callable[[], Any]
) -> Group:
    """Make the groups of all models' stages, and return this rank's. Call it on all ranks.

    Neighbouring ranks are a model's; its last stage is that of its first ranks.

    Args:
        tensor: ranks of a stage that share its widths; each has a link of its own.
        sockets: a context within which groups connect.
    """
    own: Group | None = None
    size = tensor * stages
    for first in range(0, world_size, size):
        for index in range(tensor):
            ranks = [first + index + tensor * place for place in reversed(range(stages))]
            with sockets():
                groups = [dist.new_group(sorted(ranks)) for _ in range(2)]
            if rank in ranks:
                own = Group(ranks, *groups)
    assert own is not None
    return own
