"""EMA: an exponential moving average of the weights; validation, checkpoints and the end of the fit
use it.

each update      the average is updated from the weights
a validation     the model holds the average; the trained weights return at its end
a checkpoint     weights.safetensors holds the average, so that validate, test and predict need no EMA; the trained
                 weights are in training.pt, so that fit resumes from them bit for bit
the fit's end    the model holds the average
"""

from __future__ import annotations

from typing import Any

from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import Fraction, NonNegativeInt, PositiveInt, checked
from trainkit.console import info
from trainkit.errors import ConfigError
from trainkit.extensions.swa.weight_averaging import WeightAveraging


@checked
class EMA(WeightAveraging):
    """Averages the weights exponentially: average <- decay x average + (1 - decay) x weights
    (Polyak and Juditsky 1992).

    The first update copies the weights. A step that fp16 skipped is no update.

    Args:
        decay: weight of the old average in an update; 0.999 averages over about 1000 updates.
        warmup: begin with a smaller decay, (1 + n) / (10 + n) after n updates, as TensorFlow's
            ExponentialMovingAverage does with `num_updates`: otherwise a short run would end near
            its first weights.
        update_every_n_steps: n for updates of the average after optimizer steps 1, n + 1, 2 n + 1,
            ..., as in Lightning's EMAWeightAveraging.
        update_starting_at_step: optimizer steps before the first of these; until then there is no
            average, and the trained weights are validated and saved.
        use_buffers: average batch norm's statistics too; false takes the model's last ones.
    """

    def __init__(
        self,
        decay: Fraction = 0.999,
        warmup: bool = True,
        update_every_n_steps: PositiveInt = 1,
        update_starting_at_step: NonNegativeInt = 0,
        use_buffers: bool = True,
    ) -> None:
        super().__init__()
        if decay == 1:
            raise ConfigError(
                "EMA.decay is 1, which would keep the first weights; it must be below 1, for"
                " example 0.999."
            )
        self.decay = decay
        self.warmup = warmup
        self.use_buffers = use_buffers
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self._seen = 0  # optimizer updates already applied to the average
        self._shown_to_save = False

    def setup(self, trainer: RunView, task: Task, stage: str) -> None:
        super().setup(trainer, task, stage)
        if stage == "fit":
            self._seen = 0

    def on_train_start(self, trainer: RunView, task: Task) -> None:
        """Print which weights the run's values belong to."""
        if trainer.is_global_zero:
            info(
                "EMA: validation, checkpoints and the end of the run use averaged weights (decay"
                f" {self.decay:g}{', beginning smaller: warmup=True' * self.warmup})."
            )

    def on_train_step_end(self, trainer: RunView, task: Task) -> None:
        self._follow(trainer, task)

    def on_validation_start(self, trainer: RunView, task: Task) -> None:
        """Put the average into the model;
        a validation within an epoch comes before `on_train_step_end`.
        """
        if trainer.state.phase == "fit":
            self._follow(trainer, task)
            self._show(trainer, task)

    def on_validation_end(self, trainer: RunView, task: Task) -> None:
        if trainer.state.phase == "fit":
            self._hide()

    def on_save_checkpoint(self, trainer: RunView, task: Task, checkpoint: dict[str, Any]) -> None:
        """Put the average into the model: its weights are written after this hook."""
        if not self._is_shown:  # else the fit has ended, or a validation is running
            self._follow(trainer, task)
            self._show(trainer, task)
            self._shown_to_save = True

    def on_save_checkpoint_end(self, trainer: RunView, task: Task) -> None:
        if self._shown_to_save:
            self._hide()
            self._shown_to_save = False

    def on_train_end(self, trainer: RunView, task: Task) -> None:
        self._show(trainer, task)

    def state_dict(self) -> dict[str, Any]:
        """Return the average's state and the number of updates applied to it."""
        return super().state_dict() | {"seen": self._seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._seen = state_dict["seen"]

    @property
    def _is_shown(self) -> bool:
        return self._average is not None and self._average.shown

    def _follow(self, trainer: RunView, task: Task) -> None:
        """Apply the last optimizer update to the average, once."""
        made = trainer.global_step - trainer.state.skipped_steps
        every, before = self.update_every_n_steps, self._seen
        self._seen = made
        # by hand a batch has any number of updates
        is_due = (made - 1) // every > (before - 1) // every
        if made > self.update_starting_at_step and is_due:
            n = 0 if self._average is None else self._average.num_updates
            self._update(task, min(self.decay, (1 + n) / (10 + n)) if self.warmup else self.decay)
