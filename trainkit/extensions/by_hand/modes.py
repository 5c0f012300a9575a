"""FitModes: whether gradients are recorded in the turns of a fit, beside those of a user's loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

_DEVICES = ("cpu", "cuda")


class FitModes:
    """The fit's own modes. A block of `torch.no_grad()` or `torch.inference_mode()` in the user's
    loop begins in one turn of the fit and ends in another.

    Made when the Loop is entered.
    """

    def __init__(self) -> None:
        self._records_gradients = torch.is_grad_enabled()  # in the fit, since its last turn
        self._autocasts = {kind: torch.is_autocast_enabled(kind) for kind in _DEVICES}

    @contextlib.contextmanager
    def turn(self, device: Callable[[], torch.device]) -> Iterator[None]:
        """Within the context gradients are recorded if they were at the end of the fit's last turn;
        then as before.

        Args:
            device: returns this rank's, after the turn.
        """
        leaves = torch.is_inference_mode_enabled()
        with (
            torch.inference_mode(False) if leaves else contextlib.nullcontext(),
            torch.set_grad_enabled(self._records_gradients),
        ):
            yield
            self._records_gradients = torch.is_grad_enabled()
            autocasts = leaves and torch.is_autocast_enabled(device().type)
        if leaves:  # inference mode has taken autocast back to what it was before
            torch.set_autocast_enabled(device().type, autocasts)

    def end(self) -> None:
        """Take autocast back to what it was before the Loop: a block of inference mode that ends
        after the fit has left it as in a step.
        """
        for kind, was_enabled in self._autocasts.items():
            torch.set_autocast_enabled(kind, was_enabled)
