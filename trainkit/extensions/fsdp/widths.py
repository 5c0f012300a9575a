"""Layers cut to the widths of one rank of a tensor group, in one process: what flows through them
has the sizes of a rank's, its numbers are of no use. `plan` measures engine.tensor with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from trainkit.errors import ConfigError
from trainkit.extensions.fsdp.tensor import DIMENSIONS, layers_of


class Widths:
    """The layers that `ranks` share, and what they send.

    Attributes:
        layers: (layer, the dimension of its weight that is split).
        sent: bytes that a rank sends in a forward and its backward, by a ring.

    Args:
        plan: of engine.tensor_plan; None for that of the Task's `parallelize`.

    Raises:
        ConfigError: the Task has no plan, or its layers cannot be shared by so many.
    """

    def __init__(
        self,
        task: nn.Module,
        ranks: int,
        plan: Mapping[str, Any] | None,
    ) -> None:
        self.ranks = ranks
        self.sent = 0
        kind = type(task).__name__
        source = f"{kind}.parallelize" if plan is None else "engine.tensor_plan"
        chosen = task.parallelize(_Mesh(ranks)) if plan is None else plan  # type: ignore[operator]
        if not chosen:
            raise ConfigError(f"{kind} names no layers to split by width (parallelize).")
        self.layers: list[tuple[nn.Linear, int]] = []
        for name, module, style in layers_of(task, chosen, ranks, source):
            if not isinstance(module, nn.Linear) or type(style) not in DIMENSIONS:
                raise ConfigError(f"'{name}' is split in a way that plan does not know.")
            self.layers.append((module, DIMENSIONS[type(style)]))

    def dimension_of(self) -> dict[nn.Parameter, int]:
        """Return the dimension along which each split parameter is split."""
        split: dict[nn.Parameter, int] = {}
        for module, dimension in self.layers:
            weights = dict(module.named_parameters(recurse=False))
            split[weights["weight"]] = dimension
            if dimension == 0 and "bias" in weights:
                split[weights["bias"]] = 0
        return split

    @contextlib.contextmanager
    def narrow(self) -> Iterator[None]:
        """Within the context the layers have a rank's widths, and count what they send."""
        with contextlib.ExitStack() as stack:
            for own, dimension in self.dimension_of().items():
                part = own.detach().chunk(self.ranks, dimension)[0].clone()
                stack.callback(setattr, own, "data", own.data)
                own.data = part
            for module, dimension in self.layers:
                # a sum of the results in forward, or of the inputs' gradients in backward
                hook = self._count_inputs if dimension == 0 else self._count_outputs
                stack.callback(module.register_forward_hook(hook).remove)
            yield

    def _count_inputs(
        self,
        module: nn.Module,
        inputs: tuple[Tensor, ...],
        output: Tensor,
    ) -> None:
        self._count(inputs[0])

    def _count_outputs(
        self,
        module: nn.Module,
        inputs: tuple[Tensor, ...],
        output: Tensor,
    ) -> None:
        self._count(output)

    def _count(self, tensor: Tensor) -> None:
        self.sent += 2 * (self.ranks - 1) * tensor.nbytes // self.ranks


class _Mesh:
    """Stands for the DeviceMesh of a tensor group, whose size a Task asks for."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def size(self) -> int:
        """Return the ranks."""
        return self._ranks
