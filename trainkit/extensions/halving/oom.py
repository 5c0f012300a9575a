"""`trainer.halve_batch_on_oom`: if a microbatch exceeds a GPU's memory, all ranks split theirs and
retry the step.

What counts as out of memory: a microbatch's move to the device, its forward and backward, and the
sums of gradients. The optimizer's state, which the first update makes, does not: it is as large for
any batch.

The global batch, the weights of its samples and the learning rate do not change: only the memory of
a forward and backward shrinks. Each step costs one small sum over ranks, which reports a rank that
ran out of memory; no rank may continue a step that another one could not finish. Batch norm sees
smaller batches after a split, and dropout draws again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from trainkit.api.state import TrainState
from trainkit.api.view import RunView
from trainkit.data.feed import Microbatch, Moving, Step
from trainkit.device.accelerator import empty_cache
from trainkit.device.transfer import (
    Mover,
    is_record,
    with_fields,
)
from trainkit.engine.base import Engine
from trainkit.errors import ConfigError
from trainkit.run.feature import Feature
from trainkit.run.setup import Stage

_WHOLE = (
    "A batch of {0} samples is not split: it has a PackedSequence, or a list of {0} entries of {0}"
    " each, in which an entry may be one sample or a part of all. Collate the list as one tensor,"
    " or set a smaller data.batch_size."
)


def of_stage(stage: Stage) -> HalveOnOom | None:
    """Return the feature if it is asked for."""
    return HalveOnOom() if stage.options.numerics.halve_batch_on_oom else None


class HalveOnOom(Feature):
    """See the module."""

    name = "trainer.halve_batch_on_oom"
    not_by_hand = "Leave it out"
    not_split = (
        "trainer.halve_batch_on_oom is true: a rank that runs out of memory leaves the others"
        " inside a gather. Leave it out; engine.cpu_offload=true,"
        " trainer.activation_checkpointing=true or a smaller data.batch_size save memory."
    )

    def data_read(self, run: RunView) -> None:
        """Refuse mps, where running out of memory is an error like any other."""
        if run.engine.device.type == "mps":
            raise ConfigError(
                "trainer.halve_batch_on_oom is true, and on engine.device=mps torch does not say"
                " that memory ran out. Leave it out, and set a smaller data.batch_size."
            )

    def in_step(
        self, run: RunView, optimizers: Sequence[torch.optim.Optimizer]
    ) -> Mapping[str, Any]:
        """Let each step be a transaction."""
        return {"halving": Halving(run.engine, run.state, run.say)}


class Halving:
    """Takes steps as transactions over all ranks;
    `oom_pieces` of the state is the number of pieces, the same on all ranks.
    """

    def __init__(self, engine: Engine, state: TrainState, say: Callable[[str], None]) -> None:
        self._engine = engine
        self._state = state
        self._say = say
        self._is_named = False  # whether a batch that is not split was

    def __call__(
        self, step: Step, compute: Callable[[Step], None], undo: Callable[[], None]
    ) -> None:
        """Compute the gradients of a step and sum them over ranks.

        Args:
            step: its microbatches are held until the step is done.
            compute: runs forward and backward of all microbatches of a step.
            undo: resets gradients, logged values and counters to those before `compute`.

        Raises:
            torch.OutOfMemoryError: microbatches of one sample do not fit, or a batch cannot be
                split.
        """
        held = _Held(step)
        while True:
            failure = self._attempt(step._replace(microbatches=self._split(held)), compute)
            # on all ranks, also after a failure: the others' sums are in flight
            failure = self._reduce() or failure
            if self._engine.comm.sum_number(failure is not None) == 0:
                return
            undo()
            largest = max((microbatch.num_samples for microbatch in held.on_host), default=0)
            sizes = self._engine.comm.all_gather_object((largest, failure))
            if self._state.oom_pieces >= max(size for size, _ in sizes):
                raise torch.OutOfMemoryError(next(text for _, text in sizes if text is not None))
            self._state.oom_pieces *= 2
            empty_cache(self._engine.device)
            ranks = [str(rank) for rank, (_, text) in enumerate(sizes) if text is not None]
            self._say(
                f"Out of memory on rank {', '.join(ranks)}: all ranks split each microbatch into"
                f" {self._state.oom_pieces} pieces from now on and take the step again. The samples"
                " of a step and the learning rate stay the same;"
                f" data.batch_size={max(1, max(size for size, _ in sizes) // self._state.oom_pieces)}"
                " would avoid it."
            )

    def _attempt(self, step: Step, compute: Callable[[Step], None]) -> str | None:
        try:
            compute(step)
        except torch.OutOfMemoryError as error:
            return str(error)  # not the error: it holds the frames, and they hold the memory
        return None

    def _reduce(self) -> str | None:
        try:
            self._engine.reduce_gradients()
            return None
        except torch.OutOfMemoryError as error:
            failure = str(error)
        # here, where no frame of the error holds memory
        self._engine.reduce_gradients(gives_up=True)
        return failure

    def _split(self, held: _Held) -> Iterator[Microbatch]:
        if self._state.oom_pieces == 1:
            yield from held.moved()
            return
        for microbatch in held.moved():
            batches = split(microbatch.batch, microbatch.num_samples, self._state.oom_pieces)
            slices = _slices(microbatch.num_samples, len(batches))
            if len(batches) == 1 < microbatch.num_samples and not self._is_named:
                self._is_named = True
                self._say(_WHOLE.format(microbatch.num_samples))
            for i, (batch, part) in enumerate(zip(batches, slices, strict=True), 1):
                ends = i == len(slices)
                yield microbatch._replace(
                    batch=batch,
                    num_samples=part.stop - part.start,
                    is_last=microbatch.is_last and ends,
                    ends_batch=ends,
                    borrowed_follow=microbatch.borrowed_follow and ends,
                    places=None if microbatch.places is None else microbatch.places[part],
                )


def _move_of(step: Step) -> Callable[[Any], Any] | None:
    return step.microbatches.move if isinstance(step.microbatches, Moving) else None


class _Held:
    """A step's microbatches, which stay on the host for another attempt. They are moved one at a
    time, within the attempt: there may be no room.

    Those that a hook of the user moves are moved once, and then stay where they are: it may draw
    random numbers, or change the batch.
    """

    def __init__(self, step: Step) -> None:
        source, self._move = step.microbatches, _move_of(step)
        self.on_host = list(source.on_host if isinstance(source, Moving) else source)
        self._stays = not isinstance(self._move, Mover)
        self._is_moved = [self._move is None] * len(self.on_host)

    def moved(self) -> Iterator[Microbatch]:
        """Yield each on the device."""
        for i, microbatch in enumerate(self.on_host):
            if self._is_moved[i] or self._move is None:
                yield microbatch
                continue
            there = microbatch._replace(batch=self._move(microbatch.batch))
            if self._stays:
                self.on_host[i], self._is_moved[i] = there, True
            yield there
            del there


class _Unclear(Exception):
    """A part of a batch cannot be split, or in two ways."""


def split(batch: Any, num_samples: int, pieces: int) -> list[Any]:
    """Split a batch of any nesting into at most `pieces` parts along its samples; other values go
    to each part.

    Anything with as many entries as the batch has samples is split. A batch stays whole if it has
    a list of as many entries that may be samples, or parts of all of them.
    """
    try:
        return [_part(batch, num_samples, part, True) for part in _slices(num_samples, pieces)]
    except _Unclear:
        return [batch]


def _slices(num_samples: int, pieces: int) -> list[slice]:
    size = -(-num_samples // max(1, pieces))
    return [slice(first, min(first + size, num_samples)) for first in range(0, num_samples, size)]


def _part(value: Any, num_samples: int, part: slice, is_whole: bool = False) -> Any:
    def inner(item: Any) -> Any:
        return _part(item, num_samples, part)

    if isinstance(value, PackedSequence):  # its samples are interleaved
        raise _Unclear
    if isinstance(value, Tensor):
        return value[part] if value.dim() > 0 and len(value) == num_samples else value
    if isinstance(value, Mapping):
        # its class may have attributes of its own
        cut = copy.copy(value) if isinstance(value, MutableMapping) else dict(value)
        for key, item in value.items():
            cut[key] = inner(item)
        return cut
    if is_record(value):
        return with_fields(value, inner)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(inner, value))
    if isinstance(value, (list, tuple)):
        if _is_of_samples(value, num_samples, is_whole):
            return value[part]
        return type(value)(map(inner, value))
    return value


def _is_of_samples(values: Sequence[Any], num_samples: int, is_whole: bool) -> bool:
    """Whether a list has an entry for each sample: entries of one kind, as strings, or images of
    any size; the whole batch, if it has tensors of as many entries, is what default_collate made.

    Raises:
        _Unclear: as many entries of one kind may each be a part of all samples, too.
    """
    if len(values) != num_samples:
        return False
    kinds = {_kind(value) for value in values}
    are_parts = [_may_be_of_all(value, num_samples) for value in values]
    if len(kinds) > 1:
        return not any(are_parts)
    if all(are_parts) and num_samples > 1:
        if is_whole and isinstance(values[0], Tensor):
            return False
        raise _Unclear
    return True


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.dim()
    if isinstance(value, (list, tuple)):
        return type(value), frozenset(map(_kind, value))
    return type(value)


def _may_be_of_all(value: Any, num_samples: int) -> bool:
    """Whether a value may be a part of all samples: with an entry for each."""
    if isinstance(value, Tensor):
        return value.dim() > 0 and len(value) == num_samples
    if isinstance(value, Mapping):
        return bool(value) and all(_may_be_of_all(item, num_samples) for item in value.values())
    if not isinstance(value, (list, tuple)):
        return False
    kinds = {_kind(item) for item in value}
    return len(value) == num_samples and len(kinds) == 1
