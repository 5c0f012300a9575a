"""Sums gradients over ranks while backward runs, beside an untouched torch optimizer.

A hook on each parameter fires when its gradient of this backward is complete. When all parameters
of a bucket are ready, the bucket's sum starts; `finish` starts what is left (parameters that took
no part) and waits. The engines supply how a bucket's sum starts and ends; this file knows no
framework. Which parameters make a bucket: buckets.py.

A sparse gradient is not summed but gathered: its rows and their values are sent to all ranks, and
rows that occur twice count as their sum. A rank without gradient sends no rows.

A parameter without gradient takes part with zeros, since the other ranks may have one. If no rank
had one, its `.grad` is None again afterwards, as in a single process (momentum and weight decay
then leave it alone). That needs to be known on the host, so it waits for the device, but only on
ranks that have such a parameter.

With communication=powersgd a bucket has two messages (low_rank.py): the second one starts when the
next bucket does, so that both travel while backward runs. All ranks do so at the same places, since
torch.distributed matches messages by their order.

Which parameters took part travels as a vector of ones and zeros, behind the gradients of the bucket
that is ready last (the carrier): a message of its own would be one more round trip in each step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.device.accelerator import empty_cache, is_accelerator
from trainkit.device.sync_guard import allowed_read
from trainkit.engine.reduce.buckets import NamedParameter
from trainkit.engine.reduce.low_rank import LowRank, TwoMessages
from trainkit.engine.reduce.sums import Bucket as Bucket
from trainkit.engine.reduce.sums import GradientSums
from trainkit.engine.reduce.wire import Wire, from_rows, no_rows, rows_of
from trainkit.errors import TaskError


@dataclass(frozen=True)
class Summed:
    """A sum of gradients, as this rank's main thread saw it.
    Times are nanoseconds of `time.perf_counter_ns`.
    """

    names: tuple[str, ...]  # of the parameters
    num_bytes: int  # that travelled from this rank, before any algorithm multiplies them
    handed_ns: int  # when it was handed over
    done_ns: int  # when the thread, which waits for one after the other, had it


class GradientReducer(GradientSums):
    """Hooks the parameters, tracks what is ready in a step, and starts its sums.

    Args:
        buckets: groups of parameters; sums start in this order when `in_order`.
        frozen: parameters that need no gradient now; each is hooked when that changes.
        in_order: whether a bucket waits for the one before it (torch.distributed matches
            collectives by order; Horovod by name).
        wire: how gradients travel.
        sparse: the parameters whose gradients are gathered as rows; each has a bucket of its own.
        low_rank: sends gradients as factors; needs `in_order`.
    """

    def __init__(
        self,
        buckets: list[list[NamedParameter]],
        frozen: list[NamedParameter],
        in_order: bool,
        wire: Wire | None = None,
        sparse: AbstractSet[Tensor] = frozenset(),
        low_rank: LowRank | None = None,
    ) -> None:
        assert in_order or low_rank is None
        self._low_rank = low_rank
        self._in_order = in_order
        self._wire = wire or Wire()
        self._sparse = sparse
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        self._place: dict[Tensor, int] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._frozen = frozen
        self._done: set[Tensor] = set()
        self._next = 0
        self._sync = True
        self._used = torch.zeros(0)
        # its sum starts in `finish`: only then it is known which parameters took part
        self._carrier: Bucket | None = None
        # on a GPU `finish` is over before the device has the sums; this is recorded behind them
        self._device_end: Any = None
        self._alone: Any = None  # the handle of the vector's own sum, if no bucket carries it
        self._summed: list[Summed] | None = None
        for entries in buckets:
            self._add_bucket(entries)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of backwards in this context on this rank."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def finish(self) -> None:
        """Start the sums that have not started, wait for all, and leave the sums in `.grad`.

        Raises:
            torch.OutOfMemoryError: there was no room for it. Other ranks wait until this one calls
                `give_up`, or ends.
        """
        self._hook_thawed()
        unused = [p for p in self._bucket_of if p.grad is None]
        used = self._used
        used.fill_(1.0)
        for parameter in unused:
            parameter.grad = _nothing(parameter, self._sparse)
            used[self._place[parameter]] = 0.0
        try:
            for bucket in self._buckets:
                if bucket.handle is None:
                    bucket.handle = self._begin(
                        bucket, self._used if bucket is self._carrier else None
                    )
            if self._low_rank is not None:
                self._low_rank.send_second(self._start_flat, self._end_flat)
            if self._carrier is None:
                self._alone = self._start_flat(self._used, "trainkit.used")
            for bucket in self._buckets:
                carried = self._complete(bucket)
                used = used if carried is None else carried
                bucket.is_summed = True
                if self._summed is not None:
                    if bucket.handed_ns and self._summed is not None:
                        self._summed.append(_summed(bucket, self._wire))
                    bucket.handed_ns = 0
            if self._alone is not None:
                self._end_flat(self._alone)
        except torch.OutOfMemoryError:
            raise
        except BaseException:
            self.reset()
            raise
        self.reset()
        if is_accelerator(self._used.device):
            self._device_end = self._device_end or torch.Event()
            self._device_end.record()
        if any(p.requires_grad for p in unused):
            with allowed_read():
                # waits for the device: only if a parameter took no part on this rank
                counts = used.tolist()
            unused = [p for p in unused if counts[self._place[p]] == 0]
        for parameter in unused:
            parameter.grad = None
        if self._low_rank is not None:
            self._low_rank.end_step([_name_in(self._bucket_of[p], p) for p in unused])

    def give_up(self) -> None:
        """After `finish` had no room: take part with zeros in the sums of this step that other ranks
        wait for. All gradients of this rank are dropped, for their memory.
        """
        for bucket in self._buckets:
            if bucket.handle is None or not self._is_in_place:
                _drop(bucket)
        empty_cache(self._used.device)
        for bucket in self._buckets:
            if bucket.handle is None:
                for _, parameter in bucket.entries:
                    parameter.grad = _nothing(parameter, self._sparse)
                flags = self._used.zero_() if bucket is self._carrier else None
                bucket.handle = self._begin(bucket, flags)
                if not self._is_in_place:
                    _drop(bucket)
        if self._carrier is None and self._alone is None:
            self._alone = self._start_flat(self._used.zero_(), "trainkit.used")
        for bucket in self._buckets:
            if not bucket.is_summed:
                self._complete(bucket) if bucket.sparse else self._wait(bucket.handle)
            _drop(bucket)
        if self._alone is not None:
            self._end_flat(self._alone)
        self.reset()

    def record(self, on: bool) -> None:
        """Start or stop recording each sum, for `take_summed`."""
        self._summed = [] if on else None

    def take_summed(self) -> list[Summed]:
        """Return the sums that were recorded since the last call."""
        taken, self._summed = self._summed or [], None if self._summed is None else []
        return taken

    def is_awaited(self) -> bool:
        """Return whether the device does not have the sums of the last `finish` yet: the main
        thread then runs ahead of them, or is blocked in a launch. May be called by another thread.
        """
        try:
            return self._device_end is not None and not self._device_end.query()
        except RuntimeError:  # the device has failed, which the main thread reports
            return False

    def outstanding(self) -> list[str]:
        """Return the parameters whose sums have started and are not done.
        May be called by another thread.
        """
        handles = [(bucket, bucket.handle) for bucket in list(self._buckets)]
        under_way = [
            (bucket, handle.handle if isinstance(handle, TwoMessages) else handle)
            for bucket, handle in handles
        ]
        waiting = [
            bucket
            for bucket, handle in under_way
            if handle is not None and not self._is_done(handle)
        ]
        return [name for bucket in waiting for name, _ in bucket.entries]

    def reset(self) -> None:
        """Forget the sums of this step that have started."""
        self._done.clear()
        self._next = 0
        self._alone = None
        if self._low_rank is not None:
            self._low_rank.owing = None
        for bucket in self._buckets:
            bucket.handle = None
            bucket.waiting = len(bucket.entries)
            bucket.is_summed = False

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _hook_thawed(self) -> None:
        """Hook parameters that were frozen when the hooks were set and are trained now."""
        thawed = [(n, p) for n, p in self._frozen if p.requires_grad]
        if thawed:
            self._frozen = [(n, p) for n, p in self._frozen if not p.requires_grad]
            for named in thawed:
                self._add_bucket([named])

    def _add_bucket(self, entries: list[NamedParameter]) -> None:
        bucket = Bucket(len(self._buckets), entries, sparse=entries[0][1] in self._sparse)
        self._buckets.append(bucket)
        if self._carries and not bucket.sparse:
            self._carrier = bucket
        for _, parameter in entries:
            self._bucket_of[parameter] = bucket
            self._place[parameter] = len(self._place)
            hook = parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]
            self._hooks.append(hook)
        device = entries[0][1].device
        self._used = torch.zeros(len(self._place), dtype=torch.float32, device=device)

    def _ready(self, parameter: nn.Parameter) -> None:
        if not self._sync:
            return
        if parameter in self._done:
            name = _name_in(self._bucket_of[parameter], parameter)
            raise TaskError(
                f"The gradient of '{name}' was computed twice in one synchronised backward"
                " (reentrant checkpointing, or a second backward in training_step). Use non-reentrant"
                " checkpointing; add the losses and return them; or self.manual_backward(loss)."
            )
        self._done.add(parameter)
        bucket = self._bucket_of[parameter]
        bucket.waiting -= 1
        if not self._in_order:
            if bucket.waiting == 0 and bucket is not self._carrier:
                bucket.handle = self._begin(bucket)
            return
        while self._next < len(self._buckets) and self._buckets[self._next].waiting == 0:
            ready = self._buckets[self._next]
            if ready is self._carrier:
                return
            ready.handle = self._begin(ready)
            self._next += 1

    def _begin(self, bucket: Bucket, flags: Tensor | None = None) -> Any:
        if self._summed is not None:
            bucket.handed_ns = time.perf_counter_ns()
        if self._low_rank is not None and self._low_rank.serves(bucket.entries):
            factors = self._low_rank.begin(bucket.entries, flags)
            factors.handle = self._start_flat(
                factors.message, f"trainkit.grad.{bucket.entries[0][0]}.p"
            )
            self._low_rank.send_second(self._start_flat, self._end_flat)
            self._low_rank.owing = factors
            return factors
        if not bucket.sparse:
            return self._start(bucket, flags)
        ((name, parameter),) = bucket.entries
        rows, values = rows_of(parameter)
        return self._start_rows(
            name, rows.contiguous(), self._wire.pack(values, summed=False).contiguous()
        )

    def _complete(self, bucket: Bucket) -> Tensor | None:
        if isinstance(bucket.handle, TwoMessages):
            assert self._low_rank is not None
            flags = self._low_rank.finish(bucket.handle, self._end_flat(bucket.handle.handle))
            return flags if bucket is self._carrier else None
        if not bucket.sparse:
            return self._end(bucket)
        ((_, parameter),) = bucket.entries
        rows, values = self._end_rows(bucket.handle)
        parameter.grad = from_rows(rows, self._wire.unpack(values, parameter.dtype), parameter)
        return None


def _nothing(parameter: nn.Parameter, sparse: AbstractSet[Tensor]) -> Tensor:
    return no_rows(parameter) if parameter in sparse else torch.zeros_like(parameter)


def _drop(bucket: Bucket) -> None:
    for _, parameter in bucket.entries:
        parameter.grad = None


def _name_in(bucket: Bucket, parameter: Tensor) -> str:
    return next(name for name, own in bucket.entries if own is parameter)


def _summed(bucket: Bucket, wire: Wire) -> Summed:
    if isinstance(bucket.handle, TwoMessages):
        size = bucket.handle.num_bytes
        return Summed(
            tuple(name for name, _ in bucket.entries),
            size,
            bucket.handed_ns,
            time.perf_counter_ns(),
        )
    size = sum(
        p.numel() * wire.dtype_of(p.dtype).itemsize for _, p in bucket.entries if not bucket.sparse
    )
    return Summed(
        tuple(name for name, _ in bucket.entries), size, bucket.handed_ns, time.perf_counter_ns()
    )
