"""GradientWatch: gradients that the body of a user's loop changes beside `loop.backward`."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from trainkit.errors import TaskError
from trainkit.run.gradients import parameters_of, read_gradients

_BATCHES = 100  # what a body does, it does in the first ones


class GradientWatch:
    """Looks at the first batches: a gradient that the body drops is missing from its step, and one
    that it clips was clipped too early, or after the update.

    Args:
        optimizers: of the loop.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._num_batches = 0
        self._held: dict[int, tuple[int, int]] = {}
        self._is_updated = True  # the step has no gradient yet, or has used them all

    def before_body(self) -> None:
        """Remember the gradients that earlier microbatches of the step have left."""
        self._num_batches += 1
        self._held = {} if self._is_updated else self._read()

    def after_backward(self, is_updated: bool) -> None:
        """Remember the gradients with this microbatch's.

        Args:
            is_updated: whether it was the step's last one.
        """
        self._is_updated = is_updated
        self._held = self._read()

    def check(self) -> None:
        """Compare what the body leaves with what was remembered.

        Raises:
            TaskError: a gradient was written, or dropped before the update.
        """
        if not self._held:
            return
        now = self._read()
        held = self._held
        if self._is_updated:  # to drop them changes nothing then
            held = {number: gradient for number, gradient in held.items() if number in now}
        if not held.items() <= now.items():
            raise TaskError(
                "Gradients were changed in the loop beside loop.backward(), for example by"
                " optimizer.zero_grad(), clip_grad_norm_() or loss.backward(). Leave that out: the"
                " Loop sums a step's gradients, updates the weights, and drops them. To clip:"
                " trainkit.Loop(..., gradient_clip_val=1.0); to see norms:"
                " callbacks=[trainkit.GradientMonitor()]."
            )

    def _read(self) -> dict[int, tuple[int, int]]:
        if self._num_batches > _BATCHES:
            return {}
        return read_gradients(p for each in self._optimizers for p in parameters_of(each))
