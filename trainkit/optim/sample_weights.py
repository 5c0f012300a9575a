"""SampleWeights: the share of a step's samples that each microbatch holds.

The gradient of a step is that of the mean loss over all its samples: the mean loss of a microbatch
counts (its samples) / (the step's samples). A Task that returns "num_samples" weighs its batches
itself (by tokens, for example). The step's total is then known only when all ranks are done, so
losses are weighted against the planned number of samples, and gradients corrected after their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainkit.device.accelerator import wide
from trainkit.device.sync_guard import allowed_read
from trainkit.errors import TaskError


class SampleWeights:
    """The weights of one run's microbatches."""

    def __init__(
        self,
        task_name: str,
        device: torch.device,
        all_reduce: Callable[[Tensor], Tensor],
        batch_weight: Callable[[Any], Any] | None = None,
        is_alone: Callable[[], bool] = lambda: False,
        num_ranks: int = 1,
        needs_backward: bool = False,
    ) -> None:
        """`batch_weight` is the Task's, if it has one: it returns the weight of a batch.

        `is_alone` returns whether this rank takes the step by its own samples
        (communication=diloco, local_sgd); `needs_backward` is whether all ranks must run backward
        of each batch.
        """
        self._task_name = task_name
        self._device = device
        self._dtype = wide(device)
        self._all_reduce = all_reduce
        self._batch_weight = batch_weight
        self._is_alone = is_alone
        self._own = self._skipped = 0  # this rank's samples of this step
        self._num_ranks = num_ranks
        self._needs_backward = needs_backward
        self._held: Tensor | None = None  # the Task's own weights of this step
        self._by_task: bool | None = None  # None until this rank has had a batch
        self._is_agreed = False  # whether all ranks know of `_by_task`

    def weighted(
        self, loss: Tensor, outputs: Any, num_samples: int, num_in_step: int, batch: Any = None
    ) -> Tensor:
        """Return the mean loss of a microbatch times its share of the step's samples on all ranks.

        Raises:
            TaskError: the Task weighs some batches only.
        """
        own = outputs.get("num_samples") if isinstance(outputs, Mapping) else None
        if self._batch_weight is not None and own is None:
            own = self._batch_weight(batch)
        if self._by_task is None:
            self._by_task = own is not None
        if self._by_task != (own is not None):
            raise TaskError(self._some())
        self._own += num_samples
        if own is None:
            return loss if num_samples == num_in_step else loss * (num_samples / num_in_step)
        if isinstance(own, Tensor):
            weight = own.to(self._device, self._dtype)
        else:  # a number is filled in on the device: copied to it, the host would wait
            weight = torch.full((), own, dtype=self._dtype, device=self._device)
        self._held = weight if self._held is None else self._held + weight
        return loss * (weight / num_in_step)

    def skip(self, num_samples: int) -> None:
        """Count a microbatch for which the Task returned None: it weighs nothing.

        Raises:
            TaskError: other ranks have counted its samples as the step's.
        """
        weighs = self._by_task or self._batch_weight is not None
        if self._num_ranks > 1 and (self._needs_backward or not weighs):
            raise TaskError(
                f"{self._task_name}.training_step returned None to skip a batch, on one of"
                f" {self._num_ranks} ranks: the others have its samples in their mean. Return"
                " {'loss': loss, 'num_samples': n} for each batch, with the number of its"
                " samples, and 0 to skip it."
            )
        self._skipped += num_samples

    def correction(self, num_in_step: int) -> Tensor | None:
        """Return the factor for the summed gradients, or None for 1. Call it on all ranks.

        A rank that steps alone divides by its own samples; 0 if it has none.

        Raises:
            TaskError: the Task weighs batches on some ranks only.
        """
        if not self._is_agreed:
            self._agree()
        samples, self._own = self._own, 0
        skipped, self._skipped = self._skipped, 0
        if skipped and samples and not self._by_task:
            return torch.full((), num_in_step / samples, dtype=self._dtype, device=self._device)
        if not self._by_task:
            if not self._is_alone() or samples == num_in_step:
                return None
            return torch.full(
                (),
                num_in_step / samples if samples else 0.0,
                dtype=self._dtype,
                device=self._device,
            )
        held = (
            self._held
            if self._held is not None
            else torch.zeros((), dtype=self._dtype, device=self._device)
        )
        total = held if self._is_alone() else self._all_reduce(held)
        self._held = None
        # if all samples are masked there is no gradient
        return torch.where(total == 0, total, num_in_step / total)

    def forget(self) -> None:
        """Drop the weights of a step that is retried."""
        self._held = None
        self._own = 0
        self._skipped = 0

    def _agree(self) -> None:
        """Inform all ranks, once a run:
        a rank without a sample in the first step cannot know by itself.
        """
        with allowed_read():
            own = torch.tensor(float(self._by_task or False), device=self._device)
            on_any = bool(self._all_reduce(own) > 0)
        if self._by_task is not None and self._by_task != on_any:
            raise TaskError(self._some())
        self._by_task = on_any
        self._is_agreed = True

    def _some(self) -> str:
        return (
            f"{self._task_name}.training_step returned 'num_samples' for some batches only; return"
            " it for all or none."
        )
