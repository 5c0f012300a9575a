"""Where the values go that hooks log: known to callbacks and schedules, and written by the
loggers; and what was never written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trainkit.api.view import RunView
from trainkit.device.sync_guard import allowed_read
from trainkit.metrics.hook_log import HookLog
from trainkit.metrics.log import MetricLog
from trainkit.metrics.media import Media


def keep_values(run: RunView, values: Mapping[str, float]) -> None:
    """Make the values of an epoch known to callbacks and schedules."""
    run.callback_metrics.put(values, run.global_step)
    run.state.epoch_values.update(values)


def with_rate(run: RunView, values: dict[str, float]) -> dict[str, float]:
    """Return values with the first group's rate as "lr", unless the user logs that name."""
    return values if "lr" in values else {**values, "lr": run.rates.last()[0]}


def report_unread(run: RunView, log: MetricLog) -> None:
    """Say at a fit's end which values of steps no logger got, though the Task has logged them: the
    fit was shorter than the interval, or their steps are never its multiples.
    """
    if (unread := log.unread - log.read) and run.loggers:
        missed = ", which none of the steps with such a value is a multiple of" * bool(log.read)
        run.say(
            f"No step logged {', '.join(sorted(unread))}: the fit ended at step"
            f" {run.global_step}, and trainer.log_every_n_steps is"
            f" {run.options.limits.log_every_n_steps}{missed}. Set trainer.log_every_n_steps=1 to log each"
            " step, or log an epoch's mean: self.log(..., on_epoch=True)."
        )


def hook_log_of(run: RunView) -> HookLog:
    """Return what takes the values of a run's hooks."""
    reported: list[str] = []

    def put(values: Mapping[str, float]) -> None:
        if not run.sanity_checking:  # those are of a few batches only
            keep_values(run, values)
            run.log_metrics(dict(values))

    def show(make: Callable[[], Media]) -> None:
        """Hand rank 0's picture, text, ... to the loggers; report once if none can store it."""
        if not run.is_global_zero:
            return
        with allowed_read():
            media = make()
        if run.sanity_checking:  # tried, so that what cannot be logged costs no epoch
            return
        fits = run.state.phase == "fit"
        if fits and not reported and not any(callback.stores_media for callback in run.callbacks):
            reported.append(media.name)
            run.say(
                f"'{media.name}' is not stored: no logger of this run can. Add logger=csv,"
                " tensorboard, wandb or mlflow."
            )
        run.hooks("on_media", media, run.global_step)

    return HookLog(run.engine.data.all_gather_object, put, show)
