"""The stock `hvd.DistributedOptimizer`, used only for its sums:
the reference of trainkit's own, bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from trainkit.device.precision import Precision
from trainkit.engine.horovod.engine import HorovodEngine
from trainkit.engine.horovod.reduce import ALLREDUCE_TYPES


class Contiguous:
    """A Horovod `Compression` that compresses nothing:
    it carries channels_last and bfloat16 over the wire.
    """

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tensor to send by Horovod, and the tensor to restore it to."""
        wire = tensor if tensor.dtype in ALLREDUCE_TYPES else tensor.to(torch.float32)
        return wire.contiguous(), tensor

    @staticmethod
    def decompress(wire: Tensor, tensor: Tensor) -> Tensor:
        """Return the sum in the dtype and layout of `tensor`."""
        same = wire.dtype == tensor.dtype and wire.stride() == tensor.stride()
        return wire if same else torch.empty_like(tensor).copy_(wire)


class StockReducer:
    """Sums through `hvd.DistributedOptimizer`; the user's own optimizer takes the step.

    Its hooks stay on the parameters, which serve for one fit alone, and none may be frozen or
    sparse.

    Args:
        model: all of its parameters are trained.
        optimizers: each is wrapped.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._wrapped = []
        for optimizer in optimizers:
            own = {p for group in optimizer.param_groups for p in group["params"]}
            named = [(n, p) for n, p in model.named_parameters() if p in own]
            self._wrapped.append(
                hvd.DistributedOptimizer(
                    optimizer,
                    named_parameters=named,
                    compression=Contiguous,
                    op=hvd.Sum,
                    sparse_as_dense=True,
                )
            )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let Horovod's hooks wait for one backward more."""
        self._set_passes(2)
        try:
            yield
        finally:
            self._set_passes(1)

    def finish(self) -> None:
        """Wait for the sums."""
        for wrapped in self._wrapped:
            wrapped.synchronize()

    def remove(self) -> None:
        """Do nothing: Horovod has no way to take its hooks off; they go with the parameters."""

    def _set_passes(self, passes: int) -> None:
        for wrapped in self._wrapped:
            wrapped.set_backward_passes_per_step(passes)


class StockEngine(HorovodEngine):
    """HorovodEngine with the stock sums in place of trainkit's."""

    def prepare(
        self,
        task: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        precision: Precision | None = None,
    ) -> None:
        """See Engine."""
        super().prepare(task, optimizers, precision)
        assert self._reducer is not None
        self._reducer.remove()
        self._reducer = StockReducer(task, optimizers)  # type: ignore[assignment]
        self.heartbeat.reducer = None  # it records nothing
