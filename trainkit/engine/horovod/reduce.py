"""Sums of gradients by Horovod, started by trainkit's own hooks.

Horovod's asynchronous allreduce takes one tensor a parameter, and Horovod fuses what is ready by
itself; a group of parameters goes by one grouped allreduce. What Horovod 0.28 refuses is bridged
here: tensors that are not contiguous (channels_last) go as flat views, bfloat16 goes as float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Set as AbstractSet
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor

from trainkit.engine.horovod.waiting import wait_for
from trainkit.engine.reduce.buckets import NamedParameter
from trainkit.engine.reduce.low_rank import LowRank
from trainkit.engine.reduce.reducer import Bucket, GradientReducer
from trainkit.engine.reduce.wire import Wire, laid_out
from trainkit.engine.sending import dense_view

# What Horovod's allreduce takes; everything else travels as the wider type beside it (2.2 of its
# limits: no bfloat16).
ALLREDUCE_TYPES = frozenset({torch.float16, torch.float32, torch.float64, torch.int32, torch.int64})


class HookReducer(GradientReducer):
    """Each bucket's gradients as one asynchronous allreduce, in place if Horovod can.

    Args:
        buckets, frozen, wire, sparse: see GradientReducer.
        op: what the allreduce does: "adasum", or a sum.
        ranks: the process set of the ranks that take part.
        low_rank: see GradientReducer.
    """

    _is_in_place = True

    def __init__(
        self,
        buckets: list[list[NamedParameter]],
        frozen: list[NamedParameter],
        wire: Wire,
        sparse: AbstractSet[Tensor],
        op: str,
        ranks: hvd.ProcessSet,
        low_rank: LowRank | None = None,
    ) -> None:
        self._carries = op != "adasum"
        self._op = hvd.Adasum if op == "adasum" else hvd.Sum
        # In order, if a rank waits in a hook for a first message: another one may not wait for one
        # that comes later here.
        super().__init__(buckets, frozen, low_rank is not None, wire, sparse, low_rank)
        self._ranks = ranks

    def _start(self, bucket: Bucket, flags: Tensor | None) -> Any:
        wires = []
        for _, parameter in bucket.entries:
            parameter.grad = grad = laid_out(parameter)
            flat = dense_view(grad)
            wires.append(self._wire.pack(grad.contiguous().reshape(-1) if flat is None else flat))
        if flags is not None:
            wires.append(flags.to(wires[0].dtype, copy=True))
        name = "trainkit.grad." + bucket.entries[0][0]
        if len(wires) == 1:
            return (
                hvd.allreduce_async_(wires[0], op=self._op, name=name, process_set=self._ranks),
                wires,
            )
        return (
            hvd.grouped_allreduce_async_(wires, op=self._op, name=name, process_set=self._ranks),
            wires,
        )

    def _end(self, bucket: Bucket) -> Tensor | None:
        handle, wires = bucket.handle
        wait_for(handle)
        flags = wires.pop() if bucket is self._carrier else None
        for (_, parameter), wire in zip(bucket.entries, wires, strict=True):
            grad = parameter.grad
            assert grad is not None
            total = self._wire.unpack(wire, grad.dtype)
            if total.data_ptr() != grad.data_ptr():
                flat = dense_view(grad)
                grad.copy_(total.reshape(grad.shape)) if flat is None else flat.copy_(total)
        return flags

    def _wait(self, handle: Any) -> None:
        with contextlib.suppress(ValueError):  # it has been waited for before
            wait_for(handle[0])

    def _is_done(self, handle: Any) -> bool:
        try:
            return bool(hvd.poll(handle[0])) if isinstance(handle[0], int) else False
        except ValueError:  # it has been waited for in the meantime
            return True

    def _start_rows(self, name: str, rows: Tensor, values: Tensor) -> Any:
        # Horovod has no bfloat16, but rows are only carried: their bits may travel under another
        # name.
        carried = values.view(torch.int16) if values.dtype == torch.bfloat16 else values
        gather = [
            hvd.allgather_async(
                tensor, name=f"trainkit.grad.{name}.{part}", process_set=self._ranks
            )
            for part, tensor in (("rows", rows), ("values", carried))
        ]
        return gather, values.dtype

    def _end_rows(self, handle: Any) -> tuple[Tensor, Tensor]:
        (rows, values), dtype = handle
        return wait_for(rows), wait_for(values).view(dtype)

    def _start_flat(self, vector: Tensor, name: str) -> Any:
        return hvd.allreduce_async_(vector, op=hvd.Sum, name=name, process_set=self._ranks), vector

    def _end_flat(self, handle: Any) -> Tensor:
        number, vector = handle
        wait_for(number)
        return vector  # type: ignore[no-any-return]
