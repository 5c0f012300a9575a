"""When monitors log, and how."""

from __future__ import annotations

from trainkit.api.view import RunView


def is_log_step(trainer: RunView, ahead: int = 0, every_n_steps: int | None = None) -> bool:
    """Return whether this step's values are logged.

    Args:
        trainer: provides `log_every_n_steps`.
        ahead: 1 within a step, which is counted only after its update.
        every_n_steps: replaces `log_every_n_steps`.
    """
    every = every_n_steps or trainer.options.limits.log_every_n_steps
    return (trainer.state.loop_steps + ahead) % every == 0


def write(trainer: RunView, values: dict[str, float]) -> None:
    """Pass this step's numbers to the loggers on rank 0; do nothing on other ranks."""
    if values and trainer.is_global_zero:
        trainer.log_metrics(values)
