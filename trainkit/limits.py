"""Limits: when training ends, and how often things happen in it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """When training ends and how often things happen.

    Attributes:
        max_epochs: passes over the data, or None.
        max_steps: optimizer steps, or None.
        log_every_n_steps: steps between two logs of step values.
        val_check_interval: steps between two validations inside an epoch, or None for the epoch's end.
        check_val_every_n_epoch: epochs between two validations.
        gradient_clip_val: see optim/clipping.py; None for no clipping.
        gradient_clip_algorithm: "norm" or "value".
    """

    max_epochs: int | None
    max_steps: int | None
    log_every_n_steps: int = 50
    val_check_interval: int | None = None
    check_val_every_n_epoch: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str = "norm"
