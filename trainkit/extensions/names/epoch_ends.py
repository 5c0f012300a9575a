"""What on_train_epoch_end is too late for, or left out of, where Lightning's is not: schedulers have
moved before it, and an epoch that a limit or a stop cuts has none, since a later run resumes in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.run.feature import Feature
from trainkit.run.setup import Stage

_HOOK = "on_train_epoch_end"


def of_stage(stage: Stage) -> EpochEnds | None:
    """Return the feature of a fit in which the Task or a callback of the user's has the hook."""
    of_user = [
        each for each in stage.callbacks if not type(each).__module__.startswith("trainkit.")
    ]
    names = [type(each).__name__ for each in of_user if _has_hook(each, Callback)]
    names += [type(stage.task).__name__] * _has_hook(stage.task, Task)
    return EpochEnds(stage, names) if names else None


def _has_hook(owner: object, base: type) -> bool:
    return _HOOK in vars(owner) or getattr(type(owner), _HOOK) is not getattr(base, _HOOK)


class EpochEnds(Feature):
    """See the module."""

    name = _HOOK

    def __init__(self, stage: Stage, owners: list[str]) -> None:
        self._stage = stage
        self._owners = owners
        self._said: set[str] = set()

    def begun(self, run: RunView) -> None:
        """Look at the fit's end too."""
        self._stage.enter(self._at_the_end(run))

    @contextlib.contextmanager
    def _at_the_end(self, run: RunView) -> Iterator[None]:
        yield
        state, most = run.state, run.options.limits.max_steps
        ended = run.should_stop or (most is not None and run.global_step >= most)
        if ended and state.step_in_epoch and not state.epoch_done:
            run.say(
                f"{_HOOK} of {', '.join(self._owners)} was not called for epoch"
                f" {state.current_epoch}, which this run ends within; a run with a higher limit"
                " resumes there. Lightning calls it. on_train_end is called in any case."
            )

    def before_epoch(self, epoch: int) -> None:
        """Name a plateau that could not move, though its value is there."""
        run = self._stage.run
        other = run.evaluator.names | run.callback_metrics.with_plain(run.state.epoch_values).keys()
        for config in run.rates.schedules if epoch and not run.rates.moves_by_hand else ():
            monitor = config.monitor or ""
            if (
                isinstance(config.scheduler, ReduceLROnPlateau)
                and (config.interval, config.strict) == ("epoch", False)
                and (epoch >= config.frequency and not config.scheduler.last_epoch)
                and monitor in run.callback_metrics.keys() - other - self._said
            ):
                self._said.add(monitor)
                run.say(
                    f"ReduceLROnPlateau monitors '{monitor}' and has not moved: schedulers move"
                    f" before {_HOOK}, which logs it. Log it in training_step with on_epoch=True,"
                    " or in validation."
                )
