"""When callbacks write numbers of their own: at the steps at which the loop writes its, to the same loggers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainkit.trainer import Trainer


def is_log_step(trainer: Trainer, ahead: int = 0, every_n_steps: int | None = None) -> bool:
    """Whether step values are written at this step.

    Args:
        trainer: whose `log_every_n_steps` says so.
        ahead: 1 within a step, which is counted only when its update is done.
        every_n_steps: in its place.
    """
    return (trainer.global_step + ahead) % (every_n_steps or trainer.settings.limits.log_every_n_steps) == 0


def write(trainer: Trainer, values: dict[str, float]) -> None:
    """Hand numbers of this step to the loggers, on rank 0; on the others nothing happens."""
    if values and trainer.is_global_zero:
        trainer.session.hooks("on_metrics", values, trainer.global_step)
