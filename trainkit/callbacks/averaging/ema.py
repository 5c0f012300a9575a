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

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import Fraction, NonNegativeInt, PositiveInt, checked
from trainkit.console import info
from trainkit.engine.pieces import filling
from trainkit.errors import ConfigError
from trainkit.optim.averaging import WeightAverage


class WeightAveraging(Callback):
    """Base of EMA and StochasticWeightAveraging:
    one average, created by each fit, and its state in a checkpoint.
    """

    needs_of_engine = frozenset({"weights", "equal_weights"})
    use_buffers = False

    def __init__(self) -> None:
        self._average: WeightAverage | None = None
        self._loaded: dict[str, Any] | None = None

    def setup(self, trainer: RunView, task: Task, stage: str) -> None:
        """Reset.

        Raises:
            ConfigError: another callback averages the weights too.
        """
        same = [type(c).__name__ for c in trainer.callbacks if isinstance(c, WeightAveraging)]
        if len(same) > 1:
            raise ConfigError(
                f"{' and '.join(same)} would each put their own average into the model. Keep one of"
                " them."
            )
        if stage == "fit":
            self._average = self._loaded = None

    def on_fit_start(self, trainer: RunView, task: Task) -> None:
        """Restore the checkpoint's average, now that all ranks hold the weights saved with it."""
        if self._loaded is not None:
            self._average = WeightAverage(task, self.use_buffers, filling(trainer.engine.piece_of))
            self._average.load_state_dict(self._loaded)
            self._loaded = None

    def on_exception(self, trainer: RunView, task: Task, exception: BaseException) -> None:
        self._hide()

    def shared_tensors(self) -> dict[str, Any]:
        held = {} if self._average is None else self._average.parameters()
        return {f"{type(self).__name__}'s {name}": average for name, average in held.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the average, or the trained weights if the
        checkpoint's own weights are the average.
        """
        return {"average": None if self._average is None else self._average.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state for `on_fit_start`: only rank 0 has read the weights so far."""
        self._loaded = state_dict["average"]

    def _update(self, task: Task, decay: float | None) -> None:
        if self._average is None:
            self._average = WeightAverage(task, self.use_buffers)
        self._average.update(decay)

    def _show(self, trainer: RunView) -> None:
        """Put the average into the model, if there is one.
        A collective: broadcasts rank 0's buffers, as without averaging.
        """
        if self._average is not None and not self._average.shown:
            # after an error no other rank is here
            if trainer.state.stage != "fit" or not trainer.checkpoints.saves_alone:
                trainer.engine.comm.broadcast_tensors(self._average.buffers())
            self._average.show()

    def _hide(self) -> None:
        if self._average is not None:
            self._average.hide()


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
        update_every_n_steps: optimizer steps between two updates.
        update_starting_at_step: optimizer steps before the first update; until then there is no
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
                f" {self.decay:g})."
            )

    def on_train_step_end(self, trainer: RunView, task: Task) -> None:
        self._follow(trainer, task)

    def on_validation_start(self, trainer: RunView, task: Task) -> None:
        """Put the average into the model;
        a validation within an epoch comes before `on_train_step_end`.
        """
        if trainer.state.stage == "fit":
            self._follow(trainer, task)
            self._show(trainer)

    def on_validation_end(self, trainer: RunView, task: Task) -> None:
        if trainer.state.stage == "fit":
            self._hide()

    def on_save_checkpoint(self, trainer: RunView, task: Task, checkpoint: dict[str, Any]) -> None:
        """Put the average into the model: its weights are written after this hook."""
        if not self._is_shown:  # else the fit has ended, or a validation is running
            self._follow(trainer, task)
            self._show(trainer)
            self._shown_to_save = True

    def on_save_checkpoint_end(self, trainer: RunView, task: Task) -> None:
        if self._shown_to_save:
            self._hide()
            self._shown_to_save = False

    def on_train_end(self, trainer: RunView, task: Task) -> None:
        self._show(trainer)

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
        if made == self._seen:
            return
        self._seen = made
        if (
            made > self.update_starting_at_step
            and (made - self.update_starting_at_step) % self.update_every_n_steps == 0
        ):
            n = 0 if self._average is None else self._average.num_updates
            self._update(task, min(self.decay, (1 + n) / (10 + n)) if self.warmup else self.decay)
