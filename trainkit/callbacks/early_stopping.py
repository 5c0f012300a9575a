"""EarlyStopping: ends a run when a logged value stops improving."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

from trainkit.api.callback import Callback
from trainkit.api.lightning_arguments import nothing
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import NonNegativeFloat, NonNegativeInt, checked, not_logged
from trainkit.errors import ConfigError
from trainkit.metrics.latest import Number


@checked
class EarlyStopping(Callback):
    """Checks a logged value at each epoch's end, or after each validation. The value is the same on
    all ranks, so all stop at the same step.

    Args:
        monitor: the name of the logged value.
        min_delta: a change smaller than this is no improvement.
        patience: epochs, or validations, without improvement after which the run ends (0: at the
            first one); for a validation value only epochs with a validation count.
        verbose: print each improvement. Why it ends the run is printed always.
        mode: "min" if lower is better, "max" if higher is.
        check_finite: end the run when the value is not a finite number.
        stopping_threshold: end the run once the value is better than this.
        divergence_threshold: end the run once the value is worse than this.
        strict: raise if the value was not logged; false waits until it is.
        check_on_train_epoch_end: false checks after each validation, also within an epoch
            (trainer.val_check_interval), and `patience` counts validations; true checks at each
            epoch's end. Default: as in Lightning, false if validations run within epochs or not in
            each (trainer.check_val_every_n_epoch), whatever the value is of.

    Attributes:
        best_score: the best value so far; infinite before the first.
        wait_count: epochs without improvement.
        stopped_epoch: the epoch in which it has ended the run; 0 before.
    """

    role = "early_stopping"
    monitors = True
    taken_arguments: ClassVar = {"log_rank_zero_only": nothing}

    def __init__(
        self,
        monitor: str,
        min_delta: NonNegativeFloat = 0.0,
        patience: NonNegativeInt = 3,
        verbose: bool = False,
        mode: Literal["min", "max"] = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
    ) -> None:
        self.monitor = monitor
        self.min_delta = min_delta
        self.patience = patience
        self.verbose = verbose
        self.mode = mode
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.strict = strict
        self.check_on_train_epoch_end = check_on_train_epoch_end
        self.best_score = self._worst
        self.wait_count = self.stopped_epoch = 0
        self._validations_seen = 0

    def setup(self, trainer: RunView, task: Task, stage: str) -> None:
        """Reset for each fit; a checkpoint's state is loaded after this."""
        if stage == "fit":
            self.best_score = self._worst
            self.wait_count = self._validations_seen = 0

    def on_train_epoch_end(self, trainer: RunView, task: Task) -> None:
        if not self._counts_validations(trainer):
            self._look(trainer)

    def on_validation_end(self, trainer: RunView, task: Task) -> None:
        if trainer.state.phase == "fit" and self._counts_validations(trainer):
            self._look(trainer)

    def _counts_validations(self, trainer: RunView) -> bool:
        if self.check_on_train_epoch_end is None:
            every = trainer.options.evaluation.check_val_every_n_epoch
            evaluator = trainer.evaluator
            return evaluator.has_data and (bool(evaluator.interval) or every != 1)
        return not self.check_on_train_epoch_end

    @property
    def _worst(self) -> Number:
        return Number(math.inf if self.mode == "min" else -math.inf)

    def _look(self, trainer: RunView) -> None:
        evaluator = trainer.evaluator
        values = trainer.callback_metrics
        if self.monitor not in values:
            if evaluator.is_awaited or not self.strict:
                return
            hint = " Of a whole epoch: check_on_train_epoch_end=true." * bool(evaluator.interval)
            raise ConfigError(f"EarlyStopping.monitor is {not_logged(self.monitor, values)}{hint}")
        if self.monitor in evaluator.names and evaluator.num_validations == self._validations_seen:
            return  # no validation since: this value was counted already
        self._validations_seen = evaluator.num_validations
        value = values[self.monitor]
        if why := self._ends_at_once(value):
            self._stop(trainer, f"{self.monitor} {why}")
            return
        sign = 1.0 if self.mode == "min" else -1.0
        if sign * value < sign * self.best_score - self.min_delta:
            if self.verbose:
                trainer.say(f"{self.monitor} = {value:g} is better than {self.best_score:g}.")
            self.best_score = value
            self.wait_count = 0
            return
        self.wait_count += 1
        if self.wait_count >= self.patience:
            what = "validations" if self._counts_validations(trainer) else "epochs"
            self._stop(
                trainer,
                f"{self.monitor} has not improved on {self.best_score:g} for {self.wait_count}"
                f" {what}",
            )

    def _ends_at_once(self, value: float) -> str:
        """Return why this value ends the run, however patient it is; or ""."""
        sign = 1.0 if self.mode == "min" else -1.0
        good, bad = self.stopping_threshold, self.divergence_threshold
        if self.check_finite and not math.isfinite(value):
            return f"is {float(value)}"
        if good is not None and sign * value < sign * good:
            return f"= {value:g} is better than {good:g}"
        if bad is not None and sign * value > sign * bad:
            return f"= {value:g} is worse than {bad:g}"
        return ""

    def _stop(self, trainer: RunView, why: str) -> None:
        self.stopped_epoch = trainer.current_epoch
        trainer.request_stop(why)

    @property
    def state_key(self) -> str:
        """As Lightning's: another value's best one is not this one's."""
        compared = {"monitor": self.monitor, "mode": self.mode}
        return f"{type(self).__qualname__}{compared}"

    def state_dict(self) -> dict[str, Any]:
        return {
            "best_score": float(self.best_score),
            "wait_count": self.wait_count,
            "validations_seen": self._validations_seen,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        best = state_dict["best_score"]
        self.best_score = self._worst if best is None or math.isnan(best) else Number(best)
        self.wait_count = state_dict["wait_count"]
        self._validations_seen = state_dict.get("validations_seen", 0)  # not of older checkpoints
