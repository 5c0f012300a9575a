"""Schedulers that wait for a value of validation, where Lightning's move after each epoch."""

from __future__ import annotations

from collections.abc import Iterator

from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainkit.api.view import RunView


def waiting(run: RunView) -> Iterator[str]:
    """Yield that a plateau's patience counts validations."""
    every = run.options.evaluation.check_val_every_n_epoch or 1
    for config in run.rates.schedules if every > 1 else ():
        if config.interval == "epoch" and isinstance(config.scheduler, ReduceLROnPlateau):
            yield (
                f"ReduceLROnPlateau monitors '{config.monitor}'. If validation logs it, it moves"
                f" after each validation, so patience={config.scheduler.patience} counts"
                f" validations, each of {every} epochs (check_val_every_n_epoch={every}); in"
                " Lightning it counts epochs."
            )
