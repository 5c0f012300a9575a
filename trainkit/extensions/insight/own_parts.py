"""OwnParts: which of the operations that a mode counts this rank computes itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainkit.extensions.pipeline.placeholder import Placeholder

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode


_SHAPES = {Placeholder, FakeTensor}  # the latter of DTensor's own, for the shape of the whole


class OwnParts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the context, entered after a counter's, the counter sees what is computed of this
    rank's part of a DTensor, and not the operation on the whole: modes come before classes of
    tensors otherwise.

    Attributes:
        elsewhere: FLOPs of the counter that only give the shape of what other ranks compute.
    """

    supports_higher_order_operators = True

    def __init__(self, counter: FlopCounterMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = counter
        self.elsewhere = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Leave an operation on a DTensor to it, which runs those on the part."""
        kwargs = kwargs or {}
        if not _SHAPES.isdisjoint(types):
            before = self._counter.get_total_flops()
            outputs = func(*args, **kwargs)
            self.elsewhere += self._counter.get_total_flops() - before
            return outputs
        # a DTensor; its module takes long to import
        is_spread = any(hasattr(kind, "to_local") for kind in types)
        return NotImplemented if is_spread else func(*args, **kwargs)
