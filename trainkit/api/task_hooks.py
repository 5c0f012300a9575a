"""The hooks of a Task: those of Callback (which draws their order),
without the arguments `trainer` and `task`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class TaskHooks:
    """Override the hooks that you need; the others cost nothing."""

    def configure_callbacks(self) -> Any:
        """Return callbacks of this Task's own: one, or a list.
        One takes the place of the Trainer's of the same class.
        """
        return []

    def setup(self, stage: str) -> None:
        """Before anything of `stage` runs."""

    def teardown(self, stage: str) -> None:
        """After everything of `stage` has run."""

    def on_fit_start(self) -> None:
        """After everything is built and on its device."""

    def on_fit_end(self) -> None:
        """The last hook of a successful fit."""

    def on_train_start(self) -> None:
        """Before the first epoch."""

    def on_train_end(self) -> None:
        """After the last epoch."""

    def on_train_epoch_start(self) -> None:
        """Before an epoch's first step."""

    def on_train_epoch_end(self) -> None:
        """After an epoch and its validation."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Before `training_step`."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After a batch, or after the update if it was this rank's last of the step.

        `outputs` is the dict of `training_step`, or {"loss": ...}; its loss is detached.
        """

    def on_before_backward(self, loss: Tensor) -> None:
        """`loss` is as returned, before it is weighted."""

    def on_after_backward(self) -> None:
        """Gradients of this rank; not yet summed over ranks."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients of the whole step, summed over ranks and unscaled;
        they are clipped after it.
        """

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Before the gradients of the last step are dropped:
        in the next step, after the first batch's `training_step`.
        """

    def on_validation_start(self) -> None:
        """Before a validation."""

    def on_validation_epoch_start(self) -> None:
        """The same, right after it."""

    def on_validation_epoch_end(self) -> None:
        """After the last batch; metric objects hold the samples of all ranks."""

    def on_validation_end(self) -> None:
        """After a validation."""

    def on_validation_batch_start(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before `validation_step`."""

    def on_validation_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After `validation_step`, with its result."""

    def on_test_start(self) -> None:
        """Before a test."""

    def on_test_epoch_start(self) -> None:
        """The same, right after it."""

    def on_test_epoch_end(self) -> None:
        """After the last batch; metric objects hold the samples of all ranks."""

    def on_test_end(self) -> None:
        """After a test."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before `test_step`."""

    def on_test_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After `test_step`, with its result."""

    def on_predict_start(self) -> None:
        """Before a prediction."""

    def on_predict_epoch_start(self) -> None:
        """The same, right after it."""

    def on_predict_epoch_end(self) -> None:
        """After the last batch; metric objects hold the samples of all ranks."""

    def on_predict_end(self) -> None:
        """After a prediction."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before `predict_step`."""

    def on_predict_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After `predict_step`, with its result."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add plain values and tensors to a checkpoint; rename, drop or replace weights in
        `checkpoint["state_dict"]`. It has "epoch" and "global_step" too. A commit of an elastic job
        keeps all weights under their own names, whatever this changes.

        A checkpoint of only weights (`save_weights_only`) has none of this: no hook reads it.
        """

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read them back, before weights are loaded: change those in `checkpoint["state_dict"]`.

        Where the engine splits weights, and on all ranks but 0, they have names and shapes alone
        (device "meta"): rename and drop them, or add others.
        """


TASK_HOOKS = frozenset(name for name in vars(TaskHooks) if not name.startswith(("_", "configure_")))
