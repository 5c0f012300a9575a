"""Links: what travels between neighbouring stages of one model.

    request     once for each kind of step: which arguments of the next stage's first layer depend
                on earlier stages
    forward     a header (shapes and dtypes, by the host), then these tensors
    backward    their gradients, whose shapes are known

Stages are on ranks in turn, so neighbouring ranks are linked, and the last one with the first if a
rank holds several. What one group sends NCCL runs in order, receives too, and a rank would wait for
what it receives before it sends what others wait for. So in each group a rank only sends, or only
receives: links take two groups in turn (the last of an odd ring a third one), and forward and
backward have groups of their own.

Between two ranks all arrives in the order in which it was sent, and is received in this order
(schedule.py). A send that is under way holds its tensor, so a rank waits for it, but never longer
than the order of passes does. Outputs have arrived if their pass has its gradients. Of gradients
that are sent back, all but the latest have: as many as the passes that their receiver has open.
Without interleaving no link leads back to a rank that waits, and two are enough.
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
from trainkit.errors import TaskError
from trainkit.extensions.pipeline.schedule import StageSchedule

_DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)
_MOST, _DIMENSIONS = 16, 8  # tensors, and dimensions of one
_ROW = 3 + _DIMENSIONS
_FEWER = (
    "Concatenate or flatten what is handed on, or let the Task's pipeline_stages() begin the stage"
    " at another layer."
)
_UNANSWERED = 2  # messages of an evaluation that may be under way
Message = list[tuple[Any, Tensor]]  # sends under way, and what they read


@dataclass
class StageGroup:
    """The ranks of one model that hold the stages of it, in their order, and their groups by lane.

    A dataclass that is not frozen, and lists: before the interpreter ends, groups are taken from
    what holds them (engine/ddp/collectives.py).
    """

    ranks: Sequence[int]
    forward: list[Any]
    backward: list[Any]


class Links:
    """Sends to the ranks of the next and the previous stage, and receives from them. A stage is this
    rank's that sends or receives.

    Args:
        place: of this rank among those of the group.
        schedule: how many passes are open at once.
    """

    def __init__(
        self,
        group: StageGroup,
        place: int,
        schedule: StageSchedule,
        device: torch.device,
        comm: Collectives,
    ) -> None:
        self._group, self._device, self._comm = group, device, comm
        self._size = schedule.ranks
        self._most_gradients = schedule.gradients_under_way(place)
        self._sent: deque[Message] = deque()
        self._gradients: deque[Message] = deque()

    def request(self, stage: int, places: Sequence[int]) -> None:
        """Ask the previous stage for arguments of its last call, by their places.

        Raises:
            TaskError: there are too many.
        """
        if len(places) > _MOST:
            raise TaskError(
                f"The first layer of pipeline stage {stage} takes {len(places)} tensors of the"
                f" stage before it; there can be {_MOST}. {_FEWER}"
            )
        table = torch.full((_MOST,), -1, dtype=torch.int64)
        table[: len(places)] = torch.tensor(places, dtype=torch.int64)
        self._sent.append(self._send([table], stage, stage - 1))

    def requested(self, stage: int) -> list[int]:
        """Return what the next stage asks for."""
        table = torch.empty(_MOST, dtype=torch.int64)
        self._receive(table, stage + 1, stage)
        return [int(place) for place in table if place >= 0]

    def send(self, stage: int, tensors: Sequence[Tensor]) -> Message:
        """Send tensors to the next stage; they must not be written to until it has them.

        Returns:
            What `wait` or `hold` takes.

        Raises:
            TaskError: one has too many dimensions.
        """
        header = torch.zeros(_MOST, _ROW, dtype=torch.int64)
        for row, tensor in zip(header, tensors, strict=False):
            if tensor.dim() > _DIMENSIONS:
                raise TaskError(
                    f"Pipeline stage {stage} hands on a tensor of shape {list(tensor.shape)}; it"
                    f" can have {_DIMENSIONS} dimensions. {_FEWER}"
                )
            numbers = [1 + _DTYPES.index(tensor.dtype), tensor.requires_grad, tensor.dim()]
            row[: 3 + tensor.dim()] = torch.tensor([*numbers, *tensor.shape])
        sent = [header, *(tensor.detach().contiguous() for tensor in tensors)]
        return self._send(sent, stage, stage + 1)

    def receive(self, stage: int) -> list[Tensor]:
        """Return what the previous stage sends: tensors that will hold its gradients."""
        header = torch.empty(_MOST, _ROW, dtype=torch.int64)
        self._receive(header, stage - 1, stage)
        tensors = []
        for dtype, requires_grad, dimensions, *sizes in header.tolist():
            if not dtype:
                break
            tensor = torch.empty(sizes[:dimensions], dtype=_DTYPES[dtype - 1], device=self._device)
            self._receive(tensor, stage - 1, stage)
            tensors.append(tensor.requires_grad_(bool(requires_grad)))
        return tensors

    def send_gradients(self, stage: int, tensors: Sequence[Tensor]) -> None:
        """Send the gradients of received tensors to the previous stage."""
        sent = [
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.contiguous()
            for tensor in tensors
            if tensor.requires_grad
        ]
        if sent:
            self._settle(self._gradients, self._most_gradients - 1)
            self._gradients.append(self._send(sent, stage, stage - 1))

    def expect_gradients(self, stage: int, tensors: Sequence[Tensor]) -> Message:
        """Begin to receive the gradients of tensors that the next stage has received: they travel
        while this rank computes something else.

        Returns:
            What `arrived` takes.
        """
        gradients = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
        return self._expect(gradients, stage + 1, stage)

    def arrived(self, stage: int, message: Message) -> list[Tensor]:
        """Wait for a message of the next stage, and return its tensors."""
        self.wait(message, f"pipeline stage {stage + 1}")
        return [tensor for _, tensor in message]

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over the stages of this model."""
        total = tensor.detach().clone()
        with self._comm.waiting_for("a sum over pipeline stages"):
            dist.all_reduce(total, group=self._group.forward[0])
        return total

    def wait(self, message: Message, what: str = "the neighbouring pipeline stages") -> None:
        """Wait until a message has arrived; `what` is reported meanwhile."""
        with self._comm.waiting_for(what):
            for work, _ in message:
                work.wait()

    def hold(self, message: Message) -> None:
        """Hold a message for which no gradients come, and wait for earlier ones."""
        self._sent.append(message)
        self._settle(self._sent, _UNANSWERED)

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        self._settle(self._sent, 0)
        self._settle(self._gradients, 0)

    def release(self) -> None:
        """Drop what was sent, and has arrived: all ranks have met since. Waits for nothing, so that
        a rank with an error ends.
        """
        self._sent.clear()
        self._gradients.clear()

    def _settle(self, sent: deque[Message], most: int) -> None:
        """Wait until at most so many messages are under way."""
        while len(sent) > most:
            self.wait(sent.popleft())

    def _send(self, tensors: Sequence[Tensor], stage: int, to: int) -> Message:
        rank, group = self._group.ranks[to % self._size], self._group_of(stage, to)
        with self._comm.waiting_for(f"pipeline stage {to}"):
            return [(dist.isend(tensor, rank, group=group), tensor) for tensor in tensors]

    def _receive(self, tensor: Tensor, stage: int, to: int) -> None:
        message = self._expect([tensor], stage, to)
        self.wait(message, f"pipeline stage {stage}")

    def _expect(self, tensors: Sequence[Tensor], stage: int, to: int) -> Message:
        rank = self._group.ranks[stage % self._size]
        group = self._group_of(stage, to)
        with self._comm.waiting_for(f"pipeline stage {stage}"):
            return [(dist.irecv(tensor, rank, group=group), tensor) for tensor in tensors]

    def _group_of(self, stage: int, to: int) -> Any:
        groups = self._group.forward if to > stage else self._group.backward
        return groups[_lane(min(stage, to), self._size)]


def _lane(stage: int, ranks: int) -> int:
    """Return the lane of the link between a stage and the next one."""
    rank = stage % ranks
    return 2 if ranks % 2 and rank == ranks - 1 else rank % 2


def make_group(
    world_size: int, tensor: int, schedule: StageSchedule, rank: int, sockets: Callable[[], Any]
) -> StageGroup:
    """Make the groups of all models' stages, and return this rank's. Call it on all ranks.

    Neighbouring ranks are a model's; its last stage is that of its first ranks.

    Args:
        tensor: ranks of a stage that share its widths; each has a link of its own.
        sockets: a context within which groups connect.
    """
    own: StageGroup | None = None
    size = tensor * schedule.ranks
    lanes = sorted({_lane(stage, schedule.ranks) for stage in range(schedule.stages - 1)})
    for first in range(0, world_size, size):
        for index in range(tensor):
            ranks = [first + index + tensor * place for place in reversed(range(schedule.ranks))]
            with sockets():
                forward, backward = (
                    [dist.new_group(sorted(ranks)) for _ in lanes] for _ in range(2)
                )
            if rank in ranks:
                own = StageGroup(ranks, forward, backward)
    assert own is not None
    return own
