"""EarlyStopping: ends a run when a value no longer improves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from trainkit.arguments import NonNegativeFloat, PositiveInt, checked
from trainkit.callback import Callback
from trainkit.errors import ConfigError

if TYPE_CHECKING:
    from trainkit.task import Task
    from trainkit.trainer import Trainer


@checked
class EarlyStopping(Callback):
    """Looks at a logged value at each epoch's end; the value is the same on all ranks, so all stop together.

    Args:
        monitor: the name of the logged value.
        min_delta: a change smaller than this is no improvement.
        patience: epochs without improvement after which the run ends; where the value is one of validation, those that
            were validated count.
        mode: whether less ("min") or more ("max") of it is better.
        check_finite: end the run when the value is not a finite number.
        stopping_threshold: end the run once the value is as good as this.
    """

    def __init__(
        self,
        monitor: str,
        min_delta: NonNegativeFloat = 0.0,
        patience: PositiveInt = 3,
        mode: Literal["min", "max"] = "min",
        check_finite: bool = True,
        stopping_threshold: float | None = None,
    ) -> None:
        self.monitor, self.min_delta, self.patience, self.mode = monitor, min_delta, patience, mode
        self.check_finite, self.stopping_threshold = check_finite, stopping_threshold
        self.best_score: float | None = None
        self.wait_count = 0
        self._validations_seen = 0

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        """Begin to look for new values."""
        self._validations_seen = 0

    def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
        """Compare, count, and stop."""
        session = trainer.session
        if self.monitor not in trainer.callback_metrics:
            if session.awaits_validation:
                return
            raise ConfigError(
                f"EarlyStopping.monitor is '{self.monitor}', which was not logged; there are "
                f"{', '.join(sorted(trainer.callback_metrics)) or 'none'}."
            )
        if self.monitor in session.validation_names and session.num_validations == self._validations_seen:
            return  # not validated since: it is the value that was counted already
        self._validations_seen = session.num_validations
        value = trainer.callback_metrics[self.monitor]
        sign = 1.0 if self.mode == "min" else -1.0
        if self.check_finite and not math.isfinite(value):
            trainer.request_stop(f"{self.monitor} is {value}")
        elif self.stopping_threshold is not None and sign * value <= sign * self.stopping_threshold:
            trainer.request_stop(f"{self.monitor} = {value:g} has reached {self.stopping_threshold:g}")
        if self.best_score is None or math.isnan(self.best_score) or sign * value < sign * self.best_score - self.min_delta:
            self.best_score, self.wait_count = value, 0
            return
        self.wait_count += 1
        if self.wait_count >= self.patience:
            trainer.request_stop(f"{self.monitor} has not improved on {self.best_score:g} for {self.wait_count} epochs")

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the epochs since."""
        return {"best_score": self.best_score, "wait_count": self.wait_count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take them back."""
        self.best_score, self.wait_count = state_dict["best_score"], state_dict["wait_count"]
