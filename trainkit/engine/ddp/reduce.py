"""Sums of gradients by torch.distributed.

Gradients are summed in buckets of about 25 MB while backward runs, as torch's own
DistributedDataParallel does (Li et al. 2020, section 3.2.3), but by hooks on the parameters: the
user's `training_step` needs no wrapper around the model, and a rank without a sample in a step
takes part with zeros.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.device.sync_guard import allowed_read
from trainkit.engine.reduce.buckets import NamedParameter
from trainkit.engine.reduce.low_rank import LowRank
from trainkit.engine.reduce.reducer import Bucket, GradientReducer
from trainkit.engine.reduce.wire import Wire, laid_out
from trainkit.engine.sending import dense_view


class BucketReducer(GradientReducer):
    """Each bucket's gradients as one flat buffer and one asynchronous all_reduce. `.grad` is a view
    of it as soon as the sum starts, so gradients are held once; after it, if they are narrowed on
    the way.

    Args:
        buckets, frozen, wire, sparse, low_rank: see GradientReducer.
        group: the ranks that take part; None for all.
    """

    def __init__(
        self,
        buckets: list[list[NamedParameter]],
        frozen: list[NamedParameter],
        wire: Wire,
        sparse: AbstractSet[Tensor],
        group: dist.ProcessGroup | None,
        low_rank: LowRank | None = None,
    ) -> None:
        super().__init__(
            buckets, frozen, in_order=True, wire=wire, sparse=sparse, low_rank=low_rank
        )
        self._group = group

    def _start(self, bucket: Bucket, flags: Tensor | None) -> Any:
        pieces = []
        for _, parameter in bucket.entries:
            grad = laid_out(parameter)
            # the strides of a weight with gaps in memory are not its gradient's: row by row then
            flat = dense_view(grad) if grad.stride() == parameter.stride() else None
            pieces.append(grad.reshape(-1) if flat is None else flat)
        if flags is not None:
            pieces.append(flags.to(pieces[0].dtype))
        flat = torch.cat(pieces)
        buffer = self._wire.pack(flat)
        views = _put(bucket, flat) if buffer is flat else None
        return dist.all_reduce(buffer, group=self._group, async_op=True), buffer, views

    def _end(self, bucket: Bucket) -> Tensor | None:
        work, buffer, views = bucket.handle
        work.wait()
        total = self._wire.unpack(buffer, bucket.entries[0][1].dtype)
        if views is None or total is not buffer:
            _put(bucket, total)
        else:
            # a hook may have put another tensor there, whose sum this is not
            for (_, parameter), view in zip(bucket.entries, views, strict=True):
                if parameter.grad is not view:
                    parameter.grad = view
        size = sum(parameter.numel() for _, parameter in bucket.entries)
        return total[size:] if bucket is self._carrier else None

    def _wait(self, handle: Any) -> None:
        handle[0].wait()

    def _start_rows(self, name: str, rows: Tensor, values: Tensor) -> Any:
        # all_gather wants equal shapes: first the ranks' numbers of rows, by way of the host, which
        # knows its own. The rows follow in _end_rows, so that backward never waits.
        counts = torch.zeros(dist.get_world_size(self._group), dtype=torch.int64)
        counts[dist.get_rank(self._group)] = len(rows)
        return dist.all_reduce(counts, group=self._group, async_op=True), counts, rows, values

    def _end_rows(self, handle: Any) -> tuple[Tensor, Tensor]:
        work, counts, rows, values = handle
        work.wait()
        with allowed_read():
            numbers = counts.tolist()
        return self._gather(rows, numbers), self._gather(values, numbers)

    def _gather(self, own: Tensor, numbers: list[int]) -> Tensor:
        """Return the parts of all ranks, of `numbers` rows, one after the other;
        on the way each is as long as the longest.
        """
        padded = own.new_zeros((max(numbers), *own.shape[1:]))
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in numbers]
        if len(padded):
            dist.all_gather(parts, padded, group=self._group)
        return torch.cat([part[:number] for part, number in zip(parts, numbers, strict=True)])

    def _start_flat(self, vector: Tensor, name: str) -> Any:
        return dist.all_reduce(vector, group=self._group, async_op=True), vector

    def _is_done(self, handle: Any) -> bool:
        return bool(handle[0].is_completed())

    def _end_flat(self, handle: Any) -> Tensor:
        work, vector = handle
        work.wait()
        return vector  # type: ignore[no-any-return]


def _put(bucket: Bucket, flat: Tensor) -> list[Tensor]:
    """Make each `.grad` of a bucket a view of its gradients, [numel of all of them, and more]."""
    views = []
    start = 0
    for _, parameter in bucket.entries:
        piece = flat[start : start + parameter.numel()]
        start += parameter.numel()
        dense = dense_view(parameter.detach()) is not None
        view = (
            piece.as_strided(parameter.size(), parameter.stride())
            if dense
            else piece.reshape(parameter.size())
        )
        parameter.grad = view
        views.append(view)
    return views
