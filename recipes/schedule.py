"""An optimizer with a schedule from a config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

import trainkit


def with_schedule(task: trainkit.Task, optimizer: Optimizer, lr: Callable[..., Any] | None) -> Any:
    """Return what `configure_optimizers` returns.

    Args:
        task: the task, in a fit: it knows the number of steps.
        optimizer: its optimizer.
        lr: makes a schedule, called after each step, from the optimizer and `total_steps`; None for
            a constant rate.
    """
    if lr is None:
        return optimizer
    schedule = lr(optimizer, total_steps=task.trainer.estimated_stepping_batches)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
