"""A rounding error: weights and inputs of one process that differ in their last bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainkit.extensions.capsule.batches import tensors_in


class Disturbance:
    """Multiplies each number by 1 + size or 1 - size, at random.

    Args:
        seed: of its random numbers; those of the run are not drawn from.
        size: of the error.
    """

    def __init__(self, seed: int, size: float) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._size = size
        self._inputs: list[tuple[Tensor, Tensor]] = []

    def weights(self, model: nn.Module) -> None:
        """Disturb the weights, once."""
        for parameter in model.parameters():
            if _is_disturbed(parameter):
                self._disturb(parameter.detach())

    def batch(self, batch: Any) -> None:
        """Disturb the inputs that are numbers with fractions, until `restore`."""
        for _, tensor in tensors_in(batch):
            if _is_disturbed(tensor):
                self._inputs.append((tensor, tensor.clone()))
                self._disturb(tensor)

    def restore(self) -> None:
        """Give the inputs their values: they may be the user's own tensors, read again later."""
        with torch.no_grad():
            for tensor, value in reversed(self._inputs):
                tensor.copy_(value)
        self._inputs.clear()

    def _disturb(self, tensor: Tensor) -> None:
        signs = torch.randint(0, 2, tensor.shape, generator=self._generator, dtype=torch.int8) * 2
        factor = 1 + self._size * (signs.to(torch.float64) - 1)
        with torch.no_grad():
            tensor.copy_((tensor.double().cpu() * factor).to(tensor.dtype))


def _is_disturbed(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.layout is torch.strided
